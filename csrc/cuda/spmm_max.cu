// Max and min aggregation with the edge that holds the result, and its gradients.
#include "params/spmm_max.h"
#include "rows.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kUnroll = 4;  // loads in flight per thread

// Computes minima as maxima of the negated values.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
struct MaxRow {
  using Acc = acc_t<T>;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  static constexpr bool kSharedSums = false;
  // `edge`: -1 until a value exceeds -inf.
  struct Sum {
    Acc value[VEC];
    I edge[VEC];
  };
  struct Edge {
    Col source = 0;
    Acc weight = 1;

    __device__ void load(const MaxRow& row, I e, I end) {
      if (e >= end) return;
      const SpmmMax& p = row.p;
      source = load_once(static_cast<const Col*>(p.csr.col) + e);
      if constexpr (WEIGHTED) {
        weight = p.minimum ? Acc(-1) : Acc(1);
        if (p.value) {
          const I v = p.csr.perm ? load_once(static_cast<const I*>(p.csr.perm) + e) : e;
          weight *= to_acc(static_cast<const T*>(p.value)[v]);
        }
      }
    }
  };

  const SpmmMax& p;
  const char* x;  // at this thread's column
  uint32_t row_bytes;
  int64_t column;  // the first of this thread
  bool active;
  OfThread columns;

  __device__ MaxRow(const SpmmMax& p, int tile)
      : p(p), column(OfThread::first(tile, threadIdx.x % LANES)), columns(column, p.dim) {
    active = column < p.dim;
    row_bytes = static_cast<uint32_t>(p.dim * sizeof(T));
    // Threads past the last column read the first column and write nothing.
    x = static_cast<const char*>(p.x) + (active ? column : 0) * sizeof(T);
    asm("" : "+l"(x));  // one pointer, instead of a base and an offset added at every load
  }

  __device__ Sum empty(int64_t) const {
    Sum best;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      best.value[c] = -static_cast<Acc>(INFINITY);
      best.edge[c] = -1;
    }
    return best;
  }

  // A slot processes its edges in order: a later edge must be larger to win. The first NaN beats all
  // numbers and stays. Past the end it rereads the last edge, which changes nothing.
  __device__ void add(const Edge& edge, I base, int count, Sum& best) const {
    constexpr int kSlots = 32 / LANES;
    constexpr int kSteps = LANES < kUnroll ? LANES : kUnroll;
    const int slot = (threadIdx.x & 31) / LANES;
#pragma unroll 1
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Pack<T, VEC, STRIDED> v[kSteps];
      Col source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u)
        v[u] = columns.load(reinterpret_cast<const T*>(row_at(x, source[u], row_bytes)));
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot, at = e < count ? e : count - 1;
        const Acc weight = WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, at) : Acc(1);
        const I position = base + static_cast<I>(at);
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          const Acc term = element(v[u], c) * weight;
          const bool wins = !(term <= best.value[c]) && best.value[c] == best.value[c];
          best.value[c] = wins ? term : best.value[c];
          best.edge[c] = wins ? position : best.edge[c];
        }
      }
    }
  }

  // Combines two parts of a row; for equal values the lower edge wins.
  __device__ static void combine(Acc& value, I& edge, Acc other_value, I other_edge) {
    const bool nan = value != value, other_nan = other_value != other_value;
    const bool same = nan ? other_nan : other_value == value;
    const bool larger = nan ? false : other_nan || other_value > value;
    if (other_edge >= 0 && (edge < 0 || larger || (same && other_edge < edge))) {
      value = other_value;
      edge = other_edge;
    }
  }

  __device__ void reduce(Sum& best) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const Acc value = __shfl_xor_sync(kWarpMask, best.value[c], offset);
        const I edge = __shfl_xor_sync(kWarpMask, best.edge[c], offset);
        combine(best.value[c], best.edge[c], value, edge);
      }
    }
  }

  __device__ void merge(Sum& best, const Sum& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c)
      combine(best.value[c], best.edge[c], other.value[c], other.edge[c]);
  }

  __device__ void finish(int64_t row, int64_t degree, const Sum& best) const {
    if (!active) return;
    const I first = static_cast<const I*>(p.csr.rowptr)[row];
    Pack<T, VEC, STRIDED> out;
    Pack<I, VEC, STRIDED> arg;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      // If no value exceeds -inf, the whole row is -inf: take its first edge.
      const Acc value = degree == 0 ? Acc(0) : best.value[c];
      out.data[c] = from_acc<T>(p.minimum && degree > 0 ? -value : value);
      arg.data[c] = degree == 0 ? I(-1) : best.edge[c] < 0 ? first : best.edge[c];
    }
    columns.store(static_cast<T*>(p.out) + row * p.dim + column, out);
    columns.store(static_cast<I*>(p.arg) + row * p.dim + column, arg);
  }
};

