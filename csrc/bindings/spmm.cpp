#include "bindings/groups.h"
#include "bindings/spmm.h"

namespace pyg_fast {
namespace {

// The groups of the graph `csr`; checks only sizes and types.
Groups groups_of(const Csr& csr, const Tensor& rowptr, const Tensor& ptr, const Tensor& row,
                 const Tensor& long_row, const Tensor& long_ptr, const Tensor& long_shift,
                 int64_t num_partials, int64_t most_groups, int64_t size, bool atomic,
                 const OptTensor& order) {
  Groups g;
  g.size = size;
  g.atomic = atomic;
  g.num_groups = row.numel();
  g.num_long = long_row.numel();
  g.num_partials = num_partials;
  g.most_groups = most_groups;
  STD_TORCH_CHECK(size >= 1, "group_size must be positive, got ", size);
  STD_TORCH_CHECK(g.num_groups >= csr.num_rows && num_partials >= 0 && num_partials <= g.num_groups,
                  "there must be a group for each row and for each partial sum");
  const auto check = [&](const Tensor& t, const char* name, int64_t count) {
    return entries_of(t, name, count, rowptr);
  };
  g.ptr = check(ptr, "group_ptr", g.num_groups + 1);
  g.row = check(row, "group_row", g.num_groups);
  g.long_row = check(long_row, "long_row", g.num_long);
  g.long_ptr = check(long_ptr, "long_ptr", g.num_long + 1);
  g.long_shift = check(long_shift, "long_shift", g.num_long);
  if (order) g.order = check(*order, "group_order", g.num_groups);
  return g;
}

void run_on_cpu(const Spmm& p) {
  share_edges(p.csr, (p.csr.num_edges + p.csr.num_rows) * (p.dim + 8) / 16,
              [&](int64_t begin, int64_t end) { cpu::spmm(p, begin, end); });
}

template <bool kCuda>
Tensor spmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const OptTensor& value,
            const Tensor& x, const OptTensor& row_scale, const OptTensor& col_scale,
            const OptTensor& diag, const OptTensor& bias, bool mean, bool out_acc,
            const OptTensor& self_row, const OptTensor& out_row, int64_t num_out) {
  return aggregate(Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean,
                   out_acc, self_row, out_row, num_out, [](const Spmm& p, const Tensor& on) {
                     if constexpr (kCuda) {
                       Launch launch(on);
                       void* scratch = launch.scratch(cuda::spmm_scratch(p));
                       launch.check(cuda::spmm(p, scratch, launch.stream()), "spmm");
                     } else {
                       run_on_cpu(p);
                     }
                   });
}

template <bool kCuda>
Tensor spmm_groups(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                   const OptTensor& value, const Tensor& x, const OptTensor& row_scale,
                   const OptTensor& col_scale, const OptTensor& diag, const OptTensor& bias,
                   bool mean, bool out_acc, const OptTensor& self_row, const Tensor& group_ptr,
                   const Tensor& group_row, const Tensor& long_row, const Tensor& long_ptr,
                   const Tensor& long_shift, int64_t num_partials, int64_t most_groups,
                   int64_t group_size, bool atomic, const OptTensor& group_order,
                   const OptTensor& out_row, int64_t num_out) {
  return aggregate(
      Spmm(), rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
      self_row, out_row, num_out, [&](const Spmm& p, const Tensor& on) {
        [[maybe_unused]] const Groups g =
            groups_of(p.csr, rowptr, group_ptr, group_row, long_row, long_ptr, long_shift,
                      num_partials, most_groups, group_size, atomic, group_order);
        if constexpr (kCuda) {
          Launch launch(on);
          void* scratch = launch.scratch(cuda::spmm_groups_scratch(p, g));
          launch.check(cuda::spmm_groups(p, g, scratch, launch.stream()), "spmm_groups");
        } else {  // the CPU shares out rows, not groups
          run_on_cpu(p);
        }
      });
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // row_scale * (A * (col_scale * x)) + diag * x[self_row] + bias; with out_row, of int64, row i of it is
  // row out_row[i] of a result of num_out rows, whose other rows are zero, without the bias too
  m.def(
      "spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, Tensor? row_scale, "
      "Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "Tensor? self_row=None, Tensor? out_row=None, SymInt num_out=0) -> Tensor");

  // The same by groups of at most `group_size` edges of one row, at most `most_groups` of each; `atomic`:
  // groups of one row add up in any order. On a CPU it is identical to spmm.
  m.def(
      "spmm_groups(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, "
      "Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "Tensor? self_row, Tensor group_ptr, Tensor group_row, Tensor long_row, Tensor long_ptr, "
      "Tensor long_shift, int num_partials, int most_groups, int group_size, bool atomic, "
      "Tensor? group_order=None, Tensor? out_row=None, SymInt num_out=0) -> Tensor");
}

PYG_FAST_IMPL(spmm)
PYG_FAST_IMPL(spmm_groups)
