// Int8 linear: weights and activations in eight bits, both scaled in groups of 32 along K.
//
// A column's weights are q * scale with q in [-127, 127] and one scale per group; a row of activations is quantised
// when a stage reads it, the same way. The product of a group is a sum of integers, exact on every instruction set;
// groups are added as floats in ascending order. A row's result therefore depends on nothing but the row.
//
// One scale per row or column is faster but cannot be used: a few channels are a hundred times larger than the others
// and leave those no bits (docs/int8.md has the measurements).
//
// Panel: [group][64 scales as bf16][8 steps][64 columns][4 bytes], a byte being q + 128: the instruction multiplies
// unsigned by signed bytes. The surplus, 128 times the sum of a group's activations, is part of the row's data, where
// it costs nothing: sums begin at -128 * sum instead of at zero.
#pragma once
#include "dispatch.h"
#include "gemm.h"
#include "int8_rows.h"
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kInt8Steps = kInt8Group / 4;                              // four bytes of k each
constexpr int kInt8GroupBytes = kPanel * 2 + kInt8Steps * kPanel * 4;   // of a panel
constexpr int kInt8Candidates = 16;                                     // scales that packing tries

// ---- sixteen sums of products of bytes --------------------------------------------------------------------------
// `Weights` is a vector of four unsigned bytes for each of sixteen columns, `Row` four signed bytes of one row.

#if defined(__AVX512F__)

#if defined(__AVX512VNNI__)
constexpr bool kAlwaysVnni = true;
#else
constexpr bool kAlwaysVnni = false;  // asked at run time
#endif

struct I16 {
  __m512i v;
};
AIOCB_INLINE I16 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
AIOCB_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

struct VnniDot {
  typedef __m512i Weights;
  typedef __m512i Row;
  static AIOCB_INLINE Weights load_weights(const char* p) { return _mm512_loadu_si512(p); }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    // Not the intrinsic: GCC 12 copies its accumulators through memory. It also serves the set compiled without VNNI.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(w), "v"(r));
    return sums;
  }
};

// Without VNNI: even and odd bytes as two sets of 16-bit numbers; pairs of products fit 32 bits.
struct PairDot {
  struct Weights {
    __m512i even, odd;
  };
  typedef Weights Row;
  static AIOCB_INLINE Weights load_weights(const char* p) {
    const __m512i raw = _mm512_loadu_si512(p);
    return {_mm512_and_si512(raw, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(raw, 8)};
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const __m512i raw = _mm512_set1_epi32(bytes);
    return {_mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 8), _mm512_srai_epi16(raw, 8)};
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(_mm512_madd_epi16(w.even, r.even),
                                                      _mm512_madd_epi16(w.odd, r.odd)))};
  }
};

#else  // parts, as in vec.h

constexpr bool kAlwaysVnni = false;
typedef int16_t VS __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VUS __attribute__((vector_size(4 * kLanes)));

struct I16 {
  VI v[kParts];
};
AIOCB_INLINE I16 set1_int(int32_t x) {
  I16 out;
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) out.v[i] = VI{} + x;
  return out;
}
AIOCB_INLINE F16 to_float(I16 a) { AIOCB_PARTS(__builtin_convertvector(a.v[i], VF)); }

#if defined(__AVX2__) || defined(__SSE2__)
AIOCB_INLINE VI multiply_pairs(VS a, VS b) {
#if defined(__AVX2__)
  return (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (VI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
struct PairDot {
  struct Weights {
    VS even[kParts], odd[kParts];
  };
  struct Row {
    VS even, odd;
  };
  static AIOCB_INLINE Weights load_weights(const char* p) {
    Weights out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
      const VI raw = *reinterpret_cast<const VIU*>(p + i * 4 * kLanes);
      out.even[i] = (VS)raw & 0xff;
      out.odd[i] = (VS)((VUS)raw >> 8);
    }
    return out;
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const VS raw = (VS)(VI{} + bytes);
    return {(raw << 8) >> 8, raw >> 8};
  }
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i)
      sums.v[i] += multiply_pairs(w.even[i], r.even) + multiply_pairs(w.odd[i], r.odd);
    return sums;
  }
};
#else
struct PairDot {
  struct Weights {
    VI raw[kParts];
  };
  struct Row {
    int32_t bytes[4];
  };
  static AIOCB_INLINE Weights load_weights(const char* p) {
    Weights out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) std::memcpy(&out.raw[i], p + i * 4 * kLanes, 4 * kLanes);
    return out;
  }
  static AIOCB_INLINE Row load_row(const char* p) {
    const signed char* bytes = reinterpret_cast<const signed char*>(p);
    return {{bytes[0], bytes[1], bytes[2], bytes[3]}};
  }
  // Byte j of a lane is k + j on a little-endian machine, the only kind there is an instruction set for.
  static AIOCB_INLINE I16 dot(I16 sums, Weights w, Row r) {
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i)
      AIOCB_UNROLL for (int j = 0; j < 4; ++j) sums.v[i] += ((w.raw[i] >> (8 * j)) & 0xff) * r.bytes[j];
    return sums;
  }
};
#endif
typedef PairDot VnniDot;
#endif

