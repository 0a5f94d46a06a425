// Dot products along edges: the gradient of the edge weights.
#pragma once
#include "common.h"

namespace pyg_fast {

// out[perm[e]] = row_scale[i] * col_scale[col[e]] * <a[i], b[col[e]]> for every edge e of row i (acc
// arithmetic). The kernel does not write positions without an edge: the caller zeroes them.
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

namespace cpu {
void sddmm(const Sddmm& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
const char* sddmm(const Sddmm& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
