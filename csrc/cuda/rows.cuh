// The loop that all row-wise kernels share. A block owns up to kMaxBlockRows rows. Its warps take them
// from a queue, to avoid waiting for longer rows, and share the hub rows. The mapping of rows to warps
// varies from run to run; the order of additions in a row does not.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

// An edge with the factor of its source's features: value * col_scale.
template <typename T, typename I, bool WEIGHTED>
struct WeightedEdge {
  using Acc = acc_t<T>;
  Col source = 0;
  Acc weight = 0;

  template <typename Row>
  __device__ void load(const Row& row, I e, I end) {
    if (e >= end) return;
    const auto& p = row.p;
    source = load_once(static_cast<const Col*>(p.csr.col) + e);
    if constexpr (WEIGHTED) {
      weight = 1;
      if (p.value) {
        const I v = p.csr.perm ? load_once(static_cast<const I*>(p.csr.perm) + e) : e;
        weight = p.value_acc ? static_cast<const Acc*>(p.value)[v]
                             : to_acc(static_cast<const T*>(p.value)[v]);
      }
      if (p.col_scale) weight *= __ldg(static_cast<const Acc*>(p.col_scale) + source);
    }
  }
};

// `Row` defines how a kernel processes a row, for one tile of columns:
//   Edge                                     a thread's edge of the 32 that its warp reads at once
//   Edge::load(row_kernel, e, end)           reads edge e, if e < end
//   Sum, empty(row)                          the accumulator, and its initial value
//   add(edge, base, count, sum)              adds the warp's edges base, ..., base + count - 1
//   reduce(sum)                              combines the warp's slots; its first LANES threads
//                                            then hold the result
//   merge(sum, other)                        combines two warps' sums, the earlier edges in `sum`
//   finish(row, degree, sum)                 writes the row, called by LANES threads
//   kSharedSums                              whether sums are in shared memory; instead of merge:
//   finish_hub(row, degree)                  writes the sum of all warps, called by all threads

// Processes the rows that all warps of a block share: all of its threads call it.
template <typename I, int LANES, typename Row>
__device__ inline void sum_hubs(Row& kernel, const I* rowptr, int64_t first_row, const int* hubs,
                                int num_hubs) {
  using Edge = typename Row::Edge;
  using Sum = typename Row::Sum;
  __shared__ Sum partial[kWarps][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  Edge edge;
  for (int h = 0; h < num_hubs; ++h) {
    const I row_begin = rowptr[hubs[h]], row_end = rowptr[hubs[h] + 1];
    // Each warp takes a contiguous share: merging keeps the order of edges.
    const I share = ((row_end - row_begin) / kWarps + 32) / 32 * 32;
    const I first = row_begin + share * warp;
    const I last = row_end - first > share ? first + share : row_end;
    Sum sum = kernel.empty(first_row + hubs[h]);
    if (first < last) edge.load(kernel, first + lane, last);
    for (I base = first; base < last; base += 32) {
      const Edge now = edge;
      const I left = last - base;
      edge.load(kernel, base + 32 + lane, last);
      kernel.add(now, base, left < 32 ? static_cast<int>(left) : 32, sum);
    }
    kernel.reduce(sum);
    if constexpr (Row::kSharedSums) {
      __syncthreads();
      kernel.finish_hub(first_row + hubs[h], row_end - row_begin);
    } else {
      if (lane < LANES) partial[warp][lane] = sum;
      __syncthreads();
      if (threadIdx.x < LANES) {
        sum = partial[0][lane];
        for (int w = 1; w < kWarps; ++w) kernel.merge(sum, partial[w][lane]);
        kernel.finish(first_row + hubs[h], row_end - row_begin, sum);
      }
    }
    __syncthreads();
  }
}

template <typename I, int LANES, typename Row>
__device__ inline void for_each_row(const Csr& csr, const Shape& s, Row& kernel) {
  using Edge = typename Row::Edge;
  using Sum = typename Row::Sum;
  __shared__ int next_row, num_hubs;
  __shared__ int hubs[kMaxBlockRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * s.block_rows;
  const int rows = csr.num_rows - first_row < s.block_rows
                       ? static_cast<int>(csr.num_rows - first_row) : s.block_rows;
  const I* rowptr = static_cast<const I*>(csr.rowptr) + first_row;
  __syncthreads();  // warps may still read the previous tile
  if (threadIdx.x == 0) {
    next_row = kWarps;
    num_hubs = 0;
  }
  __syncthreads();

  Edge edge;
  I begin = 0, end = 0;
  const auto open = [&](int row) {
    begin = end = 0;
    if (row >= rows) return;
    begin = rowptr[row];
    end = rowptr[row + 1];
    edge.load(kernel, begin + lane, end);
  };
  int row = warp;
  open(row);
  while (row < rows) {
    int following = 0;
    if (lane == 0) following = atomicAdd(&next_row, 1);
    following = __shfl_sync(kWarpMask, following, 0);
    const I row_begin = begin, row_end = end;
    if (row_end - row_begin > s.hub_degree) {
      if (lane == 0) hubs[atomicAdd(&num_hubs, 1)] = row;
      open(following);
    } else {
      Sum sum = kernel.empty(first_row + row);
      for (I base = row_begin; base < row_end; base += 32) {
        const Edge now = edge;
        const int left = static_cast<int>(row_end - base);
        // Prefetches the next row's first edges while this row is summed.
        if (left > 32) edge.load(kernel, base + 32 + lane, row_end);
        else open(following);
        kernel.add(now, base, left < 32 ? left : 32, sum);
      }
      if (row_begin == row_end) open(following);
      kernel.reduce(sum);
      if (lane < LANES) kernel.finish(first_row + row, row_end - row_begin, sum);
    }
    row = following;
  }
  __syncthreads();
  sum_hubs<I, LANES>(kernel, rowptr, first_row, hubs, num_hubs);
}

}  // namespace pyg_fast::cuda
