// One instruction set: the whole step of a decoder, and the single kernels for tests and benchmarks.
//
// Compiled once per instruction set with AIOCB_ISA set to its name; dispatch.cpp chooses one at run time. A step is one parallel region
// of a few stages per layer with a barrier between them; every stage cuts its work so that no output has two owners.
#include "attention.h"
#include "experts.h"
#include "generic.h"
#include "linear.h"
#include "model.h"
#include "pool.h"
#include "recurrence.h"
#include "rows.h"
#include "select.h"
#include "vec.h"

namespace aiocb {
namespace AIOCB_ISA {
namespace {

template <class F>
struct Step {
  typedef typename F::Element E;
  const Model& model;
  const Batch& batch;
  const Config& c;
  const Buffers& buffers;
  const Lane& lane;
  const Share rows;

  Step(const Model& m, const Batch& b, const Lane& l)
      : model(m), batch(b), c(m.config), buffers(m.buffers), lane(l), rows(share_of(b.num_tokens, l)) {}

  AIOCB_INLINE float* x(int row) const { return buffers.x + int64_t(row) * c.hidden_size; }
  AIOCB_INLINE E* normed(int row) const { return reinterpret_cast<E*>(buffers.normed + row * buffers.hidden_stride); }
  template <class Out>
  AIOCB_INLINE void norm(const Norm& n, const float* in, Out* out) const {
    norm_row(n, c.is_layer_norm, c.norm_eps, in, c.hidden_size, out);
  }

  void embed() const {
    for (int row = rows.begin; row < rows.end; ++row) embed_row(model, batch.token_ids[row], x(row));
  }

  // Once per step, not per layer; computed, not tabled: a table for 128k positions would be larger than the model.
  void rotations() const {
    const int half = c.rotary_dim / 2;
    for (int row = rows.begin; row < rows.end; ++row) {
      for (int r = 0; r < c.num_ropes; ++r) {
        const Rope& rope = model.ropes[r];
        const int64_t offset = (int64_t(r) * batch.num_tokens + row) * half;
        for (int i = 0; i < half; ++i) {
          const float angle = rope.inverse_frequencies[i] * float(batch.positions[row]);
          buffers.cosine[offset + i] = std::cos(angle) * rope.scaling;
          buffers.sine[offset + i] = std::sin(angle) * rope.scaling;
        }
      }
    }
  }

  // A branch that is normed before it joins the residual stream was left in `branch` by its linear.
  void join_branch(const Norm& post) const {
    if (!post.weight) return;
    for (int row = rows.begin; row < rows.end; ++row) {
      float* branch = buffers.branch + int64_t(row) * c.hidden_size;
      norm(post, branch, branch);
      float* target = x(row);
      const F16 scale = set1(c.residual_scale);
      for (int i = 0; i < c.hidden_size; i += 16) {
        const int count = c.hidden_size - i;
        store_part(target + i, fma(scale, load_part(branch + i, count), load_part(target + i, count)), count);
      }
    }
  }

  void norm_rows(const Norm& n) const {
    for (int row = rows.begin; row < rows.end; ++row) norm(n, x(row), normed(row));
  }

  void norm_rows_twice(const Layer& layer) const {
    for (int row = rows.begin; row < rows.end; ++row) {
      norm(layer.input, x(row), normed(row));
      norm(layer.mlp, x(row), reinterpret_cast<E*>(buffers.normed_mlp + row * buffers.hidden_stride));
    }
  }

  void project_back(const Linear& linear, const Norm& post, const char* a, int64_t stride, const char* next) const {
    if (post.weight) {
      StoreEpilogue epilogue = {buffers.branch, c.hidden_size, c.hidden_size, linear.bias};
      run_linear<F>(linear, {a, stride, batch.num_tokens}, next, lane, epilogue);
    } else {
      ResidualEpilogue epilogue = {buffers.x, c.hidden_size, c.hidden_size, linear.bias, c.residual_scale};
      run_linear<F>(linear, {a, stride, batch.num_tokens}, next, lane, epilogue);
    }
  }

  void project(const Layer& layer) const {
    const int own = layer.qkv.columns, width = own + layer.value.columns;
    StoreEpilogue keep = {buffers.qkv, width, own, layer.qkv.bias};
    const Linear& after = layer.value.data ? layer.value : layer.out;
    const Input normed = {buffers.normed, buffers.hidden_stride, batch.num_tokens};
    const Input rows = run_linear<F>(layer.qkv, normed, first_panel(after, lane), lane, keep);
    if (!layer.value.data) return;
    StoreEpilogue rest = {buffers.qkv + own, width, layer.value.columns, layer.value.bias};
    const bool takes = layer.value.quantized != nullptr;
    run_linear<F>(layer.value, takes ? rows : normed, first_panel(layer.out, lane), lane, rest);
  }

