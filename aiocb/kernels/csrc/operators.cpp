// Single operators over torch's memory (generic.h), for models that are run operator by operator.
#include <cstring>
#include <vector>

#include "executor.h"

namespace aiocb {

struct Generic : Executor {
  using Executor::Executor;
  std::vector<Linear> linears;
  Arena buffers{size_t(1) << 20};
  char* queries = nullptr;
  int64_t query_bytes = 0;
  std::vector<const int32_t*> tables;
};

namespace {

void check_shape(const PagedCall& c) {
  if (c.num_tokens <= 0 || c.num_kv_heads < 1 || c.num_heads < 1 || c.num_heads % c.num_kv_heads)
    throw Failure(kBadShape, "%ld tokens, %ld heads over %ld", c.num_tokens, c.num_heads, c.num_kv_heads);
  if (c.head_dim < 16 || c.head_dim % 16 || c.head_dim > kMaxHeadDim)
    throw Failure(kBadShape, "heads of %ld: multiples of 16 up to %ld", c.head_dim, kMaxHeadDim);
  if (c.window < 0 || c.chunk < 0 || c.alibi < kNoAlibi || c.alibi > kRoundedAlibi ||
      (c.alibi && (!c.slopes || c.softcap > 0.0f)))
    throw Failure(kBadShape, "window %ld, chunk %ld, alibi %ld", c.window, c.chunk, c.alibi);
}

// Refuse whatever would read outside of the pages: a wrong table must not become a crash.
void check_tables(const PagedCall& c) {
  int64_t total = 0;
  const int32_t* pages = c.pages;
  for (int s = 0; s < c.num_sequences; ++s) {
    if (c.lengths[s] <= 0 || c.starts[s] < 0)
      throw Failure(kBadShape, "sequence %ld: start %ld, %ld new tokens", s, c.starts[s], c.lengths[s]);
    total += c.lengths[s];
    const int first = int(pages - c.pages) - c.offsets[s], last = first + c.num_pages[s];
    int low = c.window > 0 && c.starts[s] >= c.window ? c.starts[s] - c.window + 1 : 0;
    if (c.chunk > 0) low = c.starts[s] - c.starts[s] % c.chunk;
    if (first < 0 || first > low / kPageSize || last <= (c.starts[s] + c.lengths[s] - 1) / kPageSize)
      throw Failure(kBadBlock, "sequence %ld has pages %ld to %ld only", s, first, last);
    for (int page = 0; page < c.num_pages[s]; ++page)
      if (pages[page] <= 0 || pages[page] >= c.num_blocks)
        throw Failure(kBadBlock, "sequence %ld: block %ld of its table is %ld", s, page, pages[page]);
    pages += c.num_pages[s];
  }
  if (total != c.num_tokens)
    throw Failure(kBadShape, "%ld tokens given, lengths add up to %ld", c.num_tokens, total);
}

void attend(Generic* generic, const PagedCall& call) {
  const int64_t row_bytes = int64_t(call.num_heads) * call.head_dim * generic->element_bytes(call.format);
  if (call.num_tokens * row_bytes > generic->query_bytes) {
    generic->query_bytes = 0;
    generic->buffers.clear();
    generic->queries = generic->buffers.take(call.num_tokens * row_bytes);
    generic->query_bytes = call.num_tokens * row_bytes;
  }
  PagedModel paged = {};
  paged.call = &call;
  Config& c = paged.model.config;
  c.num_heads = call.num_heads, c.num_kv_heads = call.num_kv_heads, c.head_dim = call.head_dim;
  c.format = call.format, c.attention_softcap = call.softcap;
  paged.group = {call.num_blocks, 1, 0, call.pool};
  paged.model.groups = &paged.group;
  paged.model.pool = generic->pool();
  paged.model.buffers.queries = generic->queries;
  paged.model.buffers.attended = call.out;
  paged.model.buffers.attended_stride = row_bytes;
  paged.layer.window = call.window, paged.layer.chunk = call.chunk, paged.layer.scale = call.scale;
  paged.layer.sinks = const_cast<float*>(call.sinks);
  paged.layer.slopes = const_cast<float*>(call.slopes), paged.layer.alibi = call.alibi;
  Batch& batch = paged.batch;
  batch.num_tokens = call.num_tokens, batch.num_sequences = call.num_sequences;
  batch.starts = call.starts, batch.lengths = call.lengths;
  generic->tables.resize(size_t(call.num_sequences));
  for (int s = 0; s < call.num_sequences; ++s) generic->tables[size_t(s)] = call.pages + call.offsets[s];
  batch.tables = generic->tables.data();
  generic->plan_attention(c, &batch);
  pool_reset_counters(generic->pool(), 1);
  generic->parallel([&](Lane lane) { generic->isa->paged_attend(&paged, lane); });
}

}  // namespace
}  // namespace aiocb

