// Paged attention for decode, prefill and mixed steps.
//
// The softmax runs over fixed chunks of 128 keys (8 pages) counted from position 0, and a row's keys are never split
// over threads: the order of every addition is a function of the row's position alone, so a row is bit-identical alone,
// in a batch, and chunked at any boundary. A masked key adds exactly zero: 0 * v, or, where that is NaN because a freed
// page was left with NaN or infinity, nothing at all (attend_strictly).
//
//   K page (pages.h)   scores of 16 keys:  one load and one broadcast of q per k step
//   V page             16 output columns:  one load and one broadcast of p per k step
//
// Where keys and values have scales of their own, scores are multiplied by those of the keys, and the weights of the
// values by those of the values; the sums of a chunk are sums of integers then.
//
// Rows of a work item are (token, head of the group) pairs: they share every load of K and V.
#pragma once
#include <cmath>
#include <type_traits>

#include "gemm.h"
#include "model.h"
#include "pages.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {

constexpr int kChunk = kChunkPages * kPageSize;
alignas(64) constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#if defined(__AVX512F__)
constexpr int kAttentionRows = 6;
constexpr int kAttentionVectors = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kAttentionRows = 4;
constexpr int kAttentionVectors = 1;
#else
constexpr int kAttentionRows = 2;
constexpr int kAttentionVectors = 1;
#endif

// scores[r][0..16 * P) of P pages; one line of `ahead[p]` is prefetched per k step and page.
template <class F, int R, int P>
AIOCB_INLINE void score_pages(const char* q, int64_t q_stride, const char* const* pages, const char* const* ahead,
                              int steps, float* scores) {
  typename F::Sums acc[R][P];
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = F::none();
  for (int k = 0; k < steps; ++k) {
    AIOCB_UNROLL for (int half = 0; half < F::kHalves; ++half) {
      typename F::B keys[P];
      AIOCB_UNROLL for (int p = 0; p < P; ++p) keys[p] = F::load_half(pages[p] + k * 64, half);
      AIOCB_UNROLL for (int r = 0; r < R; ++r) {
        const typename F::A query = F::broadcast_half(q + r * q_stride + k * wide_bytes<F>(), half);
        AIOCB_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = F::madd(acc[r][p], query, keys[p]);
      }
    }
    AIOCB_UNROLL for (int p = 0; p < P; ++p) prefetch_l2(ahead[p] + k * 64);
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int p = 0; p < P; ++p) store(scores + r * kChunk + p * 16, to_float(acc[r][p]));
}

// out[r][0..16 * C) = out * rescale[r] + p[r] . V over pages [first, last) of the chunk. `scales` are those of p's rows,
// where they have any.
template <class F, int R, int C>
AIOCB_INLINE void mix_pages(const char* p, const char* const* pages, const char* const* ahead, int first, int last,
                            int dim, int column, const float* rescale, const float* scales, float* out) {
  constexpr int steps = kPageSize / F::kStep;
  constexpr int64_t p_stride = kChunk * sizeof(typename F::Wide);
  typename F::Sums acc[R][C];
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int c = 0; c < C; ++c) {
      if constexpr (has_scales<F>())
        acc[r][c] = F::none();
      else
        acc[r][c] = load(out + r * dim + column + c * 16) * set1(rescale[r]);
    }
  for (int page = first; page < last; ++page) {
    const char* v = pages[page] + column * 4;
    const char* next = ahead[page] + column * 4;
    const char* weights = p + page * (kPageSize * sizeof(typename F::Wide));
    for (int k = 0; k < steps; ++k) {
      AIOCB_UNROLL for (int half = 0; half < F::kHalves; ++half) {
        typename F::B values[C];
        AIOCB_UNROLL for (int c = 0; c < C; ++c) values[c] = F::load_half(v + c * 64, half);
        AIOCB_UNROLL for (int r = 0; r < R; ++r) {
          const typename F::A weight = F::broadcast_half(weights + r * p_stride + k * wide_bytes<F>(), half);
          AIOCB_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = F::madd(acc[r][c], weight, values[c]);
        }
      }
      AIOCB_UNROLL for (int c = 0; c < C; ++c) prefetch_l2(next + c * 64);
      v += dim * 4;
      next += dim * 4;
    }
  }
  AIOCB_UNROLL for (int r = 0; r < R; ++r)
    AIOCB_UNROLL for (int c = 0; c < C; ++c) {
      float* target = out + r * dim + column + c * 16;
      if constexpr (has_scales<F>())
        store(target, fma(to_float(acc[r][c]), set1(scales[r]), load(target) * set1(rescale[r])));
      else
        store(target, acc[r][c]);
    }
}

