// Sums and dot products over a coordinate list.
#include "coo.cuh"
#include "params/runtime.h"
#include "params/spmm_coo.h"

namespace pyg_fast::cuda {
namespace {

constexpr int64_t kEnough = 4096;  // warps that fill the GPU

// Counts over the warp and adds to `counter` once. All threads of the warp must call it.
__device__ inline void count_in_warp(int64_t* counter, bool one) {
  const unsigned set = __ballot_sync(kWarpMask, one);
  if (set != 0 && (threadIdx.x & 31) == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter),
              static_cast<unsigned long long>(__popc(set)));
  }
}

// Sums over all edges of a destination add up one by one: float64 keeps them exact.
using Total = double;

// Initializes the sums to diag * x or zeros, and the counter.
template <typename T>
__global__ void __launch_bounds__(kThreads) spmm_coo_init_kernel(SpmmCoo p, Total* sum) {
  const int64_t total = p.coo.num_dst * p.dim, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (first == 0 && p.invalid) *p.invalid = 0;
  for (int64_t k = first; k < total; k += step) {
    sum[k] = p.diag ? Total(static_cast<const acc_t<T>*>(p.diag)[k / p.dim]) *
                          to_acc(static_cast<const T*>(p.x)[k])
                    : Total(0);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    spmm_coo_round_kernel(const Total* sum, T* out, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total; k += step)
    out[k] = from_acc<T>(static_cast<acc_t<T>>(sum[k]));
}

// A warp reads `chunk` edges at once. Each of its slots of LANES threads takes consecutive edges and adds
// to memory when the destination changes, which is rare in sorted lists.
template <typename T, typename I, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads)
    spmm_coo_kernel(SpmmCoo p, Total* out, int chunk, int tiles, int64_t* record) {
  using Acc = acc_t<T>;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  constexpr int kSlots = 32 / LANES;
  const int lane = threadIdx.x & 31, slot = lane / LANES, per_slot = chunk / kSlots;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const T* value = static_cast<const T*>(p.value);
  const Acc* row_scale = static_cast<const Acc*>(p.row_scale);
  const Acc* col_scale = static_cast<const Acc*>(p.col_scale);
  int64_t invalid = -1;
  for (int64_t first = warp * chunk; first < p.coo.num_edges; first += warps * chunk) {
    const int64_t e = first + lane;
    const bool listed = lane < chunk && e < p.coo.num_edges;
    CooEdge edge;
    if (listed) edge = coo_edge<I>(p.coo, e);
    if (p.invalid && blockIdx.y == 0) count_in_warp(p.invalid, edge.invalid);
    if (edge.invalid) invalid = e;
    Acc weight = 1;
    if (edge.used) {
      if (value) weight = p.value_acc ? static_cast<const Acc*>(p.value)[e] : to_acc(value[e]);
      if (col_scale) weight *= __ldg(col_scale + edge.src);
      if (row_scale) weight *= __ldg(row_scale + edge.dst);
    }
    const I source = static_cast<I>(edge.src);
    const I target = edge.used ? static_cast<I>(edge.dst) : I(-1);
    for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
      const int64_t column = OfThread::first(tile, lane % LANES);
      const OfThread columns(column, p.dim);
      const bool active = column < p.dim;
      const T* x = static_cast<const T*>(p.x) + column;
      I current = -1;
      Acc sum[VEC];
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum[c] = 0;
      const auto flush = [&] {
        if (!active || current < 0) return;
        Total* to = out + static_cast<int64_t>(current) * p.dim + column;
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          if (columns.has(c)) atomicAdd(to + c * columns.kStep, static_cast<Total>(sum[c]));
        }
      };
#pragma unroll 1
      for (int k = 0; k < per_slot; k += kUnroll) {
        Pack<T, VEC, STRIDED> v[kUnroll];
        I to[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = slot * per_slot + (k + u < per_slot ? k + u : 0);
          const I from = __shfl_sync(kWarpMask, source, at);
          to[u] = __shfl_sync(kWarpMask, target, at);
          if (k + u >= per_slot) to[u] = -1;
          if (active && to[u] >= 0) v[u] = columns.load(x + static_cast<int64_t>(from) * p.dim);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = slot * per_slot + (k + u < per_slot ? k + u : 0);
          const Acc w = __shfl_sync(kWarpMask, weight, at);
          if (!active || to[u] < 0) continue;
          if (to[u] != current) {
            flush();
            current = to[u];
#pragma unroll
            for (int c = 0; c < VEC; ++c) sum[c] = 0;
          }
#pragma unroll
          for (int c = 0; c < VEC; ++c) sum[c] += w * element(v[u], c);
        }
      }
      flush();
    }
  }
  record_edge<I>(p.coo, record, invalid);
}

