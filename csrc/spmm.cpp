#include "cpu/cpu.h"
#include "spmm.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

// The groups of the graph `csr`, checked as far as sizes and types go.
Groups groups_of(const Csr& csr, const Tensor& col, const Tensor& ptr, const Tensor& row,
                 const Tensor& long_row, const Tensor& long_ptr, const Tensor& long_shift,
                 int64_t num_partials, int64_t size, bool atomic) {
  Groups g;
  g.size = size;
  g.atomic = atomic;
  g.num_groups = row.numel();
  g.num_long = long_row.numel();
  g.num_partials = num_partials;
  STD_TORCH_CHECK(size >= 1, "group_size must be positive, got ", size);
  STD_TORCH_CHECK(g.num_groups >= csr.num_rows && num_partials >= 0 && num_partials <= g.num_groups,
                  "there must be a group for each row and for each partial sum");
  const auto check = [&](const Tensor& t, const char* name, int64_t count) -> const void* {
    check_vector(t, name, count);
    check_type(t, name, col.scalar_type());
    check_device(t, name, col);
    STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
    return t.const_data_ptr();
  };
  g.ptr = check(ptr, "group_ptr", g.num_groups + 1);
  g.row = check(row, "group_row", g.num_groups);
  g.long_row = check(long_row, "long_row", g.num_long);
  g.long_ptr = check(long_ptr, "long_ptr", g.num_long + 1);
  g.long_shift = check(long_shift, "long_shift", g.num_long);
  return g;
}

void run_cpu(const Spmm& p) {
  const int64_t shares = num_threads();
  const int64_t work = (p.csr.num_edges + p.csr.num_rows) * (p.dim + 8) / 16;
  parallel(shares, work, [&](int64_t k) {
    cpu::spmm(p, cpu::row_of_share(p.csr, k, shares), cpu::row_of_share(p.csr, k + 1, shares));
  });
}

Tensor spmm_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                const Tensor& x, OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                OptTensor bias, bool mean, bool out_acc, OptTensor self_row) {
  return spmm(Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
              self_row, [](const Spmm& p, const Tensor&) { run_cpu(p); });
}

// Groups are how work is handed out on a GPU: here rows are.
Tensor spmm_groups_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                       const Tensor& x, OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                       OptTensor bias, bool mean, bool out_acc, OptTensor self_row,
                       const Tensor& group_ptr, const Tensor& group_row, const Tensor& long_row,
                       const Tensor& long_ptr, const Tensor& long_shift, int64_t num_partials,
                       int64_t group_size, bool atomic) {
  return spmm(Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
              self_row, [&](const Spmm& p, const Tensor&) {
                groups_of(p.csr, col, group_ptr, group_row, long_row, long_ptr, long_shift,
                          num_partials, group_size, atomic);
                run_cpu(p);
              });
}

#ifdef PYG_FAST_WITH_CUDA
Tensor spmm_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                 const Tensor& x, OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                 OptTensor bias, bool mean, bool out_acc, OptTensor self_row) {
  return spmm(Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
              self_row, [](const Spmm& p, const Tensor& on) {
                Launch launch(on);
                launch.check(cuda::spmm(p, launch.scratch(cuda::spmm_scratch(p)), launch.stream()),
                             "spmm");
              });
}

Tensor spmm_groups_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                        const Tensor& x, OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                        OptTensor bias, bool mean, bool out_acc, OptTensor self_row,
                        const Tensor& group_ptr, const Tensor& group_row, const Tensor& long_row,
                        const Tensor& long_ptr, const Tensor& long_shift, int64_t num_partials,
                        int64_t group_size, bool atomic) {
  return spmm(Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
              self_row, [&](const Spmm& p, const Tensor& on) {
                const Groups g = groups_of(p.csr, col, group_ptr, group_row, long_row, long_ptr,
                                           long_shift, num_partials, group_size, atomic);
                Launch launch(on);
                launch.check(cuda::spmm_groups(p, g, launch.scratch(cuda::spmm_groups_scratch(p, g)),
                                               launch.stream()),
                             "spmm_groups");
              });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("spmm", TORCH_BOX(&pyg_fast::spmm_cpu));
  m.impl("spmm_groups", TORCH_BOX(&pyg_fast::spmm_groups_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("spmm", TORCH_BOX(&pyg_fast::spmm_cuda));
  m.impl("spmm_groups", TORCH_BOX(&pyg_fast::spmm_groups_cuda));
}
#endif
