// Packed linear: out[M, N] = a[M, K] . w[N, K]^T, for any M, with a fixed order of additions along K.
//
// A weight is cut into panels of 64 columns, each stored as [k step][64 columns][4 bytes]; a tile computes up to
// kMaxRows rows of one panel with every accumulator in a register and hands the sums to an epilogue, which may add
// a bias, a residual, an activation or keep the largest logit. The order of the additions along K does not depend on
// the rows of the tile, so a row's result is bit-identical alone and in a batch.
//
// Adding a weight format takes one struct with the interface of Bf16Format in vec.h (load_half, broadcast_half, madd), or,
// where sums are not floats, a `run_format` of its own as in gemm_int8.h; all epilogues stay as they are.
#pragma once
#include <memory>

#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int kStreamAhead = 4096;  // bytes; Sapphire Rapids: 31 instead of 19 GB/s for 4 rows
#else
constexpr int kStreamAhead = 1024;
#endif

// Sums of `R` rows and `V * 16` columns of one panel, with `lines` cache lines of `ahead` prefetched per k step. With
// `keeps` the weights are left in `kept` as floats on the way, [k][64 columns].
template <class F, int R, int V, bool keeps>
AIOCB_INLINE void compute_part(const char* a, int64_t a_stride, const char* b, int steps, const char* ahead, int lines,
                               float* kept, float* out) {
  F16 acc[R][V];
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = zero();
  for (int k = 0; k < steps; ++k) {
    AIOCB_UNROLL for (int half = 0; half < F::kHalves; ++half) {
      typename F::B weights[V];
      AIOCB_UNROLL for (int v = 0; v < V; ++v) weights[v] = F::load_half(b + v * 64, half);
      if constexpr (keeps) {
        AIOCB_UNROLL for (int v = 0; v < V; ++v) store(kept + v * 16, weights[v]);
        kept += kPanel;
      }
      AIOCB_UNROLL for (int r = 0; r < R; ++r) {
        const typename F::A row = F::broadcast_half(a + r * a_stride, half);
        AIOCB_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = F::madd(acc[r][v], row, weights[v]);
      }
    }
    a += wide_bytes<F>();
    b += kPanel * 4;
    for (int line = 0; line < lines; ++line) prefetch_l2(ahead + line * 64);
    ahead += lines * 64;
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kPanel + v * 16, acc[r][v]);
}

template <class F, int R, bool keeps>
__attribute__((noinline)) void compute_tile(const char* a, int64_t a_stride, const char* b, int steps,
                                            const char* ahead, int lines, float* kept, float* out) {
  // One row alone would wait for its own sums: twice the columns keep the multipliers busy.
  constexpr int kWidth = R == 1 && kVectors == 1 ? 2 : kVectors;
  for (int part = 0; part < kPanel / 16; part += kWidth)
    compute_part<F, R, kWidth, keeps>(a, a_stride, b + part * 64, steps, ahead, part ? 0 : lines, kept + part * 16,
                                      out + part * 16);
}

template <class F, bool keeps = false>
AIOCB_INLINE void compute_rows(int rows, const char* a, int64_t a_stride, const char* b, int steps, const char* ahead,
                               int lines, float* out, float* kept = nullptr) {
#define AIOCB_CASE(n)                                                                                             \
  case n:                                                                                                         \
    if constexpr (n <= kMaxRows) compute_tile<F, n, keeps>(a, a_stride, b, steps, ahead, lines, kept, out);       \
    return
  switch (rows) {
    AIOCB_CASE(1);
    AIOCB_CASE(2);
    AIOCB_CASE(3);
    AIOCB_CASE(4);
    AIOCB_CASE(5);
    AIOCB_CASE(6);
  }
#undef AIOCB_CASE
}

// Rows [first, first + count) of block `index` when `rows` are cut into `blocks` of even size (33 = 7+7+7+6+6).
AIOCB_INLINE void even_block(int rows, int blocks, int index, int* first, int* count) {
  int small = rows / blocks, larger = rows % blocks;
  *first = index * small + (index < larger ? index : larger);
  *count = small + (index < larger ? 1 : 0);
}

// First panel that a thread will read of `linear`: what the previous stage prefetches while it finishes.
AIOCB_INLINE const char* first_panel(const Linear& linear, int thread, int num_threads) {
  return linear.data + (int64_t(linear.panels) * thread / num_threads) * linear.panel_bytes;
}

