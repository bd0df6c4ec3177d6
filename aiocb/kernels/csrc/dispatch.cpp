#include "dispatch.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "executor.h"

namespace aiocb {

// An instruction set that the compiler does not know or this processor does not need is left out by the build (AIOCB_NO_...).
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX512BF16)
#define AIOCB_HAS_AVX512BF16
namespace avx512bf16 { extern const InstructionSet isa; }
#endif
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX512)
#define AIOCB_HAS_AVX512
namespace avx512 { extern const InstructionSet isa; }
#endif
#if defined(__x86_64__) && !defined(AIOCB_NO_AVX2)
#define AIOCB_HAS_AVX2
namespace avx2 { extern const InstructionSet isa; }
#endif
#if !defined(AIOCB_NO_PORTABLE)
#define AIOCB_HAS_PORTABLE
namespace portable { extern const InstructionSet isa; }
#endif

namespace {

#if defined(__x86_64__)
// Asked of the processor: older compilers have no name for it.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

bool is_supported(const char* name) {
  auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (is("avx2")) return avx2;
  if (is("avx512")) return avx512;
#if defined(AIOCB_HAS_AVX512BF16)  // an older compiler does not know the name either
  if (is("avx512bf16"))  // built with VNNI too: no processor has the one without the other
    return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
#endif
  return false;
}

// Intel's processors multiply pairs of bf16 at half the rate of floats (measured on Emerald Rapids: 89 and 176 GFLOP/s
// a core), AMD's at twice.
bool is_worth_it(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return std::strcmp(name, "avx512bf16") != 0 || !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

}  // namespace

bool has_vnni() {
#if defined(AIOCB_HAS_AVX512)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

const InstructionSet* find_instruction_set(const char* name) {
  const InstructionSet* const all[] = {  // best first
#if defined(AIOCB_HAS_AVX512BF16)
      &avx512bf16::isa,
#endif
#if defined(AIOCB_HAS_AVX512)
      &avx512::isa,
#endif
#if defined(AIOCB_HAS_AVX2)
      &avx2::isa,
#endif
#if defined(AIOCB_HAS_PORTABLE)
      &portable::isa,
#endif
  };
  for (const InstructionSet* isa : all)
    if ((name ? std::strcmp(name, isa->name) == 0 : is_worth_it(isa->name)) && is_supported(isa->name)) return isa;
  return nullptr;
}

}  // namespace aiocb

AIOCB_API const char* aiocb_instruction_set(const char* name) {
  const aiocb::InstructionSet* isa = aiocb::find_instruction_set(name);
  return isa ? isa->name : nullptr;
}
