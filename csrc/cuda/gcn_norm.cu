// The symmetric normalisation of a GCN.
#include "coo.cuh"
#include "params/gcn_norm.h"
#include "params/runtime.h"

namespace pyg_fast::cuda {
namespace {

template <typename Degree>
__global__ void __launch_bounds__(kThreads) gcn_init_kernel(GcnDegree p, Degree* sum) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (first == 0) p.counts[0] = p.counts[1] = 0;
  for (int64_t i = first; i < p.coo.num_dst; i += step) {
    sum[i] = 0;
    if (p.last) p.last[i] = 0;
  }
}

static_assert(kLoopChunk == 32 * kUnroll, "a warp reads a chunk at once");

// Calls f(first edge) for each chunk, in all threads of the warp that owns the chunk.
template <typename F>
__device__ inline void for_chunks(int64_t num_edges, const F& f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kLoopChunk;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kLoopChunk;
  for (; first < num_edges; first += step) f(first);
}

// Loads every 32nd edge of the chunk. Edges past the end are neither used nor loops. All loads are in
// flight at once, also in a short last chunk.
template <typename I>
__device__ inline void load_chunk(const Coo& coo, int64_t first, CooEdge (&edge)[kUnroll]) {
  const int64_t e = first + (threadIdx.x & 31), last = coo.num_edges - 1;
  I src[kUnroll], dst[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = e + 32 * u < last ? e + 32 * u : last;
    src[u] = load_once(static_cast<const I*>(coo.src) + at);
    dst[u] = load_once(static_cast<const I*>(coo.dst) + at);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const bool listed = e + 32 * u <= last;
    edge[u] = coo_edge(coo, listed ? src[u] : -1, dst[u]);
    edge[u].invalid &= listed;
  }
}

__device__ inline bool is_loop(const CooEdge& edge) {
  return !edge.invalid && edge.src >= 0 && edge.src == edge.dst;
}

// Adds a warp's values to the degrees of their destinations. If all destinations are equal, as in sorted
// lists, it adds once: atomics on one address serialize.
template <typename Degree>
__device__ inline void add_degree(Degree* degree, const CooEdge& edge, Degree v) {
  const int64_t first = __shfl_sync(kWarpMask, edge.dst, 0);
  if (!__all_sync(kWarpMask, edge.used && edge.dst == first)) {
    if (edge.used) atomicAdd(degree + edge.dst, v);
    return;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(kWarpMask, v, offset);
  if ((threadIdx.x & 31) == 0) atomicAdd(degree + first, v);
}

// In float64: the terms of a hub add up one after another.
template <typename T, typename I, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads)
    gcn_degree_kernel(GcnDegree p, std::conditional_t<WEIGHTED, double, int>* sum,
                      int64_t* record) {
  using Degree = std::conditional_t<WEIGHTED, double, int>;
  using Value = std::conditional_t<WEIGHTED, acc_t<T>, int>;
  const int lane = threadIdx.x & 31;
  const auto add = [](int64_t* counter, int n) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
  };
  int64_t invalid_edge = -1;
  for_chunks(p.coo.num_edges, [&](int64_t first) {
    CooEdge edge[kUnroll];
    Value v[kUnroll];
    load_chunk<I>(p.coo, first, edge);
    int invalid = 0, loops = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = 1;
      if constexpr (WEIGHTED)
        if (edge[u].used) v[u] = to_acc(static_cast<const T*>(p.value)[first + 32 * u + lane]);
      invalid += __popc(__ballot_sync(kWarpMask, edge[u].invalid));
      loops += __popc(__ballot_sync(kWarpMask, is_loop(edge[u])));
    }
    if (invalid > 0) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (edge[u].invalid) invalid_edge = first + 32 * u + lane;
    }
    if (lane == 0) {
      if (invalid > 0) add(p.counts, invalid);
      if (loops > 0) add(p.counts + 1, loops);
      if (p.chunk_loops) p.chunk_loops[first / kLoopChunk] = loops;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (p.last && is_loop(edge[u]))
        atomicMax(reinterpret_cast<unsigned long long*>(p.last) + edge[u].dst,
                  static_cast<unsigned long long>(first + 32 * u + lane + 1));
      add_degree(sum, edge[u], static_cast<Degree>(v[u]));
    }
  });
  record_edge<I>(p.coo, record, invalid_edge);
}

