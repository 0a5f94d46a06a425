#include "params/to_csr.h"
#include "stable.h"

namespace pyg_fast {
namespace {

constexpr int64_t kMostNodes = 0x7fffffff;
constexpr const char* kTooManyNodes = "a graph must have fewer than 2^31 - 1 nodes";

// The arrays of a sorted CSR, with positions or without.
struct Sorted {
  Tensor rowptr, col;
  OptTensor perm, spare;

  // Allocates them for `num_rows` rows of the edges of p.
  Sorted(const Tensor& on, int64_t num_rows, int64_t num_cols, bool with_perm, ToCsr& p)
      : rowptr(empty(on, {num_rows + 1}, type(p))), col(empty(on, {p.num_edges}, ScalarType::Int)) {
    p.num_rows = num_rows;
    p.num_cols = num_cols;
    p.rowptr = rowptr.mutable_data_ptr();
    p.sorted_col = static_cast<Col*>(col.mutable_data_ptr());
    if (!with_perm) return;
    perm = empty(on, {p.num_edges}, type(p));
    p.perm = perm->mutable_data_ptr();
  }

  void add_spare(ToCsr& p) {
    spare = empty(col, {p.num_edges}, ScalarType::Int);
    p.spare_col = static_cast<Col*>(spare->mutable_data_ptr());
  }

  // The columns: those of the buffer in which the sort ended.
  const Tensor& sorted_col(const ToCsr& p) const {
    return p.sorted_col == col.const_data_ptr() ? col : *spare;
  }

