// Edges sorted into CSR.
#pragma once
#include "common.h"

namespace pyg_fast {

// Stable counting sort of edges (row[e], col[e]) by row: the CSR arrays of a coordinate list.
// Edges with an index outside [0, num_rows) x [0, num_cols) are counted in `invalid` and left out;
// so are self-loops if `drop_loops`. `sorted_col` and `perm` beyond rowptr[num_rows] hold zeros.
struct ToCsr {
  const void* row = nullptr;  // [num_edges], int64_t if in64 else int32_t
  const void* col = nullptr;
  bool in64 = true;
  bool out64 = false;  // type of rowptr and perm
  bool by_src = false;  // rows are sources: `row` is row 0 of the user's edge_index
  bool drop_loops = false;
  bool report = true;  // whether an invalid edge is an error, of which CUDA makes a record
  int64_t num_edges = 0;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  void* rowptr = nullptr;      // [num_rows + 1]
  Col* sorted_col = nullptr;   // [num_edges]
  void* perm = nullptr;        // [num_edges]: position of each sorted edge in the input
  int64_t* invalid = nullptr;  // [1]; nullptr: nobody asks
};

namespace cpu {
// A function that runs body(ctx, k) for k in [0, n) on the caller's threads.
using ParallelFor = void (*)(int64_t n, void (*body)(void* ctx, int64_t k), void* ctx);
void to_csr(const ToCsr& p, int num_threads, ParallelFor parallel_for);
}  // namespace cpu

namespace cuda {
// The same edges sorted by one or (`count` is 2) by both of their ends, the sizes swapped: in one
// launch if the graph is small.
int64_t to_csr_scratch(const ToCsr* p, int count);
const char* to_csr(const ToCsr* p, int count, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
