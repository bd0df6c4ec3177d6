// The C interface: choice of the instruction-set level, memory, checks, and the start of each parallel region.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "model.h"
#include "pool.h"
#include "selection.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define AIOCB_API extern "C" __attribute__((visibility("default")))

namespace aiocb {

// A level that the compiler does not know or this processor does not need is left out by the build (AIOCB_NO_...).
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX512BF16)
#define AIOCB_HAS_AVX512BF16
namespace avx512bf16 { extern const Level level; }
#endif
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX512)
#define AIOCB_HAS_AVX512
namespace avx512 { extern const Level level; }
#endif
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX2)
#define AIOCB_HAS_AVX2
namespace avx2 { extern const Level level; }
#endif
#if !defined(AIOCB_NO_PORTABLE)
#define AIOCB_HAS_PORTABLE
namespace portable { extern const Level level; }
#endif

namespace {

constexpr size_t kHugePage = size_t(2) << 20;

enum Error { kOk = 0, kBadShape = 1, kBadToken = 2, kBadBlock = 3, kBadOutput = 4, kNoMemory = 5 };

// Zeroed memory that becomes resident when it is touched; huge pages where the system gives them.
char* allocate(int64_t bytes) {
  if (bytes <= 0) bytes = 64;
  const size_t size = (size_t(bytes) + 4095) / 4096 * 4096;
#if defined(__linux__)
  // Over-allocate to align: a huge page must start at its own multiple. The header keeps what munmap needs.
  const size_t slack = size >= kHugePage ? kHugePage : 4096;
  void* raw = mmap(nullptr, size + slack + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = (uintptr_t(raw) + 4096 + slack - 1) / slack * slack;
  uintptr_t* header = reinterpret_cast<uintptr_t*>(start - 16);
  header[0] = uintptr_t(raw);
  header[1] = size + slack + 4096;
#if defined(MADV_HUGEPAGE)
  if (size >= kHugePage) madvise(reinterpret_cast<void*>(start), size, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<char*>(start);
#else
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, size)) return nullptr;
  std::memset(memory, 0, size);
  return static_cast<char*>(memory);
#endif
}

void release(void* memory) {
  if (!memory) return;
#if defined(__linux__)
  uintptr_t* header = reinterpret_cast<uintptr_t*>(uintptr_t(memory) - 16);
  munmap(reinterpret_cast<void*>(header[0]), header[1]);
#else
  std::free(memory);
#endif
}

// Weights of a few hundred KiB each come from shared chunks: alone they would get small pages, and a packed panel walks
// through more of those than the processor remembers.
class Arena {
 public:
  explicit Arena(size_t chunk) : chunk_(chunk) {}
  ~Arena() { clear(); }
  void clear() {
    for (char* chunk : chunks_) release(chunk);
    chunks_.clear();
    left_ = 0;
  }
  char* take(int64_t bytes) {
    const size_t size = (size_t(bytes < 64 ? 64 : bytes) + 4095) / 4096 * 4096;
    if (size > chunk_ / 2) return own(size);
    if (size > left_) {
      cursor_ = own(chunk_);
      if (!cursor_) return nullptr;
      left_ = chunk_;
    }
    char* result = cursor_;
    cursor_ += size;
    left_ -= size;
    return result;
  }

