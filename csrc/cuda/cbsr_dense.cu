// CBSR rows to dense ones and back.
#include "cbsr.cuh"
#include "params/cbsr.h"

namespace pyg_fast::cuda {
namespace {

// One warp per row: writes zeros first, then the entries.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) to_dense_kernel(CbsrDense p, bool vectors) {
  const int lane = threadIdx.x & 31;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.num_rows;
       row += step) {
    T* out = static_cast<T*>(p.out) + row * p.dim;
    if (vectors) {
      for (int64_t f = lane * kVec<T>; f < p.dim; f += 32 * kVec<T>)
        *reinterpret_cast<uint4*>(out + f) = make_uint4(0, 0, 0, 0);
    } else {
      for (int64_t f = lane; f < p.dim; f += 32) out[f] = from_acc<T>(0);
    }
    __syncwarp();
    for (int64_t at = row * p.k + lane; at < (row + 1) * p.k; at += 32)
      out[static_cast<const C*>(p.columns)[at]] = static_cast<const T*>(p.in)[at];
  }
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) sample_kernel(CbsrDense p) {
  const int64_t total = p.num_rows * p.k, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < total;
       at += step) {
    const int64_t column = static_cast<const C*>(p.columns)[at];
    static_cast<T*>(p.out)[at] = static_cast<const T*>(p.in)[at / p.k * p.dim + column];
  }
}

}  // namespace

const char* cbsr_to_dense(const CbsrDense& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch_entries(p.dtype, p.column_type, [&](auto element, auto column) {
    using T = decltype(element);
    to_dense_kernel<T, decltype(column)><<<blocks_for(p.num_rows * 32), kThreads, 0, stream>>>(
        p, p.dim % kVec<T> == 0 && aligned16(p.out));
    return last_error();
  });
}

const char* cbsr_sample(const CbsrDense& p, void* stream_) {
  if (p.num_rows == 0 || p.k == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch_entries(p.dtype, p.column_type, [&](auto element, auto column) {
    sample_kernel<decltype(element), decltype(column)>
        <<<blocks_for(p.num_rows * p.k), kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
