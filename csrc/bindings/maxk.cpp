#include "bindings/cbsr.h"
#include "params/maxk.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
std::tuple<Tensor, Tensor> maxk(const Tensor& x_, int64_t k, bool balanced) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  MaxK p;
  p.dtype = dtype_of(x_, "x");
  p.balanced = balanced;
  p.num_rows = x_.size(0);
  p.dim = x_.size(1);
  p.k = k;
  STD_TORCH_CHECK(k >= 1 && k <= p.dim, "k must be 1 to ", p.dim, ", got ", k);
  const Tensor x = to_contiguous(x_);
  Tensor values = empty(x, {p.num_rows, k}, x.scalar_type());
  Tensor columns = empty(x, {p.num_rows, k}, type_of_columns(p.dim));
  p.column_type = column_type(columns.scalar_type());
  p.x = x.const_data_ptr();
  p.values = values.mutable_data_ptr();
  p.columns = columns.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::maxk(p, launch.stream()), "maxk");
  } else {
    share_rows(p.num_rows, p.num_rows * p.dim,
               [&](int64_t begin, int64_t end) { cpu::maxk(p, begin, end); });
  }
  return {values, columns};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The k largest entries of each row as CBSR: (values, columns).
  m.def("maxk(Tensor x, int k, bool balanced) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(maxk)
