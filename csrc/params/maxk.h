// The largest entries of each row, as CBSR (cbsr.h).
#pragma once
#include "common.h"

namespace pyg_fast {

// The k largest of each row of x: NaN counts as largest; equal elements are taken from the lowest column.
// `balanced`: instead the largest of each of the k groups of columns that are equal modulo k.
// The kernel chooses the order of the entries in a row.
struct MaxK {
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool balanced = false;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t k = 0;            // 1 to dim
  const void* x = nullptr;  // [num_rows, dim]
  void* values = nullptr;   // [num_rows, k]
  void* columns = nullptr;  // [num_rows, k]
};

namespace cpu {
void maxk(const MaxK& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
const char* maxk(const MaxK& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
