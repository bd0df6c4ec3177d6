#include "memory.h"

#include <cstdlib>
#include <cstring>

#include "failure.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

namespace aiocb {

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)

namespace {

char* try_allocate(size_t bytes) {
  const size_t size = (bytes + 4095) / 4096 * 4096;
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
}

}  // namespace

void release(char* memory) {
  if (!memory) return;
  uintptr_t* header = reinterpret_cast<uintptr_t*>(memory - 16);
  munmap(reinterpret_cast<void*>(header[0]), header[1]);
}

#else

namespace {

char* try_allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes)) return nullptr;
  return static_cast<char*>(std::memset(memory, 0, bytes));
}

}  // namespace

void release(char* memory) { std::free(memory); }

#endif

char* allocate(int64_t bytes) {
  constexpr int64_t kMost = int64_t(1) << 46;
  char* memory = bytes < 0 || bytes > kMost ? nullptr : try_allocate(bytes > 0 ? size_t(bytes) : 1);
  if (!memory) throw Failure(kNoMemory, "no memory for %ld bytes", bytes);
  return memory;
}

void Arena::clear() {
  for (char* chunk : chunks_) release(chunk);
  chunks_.clear();
  left_ = 0;
}

char* Arena::take(int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  return own(bytes);
#else
  const int64_t size = bytes < 64 ? 4096 : (bytes + 4095) / 4096 * 4096;
  if (size > int64_t(chunk_ / 2)) return own(size);
  if (size > int64_t(left_)) {
    cursor_ = own(int64_t(chunk_));
    left_ = chunk_;
  }
  char* result = cursor_;
  cursor_ += size;
  left_ -= size_t(size);
  return result;
#endif
}

char* Arena::own(int64_t bytes) {
  if (chunks_.size() == chunks_.capacity()) chunks_.reserve(2 * chunks_.size() + 8);  // the last that can fail: below
  char* memory = allocate(bytes);
  chunks_.push_back(memory);
  return memory;
}

}  // namespace aiocb
