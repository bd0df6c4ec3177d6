// The one way to run a linear: its rows are prepared where the format of its weights wants that, and multiplied.
//
// A format is a struct W, named in formats.h, in a header of its own:
//
//   takes<F>()                                    whether rows of activations may be of format F (vec.h)
//   kQuantizes                                    rows are not taken as they are
//   prepare_row(x, depth, out), row_bytes(depth)  what becomes of a row that is moved; its bytes, null: it is copied
//   multiply(linear, input, next, lane, epilogue) this lane's share of the panels, of rows that are prepared
//   pack(linear, args, panels), unpack(linear, column, out), scratch(depth, rows), multiply_add(repeats)
#pragma once
#include "epilogues.h"
#include "gemm.h"
#include "gemm_int4.h"
#include "gemm_int8.h"
#include "model.h"
#include "pool.h"

namespace aiocb {
namespace AIOCB_ISA {

// work(W()) of the format of weights, for activations of format F.
template <class F, class Work>
AIOCB_INLINE void with_weights(int format, const Work& work) {
#define AIOCB_WEIGHTS(code, name, W, ...) \
  case code:                              \
    if constexpr (W::takes<F>()) work(W()); \
    return;
  switch (format) { AIOCB_FORMATS(AIOCB_WEIGHTS) }
#undef AIOCB_WEIGHTS
}

template <class E>
AIOCB_INLINE void add_squares(const E* x, int depth, float* squares) {
  for (int i = 0; i < depth; i += 16) {
    const F16 value = load_part(x + i, depth - i);
    store_part(squares + i, fma(value, value, load_part(squares + i, depth - i)), depth - i);
  }
}

// Quantise rows of elements E. Few are quantised by every thread for itself; more are shared out, at the price of a
// barrier.
template <class W, class E>
__attribute__((noinline)) Input quantize_rows(const Linear& linear, const Input& input, const Lane& lane) {
  const QuantizedRows& place = *linear.quantized;
  auto row = [&](int index) { return reinterpret_cast<const E*>(input.rows + index * input.stride); };
  if (linear.squares && lane.thread == 0)
    for (int i = 0; i < input.count; ++i) add_squares(row(i), linear.depth, linear.squares);
  const bool is_shared = input.count > kOwnRows;
  char* quantized = place.data + (is_shared ? 0 : lane.thread * kOwnRows * place.stride);
  const Share share = is_shared ? share_of(input.count, lane) : Share{0, input.count};
  for (int i = share.begin; i < share.end; ++i) W::prepare_row(row(i), linear.depth, quantized + i * place.stride);
  if (is_shared) pool_barrier(place.pool);
  return {quantized, place.stride, input.count, true};
}

// What run_linear makes of a row, for a caller that moves it anyway.
template <class F>
AIOCB_INLINE void prepare_row(const Linear& linear, const char* row, char* out) {
  with_weights<F>(linear.format, [&](auto weights) {
    weights.prepare_row(reinterpret_cast<const typename F::Element*>(row), linear.depth, out);
  });
}

// Compute this thread's share of rows in format F. `next` is where its next stage begins to read: that is prefetched
// during the last panel. epilogue(first_row, rows, panel, sums[rows][64]) owns those outputs: no other thread sees them
// in this stage. Whatever is to be added to a linear's sums (an adapter) is added here.
//
// Returns the rows as they were multiplied: another linear that quantises can take them instead of doing it again.
template <class F, class Epilogue>
AIOCB_INLINE Input run_linear(const Linear& linear, const Input& input, const char* next, const Lane& lane,
                              Epilogue& epilogue) {
  Input rows = input;
  with_weights<F>(linear.format, [&](auto weights) {
    typedef decltype(weights) W;
    if constexpr (W::kQuantizes)
      if (!rows.is_prepared) rows = quantize_rows<W, typename F::Element>(linear, input, lane);
    W::multiply(linear, rows, next, lane, epilogue);
  });
  return rows;
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
