// Weights in four bits: q * scale + offset with q in [0, 15], as GGUF's Q4_0, Q4_1 and Q4_K have them.
//
// Panel: [group][64 scales][64 offsets], both as fp16, [4 steps][64 columns][4 bytes]. A byte holds two weights, four
// apart along K: the low half belongs to the first four bytes of k of its step, the high half to the next four.
//
// A row's sum of scale * sum(q * a) + offset * sum(a): the latter is part of the row's data.
#pragma once
#include "gemm_groups.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kInt4Candidates = 12;  // widths of a step that packing tries

#if defined(__AVX512F__)
AIOCB_INLINE F16 load_halves(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
#elif defined(__F16C__)
AIOCB_INLINE F16 load_halves(const uint16_t* p) {
  F16 out;
  AIOCB_UNROLL for (int i = 0; i < 2; ++i)
    out.v[i] = (VF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 8)));
  return out;
}
#else
AIOCB_INLINE F16 load_halves(const uint16_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = half_to_float(p[i]);
  return load(lanes);
}
#endif

// The errors of a group of weights when its smallest is `low` and a step is `step`, made as small as both can make them.
// Returns what is left.
inline float fit_int4(const float* values, const float* importance, float low, float inverse, float* step, float* offset,
                      uint8_t* q) {
  double w = 0, wq = 0, wqq = 0, wv = 0, wqv = 0;
  for (int i = 0; i < kInt8Group; ++i) {
    const float place = (values[i] - low) * inverse + 0.5f;
    q[i] = uint8_t(place < 0.0f ? 0.0f : place > 15.0f ? 15.0f : place);
    const double weight = importance ? importance[i] : 1.0f;
    w += weight, wq += weight * q[i], wqq += weight * q[i] * q[i], wv += weight * values[i];
    wqv += weight * q[i] * values[i];
  }
  const double determinant = w * wqq - wq * wq;
  if (determinant > 1e-12 * w * wqq) {
    *step = float((w * wqv - wq * wv) / determinant);
    *offset = float((wqq * wv - wq * wqv) / determinant);
  } else {
    *step = inverse > 0.0f ? 1.0f / inverse : 0.0f, *offset = low;
  }
  *step = half_to_float(float_to_half(*step)), *offset = half_to_float(float_to_half(*offset));
  float cost = 0.0f;
  for (int i = 0; i < kInt8Group; ++i) {
    const float error = values[i] - (*step * float(q[i]) + *offset);
    cost += error * error * (importance ? importance[i] : 1.0f);
  }
  return cost;
}

struct Int4Panel {
  static constexpr int kHeaderBytes = kPanel * 4;
  static constexpr int kGroupBytes = kHeaderBytes + kByteGroup / 2;
  static constexpr bool kIsPacked = true;
  struct Scales {
    F16 scale, offset;
  };

  // Steps 2 i and 2 i + 1 of the bytes are the low and the high halves of step i.
  static AIOCB_INLINE void unpack(const char* in, char* out) {
    for (int step = 0; step < kGroupSteps / 2; ++step, in += kPanel * 4, out += 2 * kPanel * 4) {
#if defined(__AVX512F__)
      const __m512i mask = _mm512_set1_epi8(15);
      AIOCB_UNROLL for (int i = 0; i < kPanel * 4; i += 64) {
        const __m512i raw = _mm512_loadu_si512(in + i);
        _mm512_store_si512(out + i, _mm512_and_si512(raw, mask));
        _mm512_store_si512(out + kPanel * 4 + i, _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
      }
#else
      for (int i = 0; i < kPanel * 4; ++i) {
        out[i] = in[i] & 15;
        out[kPanel * 4 + i] = char(uint8_t(in[i]) >> 4);
      }
#endif
    }
  }

  static AIOCB_INLINE int32_t start(const Int8GroupMeta&) { return 0; }
  static AIOCB_INLINE Scales load(const char* header, int column) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(header) + column;
    return {load_halves(p), load_halves(p + kPanel)};
  }
  template <int V>
  static AIOCB_INLINE void add(F16* total, const I16* sums, const Scales* scales, const Int8GroupMeta& meta) {
    const F16 scale = set1(meta.scale), scaled_sum = set1(meta.scaled_sum);
    AIOCB_UNROLL for (int v = 0; v < V; ++v) {
      total[v] = fma(to_float(sums[v]), scales[v].scale * scale, total[v]);
      total[v] = fma(scales[v].offset, scaled_sum, total[v]);
    }
  }

  static AIOCB_INLINE void write(const uint8_t* q, float scale, float offset, char* group, int column) {
    uint16_t* header = reinterpret_cast<uint16_t*>(group);
    header[column] = float_to_half(scale), header[kPanel + column] = float_to_half(offset);
    char* out = group + kHeaderBytes + column * 4;
    for (int i = 0; i < kInt8Group; i += 8)
      for (int j = 0; j < 4; ++j) out[i / 8 * kPanel * 4 + j] = char(q[i + j] | q[i + 4 + j] << 4);
  }

  // Weights that are stored in four bits stay as they are.
  static AIOCB_INLINE bool take(int source, const char* row, int g, char* group, int column) {
    Nibbles nibbles;
    if (!read_nibbles(source, row, g, &nibbles)) return false;
    write(nibbles.q, nibbles.scale, nibbles.offset, group, column);
    return true;
  }

  static AIOCB_INLINE void pack(const float* values, const float* importance, char* group, int column) {
    float low = values[0], high = values[0];
    for (int i = 1; i < kInt8Group; ++i) {
      low = values[i] < low ? values[i] : low;
      high = values[i] > high ? values[i] : high;
    }
    float best = __builtin_inff(), scale = 0.0f, offset = 0.0f;
    uint8_t chosen[kInt8Group] = {};
    for (int i = 0; i <= kInt4Candidates; ++i) {
      // Narrower than the whole range: few weights lie at its ends.
      const float range = high - low, cut = 0.02f * float(i) * range, width = range - cut;
      float step, least;
      uint8_t q[kInt8Group];
      const float cost = fit_int4(values, importance, low + 0.5f * cut, width > 0.0f ? 15.0f / width : 0.0f, &step, &least, q);
      if (cost < best) {
        best = cost, scale = step, offset = least;
        std::memcpy(chosen, q, sizeof chosen);
      }
    }
    write(chosen, scale, offset, group, column);
  }

  static void read(const char* group, int column, float* values) {
    const uint16_t* header = reinterpret_cast<const uint16_t*>(group);
    const float scale = half_to_float(header[column]), offset = half_to_float(header[kPanel + column]);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(group + kHeaderBytes + column * 4);
    for (int i = 0; i < kInt8Group; ++i) {
      const int byte = bytes[i / 8 * kPanel * 4 + i % 4];
      values[i] = scale * float(i % 8 < 4 ? byte & 15 : byte >> 4) + offset;
    }
  }
};
typedef GroupWeights<Int4Panel> Int4Weights;

}  // namespace AIOCB_ISA
}  // namespace aiocb
