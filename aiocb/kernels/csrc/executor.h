// What every handle is: an instruction set, threads, memory, and a text for the last refusal.
//
// A function of the C interface is one `guarded` call: it refuses a handle that another thread is using, and turns
// whatever is thrown into a code and a text. Functions throw before they change anything. Threads get work by `parallel`.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "failure.h"
#include "memory.h"
#include "model.h"
#include "pool.h"

#define AIOCB_API extern "C" __attribute__((visibility("default")))

namespace aiocb {

constexpr int kErrorBytes = 256;  // of every text

// In a catch clause: what was thrown, as a code and a text.
int explain(char* error);

class Executor {
 public:
  const InstructionSet* const isa;
  Arena memory{size_t(32) << 20};  // what lives as long as the handle
  char error[kErrorBytes] = "";

  // `name` of an instruction set, null for the best; `team` as in pool_create.
  Executor(const char* name, int num_threads, const Team* team);
  Executor(const Executor&) = delete;
  virtual ~Executor() {}

  Pool* pool() const { return pool_.get(); }
  int num_threads() const { return pool_size(pool_.get()); }

  // Call work(lane) in every thread.
  template <class Work>
  void parallel(const Work& work) const {
    struct Context {
      const Executor* executor;
      const Work* work;
    } context = {this, &work};
    pool_run(pool(), [](void* opaque, int thread, int num_threads) {
      const Context* c = static_cast<const Context*>(opaque);
      (*c->work)(Lane{thread, num_threads, c->executor->scratch_[size_t(thread)]});
    }, &context);
  }

  // From now on, lanes have at least so many bytes; where that fails, as many as before.
  void reserve_scratch(int64_t bytes);

  // Cut the attention of a batch into items, long work first, and reserve their scratch.
  void plan_attention(const Config& shape, Batch* batch);

  // Throws where there is none of that number.
  const WeightFormat& weight_format(int format) const;
  int64_t element_bytes(int format) const { return weight_format(format).bits / 8; }

  // A linear without memory.
  Linear shape_linear(int format, int columns, int depth) const;
  void take_weights(Linear* linear) { linear->data = memory.take(linear->panels * linear->panel_bytes); }
  void take_bias(Linear* linear) { linear->bias = memory.take<float>(int64_t(linear->panels) * kPanel); }
  // Pack `columns` rows, the other columns of the last panel being zeros. `args.rows` is set here,
  // and `args.sources`, of which there are `columns` only, made as long.
  void fill_linear(const Linear& linear, const char* const* rows, PackArgs args, const float* bias);

  int enter();
  void leave() { user_.store(0, std::memory_order_release); }

 private:
  const std::unique_ptr<Pool, void (*)(Pool*)> pool_;
  std::unique_ptr<Arena> scratch_memory_;
  std::vector<char*> scratch_;     // by lane
  int64_t scratch_bytes_ = 0;
  std::vector<AttentionItem> items_;
  std::atomic<uint32_t> user_{0};  // the process of the call that is going on, or 0
};

template <class Work>
int guarded(Executor* executor, const Work& work) noexcept {
  if (int code = executor->enter()) return code;
  int code = kOk;
  try {
    work();
  } catch (...) {
    code = explain(executor->error);
  }
  executor->leave();
  return code;
}

}  // namespace aiocb