template <typename T, typename I, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads) sddmm_coo_kernel(SddmmCoo p) {
  using Acc = acc_t<T>;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  constexpr int kSlots = kThreads / LANES;
  const int slot = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const Acc* row_scale = static_cast<const Acc*>(p.row_scale);
  const Acc* col_scale = static_cast<const Acc*>(p.col_scale);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSlots;
  // All threads of a warp take part in its sums, also without an edge.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSlots; first < p.coo.num_edges;
       first += step) {
    const int64_t e = first + slot;
    CooEdge edge;
    if (e < p.coo.num_edges) edge = coo_edge<I>(p.coo, e);
    Acc dot = 0;
    if (edge.used) {
      const T* a = static_cast<const T*>(p.a) + edge.dst * p.dim;
      const T* b = static_cast<const T*>(p.b) + edge.src * p.dim;
#pragma unroll STRIDED ? 2 : 4
      for (int64_t c = OfThread::first(lane); c < p.dim; c += LANES * VEC) {
        const OfThread columns(c, p.dim);
        const auto u = columns.load(a + c), v = columns.load(b + c);
#pragma unroll
        for (int k = 0; k < VEC; ++k) dot += element(u, k) * element(v, k);
      }
    }
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1)
      dot += __shfl_xor_sync(kWarpMask, dot, offset);
    if (e >= p.coo.num_edges || lane != 0) continue;
    if (edge.used && row_scale) dot *= row_scale[edge.dst];
    if (edge.used && col_scale) dot *= col_scale[edge.src];
    static_cast<T*>(p.out)[e] = from_acc<T>(dot);
  }
}

}  // namespace

int64_t spmm_coo_scratch(const SpmmCoo& p) {
  return p.dtype == DType::f64 ? 0 : p.coo.num_dst * p.dim * static_cast<int64_t>(sizeof(Total));
}

const char* spmm_coo(const SpmmCoo& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const int64_t total = p.coo.num_dst * p.dim;
    Total* sum = static_cast<Total*>(p.dtype == DType::f64 ? p.out : scratch);
    if (p.diag || p.invalid) {
      spmm_coo_init_kernel<T><<<blocks_for(total), kThreads, 0, stream>>>(p, sum);
    } else if (total > 0) {
      const cudaError_t error = cudaMemsetAsync(sum, 0, total * sizeof(Total), stream);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    // Without columns the kernel adds nothing, but still checks the edges.
    if (p.coo.num_edges > 0 && (total > 0 || p.invalid || p.report)) {
      int64_t* const record = p.report ? error_record() : nullptr;
      const bool vectors = p.dim > 0 && p.dim % kVec<T> == 0 && aligned16(p.x);
      Csr like;  // for its number of edges
      like.num_edges = p.coo.num_edges;
      const Shape s = shape_of<T>(like, p.dim > 0 ? p.dim : 1, vectors);
      dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
        int chunk = 32;
        while (lanes > 1 && chunk > 8 && p.coo.num_edges / chunk * s.tiles < kEnough) chunk /= 2;
        const int64_t warps = (p.coo.num_edges + chunk - 1) / chunk;
        const dim3 grid(blocks_for(warps * 32), s.tiles < 65535 ? s.tiles : 65535);
        spmm_coo_kernel<T, I, vec, lanes, strided>
            <<<grid, kThreads, 0, stream>>>(p, sum, chunk, s.tiles, record);
      });
    }
    if constexpr (!std::is_same_v<T, double>) {
      if (total > 0)
        spmm_coo_round_kernel<T>
            <<<blocks_for(total), kThreads, 0, stream>>>(sum, static_cast<T*>(p.out), total);
    }
    return last_error();
  });
}

const char* sddmm_coo(const SddmmCoo& p, void* stream_) {
  if (p.coo.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const auto run = [&](auto* kernel, int lanes) {
      kernel<<<blocks_for(p.coo.num_edges * lanes), kThreads, 0, stream>>>(p);
    };
    if (p.dim % kVec<T> == 0 && aligned16(p.a) && aligned16(p.b)) {
      run(sddmm_coo_kernel<T, I, kVec<T>, 8, false>, 8);
    } else if (p.dim == 1) {
      run(sddmm_coo_kernel<T, I, 1, 1, false>, 1);
    } else {
      run(sddmm_coo_kernel<T, I, kStridedVec<T>, 8, true>, 8);
    }
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