// ---- tiles ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kInt8TileRows = 6;  // 6 rows x 2 vectors, as integers and as floats, leave 8 of 32 registers
#else
constexpr int kInt8TileRows = 2;
#endif

constexpr int kInt8Turn = 4;  // groups, see compute_int8_tile

// Lines asked for per group, see compute_int8_part.
AIOCB_INLINE int int8_lines(int lines) { return lines * kInt8Steps + (lines == 4 ? 2 : lines ? 1 : 0); }

// Groups [first, last) of `R` rows and `V * 16` columns from vector `part` on, added to `out`. `lines` cache lines of
// `ahead` are asked for per step, and another one or two per group, which has two lines of scales.
template <class Dot, int R, int V>
AIOCB_INLINE void compute_int8_part(const char* a, int64_t a_stride, const char* b, int groups, int first, int last,
                                    int part, const char* ahead, int lines, float* out) {
  F16 acc[R][V];
  const Int8GroupMeta* meta[R];
  out += part * 16;
  AIOCB_UNROLL for (int r = 0; r < R; ++r) {
    meta[r] = reinterpret_cast<const Int8GroupMeta*>(a + r * a_stride + groups * kInt8Group);
    AIOCB_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = first ? load(out + r * kPanel + v * 16) : zero();
  }
  a += first * kInt8Group;
  b += first * kInt8GroupBytes;
  for (int g = first; g < last; ++g) {
    I16 sums[R][V];
    AIOCB_UNROLL for (int r = 0; r < R; ++r) {
      const I16 start = set1_int(meta[r][g].start);
      AIOCB_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = start;
    }
    const char* weights = b + kPanel * 2 + part * 64;
    AIOCB_UNROLL for (int step = 0; step < kInt8Steps; ++step) {
      typename Dot::Weights w[V];
      AIOCB_UNROLL for (int v = 0; v < V; ++v) w[v] = Dot::load_weights(weights + step * kPanel * 4 + v * 64);
      AIOCB_UNROLL for (int r = 0; r < R; ++r) {
        const typename Dot::Row row = Dot::load_row(a + r * a_stride + step * 4);
        AIOCB_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Dot::dot(sums[r][v], w[v], row);
      }
      for (int line = 0; line < lines; ++line) prefetch_l2(ahead + line * 64);
      ahead += lines * 64;
    }
    if (lines) {
      prefetch_l2(ahead);
      if (lines == 4) prefetch_l2(ahead + 64);
      ahead += lines == 4 ? 128 : 64;
    }
    F16 scales[V];
    AIOCB_UNROLL for (int v = 0; v < V; ++v) scales[v] = load(reinterpret_cast<const uint16_t*>(b) + (part + v) * 16);
    AIOCB_UNROLL for (int r = 0; r < R; ++r) {
      const F16 scale = set1(meta[r][g].scale);
      AIOCB_UNROLL for (int v = 0; v < V; ++v)
        acc[r][v] = fma(to_float(sums[r][v]), scales[v] * scale, acc[r][v]);
    }
    a += kInt8Group;
    b += kInt8GroupBytes;
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kPanel + v * 16, acc[r][v]);
}