  void place(const Layer& layer) const {
    const int width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
    const int32_t* const* tables = batch.tables + int64_t(layer.group) * batch.num_sequences;
    int sequence = 0, first = 0;
    auto block_of = [&](int row) {
      while (row >= first + batch.lengths[sequence]) first += batch.lengths[sequence++];
      return tables[sequence][batch.positions[row] / kPageSize];
    };
    if (rows.begin >= rows.end) return;
    int block = block_of(rows.begin);
    for (int row = rows.begin; row < rows.end; ++row) {
      const int next = row + 1 < rows.end ? block_of(row + 1) : block;
      if (next != block) prefetch_place<F>(model, layer, batch.positions[row + 1], next);
      place_token<F>(model, layer, row, batch.num_tokens, batch.positions[row], block, buffers.qkv + int64_t(row) * width);
      block = next;
    }
  }

  void attend(const Layer& layer, int index) const {
    for (int i; (i = pool_next(model.pool, index)) < batch.num_items;)
      run_attention<F>(model, batch, layer, batch.items[i], lane.scratch);
  }

  // Rows that are padded to whole k steps of `down` are zero there: so are the weights that make them.
  void gate_up(const Layer& layer, const char* a) const {
    ActivationEpilogue<E> activation = {buffers.activated, buffers.activated_stride, layer.down.depth,
                                        layer.gate_up.bias, c.activation, c.is_gated != 0};
    run_linear<F>(layer.gate_up, {a, buffers.hidden_stride, batch.num_tokens}, first_panel(layer.down, lane), lane,
                  activation);
  }

  // The experts of rows that are normed and routed; `next` as in run_linear.
  void mix(const Layer& layer, const char* next) const {
    const Mixture<F> mixture(model, *layer.experts, batch.num_tokens, lane);
    mixture.gather();
    pool_barrier(model.pool);

    const bool has_shared = layer.down.data != nullptr;
    if (has_shared) gate_up(layer, buffers.normed);
    mixture.gate_up();
    pool_barrier(model.pool);
    if (mixture.is_quantized()) {
      mixture.quantize();
      pool_barrier(model.pool);
    }

    if (has_shared) {
      StoreEpilogue keep = {buffers.branch, c.hidden_size, c.hidden_size, layer.down.bias};
      run_linear<F>(layer.down, {buffers.activated, buffers.activated_stride, batch.num_tokens},
                    first_panel(layer.experts->down[0], lane), lane, keep);
    }
    mixture.down(next);
    pool_barrier(model.pool);
    for (int row = rows.begin; row < rows.end; ++row) {
      const float* shared = has_shared ? buffers.branch + int64_t(row) * c.hidden_size : nullptr;
      mixture.join(row, shared, c.residual_scale, x(row));
    }
  }

  void logits() const {
    const Share share = share_of(batch.num_outputs, lane);
    for (int i = share.begin; i < share.end; ++i)
      norm(model.final_norm, x(batch.output_rows[i]),
           reinterpret_cast<E*>(buffers.output_rows + i * buffers.hidden_stride));
    float* best = buffers.best_values + int64_t(lane.thread) * batch.num_outputs;
    int32_t* ids = buffers.best_ids + int64_t(lane.thread) * batch.num_outputs;
    for (int i = 0; i < batch.num_outputs; ++i) best[i] = -__builtin_inff(), ids[i] = kEmptyRow;
    pool_barrier(model.pool);
    LogitsEpilogue epilogue = {c.logit_scale, c.logit_softcap, model.head.columns, model.head.bias,
                               batch.logit_targets, batch.logits, best, ids};
    run_linear<F>(model.head, {buffers.output_rows, buffers.hidden_stride, batch.num_outputs},
                  first_panel(model.layers[0].qkv, lane), lane, epilogue);
    pool_barrier(model.pool);
    // Threads hold ascending columns, so a strict comparison keeps the lowest id among equals.
    for (int i = share.begin; i < share.end; ++i) {
      int winner = 0;
      bool has_nan = buffers.best_ids[i] == kInvalidRow;
      for (int t = 1; t < lane.num_threads; ++t) {
        has_nan |= buffers.best_ids[int64_t(t) * batch.num_outputs + i] == kInvalidRow;
        if (buffers.best_values[int64_t(t) * batch.num_outputs + i] >
            buffers.best_values[int64_t(winner) * batch.num_outputs + i])
          winner = t;
      }
      batch.argmax[i] = has_nan ? int32_t(kInvalidRow) : buffers.best_ids[int64_t(winner) * batch.num_outputs + i];
    }
  }

