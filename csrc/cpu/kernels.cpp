// Compiled once per instruction set, named by PYG_FAST_ISA: baseline, avx2 or avx512.
#include "cbsr.h"
#include "isa.h"
#include "maxk.h"
#include "sddmm.h"
#include "spmm.h"
#include "spmm_max.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

const Kernels kernels = {
    spmm,          spmm_max,    sddmm,     spmm_max_backward_value, spmm_max_backward_x,
    maxk,          cbsr_to_dense, cbsr_sample, cbsr_spmm,           cbsr_sddmm,
    cbsr_spmm_backward, cbsr_spmm_backward_ordered,
};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