// Registers hold the integers and the floats of a whole panel for up to three rows. For more, parts of the panel take
// turns every few groups: the weights are still read as one stream.
template <class Dot, int R>
__attribute__((noinline)) void compute_int8_tile(const char* a, int64_t a_stride, const char* b, int groups,
                                                 const char* ahead, int lines, float* out) {
#if defined(__AVX512F__)
  constexpr int V = R <= 3 ? 4 : 2;
#else
  constexpr int V = 1;
#endif
  constexpr int kTurns = kPanel / 16 / V;
  const int turn = kTurns == 1 ? groups : kInt8Turn;
  const int share = lines >= kTurns ? lines / kTurns : 0;
  for (int first = 0; first < groups; first += turn) {
    const int last = first + turn < groups ? first + turn : groups;
    for (int part = 0; part < kTurns; ++part) {
      const int own = share ? share : part ? 0 : lines;
      compute_int8_part<Dot, R, V>(a, a_stride, b, groups, first, last, part * V, ahead, own, out);
      ahead += int64_t(last - first) * int8_lines(own) * 64;
    }
  }
}

typedef void (*Int8Tile)(int rows, const char* a, int64_t a_stride, const char* b, int groups, const char* ahead,
                         int lines, float* out);

template <class Dot>
void compute_int8_rows(int rows, const char* a, int64_t a_stride, const char* b, int groups,
                       const char* ahead, int lines, float* out) {
  switch (rows) {
    case 1: return compute_int8_tile<Dot, 1>(a, a_stride, b, groups, ahead, lines, out);
    case 2: return compute_int8_tile<Dot, 2>(a, a_stride, b, groups, ahead, lines, out);
#if defined(__AVX512F__)
    case 3: return compute_int8_tile<Dot, 3>(a, a_stride, b, groups, ahead, lines, out);
    case 4: return compute_int8_tile<Dot, 4>(a, a_stride, b, groups, ahead, lines, out);
    case 5: return compute_int8_tile<Dot, 5>(a, a_stride, b, groups, ahead, lines, out);
    case 6: return compute_int8_tile<Dot, 6>(a, a_stride, b, groups, ahead, lines, out);
#endif
  }
}

inline Int8Tile best_int8_tile() {
  return kAlwaysVnni || has_vnni() ? compute_int8_rows<VnniDot> : compute_int8_rows<PairDot>;
}

// As run_floats.
template <class Epilogue>
AIOCB_INLINE void run_int8(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                           Epilogue& epilogue) {
  alignas(64) float sums[kInt8TileRows * kPanel];
  const Int8Tile compute = best_int8_tile();
  const char* a = input.rows;
  const int64_t a_stride = input.stride;
  const int rows = input.count, blocks = (rows + kInt8TileRows - 1) / kInt8TileRows, groups = int8_groups(linear.depth);
  const int64_t total = int64_t(linear.panels) * blocks;
  const int64_t begin = total * lane.thread / lane.num_threads, end = total * (lane.thread + 1) / lane.num_threads;
  const int lines = blocks == 1 ? 4 : blocks < 4 ? 2 : 1;  // of the next panel, as in compute_shared
  for (int64_t item = begin; item < end; ++item) {
    const int panel = int(item / blocks), block = int(item % blocks);
    int first, count;
    even_block(rows, blocks, block, &first, &count);
    const char* b = linear.data + panel * linear.panel_bytes;
    if (blocks == 1) {
      const int distance = count > 3 ? kInt8Turn * kInt8GroupBytes : kStreamAhead;
      compute(count, a, a_stride, b, groups, b + distance, lines, sums);
    } else {
      const char* ahead = (item - block + blocks < end) ? b + linear.panel_bytes : next;
      const bool fetches = ahead != nullptr && block * lines < 4;
      compute(count, a + first * a_stride, a_stride, b, groups,
              fetches ? ahead + int64_t(block) * int8_lines(lines) * groups * 64 : b, fetches ? lines : 0, sums);
    }
    epilogue(first, count, panel, sums);
  }
}

// ---- packing ----------------------------------------------------------------------------------------------------

// What a scale costs a group: the squared errors of its weights, each as important as its channel is large.
AIOCB_INLINE float int8_cost(const float* values, const float* importance, float step) {
  const F16 inverse = set1(step > 0.0f ? 1.0f / step : 0.0f), limit = set1(127.0f);
  F16 cost = zero();
  for (int i = 0; i < kInt8Group; i += 16) {
    const F16 value = load(values + i);
    const F16 rounded = max(min(round_to_int(value * inverse), limit), zero() - limit);
    const F16 error = value - rounded * set1(step);
    cost = fma(error * error, load(importance + i), cost);
  }
  return reduce_add(cost);
}

