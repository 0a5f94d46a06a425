// Compiled once per instruction set, named by PYG_FAST_ISA: baseline, avx2 or avx512.
#include "isa.h"
#include "sddmm.h"
#include "spmm.h"
#include "spmm_max.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

const Kernels kernels = {spmm, spmm_max, sddmm, spmm_max_backward_value, spmm_max_backward_x};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
