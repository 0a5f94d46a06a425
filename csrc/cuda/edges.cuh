// One number per edge, from the features of both its ends.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

constexpr int kHubDegree = 512;  // the warps of a block share longer rows

// Calls fn(edge) for the edges of each row, `32 / LANES` edges of a warp at once. All lanes of a group
// take part, also without an edge (edge < 0). The whole block processes hub rows.
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

inline unsigned grid_for(const Csr& csr) {
  const int64_t blocks = (csr.num_rows + kWarps - 1) / kWarps;
  return static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

}  // namespace pyg_fast::cuda
