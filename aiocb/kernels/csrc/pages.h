// Pages of the cache: how a token's key and value are written, and what attention makes of what it loads.
//
// Numbers as the model has them (`step` of them in four bytes):
//   K page [D / step][16 tokens][step], V page [16 / step][D][step]
// In eight bits, q * scale with q in [-127, 127]:
//   K page [D / 2][16 tokens][2], V page [4][D / 16][2][16][2 tokens], V scales [16], K scales [16]
//
// A scale (bf16) belongs to one token and head and is written with them, once: whatever else is written to the page,
// copied, swapped or shared with it changes no number. A key or value that is not finite has a NaN for its scale.
//
// Bytes are multiplied with numbers of sixteen bits: a row's query, and the weights of its values in one chunk, each
// scaled by the largest of them. These sums of integers are exact, so nothing depends on their order, and the scales
// come once per key, not per number. Sixteen bits lose less than the bf16 of a model that computes in it.
#pragma once
#include <type_traits>

#include "int8_rows.h"
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

// ---- sixteen sums of products of pairs ----------------------------------------------------------------------------

#if defined(__AVX512F__)
struct PairSums {
  __m512i v;
};
AIOCB_INLINE PairSums zero_sums() { return {_mm512_setzero_si512()}; }
AIOCB_INLINE F16 to_float(PairSums a) { return {_mm512_cvtepi32_ps(a.v)}; }
AIOCB_INLINE void store(int16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
#else  // parts, as in vec.h
typedef int16_t VPairs __attribute__((vector_size(4 * kLanes)));
struct PairSums {
  VI v[kParts];
};
AIOCB_INLINE PairSums zero_sums() {
  PairSums out;
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) out.v[i] = VI{};
  return out;
}
AIOCB_INLINE F16 to_float(PairSums a) { AIOCB_PARTS(__builtin_convertvector(a.v[i], VF)); }
AIOCB_INLINE void store(int16_t* p, F16 a) {
  typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
  const F16 rounded = round_to_int(a);
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
    const Shorts shorts = __builtin_convertvector(__builtin_convertvector(rounded.v[i], VI), Shorts);
    std::memcpy(p + i * kLanes, &shorts, sizeof(shorts));
  }
}
#endif
AIOCB_INLINE F16 to_float(F16 a) { return a; }

// As the formats of vec.h: a step is 64 bytes of a page, here in two halves of sixteen pairs each.
struct Int8Pages {
  typedef int16_t Wide;
  typedef PairSums Sums;
  static constexpr int kStep = 4;
  static constexpr int kHalves = 2;
  static AIOCB_INLINE Sums none() { return zero_sums(); }
#if defined(__AVX512F__)
  typedef __m512i A;
  typedef __m512i B;
  static AIOCB_INLINE B load_half(const char* p, int half) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + half));
  }
  static AIOCB_INLINE A broadcast_half(const char* p, int half) {
    int32_t pair;
    std::memcpy(&pair, p + half * 4, 4);
    return _mm512_set1_epi32(pair);
  }
  static AIOCB_INLINE Sums madd(Sums sums, A a, B b) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(b), "v"(a));  // not the intrinsic: see VnniDot
    return sums;
#else
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(a, b))};
#endif
  }
#else
  typedef VPairs A;
  struct B {
    VPairs v[kParts];
  };
  static AIOCB_INLINE B load_half(const char* p, int half) {
    typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
    B out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
      Bytes bytes;
      std::memcpy(&bytes, p + half * 32 + i * 2 * kLanes, sizeof(bytes));
      out.v[i] = __builtin_convertvector(bytes, VPairs);
    }
    return out;
  }
  static AIOCB_INLINE A broadcast_half(const char* p, int half) {
    int32_t pair;
    std::memcpy(&pair, p + half * 4, 4);
    return (A)(VI{} + pair);
  }
  static AIOCB_INLINE Sums madd(Sums sums, A a, B b) {
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
#if defined(__AVX2__)
      sums.v[i] += (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b.v[i]);
#elif defined(__SSE2__)
      sums.v[i] += (VI)_mm_madd_epi16((__m128i)a, (__m128i)b.v[i]);
#else  // the first of a pair is the lower half of a lane, on every machine that there is an instruction set for
      sums.v[i] += (((VI)a << 16) >> 16) * (((VI)b.v[i] << 16) >> 16) + ((VI)a >> 16) * ((VI)b.v[i] >> 16);
#endif
    }
    return sums;
  }
#endif
};

// The largest size among `count` numbers, a multiple of 16, and whether all are finite.
struct Peak {
  float size;
  bool is_finite;
};
template <class E>
AIOCB_INLINE Peak peak_of(const E* x, int count) {
  F16 peaks = zero(), nan = zero();
  for (int i = 0; i < count; i += 16) {
    const F16 value = load(x + i);
    nan = fma(value, zero(), nan);
    peaks = max(peaks, abs(value));
  }
  return {reduce_max(peaks), reduce_add(nan) == 0.0f};
}