 private:
  char* own(size_t bytes) {
    char* memory = allocate(int64_t(bytes));
    if (memory) chunks_.push_back(memory);
    return memory;
  }
  const size_t chunk_;
  std::vector<char*> chunks_;
  char* cursor_ = nullptr;
  size_t left_ = 0;
};

bool is_supported(const std::string& name) {
  if (name == "portable") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (name == "avx2") return avx2;
  if (name == "avx512") return avx512;
#if defined(AIOCB_HAS_AVX512BF16)  // an older compiler does not know the name either
  if (name == "avx512bf16")  // built with VNNI too: no processor has the one without the other
    return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
#endif
  return false;
}

bool has_vnni() {
#if defined(AIOCB_HAS_AVX512)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Intel's processors multiply pairs of bf16 at half the rate of floats (measured on Emerald Rapids: 89 and 176 GFLOP/s
// a core), AMD's at twice.
bool is_worth_it(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return name != "avx512bf16" || !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

// Without a name the best: levels are in order.
const Level* find_level(const char* name) {
  const Level* const levels[] = {
#if defined(AIOCB_HAS_AVX512BF16)
      &avx512bf16::level,
#endif
#if defined(AIOCB_HAS_AVX512)
      &avx512::level,
#endif
#if defined(AIOCB_HAS_AVX2)
      &avx2::level,
#endif
#if defined(AIOCB_HAS_PORTABLE)
      &portable::level,
#endif
  };
  const std::string wanted = name ? name : "";
  for (const Level* level : levels)
    if ((wanted.empty() ? is_worth_it(level->name) : wanted == level->name) && is_supported(level->name)) return level;
  return nullptr;
}

}  // namespace

// The model as the library owns it; `plain` is what the kernels see.
struct Handle {
  Model plain = {};
  const Level* level = nullptr;
  Arena memory{size_t(32) << 20};  // weights, norms, pools
  Arena buffers{size_t(8) << 20};  // of the step, replaced when it grows
  Arena selecting{size_t(1) << 20};  // scratch of selection, replaced when it grows
  char* select_scratch = nullptr;
  int64_t select_bytes = 0;
  std::vector<AttentionItem> items;
  std::vector<int32_t> positions;
  int max_tokens = 0, max_outputs = 0;
  Int8State int8 = {};
  char error[256] = "";

  char* keep(int64_t bytes) { return memory.take(bytes); }
  int element() const { return plain.config.format == kF32 ? 4 : 2; }

  ~Handle() {
    if (plain.pool) pool_destroy(plain.pool);
  }
};

namespace {

int fail(Handle* handle, int code, const char* format, long a = 0, long b = 0, long c = 0) {
  std::snprintf(handle->error, sizeof(handle->error), format, a, b, c);
  return code;
}

bool grow(Handle* handle, int tokens, int outputs) {
  if (tokens <= handle->max_tokens && outputs <= handle->max_outputs) return true;
  if (tokens < handle->max_tokens) tokens = handle->max_tokens;
  if (outputs < handle->max_outputs) outputs = handle->max_outputs;
  handle->buffers.clear();
  handle->max_tokens = handle->max_outputs = 0;
  const Config& c = handle->plain.config;
  Buffers& b = handle->plain.buffers;
  const int64_t element = handle->element(), threads = pool_size(handle->plain.pool);
  const int64_t attended = int64_t(c.num_heads) * c.head_dim;
  const int group = c.num_heads / c.num_kv_heads;
  const int64_t rows = group > kItemRows ? group : kItemRows;
  bool ok = true;
  auto take = [&](int64_t bytes) {
    char* block = handle->buffers.take(bytes + 4096);
    ok = ok && block;
    return block;
  };
  auto stride = [&](int64_t width) { return (width * element + 63) / 64 * 64 + kRowPad; };
  b.hidden_stride = stride(c.hidden_size);
  b.attended_stride = stride(attended);
  b.activated_stride = stride(c.intermediate_size);
  b.x = reinterpret_cast<float*>(take(int64_t(tokens) * c.hidden_size * 4));
  b.branch = reinterpret_cast<float*>(take(int64_t(tokens) * c.hidden_size * 4));
  b.qkv = reinterpret_cast<float*>(take(int64_t(tokens) * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * 4));
  b.cosine = reinterpret_cast<float*>(take(int64_t(tokens) * c.num_ropes * c.rotary_dim * 2));
  b.sine = reinterpret_cast<float*>(take(int64_t(tokens) * c.num_ropes * c.rotary_dim * 2));
  b.normed = take(tokens * b.hidden_stride);
  b.normed_mlp = take(tokens * b.hidden_stride);
  b.queries = take(tokens * attended * element);
  b.attended = take(tokens * b.attended_stride);
  b.activated = take(tokens * b.activated_stride);
  b.output_rows = take(outputs * b.hidden_stride);
  b.scratch_bytes = (rows * (c.head_dim * 8 + 16) + 4095) / 4096 * 4096;
  b.scratch = take(threads * b.scratch_bytes);
  if (handle->int8.row_stride) {
    const int64_t wanted = tokens > outputs ? tokens : outputs, own = threads * kInt8OwnRows;
    handle->int8.rows = take((wanted > own ? wanted : own) * handle->int8.row_stride);
  }
  if (c.num_experts) {
    const int64_t pairs = int64_t(tokens) * c.num_chosen;
    b.router_stride = (c.num_experts + 1 + 15) / 16 * 16;
    b.expert_places_stride = (c.num_experts + 1 + 2 * pairs + 15) / 16 * 16;
    b.expert_row_stride = b.hidden_stride > handle->int8.row_stride ? b.hidden_stride : handle->int8.row_stride;
    b.expert_activated_stride = stride(c.expert_size);
    b.router_scores = reinterpret_cast<float*>(take(tokens * b.router_stride * 4));
    b.expert_weights = reinterpret_cast<float*>(take(pairs * 4));
    b.chosen_experts = reinterpret_cast<int32_t*>(take(pairs * 4));
    b.expert_places = reinterpret_cast<int32_t*>(take(threads * b.expert_places_stride * 4));
    b.expert_rows = take(pairs * b.expert_row_stride);
    b.expert_activated = take(pairs * b.expert_activated_stride);
    b.expert_results = reinterpret_cast<float*>(take(pairs * c.hidden_size * 4));
  }
  b.best_values = reinterpret_cast<float*>(take(threads * outputs * 4));
  b.best_ids = reinterpret_cast<int32_t*>(take(threads * outputs * 4));
  if (!ok) return false;
  handle->max_tokens = tokens;
  handle->max_outputs = outputs;
  return true;
}

// Refuse whatever would read or write outside of what the step owns; a wrong plan must not become a crash.
int check(Handle* handle, const StepArgs& a) {
  const Config& c = handle->plain.config;
  if (a.num_tokens <= 0 || a.num_sequences <= 0 || a.num_outputs < 0)
    return fail(handle, kBadShape, "empty step: %ld tokens of %ld sequences", a.num_tokens, a.num_sequences);
  int64_t total = 0;
  for (int s = 0; s < a.num_sequences; ++s) {
    if (a.lengths[s] <= 0 || a.starts[s] < 0 || int64_t(a.starts[s]) + a.lengths[s] > (int64_t(1) << 30))
      return fail(handle, kBadShape, "sequence %ld: start %ld, %ld new tokens", s, a.starts[s], a.lengths[s]);
    total += a.lengths[s];
  }
  if (total != a.num_tokens)
    return fail(handle, kBadShape, "%ld tokens given, lengths add up to %ld", a.num_tokens, long(total));
  for (int t = 0; t < a.num_tokens; ++t)
    if (a.token_ids[t] < 0 || a.token_ids[t] >= c.vocab_size)
      return fail(handle, kBadToken, "token %ld has id %ld, the vocabulary has %ld", t, a.token_ids[t], c.vocab_size);
  for (int o = 0; o < a.num_outputs; ++o)
    if (a.output_rows[o] < 0 || a.output_rows[o] >= a.num_tokens)
      return fail(handle, kBadOutput, "output %ld is row %ld of %ld", o, a.output_rows[o], a.num_tokens);
  for (int l = 0; l < c.num_layers; ++l) {
    const Layer& layer = handle->plain.layers[l];
    if (!layer.experts) continue;
    if (layer.post_mlp.weight)
      return fail(handle, kBadShape, "layer %ld: no norm can follow experts", l);
    if (layer.experts->num_missing)
      return fail(handle, kBadShape, "layer %ld lacks %ld linears of its experts", l, layer.experts->num_missing);
    if ((layer.down.data != nullptr) != (layer.experts->router.columns > c.num_experts))
      return fail(handle, kBadShape, "layer %ld: a shared expert without a gate, or a gate without one", l);
  }
  std::vector<int> windows(size_t(c.num_groups), -1);
  for (int l = 0; l < c.num_layers; ++l) {  // the widest view of the layers that share a group
    const Layer& layer = handle->plain.layers[l];
    int& widest = windows[size_t(layer.group)];
    if (widest < 0 || layer.window == 0 || (widest > 0 && layer.window > widest))
      widest = widest == 0 ? 0 : layer.window;
  }
  for (int g = 0; g < c.num_groups; ++g) {
    const int limit = handle->plain.groups[g].num_blocks, window = windows[size_t(g)];
    if (window < 0) continue;
    for (int s = 0; s < a.num_sequences; ++s) {
      const int32_t* table = a.tables[g] + a.table_offsets[g][s];
      const int size = a.table_offsets[g][s + 1] - a.table_offsets[g][s];
      const int low = window > 0 && a.starts[s] - window + 1 > 0 ? a.starts[s] - window + 1 : 0;
      const int last = (a.starts[s] + a.lengths[s] - 1) / kPageSize;
      if (last >= size)
        return fail(handle, kBadBlock, "sequence %ld needs %ld blocks, its table holds %ld", s, last + 1, size);
      for (int page = low / kPageSize; page <= last; ++page)
        if (table[page] <= 0 || table[page] >= limit)
          return fail(handle, kBadBlock, "sequence %ld: block %ld of its table is %ld, outside the pool", s, page,
                      table[page]);
    }
  }
  return kOk;
}

void plan_attention(Handle* handle, const StepArgs& a) {
  const Config& c = handle->plain.config;
  const int group = c.num_heads / c.num_kv_heads, threads = pool_size(handle->plain.pool);
  const int tile = kItemRows / group > 1 ? kItemRows / group : 1;
  std::vector<AttentionItem>& items = handle->items;
  items.clear();
  int decoding = 0, row = 0;
  for (int s = 0; s < a.num_sequences; ++s) decoding += a.lengths[s] == 1;
  // Long work first: whoever finishes early then takes the small rest.
  for (int s = 0; s < a.num_sequences; row += a.lengths[s++]) {
    if (a.lengths[s] == 1) continue;
    const int tiles = (a.lengths[s] + tile - 1) / tile;
    for (int head = 0; head < c.num_kv_heads; ++head)
      for (int t = tiles - 1; t >= 0; --t) {
        const int first = t * tile, count = a.lengths[s] - first < tile ? a.lengths[s] - first : tile;
        items.push_back({s, first, count, row, head, head + 1});
      }
  }
  // One item is a sequence with all its heads (one run through its pages), unless that leaves threads without work.
  const int heads = decoding >= 4 * threads ? c.num_kv_heads : 1;
  row = 0;
  for (int s = 0; s < a.num_sequences; row += a.lengths[s++]) {
    if (a.lengths[s] != 1) continue;
    for (int head = 0; head < c.num_kv_heads; head += heads) items.push_back({s, 0, 1, row, head, head + heads});
  }
  handle->positions.resize(size_t(a.num_tokens));
  row = 0;
  for (int s = 0; s < a.num_sequences; ++s)
    for (int i = 0; i < a.lengths[s]; ++i) handle->positions[size_t(row++)] = a.starts[s] + i;
  handle->plain.buffers.items = items.data();
  handle->plain.buffers.num_items = int(items.size());
  handle->plain.buffers.row_positions = handle->positions.data();
}

constexpr int kRouterSlot = 5, kExpertSlot = 6;  // then gate_up and down of each expert in turn

Linear* linear_slot(Handle* handle, int layer, int slot) {
  if (slot == 4) return &handle->plain.head;
  if (layer < 0 || layer >= handle->plain.config.num_layers) return nullptr;
  Layer& l = handle->plain.layers[layer];
  if (slot >= kRouterSlot) {
    if (!l.experts || slot >= kExpertSlot + 2 * handle->plain.config.num_experts) return nullptr;
    if (slot == kRouterSlot) return &l.experts->router;
    return (slot - kExpertSlot) % 2 ? &l.experts->down[(slot - kExpertSlot) / 2]
                                    : &l.experts->gate_up[(slot - kExpertSlot) / 2];
  }
  Linear* const slots[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
  return slot >= 0 && slot < 4 ? slots[slot] : nullptr;
}

float** vector_slot(Handle* handle, int layer, int slot) {
  if (slot == 12) return &handle->plain.final_norm.weight;
  if (slot == 13) return &handle->plain.final_norm.bias;
  if (layer < 0 || layer >= handle->plain.config.num_layers) return nullptr;
  Layer& l = handle->plain.layers[layer];
  float** const slots[] = {&l.input.weight,    &l.input.bias,    &l.post_attention.weight, &l.post_attention.bias,
                           &l.mlp.weight,      &l.mlp.bias,      &l.post_mlp.weight,       &l.post_mlp.bias,
                           &l.q.weight,        &l.k.weight,      &l.sinks};
  return slot >= 0 && slot < 11 ? slots[slot] : nullptr;
}

void prepare_int8(Handle* handle, Linear* linear, int depth) {
  const int64_t groups = (depth + kInt8Group - 1) / kInt8Group;
  linear->depth = depth;  // rows of activations are padded when they are quantised
  if (!linear->extra) linear->extra = handle->keep(sizeof(Int8Linear));
  if (linear->extra) *static_cast<Int8Linear*>(linear->extra) = {&handle->int8, nullptr};
  linear->panel_bytes = groups * kPanel * (kInt8Group + 2);
  const int64_t row = (groups * (kInt8Group + 8) + 63) / 64 * 64 + kRowPad;  // bytes, a scale and a start per group
  if (row <= handle->int8.row_stride) return;
  handle->int8.row_stride = row;
  handle->int8.pool = handle->plain.pool;
  handle->int8.has_vnni = has_vnni();
  handle->max_tokens = handle->max_outputs = 0;  // buffers are too small now
}

int prepare_linear(Handle* handle, Linear* linear, int format, int columns, int depth) {
  const int step = format == kBf16 ? 2 : 1;
  if (linear->data && linear->format == format && linear->columns == columns &&
      linear->depth == (depth + step - 1) / step * step)
    return kOk;  // packed again, in place
  linear->format = format;
  linear->columns = columns;
  linear->depth = (depth + step - 1) / step * step;
  linear->panels = (columns + kPanel - 1) / kPanel;
  linear->panel_bytes = int64_t(linear->depth / step) * kPanel * 4;
  if (format == kInt8) prepare_int8(handle, linear, depth);
  linear->data = handle->keep(linear->panels * linear->panel_bytes + 4096);
  return linear->data && (format != kInt8 || linear->extra) ? kOk : kNoMemory;
}

// The layer becomes a mixture of experts with the first linear of one.
bool add_experts(Handle* handle, int layer) {
  const int count = handle->plain.config.num_experts;
  if (layer < 0 || layer >= handle->plain.config.num_layers || !count) return false;
  Layer& l = handle->plain.layers[layer];
  if (l.experts) return true;
  Experts* experts = reinterpret_cast<Experts*>(handle->keep(sizeof(Experts)));
  Linear* linears = reinterpret_cast<Linear*>(handle->keep(int64_t(sizeof(Linear)) * 2 * count));
  Int8Linear* extras = reinterpret_cast<Int8Linear*>(handle->keep(int64_t(sizeof(Int8Linear)) * 2 * count));
  if (!experts || !linears || !extras) return false;
  for (int i = 0; i < 2 * count; ++i) linears[i].extra = extras + i;  // used if it becomes int8
  *experts = {{}, linears, linears + count, -1, 2 * count + 1};
  l.experts = experts;
  return true;
}

// What the step takes for granted of linears that share buffers.
bool is_right_shape(const Config& c, int slot, int columns, int depth, int format) {
  if (slot == 3 && depth > c.intermediate_size) return false;
  if (slot < kRouterSlot) return true;
  if (slot == kRouterSlot)
    return (columns == c.num_experts || columns == c.num_experts + 1) && depth == c.hidden_size && format == c.format;
  if ((slot - kExpertSlot) % 2) return columns == c.hidden_size && depth == c.expert_size;
  return columns == (c.expert_size + kPanel / 2 - 1) / (kPanel / 2) * kPanel && depth == c.hidden_size;
}

char* block_address(Handle* handle, int group, int layer, int block, int64_t* bytes) {
  const Config& c = handle->plain.config;
  if (group < 0 || group >= c.num_groups) return nullptr;
  const Group& g = handle->plain.groups[group];
  if (block < 0 || block >= g.num_blocks) return nullptr;
  *bytes = int64_t(c.num_kv_heads) * 2 * kPageSize * c.head_dim * handle->element();
  return g.pool + layer * g.layer_bytes + block * *bytes;
}

}  // namespace
}  // namespace aiocb

using namespace aiocb;

AIOCB_API const char* aiocb_level(const char* name) {
  const Level* level = find_level(name);
  return level ? level->name : nullptr;
}

AIOCB_API Handle* aiocb_create(const Config* config, const char* level, int num_threads, const int32_t* cores) {
  const Level* chosen = find_level(level);
  if (!chosen || config->num_kv_heads < 1 || config->num_heads % config->num_kv_heads || config->head_dim % 16 ||
      config->head_dim > kMaxHeadDim || config->rotary_dim > config->head_dim || config->rotary_dim % 2)
    return nullptr;
  if (config->num_experts && (config->num_chosen < 1 || config->num_chosen > config->num_experts ||
                              config->expert_size < 1 || config->is_parallel || !config->is_gated))
    return nullptr;
  Handle* handle = new Handle;
  handle->plain.config = *config;
  handle->level = chosen;
  handle->plain.pool = pool_create(num_threads, cores);
  handle->plain.layers = reinterpret_cast<Layer*>(handle->keep(int64_t(sizeof(Layer)) * config->num_layers));
  handle->plain.groups = reinterpret_cast<Group*>(handle->keep(int64_t(sizeof(Group)) * config->num_groups));
  handle->plain.ropes = reinterpret_cast<Rope*>(handle->keep(int64_t(sizeof(Rope)) * (config->num_ropes + 1)));
  return handle;
}

AIOCB_API void aiocb_destroy(Handle* handle) { delete handle; }
AIOCB_API const char* aiocb_error(const Handle* handle) { return handle->error; }
AIOCB_API const char* aiocb_handle_level(const Handle* handle) { return handle->level->name; }

AIOCB_API int aiocb_set_layer(Handle* handle, int layer, int window, int rope, int group, int group_layer, float scale) {
  const Config& c = handle->plain.config;
  if (layer < 0 || layer >= c.num_layers || rope >= c.num_ropes || group < 0 || group >= c.num_groups)
    return fail(handle, kBadShape, "layer %ld: rope %ld, group %ld", layer, rope, group);
  Layer& l = handle->plain.layers[layer];
  l.window = window, l.rope = rope, l.group = group, l.group_layer = group_layer, l.scale = scale;
  return kOk;
}

AIOCB_API int aiocb_set_rope(Handle* handle, int rope, const float* inverse_frequencies, int count, float scaling) {
  if (rope < 0 || rope >= handle->plain.config.num_ropes || count != handle->plain.config.rotary_dim / 2)
    return fail(handle, kBadShape, "rope %ld: %ld frequencies", rope, count);
  float* copy = handle->plain.ropes[rope].inverse_frequencies;  // again: in place
  if (!copy) copy = reinterpret_cast<float*>(handle->keep(int64_t(count) * 4));
  if (!copy) return kNoMemory;
  std::memcpy(copy, inverse_frequencies, size_t(count) * 4);
  handle->plain.ropes[rope] = {copy, scaling};
  return kOk;
}

AIOCB_API int aiocb_set_vector(Handle* handle, int layer, int slot, const float* values, int count) {
  float** target = vector_slot(handle, layer, slot);
  if (!target) return fail(handle, kBadShape, "no vector %ld in layer %ld", slot, layer);
  // Padded: kernels read whole vectors. A second time: in place, of the same length.
  float* copy = *target ? *target : reinterpret_cast<float*>(handle->keep(int64_t(count) * 4 + 64));
  if (!copy) return kNoMemory;
  std::memcpy(copy, values, size_t(count) * 4);
  *target = copy;
  return kOk;
}

// `rows[c]` is the source row of packed column c (null: zeros); `bias[c]` its bias. For int8, `input_scales`
// multiply the weight along k, and `importance` weighs its errors (null: none). The sources can be freed afterwards.
AIOCB_API int aiocb_set_linear(Handle* handle, int layer, int slot, const char* const* rows, int columns, int depth,
                               int source_format, int format, const float* bias, const float* input_scales,
                               const float* importance) {
  if (slot >= kRouterSlot && !add_experts(handle, layer))
    return fail(handle, kBadShape, "no experts in layer %ld", layer);
  Linear* linear = linear_slot(handle, layer, slot);
  if (!linear) return fail(handle, kBadShape, "no linear %ld in layer %ld", slot, layer);
  if (columns < 1 || depth < 1 || !is_right_shape(handle->plain.config, slot, columns, depth, format))
    return fail(handle, kBadShape, "linear %ld of %ld columns, depth %ld", slot, columns, depth);
  const bool is_new = !linear->data;
  if (slot >= kExpertSlot) {
    int32_t& common = handle->plain.layers[layer].experts->format;
    if ((common >= 0 && format != common) || (format != kInt8 && format != handle->plain.config.format))
      return fail(handle, kBadShape, "linear %ld has format %ld, the layer's experts %ld", slot, format, common);
    common = format;
  }
  if (int code = prepare_linear(handle, linear, format, columns, depth)) return code;
  if (slot >= kRouterSlot && is_new) --handle->plain.layers[layer].experts->num_missing;
  std::vector<const char*> padded(size_t(linear->panels) * kPanel, nullptr);
  std::memcpy(padded.data(), rows, size_t(columns) * sizeof(char*));
  struct Context {
    Handle* handle;
    Linear* linear;
    PackArgs args;
  } context = {handle, linear, {padded.data(), source_format, depth, input_scales, importance}};
  pool_run(handle->plain.pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->handle->level->pack(c->linear, &c->args, thread, num_threads);
  }, &context);
  if (bias) {
    if (!linear->bias) linear->bias = reinterpret_cast<float*>(handle->keep(int64_t(linear->panels) * kPanel * 4));
    if (!linear->bias) return kNoMemory;
    std::memcpy(linear->bias, bias, size_t(columns) * 4);
  } else {
    linear->bias = nullptr;
  }
  return kOk;
}

// From now on, add the squares of what enters an int8 linear to `squares` [depth]; null ends it. The gate_up of a layer
// with experts stands for all of them, which read the same rows.
AIOCB_API int aiocb_record_inputs(Handle* handle, int layer, int slot, float* squares) {
  Linear* linear = linear_slot(handle, layer, slot);
  if (linear && slot == 2 && handle->plain.layers[layer].experts) {
    for (int e = 0; e < handle->plain.config.num_experts; ++e)
      if (int code = aiocb_record_inputs(handle, layer, kExpertSlot + 2 * e, squares)) return code;
    if (!linear->data) return kOk;
  }
  if (!linear || linear->format != kInt8) return fail(handle, kBadShape, "linear %ld of layer %ld is not int8", slot, layer);
  static_cast<Int8Linear*>(linear->extra)->squares = squares;
  return kOk;
}

AIOCB_API void aiocb_set_embedding(Handle* handle, const char* rows) { handle->plain.embedding = rows; }

AIOCB_API int aiocb_set_group(Handle* handle, int group, int num_blocks, int num_layers) {
  if (group < 0 || group >= handle->plain.config.num_groups || num_blocks < 1 || num_layers < 1)
    return fail(handle, kBadShape, "group %ld: %ld blocks of %ld layers", group, num_blocks, num_layers);
  const Config& c = handle->plain.config;
  const int64_t block = int64_t(c.num_kv_heads) * 2 * kPageSize * c.head_dim * handle->element();
  // A block is first used in all layers at once, and now and then that is the first touch of a huge page. Layers are
  // shifted against each other, so that this happens to one of them at a time: to all in one step would be felt. Where
  // the shift would be a good part of a layer, it is left out.
  const int64_t huge = int64_t(kHugePage), wanted = huge / num_layers / 4096 * 4096, plain = block * num_blocks;
  const int64_t layer_bytes = plain < 8 * huge ? plain : plain + ((wanted - plain) % huge + huge) % huge;
  char* pool = handle->keep(layer_bytes * num_layers);
  if (!pool) return fail(handle, kNoMemory, "no memory for a cache of %ld blocks", num_blocks);
  handle->plain.groups[group] = {num_blocks, num_layers, layer_bytes, pool};
  return kOk;
}

AIOCB_API int aiocb_copy_block(Handle* handle, int group, int source, int target) {
  int64_t bytes = 0;
  if (!block_address(handle, group, 0, source, &bytes) || !block_address(handle, group, 0, target, &bytes))
    return fail(handle, kBadBlock, "copy of block %ld to %ld in group %ld", source, target, group);
  for (int l = 0; l < handle->plain.groups[group].num_layers; ++l)
    std::memcpy(block_address(handle, group, l, target, &bytes), block_address(handle, group, l, source, &bytes),
                size_t(bytes));
  return kOk;
}

// Raw bytes of one block, layer by layer: `num_layers * block bytes`. Direction 0 reads the cache, 1 writes it.
AIOCB_API int aiocb_move_block(Handle* handle, int group, int block, char* bytes, int direction) {
  int64_t size = 0;
  if (!block_address(handle, group, 0, block, &size))
    return fail(handle, kBadBlock, "no block %ld in group %ld", block, group);
  for (int l = 0; l < handle->plain.groups[group].num_layers; ++l) {
    char* page = block_address(handle, group, l, block, &size);
    std::memcpy(direction ? page : bytes + l * size, direction ? bytes + l * size : page, size_t(size));
  }
  return kOk;
}

AIOCB_API int aiocb_step(Handle* handle, const StepArgs* args) {
  if (int code = check(handle, *args)) return code;
  if (!grow(handle, args->num_tokens, args->num_outputs)) return fail(handle, kNoMemory, "no memory for a step");
  plan_attention(handle, *args);
  pool_reset_counters(handle->plain.pool, handle->plain.config.num_layers);
  struct Context {
    Handle* handle;
    const StepArgs* args;
  } context = {handle, args};
  pool_run(handle->plain.pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->handle->level->step(&c->handle->plain, c->args, thread, num_threads);
  }, &context);
  return kOk;
}

