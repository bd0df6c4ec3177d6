#include "executor.h"

#include <cstring>
#include <exception>
#include <new>

#include "dispatch.h"

namespace aiocb {

int explain(char* error) {
  try {
    throw;
  } catch (const Failure& failure) {
    std::snprintf(error, kErrorBytes, "%s", failure.text);
    return failure.code;
  } catch (const std::bad_alloc&) {
    std::snprintf(error, kErrorBytes, "no memory for the library's own tables");
    return kNoMemory;
  } catch (const std::exception& other) {
    std::snprintf(error, kErrorBytes, "%s", other.what());
  } catch (...) {
    std::snprintf(error, kErrorBytes, "unknown");
  }
  return kInternal;
}

Executor::Executor(const char* name, int num_threads, const Team* team)
    : isa(find_instruction_set(name)), pool_(pool_create(num_threads, team), pool_destroy) {
  if (!isa) throw Failure(kBadShape, "this processor does not run that instruction set");
  scratch_.resize(size_t(pool_size(pool())), nullptr);
}

void Executor::reserve_scratch(int64_t bytes) {
  if (bytes <= scratch_bytes_) return;
  std::unique_ptr<Arena> memory(new Arena(size_t(1) << 20));
  std::vector<char*> lanes(scratch_.size());
  for (char*& lane : lanes) lane = memory->take(bytes);
  scratch_memory_.swap(memory);
  scratch_.swap(lanes);
  scratch_bytes_ = bytes;
}

// Sums, states and positions of an item's rows, and its queries where they are widened: see run_attention.
static int64_t attention_scratch(const Config& shape) {
  const int group = shape.num_heads / shape.num_kv_heads;
  return int64_t(group > kItemRows ? group : kItemRows) * (shape.head_dim * 8 + 16);
}

void Executor::plan_attention(const Config& shape, Batch* batch) {
  const int group = shape.num_heads / shape.num_kv_heads, tile = kItemRows / group > 1 ? kItemRows / group : 1;
  const int32_t* lengths = batch->lengths;
  reserve_scratch(attention_scratch(shape));
  items_.clear();
  int decoding = 0, row = 0;
  for (int s = 0; s < batch->num_sequences; ++s) decoding += lengths[s] == 1;
  // Long work first: whoever finishes early then takes the small rest.
  for (int s = 0; s < batch->num_sequences; row += lengths[s++]) {
    if (lengths[s] == 1) continue;
    const int tiles = (lengths[s] + tile - 1) / tile;
    for (int head = 0; head < shape.num_kv_heads; ++head)
      for (int t = tiles - 1; t >= 0; --t) {
        const int first = t * tile, count = lengths[s] - first < tile ? lengths[s] - first : tile;
        items_.push_back({s, first, count, row, head, head + 1});
      }
  }
  // One item is a sequence with all its heads (one run through its pages), unless that leaves threads without work.
  const int heads = decoding >= 4 * num_threads() ? shape.num_kv_heads : 1;
  row = 0;
  for (int s = 0; s < batch->num_sequences; row += lengths[s++]) {
    if (lengths[s] != 1) continue;
    for (int head = 0; head < shape.num_kv_heads; head += heads) items_.push_back({s, 0, 1, row, head, head + heads});
  }
  batch->items = items_.data();
  batch->num_items = int(items_.size());
}

const WeightFormat& Executor::weight_format(int format) const {
  if (format < 0 || format >= kNumFormats) throw Failure(kBadShape, "there is no format %ld of weights", format);
  return isa->formats[format];
}

Linear Executor::shape_linear(int format, int columns, int depth) const {
  const WeightFormat& kind = weight_format(format);
  const int groups = (depth + kind.group - 1) / kind.group;
  Linear linear = {};
  linear.format = format;
  linear.columns = columns;
  linear.depth = kind.row_bytes ? depth : groups * kind.group;
  linear.panels = (columns + kPanel - 1) / kPanel;
  linear.panel_bytes = int64_t(groups) * kPanel * (kind.group * kind.bits / 8 + kind.scale_bytes);
  return linear;
}

void Executor::fill_linear(const Linear& linear, const char* const* rows, PackArgs args, const float* bias) {
  std::vector<const char*> padded(size_t(linear.panels) * kPanel, nullptr);
  std::memcpy(padded.data(), rows, size_t(linear.columns) * sizeof(char*));
  std::vector<int32_t> sources(padded.size(), kF32Source);
  std::memcpy(sources.data(), args.sources, size_t(linear.columns) * sizeof(int32_t));
  args.rows = padded.data(), args.sources = sources.data();
  parallel([&](Lane lane) {
    const int64_t panels = linear.panels;
    isa->formats[linear.format].pack(linear, args, int(panels * lane.thread / lane.num_threads),
                                     int(panels * (lane.thread + 1) / lane.num_threads));
  });
  if (bias) std::memcpy(linear.bias, bias, size_t(linear.columns) * 4);
}

int Executor::enter() {
  const uint32_t process = pool_process();
  uint32_t user = 0;
  if (user_.compare_exchange_strong(user, process, std::memory_order_acquire)) return kOk;
  return user == process ? kBusy : kForked;
}

}  // namespace aiocb

using namespace aiocb;

AIOCB_API const char* aiocb_error(const Executor* executor) { return executor->error; }
AIOCB_API const char* aiocb_handle_instruction_set(const Executor* executor) { return executor->isa->name; }

// Refused while a call is going on. What a fork cut off in the middle of a call is left as it is.
AIOCB_API int aiocb_destroy(Executor* executor) {
  const int code = executor->enter();
  if (code == kOk) delete executor;
  return code == kBusy ? kBusy : kOk;
}
