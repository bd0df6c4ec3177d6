// The formats of weights: what both languages know of them (layout.cpp), and what an instruction set does with one.
//
// A new format is one line in the table and one header with the struct that is named there (see linear.h).
#pragma once
#include <cstdint>

namespace aiocb {

constexpr int kInt8Group = 32;

// What rows of activations are when weights meet them. Floats are taken as they come, in whole groups; integers are
// made of whatever floats a row holds.
enum Operand : int32_t { kF32Operand = 0, kBf16Operand = 1, kInt8Operand = 2 };

// FORMAT(code, name, struct, bits of a weight, weights along k that lie together, bytes of their scale, operand)
#define AIOCB_FORMATS(FORMAT)                                       \
  FORMAT(kF32, float32, F32Weights, 32, 1, 0, kF32Operand)          \
  FORMAT(kBf16, bfloat16, Bf16Weights, 16, 2, 0, kBf16Operand)      \
  FORMAT(kInt8, int8, Int8Weights, 8, kInt8Group, 2, kInt8Operand)

#define AIOCB_CODE(code, ...) code,
enum Format : int32_t { AIOCB_FORMATS(AIOCB_CODE) kNumFormats };
#undef AIOCB_CODE

struct Linear;
struct PackArgs;

struct WeightFormat {
  int32_t bits, group, scale_bytes, operand;
  void (*pack)(const Linear& linear, const PackArgs& args, int first_panel, int last_panel);
  void (*unpack)(const Linear& linear, int column, float* out);  // [depth]
  int64_t (*scratch)(int depth, int rows);                       // bytes that a lane needs to multiply so many
  int64_t (*row_bytes)(int depth);                               // of a quantised row; null: rows are taken as they are
  int64_t (*multiply_add)(int repeats);                          // see aiocb_arithmetic; returns how many were done
};

}  // namespace aiocb