// Choose tokens, or look up log-probabilities, of rows of logits: see selection.h. Rows are shared among the threads.
AIOCB_API int aiocb_select(Handle* handle, SelectArgs* args) {
  if (args->num_rows < 0 || args->vocab < 1 || args->stride < 0)
    return fail(handle, kBadShape, "selection of %ld rows of %ld, %ld apart", args->num_rows, args->vocab, args->stride);
  Pool* pool = handle->plain.pool;
  args->pool = pool;
  args->scratch_bytes = (select_scratch_bytes(args->vocab) + 4095) / 4096 * 4096;
  const int64_t bytes = args->scratch_bytes * pool_size(pool);
  if (bytes > handle->select_bytes) {
    handle->selecting.clear();
    handle->select_scratch = handle->selecting.take(bytes);
    handle->select_bytes = handle->select_scratch ? bytes : 0;
    if (!handle->select_scratch) return fail(handle, kNoMemory, "no memory to select from %ld tokens", args->vocab);
  }
  args->scratch = handle->select_scratch;
  pool_reset_counters(pool, 1);
  struct Context {
    Handle* handle;
    const SelectArgs* args;
  } context = {handle, args};
  pool_run(pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->handle->level->select(c->args, thread, num_threads);
  }, &context);
  return kOk;
}