template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, VEC == 8 ? 3 : 4) spmm_max_kernel(SpmmMax p, Shape s) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    MaxRow<T, I, VEC, LANES, STRIDED, WEIGHTED> row(p, tile);
    for_each_row<I, LANES>(p.csr, s, row);
  }
}

// One thread per (row, column): adds to the row of x that holds the maximum.
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads) backward_x_kernel(SpmmMaxBackwardX p, acc_t<T>* sum) {
  const Col* col = static_cast<const Col*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const I* arg = static_cast<const I*>(p.arg);
  const T* grad = static_cast<const T*>(p.grad);
  const T* value = static_cast<const T*>(p.value);
  const int64_t total = p.csr.num_rows * p.dim, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total; k += step) {
    const I e = load_once(arg + k);
    if (e < 0) continue;
    acc_t<T> g = to_acc(grad[k]);
    if (value) g *= to_acc(value[perm ? perm[e] : e]);
    atomicAdd(sum + static_cast<int64_t>(col[e]) * p.dim + k % p.dim, g);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) round_kernel(const float* in, T* out, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total; k += step)
    out[k] = from_acc<T>(in[k]);
}

// One warp per source j walks its outgoing edges and sums the gradients they won, in a fixed order.
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads) backward_x_ordered_kernel(SpmmMaxBackwardX p,
                                                                      Csr transposed) {
  const I* t_rowptr = static_cast<const I*>(transposed.rowptr);
  const Col* t_col = static_cast<const Col*>(transposed.col);
  const I* position = static_cast<const I*>(transposed.perm);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const I* arg = static_cast<const I*>(p.arg);
  const T* grad = static_cast<const T*>(p.grad);
  const T* value = static_cast<const T*>(p.value);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; j < p.csr.num_cols;
       j += step) {
    const I begin = t_rowptr[j], end = t_rowptr[j + 1];
    for (int64_t c = threadIdx.x & 31; c < p.dim; c += 32) {
      acc_t<T> sum = 0;
      for (I k = begin; k < end; ++k) {
        const int64_t at = static_cast<int64_t>(t_col[k]) * p.dim + c;
        const I e = position ? position[k] : k;
        if (arg[at] != e) continue;
        acc_t<T> g = to_acc(grad[at]);
        if (value) g *= to_acc(value[perm ? perm[e] : e]);
        sum += g;
      }
      static_cast<T*>(p.grad_x)[j * p.dim + c] = from_acc<T>(sum);
    }
  }
}

}  // namespace

const char* spmm_max(const SpmmMax& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    const Shape s = shape_of<T>(p.csr, p.dim, vectors);
    const dim3 grid = s.grid(p.csr.num_rows);
    const bool weighted = p.value || p.minimum || sizeof(I) == 8;
    dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
      if constexpr (sizeof(I) == 4) {
        if (!weighted) {
          spmm_max_kernel<T, I, vec, lanes, strided, false><<<grid, kThreads, 0, stream>>>(p, s);
          return;
        }
      }
      spmm_max_kernel<T, I, vec, lanes, strided, true><<<grid, kThreads, 0, stream>>>(p, s);
    });
    return last_error();
  });
}

int64_t spmm_max_backward_x_scratch(const SpmmMaxBackwardX& p) {
  const bool half = p.dtype == DType::f16 || p.dtype == DType::bf16;
  return half ? p.csr.num_cols * p.dim * static_cast<int64_t>(sizeof(float)) : 0;
}

const char* spmm_max_backward_x(const SpmmMaxBackwardX& p, void* scratch, void* stream_) {
  const int64_t total = p.csr.num_cols * p.dim;
  if (total == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    using Acc = acc_t<T>;
    constexpr bool half = !std::is_same_v<T, Acc>;
    Acc* sum = static_cast<Acc*>(half ? scratch : p.grad_x);
    const cudaError_t error = cudaMemsetAsync(sum, 0, total * sizeof(Acc), stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (p.csr.num_rows > 0)
      backward_x_kernel<T, I><<<blocks_for(p.csr.num_rows * p.dim), kThreads, 0, stream>>>(p, sum);
    if constexpr (half)
      round_kernel<T><<<blocks_for(total), kThreads, 0, stream>>>(sum, static_cast<T*>(p.grad_x), total);
    return last_error();
  });
}

const char* spmm_max_backward_x_ordered(const SpmmMaxBackwardX& p, const Csr& transposed,
                                        void* stream_) {
  if (p.csr.num_cols == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    backward_x_ordered_kernel<T, I>
        <<<blocks_for(p.csr.num_cols * 32), kThreads, 0, stream>>>(p, transposed);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
