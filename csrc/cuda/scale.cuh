// Scales features or edge values once in advance instead of at every edge.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

// out[i] = scale[i] * x[i]
template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const T* x, const T* scale, T* out, int64_t rows, int64_t dim) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < rows;
       i += step) {
    const T factor = scale[i];
    for (int64_t c = threadIdx.x & 31; c < dim; c += 32) out[i * dim + c] = x[i * dim + c] * factor;
  }
}

template <typename T>
void scale_rows(const T* x, const T* scale, T* out, int64_t rows, int64_t dim,
                cudaStream_t stream) {
  scale_rows_kernel<T><<<blocks_for(rows * 32), kThreads, 0, stream>>>(x, scale, out, rows, dim);
}

// out[e] = value[perm[e]]
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads)
    order_values_kernel(const void* value, bool value_acc, const I* perm, acc_t<T>* out,
                        int64_t num_edges) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < num_edges;
       e += step) {
    const I v = load_once(perm + e);
    out[e] = value_acc ? static_cast<const acc_t<T>*>(value)[v]
                       : to_acc(static_cast<const T*>(value)[v]);
  }
}

// A pass over the edges pays if their values are scattered: only this pass then waits for them.
template <typename P>
bool wants_ordered_values(const P& p) {
  return p.value && p.csr.perm && p.csr.num_edges >= (1 << 20);
}

// Copies the values in edge order and updates `p`. After the last edge `perm` is zero: the value read for
// it is not used.
template <typename T, typename I, typename P>
void order_values(P& p, void* scratch, cudaStream_t stream) {
  order_values_kernel<T, I><<<blocks_for(p.csr.num_edges), kThreads, 0, stream>>>(
      p.value, p.value_acc, static_cast<const I*>(p.csr.perm), static_cast<acc_t<T>*>(scratch),
      p.csr.num_edges);
  p.value = scratch;
  p.value_acc = true;
  p.csr.perm = nullptr;
}

// A pass over x pays if each row is read many times. Not for fp16 and bf16, which would round.
template <typename P>
bool wants_prologue(const P& p) {
  return p.col_scale && !p.value && (p.dtype == DType::f32 || p.dtype == DType::f64) &&
         p.csr.num_edges >= 32 * p.csr.num_cols && p.csr.num_edges >= (1 << 20);
}

}  // namespace pyg_fast::cuda
