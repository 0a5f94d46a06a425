// One number per edge from the features at its two ends: the gradients of edge weights.
#include "common.cuh"
#include "params/sddmm.h"

namespace pyg_fast::cuda {
namespace {

constexpr int kHubDegree = 512;  // a longer row is shared by the warps of its block

// Runs fn(edge) for the edges of each row, `32 / LANES` edges of a warp at once; all lanes of an
// edge's group take part, also where there is no edge left (edge < 0). Hub rows by the whole block.
template <typename I, int LANES, typename Fn>
__device__ inline void for_each_edge(const Csr& csr, Fn&& fn) {
  constexpr int kSlots = 32 / LANES;
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const int warp = threadIdx.x / 32, slot = (threadIdx.x & 31) / LANES;
  const auto visit = [&](int64_t row, I begin, I end, I stride) {
    for (I base = begin; base < end; base += stride) {
      const I edge = base + slot;
      fn(row, edge < end ? edge : I(-1));
    }
  };
  const int64_t blocks = (csr.num_rows + kWarps - 1) / kWarps;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t row = block * kWarps + warp;
    bool hub = false;
    if (row < csr.num_rows) {
      const I begin = rowptr[row], end = rowptr[row + 1];
      hub = end - begin > kHubDegree;
      if (!hub) visit(row, begin, end, I(kSlots));
    }
    if (!__syncthreads_or(hub)) continue;
    for (int64_t r = block * kWarps; r < (block + 1) * kWarps && r < csr.num_rows; ++r) {
      const I begin = rowptr[r], end = rowptr[r + 1];
      if (end - begin > kHubDegree)
        visit(r, static_cast<I>(begin + warp * kSlots), end, I(kSlots * kWarps));
    }
  }
}

template <int LANES, typename Acc>
__device__ inline Acc sum_lanes(Acc v) {
#pragma unroll
  for (int offset = 1; offset < LANES; offset <<= 1) v += __shfl_xor_sync(kWarpMask, v, offset);
  return v;
}

template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads) sddmm_kernel(Sddmm p) {
  using Acc = acc_t<T>;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const I* col = static_cast<const I*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const Acc* row_scale = static_cast<const Acc*>(p.row_scale);
  const Acc* col_scale = static_cast<const Acc*>(p.col_scale);
  const int lane = threadIdx.x % LANES;
  for_each_edge<I, LANES>(p.csr, [&](int64_t row, I edge) {
    const I j = edge < 0 ? I(0) : col[edge];
    Acc dot = 0;
    if (edge >= 0) {
      const T* a = static_cast<const T*>(p.a) + row * p.dim;
      const T* b = static_cast<const T*>(p.b) + static_cast<int64_t>(j) * p.dim;
#pragma unroll 4
      for (int64_t c = lane * VEC; c < p.dim; c += LANES * VEC) {
        const auto u = load<T, VEC>(a + c), v = load<T, VEC>(b + c);
#pragma unroll
        for (int k = 0; k < VEC; ++k) dot += to_acc(u.data[k]) * to_acc(v.data[k]);
      }
    }
    dot = sum_lanes<LANES>(dot);
    if (edge < 0 || lane != 0) return;
    if (row_scale) dot *= row_scale[row];
    if (col_scale) dot *= col_scale[j];
    if (p.mean) dot /= static_cast<Acc>(rowptr[row + 1] - rowptr[row]);
    static_cast<T*>(p.out)[perm ? perm[edge] : edge] = from_acc<T>(dot);
  });
}

template <typename T, typename I, int LANES>
__global__ void __launch_bounds__(kThreads) max_backward_value_kernel(SpmmMaxBackwardValue p) {
  using Acc = acc_t<T>;
  const I* col = static_cast<const I*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const int lane = threadIdx.x % LANES;
  for_each_edge<I, LANES>(p.csr, [&](int64_t row, I edge) {
    Acc sum = 0;
    if (edge >= 0) {
      const I* arg = static_cast<const I*>(p.arg) + row * p.dim;
      const T* grad = static_cast<const T*>(p.grad) + row * p.dim;
      const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(col[edge]) * p.dim;
      for (int64_t c = lane; c < p.dim; c += LANES) {
        if (arg[c] == edge) sum += to_acc(grad[c]) * to_acc(x[c]);
      }
    }
    sum = sum_lanes<LANES>(sum);
    if (edge >= 0 && lane == 0)
      static_cast<T*>(p.grad_value)[perm ? perm[edge] : edge] = from_acc<T>(sum);
  });
}

unsigned grid_for(const Csr& csr) {
  const int64_t blocks = (csr.num_rows + kWarps - 1) / kWarps;
  return static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

}  // namespace

const char* sddmm(const Sddmm& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.csr.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned grid = grid_for(p.csr);
    if (p.dim % kVec<T> == 0 && aligned16(p.a) && aligned16(p.b))
      sddmm_kernel<T, I, kVec<T>, 8><<<grid, kThreads, 0, stream>>>(p);
    else
      sddmm_kernel<T, I, 1, 8><<<grid, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

const char* spmm_max_backward_value(const SpmmMaxBackwardValue& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.csr.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    max_backward_value_kernel<T, I, 16><<<grid_for(p.csr), kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
