// Arguments of token selection and log-probabilities: plain data, shared by every instruction set.
#pragma once
#include <cstdint>

namespace aiocb {

enum SelectKind : int32_t { kSkip = -1, kArgmax = 0, kWhole = 1, kTruncated = 2 };
enum SelectMode : int32_t { kChoose = 0, kLogProbabilities = 1 };
enum SelectFailure : int64_t { kInvalidRow = -1, kEmptyRow = -2 };  // NaN; nothing but -inf

// N rows of work; row n is about logits row `rows[n]`, or n. Parameters are [N] and may be null where nothing reads them.
struct SelectArgs {
  int32_t mode, num_rows;
  int64_t vocab, stride;          // floats
  const float* logits;
  const int64_t* rows;            // or null
  const int32_t* kinds;           // SelectKind
  const double* temperature;
  const int64_t* top_k;           // 0: off
  const double* top_p;            // 1: off
  const double* log_min_p;        // -inf: off
  const double* uniforms;         // in [0, 1)
  int64_t* ids;                   // out: token or SelectFailure; left alone where skipped
  // Log-probabilities of `tokens`, and the `num_top` most likely: [N][width], filled up with -inf.
  const int64_t* tokens;
  const int64_t* num_top;
  int64_t width;
  double* chosen;
  int64_t* ranks;                 // 1-based; 0 for a row with NaN
  double* top_values;
  int64_t* top_ids;
};

// Two lists of keys, weights, a copy of the row, sums of blocks, maxima of groups.
inline constexpr int64_t select_scratch_bytes(int64_t vocab) { return vocab * (8 + 8 + 8 + 4 + 4) + 16384; }

}  // namespace aiocb
