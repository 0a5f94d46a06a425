// The variance over the edges of each row.
#pragma once
#include "common.h"

namespace pyg_fast {

// With d = x[col[e], f] - x[col[first edge of the row], f], over the n edges of row i:
//   var[i, f] = max(0, sum d^2 / n - (sum d / n)^2)
//   mean[i, f] = x[col[first edge], f] + sum d / n
// So the variance of equal numbers is exactly 0, however large they are. An empty row gives 0.
struct SpmmVar {
  Csr csr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* x = nullptr;  // [num_cols, dim]
  void* var = nullptr;      // [num_rows, dim] acc
  void* mean = nullptr;     // [num_rows, dim] acc
};

namespace cpu {
void spmm_var(const SpmmVar& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
int64_t spmm_var_scratch(const SpmmVar& p);
const char* spmm_var(const SpmmVar& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
