#include "params/sddmm.h"
#include "stable.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
Tensor sddmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& a_,
             const Tensor& b_, const OptTensor& row_scale_, const OptTensor& col_scale_, bool mean,
             int64_t num_values) {
  STD_TORCH_CHECK(b_.dim() == 2, "b must have two dimensions, got ", b_.dim());
  Sddmm p;
  p.dtype = dtype_of(a_, "a");
  p.csr = csr_of(rowptr, col, perm, b_.size(0));
  p.dim = b_.size(1);
  p.mean = mean;
  check_matrix(a_, "a", p.csr.num_rows, p.dim);
  check_type(b_, "b", a_.scalar_type());
  check_device(a_, "a", col);
  check_device(b_, "b", col);
  STD_TORCH_CHECK(num_values >= p.csr.num_edges, "num_values is below the edges");
  const Tensor a = to_contiguous(a_), b = to_contiguous(b_);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const ScalarType acc = acc_of(a.scalar_type());
  check_vector(row_scale, "row_scale", p.csr.num_rows);
  check_vector(col_scale, "col_scale", p.csr.num_cols);
  check_type(row_scale, "row_scale", acc);
  check_type(col_scale, "col_scale", acc);
  check_device(row_scale, "row_scale", col);
  check_device(col_scale, "col_scale", col);
  p.row_scale = pointer(row_scale);
  p.col_scale = pointer(col_scale);
  // Edges that the CSR omits have gradient zero.
  Tensor out = zeros(a, {num_values});
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(a);
    launch.check(cuda::sddmm(p, launch.stream()), "sddmm");
  } else {
    share_edges(p.csr, p.csr.num_edges * (p.dim + 8) / 16,
                [&](int64_t begin, int64_t end) { cpu::sddmm(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // <a[i], b[j]> for every edge: the gradient of edge weights.
  m.def(
      "sddmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor a, Tensor b, Tensor? row_scale, "
      "Tensor? col_scale, bool mean, SymInt num_values) -> Tensor");
}

PYG_FAST_IMPL(sddmm)
