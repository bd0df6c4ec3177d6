// A model as the library owns it: weights, cache, the block tables of its rows, and the buffers of a step.
#pragma once
#include <vector>

#include "executor.h"

namespace aiocb {

// The C interface hands an Executor out and takes a Handle back: with one base class, that is the same address.
struct Handle : Executor {
  Model plain = {};                 // what the kernels see
  QuantizedRows quantized = {};
  int deepest[kNumFormats] = {};    // depth of the deepest linear of each format
  bool is_settled = false;          // layers and groups fit each other; `windows` [groups] holds their widest views
  bool is_complete = false;         // all weights are there, in the right shapes
  std::vector<int> windows;

  Arena buffers{size_t(8) << 20};   // of the step, replaced when it grows
  int max_tokens = 0, max_outputs = 0;
  std::vector<int32_t> positions;
  std::vector<std::vector<int32_t>> tables;  // [row * groups + group]
  std::vector<uint64_t> last_steps;          // [row] the step that named it last
  std::vector<const int32_t*> pointers;      // [groups][R] of the step
  uint64_t num_steps = 0;

  Handle(const Config& config, const char* isa, int num_threads);

  int64_t element() const { return element_bytes(plain.config.format); }
  Linear* linear(int layer, int name);       // null: there is none

  void settle();                             // throws where a step would read outside of caches and tables
  void complete();                           // throws where a step would miss a weight
  void grow(int tokens, int outputs);
  // Check a step, make room for it, and only then change the rows' tables.
  Batch begin(const StepArgs& args, int num_outputs);
};

}  // namespace aiocb
