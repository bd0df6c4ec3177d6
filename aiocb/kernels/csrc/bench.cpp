// Single kernels and the two floors of any, for tests and benchmarks.
#include <cstring>

#include "handle.h"

using namespace aiocb;

// Rotation, cache write and attention of one layer: qkv [T][H + 2 K][D] -> out [T][H][D], or null.
AIOCB_API int aiocb_attention(Handle* handle, const StepArgs* args, int layer, const float* qkv, float* out) {
  return guarded(handle, [&] {
    const Config& c = handle->plain.config;
    if (layer < 0 || layer >= c.num_layers) throw Failure(kBadShape, "no layer %ld", layer);
    const Batch batch = handle->begin(*args, 0);
    const Buffers& b = handle->plain.buffers;
    std::memcpy(b.qkv, qkv, size_t(batch.num_tokens) * size_t((c.num_heads + 2 * c.num_kv_heads) * c.head_dim) * 4);
    handle->parallel([&](Lane lane) { handle->isa->attention(&handle->plain, &batch, layer, lane); });
    const int64_t heads = int64_t(c.num_heads) * c.head_dim;
    for (int t = 0; out && t < batch.num_tokens; ++t)
      for (int64_t i = 0; i < heads; ++i) {
        const char* row = b.attended + t * b.attended_stride;
        uint32_t bits;
        if (c.format == kF32) std::memcpy(&bits, row + i * 4, 4);
        else bits = uint32_t(reinterpret_cast<const uint16_t*>(row)[i]) << 16;
        std::memcpy(out + t * heads + i, &bits, 4);
      }
  });
}

// `a` is in the model's format, rows `a_stride` bytes apart and padded to whole k steps.
AIOCB_API int aiocb_linear(Handle* handle, int layer, int name, const char* a, int64_t a_stride, int rows, float* out,
                           int64_t out_stride) {
  return guarded(handle, [&] {
    const Linear* linear = handle->linear(layer, name);
    if (!linear || !linear->data || rows < 1) throw Failure(kBadShape, "no linear %ld in layer %ld", name, layer);
    if (linear->quantized) handle->grow(rows, 1);
    const int format = handle->plain.config.format;
    handle->reserve_scratch(handle->weight_format(linear->format).scratch(linear->depth, rows));
    handle->parallel([&](Lane lane) {
      handle->isa->linear(linear, format, a, a_stride, rows, out, out_stride, lane);
    });
  });
}

// The weights as they are packed, as floats [columns][depth], in packed order.
AIOCB_API int aiocb_unpack(Handle* handle, int layer, int name, float* out) {
  return guarded(handle, [&] {
    const Linear* linear = handle->linear(layer, name);
    if (!linear || !linear->data) throw Failure(kBadShape, "no linear %ld in layer %ld", name, layer);
    for (int column = 0; column < linear->columns; ++column)
      handle->weight_format(linear->format).unpack(*linear, column, out + int64_t(column) * linear->depth);
  });
}

AIOCB_API int aiocb_norm(Executor* executor, const float* weight, const float* bias, int is_layer_norm, float eps,
                         const float* x, int rows, int width, int format, char* out) {
  return guarded(executor, [&] {
    const Norm norm = {const_cast<float*>(weight), const_cast<float*>(bias)};
    executor->isa->norm(&norm, is_layer_norm, eps, x, rows, width, format, out, width * executor->element_bytes(format));
  });
}

AIOCB_API int aiocb_activation(Executor* executor, int kind, const float* gate, const float* up, int count, float* out) {
  return guarded(executor, [&] { executor->isa->activation(kind, gate, up, count, out); });
}

// Seconds of the quickest of a few passes.
template <class Work>
static double quickest(const Work& work) {
  double best = 1e30;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = pool_now();
    work();
    const double seconds = pool_now() - start;
    best = seconds < best ? seconds : best;
  }
  return best;
}

// Bytes per second that all threads together read from memory.
AIOCB_API int aiocb_bandwidth(Executor* executor, int64_t bytes, double* rate) {
  return guarded(executor, [&] {
    Arena memory(size_t(1) << 20);
    const char* data = static_cast<const char*>(std::memset(memory.take(bytes), 0, size_t(bytes)));
    volatile float sink = 0.0f;
    *rate = double(bytes) / quickest([&] {
      executor->parallel([&](Lane lane) {
        if (executor->isa->read_memory(data, bytes, lane) != 0.0f) sink = 1.0f;
      });
    });
  });
}

// Operations per second (a multiply and an add are two) of all threads together.
AIOCB_API int aiocb_arithmetic(Executor* executor, int format, double* rate) {
  return guarded(executor, [&] {
    constexpr int kRepeats = 2000;
    const WeightFormat& kind = executor->weight_format(format);
    const double operations = 2.0 * double(kind.multiply_add(1)) * kRepeats;
    *rate = operations * executor->num_threads() / quickest([&] {
      executor->parallel([&](Lane) { kind.multiply_add(kRepeats); });
    });
  });
}
