// Sums over all rows, such as gradients of biases.
#pragma once
#include "common.h"

namespace pyg_fast {

//   out[c] = sum_i x[i, c], summed in acc
struct ColumnSums {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t dim = 0;
  const void* x = nullptr;  // [num_rows, dim]
  void* out = nullptr;      // [dim]
};

namespace cuda {
// Partial sums, one per block.
int64_t column_sums_scratch(const ColumnSums& p);
const char* column_sums(const ColumnSums& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
