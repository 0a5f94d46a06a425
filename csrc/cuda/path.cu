// Rows of execution paths: put back among all, looked for outside, dropped out by node.
#include "../dropout.h"
#include "common.cuh"
#include "cuda.h"

namespace pyg_fast::cuda {
namespace {

// A warp takes a row; features pass once, so L2 is left to what is gathered.
template <typename T, typename I, int VEC>
__global__ void __launch_bounds__(kThreads) expand_rows_kernel(ExpandRows p) {
  const T fill = from_acc<T>(static_cast<acc_t<T>>(p.fill));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.num_rows; row += step) {
    const int64_t from = static_cast<int64_t>(static_cast<const I*>(p.position)[row]);
    for (int64_t c = (threadIdx.x & 31) * VEC; c < p.dim; c += 32 * VEC) {
      Pack<T, VEC> pack;
      if (from >= 0 && from < p.num_x) {
        pack = load<T, VEC>(static_cast<const T*>(p.x) + from * p.dim + c);
      } else {
#pragma unroll
        for (int k = 0; k < VEC; ++k) pack.data[k] = fill;
      }
      store<T, VEC>(static_cast<T*>(p.out) + row * p.dim + c, pack);
    }
  }
}

template <typename T, typename I, int VEC>
__global__ void __launch_bounds__(kThreads) count_outside_kernel(CountOutside p) {
  __shared__ unsigned found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.num_rows; row += step) {
    if (static_cast<const I*>(p.position)[row] >= 0) continue;
    bool any = false;
    for (int64_t c = (threadIdx.x & 31) * VEC; c < p.dim; c += 32 * VEC) {
      const Pack<T, VEC> pack = load<T, VEC>(static_cast<const T*>(p.x) + row * p.dim + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) any = any || to_acc(pack.data[k]) != 0;
    }
    if (__any_sync(kWarpMask, any) && (threadIdx.x & 31) == 0) atomicAdd(&found, 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0 && found > 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counter), found);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kThreads)
    node_dropout_kernel(NodeDropout p, uint32_t threshold, acc_t<T> scale) {
  const auto seed = static_cast<uint64_t>(*p.seed);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.num_rows; row += step) {
    const uint32_t bits = edge_bits(seed, static_cast<uint64_t>(p.nodes ? p.nodes[row] : row));
    for (int64_t c = (threadIdx.x & 31) * VEC; c < p.dim; c += 32 * VEC) {
      const int64_t at = row * p.dim + c;
      Pack<T, VEC> pack = load<T, VEC>(static_cast<const T*>(p.x) + at);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const bool kept = keeps(bits, static_cast<uint32_t>(c + k), threshold);
        pack.data[k] = from_acc<T>(kept ? to_acc(pack.data[k]) * scale : acc_t<T>(0));
      }
      store<T, VEC>(static_cast<T*>(p.out) + at, pack);
    }
  }
}

template <typename T>
bool vectors(int64_t dim, const void* a, const void* b) {
  return dim % kVec<T> == 0 && aligned16(a) && aligned16(b);
}

// Rows of many warps each: more blocks than fit at once only wait.
unsigned blocks_of(int64_t num_rows) {
  const unsigned blocks = blocks_for(num_rows * 32);
  return blocks < 132 * 16 ? blocks : 132 * 16;
}

}  // namespace

const char* expand_rows(const ExpandRows& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned blocks = blocks_of(p.num_rows);
    if (vectors<T>(p.dim, p.x, p.out))
      expand_rows_kernel<T, I, kVec<T>><<<blocks, kThreads, 0, stream>>>(p);
    else expand_rows_kernel<T, I, 1><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

const char* count_outside(const CountOutside& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned blocks = blocks_of(p.num_rows);
    if (vectors<T>(p.dim, p.x, p.x))
      count_outside_kernel<T, I, kVec<T>><<<blocks, kThreads, 0, stream>>>(p);
    else count_outside_kernel<T, I, 1><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

const char* node_dropout(const NodeDropout& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  const double scale = dropout_scale(p.dropout);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    const unsigned blocks = blocks_of(p.num_rows);
    const auto factor = static_cast<acc_t<T>>(scale);
    if (vectors<T>(p.dim, p.x, p.out))
      node_dropout_kernel<T, kVec<T>><<<blocks, kThreads, 0, stream>>>(p, threshold, factor);
    else node_dropout_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p, threshold, factor);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
