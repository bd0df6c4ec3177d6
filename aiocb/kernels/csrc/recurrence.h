// Recurrences of packed rows: convolution, gated delta rule, Mamba 2 and Mamba 1 (scans.h), token by token in fp32.
//
// A state is read once, kept in the nearest cache while the tokens of its row pass, and written once. What is computed
// for a row depends on nothing but the row, in an order that does not depend on where it is cut: so a row alone, in a
// batch, and in chunks of any size gives the same bits.
#pragma once
#include <cmath>

#include "epilogues.h"
#include "pool.h"
#include "scans.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {
namespace {

// work(row, part) for every part of every row. The last rows first: these are the long ones (see attention/base.py).
template <class Work>
AIOCB_INLINE void for_each_part(const ScanRows& rows, int num_parts, Pool* pool, const Work& work) {
  const int count = rows.num_rows * num_parts;
  for (int i; (i = pool_next(pool, 0)) < count;) work(rows.num_rows - 1 - i / num_parts, i % num_parts);
}

template <class E>
AIOCB_INLINE void widen(const char* from, int count, float* to) {
  const E* values = reinterpret_cast<const E*>(from);
  for (int i = 0; i < count; i += 16) store(to + i, load_part(values + i, count - i));
}

// max(x, 0) + log(1 + u) with u = exp(-|x|), by the series of 2 atanh(u / (2 + u)): relative error about 1e-7. By lanes,
// so that it does not matter who is computed beside whom.
AIOCB_INLINE F16 softplus(F16 x) {
  const F16 u = exp(zero() - abs(x)), s = u / (u + set1(2.0f)), square = s * s;
  F16 sum = set1(1.0f / 17);
  for (int n = 15; n > 0; n -= 2) sum = fma(sum, square, set1(1.0f / float(n)));
  return fma(s + s, sum, max(x, zero()));
}

// ---- convolution ------------------------------------------------------------------------------------------------

template <class E>
AIOCB_INLINE void convolve_part(const ScanRows& rows, const ConvolveCall& c, int row, int first, int count) {
  const int start = rows.starts[row], length = rows.starts[row + 1] - start, width = c.width;
  const bool is_fresh = rows.is_fresh[row] != 0;
  E* state = reinterpret_cast<E*>(c.state + rows.slots[row] * c.slot_stride) + first;
  auto input = [&](int token) {
    return reinterpret_cast<const E*>(c.input + int64_t(start + token) * c.input_stride) + first;
  };
  E* out = reinterpret_cast<E*>(c.out) + int64_t(start) * c.num_channels + first;
  for (int token = 0; token < length; ++token, out += c.num_channels) {
    if (width == 4 && token >= 3 && count % 16 == 0) {  // nearly all of a prompt
      const E* inputs[4] = {input(token - 3), input(token - 2), input(token - 1), input(token)};
      for (int i = 0; i < count; i += 16) {
        const float* weight = c.weight + first + i;
        F16 sum = c.bias ? load(c.bias + first + i) : zero();
        AIOCB_UNROLL for (int tap = 0; tap < 4; ++tap)
          sum = fma(load(weight + int64_t(tap) * c.num_channels), load(inputs[tap] + i), sum);
        store(out + i, c.activation < 0 ? sum : activate(c.activation, sum));
      }
      continue;
    }
    for (int i = 0; i < count; i += 16) {
      F16 sum = c.bias ? load_part(c.bias + first + i, count - i) : zero();
      for (int tap = 0; tap < width; ++tap) {
        const int place = token + 1 - width + tap;
        if (place < 0 && is_fresh) continue;
        const E* x = place < 0 ? state + int64_t(width + place) * c.num_channels : input(place);
        sum = fma(load_part(c.weight + int64_t(tap) * c.num_channels + first + i, count - i),
                  load_part(x + i, count - i), sum);
      }
      store_part(out + i, c.activation < 0 ? sum : activate(c.activation, sum), count - i);
    }
  }
  for (int tap = 0; tap < width; ++tap) {
    E* target = state + int64_t(tap) * c.num_channels;
    const int place = length - width + tap;
    if (place >= 0)
      std::memcpy(target, input(place), size_t(count) * sizeof(E));
    else if (is_fresh)
      std::memset(target, 0, size_t(count) * sizeof(E));
    else
      std::memcpy(target, state + int64_t(width + place) * c.num_channels, size_t(count) * sizeof(E));
  }
}

void convolve(const ScanRows* rows, const ConvolveCall* call, Pool* pool, Lane) {
  constexpr int kBlock = 64;
  with_format(call->format, [&](auto format) {
    for_each_part(*rows, (call->num_channels + kBlock - 1) / kBlock, pool, [&](int row, int block) {
      const int first = block * kBlock, left = call->num_channels - first;
      convolve_part<typename decltype(format)::Element>(*rows, *call, row, first, left < kBlock ? left : kBlock);
    });
  });
}

// ---- gated delta rule -------------------------------------------------------------------------------------------

// One head of one row. The decay of the old state is moved to what it is multiplied with, and the output is taken from
// the old state: out = d S^T q + (k . q) delta. So a token reads the state twice, the second time from the cache.
template <class E, bool kByChannel>
struct DeltaHead {
  const DeltaCall& c;
  const int head;
  const int dim;    // of keys, padded
  float *keys, *queries, *plain_keys, *decays, *block;
  float *scalar_decays, *products, *betas;

