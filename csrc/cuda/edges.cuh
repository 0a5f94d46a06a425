// One number per edge, from the features of both its ends.
#pragma once
#include "rows.cuh"

namespace pyg_fast::cuda {

// Calls fn(row, edge) for the edges of each row, `32 / LANES` edges of a warp at once. All lanes of a group
// take part, also without an edge (edge < 0).
template <typename I, int LANES, typename Fn>
__device__ inline void for_each_edge(const Csr& csr, const LongRows& l, Fn&& fn) {
  constexpr int kSlots = 32 / LANES;
  const int slot = (threadIdx.x & 31) / LANES;
  const auto visit = [&](int64_t row, I begin, I end) {
    for (I base = begin; base < end; base += kSlots) {
      const I edge = base + slot;
      fn(row, edge < end ? edge : I(-1));
    }
  };
  if (blockIdx.x < l.grid()) {
    Piece<I>(csr, l).for_each(
        [&](int64_t, bool, int64_t row, I begin, I end) { visit(row, begin, end); });
    return;
  }
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const int64_t row = (static_cast<int64_t>(blockIdx.x) - l.grid()) * kWarps + threadIdx.x / 32;
  if (row >= csr.num_rows) return;
  const I begin = rowptr[row], end = rowptr[row + 1];
  if (end - begin <= static_cast<I>(l.size)) visit(row, begin, end);
}

template <int LANES, typename Acc>
__device__ inline Acc sum_lanes(Acc v) {
#pragma unroll
  for (int offset = 1; offset < LANES; offset <<= 1) v += __shfl_xor_sync(kWarpMask, v, offset);
  return v;
}

inline unsigned grid_for(const Csr& csr, const LongRows& l) {
  return static_cast<unsigned>((csr.num_rows + kWarps - 1) / kWarps) + l.grid();
}

}  // namespace pyg_fast::cuda
