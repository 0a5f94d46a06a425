#include "params/rabbit_order.h"
#include "stable.h"

namespace pyg_fast {
namespace {

Tensor rabbit_order(const Tensor& rowptr, const Tensor& col) {
  const Csr csr = csr_of(rowptr, col, std::nullopt, rowptr.size(0) - 1);
  Tensor perm = empty(col, {csr.num_rows}, ScalarType::Long);
  cpu::rabbit_order(csr, static_cast<int64_t*>(perm.mutable_data_ptr()));
  return perm;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Nodes of a square graph in Rabbit Order, int64; CPU only.
  m.def("rabbit_order(Tensor rowptr, Tensor col) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("rabbit_order", TORCH_BOX(&pyg_fast::rabbit_order));
}
