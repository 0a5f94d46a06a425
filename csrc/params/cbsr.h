// CBSR: stores k of the `dim` features of each row, with their columns: distinct, in any order.
// Every struct below has values [rows, k] of `dtype` and columns [rows, k].
#pragma once
#include "common.h"

namespace pyg_fast {

// dense[i, columns[i, c]] = values[i, c], zero elsewhere. Sampling does the reverse.
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

// Spmm of a CBSR: columns[j] and values[j] represent row x[j].
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

// Backward of CbsrSpmm with respect to values, sampled at the same columns. With dY = row_scale * grad
// (divided by the row's number of edges if `mean`):
//   grad_values[j, c] = col_scale[j] * sum_{e in row i, col[e] == j} value[e] * dY[i, columns[j, c]]
//                       + diag[j] * grad[j, columns[j, c]]
// The ordered form uses the same struct and walks the transpose: `csr` has a row for each j, row_scale
// belongs to j, col_scale to i, and `mean` is not used:
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
// The kernel does not write positions without an edge: the caller zeroes them.
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

namespace cpu {
void cbsr_to_dense(const CbsrDense& p, int64_t row_begin, int64_t row_end);
void cbsr_sample(const CbsrDense& p, int64_t row_begin, int64_t row_end);
void cbsr_spmm(const CbsrSpmm& p, int64_t row_begin, int64_t row_end);
// Sources [begin, end): each thread walks all edges and sums those of its own sources.
void cbsr_spmm_backward(const CbsrBackward& p, int64_t source_begin, int64_t source_end);
void cbsr_spmm_backward_ordered(const CbsrBackward& p, int64_t row_begin, int64_t row_end);
void cbsr_sddmm(const CbsrSddmm& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
const char* cbsr_to_dense(const CbsrDense& p, void* stream);
const char* cbsr_sample(const CbsrDense& p, void* stream);

// Adds many entries in several passes; fp16 and bf16 then need scratch, as do long rows.
int64_t cbsr_spmm_scratch(const CbsrSpmm& p);
const char* cbsr_spmm(const CbsrSpmm& p, void* scratch, void* stream);

// Uses atomic additions: fast, but the last bits of a sum vary. f16 and bf16 accumulate in scratch. Sources of
// many edges gather over `transposed`, if it is given, without a mean: atomic additions of as many terms are
// less exact.
int64_t cbsr_spmm_backward_scratch(const CbsrBackward& p, const Csr* transposed);
const char* cbsr_spmm_backward(const CbsrBackward& p, const Csr* transposed, void* scratch,
                               void* stream);

// The same gradient over the transposed structure, deterministic.
int64_t cbsr_spmm_backward_ordered_scratch(const CbsrBackward& p);
const char* cbsr_spmm_backward_ordered(const CbsrBackward& p, void* scratch, void* stream);

// Of the ordered form, writes only the rows of many edges.
int64_t cbsr_spmm_backward_hubs_scratch(const CbsrBackward& p);
const char* cbsr_spmm_backward_hubs(const CbsrBackward& p, void* scratch, void* stream);

const char* cbsr_sddmm(const CbsrSddmm& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
