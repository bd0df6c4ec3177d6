// Making a model: its shape, weights and cache.
#include <cstring>

#include "handle.h"

namespace aiocb {

Handle::Handle(const Config& config, const char* isa, int num_threads) : Executor(isa, num_threads, nullptr) {
  plain.config = config;
  plain.pool = pool();
  plain.layers = memory.take<Layer>(config.num_layers);
  plain.groups = memory.take<Group>(config.num_groups);
  plain.ropes = memory.take<Rope>(config.num_ropes);
  for (int l = 0; l < config.num_layers; ++l) plain.layers[l].rope = -1;
  quantized.pool = pool();
}

static Linear* expert_linear(Experts* experts, int name) {
  if (name == kRouterLinear) return &experts->router;
  return ((name - kExpertLinear) % 2 ? experts->down : experts->gate_up) + (name - kExpertLinear) / 2;
}

Linear* Handle::linear(int layer, int name) {
  if (name == kHeadLinear) return &plain.head;
  if (layer < 0 || layer >= plain.config.num_layers || name < 0) return nullptr;
  Layer& l = plain.layers[layer];
  Linear* const parts[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
  if (name < kHeadLinear) return parts[name];
  if (name == kValueLinear) return &l.value;
  return l.experts && name < kExpertLinear + 2 * plain.config.num_experts ? expert_linear(l.experts, name) : nullptr;
}

namespace {

void check_config(const Config& c) {
  const bool has_heads = c.num_kv_heads > 0 && c.num_heads > 0 && c.num_heads % c.num_kv_heads == 0;
  if (!has_heads || c.head_dim < 16 || c.head_dim % 16 || c.head_dim > kMaxHeadDim)
    throw Failure(kBadShape, "%ld heads over %ld, of %ld: whole groups, and multiples of 16 up to %ld, are supported",
                  c.num_heads, c.num_kv_heads, c.head_dim, kMaxHeadDim);
  if (c.rotary_dim < 0 || c.rotary_dim > c.head_dim || c.rotary_dim % 2)
    throw Failure(kBadShape, "%ld rotary dimensions of %ld", c.rotary_dim, c.head_dim);
  if (c.num_layers < 1 || c.hidden_size < 1 || c.intermediate_size < 0 || c.vocab_size < 1 || c.num_groups < 1 ||
      c.num_ropes < 0 || (c.format != kF32 && c.format != kBf16))
    throw Failure(kBadShape, "%ld layers of width %ld and %ld, vocabulary %ld, %ld groups, %ld ropes, format %ld",
                  c.num_layers, c.hidden_size, c.intermediate_size, c.vocab_size, c.num_groups, c.num_ropes, c.format);
  if (c.num_experts && (c.num_experts < 0 || c.num_chosen < 1 || c.num_chosen > c.num_experts || c.expert_size < 1 ||
                        c.is_parallel || !c.is_gated))
    throw Failure(kBadShape, "%ld of %ld experts of width %ld: gated, and after attention, are supported", c.num_chosen,
                  c.num_experts, c.expert_size);
}

float** vector_of(Handle* handle, int layer, int name, int* count) {
  const Config& c = handle->plain.config;
  Norm& last = handle->plain.final_norm;
  *count = c.hidden_size;
  if (name == kFinalVector || name == kFinalBiasVector) return name == kFinalVector ? &last.weight : &last.bias;
  if (layer < 0 || layer >= c.num_layers || name < 0 || name > kSinksVector) return nullptr;
  Layer& l = handle->plain.layers[layer];
  if (name == kQVector) *count = c.head_dim * (c.qk_norm == kFullWidth ? c.num_heads : 1);
  if (name == kKVector) *count = c.head_dim * (c.qk_norm == kFullWidth ? c.num_kv_heads : 1);
  if (name == kSinksVector) *count = c.num_heads;
  float** const parts[] = {&l.input.weight,    &l.input.bias,    &l.post_attention.weight, &l.post_attention.bias,
                           &l.mlp.weight,      &l.mlp.bias,      &l.post_mlp.weight,       &l.post_mlp.bias,
                           &l.q.weight,        &l.k.weight,      &l.sinks};
  return parts[name];
}

struct Block {
  int64_t weights, bytes;
};
const Block& source_block(int source) {
#define AIOCB_BLOCK(code, name, weights, bytes) {weights, bytes},
  static const Block kBlocks[] = {AIOCB_SOURCES(AIOCB_BLOCK)};
#undef AIOCB_BLOCK
  if (source < 0 || source >= kNumSources) throw Failure(kBadShape, "there is no source %ld of weights", source);
  return kBlocks[source];
}

// What the step takes for granted of linears that share buffers.
bool is_right_shape(const Config& c, int name, int columns, int depth, int format) {
  if (name == kDownLinear && depth > c.intermediate_size) return false;
  if (name == kValueLinear && (columns != c.num_kv_heads * c.head_dim || depth != c.hidden_size)) return false;
  if (name < kRouterLinear) return true;
  if (name == kRouterLinear)
    return (columns == c.num_experts || columns == c.num_experts + 1) && depth == c.hidden_size && format == c.format;
  if ((name - kExpertLinear) % 2) return columns == c.hidden_size && depth == c.expert_size;
  return columns == (c.expert_size + kPanel / 2 - 1) / (kPanel / 2) * kPanel && depth == c.hidden_size;
}

Experts* make_experts(Handle* handle) {
  const int count = handle->plain.config.num_experts;
  Linear* linears = handle->memory.take<Linear>(2 * int64_t(count));
  Experts* experts = handle->memory.take<Experts>(1);
  *experts = {{}, linears, linears + count, -1, 2 * count + 1};
  return experts;
}

// Everything that can fail comes first: a linear is packed, and its layer a mixture of experts, or both are as before.
void set_linear(Handle* handle, int layer, int name, const char* const* rows, int columns, int format,
                const PackArgs& args, const float* bias) {
  const Config& c = handle->plain.config;
  const bool has_layer = layer >= 0 && layer < c.num_layers, is_expert = name >= kRouterLinear;
  if (is_expert && !(has_layer && c.num_experts)) throw Failure(kBadShape, "no experts in layer %ld", layer);
  if (name < 0 || name >= kExpertLinear + 2 * c.num_experts || !(has_layer || name == kHeadLinear))
    throw Failure(kBadShape, "no linear %ld in layer %ld", name, layer);
  if (columns < 1 || args.depth < 1 || !is_right_shape(c, name, columns, args.depth, format))
    throw Failure(kBadShape, "linear %ld of %ld columns, depth %ld", name, columns, args.depth);
  Experts* experts = !is_expert ? nullptr : handle->plain.layers[layer].experts;
  const int common = experts ? experts->format : -1;
  for (int column = 0; column < columns; ++column)
    if (args.depth % source_block(args.sources[column]).weights)
      throw Failure(kBadShape, "linear %ld of depth %ld in blocks of %ld", name, args.depth,
                    source_block(args.sources[column]).weights);
  const WeightFormat& kind = handle->weight_format(format);
  if (!kind.row_bytes && kind.operand != handle->weight_format(c.format).operand)
    throw Failure(kBadShape, "linear %ld has format %ld, which does not take activations of format %ld", name, format,
                  c.format);
  if (name >= kExpertLinear && common >= 0 && format != common)
    throw Failure(kBadShape, "linear %ld has format %ld, the layer's experts %ld", name, format, common);
  if (is_expert && !experts) experts = make_experts(handle);
  Linear* target = is_expert ? expert_linear(experts, name) : handle->linear(layer, name);

  Linear linear = handle->shape_linear(format, columns, args.depth);
  if (kind.row_bytes) linear.quantized = &handle->quantized;
  if (target->data && target->format == format && target->columns == columns && target->depth == linear.depth)
    linear = *target;
  else
    handle->take_weights(&linear);
  if (!bias) linear.bias = nullptr;
  if (bias && !linear.bias) handle->take_bias(&linear);
  handle->fill_linear(linear, rows, args, bias);

  if (is_expert) {
    handle->plain.layers[layer].experts = experts;
    if (name >= kExpertLinear) experts->format = format;
    if (!target->data) --experts->num_missing;
  }
  *target = linear;
  if (linear.depth > handle->deepest[format]) {
    handle->deepest[format] = linear.depth;
    const int64_t row = kind.row_bytes ? (kind.row_bytes(linear.depth) + 63) / 64 * 64 + kRowPad : 0;
    if (row > handle->quantized.stride) handle->quantized.stride = row;
    handle->max_tokens = handle->max_outputs = 0;  // buffers are too small now
  }
}

void record_inputs(Handle* handle, int layer, int name, float* squares) {
  Linear* linear = handle->linear(layer, name);
  if (linear && name == kGateUpLinear && handle->plain.layers[layer].experts) {
    for (int e = 0; e < handle->plain.config.num_experts; ++e)
      record_inputs(handle, layer, kExpertLinear + 2 * e, squares);
    if (!linear->data) return;
  }
  if (!linear || !linear->data || !linear->quantized)
    throw Failure(kBadShape, "linear %ld of layer %ld does not quantise its inputs", name, layer);
  linear->squares = squares;
}

int64_t block_bytes(const Handle* handle) {
  return int64_t(handle->plain.config.num_kv_heads) * 2 * kPageSize * handle->plain.config.head_dim * handle->element();
}

// Of a block's page in the first layer; the others are `layer_bytes` apart.
char* block_address(const Handle* handle, int group, int block) {
  if (group < 0 || group >= handle->plain.config.num_groups || block < 0 ||
      block >= handle->plain.groups[group].num_blocks)
    throw Failure(kBadBlock, "no block %ld in group %ld", block, group);
  return handle->plain.groups[group].pool + block * block_bytes(handle);
}

}  // namespace
}  // namespace aiocb

using namespace aiocb;

// Null where it fails, with the reason in `error` [kErrorBytes].
AIOCB_API Executor* aiocb_create(const Config* config, const char* isa, int num_threads, char* error) {
  try {
    check_config(*config);
    return new Handle(*config, isa, num_threads);
  } catch (...) {
    explain(error);
    return nullptr;
  }
}

AIOCB_API int aiocb_set_layer(Handle* handle, int layer, int window, int rope, int group, int group_layer, float scale) {
  return guarded(handle, [&] {
    const Config& c = handle->plain.config;
    if (layer < 0 || layer >= c.num_layers || rope >= c.num_ropes || group < 0 || group >= c.num_groups || window < 0)
      throw Failure(kBadShape, "layer %ld: window %ld, rope %ld, group %ld", layer, window, rope, group);
    Layer& l = handle->plain.layers[layer];
    l.window = window, l.rope = rope, l.group = group, l.group_layer = group_layer, l.scale = scale;
    handle->is_settled = handle->is_complete = false;
  });
}

AIOCB_API int aiocb_set_rope(Handle* handle, int rope, const float* inverse_frequencies, int count, float scaling) {
  return guarded(handle, [&] {
    if (rope < 0 || rope >= handle->plain.config.num_ropes || count != handle->plain.config.rotary_dim / 2)
      throw Failure(kBadShape, "rope %ld: %ld frequencies", rope, count);
    float* copy = handle->plain.ropes[rope].inverse_frequencies;  // again: in place
    if (!copy) copy = handle->memory.take<float>(count);
    std::memcpy(copy, inverse_frequencies, size_t(count) * 4);
    handle->plain.ropes[rope] = {copy, scaling};
  });
}

AIOCB_API int aiocb_set_vector(Handle* handle, int layer, int name, const float* values, int count) {
  return guarded(handle, [&] {
    int wanted = 0;
    float** target = vector_of(handle, layer, name, &wanted);
    if (!target) throw Failure(kBadShape, "no vector %ld in layer %ld", name, layer);
    if (count != wanted)
      throw Failure(kBadShape, "vector %ld of layer %ld has %ld values, not %ld", name, layer, wanted, count);
    float* copy = *target ? *target : handle->memory.take<float>(count);
    std::memcpy(copy, values, size_t(count) * 4);
    *target = copy;
  });
}

// `rows[c]` is the source row of packed column c (null: zeros), stored as `sources[c]`; `bias[c]` its bias. Where rows are quantised, `input_scales`
// multiply the weight along k, and `importance` weighs its errors (null: none). The sources can be freed afterwards.
AIOCB_API int aiocb_set_linear(Handle* handle, int layer, int name, const char* const* rows, int columns, int depth,
                               const int32_t* sources, int format, const float* bias,
                               const float* input_scales, const float* importance) {
  return guarded(handle, [&] {
    handle->is_complete = false;
    set_linear(handle, layer, name, rows, columns, format, {nullptr, sources, depth, input_scales, importance},
               bias);
  });
}

// From now on, add the squares of what enters a linear that quantises it to `squares` [depth]; null ends it. The gate_up of a layer
// with experts stands for all of them, which read the same rows.
AIOCB_API int aiocb_record_inputs(Handle* handle, int layer, int name, float* squares) {
  return guarded(handle, [&] { record_inputs(handle, layer, name, squares); });
}

// Rows one after another, in whole blocks of their source.
AIOCB_API int aiocb_set_embedding(Handle* handle, const char* rows, int source) {
  return guarded(handle, [&] {
    const Block& block = source_block(source);
    const int width = handle->plain.config.hidden_size;
    if (width % block.weights) throw Failure(kBadShape, "rows of %ld in blocks of %ld", width, block.weights);
    handle->plain.embedding = rows;
    handle->plain.embedding_source = source;
    handle->plain.embedding_stride = int64_t(width / block.weights) * block.bytes;
  });
}

AIOCB_API int aiocb_set_group(Handle* handle, int group, int num_blocks, int num_layers) {
  return guarded(handle, [&] {
    if (group < 0 || group >= handle->plain.config.num_groups || num_blocks < 1 || num_layers < 1)
      throw Failure(kBadShape, "group %ld: %ld blocks of %ld layers", group, num_blocks, num_layers);
    // A block is first used in all layers at once, and now and then that is the first touch of a huge page. Layers are
    // shifted against each other, so that this happens to one of them at a time: to all in one step would be felt. Where
    // the shift would be a good part of a layer, it is left out.
    const int64_t huge = int64_t(kHugePage), wanted = huge / num_layers / 4096 * 4096;
    const int64_t plain = block_bytes(handle) * num_blocks;
    const int64_t layer_bytes = plain < 8 * huge ? plain : plain + ((wanted - plain) % huge + huge) % huge;
    char* pool = handle->memory.take(layer_bytes * num_layers);
    handle->plain.groups[group] = {num_blocks, num_layers, layer_bytes, pool};
    handle->is_settled = false;
  });
}

AIOCB_API int aiocb_copy_block(Handle* handle, int group, int source, int target) {
  return guarded(handle, [&] {
    const char* from = block_address(handle, group, source);
    char* to = block_address(handle, group, target);
    const Group& g = handle->plain.groups[group];
    for (int l = 0; l < g.num_layers; ++l)
      std::memmove(to + l * g.layer_bytes, from + l * g.layer_bytes, size_t(block_bytes(handle)));
  });
}

// Raw bytes of one block, layer by layer: `num_layers * block bytes`. Direction 0 reads the cache, 1 writes it.
AIOCB_API int aiocb_move_block(Handle* handle, int group, int block, char* bytes, int direction) {
  return guarded(handle, [&] {
    char* page = block_address(handle, group, block);
    const Group& g = handle->plain.groups[group];
    const int64_t size = block_bytes(handle);
    for (int l = 0; l < g.num_layers; ++l, page += g.layer_bytes, bytes += size)
      std::memcpy(direction ? page : bytes, direction ? bytes : page, size_t(size));
  });
}