  AIOCB_INLINE DeltaHead(const DeltaCall& call, int h, char* scratch)
      : c(call), head(h), dim(int(scan_padded(call.key_dim))) {
    float* next = reinterpret_cast<float*>(scratch);
    auto take = [&](int64_t count) { return next += count, next - count; };
    keys = take(kScanTile * dim), queries = take(kScanTile * dim);
    plain_keys = kByChannel ? take(kScanTile * dim) : keys;
    decays = kByChannel ? take(kScanTile * dim) : nullptr;
    block = take(int64_t(dim) * kScanColumns);
    scalar_decays = take(kScanTile), products = take(kScanTile), betas = take(kScanTile);
  }

  AIOCB_INLINE void prepare(int token, int i) const {
    const int key_head = head / (c.num_heads / c.num_key_heads);
    const int64_t size = int64_t(key_head) * c.key_dim * sizeof(E);
    float *key = keys + i * dim, *query = queries + i * dim, *plain = plain_keys + i * dim;
    widen<E>(c.key + token * c.key_stride + size, c.key_dim, plain);
    widen<E>(c.query + token * c.query_stride + size, c.key_dim, query);
    F16 key_norm = zero(), query_norm = zero();
    for (int d = 0; d < dim; d += 16) {
      const F16 k = load(plain + d), q = load(query + d);
      key_norm = fma(k, k, key_norm), query_norm = fma(q, q, query_norm);
    }
    const float floor = 1e-6f;
    const float key_scale = c.is_normed ? 1.0f / std::sqrt(reduce_add(key_norm) + floor) : 1.0f;
    const float query_scale = (c.is_normed ? 1.0f / std::sqrt(reduce_add(query_norm) + floor) : 1.0f) * c.scale;
    F16 product = zero();
    for (int d = 0; d < dim; d += 16) {
      const F16 k = load(plain + d) * set1(key_scale), q = load(query + d) * set1(query_scale);
      product = fma(k, q, product);
      store(plain + d, k);
      store(query + d, q);
    }
    products[i] = reduce_add(product);
    const int64_t place = int64_t(token) * c.num_heads + head;
    betas[i] = c.beta[place];
    if (!kByChannel) {
      scalar_decays[i] = std::exp(c.decay[place]);
      return;
    }
    scalar_decays[i] = 1.0f;
    const float* logarithms = c.decay + place * c.key_dim;
    for (int d = 0; d < dim; d += 16) {
      const F16 decay = exp(load_part(logarithms + d, c.key_dim - d));
      store(decays + i * dim + d, decay);
      store(key + d, load(plain + d) * decay);
      store(query + d, load(query + d) * decay);
    }
  }