struct RowState {
  float largest, sum, slope;
  float scale;  // of the query, where that is in sixteen bits
};

struct AttentionShape {
  int dim, group, window, chunk, alibi;
  float scale, softcap;
};

// The oldest key that a query at a position sees.
AIOCB_INLINE int first_seen(const AttentionShape& shape, int position) {
  if (shape.chunk > 0) return position - position % shape.chunk;
  return shape.window > 0 && position >= shape.window ? position - shape.window + 1 : 0;
}

AIOCB_INLINE F16 rounded_to_bf16(F16 x) {
  alignas(64) uint16_t halves[16];
  store(halves, x);
  return load(halves);
}

// Add what a row's slope makes of the distances to the products over pages [first, last), which are scaled later.
AIOCB_INLINE void add_alibi(const AttentionShape& shape, float slope, int chunk_start, int position, int first,
                            int last, float* scores) {
  const F16 slopes = set1(shape.alibi == kExactAlibi ? slope / shape.scale : slope);
  const F16 far = rounded_to_bf16(rounded_to_bf16(set1(float(position))) * slopes);
  for (int page = first; page < last; ++page) {
    const int key = chunk_start + page * 16;
    F16 bias;
    if (shape.alibi == kExactAlibi)
      bias = (set1(float(key - position)) + load(kLaneNumbers)) * slopes;
    else
      bias = rounded_to_bf16(rounded_to_bf16(set1(float(key)) + load(kLaneNumbers)) * slopes) - far;
    store(scores + page * 16, load(scores + page * 16) + bias);
  }
}

// Scores -> probabilities of one row over pages [first, last): masks, keeps the running maximum and sum, returns the rescale.
template <class E>
AIOCB_INLINE float softmax_row(const AttentionShape& shape, int chunk_start, int position, int first, int last,
                               float* scores, E* probabilities, RowState* state) {
  const int visible_end = position + 1 - chunk_start;
  const int visible_begin = first_seen(shape, position) - chunk_start;
  const F16 scale = set1(shape.scale);
  F16 largest = set1(-1e30f);
  for (int page = first; page < last; ++page) {
    F16 s = load(scores + page * 16) * scale;
    if (shape.softcap > 0.0f) s = set1(shape.softcap) * tanh(s * set1(1.0f / shape.softcap));
    const int lo = visible_begin - page * 16, hi = visible_end - page * 16;
    if (lo > 0 || hi < 16) s = keep_lanes(s, lo, hi, -1e38f);
    largest = max(largest, s);
    store(scores + page * 16, s);
  }
  const float peak = reduce_max(largest);
  const float top = peak > state->largest ? peak : state->largest;
  const F16 shift = set1(top);
  F16 sum = zero();
  for (int page = first; page < last; ++page) {
    F16 p = exp(load(scores + page * 16) - shift);
    sum = sum + p;
    store(probabilities + page * 16, p);
  }
  alignas(64) float lanes[16];
  store(lanes, exp(set1(state->largest - top)));
  const float rescale = lanes[0];
  state->sum = state->sum * rescale + reduce_add(sum);
  state->largest = top;
  return rescale;
}

