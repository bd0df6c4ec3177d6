// How the library refuses: thrown inside, an error code and a text outside. Nothing thrown crosses the C interface.
#pragma once
#include <cstdint>
#include <cstdio>

namespace aiocb {

enum Error : int32_t {
  kOk = 0, kBadShape = 1, kBadToken = 2, kBadBlock = 3, kBadOutput = 4, kNoMemory = 5, kNoThread = 6, kInternal = 7,
  kBusy = 8,   // another thread is in a call on this handle
  kForked = 9  // this process was forked off in the middle of a call on this handle
};

struct Failure {
  Error code;
  char text[240];

  // The format's arguments are all %ld.
  template <class... Figures>
  Failure(Error error, const char* format, Figures... figures) : code(error) {
    std::snprintf(text, sizeof(text), format, long(figures)...);
  }
};

}  // namespace aiocb
