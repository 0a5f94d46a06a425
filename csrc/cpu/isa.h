// Selects the kernels of this machine's instruction set. The build compiles each *.isa.cpp file once per
// set, named by PYG_FAST_ISA; all its definitions are in the namespace of that name.
#pragma once

namespace pyg_fast::cpu {

enum class Isa { baseline, avx2, avx512 };

// The widest set that this machine has; PYG_FAST_CPU_ISA limits the choice.
Isa isa();

template <typename Kernel>
Kernel* chosen(Kernel* baseline, Kernel* avx2, Kernel* avx512) {
  const Isa best = isa();
  return best == Isa::avx512 ? avx512 : best == Isa::avx2 ? avx2 : baseline;
}

}  // namespace pyg_fast::cpu

// Defines cpu::name(parameters), which calls name(arguments) of the chosen set. Use it after the namespace
// PYG_FAST_ISA of a *.isa.cpp file, which defines this function:
//   PYG_FAST_KERNEL(spmm, (const Spmm& p, int64_t row_begin, int64_t row_end), (p, row_begin, row_end))
#define PYG_FAST_KERNEL(...) PYG_FAST_KERNEL_IN(PYG_FAST_ISA, __VA_ARGS__)
#define PYG_FAST_KERNEL_IN(...) PYG_FAST_KERNEL_OF(__VA_ARGS__)
#define PYG_FAST_KERNEL_OF(isa, ...) PYG_FAST_KERNEL_##isa(__VA_ARGS__)

// Only the baseline's object defines it: code that any CPU runs.
#ifdef PYG_FAST_X86
#define PYG_FAST_KERNEL_baseline(name, parameters, arguments)                    \
  namespace pyg_fast::cpu {                                                      \
  namespace avx2 {                                                               \
  void name parameters;                                                          \
  }                                                                              \
  namespace avx512 {                                                             \
  void name parameters;                                                          \
  }                                                                              \
  void name parameters {                                                         \
    static const auto kernel = chosen(baseline::name, avx2::name, avx512::name); \
    kernel arguments;                                                            \
  }                                                                              \
  }
#else
#define PYG_FAST_KERNEL_baseline(name, parameters, arguments) \
  namespace pyg_fast::cpu {                                   \
  void name parameters { baseline::name arguments; }          \
  }
#endif
#define PYG_FAST_KERNEL_avx2(name, parameters, arguments)
#define PYG_FAST_KERNEL_avx512(name, parameters, arguments)