// What has slopes is compiled by itself: a branch that is never taken costs the others a tenth (measured).
template <class F, int R, bool kHasAlibi>
__attribute__((noinline)) void attend_chunk(const AttentionShape& shape, const char* q, const char* const* keys,
                                            const char* const* values, const char* const* ahead, int chunk_start,
                                            const int* positions, int first, int last, float* out, RowState* states) {
  typedef typename F::Wide W;
  alignas(64) float scores[R * kChunk];
  alignas(64) W probabilities[R * kChunk];
  float rescale[R], scales[R];
  const int64_t q_stride = int64_t(shape.dim) * sizeof(W);
  const int steps = shape.dim / F::kStep;
  int page = first;
  if (kAttentionVectors == 4)
    for (; page + 4 <= last; page += 4)
      score_pages<F, R, 4>(q, q_stride, keys + page, values + page, steps, scores + page * 16);
  if (kAttentionVectors == 4)
    for (; page + 2 <= last; page += 2)
      score_pages<F, R, 2>(q, q_stride, keys + page, values + page, steps, scores + page * 16);
  for (; page < last; ++page)
    score_pages<F, R, 1>(q, q_stride, keys + page, values + page, steps, scores + page * 16);
  if constexpr (has_scales<F>())
    for (page = first; page < last; ++page) {
      const F16 scale = load(key_scales(keys[page], shape.dim));
      AIOCB_UNROLL for (int r = 0; r < R; ++r) {
        float* row = scores + r * kChunk + page * 16;
        store(row, load(row) * (scale * set1(states[r].scale)));
      }
    }
  if (kHasAlibi)
    for (int r = 0; r < R; ++r)
      add_alibi(shape, states[r].slope, chunk_start, positions[r], first, last, scores + r * kChunk);
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * kChunk;
    if constexpr (has_scales<F>()) {
      rescale[r] = softmax_row(shape, chunk_start, positions[r], first, last, row, row, states + r);
      for (page = first; page < last; ++page)
        store(row + page * 16, load(row + page * 16) * load(value_scales(values[page], shape.dim)));
      scales[r] = to_shorts(row + first * 16, (last - first) * 16, probabilities + r * kChunk + first * 16);
    } else {
      rescale[r] = softmax_row(shape, chunk_start, positions[r], first, last, row, probabilities + r * kChunk,
                               states + r);
    }
  }
  const char* p = reinterpret_cast<const char*>(probabilities);
  int column = 0;
  if (kAttentionVectors == 4)
    for (; column + 64 <= shape.dim; column += 64)
      mix_pages<F, R, 4>(p, values, ahead, first, last, shape.dim, column, rescale, scales, out);
  for (; column < shape.dim; column += 16)
    mix_pages<F, R, 1>(p, values, ahead, first, last, shape.dim, column, rescale, scales, out);
}

template <class F>
AIOCB_INLINE void attend_rows(int rows, const AttentionShape& shape, const char* q, const char* const* keys,
                              const char* const* values, const char* const* ahead, int chunk_start,
                              const int* positions, int first, int last, float* out, RowState* states) {
#define AIOCB_CASE(n)                                                                                                \
  case n:                                                                                                            \
    return shape.alibi ? attend_chunk<F, n, true>(shape, q, keys, values, ahead, chunk_start, positions, first, last, \
                                                  out, states)                                                       \
                       : attend_chunk<F, n, false>(shape, q, keys, values, ahead, chunk_start, positions, first,     \
                                                   last, out, states)
  switch (rows) {
    AIOCB_CASE(1);
    AIOCB_CASE(2);
#if defined(__AVX2__) || defined(__aarch64__)
    AIOCB_CASE(3);
    AIOCB_CASE(4);
#endif
#if defined(__AVX512F__)
    AIOCB_CASE(5);
    AIOCB_CASE(6);
#endif
  }
#undef AIOCB_CASE
}

AIOCB_INLINE bool all_finite(const float* x, int count) {
  F16 zeros = zero();
  for (int i = 0; i < count; i += 16) zeros = fma(load(x + i), zero(), zeros);
  return reduce_add(zeros) == 0.0f;
}