__global__ void __launch_bounds__(kThreads)
    gcn_round_kernel(const double* sum, float* degree, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step)
    degree[i] = static_cast<float>(sum[i]);
}

template <typename Acc>
__device__ inline Acc inverse_root(Acc degree) {
  if (degree == 0) return 0;
  if constexpr (std::is_same_v<Acc, double>) return 1 / sqrt(degree);
  else return rsqrtf(degree);
}

// Returns scale[i], and writes loop[i] to `loop`.
template <typename T, bool WEIGHTED>
__device__ inline acc_t<T> gcn_scale(const GcnWeight& p, int64_t i, acc_t<T>& loop) {
  using Acc = acc_t<T>;
  using Degree = std::conditional_t<WEIGHTED, Acc, int>;
  loop = p.loops ? static_cast<Acc>(p.fill_value) : Acc(0);
  if constexpr (WEIGHTED) {
    const int64_t last = p.last ? p.last[i] : 0;
    if (last > 0) loop = to_acc(static_cast<const T*>(p.value)[last - 1]);
  }
  return inverse_root(static_cast<Acc>(static_cast<const Degree*>(p.degree)[i]) + loop);
}

// The scales, and the loops after the edges.
template <typename T, typename I, bool WEIGHTED>
__device__ inline void gcn_nodes(const GcnWeight& p) {
  using Acc = acc_t<T>;
  const int64_t total = p.num_kept + p.coo.num_dst;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  I* edge_index = static_cast<I*>(p.edge_index);
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.coo.num_dst;
       i += step) {
    Acc loop;
    const Acc scale = gcn_scale<T, WEIGHTED>(p, i, loop);
    static_cast<Acc*>(p.scale)[i] = scale;
    if (!p.loops) continue;
    const int64_t k = p.num_kept + i;
    static_cast<T*>(p.weight)[k] = from_acc<T>(scale * loop * scale);
    edge_index[k] = edge_index[total + k] = static_cast<I>(i);
  }
}

template <typename T, typename I>
__global__ void __launch_bounds__(kThreads) gcn_nodes_kernel(GcnWeight p) {
  gcn_nodes<T, I, true>(p);
}

// The edges of a chunk, and the place of each among the edges that are no loops (without `before`, among
// all), -1 for none. The place is in range even if `before` belongs to another graph.
template <typename I>
__device__ inline void place_chunk(const Coo& coo, const int64_t* before, int64_t num_kept,
                                   int64_t first, CooEdge (&edge)[kUnroll],
                                   int64_t (&place)[kUnroll]) {
  const int lane = threadIdx.x & 31;
  int64_t next = first - (before && first > 0 ? before[first / kLoopChunk - 1] : 0);
  load_chunk<I>(coo, first, edge);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const bool kept = first + 32 * u + lane < coo.num_edges && !(before && is_loop(edge[u]));
    const unsigned set = __ballot_sync(kWarpMask, kept);
    const int64_t k = next + __popc(set & ((1u << lane) - 1));
    place[u] = kept && k >= 0 && k < num_kept ? k : -1;
    next += __popc(set);
  }
}

// Computes scales on use, which saves a launch, unless they need the last loops.
template <typename T, typename I, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads) gcn_weight_kernel(GcnWeight p) {
  using Acc = acc_t<T>;
  using Degree = std::conditional_t<WEIGHTED, Acc, int>;
  const int lane = threadIdx.x & 31;
  const int64_t total = p.num_kept + p.coo.num_dst;
  const bool made = WEIGHTED && p.last;
  const Degree* degree = static_cast<const Degree*>(made ? p.scale : p.degree);
  const Acc loop = p.loops ? static_cast<Acc>(p.fill_value) : Acc(0);
  const auto scale = [&](Degree v) -> Acc {
    return made ? static_cast<Acc>(v) : inverse_root(static_cast<Acc>(v) + loop);
  };
  I* edge_index = static_cast<I*>(p.edge_index);
  for_chunks(p.num_kept > 0 ? p.coo.num_edges : 0, [&](int64_t first) {
    CooEdge edge[kUnroll];
    int64_t place[kUnroll];
    Degree src[kUnroll], dst[kUnroll];
    Acc value[kUnroll];
    place_chunk<I>(p.coo, p.before, p.num_kept, first, edge, place);
    // Reads all before writing: many loads are in flight.
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool used = place[u] >= 0 && edge[u].used;
      src[u] = used ? degree[edge[u].src] : Degree(0);
      dst[u] = used ? degree[edge[u].dst] : Degree(0);
      value[u] = used;
      if constexpr (WEIGHTED)
        if (used) value[u] = to_acc(static_cast<const T*>(p.value)[first + 32 * u + lane]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (place[u] < 0) continue;
      const Acc w = edge[u].used ? scale(src[u]) * scale(dst[u]) * value[u] : Acc(0);
      static_cast<T*>(p.weight)[place[u]] = from_acc<T>(w);
      if (!p.loops) continue;
      edge_index[place[u]] = static_cast<I>(edge[u].src);
      edge_index[total + place[u]] = static_cast<I>(edge[u].dst);
    }
  });
  if (!made) gcn_nodes<T, I, WEIGHTED>(p);
}