// Compute this thread's share. `next` is where the thread's next stage begins to read (prefetched during the last panel).
// epilogue(first_row, rows, panel, sums[rows][64]) owns those outputs: no other thread sees them in this stage.
//
// The share is a contiguous range of (panel, row block) pairs, panel-major: the threads are balanced to one row block
// even when the panels do not divide, and a panel stays in L2 while the rows pass over it.
template <class F, class Epilogue>
AIOCB_INLINE void run_format(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                             int thread, int num_threads, Epilogue& epilogue) {
  alignas(64) float sums[kMaxRows * kPanel];
  const int blocks = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t total = int64_t(linear.panels) * blocks;
  const int64_t begin = total * thread / num_threads, end = total * (thread + 1) / num_threads;
  const int steps = linear.depth / F::kStep;
  // Several row blocks: the next panel arrives in L2 piece by piece while this one is reused, 2 lines a step by two
  // blocks or 1 by each of four. One block reads every weight once: a plain stream, asked for a kilobyte ahead. Fetching
  // the next panel there would break the processor's own streams (measured: 31 instead of 51 GB/s).
  const int lines = blocks == 1 ? 4 : blocks < 4 ? 2 : 1;
  for (int64_t item = begin; item < end; ++item) {
    const int panel = int(item / blocks), block = int(item % blocks);
    int first, count;
    even_block(rows, blocks, block, &first, &count);
    const char* b = linear.data + panel * linear.panel_bytes;
    if (blocks == 1) {
      compute_rows<F>(count, a, a_stride, b, steps, b + kStreamAhead, lines, sums);
      epilogue(first, count, panel, sums);
      continue;
    }
    const char* ahead = (item - block + blocks < end) ? b + linear.panel_bytes : next;
    const bool fetches = ahead != nullptr && block * lines < 4;
    compute_rows<F>(count, a + first * a_stride, a_stride, b, steps,
                    fetches ? ahead + int64_t(block) * lines * steps * 64 : b, fetches ? lines : 0, sums);
    epilogue(first, count, panel, sums);
  }
}

// ---- pairs multiplied as floats ---------------------------------------------------------------------------------

constexpr int kWideRows = 132;  // rows that are wide at a time: with a panel they fit the second-level cache

// At least `bytes` of this thread's own, kept from call to call.
inline char* wide_memory(size_t bytes) {
  struct Memory {
    std::unique_ptr<char[]> data;
    size_t size = 0;
  };
  static thread_local Memory memory;
  if (bytes > memory.size) memory.data.reset(new char[(memory.size = bytes) + 64]);
  return reinterpret_cast<char*>((uintptr_t(memory.data.get()) + 63) / 64 * 64);
}

inline void widen_row(const uint16_t* row, int depth, float* out) {
  int i = 0;
  for (; i + 16 <= depth; i += 16) store(out + i, load(row + i));
  for (; i < depth; ++i) out[i] = bf16_to_float(row[i]);
}

