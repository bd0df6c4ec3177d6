// The thread pool: the caller plus n - 1 threads; one region per step with barriers inside.
//
// Only plain functions, defined once in pool.cpp: an inline atomic in a header would be compiled per instruction set.
#pragma once
#include <cstdint>

namespace aiocb {

struct Pool;
typedef void (*Region)(void* context, int thread, int num_threads);

// Runs its regions on the threads of an OpenMP runtime that is there already (torch's): whoever alternates with torch's
// operators must not bring threads of its own, the two would wait for each other's spinning. No barriers inside regions.
struct Team {
  void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);  // GOMP_parallel
  int (*thread)();                                                                              // omp_get_thread_num
  int (*size)();                                                                                // omp_get_num_threads
};

// `team`: null for threads of our own. Throws Failure where a thread cannot be started.
Pool* pool_create(int num_threads, const Team* team);
void pool_destroy(Pool* pool);
int pool_size(const Pool* pool);
// Before a region whose failure would come too late: in a forked child, start threads that are not there. Throws Failure.
void pool_revive(Pool* pool);
void pool_run(Pool* pool, Region region, void* context);   // returns when every thread has finished; throws as pool_revive
void pool_barrier(Pool* pool);
void pool_reset_counters(Pool* pool, int count);           // call between regions
int pool_next(Pool* pool, int counter);                    // 0, 1, 2, ... over all threads
double pool_now();
uint32_t pool_process();                                   // another number in each forked child, never 0

}  // namespace aiocb
