// Sums over all rows.
#include "columns.cuh"
#include "params/column_sums.h"

namespace pyg_fast::cuda {

int64_t column_sums_scratch(const ColumnSums& p) {
  int64_t bytes = 0;
  dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    bytes = sum_columns_scratch(static_cast<const decltype(element)*>(p.x), p.num_rows, p.dim);
    return nullptr;
  });
  return bytes;
}

const char* column_sums(const ColumnSums& p, void* scratch, void* stream) {
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    sum_columns(static_cast<const T*>(p.x), static_cast<T*>(p.out), p.num_rows, p.dim,
                static_cast<acc_t<T>*>(scratch), static_cast<cudaStream_t>(stream));
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
