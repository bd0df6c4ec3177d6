#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "failure.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aiocb {
namespace {

// Long enough to bridge Python between two steps, short enough not to take the event loop's core (measured: 2 ms does).
constexpr double kSpinSeconds = 50e-6;
// In a region a waiter spins, because stages are microseconds apart. Past this it sleeps: the late thread was put off its
// core by another one (the event loop's, say), and only an idle core makes the system move it there.
constexpr double kBarrierSpinSeconds = 60e-6;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Denormals cost a hundred cycles each and bf16 products flush them anyway; restored, the caller's thread is not ours.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | uint64_t(1) << 24));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// A forked child has the caller's thread and no other. It counts here, and remembers which thread went on.
std::atomic<uint32_t> num_forks{0};
std::atomic<pthread_t> survivor{};

void watch_forks() {
  static const int failed = pthread_atfork(nullptr, nullptr, [] {
    survivor.store(pthread_self());
    num_forks.fetch_add(1);
  });
  if (failed) throw Failure(kNoMemory, "forks cannot be watched (errno %ld)", failed);
}

// Threads of our own and how they meet. In a forked child it is made anew in the same place, without a destructor: the
// threads of the old one do not exist there, and its locks may be held for ever.
struct Crew {
  std::vector<std::thread> threads;
  Region region = nullptr;
  void* context = nullptr;
  std::mutex mutex;
  std::condition_variable wake;
  bool is_closing = false;
  int parked = 0;
  alignas(64) std::atomic<uint32_t> epoch{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  std::atomic<int> sleepers{0};
  std::mutex barrier_mutex;
  std::condition_variable barrier_wake;
};

}  // namespace

struct alignas(64) Pool {
  int num_threads = 1;
  Team team = {};
  uint32_t process = 0;  // that the crew's threads live in, 0: there are none
  std::unique_ptr<std::atomic<int>[]> counters;
  int capacity = 0;
  Crew crew;

  void work(int thread) {
    uint32_t seen = 0;
    for (;;) {
      const double deadline = pool_now() + kSpinSeconds;
      int round = 0;
      while (crew.epoch.load(std::memory_order_acquire) == seen) {
        relax();
        if ((++round & 63) == 0 && pool_now() > deadline) break;
      }
      if (crew.epoch.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(crew.mutex);
        ++crew.parked;
        crew.wake.wait(lock, [&] { return crew.epoch.load(std::memory_order_acquire) != seen; });
        --crew.parked;
      }
      seen = crew.epoch.load(std::memory_order_acquire);
      if (crew.is_closing) return;
      {
        FlushDenormals flush;
        crew.region(crew.context, thread, num_threads);
      }
      pool_barrier(this);
    }
  }

  void start_epoch() {
    bool has_parked;
    {
      std::lock_guard<std::mutex> lock(crew.mutex);
      crew.epoch.fetch_add(1, std::memory_order_release);
      has_parked = crew.parked > 0;
    }
    if (has_parked) crew.wake.notify_all();
  }

  // All threads or none.
  void start() {
    new (&crew) Crew;
    process = pool_process();
    if (team.parallel) return;
    try {
      crew.threads.reserve(size_t(num_threads - 1));
      for (int t = 1; t < num_threads; ++t) crew.threads.emplace_back([this, t] { work(t); });
    } catch (const std::system_error& error) {
      Failure failure(kNoThread, "");
      std::snprintf(failure.text, sizeof(failure.text), "thread %ld of %d cannot be started: %s",
                    long(crew.threads.size()) + 2, num_threads, error.what());
      stop();
      throw failure;
    } catch (...) {
      stop();
      throw;
    }
  }

  void stop() {
    if (process != pool_process()) new (&crew) Crew;  // nobody to wait for
    crew.is_closing = true;
    start_epoch();
    for (std::thread& thread : crew.threads) thread.join();
    crew.threads.clear();
    process = 0;
  }
};

Pool* pool_create(int num_threads, const Team* team) {
  watch_forks();
  std::unique_ptr<Pool> pool(new Pool);
  pool->num_threads = num_threads < 1 ? 1 : num_threads;
  if (team) pool->team = *team;
  pool->start();
  return pool.release();
}

void pool_destroy(Pool* pool) {
  pool->stop();
  delete pool;
}

int pool_size(const Pool* pool) { return pool->num_threads; }

uint32_t pool_process() { return num_forks.load(std::memory_order_relaxed) + 1; }

void pool_revive(Pool* pool) {
  if (pool->process != pool_process()) pool->start();
}

void pool_run(Pool* pool, Region region, void* context) {
  pool_revive(pool);
  FlushDenormals flush;
  // GNU's runtime would wait for ever for the dead threads of the one that a fork left over; others get new ones from it.
  const bool is_lost = pool->team.parallel && pool_process() > 1 && pthread_equal(survivor.load(), pthread_self());
  if (pool->num_threads == 1 || is_lost) return region(context, 0, 1);
  pool->crew.region = region;
  pool->crew.context = context;
  if (pool->team.parallel)
    return pool->team.parallel([](void* opaque) {
      FlushDenormals flush;
      const Pool* p = static_cast<Pool*>(opaque);
      p->crew.region(p->crew.context, p->team.thread(), p->team.size());
    }, pool, unsigned(pool->num_threads), 0);
  pool->start_epoch();
  region(context, 0, pool->num_threads);
  pool_barrier(pool);
}

void pool_barrier(Pool* pool) {
  if (pool->num_threads == 1) return;
  Crew& crew = pool->crew;
  const uint32_t generation = crew.generation.load(std::memory_order_acquire);
  if (crew.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == pool->num_threads) {
    crew.arrived.store(0, std::memory_order_relaxed);
    // Sequentially consistent with the sleeper's increment: either we see it, or it sees the new generation.
    crew.generation.store(generation + 1, std::memory_order_seq_cst);
    if (crew.sleepers.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(crew.barrier_mutex);
      crew.barrier_wake.notify_all();
    }
    return;
  }
  auto is_passed = [&] { return crew.generation.load(std::memory_order_seq_cst) != generation; };
  double deadline = 0.0;
  for (int round = 1;; ++round) {
    if (crew.generation.load(std::memory_order_acquire) != generation) return;
    relax();
    if (round % 256 == 0) {
      const double now = pool_now();
      if (deadline == 0.0) deadline = now + kBarrierSpinSeconds;
      else if (now > deadline) break;
    }
  }
  std::unique_lock<std::mutex> lock(crew.barrier_mutex);
  crew.sleepers.fetch_add(1, std::memory_order_seq_cst);
  crew.barrier_wake.wait(lock, is_passed);
  crew.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void pool_reset_counters(Pool* pool, int count) {
  if (count > pool->capacity) {
    pool->counters.reset(new std::atomic<int>[size_t(count)]);
    pool->capacity = count;
  }
  for (int i = 0; i < count; ++i) pool->counters[size_t(i)].store(0, std::memory_order_relaxed);
}

int pool_next(Pool* pool, int counter) {
  return pool->counters[size_t(counter)].fetch_add(1, std::memory_order_relaxed);
}

double pool_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace aiocb
