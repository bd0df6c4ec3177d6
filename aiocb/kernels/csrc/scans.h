// Arguments of recurrences over packed rows: plain data, shared by every instruction set.
#pragma once
#include <cstdint>

namespace aiocb {

// Which packed tokens belong to which request, and the slots of the states that they go on from, and end up in.
struct ScanRows {
  int32_t num_rows, num_slots;
  const int32_t* starts;          // [R + 1] first token of each row, and the end of the last one
  const int32_t* slots;           // [R]
  const int32_t* is_fresh;        // [R] begins with zeros, whatever is in its slot
};

// A causal convolution of each channel with its last `width` inputs. Strides in bytes; channels side by side.
struct ConvolveCall {
  int32_t num_channels, width, format, activation;  // Activation or -1
  const char* input;              // [T][C]
  int64_t input_stride;
  const float* weight;            // [width][C], the last one is for the newest input
  const float* bias;              // [C] or null
  char* state;                    // [slots][width][C], the last inputs
  int64_t slot_stride;
  char* out;                      // [T][C]
};

// The gated delta rule: S = d S + k (x) b (v - (d S)^T k), out = S^T q. Strides of tokens in bytes; heads side by side.
struct DeltaCall {
  int32_t num_key_heads, num_heads, key_dim, value_dim, format;
  int32_t is_by_channel;          // a decay for each row of S, else one for each head
  int32_t is_normed;              // q and k are made unit vectors
  float scale;                    // of q
  const char *query, *key, *value;  // [T][key heads][Dk], [T][key heads][Dk], [T][H][Dv]
  int64_t query_stride, key_stride, value_stride;
  const float* decay;             // [T][H] or [T][H][Dk], logarithms
  const float* beta;              // [T][H]
  float* state;                   // [slots][H][Dk][Dv]
  int64_t slot_stride;
  char* out;                      // [T][H][Dv]
};

// Mamba 2: S = exp(A dt) S + dt x (x) B, out = S C + D x, with dt = softplus(raw + bias).
struct SelectiveHeadsCall {
  int32_t num_heads, num_groups, head_dim, state_size, format, is_softplus;
  float min_step, max_step;       // of dt, except in rows that go on with one token
  const char *input, *steps, *write, *read;  // x [T][H][P], raw [T][H], B and C [T][groups][N]
  int64_t input_stride, steps_stride, write_stride, read_stride;
  const float *rates, *skip, *bias;  // A, D or null, bias or null: [H]
  float* state;                   // [slots][H][P][N]
  int64_t slot_stride;
  float* out;                     // [T][H][P]
};

// Mamba 1: the same for each channel, with a rate for each element of its state.
struct SelectiveChannelsCall {
  int32_t num_channels, state_size, format, is_softplus;
  const char *input, *steps, *write, *read;  // x [T][C], raw [T][C], B and C [T][N]
  int64_t input_stride, steps_stride, write_stride, read_stride;
  const float *rates, *skip, *bias;  // A [C][N], D or null, bias or null: [C]
  float* state;                   // [slots][C][N]
  int64_t slot_stride;
  float* out;                     // [T][C]
};

constexpr int kScanTile = 16;     // tokens that are prepared at once
constexpr int kScanColumns = 32;  // of a state that stay in the nearest cache from token to token

constexpr int64_t scan_padded(int64_t width) { return (width + 15) / 16 * 16; }
// Bytes of a lane: k, q and, by channel, plain k and decays of a tile, and columns of a state; v of a tile.
constexpr int64_t delta_scratch(const DeltaCall& c) {
  return 4 * (scan_padded(c.key_dim) * ((c.is_by_channel ? 4 : 2) * kScanTile + kScanColumns) + 3 * kScanTile);
}
// Of a tile: B, C and x.
constexpr int64_t selective_heads_scratch(const SelectiveHeadsCall& c) {
  return 4 * kScanTile * (2 * scan_padded(c.state_size) + scan_padded(c.head_dim) + 2);
}

}  // namespace aiocb
