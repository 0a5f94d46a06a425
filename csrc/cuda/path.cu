// Rows of execution paths: expand to all rows, count nonzero rows outside, dropout by node.
#include "common.cuh"
#include "params/dropout.h"
#include "params/path.h"

namespace pyg_fast::cuda {
namespace {

// How threads cover rows: a row has as many lanes as vectors, a power of two up to a warp. STRIDED as in
// Columns, with a number of lanes that the launch decides.
template <int VEC, bool STRIDED>
struct RowLanes {
  int64_t dim;
  int lanes = 1;
  int64_t row_step = 0;

  RowLanes(int64_t dim, unsigned blocks) : dim(dim) {
    while (lanes < 32 && lanes * VEC < dim) lanes *= 2;
    row_step = static_cast<int64_t>(blocks) * (kThreads / lanes);
  }

  __device__ int64_t first_row() const {
    return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  }
  __device__ int lane() const { return threadIdx.x & (lanes - 1); }
  __device__ int64_t first_column() const { return STRIDED ? lane() : lane() * VEC; }
  __device__ int64_t step() const { return lanes * VEC; }

  // Number k of a thread's columns from `c` on, and whether it exists.
  __device__ int64_t column(int64_t c, int k) const { return STRIDED ? c + k * lanes : c + k; }
  __device__ bool has(int64_t c, int k) const { return !STRIDED || column(c, k) < dim; }

  template <typename T>
  __device__ Pack<T, VEC, STRIDED> load(const T* row, int64_t c) const {
    if constexpr (!STRIDED) {
      return pyg_fast::cuda::load<T, VEC>(row + c);
    } else {
      Pack<T, VEC, true> pack;
#pragma unroll
      for (int k = 0; k < VEC; ++k) pack.data[k] = has(c, k) ? __ldg(row + column(c, k)) : T{};
      return pack;
    }
  }

  template <typename T>
  __device__ void store(T* row, int64_t c, const Pack<T, VEC, STRIDED>& pack) const {
    if constexpr (!STRIDED) {
      pyg_fast::cuda::store<T, VEC>(row + c, pack);
    } else {
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        if (has(c, k)) row[column(c, k)] = pack.data[k];
      }
    }
  }
};

template <typename T, typename I, int VEC, bool STRIDED>
__global__ void __launch_bounds__(kThreads)
    expand_rows_kernel(ExpandRows p, RowLanes<VEC, STRIDED> r) {
  const T fill = from_acc<T>(static_cast<acc_t<T>>(p.fill));
  for (int64_t row = r.first_row(); row < p.num_rows; row += r.row_step) {
    const int64_t from = static_cast<int64_t>(static_cast<const I*>(p.position)[row]);
    const bool there = from >= 0 && from < p.num_x;
    for (int64_t c = r.first_column(); c < p.dim; c += r.step()) {
      Pack<T, VEC, STRIDED> pack;
      if (there) {
        pack = r.load(static_cast<const T*>(p.x) + from * p.dim, c);
      } else {
#pragma unroll
        for (int k = 0; k < VEC; ++k) pack.data[k] = fill;
      }
      r.store(static_cast<T*>(p.out) + row * p.dim, c, pack);
    }
  }
}

template <typename T, typename I, int VEC, bool STRIDED>
__global__ void __launch_bounds__(kThreads)
    count_outside_kernel(CountOutside p, RowLanes<VEC, STRIDED> r) {
  __shared__ unsigned found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const unsigned of_row = (r.lanes < 32 ? (1u << r.lanes) - 1 : ~0u)
                          << (threadIdx.x & 31 & ~(r.lanes - 1));
  // All threads of a warp continue: they vote.
  int64_t row = r.first_row();
  for (; __any_sync(kWarpMask, row < p.num_rows); row += r.row_step) {
    bool any = false;
    if (row < p.num_rows && static_cast<const I*>(p.position)[row] < 0) {
      for (int64_t c = r.first_column(); c < p.dim; c += r.step()) {
        const auto pack = r.load(static_cast<const T*>(p.x) + row * p.dim, c);
#pragma unroll
        for (int k = 0; k < VEC; ++k) any = any || to_acc(pack.data[k]) != 0;
      }
    }
    const unsigned votes = __ballot_sync(kWarpMask, any);
    if (r.lane() == 0 && (votes & of_row)) atomicAdd(&found, 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0 && found > 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counter), found);
}

template <typename T, int VEC, bool STRIDED>
__global__ void __launch_bounds__(kThreads)
    node_dropout_kernel(NodeDropout p, RowLanes<VEC, STRIDED> r, uint32_t threshold,
                        acc_t<T> scale) {
  const auto seed = static_cast<uint64_t>(*p.seed);
  for (int64_t row = r.first_row(); row < p.num_rows; row += r.row_step) {
    const uint32_t bits = edge_bits(seed, static_cast<uint64_t>(p.nodes ? p.nodes[row] : row));
    for (int64_t c = r.first_column(); c < p.dim; c += r.step()) {
      auto pack = r.load(static_cast<const T*>(p.x) + row * p.dim, c);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const bool kept = keeps(bits, static_cast<uint32_t>(r.column(c, k)), threshold);
        pack.data[k] = from_acc<T>(kept ? to_acc(pack.data[k]) * scale : acc_t<T>(0));
      }
      r.store(static_cast<T*>(p.out) + row * p.dim, c, pack);
    }
  }
}

template <typename T>
bool vectors(int64_t dim, const void* a, const void* b) {
  return dim % kVec<T> == 0 && aligned16(a) && aligned16(b);
}

// Calls run(VEC, STRIDED, blocks, RowLanes) for a matrix that is read or written once.
template <typename T, typename Run>
const char* launch(int64_t num_rows, int64_t dim, const void* a, const void* b, const Run& run) {
  const auto with = [&](auto vec, auto strided) {
    const unsigned blocks = blocks_for(num_rows * ((dim + vec - 1) / vec));
    run(vec, strided, blocks, RowLanes<vec, strided>(dim, blocks));
  };
  if (vectors<T>(dim, a, b)) with(std::integral_constant<int, kVec<T>>{}, std::false_type{});
  else with(std::integral_constant<int, kStridedVec<T>>{}, std::true_type{});
  return last_error();
}

}  // namespace

const char* expand_rows(const ExpandRows& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    return launch<T>(p.num_rows, p.dim, p.x, p.out,
                     [&](auto vec, auto strided, unsigned blocks, auto r) {
                       expand_rows_kernel<T, decltype(index), vec, strided>
                           <<<blocks, kThreads, 0, stream>>>(p, r);
                     });
  });
}

const char* count_outside(const CountOutside& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    return launch<T>(p.num_rows, p.dim, p.x, p.x,
                     [&](auto vec, auto strided, unsigned blocks, auto r) {
                       count_outside_kernel<T, decltype(index), vec, strided>
                           <<<blocks, kThreads, 0, stream>>>(p, r);
                     });
  });
}

const char* node_dropout(const NodeDropout& p, void* stream_) {
  if (p.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  const double scale = dropout_scale(p.dropout);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    return launch<T>(
        p.num_rows, p.dim, p.x, p.out, [&](auto vec, auto strided, unsigned blocks, auto r) {
          node_dropout_kernel<T, vec, strided>
              <<<blocks, kThreads, 0, stream>>>(p, r, threshold, static_cast<acc_t<T>>(scale));
        });
  });
}

}  // namespace pyg_fast::cuda
