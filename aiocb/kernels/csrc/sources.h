// What weights are made of: rows of numbers as models are stored, and the blocks of GGUF files (ggml's formats, as its
// documentation and its Python package gguf describe them).
//
// A block is some weights of one row, in order; several share a scale, and some an offset. Everything is little-endian, as
// are the machines that there is an instruction set for.
#pragma once
#include "model.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

AIOCB_INLINE float half_to_float(uint16_t value) {
  const uint32_t sign = uint32_t(value & 0x8000) << 16, exponent = (value >> 10) & 31, fraction = value & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits = sign | 0x7f800000u | fraction << 13;
  float result;
  std::memcpy(&result, &bits, 4);
  if (exponent) return result;
  result = float(fraction) * (1.0f / 16777216.0f);
  return sign ? -result : result;
}

// To the nearest, even among equals; what is too large becomes the largest.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float size = value < 0.0f ? -value : value;
  if (!(size == size)) return uint16_t(sign | 0x7e00);
  if (size >= 65504.0f) return uint16_t(sign | 0x7bff);
  if (size < 6.103515625e-5f) return uint16_t(sign | uint16_t(int32_t((size * 16777216.0f + 8388608.0f) - 8388608.0f)));
  bits &= 0x7fffffffu;
  bits += 0xfffu + (bits >> 13 & 1);
  return uint16_t(sign | ((bits >> 13) - (112u << 10)));
}

AIOCB_INLINE float half_at(const char* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_to_float(bits);
}

// Thirty-two weights of four bits each, q * scale + offset.
struct Nibbles {
  float scale, offset;
  uint8_t q[32];
};

// Scale and offset of group `g` of eight, which are six bits each: four whole ones, and four of which two bits lie in the
// upper ends of the former.
AIOCB_INLINE void six_bit_pair(const uint8_t* p, int g, int* scale, int* offset) {
  if (g < 4) {
    *scale = p[g] & 63, *offset = p[g + 4] & 63;
  } else {
    *scale = (p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
    *offset = (p[g + 4] >> 4) | (p[g] >> 6) << 4;
  }
}

inline void split_nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; ++i) q[i] = p[i] & 15, q[i + 16] = p[i] >> 4;
}

// Group `g` of 32 weights of a row, where they are stored in four bits; false where they are not.
inline bool read_nibbles(int source, const char* row, int g, Nibbles* out) {
  if (source == kQ4_0Source) {
    const char* block = row + int64_t(g) * 18;
    out->scale = half_at(block), out->offset = -8.0f * out->scale;
    split_nibbles(reinterpret_cast<const uint8_t*>(block + 2), out->q);
  } else if (source == kQ4_1Source) {
    const char* block = row + int64_t(g) * 20;
    out->scale = half_at(block), out->offset = half_at(block + 2);
    split_nibbles(reinterpret_cast<const uint8_t*>(block + 4), out->q);
  } else if (source == kQ4_KSource) {
    const char* block = row + int64_t(g / 8) * 144;
    const int at = g % 8;
    int scale, offset;
    six_bit_pair(reinterpret_cast<const uint8_t*>(block + 4), at, &scale, &offset);
    out->scale = half_at(block) * float(scale), out->offset = -half_at(block + 2) * float(offset);
    const uint8_t* p = reinterpret_cast<const uint8_t*>(block + 16 + at / 2 * 32);
    for (int i = 0; i < 32; ++i) out->q[i] = at % 2 ? p[i] >> 4 : p[i] & 15;
  } else {
    return false;
  }
  return true;
}

// Group `g` of 32 weights of a row of blocks, as floats.
inline void read_group(int source, const char* row, int g, float* out) {
  Nibbles nibbles;
  if (read_nibbles(source, row, g, &nibbles)) {
    for (int i = 0; i < 32; ++i) out[i] = nibbles.scale * float(nibbles.q[i]) + nibbles.offset;
    return;
  }
  switch (source) {
    case kQ5_0Source:
    case kQ5_1Source: {
      const bool has_offset = source == kQ5_1Source;
      const char* block = row + int64_t(g) * (has_offset ? 24 : 22);
      const float scale = half_at(block), offset = has_offset ? half_at(block + 2) : -16.0f * scale;
      const char* p = block + (has_offset ? 4 : 2);
      uint32_t fifth;
      std::memcpy(&fifth, p, 4);
      uint8_t q[32];
      split_nibbles(reinterpret_cast<const uint8_t*>(p + 4), q);
      for (int i = 0; i < 32; ++i) out[i] = scale * float(q[i] | (fifth >> i & 1) << 4) + offset;
      return;
    }
    case kQ8_0Source: {
      const char* block = row + int64_t(g) * 34;
      const float scale = half_at(block);
      const signed char* q = reinterpret_cast<const signed char*>(block + 2);
      for (int i = 0; i < 32; ++i) out[i] = scale * float(q[i]);
      return;
    }
    case kIq4NlSource: {
      static const float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
      const char* block = row + int64_t(g) * 18;
      const float scale = half_at(block);
      uint8_t q[32];
      split_nibbles(reinterpret_cast<const uint8_t*>(block + 2), q);
      for (int i = 0; i < 32; ++i) out[i] = scale * kValues[q[i]];
      return;
    }
    case kQ5_KSource: {
      const char* block = row + int64_t(g / 8) * 176;
      const int at = g % 8;
      int scale, offset;
      six_bit_pair(reinterpret_cast<const uint8_t*>(block + 4), at, &scale, &offset);
      const float step = half_at(block) * float(scale), least = -half_at(block + 2) * float(offset);
      const uint8_t *fifth = reinterpret_cast<const uint8_t*>(block + 16), *p = fifth + 32 + at / 2 * 32;
      for (int i = 0; i < 32; ++i)
        out[i] = step * float((at % 2 ? p[i] >> 4 : p[i] & 15) | (fifth[i] >> at & 1) << 4) + least;
      return;
    }
    case kQ6_KSource: {
      // Two halves of 128; of each, 64 bytes hold four bits of two groups each, 32 bytes two bits of all four.
      const char* block = row + int64_t(g / 8) * 210;
      const int half = g % 8 / 4, at = g % 4;
      const uint8_t* low = reinterpret_cast<const uint8_t*>(block) + half * 64 + at % 2 * 32;
      const uint8_t* high = reinterpret_cast<const uint8_t*>(block) + 128 + half * 32;
      const signed char* scales = reinterpret_cast<const signed char*>(block) + 192 + half * 8 + at * 2;
      const float step = half_at(block + 208);
      for (int i = 0; i < 32; ++i) {
        const int q = (at < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * at) & 3) << 4;
        out[i] = step * float(scales[i / 16]) * float(q - 32);
      }
      return;
    }
  }
}

// Weights [first, first + count) of a row; of blocks, whole groups of 32 from a multiple of it on, the last of which may
// reach beyond `count`: `out` has room for it.
inline void read_source(int source, const char* row, int first, int count, float* out) {
  if (source == kF32Source) {
    std::memcpy(out, row + int64_t(first) * 4, size_t(count) * 4);
  } else if (source == kBf16Source) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + first;
    for (int i = 0; i < count; ++i) out[i] = bf16_to_float(p[i]);
  } else if (source == kF16Source) {
    for (int i = 0; i < count; ++i) out[i] = half_at(row + (int64_t(first) + i) * 2);
  } else {
    for (int i = 0; i < count; i += 32) read_group(source, row, (first + i) / 32, out + i);
  }
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
