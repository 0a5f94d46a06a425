// Sums over a sample of each row's edges.
#include "params/sampled.h"
#include "sampled.cuh"
#include "spmm.cuh"

namespace pyg_fast::cuda {

// SpmmRow calls this overload instead of the generic one: it inserts a byte into the mantissa of 2^23 and
// subtracts 2^23, which is faster than the conversion instruction.
template <int VEC, typename = std::enable_if_t<VEC % 4 == 0>>
__device__ inline float element(const Pack<int8_t, VEC>& pack, int c) {
  const uint32_t word = reinterpret_cast<const uint32_t*>(&pack)[c / 4] ^ 0x80808080u;
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | c % 4)) - 8388736.0f;
}

namespace {

constexpr int kShared = 256;  // from more sampled edges on, the warps of a block share a row

// Maximum rows per warp: its lanes hold the row starts and the end of the last row.
constexpr int kMostRows = 8;

// A warp takes `warp_rows` consecutive rows. Afterwards the warps of the block share long ones.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sampled_spmm_kernel(SampledSpmm p, const void* x_self, const RowSample<I>* table, Shape s,
                        int warp_rows) {
  using Row = SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED>;
  using Edge = typename Row::Edge;
  using Sum = typename Row::Sum;
  using Acc = acc_t<T>;
  __shared__ Sum partial[kWarps][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t block_row = static_cast<int64_t>(blockIdx.x) * kWarps * warp_rows;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const bool weighs = scales_sums(p.sampling) && !p.mean;

  const auto sampled_row = [&](int64_t row) {
    const I begin = rowptr[row], end = rowptr[row + 1];
    const auto sample = table ? table[row] : default_sample<I>(p.sampling, end - begin);
    return SampledRow<I>(p.sampling, begin, end, sample);
  };
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Row kernel(p, x_self, tile);
    const auto load = [&](Edge& edge, const SampledRow<I>& of, I k) {
      if (k >= of.count) return;
      const I e = of.edge(k);
      edge.load(kernel, e, e + 1);
    };
    const auto finish = [&](int64_t row, const SampledRow<I>& of, Sum& sum) {
      if (weighs && of.degree > of.count) {
        const Acc factor = sum_scale<Acc>(p.sampling, of.degree);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum.data[c] *= factor;
      }
      kernel.finish(row, of.count, sum);
    };

    const int64_t first_row = block_row + static_cast<int64_t>(warp) * warp_rows;
    const int64_t left_rows = p.csr.num_rows - first_row;
    const int rows = static_cast<int>(left_rows < warp_rows ? left_rows : warp_rows);
    I begins = 0;
    RowSample<I> samples{0, 1};
    if (lane <= rows) begins = rowptr[first_row + lane];
    if (table && lane < rows) samples = table[first_row + lane];
    Edge edge;
    SampledRow<I> next;
    const auto open = [&](int r) {
      if (r >= rows) return;
      const I begin = __shfl_sync(kWarpMask, begins, r);
      const I end = __shfl_sync(kWarpMask, begins, r + 1);
      RowSample<I> sample = default_sample<I>(p.sampling, end - begin);
      if (table) {
        sample.offset = __shfl_sync(kWarpMask, samples.offset, r);
        sample.stride = __shfl_sync(kWarpMask, samples.stride, r);
      }
      next = SampledRow<I>(p.sampling, begin, end, sample);
      load(edge, next, lane);
    };
    open(0);
    for (int r = 0; r < rows; ++r) {
      const SampledRow<I> row = next;
      if (row.count > kShared) {
        open(r + 1);
        continue;
      }
      Sum sum = kernel.empty(0);
      for (I base = 0; base < row.count; base += 32) {
        const Edge now = edge;
        const int left = static_cast<int>(row.count - base);
        // Prefetches the next row's first edges while this row is summed.
        if (left > 32) load(edge, row, base + 32 + lane);
        else open(r + 1);
        kernel.add(now, base, left < 32 ? left : 32, sum);
      }
      if (row.count == 0) open(r + 1);
      kernel.reduce(sum);
      if (lane < LANES) finish(first_row + r, row, sum);
    }

    if (p.sampling.num_samples <= kShared) continue;
    for (int r = 0; r < kWarps * warp_rows && block_row + r < p.csr.num_rows; ++r) {
      const SampledRow<I> row = sampled_row(block_row + r);
      if (row.count <= kShared) continue;
      const I share = (row.count / kWarps + 32) / 32 * 32;
      const I first = share * warp;
      const I last = row.count - first > share ? first + share : row.count;
      Sum sum = kernel.empty(0);
      if (first < last) load(edge, row, first + lane);
      for (I base = first; base < last; base += 32) {
        const Edge now = edge;
        const I left = last - base;
        load(edge, row, base + 32 + lane);
        kernel.add(now, base, left < 32 ? static_cast<int>(left) : 32, sum);
      }
      kernel.reduce(sum);
      if (lane < LANES) partial[warp][lane] = sum;
      __syncthreads();
      if (threadIdx.x < LANES) {
        sum = partial[0][lane];
        for (int w = 1; w < kWarps; ++w) kernel.merge(sum, partial[w][lane]);
        finish(block_row + r, row, sum);
      }
      __syncthreads();
    }
  }
}

