#include "params/spmm_var.h"
#include "stable.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
std::tuple<Tensor, Tensor> spmm_var(const Tensor& rowptr, const Tensor& col, const Tensor& x_) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  SpmmVar p;
  p.dtype = dtype_of(x_, "x");
  p.csr = csr_of(rowptr, col, std::nullopt, x_.size(0));
  p.dim = x_.size(1);
  check_device(x_, "x", col);
  const Tensor x = to_contiguous(x_);
  p.x = x.const_data_ptr();
  const ScalarType acc = acc_of(x.scalar_type());
  Tensor var = empty(x, {p.csr.num_rows, p.dim}, acc),
         mean = empty(x, {p.csr.num_rows, p.dim}, acc);
  p.var = var.mutable_data_ptr();
  p.mean = mean.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::spmm_var_scratch(p));
    launch.check(cuda::spmm_var(p, scratch, launch.stream()), "spmm_var");
  } else {
    share_edges(p.csr, (p.csr.num_edges + p.csr.num_rows) * (p.dim + 8) / 8,
                [&](int64_t begin, int64_t end) { cpu::spmm_var(p, begin, end); });
  }
  return {var, mean};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The variance over each row's edges, and their mean, in the dtype of sums.
  m.def("spmm_var(Tensor rowptr, Tensor col, Tensor x) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(spmm_var)
