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
#include "gemm.h"
#include "model.h"
#include "pool.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kInt8Steps = kInt8Group / 4;                              // four bytes of k each
constexpr int kInt8GroupBytes = kPanel * 2 + kInt8Steps * kPanel * 4;   // of a panel
constexpr int kInt8Candidates = 16;                                     // scales that packing tries

AIOCB_INLINE int int8_groups(int depth) { return (depth + kInt8Group - 1) / kInt8Group; }

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

// ---- activations ------------------------------------------------------------------------------------------------

// A quantised row is its bytes, then one of these per group.
struct Int8GroupMeta {
  float scale;
  int32_t start;  // -128 * (sum of the group)
};
// What a group is multiplied by. A group so small that this would be infinite is one of zeros.
AIOCB_INLINE F16 int8_inverse(float peak) { return set1(peak > 1e-36f ? 127.0f / peak : 0.0f); }

AIOCB_INLINE void store_bytes(char* p, F16 a) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
#else
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = lanes[i] == lanes[i] ? char(int(lanes[i])) : 0;
#endif
}

template <class E>
AIOCB_INLINE F16 load_elements(const E* p, int count) {
  if (count >= 16) return load(p);
  E lanes[16] = {};
  if (count > 0) std::memcpy(lanes, p, size_t(count) * sizeof(E));
  return load(lanes);
}

// `count` elements, filled up with zeros to a group. Returns false for NaN and infinity.
template <class E>
AIOCB_INLINE bool quantize_group(const E* x, int count, char* out, Int8GroupMeta* meta) {
  F16 values[kInt8Group / 16], peaks = zero(), nan = zero(), sum = zero();
  AIOCB_UNROLL for (int i = 0; i < kInt8Group / 16; ++i) {
    values[i] = load_elements(x + i * 16, count - i * 16);
    nan = fma(values[i], zero(), nan);
    peaks = max(peaks, abs(values[i]));
  }
  const float peak = reduce_max(peaks);
  const F16 inverse = int8_inverse(peak);
  AIOCB_UNROLL for (int i = 0; i < kInt8Group / 16; ++i) {
    const F16 rounded = round_to_int(values[i] * inverse);
    store_bytes(out + i * 16, rounded);
    sum = sum + rounded;
  }
  const float total = reduce_add(sum);
  *meta = {peak * (1.0f / 127.0f), total == total ? -128 * int32_t(total) : 0};
  return reduce_add(nan) == 0.0f;
}

#if defined(__AVX512F__)
// The same numbers from a whole group of bf16, which is one register: magnitudes compare as integers.
AIOCB_INLINE bool quantize_whole_group(const uint16_t* x, char* out, Int8GroupMeta* meta) {
  static_assert(kInt8Group == 32, "one register");
  const __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  const uint16_t bits = uint16_t(~_mm_cvtsi128_si32(smallest));
  const float peak = bf16_to_float(bits);
  const F16 inverse = int8_inverse(peak);
  const __m512i low = _mm512_cvtps_epi32((load(x) * inverse).v), high = _mm512_cvtps_epi32((load(x + 16) * inverse).v);
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(low)),
                                                _mm512_cvtepi32_epi8(high), 1);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(char(0x80))), _mm256_setzero_si256());
  const __m128i pair = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const int total = _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_unpackhi_epi64(pair, pair))) - 128 * kInt8Group;
  *meta = {peak * (1.0f / 127.0f), -128 * total};
  return bits < 0x7f80;
}
#else
AIOCB_INLINE bool quantize_whole_group(const uint16_t* x, char* out, Int8GroupMeta* meta) {
  return quantize_group(x, kInt8Group, out, meta);
}
#endif
AIOCB_INLINE bool quantize_whole_group(const float* x, char* out, Int8GroupMeta* meta) {
  return quantize_group(x, kInt8Group, out, meta);
}

// A row that holds NaN or infinity yields NaN everywhere, as it would without quantisation: integers cannot carry it.
template <class E>
AIOCB_INLINE void quantize_row(const E* x, int depth, int groups, char* out) {
  Int8GroupMeta* meta = reinterpret_cast<Int8GroupMeta*>(out + groups * kInt8Group);
  const int whole = depth / kInt8Group;
  bool is_finite = true;
  for (int g = 0; g < whole; ++g)
    is_finite &= quantize_whole_group(x + g * kInt8Group, out + g * kInt8Group, meta + g);
  if (whole < groups)
    is_finite &= quantize_group(x + whole * kInt8Group, depth % kInt8Group, out + whole * kInt8Group, meta + whole);
  if (!is_finite) meta[0].scale = __builtin_nanf("");
}