// ---- single kernels, for tests and benchmarks -----------------------------------------------------------------

AIOCB_API int aiocb_attention(Handle* handle, const StepArgs* args, int layer, const float* qkv, float* out) {
  if (int code = check(handle, *args)) return code;
  if (!grow(handle, args->num_tokens, 1)) return kNoMemory;
  const Config& c = handle->plain.config;
  const int64_t width = int64_t(c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
  std::memcpy(handle->plain.buffers.qkv, qkv, size_t(args->num_tokens * width) * 4);
  handle->plain.layers[layer].qkv.columns = int32_t(width);
  plan_attention(handle, *args);
  pool_reset_counters(handle->plain.pool, 1);
  struct Context {
    Handle* handle;
    const StepArgs* args;
    int layer;
  } context = {handle, args, layer};
  pool_run(handle->plain.pool, [](void* opaque, int thread, int num_threads) {
    Context* k = static_cast<Context*>(opaque);
    k->handle->level->attention(&k->handle->plain, k->args, k->layer, thread, num_threads);
  }, &context);
  const int64_t heads = int64_t(c.num_heads) * c.head_dim;
  for (int t = 0; out && t < args->num_tokens; ++t) {
    const char* row = handle->plain.buffers.attended + t * handle->plain.buffers.attended_stride;
    for (int64_t i = 0; i < heads; ++i) {
      uint32_t bits;
      if (handle->element() == 4) std::memcpy(&bits, row + i * 4, 4);
      else bits = uint32_t(reinterpret_cast<const uint16_t*>(row)[i]) << 16;
      std::memcpy(out + t * heads + i, &bits, 4);
    }
  }
  return kOk;
}

// `a` is in the model's format, rows `a_stride` bytes apart and padded to whole k steps.
AIOCB_API int aiocb_linear(Handle* handle, int layer, int slot, const char* a, int64_t a_stride, int rows, float* out,
                           int64_t out_stride) {
  const Linear* linear = linear_slot(handle, layer, slot);
  if (!linear || !linear->data || rows < 1) return kBadShape;
  if (linear->format == kInt8 && !grow(handle, rows, 1)) return kNoMemory;
  const int format = handle->plain.config.format;
  struct Context {
    Handle* handle;
    const Linear* linear;
    const char* a;
    int64_t a_stride, out_stride;
    int rows, format;
    float* out;
  } context = {handle, linear, a, a_stride, out_stride, rows, format, out};
  pool_run(handle->plain.pool, [](void* opaque, int thread, int num_threads) {
    Context* c = static_cast<Context*>(opaque);
    c->handle->level->linear(c->linear, c->format, c->a, c->a_stride, c->rows, c->out, c->out_stride, thread, num_threads);
  }, &context);
  return kOk;
}

AIOCB_API int aiocb_norm(const char* level, const float* weight, const float* bias, int is_layer_norm, float eps,
                         const float* x, int rows, int width, int format, char* out) {
  const Level* chosen = find_level(level);
  if (!chosen) return kBadShape;
  const Norm norm = {const_cast<float*>(weight), const_cast<float*>(bias)};
  chosen->norm(&norm, is_layer_norm, eps, x, rows, width, format, out, int64_t(width) * (format == kF32 ? 4 : 2));
  return kOk;
}

AIOCB_API int aiocb_activation(const char* level, int kind, const float* gate, const float* up, int count, float* out) {
  const Level* chosen = find_level(level);
  if (!chosen) return kBadShape;
  chosen->activation(kind, gate, up, count, out);
  return kOk;
}

// Bytes per second that all threads together read from memory, best of a few passes.
AIOCB_API double aiocb_bandwidth(const char* level, int num_threads, int64_t bytes) {
  const Level* chosen = find_level(level);
  if (!chosen) return 0.0;
  char* data = allocate(bytes);
  if (!data) return 0.0;
  std::memset(data, 0, size_t(bytes));
  Pool* pool = pool_create(num_threads, nullptr);
  struct Context {
    const Level* level;
    const char* data;
    int64_t bytes;
    volatile float sink;
  } context = {chosen, data, bytes, 0.0f};
  double best = 0.0;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = pool_now();
    pool_run(pool, [](void* opaque, int thread, int threads) {
      Context* c = static_cast<Context*>(opaque);
      if (c->level->read_memory(c->data, c->bytes, thread, threads) != 0.0f) c->sink = 1.0f;
    }, &context);
    const double rate = double(bytes) / (pool_now() - start);
    best = rate > best ? rate : best;
  }
  pool_destroy(pool);
  release(data);
  return best;
}

// Operations per second (a multiply and an add are two) of all threads together, best of a few passes.
AIOCB_API double aiocb_arithmetic(const char* level, int num_threads, int format) {
  const Level* chosen = find_level(level);
  if (!chosen) return 0.0;
  Pool* pool = pool_create(num_threads, nullptr);
  struct Context {
    const Level* level;
    int format;
  } context = {chosen, format};
  constexpr int kRepeats = 2000;
  const double operations = 2.0 * double(chosen->multiply_add(format, 1, has_vnni())) * kRepeats * pool_size(pool);
  double best = 0.0;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = pool_now();
    pool_run(pool, [](void* opaque, int, int) {
      Context* c = static_cast<Context*>(opaque);
      c->level->multiply_add(c->format, kRepeats, has_vnni());
    }, &context);
    const double rate = operations / (pool_now() - start);
    best = rate > best ? rate : best;
  }
  pool_destroy(pool);
  return best;
}

#include "generic_api.h"
