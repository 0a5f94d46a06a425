#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace pyg_fast::cpu {
namespace {

Isa choose() {
#if defined(PYG_FAST_X86)
  const char* cap = std::getenv("PYG_FAST_CPU_ISA");
  const auto allowed = [cap](const char* below) {
    return cap == nullptr || (std::strcmp(cap, "baseline") != 0 && std::strcmp(cap, below) != 0);
  };
  __builtin_cpu_init();
  // Every machine with AVX2 also converts half precision (F16C).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && allowed("avx2") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (avx2 && allowed("baseline")) return Isa::avx2;
#endif
  return Isa::baseline;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace pyg_fast::cpu