using namespace aiocb;

// Null where it fails, with the reason in `error` [kErrorBytes]. `team` is null for threads of our own.
AIOCB_API Executor* aiocb_generic_create(const char* isa, int num_threads, const Team* team, char* error) {
  try {
    return new Generic(isa, num_threads, team);
  } catch (...) {
    explain(error);
    return nullptr;
  }
}

AIOCB_API int aiocb_attention_write(Generic* generic, const PagedCall* call) {
  return guarded(generic, [&] {
    check_shape(*call);
    const int64_t limit = int64_t(call->num_blocks) * kPageSize;
    for (int t = 0; t < call->num_tokens; ++t)
      if (call->slots[t] < kPageSize || call->slots[t] >= limit)
        throw Failure(kBadBlock, "token %ld goes to slot %ld of %ld", t, call->slots[t], limit);
    if (int64_t(call->num_tokens) * call->num_kv_heads * call->head_dim < 2048)
      generic->isa->paged_write(call, {0, 1, nullptr});
    else
      generic->parallel([&](Lane lane) { generic->isa->paged_write(call, lane); });
  });
}

AIOCB_API int aiocb_attention_run(Generic* generic, const PagedCall* call) {
  return guarded(generic, [&] {
    check_shape(*call);
    check_tables(*call);
    attend(generic, *call);
  });
}

// Forget all packed linears.
AIOCB_API int aiocb_generic_clear(Generic* generic) {
  return guarded(generic, [&] {
    generic->linears.clear();
    generic->memory.clear();
  });
}

// Pack a weight of `columns` rows, `stride` bytes apart, as number `index`. The source is read during the call.
AIOCB_API int aiocb_generic_pack(Generic* generic, const char* weight, int64_t stride, int columns, int depth,
                                 int format, const float* bias, int32_t* index) {
  return guarded(generic, [&] {
    const WeightFormat& kind = generic->weight_format(format);
    if (columns < 1 || depth < 1 || kind.row_bytes || depth % kind.group)
      throw Failure(kBadShape, "a weight of %ld x %ld in format %ld cannot be packed", columns, depth, format);
    std::vector<const char*> rows(static_cast<size_t>(columns));
    for (int c = 0; c < columns; ++c) rows[size_t(c)] = weight + c * stride;
    generic->linears.reserve(generic->linears.size() + 1);
    Linear linear = generic->shape_linear(format, columns, depth);
    generic->take_weights(&linear);
    if (bias) generic->take_bias(&linear);
    const std::vector<int32_t> sources(rows.size(), format == kF32 ? kF32Source : kBf16Source);
    generic->fill_linear(linear, rows.data(), {nullptr, sources.data(), depth, nullptr, nullptr}, bias);
    *index = int32_t(generic->linears.size());
    generic->linears.push_back(linear);
  });
}

// a [rows, depth] -> out [rows, columns], both in the linear's dtype and contiguous along the row.
AIOCB_API int aiocb_generic_linear(Generic* generic, int index, const char* a, int64_t a_stride, int rows, char* out) {
  return guarded(generic, [&] {
    if (index < 0 || index >= int(generic->linears.size())) throw Failure(kBadShape, "no linear %ld", index);
    if (rows < 1) return;
    const Linear& linear = generic->linears[size_t(index)];
    const int64_t out_stride = linear.columns * generic->element_bytes(linear.format);
    generic->reserve_scratch(generic->weight_format(linear.format).scratch(linear.depth, rows));
    generic->parallel([&](Lane lane) {
      generic->isa->linear_rows(&linear, a, a_stride, rows, out, out_stride, lane);
    });
  });
}
