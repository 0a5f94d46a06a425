// Edges sorted into CSR.
#pragma once
#include "common.h"

namespace pyg_fast {

// Stable counting sort of edges (row[e], col[e]) by row: the CSR arrays of a coordinate list.
// The kernel skips edges with an index outside [0, num_rows) x [0, num_cols) and counts them in
// `invalid`; it also skips self-loops if `drop_loops`. `sorted_col` and `perm` hold zeros from
// rowptr[num_rows] on. Without `perm` the sort moves only rows and columns.
struct ToCsr {
  const void* row = nullptr;  // [num_edges], int64_t if in64 else int32_t
  const void* col = nullptr;
  bool in64 = true;
  bool out64 = false;   // type of rowptr and perm
  bool by_src = false;  // rows are sources: `row` is row 0 of the user's edge_index
  bool drop_loops = false;
  bool report = true;  // whether an invalid edge is an error, which CUDA records
  int64_t num_edges = 0;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  void* rowptr = nullptr;      // [num_rows + 1]
  Col* sorted_col = nullptr;   // [num_edges]
  Col* spare_col = nullptr;    // [num_edges], only on CUDA without `perm`: may become `sorted_col`
  void* perm = nullptr;        // [num_edges]: position of each sorted edge in the input, or nullptr
  int64_t* invalid = nullptr;  // [1]; nullptr: not counted
};

namespace cpu {
// A function that runs body(ctx, k) for k in [0, n) on the caller's threads.
using ParallelFor = void (*)(int64_t n, void (*body)(void* ctx, int64_t k), void* ctx);
void to_csr(const ToCsr& p, int num_threads, ParallelFor parallel_for);
// The row of each edge of [begin, end), or num_rows from rowptr[num_rows] on.
void csr_rows(const Csr& csr, int64_t begin, int64_t end, Col* rows);
}  // namespace cpu

namespace cuda {
// Sorts the same edges by one end or (`count` is 2) by both, with swapped sizes: in one launch for a
// small graph, in one sort for one of few million edges. Without `perm` the peak of a large graph is 16
// bytes an edge above the input, the result included; with it (32-bit rows and positions) 24, for both
// ends 48 in one sort and 32 in two.
int64_t to_csr_scratch(const ToCsr* p, int count);
const char* to_csr(ToCsr* p, int count, void* scratch, void* stream);
// The transpose, without `perm`: rows are the columns of `csr`, and list its rows in their order.
int64_t transpose_csr_scratch(const ToCsr& p);
const char* transpose_csr(const Csr& csr, ToCsr& p, void* scratch, void* stream);
const char* csr_rows(const Csr& csr, int64_t begin, int64_t end, Col* rows, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