// As run_format, where a step has halves: the first tile of a panel takes its pairs apart for those that follow. Every
// tile adds the products one after another along K, so all of them yield the same sums.
template <class F, class Epilogue>
AIOCB_INLINE void run_widened(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                              int thread, int num_threads, Epilogue& epilogue) {
  alignas(64) float sums[kMaxRows * kPanel];
  const int depth = linear.depth, chunks = (rows + kWideRows - 1) / kWideRows;
  const int64_t stride = (int64_t(depth) * 4 + 63) / 64 * 64 + kRowPad, panel_bytes = int64_t(depth) * kPanel * 4;
  char* wide_panel = wide_memory(size_t(panel_bytes + (rows + chunks - 1) / chunks * stride));
  char* wide_rows = wide_panel + panel_bytes;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    int chunk_first, chunk_rows;
    even_block(rows, chunks, chunk, &chunk_first, &chunk_rows);
    for (int r = 0; r < chunk_rows; ++r)
      widen_row(reinterpret_cast<const uint16_t*>(a + (chunk_first + r) * a_stride), depth,
                reinterpret_cast<float*>(wide_rows + r * stride));
    const int blocks = (chunk_rows + kMaxRows - 1) / kMaxRows;
    const int64_t total = int64_t(linear.panels) * blocks;
    const int64_t begin = total * thread / num_threads, end = total * (thread + 1) / num_threads;
    const char* after = chunk + 1 < chunks ? linear.data + begin / blocks * linear.panel_bytes : next;
    for (int64_t item = begin; item < end; ++item) {
      const int panel = int(item / blocks), block = int(item % blocks);
      const char* b = linear.data + panel * linear.panel_bytes;
      int first, count;
      even_block(chunk_rows, blocks, block, &first, &count);
      const char* own = wide_rows + first * stride;
      if (blocks == 1) {
        compute_rows<F>(count, own, stride, b, depth / 2, b + kStreamAhead, 4, sums);
      } else {
        // The next panel arrives while this one is reused: each of two blocks asks for half of it.
        const char* ahead = item - block + blocks < end ? b + linear.panel_bytes : after;
        const int lines = ahead != nullptr && block < 2 ? 1 : 0;
        ahead = lines ? ahead + int64_t(block) * depth * 64 : b;
        if (blocks == 2)  // the other block would not save what keeping costs
          compute_rows<F>(count, own, stride, b, depth / 2, ahead, 2 * lines, sums);
        else if (item == begin || block == 0)
          compute_rows<F, true>(count, own, stride, b, depth / 2, ahead, 2 * lines, sums,
                                reinterpret_cast<float*>(wide_panel));
        else
          compute_rows<F32Format>(count, own, stride, wide_panel, depth, ahead, lines, sums);
      }
      epilogue(chunk_first + first, count, panel, sums);
    }
  }
}

template <class F, class Epilogue>
AIOCB_INLINE void run_int8(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                           int thread, int num_threads, Epilogue& epilogue);  // gemm_int8.h

// `F` is the format of the activations; a linear whose weights have a format of their own is dispatched here.
template <class F, class Epilogue>
AIOCB_INLINE void run_linear(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                             int thread, int num_threads, Epilogue& epilogue) {
  if (linear.format == kInt8) {
    run_int8<F>(linear, a, a_stride, rows, next, thread, num_threads, epilogue);
  } else if constexpr (F::kHalves == 2) {
    run_widened<F>(linear, a, a_stride, rows, next, thread, num_threads, epilogue);
  } else {
    run_format<F>(linear, a, a_stride, rows, next, thread, num_threads, epilogue);
  }
}

// ---- epilogues ------------------------------------------------------------------------------------------------

// out = sums + bias
struct StoreEpilogue {
  float* out;
  int64_t stride;  // floats
  int columns;
  const float* bias;
  AIOCB_INLINE void operator()(int first, int rows, int panel, const float* sums) const {
    const int width = columns - panel * kPanel < kPanel ? columns - panel * kPanel : kPanel;
    for (int r = 0; r < rows; ++r) {
      float* target = out + (first + r) * stride + panel * kPanel;
      if (width == kPanel) {
        for (int c = 0; c < kPanel; c += 16) {
          F16 value = load(sums + r * kPanel + c);
          store(target + c, bias ? value + load(bias + panel * kPanel + c) : value);
        }
      } else {
        for (int c = 0; c < width; ++c) target[c] = sums[r * kPanel + c] + (bias ? bias[panel * kPanel + c] : 0.0f);
      }
    }
  }
};

// out += scale * (sums + bias)
struct ResidualEpilogue {
  float* out;
  int64_t stride;
  int columns;
  const float* bias;
  float scale;
  AIOCB_INLINE void operator()(int first, int rows, int panel, const float* sums) const {
    const int width = columns - panel * kPanel < kPanel ? columns - panel * kPanel : kPanel;
    for (int r = 0; r < rows; ++r) {
      float* target = out + (first + r) * stride + panel * kPanel;
      for (int c = 0; c + 16 <= width; c += 16) {
        F16 value = load(sums + r * kPanel + c);
        if (bias) value = value + load(bias + panel * kPanel + c);
        store(target + c, fma(set1(scale), value, load(target + c)));
      }
      for (int c = width & ~15; c < width; ++c)
        target[c] += scale * (sums[r * kPanel + c] + (bias ? bias[panel * kPanel + c] : 0.0f));
    }
  }
};

