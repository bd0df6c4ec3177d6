// The C interface of generic.h; the end of api.cpp, whose helpers it uses.
#pragma once

namespace aiocb {

struct Generic {
  const Level* level = nullptr;
  Pool* pool = nullptr;
  Arena memory{size_t(32) << 20};  // packed linears
  Arena buffers{size_t(1) << 20};
  std::vector<Linear> linears;
  std::vector<AttentionItem> items;
  char* queries = nullptr;
  char* scratch = nullptr;
  int64_t query_bytes = 0, scratch_bytes = 0;
  char error[256] = "";

  ~Generic() {
    if (pool) pool_destroy(pool);
  }
};

namespace {

int fail(Generic* generic, int code, const char* format, long a = 0, long b = 0, long c = 0) {
  std::snprintf(generic->error, sizeof(generic->error), format, a, b, c);
  return code;
}

int check_shape(Generic* generic, const PagedCall& c) {
  if (c.num_tokens <= 0 || c.num_kv_heads < 1 || c.num_heads < 1 || c.num_heads % c.num_kv_heads)
    return fail(generic, kBadShape, "%ld tokens, %ld heads over %ld", c.num_tokens, c.num_heads, c.num_kv_heads);
  if (c.head_dim < 16 || c.head_dim % 16 || c.head_dim > kMaxHeadDim)
    return fail(generic, kBadShape, "heads of %ld: multiples of 16 up to %ld", c.head_dim, kMaxHeadDim);
  return kOk;
}

// Refuse whatever would read outside of the pages: a wrong table must not become a crash.
int check_tables(Generic* generic, const PagedCall& c) {
  int64_t total = 0;
  const int32_t* pages = c.pages;
  for (int s = 0; s < c.num_sequences; ++s) {
    if (c.lengths[s] <= 0 || c.starts[s] < 0)
      return fail(generic, kBadShape, "sequence %ld: start %ld, %ld new tokens", s, c.starts[s], c.lengths[s]);
    total += c.lengths[s];
    const int first = int(pages - c.pages) - c.offsets[s], last = first + c.num_pages[s];
    const int low = c.window > 0 && c.starts[s] >= c.window ? c.starts[s] - c.window + 1 : 0;
    if (first < 0 || first > low / kPageSize || last <= (c.starts[s] + c.lengths[s] - 1) / kPageSize)
      return fail(generic, kBadBlock, "sequence %ld has pages %ld to %ld only", s, first, last);
    for (int page = 0; page < c.num_pages[s]; ++page)
      if (pages[page] <= 0 || pages[page] >= c.num_blocks)
        return fail(generic, kBadBlock, "sequence %ld: block %ld of its table is %ld", s, page, pages[page]);
    pages += c.num_pages[s];
  }
  if (total != c.num_tokens)
    return fail(generic, kBadShape, "%ld tokens given, lengths add up to %ld", c.num_tokens, long(total));
  return kOk;
}

void plan_items(const PagedCall& c, int threads, std::vector<AttentionItem>& items) {
  const int group = c.num_heads / c.num_kv_heads, tile = kItemRows / group > 1 ? kItemRows / group : 1;
  items.clear();
  int decoding = 0, row = 0;
  for (int s = 0; s < c.num_sequences; ++s) decoding += c.lengths[s] == 1;
  for (int s = 0; s < c.num_sequences; row += c.lengths[s++]) {  // long work first
    if (c.lengths[s] == 1) continue;
    const int tiles = (c.lengths[s] + tile - 1) / tile;
    for (int head = 0; head < c.num_kv_heads; ++head)
      for (int t = tiles - 1; t >= 0; --t) {
        const int first = t * tile, count = c.lengths[s] - first < tile ? c.lengths[s] - first : tile;
        items.push_back({s, first, count, row, head, head + 1});
      }
  }
  const int heads = decoding >= 4 * threads ? c.num_kv_heads : 1;
  row = 0;
  for (int s = 0; s < c.num_sequences; row += c.lengths[s++]) {
    if (c.lengths[s] != 1) continue;
    for (int head = 0; head < c.num_kv_heads; head += heads) items.push_back({s, 0, 1, row, head, head + heads});
  }
}

bool grow(Generic* generic, const PagedCall& c) {
  const int group = c.num_heads / c.num_kv_heads, rows = group > kItemRows ? group : kItemRows;
  const int64_t query_bytes = int64_t(c.num_tokens) * c.num_heads * c.head_dim * (c.format == kF32 ? 4 : 2);
  const int64_t scratch_bytes = (int64_t(rows) * (c.head_dim * 8 + 16) + 4095) / 4096 * 4096;
  if (query_bytes <= generic->query_bytes && scratch_bytes <= generic->scratch_bytes) return true;
  if (query_bytes > generic->query_bytes) generic->query_bytes = query_bytes;
  if (scratch_bytes > generic->scratch_bytes) generic->scratch_bytes = scratch_bytes;
  generic->buffers.clear();
  generic->queries = generic->buffers.take(generic->query_bytes + 4096);
  generic->scratch = generic->buffers.take(generic->scratch_bytes * pool_size(generic->pool));
  if (generic->queries && generic->scratch) return true;
  generic->query_bytes = generic->scratch_bytes = 0;
  return false;
}

}  // namespace
}  // namespace aiocb

// `team` is null for threads of our own.
AIOCB_API Generic* aiocb_generic_create(const char* level, int num_threads, const Team* team) {
  const Level* chosen = find_level(level);
  if (!chosen) return nullptr;
  Generic* generic = new Generic;
  generic->level = chosen;
  generic->pool = team ? pool_create_team(num_threads, team) : pool_create(num_threads, nullptr);
  return generic;
}

