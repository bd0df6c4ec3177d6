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
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int kStreamAhead = 4096;  // bytes; Emerald Rapids: 31 instead of 19 GB/s for 4 rows
#else
constexpr int kStreamAhead = 1024;
#endif

// What a tile does besides: `lines` cache lines of `ahead` are asked for per k step; `continues` adds to the sums that
// are there, of the steps before; with `kept` the weights are left there as floats, [k][64 columns].
struct Aside {
  const char* ahead;
  int lines;
  bool continues;
  float* kept;
};

// Sums of `R` rows and `V * 16` columns of one panel.
template <class F, int R, int V, bool keeps>
AIOCB_INLINE void compute_part(const char* a, int64_t a_stride, const char* b, int steps, Aside aside, float* out) {
  const char* ahead = aside.ahead;
  float* kept = aside.kept;
  F16 acc[R][V];
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = aside.continues ? load(out + r * kPanel + v * 16) : zero();
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
    for (int line = 0; line < aside.lines; ++line) prefetch_l2(ahead + line * 64);
    ahead += aside.lines * 64;
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kPanel + v * 16, acc[r][v]);
}

template <class F, int R, bool keeps>
__attribute__((noinline)) void compute_tile(const char* a, int64_t a_stride, const char* b, int steps,
                                            const Aside& aside, float* out) {
  // One row alone would wait for its own sums: twice the columns keep the multipliers busy.
  constexpr int kWidth = R == 1 && kVectors == 1 ? 2 : kVectors;
  for (int part = 0; part < kPanel / 16; part += kWidth)
    compute_part<F, R, kWidth, keeps>(a, a_stride, b + part * 64, steps,
                                      {aside.ahead, part ? 0 : aside.lines, aside.continues,
                                       keeps ? aside.kept + part * 16 : nullptr},
                                      out + part * 16);
}