// One group of one column: returns the scale, writes bytes of four, `kPanel * 4` apart.
AIOCB_INLINE uint16_t pack_int8_group(const float* values, const float* importance, char* out) {
  F16 peaks = zero();
  for (int i = 0; i < kInt8Group; i += 16) peaks = max(peaks, abs(load(values + i)));
  const float widest = reduce_max(peaks) * (1.0f / 127.0f);
  uint16_t scale = float_to_bf16(widest);
  if (importance) {
    // Where one channel outweighs its group, some scale meets its weight almost exactly.
    float best = int8_cost(values, importance, bf16_to_float(scale));
    for (int i = 1; i <= kInt8Candidates; ++i) {
      const uint16_t candidate = float_to_bf16(widest * (1.0f - 0.015f * float(i)));
      const float cost = int8_cost(values, importance, bf16_to_float(candidate));
      if (cost < best) best = cost, scale = candidate;
    }
  }
  const float step = bf16_to_float(scale);
  const F16 inverse = set1(step > 0.0f ? 1.0f / step : 0.0f), limit = set1(127.0f);
  float rounded[kInt8Group];
  for (int i = 0; i < kInt8Group; i += 16)
    store(rounded + i, max(min(round_to_int(load(values + i) * inverse), limit), zero() - limit));
  for (int i = 0; i < kInt8Group; ++i) out[i / 4 * kPanel * 4 + i % 4] = char(int(rounded[i]) + 128);
  return scale;
}

// Weights in groups with a scale each, multiplied with rows that are quantised the same way.
struct Int8Weights {
  static constexpr bool kQuantizes = true;
  template <class Activations>
  static constexpr bool takes() { return true; }

  static int64_t scratch(int, int) { return 0; }
  static int64_t row_bytes(int depth) { return int8_row_bytes(depth); }

  template <class E>
  static AIOCB_INLINE void prepare_row(const E* x, int depth, char* out) {
    quantize_row(x, depth, int8_groups(depth), out);
  }

  template <class Epilogue>
  static AIOCB_INLINE void multiply(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                                    Epilogue& epilogue) {
    run_int8(linear, input, next, lane, epilogue);
  }

  static void pack(const Linear& linear, const PackArgs& args, int first_panel, int last_panel) {
    const int groups = int8_groups(linear.depth);
    for (int panel = first_panel; panel < last_panel; ++panel) {
      for (int column = 0; column < kPanel; ++column) {
        const char* row = args.rows[panel * kPanel + column];
        char* out = linear.data + panel * linear.panel_bytes;
        for (int g = 0; g < groups; ++g, out += kInt8GroupBytes) {
          const int first = g * kInt8Group;
          const int count = !row ? 0 : linear.depth - first < kInt8Group ? linear.depth - first : kInt8Group;
          alignas(64) float values[kInt8Group] = {}, importance[kInt8Group] = {};
          for (int i = 0; i < count; ++i) {
            values[i] = source_value(args, row, first + i);
            if (args.input_scales) values[i] *= args.input_scales[first + i];
            if (args.importance) importance[i] = args.importance[first + i];
          }
          reinterpret_cast<uint16_t*>(out)[column] =
              pack_int8_group(values, count && args.importance ? importance : nullptr, out + kPanel * 2 + column * 4);
        }
      }
    }
  }

  static void unpack(const Linear& linear, int column, float* out) {
    const char* group = linear.data + column / kPanel * linear.panel_bytes;
    for (int k = 0; k < linear.depth; ++k) {
      const int i = k % kInt8Group;
      if (k && !i) group += kInt8GroupBytes;
      const float scale = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[column % kPanel]);
      const char* bytes = group + kPanel * 2 + column % kPanel * 4;
      out[k] = float(int(uint8_t(bytes[i / 4 * kPanel * 4 + i % 4])) - 128) * scale;
    }
  }

  static int64_t multiply_add(int repeats) {
    constexpr int kGroups = 4, kStride = kGroups * (kInt8Group + int(sizeof(Int8GroupMeta))) + 64;
    alignas(64) char weights[kGroups * kInt8GroupBytes] = {}, rows[kInt8TileRows * kStride] = {};
    alignas(64) float sums[kInt8TileRows * kPanel];
    const Int8Tile compute = best_int8_tile();
    for (int i = 0; i < repeats; ++i) compute(kInt8TileRows, rows, kStride, weights, kGroups, weights, 0, sums);
    return int64_t(repeats) * kInt8TileRows * kPanel * kGroups * kInt8Group;
  }
};

}  // namespace AIOCB_ISA
}  // namespace aiocb
