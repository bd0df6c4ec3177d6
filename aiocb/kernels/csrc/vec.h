// Sixteen float lanes on every instruction set, and the two weight formats on top of them.
//
// One vocabulary (`F16`: sixteen floats) keeps the kernels free of intrinsics: it is one zmm register on AVX-512, two
// ymm on AVX2 and four 128-bit vectors elsewhere (SSE2, NEON) through the compiler's vector extension. Everything here
// is in the namespace of its instruction set, because the same sources are compiled once per instruction set into one library
// and a shared inline function would be merged by the linker into the copy of an arbitrary one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "model.h"
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef AIOCB_ISA
#define AIOCB_ISA portable
#endif

#define AIOCB_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define AIOCB_UNROLL _Pragma("unroll")
#else
#define AIOCB_UNROLL _Pragma("GCC unroll 16")
#endif

namespace aiocb {
namespace AIOCB_ISA {

AIOCB_INLINE void prefetch_l2(const void* address) { __builtin_prefetch(address, 0, 2); }

AIOCB_INLINE float bf16_to_float(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

AIOCB_INLINE uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);  // keep NaN a NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
AIOCB_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
AIOCB_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
AIOCB_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
AIOCB_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
AIOCB_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
AIOCB_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
AIOCB_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
AIOCB_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
AIOCB_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
AIOCB_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
AIOCB_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
AIOCB_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
// x < y ? a : b, by lane
AIOCB_INLINE F16 select_less(F16 x, F16 y, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// lanes [first, last) of `a`, the others are `fill`
AIOCB_INLINE F16 keep_lanes(F16 a, int first, int last, float fill) {
  uint32_t mask = (last >= 16 ? 0xffffu : (1u << (last > 0 ? last : 0)) - 1u);
  if (first > 0) mask &= first >= 16 ? 0u : ~((1u << first) - 1u);
  return {_mm512_mask_blend_ps(__mmask16(mask), _mm512_set1_ps(fill), a.v)};
}
AIOCB_INLINE float reduce_add(F16 a) { return _mm512_reduce_add_ps(a.v); }
AIOCB_INLINE float reduce_max(F16 a) { return _mm512_reduce_max_ps(a.v); }
AIOCB_INLINE F16 round_to_int(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
AIOCB_INLINE F16 times_power_of_two(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

AIOCB_INLINE F16 load(const uint16_t* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
AIOCB_INLINE void store(uint16_t* p, F16 a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

#else  // two ymm, or four 128-bit vectors

#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = 16 / kLanes;
typedef float VF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VI __attribute__((vector_size(4 * kLanes)));
typedef float VFU __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t VIU __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

struct F16 {
  VF v[kParts];
};
#define AIOCB_PARTS(expr)                    \
  F16 out;                                   \
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) out.v[i] = (expr); \
  return out

#if defined(__AVX2__)
AIOCB_INLINE VF splat(float x) { return (VF)_mm256_set1_ps(x); }
#else
AIOCB_INLINE VF splat(float x) { return VF{x, x, x, x}; }
#endif
AIOCB_INLINE F16 zero() { AIOCB_PARTS(VF{}); }
AIOCB_INLINE F16 set1(float x) { AIOCB_PARTS(splat(x)); }
AIOCB_INLINE F16 load(const float* p) { AIOCB_PARTS(*reinterpret_cast<const VFU*>(p + i * kLanes)); }
AIOCB_INLINE void store(float* p, F16 a) {
  AIOCB_UNROLL for (int i = 0; i < kParts; ++i) *reinterpret_cast<VFU*>(p + i * kLanes) = a.v[i];
}
AIOCB_INLINE VF fma_part(VF a, VF b, VF c) {
#if defined(__AVX2__) && defined(__FMA__)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
AIOCB_INLINE F16 operator+(F16 a, F16 b) { AIOCB_PARTS(a.v[i] + b.v[i]); }
AIOCB_INLINE F16 operator-(F16 a, F16 b) { AIOCB_PARTS(a.v[i] - b.v[i]); }
AIOCB_INLINE F16 operator*(F16 a, F16 b) { AIOCB_PARTS(a.v[i] * b.v[i]); }
AIOCB_INLINE F16 operator/(F16 a, F16 b) { AIOCB_PARTS(a.v[i] / b.v[i]); }
AIOCB_INLINE F16 fma(F16 a, F16 b, F16 c) { AIOCB_PARTS(fma_part(a.v[i], b.v[i], c.v[i])); }
AIOCB_INLINE F16 max(F16 a, F16 b) { AIOCB_PARTS(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
AIOCB_INLINE F16 min(F16 a, F16 b) { AIOCB_PARTS(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
AIOCB_INLINE F16 abs(F16 a) { AIOCB_PARTS((VF)((VI)a.v[i] & 0x7fffffff)); }
AIOCB_INLINE F16 select_less(F16 x, F16 y, F16 a, F16 b) { AIOCB_PARTS(x.v[i] < y.v[i] ? a.v[i] : b.v[i]); }
AIOCB_INLINE F16 keep_lanes(F16 a, int first, int last, float fill) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i)
    if (i < first || i >= last) lanes[i] = fill;
  return load(lanes);
}
AIOCB_INLINE float reduce_add(F16 a) {
  float lanes[16];
  store(lanes, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
AIOCB_INLINE float reduce_max(F16 a) {
  float lanes[16];
  store(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}
// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits: no conversion instruction needed.
constexpr float kRoundMagic = 12582912.0f;
AIOCB_INLINE F16 round_to_int(F16 a) { AIOCB_PARTS((a.v[i] + kRoundMagic) - kRoundMagic); }
AIOCB_INLINE F16 times_power_of_two(F16 a, F16 n) {
  AIOCB_PARTS(a.v[i] * (VF)(((VI)(n.v[i] + (kRoundMagic + 127.0f))) << 23));
}
#if defined(__AVX2__)
AIOCB_INLINE F16 load(const uint16_t* p) {
  F16 out;
  AIOCB_UNROLL for (int i = 0; i < 2; ++i) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 8));
    out.v[i] = (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
  }
  return out;
}
AIOCB_INLINE void store(uint16_t* p, F16 a) {
  __m256i halves[2];
  AIOCB_UNROLL for (int i = 0; i < 2; ++i) {
    const __m256i bits = (__m256i)a.v[i];
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = (__m256i)_mm256_cmp_ps((__m256)a.v[i], (__m256)a.v[i], _CMP_UNORD_Q);
    halves[i] = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  }
  const __m256i packed = _mm256_packus_epi32(halves[0], halves[1]);  // by 128-bit lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
#else
AIOCB_INLINE F16 load(const uint16_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = bf16_to_float(p[i]);
  return load(lanes);
}
AIOCB_INLINE void store(uint16_t* p, F16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(lanes[i]);
}
#endif

#endif

// Cephes' polynomial; relative error about 1e-7, exactly 0 below -87.3 (so a masked key adds exactly nothing). NaN stays:
// where one of two is NaN, `max` and `min` return the second.
AIOCB_INLINE F16 exp(F16 x) {
  F16 lowest = set1(-87.3f);
  F16 clamped = min(set1(88.0f), max(lowest, x));
  F16 n = round_to_int(clamped * set1(1.44269504088896341f));
  F16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return select_less(x, lowest, zero(), times_power_of_two(p, n));
}

AIOCB_INLINE F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
AIOCB_INLINE F16 erf(F16 x) {
  F16 a = abs(x);
  F16 t = set1(1.0f) / fma(set1(0.3275911f), a, set1(1.0f));
  F16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  F16 y = set1(1.0f) - p * t * exp(zero() - a * a);
  return select_less(x, zero(), zero() - y, y);
}

// Rows need not be a multiple of sixteen wide: `count` elements are left, all of which may lie behind the end.
template <class E>
AIOCB_INLINE F16 load_part(const E* p, int count) {
  if (count >= 16) return load(p);
  E lanes[16] = {};
  if (count > 0) std::memcpy(lanes, p, size_t(count) * sizeof(E));
  return load(lanes);
}
template <class E>
AIOCB_INLINE void store_part(E* p, F16 value, int count) {
  if (count >= 16) return store(p, value);
  E lanes[16];
  store(lanes, value);
  std::memcpy(p, lanes, size_t(count) * sizeof(E));
}

// ---- what activations and cache hold, and weights that are multiplied as floats -------------------------------------------------------------------------------------------
// A "k step" is four bytes of one row: two bf16 or one float. Packed operands hold sixteen (or a multiple) of them
// side by side, so that one load serves sixteen outputs and one broadcast serves one row of activations.
//
// Where no instruction multiplies pairs of bf16, or only at half the rate of floats, they are multiplied as floats: a
// step then has two halves, one after the other along K, and the operand that is broadcast is kept as floats (`Wide`)
// instead of being taken apart at every use.
//
// Where operands are exact, it is the additions that lose most: each run of `kRun` steps is added up on its own, and the
// runs are added to each other. 0 is one run.

struct F32Format {
  typedef float Element;
  typedef float Wide;
  typedef F16 Sums;
  static AIOCB_INLINE Sums none() { return zero(); }
  static constexpr int kStep = 1;
  static constexpr int kHalves = 1;
  static constexpr int kRun = 128;
  typedef F16 A;
  typedef F16 B;
  static AIOCB_INLINE B load_half(const char* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static AIOCB_INLINE A broadcast_half(const char* p, int) { return set1(*reinterpret_cast<const float*>(p)); }
  static AIOCB_INLINE F16 madd(F16 acc, A a, B b) { return fma(a, b, acc); }
};

// Pairs of bf16 that were taken apart: added up as they are where they are not.
struct WidenedFormat : F32Format {
  static constexpr int kRun = 0;
};

struct Bf16Format {
  typedef uint16_t Element;
  typedef F16 Sums;
  static AIOCB_INLINE Sums none() { return zero(); }
  static constexpr int kStep = 2;
  static constexpr int kRun = 0;
#if defined(__AVX512BF16__)
  typedef uint16_t Wide;
  static constexpr int kHalves = 1;
  typedef __m512bh A;
  typedef __m512bh B;
  static AIOCB_INLINE B load_half(const char* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  static AIOCB_INLINE A broadcast_half(const char* p, int) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static AIOCB_INLINE F16 madd(F16 acc, A a, B b) { return {_mm512_dpbf16_ps(acc.v, a, b)}; }
#else
  typedef float Wide;
  static constexpr int kHalves = 2;
  typedef F16 A;
  typedef F16 B;
  static AIOCB_INLINE B load_half(const char* p, int half) {
    constexpr int32_t kUpper = int32_t(0xffff0000);
#if defined(__AVX512F__)
    const __m512i pairs = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(half ? _mm512_and_si512(pairs, _mm512_set1_epi32(kUpper))
                                     : _mm512_slli_epi32(pairs, 16))};
#else
    F16 out;
    AIOCB_UNROLL for (int i = 0; i < kParts; ++i) {
      const VI pairs = *reinterpret_cast<const VIU*>(p + i * 4 * kLanes);
      out.v[i] = (VF)(half ? pairs & kUpper : pairs << 16);
    }
    return out;
#endif
  }
  static AIOCB_INLINE A broadcast_half(const char* p, int half) {
    return set1(reinterpret_cast<const float*>(p)[half]);
  }
  static AIOCB_INLINE F16 madd(F16 acc, A a, B b) { return fma(a, b, acc); }
#endif
};

// work(F()) of the format that activations and cache have.
template <class Work>
AIOCB_INLINE void with_format(int format, const Work& work) {
  if (format == kF32)
    work(F32Format());
  else
    work(Bf16Format());
}

// Bytes of a k step of the operand that is broadcast.
template <class F>
constexpr int wide_bytes() {
  return F::kStep * int(sizeof(typename F::Wide));
}

// Rows of a tile: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;  // 6 rows x 4 vectors + 4 weights + 1 broadcast: 29 of 32 registers
constexpr int kVectors = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;  // 6 rows x 2 ymm + 2 + 1: 15 of 16 registers
constexpr int kVectors = 1;
#elif defined(__aarch64__)
constexpr int kMaxRows = 4;  // 4 rows x 4 quads + 4 + 1: 21 of 32 registers
constexpr int kVectors = 1;
#else
constexpr int kMaxRows = 2;
constexpr int kVectors = 1;
#endif

}  // namespace AIOCB_ISA
}  // namespace aiocb