  static ScalarType type(const ToCsr& p) { return p.out64 ? ScalarType::Long : ScalarType::Int; }
};

// Reads the edges by one of their ends.
void read(const Tensor& edge_index, bool reverse, ToCsr& p) {
  const int64_t second = edge_index.stride(0) * (p.in64 ? 8 : 4);
  const auto* data = static_cast<const char*>(edge_index.const_data_ptr());
  p.row = reverse ? data : data + second;
  p.col = reverse ? data + second : data;
  p.by_src = reverse;
}

ToCsr checked(const Tensor& edge_index, int64_t num_src, int64_t num_dst, bool index64,
              bool drop_loops, bool report) {
  STD_TORCH_CHECK(num_src >= 0 && num_dst >= 0, "num_src and num_dst must not be negative");
  ToCsr p;
  p.in64 = is_index64(edge_index, "edge_index");
  p.out64 = index64;
  p.drop_loops = drop_loops;
  p.report = report;
  p.num_edges = edge_index.size(1);
  STD_TORCH_CHECK(num_src < kMostNodes && num_dst < kMostNodes, kTooManyNodes);
  STD_TORCH_CHECK(index64 || p.num_edges <= kMostNodes,
                  "int32 cannot count these edges: ask for index64");
  return p;
}

template <bool kCuda>
void sort(ToCsr* p, int count, const Tensor& on, Sorted* without_perm = nullptr) {
  if constexpr (kCuda) {
    Launch launch(on);
    const int64_t bytes = cuda::to_csr_scratch(p, count);
    void* scratch = launch.scratch(bytes);
    if (without_perm && bytes > 0) without_perm->add_spare(*p);
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

// The row of each edge of [begin, end), on the CPU.
void all_rows(const Csr& csr, int64_t begin, int64_t end, const Tensor& rows) {
  auto* out = static_cast<Col*>(rows.mutable_data_ptr());
  share_rows(end - begin, end - begin, [&](int64_t first, int64_t last) {
    cpu::csr_rows(csr, begin + first, begin + last, out + first);
  });
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor> to_csr(const Tensor& edge_index_, int64_t num_src,
                                                  int64_t num_dst, bool reverse, bool index64,
                                                  bool drop_loops, bool report) {
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  ToCsr p = checked(edge_index, num_src, num_dst, index64, drop_loops, report);
  read(edge_index, reverse, p);
  const Sorted out(edge_index, reverse ? num_src : num_dst, reverse ? num_dst : num_src, true, p);
  Tensor invalid = empty(edge_index, {1}, ScalarType::Long);
  p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  sort<kCuda>(&p, 1, edge_index);
  return {out.rowptr, out.col, *out.perm, invalid};
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor> to_csr_unweighted(const Tensor& edge_index_, int64_t num_src,
                                                     int64_t num_dst, bool index64, bool drop_loops,
                                                     bool report) {
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  ToCsr p = checked(edge_index, num_src, num_dst, index64, drop_loops, report);
  read(edge_index, false, p);
  Sorted out(edge_index, num_dst, num_src, false, p);
  Tensor invalid = empty(edge_index, {1}, ScalarType::Long);
  p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  sort<kCuda>(&p, 1, edge_index, &out);
  return {out.rowptr, out.sorted_col(p), invalid};
}

template <bool kCuda>
std::tuple<Tensor, Tensor> transpose_csr(const Tensor& rowptr_, const Tensor& col_,
                                         int64_t num_cols) {
  const Tensor rowptr = to_contiguous(rowptr_), col = to_contiguous(col_);
  const Csr csr = csr_of(rowptr, col, std::nullopt, num_cols);
  STD_TORCH_CHECK(num_cols >= 0 && num_cols < kMostNodes && csr.num_rows < kMostNodes,
                  kTooManyNodes);
  ToCsr p;
  p.in64 = false;
  p.out64 = csr.index64;
  p.num_edges = csr.num_edges;
  Sorted out(col, num_cols, csr.num_rows, false, p);
  if constexpr (kCuda) {
    Launch launch(col);
    void* scratch = launch.scratch(cuda::transpose_csr_scratch(p));
    out.add_spare(p);
    launch.check(cuda::transpose_csr(csr, p, scratch, launch.stream()), "transpose_csr");
  } else {
    // A row of each edge, and as many columns: edges past the last row pointer have an invalid one.
    const Tensor rows = empty(col, {p.num_edges}, ScalarType::Int);
    all_rows(csr, 0, p.num_edges, rows);
    p.row = col.const_data_ptr();
    p.col = rows.const_data_ptr();
    sort<false>(&p, 1, col);
  }
  return {out.rowptr, out.sorted_col(p)};
}

template <bool kCuda>
Tensor csr_rows(const Tensor& rowptr_, int64_t begin, int64_t end) {
  const Tensor rowptr = to_contiguous(rowptr_);
  Csr csr;
  csr.index64 = is_index64(rowptr, "rowptr");
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1,
                  "rowptr must have shape [num_rows + 1]");
  STD_TORCH_CHECK(0 <= begin && begin <= end, "begin and end must be 0 <= begin <= end");
  csr.rowptr = rowptr.const_data_ptr();
  csr.num_rows = rowptr.size(0) - 1;
  STD_TORCH_CHECK(csr.num_rows < kMostNodes, kTooManyNodes);
  const Tensor rows = empty(rowptr, {end - begin}, ScalarType::Int);
  if constexpr (kCuda) {
    Launch launch(rowptr);
    auto* out = static_cast<Col*>(rows.mutable_data_ptr());
    launch.check(cuda::csr_rows(csr, begin, end, out, launch.stream()), "csr_rows");
  } else {
    all_rows(csr, begin, end, rows);
  }
  return rows;
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> to_csr_csc(
    const Tensor& edge_index_, int64_t num_src, int64_t num_dst, bool index64, bool drop_loops,
    bool report) {
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  const ToCsr common = checked(edge_index, num_src, num_dst, index64, drop_loops, report);
  ToCsr p[] = {common, common};
  read(edge_index, false, p[0]);
  read(edge_index, true, p[1]);
  const Sorted out(edge_index, num_dst, num_src, true, p[0]);
  const Sorted t_out(edge_index, num_src, num_dst, true, p[1]);
  Tensor invalid = empty(edge_index, {1}, ScalarType::Long);
  p[0].invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  sort<kCuda>(p, 2, edge_index);
  return {out.rowptr, out.col, *out.perm, t_out.rowptr, t_out.col, *t_out.perm, invalid};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Sorts edges into CSR by destination, or by source if `reverse`: (rowptr, col, perm, invalid); stable,
  // optionally without self-loops. to_csr_csc: by destination, by source, invalid. to_csr_unweighted
  // moves no perm: (rowptr, col, invalid) by destination.
  m.def(
      "to_csr(Tensor edge_index, SymInt num_src, SymInt num_dst, bool reverse, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "to_csr_csc(Tensor edge_index, SymInt num_src, SymInt num_dst, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "to_csr_unweighted(Tensor edge_index, SymInt num_src, SymInt num_dst, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor)");
  // The CSR of the transpose without perm: each row lists the rows of the input in their order.
  m.def("transpose_csr(Tensor rowptr, Tensor col, SymInt num_cols) -> (Tensor, Tensor)");
  // The row of each edge of [begin, end), int32; edges past the last row pointer: the number of rows.
  m.def("csr_rows(Tensor rowptr, SymInt begin, SymInt end) -> Tensor");
}

PYG_FAST_IMPL(to_csr_unweighted)
PYG_FAST_IMPL(transpose_csr)
PYG_FAST_IMPL(csr_rows)
PYG_FAST_IMPL(to_csr)
PYG_FAST_IMPL(to_csr_csc)