AIOCB_INLINE F16 activate(int kind, F16 x) {
  switch (kind) {
    case kSilu: return x / (set1(1.0f) + exp(zero() - x));
    case kGeluTanh: {
      F16 u = set1(0.7978845608028654f) * fma(set1(0.044715f) * x, x * x, x);
      return set1(0.5f) * x * (set1(1.0f) + tanh(u));
    }
    case kGeluErf: return set1(0.5f) * x * (set1(1.0f) + erf(x * set1(0.7071067811865476f)));
    case kRelu2: {
      F16 y = max(x, zero());
      return y * y;
    }
    default: return max(x, zero());
  }
}

// Gated: a panel holds 32 gate and 32 up columns, so act(gate) * up needs nothing of another tile. Plain: act(x).
template <class E>
struct ActivationEpilogue {
  char* out;
  int64_t stride;  // bytes
  int columns;     // of the output
  const float* bias;
  int kind;
  bool gated;
  AIOCB_INLINE void put(E* target, int column, F16 value) const {
    if (column + 16 <= columns) {
      store(target + column, value);
    } else {
      E lanes[16];
      store(lanes, value);
      for (int i = 0; column + i < columns; ++i) target[column + i] = lanes[i];
    }
  }
  AIOCB_INLINE void operator()(int first, int rows, int panel, const float* sums) const {
    for (int r = 0; r < rows; ++r) {
      E* target = reinterpret_cast<E*>(out + (first + r) * stride);
      const float* row = sums + r * kPanel;
      const float* extra = bias ? bias + panel * kPanel : nullptr;
      if (gated) {
        for (int c = 0; c < 32; c += 16) {
          F16 gate = load(row + c), up = load(row + 32 + c);
          if (extra) gate = gate + load(extra + c), up = up + load(extra + 32 + c);
          put(target, panel * 32 + c, activate(kind, gate) * up);
        }
      } else {
        for (int c = 0; c < kPanel; c += 16) {
          F16 value = load(row + c);
          if (extra) value = value + load(extra + c);
          put(target, panel * kPanel + c, activate(kind, value));
        }
      }
    }
  }
};

// Logits of the sampled rows: scaled and capped; the largest of this thread's columns is kept (ties: the lowest id,
// because panels come in ascending order), and rows that are sampled elsewhere are written out. A NaN wins over all: its
// row ends with +inf and id -1. A row of nothing but -inf keeps the id that it came with.
struct LogitsEpilogue {
  float scale, softcap;
  int columns;
  const float* bias;
  const int32_t* slots;
  float* logits;
  float* best_values;
  int32_t* best_ids;
  AIOCB_INLINE void operator()(int first, int rows, int panel, const float* sums) const {
    const int base = panel * kPanel;
    const int width = columns - base < kPanel ? columns - base : kPanel;
    for (int r = 0; r < rows; ++r) {
      alignas(64) float row[kPanel];
      const F16 infinity = set1(__builtin_inff());
      F16 largest = set1(-__builtin_inff());
      for (int c = 0; c < kPanel; c += 16) {
        F16 value = load(sums + r * kPanel + c);
        if (bias) value = value + load(bias + base + c);
        value = value * set1(scale);
        if (softcap > 0.0f)
          value = select_less(value, infinity, set1(softcap) * tanh(value * set1(1.0f / softcap)), value);
        if (c + 16 > width) value = keep_lanes(value, 0, width - c, -__builtin_inff());
        largest = max(largest, select_less(value, infinity, value, infinity));  // NaN counts as +inf
        store(row + c, value);
      }
      const float peak = reduce_max(largest);
      bool has_nan = false;
      if (peak > 3.4028235e38f)
        for (int c = 0; c < width; ++c) has_nan |= row[c] != row[c];
      if (has_nan) {
        best_values[first + r] = peak;
        best_ids[first + r] = -1;
      } else if (peak > best_values[first + r]) {
        best_values[first + r] = peak;
        for (int c = 0; c < width; ++c)
          if (row[c] == peak) {
            best_ids[first + r] = base + c;
            break;
          }
      }
      const int slot = slots ? slots[first + r] : -1;
      if (slot >= 0) std::memcpy(logits + int64_t(slot) * columns + base, row, size_t(width) * 4);
    }
  }
};

}  // namespace AIOCB_ISA
}  // namespace aiocb