  // All tokens of a tile pass `kCount` times sixteen columns of the state.
  template <int kCount, bool kWhole>
  AIOCB_INLINE void pass(float* state, int column, int first, int num_tokens, bool is_fresh) const {
    const int width = c.value_dim - column;
    auto get = [&](const float* p, int j) { return kWhole ? load(p + j * 16) : load_part(p + j * 16, width - j * 16); };
    auto put = [&](float* p, int j, F16 x) {
      if (kWhole)
        store(p + j * 16, x);
      else if (width > j * 16)
        store_part(p + j * 16, x, width - j * 16);
    };
    for (int i = 0; i < num_tokens; ++i) {
      const float* from = i == 0 ? state + column : block;
      float* to = i == num_tokens - 1 ? state + column : block;
      const int from_stride = i == 0 ? c.value_dim : kScanColumns;
      const int to_stride = i == num_tokens - 1 ? c.value_dim : kScanColumns;
      const float *key = keys + i * dim, *query = queries + i * dim, *plain = plain_keys + i * dim;
      const bool is_zero = is_fresh && i == 0;

      F16 predicted[2][kCount], read[2][kCount];
      AIOCB_UNROLL for (int u = 0; u < 2; ++u)
        AIOCB_UNROLL for (int j = 0; j < kCount; ++j) predicted[u][j] = read[u][j] = zero();
      auto look = [&](int d, int u) {
        const F16 k = set1(key[d]), q = set1(query[d]);
        AIOCB_UNROLL for (int j = 0; j < kCount; ++j) {
          const F16 s = get(from + int64_t(d) * from_stride, j);
          predicted[u][j] = fma(k, s, predicted[u][j]);
          read[u][j] = fma(q, s, read[u][j]);
        }
      };
      if (!is_zero) {
        int d = 0;
        for (; d + 2 <= c.key_dim; d += 2) look(d, 0), look(d + 1, 1);
        if (d < c.key_dim) look(d, 0);
      }

      const float decay = scalar_decays[i];
      F16 delta[kCount];
      const E* value = reinterpret_cast<const E*>(c.value + int64_t(first + i) * c.value_stride) +
                       int64_t(head) * c.value_dim + column;
      E* out = reinterpret_cast<E*>(c.out) + (int64_t(first + i) * c.num_heads + head) * c.value_dim + column;
      AIOCB_UNROLL for (int j = 0; j < kCount; ++j) {
        const int count = kWhole ? 16 : width - j * 16;
        const F16 old = (predicted[0][j] + predicted[1][j]) * set1(decay);
        delta[j] = (load_part(value + j * 16, count) - old) * set1(betas[i]);
        const F16 result = fma((read[0][j] + read[1][j]), set1(decay), delta[j] * set1(products[i]));
        if (count > 0) store_part(out + j * 16, result, count);
      }

      for (int d = 0; d < c.key_dim; ++d) {
        const F16 k = set1(plain[d]), a = set1(kByChannel ? decays[i * dim + d] : decay);
        AIOCB_UNROLL for (int j = 0; j < kCount; ++j) {
          const F16 s = is_zero ? zero() : get(from + int64_t(d) * from_stride, j) * a;
          put(to + int64_t(d) * to_stride, j, fma(k, delta[j], s));
        }
      }
    }
  }

