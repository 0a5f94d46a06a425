#include "params/gcn_scale.h"
#include "stable.h"

namespace pyg_fast {
namespace {

// Only for CPU: the host does not wait for CUDA kernels, which stop at the last value themselves.
void check_last(const GcnScale& p) {
  const int64_t edges = p.csr.index64 ? static_cast<const int64_t*>(p.csr.rowptr)[p.csr.num_rows]
                                      : static_cast<const int32_t*>(p.csr.rowptr)[p.csr.num_rows];
  STD_TORCH_CHECK(edges <= p.csr.num_edges, "rowptr names ", edges, " edges of ", p.csr.num_edges);
}

template <bool kCuda>
std::tuple<Tensor, Tensor> gcn_scale(const Tensor& rowptr, const OptTensor& perm,
                                     const Tensor& value_, const OptTensor& last_loop_,
                                     double fill_value, bool loops) {
  STD_TORCH_CHECK(value_.dim() == 1, "value must have one dimension, got ", value_.dim());
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1,
                  "rowptr must have shape [num_rows + 1]");
  STD_TORCH_CHECK(!perm || perm->dim() == 1, "perm must have one dimension");
  STD_TORCH_CHECK(rowptr.is_contiguous() && (!perm || perm->is_contiguous()),
                  "rowptr and perm must be contiguous");
  check_type(perm, "perm", rowptr.scalar_type());
  check_device(perm, "perm", rowptr);
  check_device(value_, "value", rowptr);
  GcnScale p;
  p.dtype = dtype_of(value_, "value");
  p.csr.index64 = is_index64(rowptr, "rowptr");
  p.csr.num_rows = rowptr.size(0) - 1;
  p.num_values = value_.size(0);
  p.csr.num_edges = perm ? perm->size(0) : p.num_values;
  STD_TORCH_CHECK(p.num_values >= p.csr.num_edges, "value must name every edge");
  STD_TORCH_CHECK(!last_loop_ || loops, "last_loop needs loops");
  check_vector(last_loop_, "last_loop", p.csr.num_rows);
  check_type(last_loop_, "last_loop", ScalarType::Long);
  check_device(last_loop_, "last_loop", rowptr);
  const Tensor value = to_contiguous(value_);
  const OptTensor last_loop = to_contiguous(last_loop_);
  p.csr.rowptr = rowptr.const_data_ptr();
  p.csr.perm = pointer(perm);
  p.value = value.const_data_ptr();
  p.last_loop = static_cast<const int64_t*>(pointer(last_loop));
  p.loops = loops;
  p.fill_value = fill_value;
  const ScalarType acc = acc_of(value.scalar_type());
  Tensor scale = empty(value, {p.csr.num_rows}, acc);
  Tensor diag = empty(value, {loops ? p.csr.num_rows : 0}, acc);
  p.scale = scale.mutable_data_ptr();
  if (loops) p.diag = diag.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(value);
    void* scratch = launch.scratch(cuda::gcn_scale_scratch(p));
    launch.check(cuda::gcn_scale(p, scratch, launch.stream()), "gcn_scale");
  } else {
    check_last(p);
    const int64_t work = p.csr.num_edges * (p.csr.perm ? 2 : 1) / 2 + 4 * p.csr.num_rows;
    const int64_t shares = paid_threads(work);
    parallel(shares, work, [&](int64_t k) {
      cpu::gcn_scale_rows(p, cpu::row_of_share(p.csr, k, shares),
                          cpu::row_of_share(p.csr, k + 1, shares));
    });
  }
  return {scale, diag};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // For a graph in CSR with values: scale, and the weights of the loops (empty without `loops`).
  m.def(
      "gcn_scale(Tensor rowptr, Tensor? perm, Tensor value, Tensor? last_loop, float fill_value, "
      "bool loops) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(gcn_scale)