// A row once more whose sums are not finite. Slots of its pages that it does not see may be to blame: values there are
// taken for zeros, in copies of the (one or two) pages that have such slots. What it does see is added up as before.
template <class F>
__attribute__((noinline)) void attend_strictly(const AttentionShape& shape, const char* q, const char* keys_of_head,
                                               const int32_t* table, int64_t block_bytes, int position, float* out,
                                               RowState* state) {
  constexpr int kScales = has_scales<F>() ? kPageScaleBytes / 2 : 0;
  const int low = first_seen(shape, position);
  const int first_page = low / kPageSize, num_pages = position / kPageSize + 1;
  alignas(64) char copies[2][page_bytes<F>(kMaxHeadDim) + kScales];
  std::memset(out, 0, size_t(shape.dim) * 4);
  *state = {-1e30f, 0.0f, state->slope, state->scale};
  for (int chunk = first_page / kChunkPages; chunk * kChunkPages < num_pages; ++chunk) {
    const char *keys[kChunkPages], *values[kChunkPages];
    const int chunk_page = chunk * kChunkPages;
    const int begin = first_page > chunk_page ? first_page - chunk_page : 0;
    const int end = num_pages - chunk_page < kChunkPages ? num_pages - chunk_page : kChunkPages;
    for (int page = begin; page < end; ++page) {
      keys[page] = keys_of_head + table[chunk_page + page] * block_bytes;
      values[page] = keys[page] + page_bytes<F>(shape.dim);
      const int start = (chunk_page + page) * kPageSize, first = low - start, last = position + 1 - start;
      if (first <= 0 && last >= kPageSize) continue;
      char* copy = copies[last < kPageSize];
      std::memcpy(copy, values[page], size_t(page_bytes<F>(shape.dim) + kScales));
      values[page] = copy;
      for (int slot = 0; slot < kPageSize; ++slot)
        if (slot < first || slot >= last) clear_value<F>(copy, slot, shape.dim);
    }
    attend_rows<F>(1, shape, q, keys, values, values, chunk_page * kPageSize, &position, begin, end, out, state);
  }
}

