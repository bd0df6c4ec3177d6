// Running a model: the rows' block tables, buffers, and the checks before a step. A wrong plan must not become a crash.
#include <cstring>

#include "handle.h"
#include "selection.h"

namespace aiocb {

constexpr int kMostRows = 1 << 20;

void Handle::settle() {
  if (is_settled) return;
  const Config& c = plain.config;
  std::vector<int> widest(size_t(c.num_groups), -1);
  for (int l = 0; l < c.num_layers; ++l) {
    const Layer& layer = plain.layers[l];
    const Group& group = plain.groups[layer.group];
    if (layer.group_layer < 0 || layer.group_layer >= group.num_layers)
      throw Failure(kBadShape, "layer %ld is number %ld of group %ld, which has %ld", l, layer.group_layer, layer.group,
                    group.num_layers);
    int& window = widest[size_t(layer.group)];  // the widest view of the layers that share a group
    if (window < 0 || layer.window == 0 || (window > 0 && layer.window > window)) window = window == 0 ? 0 : layer.window;
  }
  windows.swap(widest);
  is_settled = true;
}

void Handle::complete() {
  if (is_complete) return;
  const Config& c = plain.config;
  auto need = [](const Linear& linear, int columns, int depth, int layer, int name) {
    if (!linear.data || linear.columns != columns || linear.depth < depth || linear.depth > depth + 1)
      throw Failure(kBadShape, "layer %ld: linear %ld is %ld x %ld, the step needs %ld x %ld", layer, name,
                    linear.columns, linear.depth, columns, depth);
  };
  for (int l = 0; l < c.num_layers; ++l) {
    const Layer& layer = plain.layers[l];
    if (layer.experts) {
      if (layer.post_mlp.weight) throw Failure(kBadShape, "layer %ld: no norm can follow experts", l);
      if (layer.experts->num_missing)
        throw Failure(kBadShape, "layer %ld lacks %ld linears of its experts", l, layer.experts->num_missing);
      if ((layer.down.data != nullptr) != (layer.experts->router.columns > c.num_experts))
        throw Failure(kBadShape, "layer %ld: a shared expert without a gate, or a gate without one", l);
    }
    need(layer.qkv, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim - layer.value.columns, c.hidden_size, l, kQkvLinear);
    need(layer.out, c.hidden_size, c.num_heads * c.head_dim, l, kOutLinear);
    if (!layer.experts || layer.down.data) {
      need(layer.down, c.hidden_size, layer.down.depth, l, kDownLinear);
      need(layer.gate_up, layer.gate_up.columns, c.hidden_size, l, kGateUpLinear);
      if (layer.gate_up.panels * (c.is_gated ? kPanel / 2 : kPanel) < layer.down.depth)
        throw Failure(kBadShape, "layer %ld: %ld columns make less than the %ld inputs of linear %ld", l,
                      layer.gate_up.columns, layer.down.depth, kDownLinear);
    }
    if ((layer.rope >= 0 && !plain.ropes[layer.rope].inverse_frequencies) ||
        (c.qk_norm && !(layer.q.weight && layer.k.weight)))
      throw Failure(kBadShape, "layer %ld lacks its rope or the norms of its heads", l);
  }
  need(plain.head, c.vocab_size, c.hidden_size, -1, kHeadLinear);
  if (!plain.embedding) throw Failure(kBadShape, "there is no embedding");
  is_complete = true;
}

void Handle::grow(int tokens, int outputs) {
  if (tokens <= max_tokens && outputs <= max_outputs) return;
  if (tokens < max_tokens) tokens = max_tokens;
  if (outputs < max_outputs) outputs = max_outputs;
  buffers.clear();
  max_tokens = max_outputs = 0;
  const Config& c = plain.config;
  Buffers& b = plain.buffers;
  const int64_t threads = num_threads(), attended = int64_t(c.num_heads) * c.head_dim;
  auto stride = [&](int64_t width) { return (width * element() + 63) / 64 * 64 + kRowPad; };
  b.hidden_stride = stride(c.hidden_size);
  b.attended_stride = stride(attended);
  b.activated_stride = stride(c.intermediate_size);
  b.x = buffers.take<float>(int64_t(tokens) * c.hidden_size);
  b.branch = buffers.take<float>(int64_t(tokens) * c.hidden_size);
  b.qkv = buffers.take<float>(int64_t(tokens) * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim);
  b.cosine = buffers.take<float>(int64_t(tokens) * c.num_ropes * c.rotary_dim / 2);
  b.sine = buffers.take<float>(int64_t(tokens) * c.num_ropes * c.rotary_dim / 2);
  b.normed = buffers.take(tokens * b.hidden_stride);
  b.normed_mlp = buffers.take(tokens * b.hidden_stride);
  b.queries = buffers.take(tokens * attended * element());
  b.attended = buffers.take(tokens * b.attended_stride);
  b.activated = buffers.take(tokens * b.activated_stride);
  b.output_rows = buffers.take(outputs * b.hidden_stride);
  const int rows = tokens > outputs ? tokens : outputs;
  if (quantized.stride) {
    const int64_t own = threads * kOwnRows;
    quantized.data = buffers.take((rows > own ? rows : own) * quantized.stride);
  }
  if (c.num_experts) {
    const int64_t pairs = int64_t(tokens) * c.num_chosen;
    b.router_stride = (c.num_experts + 1 + 15) / 16 * 16;
    b.expert_places_stride = (c.num_experts + 1 + 2 * pairs + 15) / 16 * 16;
    b.expert_row_stride = b.hidden_stride > quantized.stride ? b.hidden_stride : quantized.stride;
    b.expert_activated_stride = stride(c.expert_size);
    b.router_scores = buffers.take<float>(tokens * b.router_stride);
    b.expert_weights = buffers.take<float>(pairs);
    b.chosen_experts = buffers.take<int32_t>(pairs);
    b.expert_places = buffers.take<int32_t>(threads * b.expert_places_stride);
    b.expert_rows = buffers.take(pairs * b.expert_row_stride);
    b.expert_activated = buffers.take(pairs * b.expert_activated_stride);
    b.expert_results = buffers.take<float>(pairs * c.hidden_size);
  }
  b.best_values = buffers.take<float>(threads * outputs);
  b.best_ids = buffers.take<int32_t>(threads * outputs);
  for (int format = 0; format < kNumFormats; ++format)
    if (deepest[format]) reserve_scratch(isa->formats[format].scratch(deepest[format], rows));
  max_tokens = tokens;
  max_outputs = outputs;
}

namespace {

void check_tokens(const Config& c, const StepArgs& a) {
  if (a.num_tokens <= 0 || a.num_sequences <= 0 || a.num_outputs < 0)
    throw Failure(kBadShape, "empty step: %ld tokens of %ld sequences", a.num_tokens, a.num_sequences);
  int64_t tokens = 0, blocks = 0;
  for (int s = 0; s < a.num_sequences; ++s) {
    if (a.lengths[s] <= 0 || a.starts[s] < 0 || int64_t(a.starts[s]) + a.lengths[s] > (int64_t(1) << 30))
      throw Failure(kBadShape, "sequence %ld: start %ld, %ld new tokens", s, a.starts[s], a.lengths[s]);
    if (a.block_counts[s] < 0) throw Failure(kBadShape, "sequence %ld: %ld new blocks", s, a.block_counts[s]);
    tokens += a.lengths[s], blocks += a.block_counts[s];
  }
  if (tokens != a.num_tokens)
    throw Failure(kBadShape, "%ld tokens given, lengths add up to %ld", a.num_tokens, tokens);
  if (blocks != a.num_new_blocks)
    throw Failure(kBadShape, "%ld new blocks given, counts add up to %ld", a.num_new_blocks, blocks);
  for (int t = 0; t < a.num_tokens; ++t)
    if (a.token_ids[t] < 0 || a.token_ids[t] >= c.vocab_size)
      throw Failure(kBadToken, "token %ld has id %ld, the vocabulary has %ld", t, a.token_ids[t], c.vocab_size);
  for (int o = 0; o < a.num_outputs; ++o)
    if (a.output_rows[o] < 0 || a.output_rows[o] >= a.num_tokens)
      throw Failure(kBadOutput, "output %ld is row %ld of %ld", o, a.output_rows[o], a.num_tokens);
}

// The blocks that a sequence will see, as its table will be. Others may be anything: nobody reads them.
void check_blocks(const Handle& handle, const StepArgs& a, int sequence, int group, const std::vector<int32_t>& table,
                  const int32_t* fresh) {
  const int start = a.starts[sequence], window = handle.windows[size_t(group)];
  const int kept = a.block_starts[sequence], limit = handle.plain.groups[group].num_blocks;
  const int low = window > 0 && start >= window ? start - window + 1 : 0;
  const int last = (start + a.lengths[sequence] - 1) / kPageSize;
  const int64_t size = int64_t(kept) + a.block_counts[sequence];
  if (last >= size)
    throw Failure(kBadBlock, "sequence %ld needs %ld blocks, its table holds %ld", sequence, last + 1, size);
  for (int page = low / kPageSize; page <= last; ++page) {
    const int block = page < kept ? table[size_t(page)] : fresh[page - kept];
    if (block <= 0 || block >= limit)
      throw Failure(kBadBlock, "sequence %ld: block %ld of its table is %ld, outside the pool", sequence, page, block);
  }
}

}  // namespace

Batch Handle::begin(const StepArgs& a, int num_outputs) {
  const Config& c = plain.config;
  const size_t groups = size_t(c.num_groups);
  settle();
  check_tokens(c, a);
  ++num_steps;
  for (int s = 0; s < a.num_sequences; ++s) {
    const int row = a.rows[s];
    if (row < 0 || row >= kMostRows) throw Failure(kBadShape, "sequence %ld is row %ld of %ld", s, row, kMostRows);
    if (size_t(row) >= last_steps.size()) {
      tables.resize((size_t(row) + 1) * groups);
      last_steps.resize(size_t(row) + 1);
    }
    if (last_steps[size_t(row)] == num_steps) throw Failure(kBadShape, "sequence %ld: row %ld has two", s, row);
    last_steps[size_t(row)] = num_steps;
  }
  const int32_t* fresh = a.new_blocks;
  for (int s = 0; s < a.num_sequences; fresh += a.block_counts[s++])
    for (size_t g = 0; g < groups; ++g) {
      std::vector<int32_t>& table = tables[size_t(a.rows[s]) * groups + g];
      if (a.block_starts[s] < 0 || size_t(a.block_starts[s]) > table.size())
        throw Failure(kBadShape, "sequence %ld: new blocks from %ld on, row %ld has %ld", s, a.block_starts[s], a.rows[s],
                      table.size());
      if (windows[g] >= 0) check_blocks(*this, a, s, int(g), table, fresh + g * size_t(a.num_new_blocks));
      const size_t size = size_t(a.block_starts[s]) + size_t(a.block_counts[s]);
      if (size > table.capacity()) table.reserve(size + size / 2);
    }
  grow(a.num_tokens, num_outputs);
  Batch batch = {};
  batch.num_tokens = a.num_tokens, batch.num_sequences = a.num_sequences, batch.num_outputs = num_outputs;
  batch.token_ids = a.token_ids, batch.starts = a.starts, batch.lengths = a.lengths;
  batch.output_rows = a.output_rows, batch.logit_targets = a.logit_targets, batch.logits = a.logits, batch.argmax = a.argmax;
  plan_attention(c, &batch);
  positions.resize(size_t(a.num_tokens));
  pointers.resize(groups * size_t(a.num_sequences));
  pool_reset_counters(pool(), c.num_layers);
  pool_revive(pool());

  // Nothing fails from here on.
  fresh = a.new_blocks;
  int row = 0;
  for (int s = 0; s < a.num_sequences; fresh += a.block_counts[s++]) {
    for (size_t g = 0; g < groups; ++g) {
      std::vector<int32_t>& table = tables[size_t(a.rows[s]) * groups + g];
      const int32_t* blocks = fresh + g * size_t(a.num_new_blocks);
      table.resize(size_t(a.block_starts[s]));
      table.insert(table.end(), blocks, blocks + a.block_counts[s]);
      pointers[g * size_t(a.num_sequences) + size_t(s)] = table.data();
    }
    for (int i = 0; i < a.lengths[s]; ++i) positions[size_t(row++)] = a.starts[s] + i;
  }
  batch.positions = positions.data();
  batch.tables = pointers.data();
  return batch;
}

}  // namespace aiocb

