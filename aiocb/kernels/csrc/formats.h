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
  FORMAT(kInt8, int8, Int8Weights, 8, kInt8Group, 2, kInt8Operand)  \
  FORMAT(kInt4, int4, Int4Weights, 4, kInt8Group, 4, kInt8Operand)

#define AIOCB_CODE(code, ...) code,
enum Format : int32_t { AIOCB_FORMATS(AIOCB_CODE) kNumFormats };
#undef AIOCB_CODE

// What weights are packed from: rows of floats, and the blocks of GGUF files.
//
// SOURCE(code, name, weights of a block, its bytes)
#define AIOCB_SOURCES(SOURCE)          \
  SOURCE(kF32Source, F32, 1, 4)        \
  SOURCE(kBf16Source, BF16, 1, 2)      \
  SOURCE(kF16Source, F16, 1, 2)        \
  SOURCE(kQ4_0Source, Q4_0, 32, 18)    \
  SOURCE(kQ4_1Source, Q4_1, 32, 20)    \
  SOURCE(kQ5_0Source, Q5_0, 32, 22)    \
  SOURCE(kQ5_1Source, Q5_1, 32, 24)    \
  SOURCE(kQ8_0Source, Q8_0, 32, 34)    \
  SOURCE(kIq4NlSource, IQ4_NL, 32, 18) \
  SOURCE(kQ4_KSource, Q4_K, 256, 144)  \
  SOURCE(kQ5_KSource, Q5_K, 256, 176)  \
  SOURCE(kQ6_KSource, Q6_K, 256, 210)

#define AIOCB_CODE(code, ...) code,
enum Source : int32_t { AIOCB_SOURCES(AIOCB_CODE) kNumSources };
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