// One item: a token tile of one sequence, some of its kv heads. `scratch` is sized by attention_scratch (executor.cpp).
template <class F, class C>
AIOCB_INLINE void run_attention(const Model& model, const Batch& batch, const Layer& layer, const AttentionItem& item,
                                char* scratch) {
  typedef typename F::Element E;
  typedef typename C::Wide W;
  const Config& c = model.config;
  const int dim = c.head_dim, kv_heads = c.num_kv_heads, group = c.num_heads / kv_heads;
  const AttentionShape shape = {dim, group, layer.window, layer.chunk, layer.slopes ? layer.alibi : kNoAlibi,
                                layer.scale, c.attention_softcap};
  const Group& cache = model.groups[layer.group];
  const int32_t* table = batch.tables[int64_t(layer.group) * batch.num_sequences + item.sequence];
  const int64_t block_bytes = kv_heads * head_bytes<C>(dim);
  const char* base = cache.pool + layer.group_layer * cache.layer_bytes;
  const int rows = item.num_tokens * group;
  const int blocks = (rows + kAttentionRows - 1) / kAttentionRows;
  const int start = batch.starts[item.sequence] + item.first_token;  // position of the tile's first token
  const int row0 = item.first_row + item.first_token;

  float* out = reinterpret_cast<float*>(scratch);
  const int most_rows = group > kItemRows ? group : kItemRows;
  RowState* states = reinterpret_cast<RowState*>(out + int64_t(most_rows) * dim);
  int* positions = reinterpret_cast<int*>(states + most_rows);
  char* wide = reinterpret_cast<char*>(positions + most_rows);  // the queries, where they are not used as they are

  const int last_position = start + item.num_tokens - 1;
  const int num_pages = last_position / kPageSize + 1, first_page = first_seen(shape, start) / kPageSize;

  for (int head = item.first_head; head < item.last_head; ++head) {
    const E* given = reinterpret_cast<const E*>(model.buffers.queries) +
                     (int64_t(head) * batch.num_tokens + row0) * group * dim;
    const char* q = std::is_same<W, E>::value ? reinterpret_cast<const char*>(given) : wide;
    if constexpr (F::kHalves == 2 && !has_scales<C>())
      widen_row(given, rows * dim, reinterpret_cast<float*>(wide));
    for (int r = 0; r < rows; ++r) {
      states[r] = {-1e30f, 0.0f, layer.slopes ? layer.slopes[head * group + r % group] : 0.0f, 1.0f};
      if constexpr (has_scales<C>())
        states[r].scale = to_shorts(given + int64_t(r) * dim, dim, reinterpret_cast<W*>(wide) + int64_t(r) * dim);
      positions[r] = start + r / group;
    }
    std::memset(out, 0, size_t(rows) * dim * 4);
    for (int chunk = first_page / kChunkPages; chunk * kChunkPages < num_pages; ++chunk) {
      const char *keys[kChunkPages], *values[kChunkPages], *ahead[kChunkPages];
      const int chunk_page = chunk * kChunkPages, chunk_start = chunk_page * kPageSize;
      const int begin = first_page > chunk_page ? first_page - chunk_page : 0;
      const int end = num_pages - chunk_page < kChunkPages ? num_pages - chunk_page : kChunkPages;
      for (int page = begin; page < end; ++page) {
        keys[page] = base + table[chunk_page + page] * block_bytes + head * head_bytes<C>(dim);
        values[page] = keys[page] + page_bytes<C>(dim);
        // While V is read, the K that comes next is fetched: the next chunk's, else the next head's.
        const int later = chunk_page + page + kChunkPages;
        if (later < num_pages)
          ahead[page] = base + table[later] * block_bytes + head * head_bytes<C>(dim);
        else if (head + 1 < item.last_head && page + first_page / kChunkPages * kChunkPages >= first_page &&
                 page + first_page / kChunkPages * kChunkPages < num_pages)
          ahead[page] = base + table[page + first_page / kChunkPages * kChunkPages] * block_bytes +
                        (head + 1) * head_bytes<C>(dim);
        else
          ahead[page] = values[page];
        if constexpr (has_scales<C>()) prefetch_l2(key_scales(ahead[page], dim));
      }
      for (int block = 0; block < blocks; ++block) {
        int row, count;
        even_block(rows, blocks, block, &row, &count);
        // Pages that no row of this block sees add exact zeros: skipping them changes nothing but time.
        const int block_end = positions[row + count - 1] / kPageSize + 1 - chunk_page;
        const int block_begin = first_seen(shape, positions[row]) / kPageSize - chunk_page;
        const int from = block_begin > begin ? block_begin : begin, to = block_end < end ? block_end : end;
        if (from >= to) continue;
        attend_rows<C>(count, shape, q + int64_t(row) * dim * int64_t(sizeof(W)), keys, values, ahead, chunk_start,
                       positions + row, from, to, out + int64_t(row) * dim, states + row);
      }
    }
    const bool is_finite = all_finite(out, rows * dim);
    for (int r = 0; r < rows; ++r) {
      if (!is_finite && !all_finite(out + int64_t(r) * dim, dim))
        attend_strictly<C>(shape, q + int64_t(r) * dim * int64_t(sizeof(W)), base + head * head_bytes<C>(dim),
                           table, block_bytes, positions[r], out + int64_t(r) * dim, states + r);
      const int token = row0 + r / group, query_head = head * group + r % group;
      float sum = states[r].sum, rescale = 1.0f;
      if (layer.sinks) {
        const float sink = layer.sinks[query_head];
        const float top = sink > states[r].largest ? sink : states[r].largest;
        rescale = expf(states[r].largest - top);
        sum = sum * rescale + expf(sink - top);
      }
      const F16 factor = set1(rescale / sum);
      E* target = reinterpret_cast<E*>(model.buffers.attended + token * model.buffers.attended_stride) +
                  query_head * dim;
      for (int d = 0; d < dim; d += 16) store(target + d, load(out + int64_t(r) * dim + d) * factor);
    }
  }
}

}  // namespace AIOCB_ISA
}  // namespace aiocb