AIOCB_API void aiocb_generic_destroy(Generic* generic) { delete generic; }
AIOCB_API const char* aiocb_generic_error(const Generic* generic) { return generic->error; }
AIOCB_API const char* aiocb_generic_level(const Generic* generic) { return generic->level->name; }

AIOCB_API int aiocb_attention_write(Generic* generic, const PagedCall* call) {
  if (int code = check_shape(generic, *call)) return code;
  const int64_t limit = int64_t(call->num_blocks) * kPageSize;
  for (int t = 0; t < call->num_tokens; ++t)
    if (call->slots[t] < kPageSize || call->slots[t] >= limit)
      return fail(generic, kBadBlock, "token %ld goes to slot %ld of %ld", t, long(call->slots[t]), long(limit));
  struct Context {
    const Level* level;
    const PagedCall* call;
  } context = {generic->level, call};
  if (int64_t(call->num_tokens) * call->num_kv_heads * call->head_dim < 2048) {
    context.level->paged_write(call, 0, 1);
    return kOk;
  }
  pool_run(generic->pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->level->paged_write(c->call, thread, num_threads);
  }, &context);
  return kOk;
}

AIOCB_API int aiocb_attention_run(Generic* generic, const PagedCall* call) {
  if (int code = check_shape(generic, *call)) return code;
  if (int code = check_tables(generic, *call)) return code;
  if (!grow(generic, *call)) return fail(generic, kNoMemory, "no memory for %ld queries", call->num_tokens);
  plan_items(*call, pool_size(generic->pool), generic->items);
  PagedModel paged = {};
  paged.call = call;
  Config& c = paged.model.config;
  c.num_heads = call->num_heads, c.num_kv_heads = call->num_kv_heads, c.head_dim = call->head_dim;
  c.format = call->format, c.attention_softcap = call->softcap;
  paged.group = {call->num_blocks, 1, 0, call->pool};
  paged.model.groups = &paged.group;
  paged.model.pool = generic->pool;
  Buffers& b = paged.model.buffers;
  b.queries = generic->queries, b.scratch = generic->scratch, b.scratch_bytes = generic->scratch_bytes;
  b.items = generic->items.data(), b.num_items = int(generic->items.size());
  b.attended = call->out;
  b.attended_stride = int64_t(call->num_heads) * call->head_dim * (call->format == kF32 ? 4 : 2);
  paged.layer.window = call->window, paged.layer.scale = call->scale;
  paged.layer.sinks = const_cast<float*>(call->sinks);
  paged.tables[0] = call->pages, paged.offsets[0] = call->offsets;
  paged.args.num_tokens = call->num_tokens, paged.args.num_sequences = call->num_sequences;
  paged.args.starts = call->starts, paged.args.lengths = call->lengths;
  paged.args.tables = paged.tables, paged.args.table_offsets = paged.offsets;
  pool_reset_counters(generic->pool, 1);
  struct Context {
    const Level* level;
    const PagedModel* paged;
  } context = {generic->level, &paged};
  pool_run(generic->pool, [](void* opaque, int thread, int num_threads) {
    Context* k = static_cast<Context*>(opaque);
    k->level->paged_attend(k->paged, thread, num_threads);
  }, &context);
  return kOk;
}

// Forget all packed linears.
AIOCB_API void aiocb_generic_clear(Generic* generic) {
  generic->linears.clear();
  generic->memory.clear();
}

// Pack a weight of `columns` rows, `stride` bytes apart; returns its index, or -1. The source is read during the call.
AIOCB_API int aiocb_generic_pack(Generic* generic, const char* weight, int64_t stride, int columns, int depth,
                                 int format, const float* bias) {
  const int step = format == kF32 ? 1 : 2;
  if (columns < 1 || depth < 1 || depth % step) return -1;
  Linear linear = {};
  linear.format = format, linear.columns = columns, linear.depth = depth;
  linear.panels = (columns + kPanel - 1) / kPanel;
  linear.panel_bytes = int64_t(depth / step) * kPanel * 4;
  linear.data = generic->memory.take(linear.panels * linear.panel_bytes + 4096);
  if (!linear.data) return -1;
  if (bias) {
    linear.bias = reinterpret_cast<float*>(generic->memory.take(int64_t(linear.panels) * kPanel * 4));
    if (!linear.bias) return -1;
    std::memcpy(linear.bias, bias, size_t(columns) * 4);
  }
  std::vector<const char*> rows(size_t(linear.panels) * kPanel, nullptr);
  for (int c = 0; c < columns; ++c) rows[size_t(c)] = weight + c * stride;
  struct Context {
    const Level* level;
    const Linear* linear;
    PackArgs args;
  } context = {generic->level, &linear, {rows.data(), format, depth}};
  pool_run(generic->pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->level->pack(c->linear, &c->args, thread, num_threads);
  }, &context);
  generic->linears.push_back(linear);
  return int(generic->linears.size()) - 1;
}

// a [rows, depth] -> out [rows, columns], both in the linear's dtype and contiguous along the row.
AIOCB_API int aiocb_generic_linear(Generic* generic, int index, const char* a, int64_t a_stride, int rows, char* out) {
  if (index < 0 || index >= int(generic->linears.size()))
    return fail(generic, kBadShape, "no linear %ld", index);
  if (rows < 1) return kOk;
  const Linear& linear = generic->linears[size_t(index)];
  struct Context {
    const Level* level;
    const Linear* linear;
    const char* a;
    int64_t a_stride, out_stride;
    int rows;
    char* out;
  } context = {generic->level, &linear, a, a_stride, int64_t(linear.columns) * (linear.format == kF32 ? 4 : 2), rows, out};
  pool_run(generic->pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->level->linear_rows(c->linear, c->a, c->a_stride, c->rows, c->out, c->out_stride, thread, num_threads);
  }, &context);
  return kOk;
}
