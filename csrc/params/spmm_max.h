// The maximum (or minimum) over the edges of each row, and its gradients.
#pragma once
#include "common.h"

namespace pyg_fast {

// out[i, f] = max (or min) over the row's edges of value[e] * x[col[e], f]; an empty row gives 0.
// arg[i, f] = position in `col` of the first edge that reaches it, -1 for an empty row.
// NaN counts as the largest (smallest) value, as in torch.amax and torch.amin.
struct SpmmMax {
  Csr csr;
  DType dtype = DType::f32;
  bool minimum = false;
  int64_t dim = 0;
  int64_t longest_row = 0;      // a bound of the edges of a row: where it is low, CUDA divides none
  const void* x = nullptr;      // [num_cols, dim]
  const void* value = nullptr;  // [num_values] or nullptr
  void* out = nullptr;          // [num_rows, dim]
  void* arg = nullptr;          // [num_rows, dim], the type of the csr's rowptr
};

// Backward of SpmmMax with respect to x:
//   grad_x[j, f] = sum over (i, f) with col[arg[i, f]] == j of value * grad[i, f]
// The kernel zeroes `grad_x` [num_cols, dim].
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
// The kernel does not write positions without an edge.
struct SpmmMaxBackwardValue {
  Csr csr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* arg = nullptr;   // [num_rows, dim]
  const void* grad = nullptr;  // [num_rows, dim]
  const void* x = nullptr;     // [num_cols, dim]
  void* grad_value = nullptr;  // [num_values]
};

namespace cpu {
void spmm_max(const SpmmMax& p, int64_t row_begin, int64_t row_end);
// Feature columns [begin, end): each thread owns its columns of grad_x: no data races.
void spmm_max_backward_x(const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end);
void spmm_max_backward_value(const SpmmMaxBackwardValue& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
int64_t spmm_max_scratch(const SpmmMax& p);
const char* spmm_max(const SpmmMax& p, void* scratch, void* stream);

// Uses atomic additions: fast, but the last bits of a sum vary. f16 and bf16 accumulate in scratch. Sources of
// many edges gather over `transposed`, if it is given: atomic additions of as many terms are less exact. Its
// `perm` gives the numbers of its edges, as that of p.csr.
int64_t spmm_max_backward_x_scratch(const SpmmMaxBackwardX& p, const Csr* transposed);
const char* spmm_max_backward_x(const SpmmMaxBackwardX& p, const Csr* transposed, void* scratch,
                                void* stream);

// The same gradient, deterministic: gathers over the structure `transposed`. Its `perm` gives the
// position of each of its edges in p.csr (nullptr: the identity).
int64_t spmm_max_backward_x_ordered_scratch(const SpmmMaxBackwardX& p, const Csr& transposed);
const char* spmm_max_backward_x_ordered(const SpmmMaxBackwardX& p, const Csr& transposed,
                                        void* scratch, void* stream);

const char* spmm_max_backward_value(const SpmmMaxBackwardValue& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
