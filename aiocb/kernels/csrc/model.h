// Plain data shared by every instruction set: no inline code, no containers (see vec.h for the reason).
//
// T tokens of the step, R requests, H query heads, K key/value heads, G = H / K, D head dim, I intermediate, V vocabulary.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace aiocb {

constexpr int kPageSize = 16;     // tokens of one page: the lanes of one vector of keys
constexpr int kChunkPages = 8;    // softmax works on fixed chunks of 128 keys, counted from position 0
constexpr int kPanel = 64;        // columns of one packed weight panel
constexpr int kMaxHeadDim = 256;
constexpr int kItemRows = 48;      // rows (tokens x heads of a group) of one unit of attention work
constexpr int kOwnRows = 4;       // up to so many rows, every thread quantises for itself
constexpr int kRowPad = 64;       // bytes added to an activation row, so that rows do not share cache sets

// Numbers that Python shares: layout.cpp.
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kRelu = 3, kRelu2 = 4 };
enum QkNorm : int32_t { kNoQkNorm = 0, kPerHead = 1, kFullWidth = 2 };
enum Alibi : int32_t { kNoAlibi = 0, kExactAlibi = 1, kRoundedAlibi = 2 };
// From kExpertLinear on: gate_up and down of each expert in turn.
enum LinearName : int32_t {
  kQkvLinear, kOutLinear, kGateUpLinear, kDownLinear, kHeadLinear, kValueLinear, kRouterLinear, kExpertLinear
};
enum VectorName : int32_t {
  kInputVector, kInputBiasVector, kPostAttentionVector, kPostAttentionBiasVector, kMlpVector, kMlpBiasVector, kPostMlpVector,
  kPostMlpBiasVector, kQVector, kKVector, kSinksVector, kFinalVector, kFinalBiasVector
};

// One thread of a parallel region.
struct Lane {
  int32_t thread, num_threads;
  char* scratch;      // its own, kept from region to region
};

struct Pool;
struct SelectArgs;
struct ScanRows;
struct ConvolveCall;
struct DeltaCall;
struct SelectiveHeadsCall;
struct SelectiveChannelsCall;

// Where rows of activations are quantised: one place for all linears of a model, which run one after another.
struct QuantizedRows {
  char* data;
  int64_t stride;     // bytes of a row
  Pool* pool;
};

// Packed weights [panels] of 64 columns each, as the format wants them.
struct Linear {
  char* data;
  float* bias;        // [panels * 64], in packed column order, or null
  int32_t format;
  int32_t columns;    // of the output, without padding
  int32_t depth;      // elements along k; whole groups where rows are taken as they are
  int32_t panels;
  int64_t panel_bytes;
  const QuantizedRows* quantized;  // null: rows are taken as they are
  float* squares;     // [depth] where the squares of the inputs are added up while calibrating, else null
};

struct Norm {
  float* weight;      // null: no norm here
  float* bias;        // layer norm only
};

// A mixture of experts in place of an MLP. The MLP's own linears, where packed, are an expert that every row passes:
// its gate is one more column of the router.
struct Experts {
  Linear router;
  Linear *gate_up, *down;  // [experts]
  int32_t format;          // of the experts; the router has the model's
  int32_t num_missing;     // linears that are not packed yet
};

struct Layer {
  Linear qkv, out, gate_up, down;
  Linear value;       // the last columns of qkv, where they are packed in a format of their own
  Experts* experts;   // null: an MLP
  Norm input, post_attention, mlp, post_mlp, q, k;
  float* sinks;       // [H] or null
  float* slopes;      // [H] of alibi, or null
  int32_t window;     // 0: full attention
  int32_t chunk;      // 0: none, else a query sees its own chunk of so many positions
  int32_t alibi;
  int32_t rope;       // index of the rope table, -1: none
  int32_t group;      // cache group
  int32_t group_layer;
  float scale;        // of q . k
};

struct Config {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size;
  int32_t format;     // of weights, activations and cache: kF32 or kBf16
  int32_t activation, is_gated, is_layer_norm, qk_norm, is_parallel, rotary_dim, num_groups, num_ropes;
  int32_t num_experts, num_chosen, expert_size;  // of each mixture; experts of a row; intermediate size of one expert
  int32_t is_renormalised;                       // weights of the chosen experts add up to one
  float norm_eps, embedding_scale, residual_scale, logit_scale, attention_softcap, logit_softcap;
};

struct Group {
  int32_t num_blocks, num_layers;
  int64_t layer_bytes;  // from one layer's blocks to the next one's
  char* pool;           // [num_layers][num_blocks][K][K page, V page]
};

struct Rope {
  float* inverse_frequencies;  // [rotary_dim / 2]
  float scaling;
};

// A step across the C interface. A sequence is a row: its block tables, one per group, stay in the library from step to
// step, and a step says what changed: table = table[:block_start] + new blocks.
struct StepArgs {
  int32_t num_tokens, num_sequences, num_outputs;
  int32_t num_new_blocks;         // of each group: the sum of `block_counts`
  const int32_t* token_ids;       // [T]
  const int32_t* rows;            // [R] each once
  const int32_t* starts;          // [R] position of the first new token
  const int32_t* lengths;         // [R] new tokens
  const int32_t* block_starts;    // [R] where the new blocks go in the row's tables, at most their length
  const int32_t* block_counts;    // [R]
  const int32_t* new_blocks;      // [groups][num_new_blocks]
  const int32_t* output_rows;     // [outputs] rows of the packed tokens
  const int32_t* logit_targets;     // [outputs] row of `logits` to write, -1: none
  float* logits;                  // [slots][V]
  int32_t* argmax;                // [outputs], or SelectFailure
};

