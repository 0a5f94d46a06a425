// Sums over the edges of each row.
#pragma once
#include "common.h"

namespace pyg_fast {

// out[i] = row_scale[i] * sum_e value[e] * col_scale[col[e]] * x[col[e]] + diag[i] * x[self] + bias
// where self is i or self_row[i]; without this term if self is not a row of x.
// With out_row this is row out_row[i] of out, whose other rows the caller clears (also of a bias); it is
// not written if out has no such row.
// `acc` is the type of all sums and of the stored scales: double for f64, else float.
// All pointers except csr, x and out may be nullptr (value, scales: 1; diag, bias: 0).
struct Spmm {
  Csr csr;
  DType dtype = DType::f32;          // of x, bias, and of value and out unless stated otherwise
  bool value_acc = false;            // value is stored as acc
  bool out_acc = false;              // out is stored as acc (bias too)
  bool mean = false;                 // divide row i by its number of edges (after row_scale)
  int64_t dim = 0;                   // columns of x and out, both row-major and contiguous
  const void* x = nullptr;           // [num_cols, dim]
  const void* value = nullptr;       // [num_values]
  const void* row_scale = nullptr;   // [num_rows] acc
  const void* col_scale = nullptr;   // [num_cols] acc
  const void* diag = nullptr;        // [num_rows] acc (num_rows == num_cols, unless self_row)
  const void* self_row = nullptr;    // [num_rows] Col
  const void* bias = nullptr;        // [dim]
  const int64_t* out_row = nullptr;  // [num_rows] each row of out at most once; nullptr: i
  int64_t num_out = 0;               // rows of out: num_rows, unless out_row
  void* out = nullptr;               // [num_out, dim]
};

// The edges of a graph in groups of at most `size` edges of one row each: the units of work of a GPU's
// threads. All arrays have the type of the csr's rowptr.
struct Groups {
  int64_t size = 0;
  bool atomic = false;  // long rows add up by atomic additions instead of partial sums
  int64_t num_groups = 0;
  int64_t num_long = 0;              // rows with several groups
  int64_t num_partials = 0;          // groups of such rows
  int64_t most_groups = 0;           // of a row; wrong numbers cost time only
  const void* ptr = nullptr;         // [num_groups + 1] first edge; groups are consecutive
  const void* row = nullptr;         // [num_groups] row, or -1 - k for a group of long row k
  const void* long_row = nullptr;    // [num_long] row
  const void* long_ptr = nullptr;    // [num_long + 1] first partial sum
  const void* long_shift = nullptr;  // [num_long] group g writes partial sum g - shift
  const void* order = nullptr;       // [num_groups] a permutation of them, or nullptr: as they are
};

namespace cpu {
void spmm(const Spmm& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
int64_t spmm_scratch(const Spmm& p);
const char* spmm(const Spmm& p, void* scratch, void* stream);

// The same by groups: rows with several groups write partial sums to scratch, which are added as a tree.
int64_t spmm_groups_scratch(const Spmm& p, const Groups& groups);
const char* spmm_groups(const Spmm& p, const Groups& groups, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
