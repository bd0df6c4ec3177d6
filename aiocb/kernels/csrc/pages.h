// Pages of the cache: how a token's key and value are written, and what attention makes of what it loads.
//
// Numbers as the model has them (`step` of them in four bytes):
//   K page [D / step][16 tokens][step], V page [16 / step][D][step]
// In eight bits, q * scale with q in [-127, 127]:
//   K page [D][16 tokens], V page [4][D / 16][4 tokens][16], V scales [16], K scales [16]
//
// A scale (bf16) belongs to one token and head and is written with them, once: whatever else is written to the page,
// copied, swapped or shared with it changes no number. A key or value that is not finite has a NaN for its scale.
#pragma once
#include <type_traits>

#include "int8_rows.h"
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

// As the formats of vec.h: a step is 64 bytes of a page, here four vectors, which are multiplied as floats.
struct Int8Pages {
  typedef float Wide;
  static constexpr int kStep = 4;
  static constexpr int kHalves = 4;
  typedef F16 A;
  typedef F16 B;
  static AIOCB_INLINE B load_half(const char* p, int part) { return load(reinterpret_cast<const int8_t*>(p) + part * 16); }
  static AIOCB_INLINE A broadcast_half(const char* p, int part) { return set1(reinterpret_cast<const float*>(p)[part]); }
  static AIOCB_INLINE F16 madd(F16 acc, A a, B b) { return fma(a, b, acc); }
};

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
  F16 peaks = zero(), nan = zero();
  for (int d = 0; d < dim; d += 16) {
    const F16 value = load(x + d);
    nan = fma(value, zero(), nan);
    peaks = max(peaks, abs(value));
  }
  const float peak = reduce_max(peaks);
  const bool is_finite = reduce_add(nan) == 0.0f;
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
    for (int d = 0; d < dim; ++d) pages[d * kPageSize + slot] = packed[d];
    scales[slot] = quantize_head(value, dim, packed);
    char* const line = values + slot / step * dim * step + slot % step * 16;
    for (int d = 0; d < dim; d += 16) std::memcpy(line + d * step, packed + d, 16);
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
