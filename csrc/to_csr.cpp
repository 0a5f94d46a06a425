#include "cpu/cpu.h"
#include "stable.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <typename Run>
Result to_csr(const Tensor& row_, const Tensor& col_, int64_t num_rows, int64_t num_cols,
              bool index64, bool drop_loops, const Run& run) {
  STD_TORCH_CHECK(row_.dim() == 1 && col_.dim() == 1 && row_.size(0) == col_.size(0),
                  "row and col must be vectors of one length");
  STD_TORCH_CHECK(num_rows >= 0 && num_cols >= 0, "num_rows and num_cols must not be negative");
  ToCsr p;
  p.in64 = is_index64(row_, "row");
  check_type(col_, "col", row_.scalar_type());
  check_device(col_, "col", row_);
  p.out64 = index64;
  p.drop_loops = drop_loops;
  p.num_edges = row_.size(0);
  p.num_rows = num_rows;
  p.num_cols = num_cols;
  constexpr int64_t kMax = 0x7fffffff;
  STD_TORCH_CHECK(index64 || (p.num_edges <= kMax && num_rows < kMax && num_cols <= kMax),
                  "int32 cannot count this graph: ask for index64");
  const Tensor row = to_contiguous(row_), col = to_contiguous(col_);
  p.row = row.const_data_ptr();
  p.col = col.const_data_ptr();
  const ScalarType type = index64 ? ScalarType::Long : ScalarType::Int;
  Tensor rowptr = empty(row, {num_rows + 1}, type);
  Tensor sorted_col = empty(row, {p.num_edges}, type);
  Tensor perm = empty(row, {p.num_edges}, type);
  Tensor invalid = empty(row, {1}, ScalarType::Long);
  p.rowptr = rowptr.mutable_data_ptr();
  p.sorted_col = sorted_col.mutable_data_ptr();
  p.perm = perm.mutable_data_ptr();
  p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  run(p, row);
  return {rowptr, sorted_col, perm, invalid};
}

Result to_csr_cpu(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                  bool index64, bool drop_loops) {
  return to_csr(row, col, num_rows, num_cols, index64, drop_loops,
                [](const ToCsr& p, const Tensor&) {
                  const bool small = p.num_edges < 20000;
                  cpu::to_csr(p, small ? 1 : static_cast<int>(num_threads()),
                              [](int64_t n, void (*body)(void*, int64_t), void* ctx) {
                                parallel(n, INT64_MAX, [&](int64_t k) { body(ctx, k); });
                              });
                });
}

#ifdef PYG_FAST_WITH_CUDA
Result to_csr_cuda(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                   bool index64, bool drop_loops) {
  return to_csr(row, col, num_rows, num_cols, index64, drop_loops,
                [](const ToCsr& p, const Tensor& on) {
                  Launch launch(on);
                  launch.check(
                      cuda::to_csr(p, launch.scratch(cuda::to_csr_scratch(p)), launch.stream()),
                      "to_csr");
                });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) { m.impl("to_csr", TORCH_BOX(&pyg_fast::to_csr_cpu)); }

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("to_csr", TORCH_BOX(&pyg_fast::to_csr_cuda));
}
#endif