template <typename T, typename I>
__global__ void __launch_bounds__(kThreads) gcn_weight_backward_kernel(GcnWeightBackward p) {
  using Acc = acc_t<T>;
  const T* grad = static_cast<const T*>(p.grad);
  const Acc* scale = static_cast<const Acc*>(p.scale);
  const Acc* grad_degree = static_cast<const Acc*>(p.grad_degree);
  for_chunks(p.coo.num_edges, [&](int64_t first) {
    CooEdge edge[kUnroll];
    int64_t place[kUnroll];
    Acc g[kUnroll], src[kUnroll], dst[kUnroll], rest[kUnroll];
    place_chunk<I>(p.coo, p.before, p.num_kept, first, edge, place);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (place[u] < 0 && is_loop(edge[u])) place[u] = p.num_kept + edge[u].dst;
      const bool used = place[u] >= 0 && edge[u].used;
      g[u] = used ? to_acc(grad[place[u]]) : Acc(0);
      src[u] = used ? scale[edge[u].src] : Acc(0);
      dst[u] = used ? scale[edge[u].dst] : Acc(0);
      rest[u] = used ? grad_degree[edge[u].dst] : Acc(0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t e = first + 32 * u + (threadIdx.x & 31);
      if (e >= p.coo.num_edges) continue;
      static_cast<T*>(p.out)[e] = from_acc<T>(g[u] * src[u] * dst[u] + rest[u]);
    }
  });
}

}  // namespace

int64_t gcn_degree_scratch(const GcnDegree& p) {
  return p.weighted && p.dtype != DType::f64 ? p.coo.num_dst * static_cast<int64_t>(sizeof(double))
                                             : 0;
}

const char* gcn_degree(const GcnDegree& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned nodes = blocks_for(p.coo.num_dst);
    const unsigned edges = blocks_for(32 * loop_chunks(p.coo.num_edges));
    int64_t* const record = error_record();
    if (p.weighted) {
      constexpr bool rounds = !std::is_same_v<T, double>;
      double* sum = static_cast<double*>(rounds ? scratch : p.degree);
      gcn_init_kernel<<<nodes, kThreads, 0, stream>>>(p, sum);
      gcn_degree_kernel<T, I, true><<<edges, kThreads, 0, stream>>>(p, sum, record);
      if constexpr (rounds)
        gcn_round_kernel<<<nodes, kThreads, 0, stream>>>(sum, static_cast<float*>(p.degree),
                                                         p.coo.num_dst);
    } else if constexpr (std::is_same_v<T, float>) {
      int* count = static_cast<int*>(p.degree);
      gcn_init_kernel<<<nodes, kThreads, 0, stream>>>(p, count);
      gcn_degree_kernel<T, I, false><<<edges, kThreads, 0, stream>>>(p, count, record);
    }
    return last_error();
  });
}

const char* gcn_weight(const GcnWeight& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const int64_t threads = p.num_kept > 0 ? 32 * loop_chunks(p.coo.num_edges) : 0;
    if (p.last) gcn_nodes_kernel<T, I><<<blocks_for(p.coo.num_dst), kThreads, 0, stream>>>(p);
    const unsigned blocks = blocks_for(threads > p.coo.num_dst ? threads : p.coo.num_dst);
    if (p.weighted) gcn_weight_kernel<T, I, true><<<blocks, kThreads, 0, stream>>>(p);
    else gcn_weight_kernel<T, I, false><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

const char* gcn_weight_backward(const GcnWeightBackward& p, void* stream_) {
  if (p.coo.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned blocks = blocks_for(32 * loop_chunks(p.coo.num_edges));
    gcn_weight_backward_kernel<T, I><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