  AIOCB_INLINE void run(float* state, int first, int length, bool is_fresh) const {
    constexpr int kCount = kScanColumns / 16;
    for (int done = 0; done < length; done += kScanTile) {
      const int count = length - done < kScanTile ? length - done : kScanTile;
      for (int i = 0; i < count; ++i) prepare(first + done + i, i);
      for (int column = 0; column < c.value_dim; column += kScanColumns) {
        if (c.value_dim - column >= kScanColumns)
          pass<kCount, true>(state, column, first + done, count, is_fresh && done == 0);
        else
          pass<kCount, false>(state, column, first + done, count, is_fresh && done == 0);
      }
    }
  }
};

template <class E, bool kByChannel>
AIOCB_INLINE void delta_heads(const ScanRows& rows, const DeltaCall& c, Pool* pool, const Lane& lane) {
  for_each_part(rows, c.num_heads, pool, [&](int row, int head) {
    char* state = reinterpret_cast<char*>(c.state) + rows.slots[row] * c.slot_stride;
    const DeltaHead<E, kByChannel> work(c, head, lane.scratch);
    work.run(reinterpret_cast<float*>(state) + int64_t(head) * c.key_dim * c.value_dim, rows.starts[row],
             rows.starts[row + 1] - rows.starts[row], rows.is_fresh[row] != 0);
  });
}

void delta_rule(const ScanRows* rows, const DeltaCall* call, Pool* pool, Lane lane) {
  with_format(call->format, [&](auto format) {
    typedef typename decltype(format)::Element E;
    if (call->is_by_channel)
      delta_heads<E, true>(*rows, *call, pool, lane);
    else
      delta_heads<E, false>(*rows, *call, pool, lane);
  });
}

// ---- Mamba 2 ----------------------------------------------------------------------------------------------------

template <class E>
struct SelectiveHead {
  const SelectiveHeadsCall& c;
  const int head, size;  // padded state size
  float *write, *read, *inputs, *steps, *decays;

  AIOCB_INLINE SelectiveHead(const SelectiveHeadsCall& call, int h, char* scratch)
      : c(call), head(h), size(int(scan_padded(call.state_size))) {
    const int width = int(scan_padded(call.head_dim));
    write = reinterpret_cast<float*>(scratch), read = write + kScanTile * size, inputs = read + kScanTile * size;
    steps = inputs + kScanTile * width, decays = steps + kScanTile;
  }

  AIOCB_INLINE void prepare(int token, int i, bool is_clamped) const {
    const int64_t group = int64_t(head / (c.num_heads / c.num_groups)) * c.state_size * sizeof(E);
    widen<E>(c.write + token * c.write_stride + group, c.state_size, write + i * size);
    widen<E>(c.read + token * c.read_stride + group, c.state_size, read + i * size);
    widen<E>(c.input + token * c.input_stride + int64_t(head) * c.head_dim * sizeof(E), c.head_dim,
             inputs + i * scan_padded(c.head_dim));
    float lanes[16];
    store(lanes, load_part(reinterpret_cast<const E*>(c.steps + token * c.steps_stride) + head, 1));
    float step = lanes[0] + (c.bias ? c.bias[head] : 0.0f);
    if (c.is_softplus) {
      store(lanes, softplus(set1(step)));
      step = lanes[0];
    }
    if (is_clamped) step = step < c.min_step ? c.min_step : step > c.max_step ? c.max_step : step;
    steps[i] = step;
    decays[i] = std::exp(step * c.rates[head]);
  }

  // All tokens of a tile pass `kRows` rows of the state.
  template <int kRows, bool kWhole>
  AIOCB_INLINE void pass(float* state, int p, int first, int num_tokens, bool is_fresh) const {
    const int width = c.state_size;
    auto get = [&](const float* x, int n) { return kWhole ? load(x + n) : load_part(x + n, width - n); };
    const float skip = c.skip ? c.skip[head] : 0.0f;
    for (int i = 0; i < num_tokens; ++i) {
      const float* x = inputs + i * scan_padded(c.head_dim) + p;
      const F16 decay = set1(decays[i]);
      F16 sums[kRows], added[kRows];
      AIOCB_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = zero(), added[r] = set1(steps[i] * x[r]);
      for (int n = 0; n < width; n += 16) {
        const F16 b = load(write + i * size + n), to = load(read + i * size + n);
        AIOCB_UNROLL for (int r = 0; r < kRows; ++r) {
          float* line = state + int64_t(p + r) * width;
          F16 s = added[r] * b;
          if (!is_fresh || i > 0) s = fma(get(line, n), decay, s);
          if (kWhole)
            store(line + n, s);
          else
            store_part(line + n, s, width - n);
          sums[r] = fma(s, to, sums[r]);
        }
      }
      float* out = c.out + (int64_t(first + i) * c.num_heads + head) * c.head_dim + p;
      AIOCB_UNROLL for (int r = 0; r < kRows; ++r) out[r] = reduce_add(sums[r]) + skip * x[r];
    }
  }