using namespace aiocb;

AIOCB_API int aiocb_step(Handle* handle, const StepArgs* args) {
  return guarded(handle, [&] {
    handle->complete();
    if (args->num_outputs && (!args->argmax || (args->logit_targets && !args->logits)))
      throw Failure(kBadOutput, "%ld outputs without a place for them", args->num_outputs);
    const Batch batch = handle->begin(*args, args->num_outputs);
    handle->parallel([&](Lane lane) { handle->isa->step(&handle->plain, &batch, lane); });
  });
}

// Forget the block tables of all rows.
AIOCB_API int aiocb_reset_rows(Handle* handle) {
  return guarded(handle, [&] {
    handle->tables.clear();
    handle->last_steps.clear();
  });
}

// Choose tokens, or look up log-probabilities, of rows of logits: see selection.h. Rows are shared among the threads.
AIOCB_API int aiocb_select(Handle* handle, const SelectArgs* args) {
  return guarded(handle, [&] {
    if (args->num_rows < 0 || args->vocab < 1 || args->stride < 0)
      throw Failure(kBadShape, "selection of %ld rows of %ld, %ld apart", args->num_rows, args->vocab, args->stride);
    handle->reserve_scratch(select_scratch_bytes(args->vocab));
    pool_reset_counters(handle->pool(), 1);
    handle->parallel([&](Lane lane) { handle->isa->select(args, handle->pool(), lane); });
  });
}
