// What becomes of the sums of a linear: epilogue(first_row, rows, panel, sums[rows][64]) owns those outputs.
#pragma once
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

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
  const int32_t* targets;
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
      const int target = targets ? targets[first + r] : -1;
      if (target >= 0) std::memcpy(logits + int64_t(target) * columns + base, row, size_t(width) * 4);
    }
  }
};

}  // namespace AIOCB_ISA
}  // namespace aiocb