// `count` numbers, a multiple of 16, in sixteen bits; returns the scale, which is NaN where they are not finite.
template <class E>
AIOCB_INLINE float to_shorts(const E* x, int count, int16_t* out) {
  const auto [peak, is_finite] = peak_of(x, count);
  const F16 inverse = set1(is_finite && peak > 1e-34f ? 32767.0f / peak : 0.0f);  // else too small for it
  for (int i = 0; i < count; i += 16) store(out + i, load(x + i) * inverse);
  return is_finite ? peak * (1.0f / 32767.0f) : __builtin_nanf("");
}

// work(C()) of the format that the cache of a model with format F has.
template <class F, class Work>
AIOCB_INLINE void with_cache(int cache_format, const Work& work) {
  if (cache_format == kInt8)
    work(Int8Pages());
  else
    work(F());
}

template <class C>
constexpr bool has_scales() {
  return std::is_same<C, Int8Pages>::value;
}

// Of the K page and of the V page of one head, without scales.
template <class C>
constexpr int64_t page_bytes(int dim) {
  return int64_t(kPageSize) * dim * 4 / C::kStep;
}

// Of both pages of one head, and their scales.
template <class C>
constexpr int64_t head_bytes(int dim) {
  return 2 * page_bytes<C>(dim) + (has_scales<C>() ? kPageScaleBytes : 0);
}

AIOCB_INLINE uint16_t* value_scales(char* values, int dim) {
  return reinterpret_cast<uint16_t*>(values + page_bytes<Int8Pages>(dim));
}
AIOCB_INLINE const uint16_t* value_scales(const char* values, int dim) {
  return reinterpret_cast<const uint16_t*>(values + page_bytes<Int8Pages>(dim));
}
AIOCB_INLINE const uint16_t* key_scales(const char* keys, int dim) {
  return value_scales(keys + page_bytes<Int8Pages>(dim), dim) + kPageSize;
}

// One key or value [D] in bytes; returns its scale. Rounded up, no byte is beyond 127.
template <class E>
AIOCB_INLINE uint16_t quantize_head(const E* x, int dim, char* out) {
  const auto [peak, is_finite] = peak_of(x, dim);
  if (!is_finite || !(peak > 1e-34f)) {  // too small for the inverse of its scale
    std::memset(out, 0, size_t(dim));
    return is_finite ? 0 : 0x7fc0;
  }
  const float exact = peak * (1.0f / 127.0f);
  uint32_t bits;
  std::memcpy(&bits, &exact, 4);
  const uint16_t scale = uint16_t((bits + 0xffffu) >> 16);
  const F16 inverse = set1(1.0f / bf16_to_float(scale));
  for (int d = 0; d < dim; d += 16) store_bytes(out + d, round_to_int(load(x + d) * inverse));
  return scale;
}

// A token's key and value [D] into its slot of a head's pages. E is the format's own element, or what eight bits are
// made of.
template <class C, class E>
AIOCB_INLINE void store_token(char* pages, int slot, int dim, const E* key, const E* value) {
  constexpr int step = C::kStep;
  char* const values = pages + page_bytes<C>(dim);
  if constexpr (has_scales<C>()) {
    alignas(64) char packed[kMaxHeadDim];
    uint16_t* const scales = value_scales(values, dim);
    scales[kPageSize + slot] = quantize_head(key, dim, packed);
    for (int d = 0; d < dim; d += 2) std::memcpy(pages + d * kPageSize + slot * 2, packed + d, 2);
    scales[slot] = quantize_head(value, dim, packed);
    char* const line = values + slot / step * dim * step + slot % step / 2 * 32 + slot % 2;
    for (int d = 0; d < dim; ++d) line[d / 16 * 64 + d % 16 * 2] = packed[d];
  } else {
    static_assert(std::is_same<E, typename C::Element>::value, "stored as they are");
    char* const column = pages + slot * 4;
    for (int d = 0; d < dim / step; ++d) std::memcpy(column + d * 64, key + d * step, 4);
    E* const line = reinterpret_cast<E*>(values) + int64_t(slot / step) * dim * step + slot % step;
    for (int d = 0; d < dim; ++d) line[d * step] = value[d];
  }
}

// Make zeros of the value in a slot.
template <class C>
AIOCB_INLINE void clear_value(char* values, int slot, int dim) {
  constexpr int step = C::kStep;
  if constexpr (has_scales<C>()) {
    value_scales(values, dim)[slot] = 0;
  } else {
    typename C::Element* const line = reinterpret_cast<typename C::Element*>(values) + slot / step * dim * step;
    for (int d = 0; d < dim; ++d) line[d * step + slot % step] = 0;
  }
}

// The lines that store_token touches: as many as a K page has, so ask for those of the next token early.
template <class C>
AIOCB_INLINE void prefetch_token(const char* pages, int slot, int dim) {
  const char* const values = pages + page_bytes<C>(dim);
  const char* const line = values + int64_t(slot / C::kStep) * dim * 4;
  for (int d = 0; d < dim / C::kStep; ++d) __builtin_prefetch(pages + d * 64, 1, 2);
  for (int d = 0; d < dim; d += 16) __builtin_prefetch(line + d * 4, 1, 2);
  if constexpr (has_scales<C>()) __builtin_prefetch(value_scales(values, dim), 1, 2);
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
