// Scaling the rows that edges read, before rather than at every edge.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

// out[i] = scale[i] * x[i]
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_rows_kernel(const T* x, const T* scale, T* out,
                                                              int64_t rows, int64_t dim) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < rows; i += step) {
    const T factor = scale[i];
    for (int64_t c = threadIdx.x & 31; c < dim; c += 32) out[i * dim + c] = x[i * dim + c] * factor;
  }
}

template <typename T>
void scale_rows(const T* x, const T* scale, T* out, int64_t rows, int64_t dim,
                cudaStream_t stream) {
  scale_rows_kernel<T><<<blocks_for(rows * 32), kThreads, 0, stream>>>(x, scale, out, rows, dim);
}

// Worth a pass over x where each row of it is read many times. Not for halves, which would round.
template <typename P>
bool wants_prologue(const P& p) {
  return p.col_scale && !p.value && (p.dtype == DType::f32 || p.dtype == DType::f64) &&
         p.csr.num_edges >= 32 * p.csr.num_cols && p.csr.num_edges >= (1 << 20);
}

}  // namespace pyg_fast::cuda
