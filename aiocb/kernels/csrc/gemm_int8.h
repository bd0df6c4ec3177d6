// Weights in eight bits: q * scale with q in [-127, 127].
//
// One scale per row or column is faster but cannot be used: a few channels are a hundred times larger than the others
// and leave those no bits (docs/int8.md has the measurements).
//
// Panel: [group][64 scales as bf16][8 steps][64 columns][4 bytes], a byte being q + 128. The surplus, 128 times the sum of
// a group's activations, is part of the row's data, where it costs nothing: sums begin at -128 * sum instead of at zero.
#pragma once
#include "gemm_groups.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kInt8Candidates = 16;  // scales that packing tries

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

struct Int8Panel {
  static constexpr int kHeaderBytes = kPanel * 2;
  static constexpr int kGroupBytes = kHeaderBytes + kByteGroup;
  static constexpr bool kIsPacked = false;
  typedef F16 Scales;

  static void unpack(const char*, char*) {}
  static AIOCB_INLINE int32_t start(const Int8GroupMeta& meta) { return meta.start; }
  static AIOCB_INLINE Scales load(const char* header, int column) {
    return AIOCB_ISA::load(reinterpret_cast<const uint16_t*>(header) + column);
  }
  template <int V>
  static AIOCB_INLINE void add(F16* total, const I16* sums, const Scales* scales, const Int8GroupMeta& meta) {
    const F16 scale = set1(meta.scale);
    AIOCB_UNROLL for (int v = 0; v < V; ++v) total[v] = fma(to_float(sums[v]), scales[v] * scale, total[v]);
  }

  static bool take(int, const char*, int, char*, int) { return false; }

  static AIOCB_INLINE void pack(const float* values, const float* importance, char* group, int column) {
    F16 peaks = zero();
    for (int i = 0; i < kInt8Group; i += 16) peaks = max(peaks, abs(AIOCB_ISA::load(values + i)));
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
      store(rounded + i, max(min(round_to_int(AIOCB_ISA::load(values + i) * inverse), limit), zero() - limit));
    char* out = group + kHeaderBytes + column * 4;
    for (int i = 0; i < kInt8Group; ++i) out[i / 4 * kPanel * 4 + i % 4] = char(int(rounded[i]) + 128);
    reinterpret_cast<uint16_t*>(group)[column] = scale;
  }

  static void read(const char* group, int column, float* values) {
    const float scale = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[column]);
    const char* bytes = group + kHeaderBytes + column * 4;
    for (int i = 0; i < kInt8Group; ++i)
      values[i] = float(int(uint8_t(bytes[i / 4 * kPanel * 4 + i % 4])) - 128) * scale;
  }
};
typedef GroupWeights<Int8Panel> Int8Weights;

}  // namespace AIOCB_ISA
}  // namespace aiocb