template <class F, bool keeps = false>
AIOCB_INLINE void compute_rows(int rows, const char* a, int64_t a_stride, const char* b, int steps, const Aside& aside,
                               float* out) {
#define AIOCB_CASE(n)                                                                                 \
  case n:                                                                                             \
    if constexpr (n <= kMaxRows) compute_tile<F, n, keeps>(a, a_stride, b, steps, aside, out);        \
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

// This lane's part of `count` things.
struct Share {
  int begin, end;
};
AIOCB_INLINE Share share_of(int count, const Lane& lane) {
  return {int(int64_t(count) * lane.thread / lane.num_threads), int(int64_t(count) * (lane.thread + 1) / lane.num_threads)};
}

// First panel that a thread will read of `linear`: what the previous stage prefetches while it finishes.
AIOCB_INLINE const char* first_panel(const Linear& linear, const Lane& lane) {
  return linear.data + share_of(linear.panels, lane).begin * linear.panel_bytes;
}

constexpr int kGroupRows = 132;               // rows that pass over a panel together
constexpr int kChunkBytes = 256 << 10;        // of a panel: it stays in the second-level cache while the rows pass
constexpr int kStepBytes = kPanel * 4;

// Where pairs are multiplied as floats, a lane's scratch holds a chunk of a panel and the rows of a group, widened.
struct WideLayout {
  int chunks;
  int64_t chunk_bytes, row_stride;
};
template <class F>
AIOCB_INLINE WideLayout wide_layout(int depth) {
  const int steps = depth / F::kStep, chunks = 1 + (steps * kStepBytes * F::kHalves - 1) / kChunkBytes;
  return {chunks, int64_t((steps + chunks - 1) / chunks) * kStepBytes * 2, (int64_t(depth) * 4 + 63) / 64 * 64 + kRowPad};
}
inline int64_t linear_scratch(int format, int depth, int rows) {
  if (format != kBf16 || Bf16Format::kHalves == 1) return 0;
  const WideLayout wide = wide_layout<Bf16Format>(depth);
  return wide.chunk_bytes + (rows < kGroupRows ? rows : kGroupRows) * wide.row_stride;
}

inline void widen_row(const uint16_t* row, int depth, float* out) {
  int i = 0;
  for (; i + 16 <= depth; i += 16) store(out + i, load(row + i));
  for (; i < depth; ++i) out[i] = bf16_to_float(row[i]);
}

// One of several tiles over the same `steps` of a panel, `order` being its place among `count` of them. They share out
// what comes `ahead`, four lines a step, among the first few. Pairs are taken apart by the first tile for all others,
// unless there are so few that keeping them costs more.
template <class F>
AIOCB_INLINE void compute_shared(int order, int count, int rows, const char* a, int64_t a_stride, const char* b,
                                 int steps, const char* ahead, bool continues, float* wide, float* out) {
  if constexpr (F::kHalves == 2) {
    const int64_t half = int64_t(steps) * 128;
    const bool fetches = ahead != nullptr && order < 2;
    const Aside aside = {fetches ? ahead + order * half : b, fetches ? 2 : 0, continues, nullptr};
    if (count < 3)
      compute_rows<F>(rows, a, a_stride, b, steps, aside, out);
    else if (order == 0)
      compute_rows<F, true>(rows, a, a_stride, b, steps, {aside.ahead, aside.lines, continues, wide}, out);
    else
      compute_rows<F32Format>(rows, a, a_stride, reinterpret_cast<const char*>(wide), 2 * steps,
                              {aside.ahead, aside.lines / 2, continues, nullptr}, out);
  } else {
    const int lines = count < 4 ? 2 : 1;
    const bool fetches = ahead != nullptr && order * lines < 4;
    compute_rows<F>(rows, a, a_stride, b, steps,
                    {fetches ? ahead + int64_t(order) * lines * steps * 64 : b, fetches ? lines : 0, continues, nullptr},
                    out);
  }
}

// Compute this thread's share. `next` is where the thread's next stage begins to read (prefetched during the last panel).
// epilogue(first_row, rows, panel, sums[rows][64]) owns those outputs: no other thread sees them in this stage.
//
// The share is a contiguous range of (panel, row block) pairs, panel-major: the threads are balanced to one row block
// even when the panels do not divide, and a panel stays in L2 while the rows pass over it; a deep one in chunks. Sums
// are floats between chunks as within them, and every tile adds along K in the same order.
template <class F, class Epilogue>
AIOCB_INLINE void run_format(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                             const Lane& lane, Epilogue& epilogue) {
  alignas(64) float sums[kGroupRows * kPanel];
  const int steps = linear.depth / F::kStep, groups = (rows + kGroupRows - 1) / kGroupRows;
  const WideLayout wide = wide_layout<F>(linear.depth);
  for (int group = 0; group < groups; ++group) {
    int group_first, group_rows;
    even_block(rows, groups, group, &group_first, &group_rows);
    const char* group_a = a + group_first * a_stride;
    int64_t stride = a_stride;
    if constexpr (F::kHalves == 2) {
      char* wide_rows = lane.scratch + wide.chunk_bytes;
      for (int r = 0; r < group_rows; ++r)
        widen_row(reinterpret_cast<const uint16_t*>(group_a + r * a_stride), linear.depth,
                  reinterpret_cast<float*>(wide_rows + r * wide.row_stride));
      group_a = wide_rows, stride = wide.row_stride;
    }
    const int blocks = (group_rows + kMaxRows - 1) / kMaxRows;
    const int64_t total = int64_t(linear.panels) * blocks;
    const int64_t begin = total * lane.thread / lane.num_threads, end = total * (lane.thread + 1) / lane.num_threads;
    const char* after = group + 1 < groups ? linear.data + begin / blocks * linear.panel_bytes : next;
    for (int64_t panel = begin / blocks; panel * blocks < end; ++panel) {
      const char* b = linear.data + panel * linear.panel_bytes;
      if (blocks == 1) {
        // Every weight is read once: a plain stream, asked for some way ahead. Fetching the next panel there would break
        // the processor's own streams (measured: 31 instead of 51 GB/s).
        compute_rows<F>(group_rows, group_a, stride, b, steps, {b + kStreamAhead, 4, false, nullptr}, sums);
        epilogue(group_first, group_rows, int(panel), sums);
        continue;
      }
      const int from = panel * blocks < begin ? int(begin - panel * blocks) : 0;
      const int to = (panel + 1) * blocks > end ? int(end - panel * blocks) : blocks;
      for (int chunk = 0; chunk < wide.chunks; ++chunk) {
        int step, count;
        even_block(steps, wide.chunks, chunk, &step, &count);
        const char* weights = b + int64_t(step) * kStepBytes;
        const char* ahead = chunk + 1 < wide.chunks ? weights + int64_t(count) * kStepBytes
                            : (panel + 1) * blocks < end ? b + linear.panel_bytes : after;
        for (int block = from; block < to; ++block) {
          int first, block_rows;
          even_block(group_rows, blocks, block, &first, &block_rows);
          float* block_sums = sums + (block - from) * (kMaxRows * kPanel);
          compute_shared<F>(block - from, to - from, block_rows, group_a + first * stride + step * wide_bytes<F>(), stride,
                            weights, count, ahead, chunk > 0, reinterpret_cast<float*>(lane.scratch), block_sums);
          if (chunk + 1 == wide.chunks) epilogue(group_first + first, block_rows, int(panel), block_sums);
        }
      }
    }
  }
}

template <class F, class Epilogue>
AIOCB_INLINE void run_int8(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                           const Lane& lane, Epilogue& epilogue);  // gemm_int8.h

// `F` is the format of the activations; a linear whose weights have a format of their own is dispatched here.
template <class F, class Epilogue>
AIOCB_INLINE void run_linear(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                             const Lane& lane, Epilogue& epilogue) {
  if (linear.format == kInt8)
    run_int8<F>(linear, a, a_stride, rows, next, lane, epilogue);
  else
    run_format<F>(linear, a, a_stride, rows, next, lane, epilogue);
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
