// Zeroed memory for weights, caches and scratch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace aiocb {

constexpr size_t kHugePage = size_t(2) << 20;

// Resident when it is touched; huge pages where the system gives them. Throws Failure where there is none.
char* allocate(int64_t bytes);
void release(char* memory);

// Weights of a few hundred KiB each come from shared chunks: alone they would get small pages, and a packed panel walks
// through more of those than the processor remembers. Under an address sanitizer every piece stands alone.
class Arena {
 public:
  explicit Arena(size_t chunk) : chunk_(chunk) {}
  Arena(const Arena&) = delete;
  ~Arena() { clear(); }
  void clear();
  // A page at least; throws Failure, and is then as it was.
  char* take(int64_t bytes);
  template <class T>
  T* take(int64_t count) { return reinterpret_cast<T*>(take(count * int64_t(sizeof(T)))); }

 private:
  char* own(int64_t bytes);
  const size_t chunk_;
  std::vector<char*> chunks_;
  char* cursor_ = nullptr;
  size_t left_ = 0;
};

}  // namespace aiocb
