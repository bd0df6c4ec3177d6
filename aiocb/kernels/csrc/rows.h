// Work on single rows: embedding, norms, rotary embedding with the cache write.
#pragma once
#include <cmath>

#include "model.h"
#include "sources.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

// out = norm(x) * weight + bias; without a weight, a plain copy. `x` and `out` may be the same.
template <class E>
AIOCB_INLINE void norm_row(const Norm& norm, bool is_layer_norm, float eps, const float* x, int width, E* out) {
  if (!norm.weight) {
    for (int i = 0; i < width; i += 16) store_part(out + i, load_part(x + i, width - i), width - i);
    return;
  }
  float mean = 0.0f;
  if (is_layer_norm) {
    F16 sum = zero();
    for (int i = 0; i < width; i += 16) sum = sum + load_part(x + i, width - i);
    mean = reduce_add(sum) / float(width);
  }
  F16 squares = zero();
  for (int i = 0; i < width; i += 16) {
    F16 value = load_part(x + i, width - i) - set1(mean);
    if (width - i < 16) value = keep_lanes(value, 0, width - i, 0.0f);
    squares = fma(value, value, squares);
  }
  const F16 scale = set1(1.0f / std::sqrt(reduce_add(squares) / float(width) + eps));
  for (int i = 0; i < width; i += 16) {
    F16 value = (load_part(x + i, width - i) - set1(mean)) * scale * load_part(norm.weight + i, width - i);
    if (norm.bias) value = value + load_part(norm.bias + i, width - i);
    store_part(out + i, value, width - i);
  }
}

AIOCB_INLINE void embed_row(const Model& model, int token, float* x) {
  const Config& c = model.config;
  const F16 scale = set1(c.embedding_scale);
  const char* source = model.embedding + token * model.embedding_stride;
  if (model.embedding_source != kF32Source && model.embedding_source != kBf16Source) {
    for (int i = 0; i < c.hidden_size; i += kInt8Group) {
      float values[kInt8Group];
      const int count = c.hidden_size - i < kInt8Group ? c.hidden_size - i : kInt8Group;
      read_source(model.embedding_source, source, i, count, values);
      for (int j = 0; j < count; ++j) x[i + j] = values[j] * c.embedding_scale;
    }
  } else if (model.embedding_source == kBf16Source) {
    const uint16_t* row = reinterpret_cast<const uint16_t*>(source);
    int i = 0;
    for (; i + 16 <= c.hidden_size; i += 16) store(x + i, load(row + i) * scale);
    for (; i < c.hidden_size; ++i) x[i] = bf16_to_float(row[i]) * c.embedding_scale;
  } else {
    const float* row = reinterpret_cast<const float*>(source);
    for (int i = 0; i < c.hidden_size; i += 16)
      store_part(x + i, load_part(row + i, c.hidden_size - i) * scale, c.hidden_size - i);
  }
}

AIOCB_INLINE void rotate_head(const Config& c, const float* cosine, const float* sine, float* x) {
  const int half = c.rotary_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    F16 a = load(x + i), b = load(x + half + i), co = load(cosine + i), si = load(sine + i);
    store(x + i, a * co - b * si);
    store(x + half + i, b * co + a * si);
  }
  for (; i < half; ++i) {
    float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

// The 4-byte columns of a K page are as many cache lines: ask for those of the next token while this one is computed.
template <class F>
AIOCB_INLINE void prefetch_place(const Model& model, const Layer& layer, int position, int block) {
  const Config& c = model.config;
  const Group& cache = model.groups[layer.group];
  const int64_t page_bytes = int64_t(kPageSize) * c.head_dim * sizeof(typename F::Element);
  const char* pages = cache.pool + layer.group_layer * cache.layer_bytes + int64_t(block) * c.num_kv_heads * 2 * page_bytes;
  const int64_t value = int64_t(position % kPageSize / F::kStep) * c.head_dim * 4;
  for (int h = 0; h < c.num_kv_heads; ++h, pages += 2 * page_bytes) {
    for (int d = 0; d < c.head_dim / F::kStep; ++d) __builtin_prefetch(pages + d * 64, 1, 2);
    for (int d = 0; d < c.head_dim; d += 16) __builtin_prefetch(pages + page_bytes + value + d * 4, 1, 2);
  }
}

// One token of one layer: norm and rotate q and k, put q where attention reads it ([K][T][G][D]), k and v in the cache.
template <class F>
AIOCB_INLINE void place_token(const Model& model, const Layer& layer, int token, int num_tokens, int position,
                              int block, float* qkv) {
  typedef typename F::Element E;
  const Config& c = model.config;
  const int heads = c.num_heads, kv_heads = c.num_kv_heads, dim = c.head_dim, group = heads / kv_heads;
  const Buffers& buffers = model.buffers;
  float* k = qkv + heads * dim;
  float* v = k + kv_heads * dim;
  if (c.qk_norm == kFullWidth) {
    norm_row(layer.q, false, c.norm_eps, qkv, heads * dim, qkv);
    norm_row(layer.k, false, c.norm_eps, k, kv_heads * dim, k);
  }
  const float *cosine = nullptr, *sine = nullptr;
  if (layer.rope >= 0) {
    const int64_t offset = (int64_t(layer.rope) * num_tokens + token) * (c.rotary_dim / 2);
    cosine = buffers.cosine + offset, sine = buffers.sine + offset;
  }
  for (int h = 0; h < heads; ++h) {
    float* head = qkv + h * dim;
    if (c.qk_norm == kPerHead) norm_row(layer.q, false, c.norm_eps, head, dim, head);
    if (cosine) rotate_head(c, cosine, sine, head);
    E* target = reinterpret_cast<E*>(buffers.queries) +
                ((int64_t(h / group) * num_tokens + token) * group + h % group) * dim;
    for (int d = 0; d < dim; d += 16) store(target + d, load(head + d));
  }
  const Group& cache = model.groups[layer.group];
  const int64_t page_bytes = int64_t(kPageSize) * dim * sizeof(E);
  char* pages = cache.pool + layer.group_layer * cache.layer_bytes + int64_t(block) * kv_heads * 2 * page_bytes;
  const int slot = position % kPageSize;
  constexpr int step = F::kStep;
  for (int h = 0; h < kv_heads; ++h, pages += 2 * page_bytes) {
    float* head = k + h * dim;
    if (c.qk_norm == kPerHead) norm_row(layer.k, false, c.norm_eps, head, dim, head);
    if (cosine) rotate_head(c, cosine, sine, head);
    alignas(64) E packed[kMaxHeadDim];
    for (int d = 0; d < dim; d += 16) store(packed + d, load(head + d));
    // K page: [D / step][16 tokens][step]
    char* column = pages + slot * 4;
    for (int d = 0; d < dim / step; ++d)
      std::memcpy(column + d * 64, reinterpret_cast<const char*>(packed) + d * 4, 4);
    // V page: [16 tokens / step][D][step]
    for (int d = 0; d < dim; d += 16) store(packed + d, load(v + h * dim + d));
    E* line = reinterpret_cast<E*>(pages + page_bytes) + int64_t(slot / step) * dim * step + slot % step;
    for (int d = 0; d < dim; ++d) line[d * step] = packed[d];
  }
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
