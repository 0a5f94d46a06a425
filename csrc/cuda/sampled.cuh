// The sampled edges of a row.
#pragma once
#include "common.cuh"
#include "params/sampled.h"

namespace pyg_fast::cuda {

inline bool needs_table(const Sampling& s) {
  return s.strategy == Strategy::fastrand || s.strategy == Strategy::unbiased;
}

// One thread per row computes the expensive coprime, once.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    row_samples_kernel(Csr csr, Sampling s, RowSample<I>* out) {
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; row < csr.num_rows; row += step) {
    const I degree = rowptr[row + 1] - rowptr[row];
    out[row] =
        degree > static_cast<I>(s.num_samples) ? row_sample<I>(s, row, degree) : RowSample<I>{0, 1};
  }
}

template <typename I>
const RowSample<I>* row_samples(const Csr& csr, const Sampling& s, void* scratch,
                                cudaStream_t stream) {
  if (!needs_table(s)) return nullptr;
  auto* table = static_cast<RowSample<I>*>(scratch);
  row_samples_kernel<I><<<blocks_for(csr.num_rows), kThreads, 0, stream>>>(csr, s, table);
  return table;
}

// A row from the view of its warp.
template <typename I>
struct SampledRow {
  I begin = 0;
  I degree = 0;
  I count = 0;  // sampled edges
  RowSample<I> sample{0, 1};

  SampledRow() = default;
  __device__ SampledRow(const Sampling& s, I begin, I end, RowSample<I> sample)
      : begin(begin), degree(end - begin), sample(sample) {
    const I most = static_cast<I>(s.num_samples);
    count = degree < most ? degree : most;
  }

  __device__ I edge(I k) const {
    return begin + (degree == count ? k : sampled_position<I>(sample, k, degree, count));
  }
};

// Of the strategies without a table.
template <typename I>
__device__ inline RowSample<I> default_sample(const Sampling& s, I degree) {
  if (degree > static_cast<I>(s.num_samples)) {
    if (s.strategy == Strategy::paper) return {0, kPaperStride};
    if (s.strategy == Strategy::adaptive)
      return adaptive_sample(static_cast<I>(s.num_samples), degree);
  }
  return {0, 1};
}

}  // namespace pyg_fast::cuda
