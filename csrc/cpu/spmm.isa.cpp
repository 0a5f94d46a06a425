#include "spmm.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

void spmm(const Spmm& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.dim == 0) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    spmm_rows<typename decltype(type)::type, typename decltype(index)::type>(p, row_begin, row_end);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(spmm, (const Spmm& p, int64_t row_begin, int64_t row_end), (p, row_begin, row_end))
