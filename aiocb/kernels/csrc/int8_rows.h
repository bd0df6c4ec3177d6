// Rows of activations in eight bits, scaled in groups along K: bytes, then each group's scale and the sum of its bytes, in
// the forms that weights need which are stored as unsigned numbers.
#pragma once
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

AIOCB_INLINE int int8_groups(int depth) { return (depth + kInt8Group - 1) / kInt8Group; }

// A quantised row is its bytes, then one of these per group.
struct Int8GroupMeta {
  float scale;
  int32_t start;     // -128 * sum: of weights that are 128 too large
  float scaled_sum;  // scale * sum
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

// `count` elements, filled up with zeros to a group. Returns false for NaN and infinity.
template <class E>
AIOCB_INLINE bool quantize_group(const E* x, int count, char* out, Int8GroupMeta* meta) {
  F16 values[kInt8Group / 16], peaks = zero(), nan = zero(), sum = zero();
  AIOCB_UNROLL for (int i = 0; i < kInt8Group / 16; ++i) {
    values[i] = load_part(x + i * 16, count - i * 16);
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
  const float total = reduce_add(sum), scale = peak * (1.0f / 127.0f);
  *meta = {scale, total == total ? -128 * int32_t(total) : 0, scale * total};
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
  const float scale = peak * (1.0f / 127.0f);
  *meta = {scale, -128 * total, scale * float(total)};
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

inline int64_t int8_row_bytes(int depth) {
  return int8_groups(depth) * int64_t(kInt8Group + sizeof(Int8GroupMeta));
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
