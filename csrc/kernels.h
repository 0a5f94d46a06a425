// What every kernel is handed: plain pointers and sizes. Free of torch and of CUDA headers.
#pragma once
#include <cstdint>

namespace pyg_fast {

enum class DType : int8_t { f32, f64, f16, bf16 };

// What the columns of a CBSR are stored as.
enum class ColumnType : int8_t { u8, u16, i32 };

// One CSR structure: rows are destinations, `col` holds the source of each edge.
// All three arrays have the same type: int64_t if `index64`, else int32_t.
struct Csr {
  const void* rowptr = nullptr;  // [num_rows + 1]; rowptr[num_rows] may be below num_edges
  const void* col = nullptr;     // [num_edges]
  const void* perm = nullptr;    // [num_edges] edge -> position in `value`; nullptr: the identity
  bool index64 = false;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  int64_t num_edges = 0;
};

// out[i] = row_scale[i] * sum_e value[e] * col_scale[col[e]] * x[col[e]] + diag[i] * x[i] + bias
// `acc` is float, for f64 double: all sums run in it, and the scales are stored in it.
// Everything but csr, x and out may be nullptr (value, scales: 1; diag, bias: 0).
struct Spmm {
  Csr csr;
  DType dtype = DType::f32;       // of x, bias, and of value and out unless told otherwise
  bool value_acc = false;         // value is stored as acc
  bool out_acc = false;           // out is stored as acc (bias too)
  bool mean = false;              // divide row i by its number of edges (after row_scale)
  int64_t dim = 0;                // columns of x and out, both row-major and contiguous
  const void* x = nullptr;          // [num_cols, dim]
  const void* value = nullptr;      // [num_values]
  const void* row_scale = nullptr;  // [num_rows] acc
  const void* col_scale = nullptr;  // [num_cols] acc
  const void* diag = nullptr;       // [num_rows] acc (num_rows == num_cols)
  const void* bias = nullptr;       // [dim]
  void* out = nullptr;              // [num_rows, dim]
};

// out[i, f] = max (or min) over the row's edges of value[e] * x[col[e], f]; an empty row gives 0.
// arg[i, f] = position in `col` of the first edge that reaches it, -1 for an empty row.
// NaN counts as the largest (smallest) value, as in torch.amax and torch.amin.
struct SpmmMax {
  Csr csr;
  DType dtype = DType::f32;
  bool minimum = false;
  int64_t dim = 0;
  const void* x = nullptr;      // [num_cols, dim]
  const void* value = nullptr;  // [num_values] or nullptr
  void* out = nullptr;          // [num_rows, dim]
  void* arg = nullptr;          // [num_rows, dim], the csr's index type
};

// out[perm[e]] = row_scale[i] * col_scale[col[e]] * <a[i], b[col[e]]> for every edge e of row i
// (acc arithmetic). Positions that no edge names are left alone: the caller zeroes them.
struct Sddmm {
  Csr csr;
  DType dtype = DType::f32;  // of a, b and out
  int64_t dim = 0;
  const void* a = nullptr;          // [num_rows, dim]
  const void* b = nullptr;          // [num_cols, dim]
  const void* row_scale = nullptr;  // [num_rows] acc or nullptr
  const void* col_scale = nullptr;  // [num_cols] acc or nullptr
  bool mean = false;                // divide by the row's number of edges
  void* out = nullptr;              // [num_values]
};

// Backward of SpmmMax with respect to x:
//   grad_x[j, f] = sum over (i, f) with col[arg[i, f]] == j of value * grad[i, f]
// `grad_x` [num_cols, dim] is zeroed by the kernel.
struct SpmmMaxBackwardX {
  Csr csr;  // rowptr is not read
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* arg = nullptr;    // [num_rows, dim]
  const void* grad = nullptr;   // [num_rows, dim]
  const void* value = nullptr;  // [num_values] or nullptr
  void* grad_x = nullptr;       // [num_cols, dim]
};

// Backward of SpmmMax with respect to value:
//   grad_value[perm[e]] = sum_f [arg[i, f] == e] * grad[i, f] * x[col[e], f]
// Positions that no edge names are left alone.
struct SpmmMaxBackwardValue {
  Csr csr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* arg = nullptr;   // [num_rows, dim]
  const void* grad = nullptr;  // [num_rows, dim]
  const void* x = nullptr;     // [num_cols, dim]
  void* grad_value = nullptr;  // [num_values]
};

// Stable counting sort of edges (row[e], col[e]) by row: the CSR arrays of a coordinate list.
// Edges with an index outside [0, num_rows) x [0, num_cols) are counted in `invalid` and left out;
// so are self-loops if `drop_loops`. `sorted_col` and `perm` beyond rowptr[num_rows] hold zeros.
struct ToCsr {
  const void* row = nullptr;  // [num_edges], int64_t if in64 else int32_t
  const void* col = nullptr;
  bool in64 = true;
  bool out64 = false;  // type of the three outputs
  bool drop_loops = false;
  int64_t num_edges = 0;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  void* rowptr = nullptr;      // [num_rows + 1]
  void* sorted_col = nullptr;  // [num_edges]
  void* perm = nullptr;        // [num_edges]: position of each sorted edge in the input
  int64_t* invalid = nullptr;  // [1]
};

// CBSR: a row of `dim` features of which k are stored, with their columns, distinct and in any
// order. Every struct below has values [rows, k] of `dtype` beside columns [rows, k].

// Row by row the k largest of x: NaN counts as largest, of equal ones the lowest column is taken.
// `balanced`: instead the largest of each of the k groups of columns that are equal modulo k.
// The order of the entries in a row is the kernel's to choose.
struct MaxK {
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool balanced = false;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t k = 0;  // 1 to dim
  const void* x = nullptr;  // [num_rows, dim]
  void* values = nullptr;   // [num_rows, k]
  void* columns = nullptr;  // [num_rows, k]
};

// dense[i, columns[i, c]] = values[i, c], zero elsewhere; or, sampling, the other way round.
struct CbsrDense {
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t k = 0;
  const void* columns = nullptr;  // [num_rows, k]
  const void* in = nullptr;       // values [num_rows, k]; sampling: dense [num_rows, dim]
  void* out = nullptr;            // dense [num_rows, dim]; sampling: values [num_rows, k]
};

// Spmm of a CBSR: x[j] is the row that columns[j] and values[j] stand for.
struct CbsrSpmm {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool value_acc = false;  // value is stored as acc
  bool out_acc = false;    // out is stored as acc (bias too)
  bool mean = false;
  int64_t dim = 0;
  int64_t k = 0;
  const void* values = nullptr;     // [num_cols, k]
  const void* columns = nullptr;    // [num_cols, k]
  const void* value = nullptr;      // [num_values] or nullptr
  const void* row_scale = nullptr;  // [num_rows] acc or nullptr
  const void* col_scale = nullptr;  // [num_cols] acc or nullptr
  const void* diag = nullptr;       // [num_rows] acc or nullptr (num_rows == num_cols)
  const void* bias = nullptr;       // [dim] or nullptr
  void* out = nullptr;              // [num_rows, dim]
};

// Backward of CbsrSpmm with respect to values, sampled at the same columns. With dY = row_scale *
// grad (divided by the row's number of edges if `mean`):
//   grad_values[j, c] = col_scale[j] * sum_{e in row i, col[e] == j} value[e] * dY[i, columns[j, c]]
//                       + diag[j] * grad[j, columns[j, c]]
// The same struct serves the ordered form, which walks the transpose: there `csr` has a row for
// each j, row_scale belongs to j, col_scale to i, and `mean` is not used:
//   grad_values[j, c] = row_scale[j] * sum_{e in row j} value[e] * col_scale[i] * grad[i, ...] + ...
struct CbsrBackward {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool value_acc = false;
  bool mean = false;
  int64_t dim = 0;
  int64_t k = 0;
  const void* columns = nullptr;  // [num_cols, k]; ordered: [num_rows, k]
  const void* grad = nullptr;     // [num_rows, dim]; ordered: [num_cols, dim]
  const void* value = nullptr;
  const void* row_scale = nullptr;
  const void* col_scale = nullptr;
  const void* diag = nullptr;
  void* grad_values = nullptr;  // like columns
};

// Backward of CbsrSpmm with respect to value, for every edge e of row i:
//   out[perm[e]] = row_scale[i] * col_scale[col[e]] * sum_c values[col[e], c] * grad[i, columns[...]]
// Positions that no edge names are left alone: the caller zeroes them.
struct CbsrSddmm {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool mean = false;  // divide by the row's number of edges
  int64_t dim = 0;
  int64_t k = 0;
  const void* grad = nullptr;     // [num_rows, dim]
  const void* values = nullptr;   // [num_cols, k]
  const void* columns = nullptr;  // [num_cols, k]
  const void* row_scale = nullptr;
  const void* col_scale = nullptr;
  void* out = nullptr;  // [num_values]
};

}  // namespace pyg_fast
