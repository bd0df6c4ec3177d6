// Packed linear: out[M, N] = a[M, K] . w[N, K]^T, for any M, with a fixed order of additions along K.
//
// A weight is cut into panels of 64 columns, each stored as [k step][64 columns][4 bytes]; a tile computes up to
// kMaxRows rows of one panel with every accumulator in a register and hands the sums to an epilogue, which may add
// a bias, a residual, an activation or keep the largest logit. The order of the additions along K does not depend on
// the rows of the tile, so a row's result is bit-identical alone and in a batch.
//
// These are the formats that are multiplied as floats; what a format consists of is said in linear.h.
#pragma once
#include <type_traits>

#include "model.h"
#include "sources.h"
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
  bool adds = aside.continues;
  for (int first = 0; first < steps; adds = true) {
    const int stop = F::kRun && steps - first > F::kRun ? first + F::kRun : steps;
    AIOCB_UNROLL for (int r = 0; r < R; ++r)
      AIOCB_UNROLL for (int v = 0; v < V; ++v)
        acc[r][v] = !F::kRun && adds ? load(out + r * kPanel + v * 16) : zero();
    for (; first < stop; ++first) {
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
      AIOCB_UNROLL for (int v = 0; v < V; ++v) {
        float* sum = out + r * kPanel + v * 16;
        store(sum, F::kRun && adds ? load(sum) + acc[r][v] : acc[r][v]);
      }
  }
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

// work(n) for a number of rows that the compiler knows: at most `kMost`, and six.
template <int kMost, class Work>
AIOCB_INLINE void with_rows(int rows, const Work& work) {
#define AIOCB_CASE(n)                                                         \
  case n:                                                                     \
    if constexpr (n <= kMost) work(std::integral_constant<int, n>());         \
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

template <class F, bool keeps = false>
AIOCB_INLINE void compute_rows(int rows, const char* a, int64_t a_stride, const char* b, int steps, const Aside& aside,
                               float* out) {
  with_rows<kMaxRows>(rows, [&](auto n) { compute_tile<F, decltype(n)::value, keeps>(a, a_stride, b, steps, aside, out); });
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

// Rows of activations, `stride` bytes apart; `is_prepared` where prepare_row (linear.h) has made them.
struct Input {
  const char* rows;
  int64_t stride;
  int count;
  bool is_prepared = false;
};

constexpr int kGroupRows = 132;               // rows that pass over a panel together
constexpr int kChunkBytes = 256 << 10;        // of a panel: it stays in the second-level cache while the rows pass
constexpr int kStepBytes = kPanel * 4;

// Steps [first, first + count) of chunk `index` of a panel: whole runs, so that they are the same without chunks.
template <class F>
AIOCB_INLINE void even_chunk(int steps, int chunks, int index, int* first, int* count) {
  constexpr int kRun = F::kRun ? F::kRun : 1;
  static_assert(kRun * kStepBytes <= kChunkBytes, "a run belongs to one chunk");
  even_block((steps + kRun - 1) / kRun, chunks, index, first, count);
  *first *= kRun, *count *= kRun;
  if (*first + *count > steps) *count = steps - *first;
}

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
      compute_rows<WidenedFormat>(rows, a, a_stride, reinterpret_cast<const char*>(wide), 2 * steps,
                                  {aside.ahead, aside.lines / 2, continues, nullptr}, out);
  } else {
    const int lines = count < 4 ? 2 : 1;
    const bool fetches = ahead != nullptr && order * lines < 4;
    compute_rows<F>(rows, a, a_stride, b, steps,
                    {fetches ? ahead + int64_t(order) * lines * steps * 64 : b, fetches ? lines : 0, continues, nullptr},
                    out);
  }
}

// Compute this thread's share; see run_linear.
//
// The share is a contiguous range of (panel, row block) pairs, panel-major: the threads are balanced to one row block
// even when the panels do not divide, and a panel stays in L2 while the rows pass over it; a deep one in chunks. Sums
// are floats between chunks as within them, and every tile adds along K in the same order.
template <class F, class Epilogue>
AIOCB_INLINE void run_floats(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                             Epilogue& epilogue) {
  const int rows = input.count;
  const int64_t a_stride = input.stride;
  alignas(64) float sums[kGroupRows * kPanel];
  const int steps = linear.depth / F::kStep, groups = (rows + kGroupRows - 1) / kGroupRows;
  const WideLayout wide = wide_layout<F>(linear.depth);
  for (int group = 0; group < groups; ++group) {
    int group_first, group_rows;
    even_block(rows, groups, group, &group_first, &group_rows);
    const char* group_a = input.rows + group_first * a_stride;
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
        even_chunk<F>(steps, wide.chunks, chunk, &step, &count);
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

// Move bits, without a conversion. A cache line of every row at a time, so that what is written stays in L1.
inline void pack_pairs(const char* const* rows, int depth, int steps, char* out) {
  constexpr int kLine = 16;  // steps
  const int whole = depth / 2;
  for (int first = 0; first < steps; first += kLine) {
    const int last = first + kLine < steps ? first + kLine : steps;
    for (int column = 0; column < kPanel; ++column) {
      const char* row = rows[column];
      char* target = out + column * 4;
      const int stop = !row ? first : last < whole ? last : whole;
      for (int k = first; k < stop; ++k) std::memcpy(target + k * (kPanel * 4), row + k * 4, 4);
      for (int k = stop; k < last; ++k) {
        uint16_t pair[2] = {0, 0};
        if (row && 2 * k < depth) std::memcpy(pair, row + k * 4, 2);
        std::memcpy(target + k * (kPanel * 4), pair, 4);
      }
    }
  }
}

AIOCB_INLINE float to_float(float value) { return value; }
AIOCB_INLINE float to_float(uint16_t value) { return bf16_to_float(value); }
AIOCB_INLINE void from_float(float value, float* out) { *out = value; }
AIOCB_INLINE void from_float(float value, uint16_t* out) { *out = float_to_bf16(value); }

// Weights that are multiplied with activations of their own format. Panel: [k step][64 columns][4 bytes].
template <class F>
struct FloatWeights {
  typedef typename F::Element E;
  static constexpr bool kQuantizes = false;
  static constexpr int64_t (*row_bytes)(int depth) = nullptr;
  template <class Activations>
  static constexpr bool takes() { return std::is_same<Activations, F>::value; }

  static int64_t scratch(int depth, int rows) {
    if (F::kHalves == 1) return 0;
    const WideLayout wide = wide_layout<F>(depth);
    return wide.chunk_bytes + (rows < kGroupRows ? rows : kGroupRows) * wide.row_stride;
  }

  static AIOCB_INLINE void prepare_row(const E* x, int depth, char* out) {
    std::memcpy(out, x, size_t(depth) * sizeof(E));
  }

  template <class Epilogue>
  static AIOCB_INLINE void multiply(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                                    Epilogue& epilogue) {
    run_floats<F>(linear, input, next, lane, epilogue);
  }

  static void pack(const Linear& linear, const PackArgs& args, int first_panel, int last_panel) {
    const int steps = linear.depth / F::kStep;
    for (int panel = first_panel; panel < last_panel; ++panel) {
      char* out = linear.data + panel * linear.panel_bytes;
      bool is_copied = F::kStep == 2;  // the common case
      for (int column = 0; column < kPanel; ++column) is_copied &= args.sources[panel * kPanel + column] == kBf16Source;
      if (is_copied) {
        pack_pairs(args.rows + panel * kPanel, args.depth, steps, out);
        continue;
      }
      for (int column = 0; column < kPanel; ++column) {
        const char* row = args.rows[panel * kPanel + column];
        for (int k = 0; k < linear.depth; k += kInt8Group) {
          float values[kInt8Group] = {};
          const int count = args.depth - k < kInt8Group ? args.depth - k : kInt8Group;
          if (row && count > 0) read_source(args.sources[panel * kPanel + column], row, k, count, values);
          for (int i = 0; i < kInt8Group && k + i < linear.depth; i += F::kStep) {
            E packed[F::kStep];
            for (int j = 0; j < F::kStep; ++j) from_float(values[i + j], packed + j);
            std::memcpy(out + (k + i) / F::kStep * kStepBytes + column * 4, packed, 4);
          }
        }
      }
    }
  }

  static void unpack(const Linear& linear, int column, float* out) {
    const char* source = linear.data + column / kPanel * linear.panel_bytes + column % kPanel * 4;
    for (int k = 0; k < linear.depth; k += F::kStep, source += kPanel * 4)
      for (int i = 0; i < F::kStep; ++i) out[k + i] = to_float(reinterpret_cast<const E*>(source)[i]);
  }

  static int64_t multiply_add(int repeats) {
    // Pairs that are multiplied as floats cannot be faster than those.
    if constexpr (F::kHalves == 2) return FloatWeights<F32Format>::multiply_add(repeats);
    constexpr int kSteps = 64, kStride = kSteps * 4 + 64;
    alignas(64) char weights[kSteps * kPanel * 4] = {}, rows[kMaxRows * kStride] = {};
    alignas(64) float sums[kMaxRows * kPanel];
    for (int i = 0; i < repeats; ++i) {
      compute_rows<F>(kMaxRows, rows, kStride, weights, kSteps, {weights, 0, false, nullptr}, sums);
      asm volatile("" : : "r"(sums) : "memory");  // or the compiler sees that nobody reads the sums
    }
    return int64_t(repeats) * kMaxRows * kPanel * kSteps * F::kStep;
  }
};
typedef FloatWeights<F32Format> F32Weights;
typedef FloatWeights<Bf16Format> Bf16Weights;

}  // namespace AIOCB_ISA
}  // namespace aiocb
