// Recurrences of packed rows (recurrence.h) over torch's memory, for models that are run operator by operator.
#include "executor.h"
#include "scans.h"

namespace aiocb {
namespace {

// Refuse whatever would read or write outside of the slots: a wrong plan must not become a crash.
void check_rows(const ScanRows& rows) {
  if (rows.num_rows < 1 || rows.starts[0] != 0)
    throw Failure(kBadShape, "%ld rows from token %ld on", rows.num_rows, rows.num_rows < 1 ? -1 : rows.starts[0]);
  for (int r = 0; r < rows.num_rows; ++r) {
    if (rows.starts[r + 1] <= rows.starts[r])
      throw Failure(kBadShape, "row %ld has tokens %ld to %ld", r, rows.starts[r], rows.starts[r + 1]);
    if (rows.slots[r] <= 0 || rows.slots[r] >= rows.num_slots)
      throw Failure(kBadBlock, "row %ld has slot %ld of %ld", r, rows.slots[r], rows.num_slots);
  }
}

void check_format(int format) {
  if (format != kF32 && format != kBf16) throw Failure(kBadShape, "no activations of format %ld", format);
}

template <class Call>
void run(Executor* executor, const ScanRows* rows, const Call* call, int64_t scratch,
        void (*function)(const ScanRows*, const Call*, Pool*, Lane)) {
  check_rows(*rows);
  check_format(call->format);
  executor->reserve_scratch(scratch);
  pool_reset_counters(executor->pool(), 1);
  executor->parallel([&](Lane lane) { function(rows, call, executor->pool(), lane); });
}

}  // namespace
}  // namespace aiocb

using namespace aiocb;

AIOCB_API int aiocb_convolve(Executor* executor, const ScanRows* rows, const ConvolveCall* call) {
  return guarded(executor, [&] {
    if (call->num_channels < 1 || call->width < 1 || call->activation > kRelu2)
      throw Failure(kBadShape, "a convolution of %ld channels with %ld inputs", call->num_channels, call->width);
    run(executor, rows, call, 0, executor->isa->convolve);
  });
}

AIOCB_API int aiocb_delta_rule(Executor* executor, const ScanRows* rows, const DeltaCall* call) {
  return guarded(executor, [&] {
    if (call->key_dim < 1 || call->value_dim < 1 || call->num_key_heads < 1 || call->num_heads < 1 ||
        call->num_heads % call->num_key_heads)
      throw Failure(kBadShape, "%ld heads of %ld over %ld of %ld", call->num_heads, call->value_dim,
                    call->num_key_heads, call->key_dim);
    run(executor, rows, call, delta_scratch(*call), executor->isa->delta_rule);
  });
}

AIOCB_API int aiocb_selective_heads(Executor* executor, const ScanRows* rows, const SelectiveHeadsCall* call) {
  return guarded(executor, [&] {
    if (call->head_dim < 1 || call->state_size < 1 || call->num_groups < 1 || call->num_heads < 1 ||
        call->num_heads % call->num_groups)
      throw Failure(kBadShape, "%ld heads of %ld x %ld in %ld groups", call->num_heads, call->head_dim,
                    call->state_size, call->num_groups);
    run(executor, rows, call, selective_heads_scratch(*call), executor->isa->selective_heads);
  });
}

AIOCB_API int aiocb_selective_channels(Executor* executor, const ScanRows* rows, const SelectiveChannelsCall* call) {
  return guarded(executor, [&] {
    if (call->num_channels < 1 || call->state_size < 1)
      throw Failure(kBadShape, "%ld channels of %ld", call->num_channels, call->state_size);
    run(executor, rows, call, 0, executor->isa->selective_channels);
  });
}