  void run() const {
    Pool* pool = model.pool;
    embed();
    rotations();
    for (int l = 0; l < c.num_layers; ++l) {
      const Layer& layer = model.layers[l];
      const Linear& after = l + 1 < c.num_layers ? model.layers[l + 1].qkv : model.head;
      if (c.is_parallel)
        norm_rows_twice(layer);
      else
        norm_rows(layer.input);
      pool_barrier(pool);

      project(layer);
      pool_barrier(pool);

      place(layer);
      pool_barrier(pool);

      attend(layer, l);
      pool_barrier(pool);

      project_back(layer.out, layer.post_attention, buffers.attended, buffers.attended_stride,
                   first_panel(layer.gate_up, lane));
      pool_barrier(pool);

      if (!c.is_parallel) {
        join_branch(layer.post_attention);
        norm_rows(layer.mlp);
        if (layer.experts) route_rows<F>(model, *layer.experts, rows, lane);
        pool_barrier(pool);
      }

      if (layer.experts) {
        mix(layer, first_panel(after, lane));
        continue;
      }
      gate_up(layer, c.is_parallel ? buffers.normed_mlp : buffers.normed);
      pool_barrier(pool);

      project_back(layer.down, layer.post_mlp, buffers.activated, buffers.activated_stride,
                   first_panel(after, lane));
      pool_barrier(pool);
      join_branch(layer.post_mlp);
    }
    if (batch.num_outputs > 0) {
      pool_barrier(pool);  // rows to sample may be joined by another thread
      logits();
    }
  }
};

void step(const Model* model, const Batch* batch, Lane lane) {
  with_format(model->config.format, [&](auto format) { Step<decltype(format)>(*model, *batch, lane).run(); });
}

// `qkv` was filled by the caller: rotate, write the cache, attend.
void attention(const Model* model, const Batch* batch, int layer, Lane lane) {
  with_format(model->config.format, [&](auto format) {
    const Step<decltype(format)> step(*model, *batch, lane);
    step.rotations();
    pool_barrier(model->pool);
    step.place(model->layers[layer]);
    pool_barrier(model->pool);
    step.attend(model->layers[layer], 0);
  });
}

// `a` is of `format`.
void linear(const Linear* linear, int format, const void* a, int64_t a_stride, int rows, float* out, int64_t out_stride,
            Lane lane) {
  StoreEpilogue epilogue = {out, out_stride, linear->columns, linear->bias};
  with_format(format, [&](auto f) {
    run_linear<decltype(f)>(*linear, {static_cast<const char*>(a), a_stride, rows}, nullptr, lane, epilogue);
  });
}

void norm(const Norm* norm, int is_layer_norm, float eps, const float* x, int rows, int width, int format, char* out,
          int64_t out_stride) {
  with_format(format, [&](auto f) {
    typedef typename decltype(f)::Element E;
    for (int r = 0; r < rows; ++r)
      norm_row(*norm, is_layer_norm, eps, x + int64_t(r) * width, width, reinterpret_cast<E*>(out + r * out_stride));
  });
}

void activation(int kind, const float* gate, const float* up, int count, float* out) {
  for (int i = 0; i < count; i += 16) {
    F16 value = activate(kind, load_part(gate + i, count - i));
    if (up) value = value * load_part(up + i, count - i);
    store_part(out + i, value, count - i);
  }
}

// ---- the two floors of a kernel: the bus and the arithmetic -----------------------------------------------------

float read_memory(const char* data, int64_t bytes, Lane lane) {
  const Share lines = share_of(int(bytes / 256), lane);
  const char *p = data + int64_t(lines.begin) * 256, *end = data + int64_t(lines.end) * 256;
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  for (; p < end; p += 256)
    for (int i = 0; i < 4; ++i) sums[i] = sums[i] + load(reinterpret_cast<const float*>(p + i * 64));
  return reduce_add(sums[0] + sums[1] + sums[2] + sums[3]);
}

#define AIOCB_FORMAT(code, name, W, bits, group, scale_bytes, operand) \
  {bits, group, scale_bytes, operand, W::pack, W::unpack, W::scratch, W::row_bytes, W::multiply_add},
const WeightFormat formats[] = {AIOCB_FORMATS(AIOCB_FORMAT)};
#undef AIOCB_FORMAT

}  // namespace

#define AIOCB_STRING_(name) #name
#define AIOCB_STRING(name) AIOCB_STRING_(name)
extern const InstructionSet isa;
const InstructionSet isa = {AIOCB_STRING(AIOCB_ISA), formats, step, attention, linear, norm, activation, select,
                            read_memory, paged_write, paged_attend, linear_rows, convolve, delta_rule, selective_heads,
                            selective_channels};

}  // namespace AIOCB_ISA
}  // namespace aiocb
