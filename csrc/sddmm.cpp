#include "cpu/cpu.h"
#include "stable.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

template <typename Run>
Tensor sddmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& a_,
             const Tensor& b_, const OptTensor& row_scale_, const OptTensor& col_scale_, bool mean,
             int64_t num_values, const Run& run) {
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
  // Zeros for the edges that the CSR leaves out.
  Tensor out = zeros(a, {num_values});
  p.out = out.mutable_data_ptr();
  run(p, a);
  return out;
}

Tensor sddmm_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& a,
                 const Tensor& b, OptTensor row_scale, OptTensor col_scale, bool mean,
                 int64_t num_values) {
  return sddmm(rowptr, col, perm, a, b, row_scale, col_scale, mean, num_values,
               [](const Sddmm& p, const Tensor&) {
                 const int64_t shares = num_threads();
                 parallel(shares, p.csr.num_edges * (p.dim + 8) / 16, [&](int64_t k) {
                   cpu::sddmm(p, cpu::row_of_share(p.csr, k, shares),
                              cpu::row_of_share(p.csr, k + 1, shares));
                 });
               });
}

#ifdef PYG_FAST_WITH_CUDA
Tensor sddmm_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& a,
                  const Tensor& b, OptTensor row_scale, OptTensor col_scale, bool mean,
                  int64_t num_values) {
  return sddmm(rowptr, col, perm, a, b, row_scale, col_scale, mean, num_values,
               [](const Sddmm& p, const Tensor& on) {
                 Launch launch(on);
                 launch.check(cuda::sddmm(p, launch.stream()), "sddmm");
               });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) { m.impl("sddmm", TORCH_BOX(&pyg_fast::sddmm_cpu)); }

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) { m.impl("sddmm", TORCH_BOX(&pyg_fast::sddmm_cuda)); }
#endif
