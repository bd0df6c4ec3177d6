// Attention and linears over torch tensors, for models that are run operator by operator.
//
// Attention is the whole step's (attention.h), on the same pages; only the queries come from a tensor with strides and
// the new keys and values are placed by slot.
#pragma once
#include "attention.h"
#include "linear.h"
#include "model.h"
#include "pool.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {
namespace {

template <class F, class C>
AIOCB_INLINE void write_rows(const PagedCall& c, const Lane& lane) {
  typedef typename F::Element E;
  const int dim = c.head_dim;
  const int64_t block_bytes = c.num_kv_heads * head_bytes<C>(dim);
  const Share tokens = share_of(c.num_tokens, lane);
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const int64_t slot = c.slots[token];
    char* pages = c.pool + slot / kPageSize * block_bytes;
    if (token + 1 < tokens.end && c.slots[token + 1] / kPageSize != slot / kPageSize) {
      const int64_t next = c.slots[token + 1];
      const char* later = c.pool + next / kPageSize * block_bytes;
      for (int h = 0; h < c.num_kv_heads; ++h, later += head_bytes<C>(dim))
        prefetch_token<C>(later, int(next % kPageSize), dim);
    }
    for (int h = 0; h < c.num_kv_heads; ++h, pages += head_bytes<C>(dim)) {
      const char* key = c.key + token * c.key_stride + h * c.key_head_stride;
      const char* value = c.value + token * c.value_stride + h * c.value_head_stride;
      store_token<C>(pages, int(slot % kPageSize), dim, reinterpret_cast<const E*>(key),
                     reinterpret_cast<const E*>(value));
    }
  }
}

// An item owns its tokens and heads, so it brings its own queries to where run_attention reads them: [K][T][G][D].
template <class F, class C>
AIOCB_INLINE void attend_items(const PagedModel& paged, const Lane& lane) {
  const PagedCall& c = *paged.call;
  const Model& model = paged.model;
  const Batch& batch = paged.batch;
  const int group = c.num_heads / c.num_kv_heads;
  const int64_t row_bytes = int64_t(c.head_dim) * sizeof(typename F::Element);
  for (int i; (i = pool_next(model.pool, 0)) < batch.num_items;) {
    const AttentionItem& item = batch.items[i];
    const int first = item.first_row + item.first_token;
    for (int head = item.first_head; head < item.last_head; ++head)
      for (int token = first; token < first + item.num_tokens; ++token)
        for (int g = 0; g < group; ++g)
          std::memcpy(model.buffers.queries + ((int64_t(head) * c.num_tokens + token) * group + g) * row_bytes,
                      c.query + token * c.query_stride + (head * group + g) * c.query_head_stride, size_t(row_bytes));
    run_attention<F, C>(model, batch, paged.layer, item, lane.scratch);
  }
}

// out = sums + bias, in the dtype of the activations.
template <class E>
struct RowsEpilogue {
  char* out;
  int64_t stride;  // bytes
  int columns;
  const float* bias;
  AIOCB_INLINE void operator()(int first, int rows, int panel, const float* sums) const {
    const int width = columns - panel * kPanel < kPanel ? columns - panel * kPanel : kPanel;
    for (int r = 0; r < rows; ++r) {
      E* target = reinterpret_cast<E*>(out + (first + r) * stride) + panel * kPanel;
      for (int c = 0; c < width; c += 16) {
        F16 value = load(sums + r * kPanel + c);
        if (bias) value = value + load(bias + panel * kPanel + c);
        if (c + 16 <= width) {
          store(target + c, value);
        } else {
          E lanes[16];
          store(lanes, value);
          std::memcpy(target + c, lanes, size_t(width - c) * sizeof(E));
        }
      }
    }
  }
};

void paged_write(const PagedCall* call, Lane lane) {
  with_format(call->format, [&](auto format) {
    typedef decltype(format) F;
    with_cache<F>(call->cache_format, [&](auto cache) { write_rows<F, decltype(cache)>(*call, lane); });
  });
}

void paged_attend(const PagedModel* model, Lane lane) {
  with_format(model->call->format, [&](auto format) {
    typedef decltype(format) F;
    with_cache<F>(model->call->cache_format, [&](auto cache) { attend_items<F, decltype(cache)>(*model, lane); });
  });
}

void linear_rows(const Linear* linear, const char* a, int64_t a_stride, int rows, char* out, int64_t out_stride,
                 Lane lane) {
  with_format(linear->format, [&](auto format) {
    typedef decltype(format) F;
    RowsEpilogue<typename F::Element> epilogue = {out, out_stride, linear->columns, linear->bias};
    run_linear<F>(*linear, {a, a_stride, rows}, nullptr, lane, epilogue);
  });
}

}  // namespace
}  // namespace AIOCB_ISA
}  // namespace aiocb
