// Sums of columns over many rows, in two steps and in a fixed order.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

constexpr int kColumnRows = kThreads / 32;  // rows that a block reads at once, 32 columns of each

// The number of blocks that divide the rows; each writes one row of sums.
inline int64_t column_blocks(int64_t num_rows) {
  const int64_t blocks = (num_rows + kColumnRows * 16 - 1) / (kColumnRows * 16);
  return blocks < 1 ? 1 : blocks < 512 ? blocks : 512;
}

// Adds the `sum` of column threadIdx.x % 32 over all threads of the block; the first warp gets the
// result.
template <typename Acc>
__device__ inline Acc sum_of_block(Acc sum, Acc (&part)[kColumnRows][32]) {
  const int group = threadIdx.x / 32;
  part[group][threadIdx.x % 32] = sum;
  __syncthreads();
  if (group == 0) {
    for (int k = 1; k < kColumnRows; ++k) sum += part[k][threadIdx.x];
  }
  return sum;
}

// out[blockIdx.y, c] = the sum of every gridDim.y-th group of kColumnRows rows.
template <typename Acc>
__global__ void __launch_bounds__(kThreads)
    sum_columns_kernel(const Acc* rows, Acc* out, int64_t num_rows, int64_t columns) {
  __shared__ Acc part[kColumnRows][32];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  const int group = threadIdx.x / 32;
  Acc sum = 0;
  if (column < columns) {
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * kColumnRows + group; row < num_rows;
         row += static_cast<int64_t>(gridDim.y) * kColumnRows)
      sum += rows[row * columns + column];
  }
  sum = sum_of_block(sum, part);
  if (group == 0 && column < columns) out[blockIdx.y * columns + column] = sum;
}

}  // namespace pyg_fast::cuda