template <class E>
AIOCB_INLINE void add_squares(const E* x, int depth, float* squares) {
  for (int i = 0; i < depth; i += 16) {
    const F16 value = load_elements(x + i, depth - i), sum = load_elements(squares + i, depth - i);
    float lanes[16];
    store(lanes, fma(value, value, sum));
    std::memcpy(squares + i, lanes, size_t(depth - i < 16 ? depth - i : 16) * 4);
  }
}

// ---- tiles ------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kInt8Rows = 6;  // 6 rows x 2 vectors, as integers and as floats, leave 8 of 32 registers
#else
constexpr int kInt8Rows = 2;
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

typedef void (*Int8Rows)(int rows, const char* a, int64_t a_stride, const char* b, int groups, const char* ahead,
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

inline Int8Rows best_int8_rows(bool has_vnni) {
  return kAlwaysVnni || has_vnni ? compute_int8_rows<VnniDot> : compute_int8_rows<PairDot>;
}

template <class Epilogue>
AIOCB_INLINE void run_int8_panels(const Linear& linear, Int8Rows compute, const char* a, int64_t a_stride, int rows,
                                  const char* next, const Lane& lane, Epilogue& epilogue) {
  alignas(64) float sums[kInt8Rows * kPanel];
  const int blocks = (rows + kInt8Rows - 1) / kInt8Rows, groups = int8_groups(linear.depth);
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

// Quantise `rows` and return where they are. Few rows are quantised by every thread for itself; more are shared out, at
// the price of a barrier.
template <class E>
__attribute__((noinline)) const char* quantize_rows(const Linear& linear, const char* a, int64_t a_stride, int rows,
                                                    const Lane& lane) {
  const Int8Linear& own = *static_cast<const Int8Linear*>(linear.extra);
  const Int8State& state = *own.state;
  if (own.squares && lane.thread == 0)
    for (int row = 0; row < rows; ++row)
      add_squares(reinterpret_cast<const E*>(a + row * a_stride), linear.depth, own.squares);
  const bool is_shared = rows > kInt8OwnRows;
  char* quantized = state.rows + (is_shared ? 0 : lane.thread * kInt8OwnRows * state.row_stride);
  const Share share = is_shared ? share_of(rows, lane) : Share{0, rows};
  for (int row = share.begin; row < share.end; ++row)
    quantize_row(reinterpret_cast<const E*>(a + row * a_stride), linear.depth, int8_groups(linear.depth),
                 quantized + row * state.row_stride);
  if (is_shared) pool_barrier(state.pool);
  return quantized;
}

// As run_format.
template <class F, class Epilogue>
AIOCB_INLINE void run_int8(const Linear& linear, const char* a, int64_t a_stride, int rows, const char* next,
                           const Lane& lane, Epilogue& epilogue) {
  const Int8State& state = *static_cast<const Int8Linear*>(linear.extra)->state;
  const char* quantized = quantize_rows<typename F::Element>(linear, a, a_stride, rows, lane);
  run_int8_panels(linear, best_int8_rows(state.has_vnni), quantized, state.row_stride, rows, next, lane, epilogue);
}

// Multiply-adds of the largest tile on operands that stay in the nearest cache (see multiply_add in instruction_set.cpp).
inline int64_t int8_multiply_add(int repeats, bool has_vnni) {
  constexpr int kGroups = 4, kStride = kGroups * (kInt8Group + int(sizeof(Int8GroupMeta))) + 64;
  alignas(64) char weights[kGroups * kInt8GroupBytes] = {}, rows[kInt8Rows * kStride] = {};
  alignas(64) float sums[kInt8Rows * kPanel];
  const Int8Rows compute = best_int8_rows(has_vnni);
  for (int i = 0; i < repeats; ++i) compute(kInt8Rows, rows, kStride, weights, kGroups, weights, 0, sums);
  return int64_t(repeats) * kInt8Rows * kPanel * kGroups * kInt8Group;
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

AIOCB_INLINE void pack_int8(const Linear& linear, const PackArgs& args, int first_panel, int last_panel) {
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
          values[i] = args.source_format == kBf16 ? bf16_to_float(reinterpret_cast<const uint16_t*>(row)[first + i])
                                                  : reinterpret_cast<const float*>(row)[first + i];
          if (args.input_scales) values[i] *= args.input_scales[first + i];
          if (args.importance) importance[i] = args.importance[first + i];
        }
        reinterpret_cast<uint16_t*>(out)[column] =
            pack_int8_group(values, count && args.importance ? importance : nullptr, out + kPanel * 2 + column * 4);
      }
    }
  }
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
