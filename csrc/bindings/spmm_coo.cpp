#include "bindings/coo.h"
#include "params/spmm_coo.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
std::tuple<Tensor, Tensor> spmm_coo(const Tensor& edge_index_, const OptTensor& value_,
                                    const Tensor& x_, const OptTensor& row_scale_,
                                    const OptTensor& col_scale_, const OptTensor& diag_,
                                    int64_t num_dst, bool reverse, bool drop_loops, bool count,
                                    bool report) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  SpmmCoo p;
  p.dtype = dtype_of(x_, "x");
  p.dim = x_.size(1);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const Tensor edge_index = with_contiguous_rows(edge_index_), x = to_contiguous(x_);
  p.coo = coo_of(edge_index, x.size(0), num_dst, reverse, drop_loops);
  check_device(x, "x", edge_index);
  p.x = x.const_data_ptr();
  const OptTensor value = to_contiguous(value_);
  check_vector(value, "value", p.coo.num_edges);
  check_device(value, "value", edge_index);
  p.value_acc = value && value->scalar_type() == acc;
  if (!p.value_acc) check_type(value, "value", type);
  p.value = pointer(value);
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const OptTensor diag = to_contiguous(diag_);
  p.row_scale = checked_scale(row_scale, "row_scale", num_dst, type, edge_index);
  p.col_scale = checked_scale(col_scale, "col_scale", p.coo.num_src, type, edge_index);
  p.diag = checked_scale(diag, "diag", num_dst, type, edge_index);
  STD_TORCH_CHECK(!diag || num_dst == p.coo.num_src, "diag needs a square graph");
  Tensor out = empty(x, {num_dst, p.dim}, type);
  Tensor invalid = empty(x, {count ? 1 : 0}, ScalarType::Long);
  p.out = out.mutable_data_ptr();
  p.report = report;
  if (count) p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::spmm_coo_scratch(p));
    launch.check(cuda::spmm_coo(p, scratch, launch.stream()), "spmm_coo");
  } else {
    const int64_t work = (p.coo.num_edges + p.coo.num_dst) * (p.dim + 8) / 8;
    shared_out(p.coo.num_dst, work,
               [&](int64_t begin, int64_t end) { cpu::spmm_coo(p, begin, end); });
  }
  return {out, invalid};
}

template <bool kCuda>
Tensor sddmm_coo(const Tensor& edge_index_, const Tensor& a_, const Tensor& b_,
                 const OptTensor& row_scale_, const OptTensor& col_scale_, bool drop_loops) {
  STD_TORCH_CHECK(a_.dim() == 2, "a must have two dimensions, got ", a_.dim());
  STD_TORCH_CHECK(b_.dim() == 2, "b must have two dimensions, got ", b_.dim());
  SddmmCoo p;
  p.dtype = dtype_of(a_, "a");
  p.dim = a_.size(1);
  check_matrix(b_, "b", b_.size(0), p.dim);
  check_type(b_, "b", a_.scalar_type());
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  check_device(a_, "a", edge_index);
  check_device(b_, "b", edge_index);
  const Tensor a = to_contiguous(a_), b = to_contiguous(b_);
  p.coo = coo_of(edge_index, b.size(0), a.size(0), false, drop_loops);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const ScalarType type = a.scalar_type();
  p.row_scale = checked_scale(row_scale, "row_scale", p.coo.num_dst, type, edge_index);
  p.col_scale = checked_scale(col_scale, "col_scale", p.coo.num_src, type, edge_index);
  Tensor out = empty(a, {p.coo.num_edges}, type);
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(a);
    launch.check(cuda::sddmm_coo(p, launch.stream()), "sddmm_coo");
  } else {
    shared_out(p.coo.num_edges, p.coo.num_edges * (p.dim + 8) / 8,
               [&](int64_t begin, int64_t end) { cpu::sddmm_coo(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // spmm and sddmm over a coordinate list in any order. spmm also returns the number of invalid edges if
  // `count`; `reverse` sums at sources.
  m.def(
      "spmm_coo(Tensor edge_index, Tensor? value, Tensor x, Tensor? row_scale, Tensor? col_scale, "
      "Tensor? diag, SymInt num_dst, bool reverse, bool drop_loops, bool count, bool report=False) "
      "-> (Tensor, Tensor)");
  m.def(
      "sddmm_coo(Tensor edge_index, Tensor a, Tensor b, Tensor? row_scale, Tensor? col_scale, "
      "bool drop_loops) -> Tensor");
}

PYG_FAST_IMPL(spmm_coo)
PYG_FAST_IMPL(sddmm_coo)