  template <bool kWhole>
  AIOCB_INLINE void passes(float* state, int first, int num_tokens, bool is_fresh) const {
    int p = 0;
    for (; p + 4 <= c.head_dim; p += 4) pass<4, kWhole>(state, p, first, num_tokens, is_fresh);
    for (; p < c.head_dim; ++p) pass<1, kWhole>(state, p, first, num_tokens, is_fresh);
  }

  AIOCB_INLINE void run(float* state, int first, int length, bool is_fresh) const {
    for (int done = 0; done < length; done += kScanTile) {
      const int count = length - done < kScanTile ? length - done : kScanTile;
      for (int i = 0; i < count; ++i) prepare(first + done + i, i, length > 1 || is_fresh);
      if (c.state_size % 16 == 0)
        passes<true>(state, first + done, count, is_fresh && done == 0);
      else
        passes<false>(state, first + done, count, is_fresh && done == 0);
    }
  }
};

void selective_heads(const ScanRows* rows, const SelectiveHeadsCall* call, Pool* pool, Lane lane) {
  with_format(call->format, [&](auto format) {
    for_each_part(*rows, call->num_heads, pool, [&](int row, int head) {
      char* state = reinterpret_cast<char*>(call->state) + rows->slots[row] * call->slot_stride;
      const SelectiveHead<typename decltype(format)::Element> work(*call, head, lane.scratch);
      work.run(reinterpret_cast<float*>(state) + int64_t(head) * call->head_dim * call->state_size, rows->starts[row],
               rows->starts[row + 1] - rows->starts[row], rows->is_fresh[row] != 0);
    });
  });
}

// ---- Mamba 1 ----------------------------------------------------------------------------------------------------

template <class E>
AIOCB_INLINE void channels_part(const ScanRows& rows, const SelectiveChannelsCall& c, int row, int first, int count) {
  const int start = rows.starts[row], length = rows.starts[row + 1] - start, size = c.state_size;
  float* state = reinterpret_cast<float*>(reinterpret_cast<char*>(c.state) + rows.slots[row] * c.slot_stride);
  for (int token = start; token < start + length; ++token) {
    const E* b = reinterpret_cast<const E*>(c.write + token * c.write_stride);
    const E* to = reinterpret_cast<const E*>(c.read + token * c.read_stride);
    float inputs[16], steps[16];
    store(inputs, load_part(reinterpret_cast<const E*>(c.input + token * c.input_stride) + first, count));
    F16 step = load_part(reinterpret_cast<const E*>(c.steps + token * c.steps_stride) + first, count);
    if (c.bias) step = step + load_part(c.bias + first, count);
    store(steps, c.is_softplus ? softplus(step) : step);
    const bool is_zero = rows.is_fresh[row] && token == start;
    for (int i = 0; i < count; ++i) {
      const int channel = first + i;
      float* line = state + int64_t(channel) * size;
      F16 sum = zero();
      for (int n = 0; n < size; n += 16) {
        F16 s = set1(steps[i] * inputs[i]) * load_part(b + n, size - n);
        if (!is_zero)
          s = fma(exp(set1(steps[i]) * load_part(c.rates + int64_t(channel) * size + n, size - n)),
                  load_part(line + n, size - n), s);
        store_part(line + n, s, size - n);
        sum = fma(s, load_part(to + n, size - n), sum);
      }
      c.out[int64_t(token) * c.num_channels + channel] = reduce_add(sum) + (c.skip ? c.skip[channel] : 0.0f) * inputs[i];
    }
  }
}

void selective_channels(const ScanRows* rows, const SelectiveChannelsCall* call, Pool* pool, Lane) {
  with_format(call->format, [&](auto format) {
    for_each_part(*rows, (call->num_channels + 15) / 16, pool, [&](int row, int block) {
      const int left = call->num_channels - block * 16;
      channels_part<typename decltype(format)::Element>(*rows, *call, row, block * 16, left < 16 ? left : 16);
    });
  });
}

}  // namespace
}  // namespace AIOCB_ISA
}  // namespace aiocb
