#include "params/to_csr.h"
#include "stable.h"

namespace pyg_fast {
namespace {

// The arrays of a sorted CSR.
struct Sorted {
  Tensor rowptr, col, perm;

  // Allocates them for `num_rows` rows of the edges of p.
  Sorted(const Tensor& edge_index, int64_t num_rows, int64_t num_cols, bool reverse, ToCsr& p)
      : rowptr(empty(edge_index, {num_rows + 1}, type(p))),
        col(empty(edge_index, {p.num_edges}, ScalarType::Int)),
        perm(empty(edge_index, {p.num_edges}, type(p))) {
    const int64_t second = edge_index.stride(0) * (p.in64 ? 8 : 4);
    const auto* data = static_cast<const char*>(edge_index.const_data_ptr());
    p.row = reverse ? data : data + second;
    p.col = reverse ? data + second : data;
    p.by_src = reverse;
    p.num_rows = num_rows;
    p.num_cols = num_cols;
    p.rowptr = rowptr.mutable_data_ptr();
    p.sorted_col = static_cast<Col*>(col.mutable_data_ptr());
    p.perm = perm.mutable_data_ptr();
  }

  static ScalarType type(const ToCsr& p) { return p.out64 ? ScalarType::Long : ScalarType::Int; }
};

ToCsr checked(const Tensor& edge_index, int64_t num_src, int64_t num_dst, bool index64,
              bool drop_loops, bool report) {
  STD_TORCH_CHECK(num_src >= 0 && num_dst >= 0, "num_src and num_dst must not be negative");
  ToCsr p;
  p.in64 = is_index64(edge_index, "edge_index");
  p.out64 = index64;
  p.drop_loops = drop_loops;
  p.report = report;
  p.num_edges = edge_index.size(1);
  constexpr int64_t kMax = 0x7fffffff;
  STD_TORCH_CHECK(num_src < kMax && num_dst < kMax, "a graph must have fewer than 2^31 - 1 nodes");
  STD_TORCH_CHECK(index64 || p.num_edges <= kMax, "int32 cannot count these edges: ask for index64");
  return p;
}

template <bool kCuda>
void sort(const ToCsr* p, int count, const Tensor& on) {
  if constexpr (kCuda) {
    Launch launch(on);
    void* scratch = launch.scratch(cuda::to_csr_scratch(p, count));
    launch.check(cuda::to_csr(p, count, scratch, launch.stream()), "to_csr");
  } else {
    const bool small = p->num_edges < 20000;
    for (int k = 0; k < count; ++k) {
      cpu::to_csr(p[k], small ? 1 : static_cast<int>(num_threads()),
                  [](int64_t n, void (*body)(void*, int64_t), void* ctx) {
                    parallel(n, INT64_MAX, [&](int64_t share) { body(ctx, share); });
                  });
    }
  }
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor> to_csr(const Tensor& edge_index_, int64_t num_src,
                                                  int64_t num_dst, bool reverse, bool index64,
                                                  bool drop_loops, bool report) {
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  ToCsr p = checked(edge_index, num_src, num_dst, index64, drop_loops, report);
  const Sorted out(edge_index, reverse ? num_src : num_dst, reverse ? num_dst : num_src, reverse, p);
  Tensor invalid = empty(edge_index, {1}, ScalarType::Long);
  p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  sort<kCuda>(&p, 1, edge_index);
  return {out.rowptr, out.col, out.perm, invalid};
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> to_csr_csc(
    const Tensor& edge_index_, int64_t num_src, int64_t num_dst, bool index64, bool drop_loops,
    bool report) {
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  const ToCsr common = checked(edge_index, num_src, num_dst, index64, drop_loops, report);
  ToCsr p[] = {common, common};
  const Sorted out(edge_index, num_dst, num_src, false, p[0]);
  const Sorted t_out(edge_index, num_src, num_dst, true, p[1]);
  Tensor invalid = empty(edge_index, {1}, ScalarType::Long);
  p[0].invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  sort<kCuda>(p, 2, edge_index);
  return {out.rowptr, out.col, out.perm, t_out.rowptr, t_out.col, t_out.perm, invalid};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Sorts edges into CSR by destination, or by source if `reverse`: (rowptr, col, perm, invalid); stable,
  // optionally without self-loops. to_csr_csc: by destination, by source, invalid.
  m.def(
      "to_csr(Tensor edge_index, SymInt num_src, SymInt num_dst, bool reverse, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "to_csr_csc(Tensor edge_index, SymInt num_src, SymInt num_dst, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(to_csr)
PYG_FAST_IMPL(to_csr_csc)
