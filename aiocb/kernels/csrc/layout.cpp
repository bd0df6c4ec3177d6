// What Python mirrors, by name: it compares all of it before it calls anything else, and refuses a library that differs.
#include <cstddef>

#include "executor.h"
#include "scans.h"
#include "selection.h"

namespace {

using namespace aiocb;

struct Entry {
  const char* name;
  int64_t value;
};

// EACH(F, T, a, b, ...) is F(T, a) F(T, b) ...
#define EXPAND(...) EXPAND3(EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__))))
#define EXPAND3(...) EXPAND2(EXPAND2(EXPAND2(__VA_ARGS__)))
#define EXPAND2(...) EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__)))
#define EXPAND1(...) __VA_ARGS__
#define EACH(F, T, ...) __VA_OPT__(EXPAND(NEXT(F, T, __VA_ARGS__)))
#define NEXT(F, T, first, ...) F(T, first) __VA_OPT__(AGAIN PARENTHESES(F, T, __VA_ARGS__))
#define PARENTHESES ()
#define AGAIN() NEXT

#define FIELD(T, name) {#T "." #name, offsetof(T, name)},
#define STRUCT(T, ...) {#T, sizeof(T)}, EACH(FIELD, T, __VA_ARGS__)

#define SOURCE(code, name, weights, bytes) \
  {"source." #name, code}, {"source." #name ".weights", weights}, {"source." #name ".bytes", bytes},
#define FORMAT(code, name, W, bits, group, scale_bytes, operand)                                          \
  {"format." #name, code}, {"format." #name ".bits", bits}, {"format." #name ".group", group},             \
  {"format." #name ".scale_bytes", scale_bytes}, {"format." #name ".operand", operand},

constexpr Entry kEntries[] = {
    STRUCT(Config, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, format,
           activation, is_gated, is_layer_norm, qk_norm, is_parallel, rotary_dim, num_groups, num_ropes, num_experts,
           num_chosen, expert_size, is_renormalised, norm_eps, embedding_scale, residual_scale, logit_scale,
           attention_softcap, logit_softcap)
    STRUCT(StepArgs, num_tokens, num_sequences, num_outputs, num_new_blocks, token_ids, rows, starts, lengths,
           block_starts, block_counts, new_blocks, output_rows, logit_targets, logits, argmax)
    STRUCT(SelectArgs, mode, num_rows, vocab, stride, logits, rows, kinds, temperature, top_k, top_p, log_min_p,
           uniforms, ids, tokens, num_top, width, chosen, ranks, top_values, top_ids)
    STRUCT(PagedCall, num_tokens, num_sequences, num_heads, num_kv_heads, head_dim, format, num_blocks, window, chunk,
           alibi, scale, softcap, pool, query, key, value, query_stride, query_head_stride, key_stride, key_head_stride,
           value_stride, value_head_stride, slots, starts, lengths, pages, offsets, num_pages, sinks, slopes, out)
    STRUCT(Team, parallel, thread, size)
    STRUCT(ScanRows, num_rows, num_slots, starts, slots, is_fresh)
    STRUCT(ConvolveCall, num_channels, width, format, activation, input, input_stride, weight, bias, state, slot_stride,
           out)
    STRUCT(DeltaCall, num_key_heads, num_heads, key_dim, value_dim, format, is_by_channel, is_normed, scale, query, key,
           value, query_stride, key_stride, value_stride, decay, beta, state, slot_stride, out)
    STRUCT(SelectiveHeadsCall, num_heads, num_groups, head_dim, state_size, format, is_softplus, min_step, max_step,
           input, steps, write, read, input_stride, steps_stride, write_stride, read_stride, rates, skip, bias, state,
           slot_stride, out)
    STRUCT(SelectiveChannelsCall, num_channels, state_size, format, is_softplus, input, steps, write, read,
           input_stride, steps_stride, write_stride, read_stride, rates, skip, bias, state, slot_stride, out)
    AIOCB_FORMATS(FORMAT)
    AIOCB_SOURCES(SOURCE)
    {"operand.float32", kF32Operand}, {"operand.bfloat16", kBf16Operand}, {"operand.int8", kInt8Operand},
    {"activation.silu", kSilu}, {"activation.gelu_tanh", kGeluTanh}, {"activation.gelu", kGeluErf},
    {"activation.relu", kRelu}, {"activation.relu2", kRelu2},
    {"linear.qkv", kQkvLinear}, {"linear.out", kOutLinear}, {"linear.gate_up", kGateUpLinear}, {"linear.down", kDownLinear},
    {"linear.head", kHeadLinear}, {"linear.value", kValueLinear}, {"linear.router", kRouterLinear}, {"linear.expert_gate_up", kExpertLinear},
    {"linear.expert_down", kExpertLinear + 1},
    {"vector.input", kInputVector}, {"vector.input_bias", kInputBiasVector},
    {"vector.post_attention", kPostAttentionVector}, {"vector.post_attention_bias", kPostAttentionBiasVector},
    {"vector.mlp", kMlpVector}, {"vector.mlp_bias", kMlpBiasVector}, {"vector.post_mlp", kPostMlpVector},
    {"vector.post_mlp_bias", kPostMlpBiasVector}, {"vector.q", kQVector}, {"vector.k", kKVector},
    {"vector.sinks", kSinksVector}, {"vector.final", kFinalVector}, {"vector.final_bias", kFinalBiasVector},
    {"alibi.none", kNoAlibi}, {"alibi.exact", kExactAlibi}, {"alibi.rounded", kRoundedAlibi},
    {"qk_norm.none", kNoQkNorm}, {"qk_norm.per_head", kPerHead}, {"qk_norm.full_width", kFullWidth},
    {"select.skip", kSkip}, {"select.argmax", kArgmax}, {"select.whole", kWhole}, {"select.truncated", kTruncated},
    {"mode.choose", kChoose}, {"mode.log_probabilities", kLogProbabilities},
    {"failure.invalid_row", kInvalidRow}, {"failure.empty_row", kEmptyRow},
    {"error.no_memory", kNoMemory}, {"error.busy", kBusy}, {"error.forked", kForked},
    {"page_size", kPageSize}, {"panel", kPanel}, {"error_bytes", kErrorBytes},
    {nullptr, 0},
};

}  // namespace

// The name and the value of entry `index`; null after the last one.
AIOCB_API const char* aiocb_layout(int index, int64_t* value) {
  *value = kEntries[index].value;
  return kEntries[index].name;
}