// One unit of attention work: tokens [first_token, first_token + num_tokens) of a sequence, heads [first_head, last_head).
struct AttentionItem {
  int32_t sequence, first_token, num_tokens, first_row, first_head, last_head;
};

// A step as the kernels see it.
struct Batch {
  int32_t num_tokens, num_sequences, num_outputs, num_items;
  const int32_t *token_ids, *starts, *lengths;  // as in StepArgs
  const int32_t* positions;                     // [T]
  const int32_t* const* tables;                 // [groups][R] block of each page, from position 0 on
  const AttentionItem* items;
  const int32_t *output_rows, *logit_targets;
  float* logits;
  int32_t* argmax;
};

struct Buffers {
  float *x, *branch, *qkv, *cosine, *sine;
  char *normed, *normed_mlp, *queries, *attended, *activated, *output_rows;
  float* best_values;             // [threads][outputs]
  int32_t* best_ids;
  float *router_scores, *expert_weights, *expert_results;  // see experts.h
  int32_t *chosen_experts, *expert_places;
  char *expert_rows, *expert_activated;
  int64_t router_stride, expert_places_stride;             // elements
  int64_t expert_row_stride, expert_activated_stride;      // bytes
  int64_t hidden_stride, attended_stride, activated_stride;  // bytes of one activation row
};

struct Model {
  Config config;
  Layer* layers;
  Linear head;
  Norm final_norm;
  const char* embedding;          // borrowed, row-major [V][hidden] of `embedding_source`
  int32_t embedding_source;
  int64_t embedding_stride;       // bytes of a row
  Group* groups;
  Rope* ropes;
  Buffers buffers;
  Pool* pool;
};

struct PackArgs {
  const char* const* rows;        // [panels * 64] source row of each packed column, null: zeros
  const int32_t* sources;         // [panels * 64] what each is stored as
  int32_t depth;
  const float* input_scales;      // [depth] factors of the weight along k, or null (where rows are quantised only)
  const float* importance;        // [depth] of the channels along k, or null: scales are not searched (ditto)
};

// One layer's paged attention over torch tensors (generic.h): strides in bytes, rows contiguous along the head dim.
struct PagedCall {
  int32_t num_tokens, num_sequences, num_heads, num_kv_heads, head_dim, format, num_blocks, window, chunk, alibi;
  float scale, softcap;
  char* pool;                     // [B][K][K page, V page] of one layer
  const char *query, *key, *value;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
  const int64_t* slots;           // [T] block * page size + offset of each new token
  const int32_t* starts;          // [R] position of the first new token
  const int32_t* lengths;         // [R] new tokens
  const int32_t* pages;           // the visible blocks of all sequences, one after another
  const int32_t* offsets;         // [R] where the block of position 0 is, or would be, in `pages`
  const int32_t* num_pages;       // [R] visible blocks
  const float* sinks;             // [H] or null
  const float* slopes;            // [H] or null
  char* out;                      // [T][H][D]
};

// A paged call as the whole step's attention takes it.
struct PagedModel {
  const PagedCall* call;
  Model model;
  Layer layer;
  Group group;
  Batch batch;
};

// What one instruction set offers; what takes a lane is called by every thread of the pool.
struct InstructionSet {
  const char* name;
  const WeightFormat* formats;  // by Format
  void (*step)(const Model* model, const Batch* batch, Lane lane);
  void (*attention)(const Model* model, const Batch* batch, int layer, Lane lane);
  void (*linear)(const Linear* linear, int format, const void* a, int64_t a_stride, int rows, float* out, int64_t out_stride,
                 Lane lane);
  void (*norm)(const Norm* norm, int is_layer_norm, float eps, const float* x, int rows, int width, int format,
               char* out, int64_t out_stride);
  void (*activation)(int kind, const float* gate, const float* up, int count, float* out);
  void (*select)(const SelectArgs* args, Pool* pool, Lane lane);
  float (*read_memory)(const char* data, int64_t bytes, Lane lane);
  void (*paged_write)(const PagedCall* call, Lane lane);
  void (*paged_attend)(const PagedModel* model, Lane lane);
  void (*linear_rows)(const Linear* linear, const char* a, int64_t a_stride, int rows, char* out, int64_t out_stride,
                      Lane lane);
  void (*convolve)(const ScanRows* rows, const ConvolveCall* call, Pool* pool, Lane lane);
  void (*delta_rule)(const ScanRows* rows, const DeltaCall* call, Pool* pool, Lane lane);
  void (*selective_heads)(const ScanRows* rows, const SelectiveHeadsCall* call, Pool* pool, Lane lane);
  void (*selective_channels)(const ScanRows* rows, const SelectiveChannelsCall* call, Pool* pool, Lane lane);
};

}  // namespace aiocb
