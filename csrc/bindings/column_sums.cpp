#include "params/column_sums.h"
#include "stable.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
Tensor column_sums(const Tensor& x_) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  ColumnSums p;
  p.dtype = dtype_of(x_, "x");
  p.num_rows = x_.size(0);
  p.dim = x_.size(1);
  if constexpr (kCuda) {
    const Tensor x = to_contiguous(x_);
    p.x = x.const_data_ptr();
    Tensor out = empty(x, {p.dim}, x.scalar_type());
    p.out = out.mutable_data_ptr();
    Launch launch(x);
    void* scratch = launch.scratch(cuda::column_sums_scratch(p));
    launch.check(cuda::column_sums(p, scratch, launch.stream()), "column_sums");
    return out;
  } else {
    return sum_of_rows(x_);
  }
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The sum of each column, in the type of x.
  m.def("column_sums(Tensor x) -> Tensor");
}

PYG_FAST_IMPL(column_sums)