// A pass over x pays if each row is read many times. Not for fp16 and bf16, which would round.
bool wants_scaled_rows(const SampledSpmm& p) {
  const int64_t edges = most_edges(p.csr, p.sampling);
  return p.col_scale && !p.value && !p.quantized &&
         (p.dtype == DType::f32 || p.dtype == DType::f64) && edges >= 12 * p.csr.num_cols &&
         edges >= (1 << 20);
}

template <typename T, typename I>
const char* run(SampledSpmm p, void* scratch, cudaStream_t stream) {
  const RowSample<I>* table = row_samples<I>(p.csr, p.sampling, scratch, stream);
  const void* x_self = p.x;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (wants_scaled_rows(p)) {
      T* scaled = reinterpret_cast<T*>(static_cast<char*>(scratch) +
                                       aligned(sampling_scratch(p.csr, p.sampling)));
      scale_rows(static_cast<const T*>(p.x), static_cast<const T*>(p.col_scale), scaled,
                 p.csr.num_cols, p.dim, stream);
      p.x = scaled;
      p.col_scale = nullptr;
    }
  }
  const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
  Shape s = shape_of<T>(p.csr, p.dim, vectors);
  // Rows are about equally long: use enough rows per warp to hide its startup while enough blocks remain
  // to fill the GPU.
  int warp_rows = 1;
  while (warp_rows < kMostRows && p.csr.num_rows * s.tiles / (kWarps * warp_rows) >= 4800)
    warp_rows *= 2;
  s.block_rows = kWarps * warp_rows;
  const dim3 grid = s.grid(p.csr.num_rows);
  dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
    if constexpr (sizeof(I) == 4) {
      if (!is_weighted(p)) {
        sampled_spmm_kernel<T, I, vec, lanes, strided, false>
            <<<grid, kThreads, 0, stream>>>(p, x_self, table, s, warp_rows);
        return;
      }
    }
    sampled_spmm_kernel<T, I, vec, lanes, strided, true>
        <<<grid, kThreads, 0, stream>>>(p, x_self, table, s, warp_rows);
  });
  return last_error();
}

}  // namespace

int64_t sampling_scratch(const Csr& csr, const Sampling& s) {
  return needs_table(s) ? csr.num_rows * (csr.index64 ? 16 : 8) : 0;
}

int64_t sampled_spmm_scratch(const SampledSpmm& p) {
  const int64_t table = sampling_scratch(p.csr, p.sampling);
  return wants_scaled_rows(p) ? aligned(table) + p.csr.num_cols * p.dim * acc_bytes(p.dtype)
                              : table;
}

const char* sampled_spmm(const SampledSpmm& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.quantized) {
    return p.csr.index64 ? run<int8_t, int64_t>(p, scratch, stream)
                         : run<int8_t, int32_t>(p, scratch, stream);
  }
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    return run<decltype(element), decltype(index)>(p, scratch, stream);
  });
}

}  // namespace pyg_fast::cuda
