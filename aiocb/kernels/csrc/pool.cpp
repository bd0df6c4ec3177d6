#include "pool.h"

#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
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

void bind_to_core(int core) {
#if defined(__linux__)
  if (core < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // best effort: a cpuset may forbid it
#else
  (void)core;
#endif
}

}  // namespace

struct alignas(64) Pool {
  int num_threads = 1;
  std::vector<std::thread> threads;
  std::vector<int32_t> cores;
  bool is_caller_bound = false;
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
  std::unique_ptr<std::atomic<int>[]> counters;
  int capacity = 0;
  Team team = {};

  void run_in_team() {
    FlushDenormals flush;
    region(context, team.thread(), team.size());
  }

  void work(int thread) {
    if (!cores.empty()) bind_to_core(cores[size_t(thread)]);
    uint32_t seen = 0;
    for (;;) {
      const double deadline = pool_now() + kSpinSeconds;
      int round = 0;
      while (epoch.load(std::memory_order_acquire) == seen) {
        relax();
        if ((++round & 63) == 0 && pool_now() > deadline) break;
      }
      if (epoch.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex);
        ++parked;
        wake.wait(lock, [&] { return epoch.load(std::memory_order_acquire) != seen; });
        --parked;
      }
      seen = epoch.load(std::memory_order_acquire);
      if (is_closing) return;
      {
        FlushDenormals flush;
        region(context, thread, num_threads);
      }
      pool_barrier(this);
    }
  }

  void start_epoch() {
    bool has_parked;
    {
      std::lock_guard<std::mutex> lock(mutex);
      epoch.fetch_add(1, std::memory_order_release);
      has_parked = parked > 0;
    }
    if (has_parked) wake.notify_all();
  }
};

Pool* pool_create(int num_threads, const int32_t* cores) {
  Pool* pool = new Pool;
  pool->num_threads = num_threads < 1 ? 1 : num_threads;
  if (cores) pool->cores.assign(cores, cores + pool->num_threads);
  for (int t = 1; t < pool->num_threads; ++t) pool->threads.emplace_back([pool, t] { pool->work(t); });
  return pool;
}

Pool* pool_create_team(int num_threads, const Team* team) {
  Pool* pool = new Pool;
  pool->num_threads = num_threads < 1 ? 1 : num_threads;
  pool->team = *team;
  return pool;
}

void pool_destroy(Pool* pool) {
  pool->is_closing = true;
  pool->start_epoch();
  for (std::thread& thread : pool->threads) thread.join();
  delete pool;
}

int pool_size(const Pool* pool) { return pool->num_threads; }

void pool_run(Pool* pool, Region region, void* context) {
  if (!pool->cores.empty() && !pool->is_caller_bound) {
    bind_to_core(pool->cores[0]);
    pool->is_caller_bound = true;
  }
  FlushDenormals flush;
  if (pool->num_threads == 1) return region(context, 0, 1);
  pool->region = region;
  pool->context = context;
  if (pool->team.parallel)
    return pool->team.parallel([](void* opaque) { static_cast<Pool*>(opaque)->run_in_team(); }, pool,
                               unsigned(pool->num_threads), 0);
  pool->start_epoch();
  region(context, 0, pool->num_threads);
  pool_barrier(pool);
}

void pool_barrier(Pool* pool) {
  if (pool->num_threads == 1) return;
  const uint32_t generation = pool->generation.load(std::memory_order_acquire);
  if (pool->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == pool->num_threads) {
    pool->arrived.store(0, std::memory_order_relaxed);
    // Sequentially consistent with the sleeper's increment: either we see it, or it sees the new generation.
    pool->generation.store(generation + 1, std::memory_order_seq_cst);
    if (pool->sleepers.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(pool->barrier_mutex);
      pool->barrier_wake.notify_all();
    }
    return;
  }
  auto is_passed = [&] { return pool->generation.load(std::memory_order_seq_cst) != generation; };
  double deadline = 0.0;
  for (int round = 1;; ++round) {
    if (pool->generation.load(std::memory_order_acquire) != generation) return;
    relax();
    if (round % 256 == 0) {
      const double now = pool_now();
      if (deadline == 0.0) deadline = now + kBarrierSpinSeconds;
      else if (now > deadline) break;
    }
  }
  std::unique_lock<std::mutex> lock(pool->barrier_mutex);
  pool->sleepers.fetch_add(1, std::memory_order_seq_cst);
  pool->barrier_wake.wait(lock, is_passed);
  pool->sleepers.fetch_sub(1, std::memory_order_relaxed);
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

double pool_thread_seconds() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
#else
  return pool_now();
#endif
}

double pool_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace aiocb
