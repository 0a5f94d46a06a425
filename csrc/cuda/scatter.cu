// Sums and dot products over a coordinate list, and the normalisation of a GCN.
#include "common.cuh"
#include "cuda.h"
#include "record.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kUnroll = 4;         // loads in flight per thread
constexpr int64_t kEnough = 4096;  // warps that keep the chip busy

struct CooEdge {
  int64_t src = -1, dst = -1;
  bool invalid = false;
  bool used = false;
};

__device__ inline CooEdge coo_edge(const Coo& coo, int64_t src, int64_t dst) {
  CooEdge edge;
  edge.src = src;
  edge.dst = dst;
  edge.invalid = src < 0 || src >= coo.num_src || dst < 0 || dst >= coo.num_dst;
  edge.used = !edge.invalid && !(coo.drop_loops && src == dst);
  return edge;
}

template <typename I>
__device__ inline CooEdge coo_edge(const Coo& coo, int64_t e) {
  return coo_edge(coo, load_once(static_cast<const I*>(coo.src) + e),
                  load_once(static_cast<const I*>(coo.dst) + e));
}

// Of the invalid edge `e`, -1: none. By its place, once all edges were seen: edges that wait to be
// recorded would cost the loop its registers.
template <typename I>
__device__ inline void record_edge(const Coo& coo, int64_t* record, int64_t e) {
  if (e < 0) return;
  const CooEdge edge = coo_edge<I>(coo, e);
  if (coo.reversed) record_ends(record, edge.dst, coo.num_dst, edge.src, coo.num_src);
  else record_ends(record, edge.src, coo.num_src, edge.dst, coo.num_dst);
}

// Adds up over the warp and to `counter` once. For whole warps.
__device__ inline void count_in_warp(int64_t* counter, bool one) {
  const unsigned set = __ballot_sync(kWarpMask, one);
  if (set != 0 && (threadIdx.x & 31) == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter),
              static_cast<unsigned long long>(__popc(set)));
  }
}

// What the edges are added to: diag * x or zeros. And the counter.
template <typename T>
__global__ void __launch_bounds__(kThreads) scatter_init_kernel(Scatter p, acc_t<T>* sum) {
  const int64_t total = p.coo.num_dst * p.dim, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (first == 0 && p.invalid) *p.invalid = 0;
  for (int64_t k = first; k < total; k += step) {
    sum[k] = p.diag ? static_cast<const acc_t<T>*>(p.diag)[k / p.dim] *
                          to_acc(static_cast<const T*>(p.x)[k])
                    : acc_t<T>(0);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) scatter_round_kernel(const float* sum, T* out,
                                                                 int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total; k += step)
    out[k] = from_acc<T>(sum[k]);
}

// A warp reads `chunk` edges at once; each of its slots of LANES threads takes some that follow one
// another, and adds to memory where the destination changes: sorted lists have few such places.
template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads) scatter_kernel(Scatter p, acc_t<T>* out, int chunk,
                                                           int tiles, int64_t* record) {
  using Acc = acc_t<T>;
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
      const int64_t column = (static_cast<int64_t>(tile) * LANES + lane % LANES) * VEC;
      const bool active = column < p.dim;
      const T* x = static_cast<const T*>(p.x) + column;
      I current = -1;
      Acc sum[VEC];
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum[c] = 0;
      const auto flush = [&] {
        if (!active || current < 0) return;
        add_to(out + static_cast<int64_t>(current) * p.dim + column, sum);
      };
#pragma unroll 1
      for (int k = 0; k < per_slot; k += kUnroll) {
        Pack<T, VEC> v[kUnroll];
        I to[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = slot * per_slot + (k + u < per_slot ? k + u : 0);
          const I from = __shfl_sync(kWarpMask, source, at);
          to[u] = __shfl_sync(kWarpMask, target, at);
          if (k + u >= per_slot) to[u] = -1;
          if (active && to[u] >= 0) v[u] = load<T, VEC>(x + static_cast<int64_t>(from) * p.dim);
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

template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads) edge_dot_kernel(EdgeDot p) {
  using Acc = acc_t<T>;
  constexpr int kSlots = kThreads / LANES;
  const int slot = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const Acc* row_scale = static_cast<const Acc*>(p.row_scale);
  const Acc* col_scale = static_cast<const Acc*>(p.col_scale);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSlots;
  // All threads of a warp take part in its sums, also where there is no edge left.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSlots; first < p.coo.num_edges;
       first += step) {
    const int64_t e = first + slot;
    CooEdge edge;
    if (e < p.coo.num_edges) edge = coo_edge<I>(p.coo, e);
    Acc dot = 0;
    if (edge.used) {
      const T* a = static_cast<const T*>(p.a) + edge.dst * p.dim;
      const T* b = static_cast<const T*>(p.b) + edge.src * p.dim;
#pragma unroll 4
      for (int64_t c = lane * VEC; c < p.dim; c += LANES * VEC) {
        const auto u = load<T, VEC>(a + c), v = load<T, VEC>(b + c);
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

template <typename Degree>
__global__ void __launch_bounds__(kThreads) gcn_init_kernel(GcnDegree p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (first == 0) p.counts[0] = p.counts[1] = 0;
  for (int64_t i = first; i < p.coo.num_dst; i += step) {
    static_cast<Degree*>(p.degree)[i] = 0;
    if (p.last) p.last[i] = 0;
  }
}

static_assert(kLoopChunk == 32 * kUnroll, "a warp reads a chunk at once");

// Calls f(first edge) for each chunk: once in all threads of the warp whose chunk it is.
template <typename F>
__device__ inline void for_chunks(int64_t num_edges, const F& f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kLoopChunk;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kLoopChunk;
  for (; first < num_edges; first += step) f(first);
}

// Of the chunk's edges each 32nd; those behind the last are not used and no loops. All loads are in
// flight at once, also where the last chunk is short.
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

template <typename T, typename I, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads) gcn_degree_kernel(GcnDegree p, int64_t* record) {
  using Degree = std::conditional_t<WEIGHTED, acc_t<T>, int>;
  const int lane = threadIdx.x & 31;
  const auto add = [](int64_t* counter, int n) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
  };
  int64_t invalid_edge = -1;
  for_chunks(p.coo.num_edges, [&](int64_t first) {
    CooEdge edge[kUnroll];
    Degree v[kUnroll];
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
      if (edge[u].used) atomicAdd(static_cast<Degree*>(p.degree) + edge[u].dst, v[u]);
    }
  });
  record_edge<I>(p.coo, record, invalid_edge);
}

template <typename Acc>
__device__ inline Acc inverse_root(Acc degree) {
  if (degree == 0) return 0;
  if constexpr (std::is_same_v<Acc, double>) return 1 / sqrt(degree);
  else return rsqrtf(degree);
}

// scale[i], and loop[i] in `loop`.
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

// The scales, and the loops behind the edges.
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

// The edges of a chunk, and the place of each among those that are no loops (without `before`,
// among all), -1 for none. Also where sums of another graph are given, no other place comes out.
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

// Scales are made where they are used, which saves a launch, unless that takes the last loops.
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
    // All is read before any is written: many loads are in flight.
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

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

}  // namespace

int64_t scatter_scratch(const Scatter& p) {
  return is_half(p.dtype) ? p.coo.num_dst * p.dim * static_cast<int64_t>(sizeof(float)) : 0;
}

const char* scatter(const Scatter& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    using Acc = acc_t<T>;
    const int64_t total = p.coo.num_dst * p.dim;
    Acc* sum = static_cast<Acc*>(is_half(p.dtype) ? scratch : p.out);
    if (p.diag || p.invalid) {
      scatter_init_kernel<T><<<blocks_for(total), kThreads, 0, stream>>>(p, sum);
    } else if (total > 0) {
      const cudaError_t error = cudaMemsetAsync(sum, 0, total * sizeof(Acc), stream);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    // Without columns there is nothing to add, but edges to be looked at.
    if (p.coo.num_edges > 0 && (total > 0 || p.invalid || p.report)) {
      int64_t* const record = p.report ? error_record() : nullptr;
      const bool vectors =
          p.dim > 0 && p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(sum);
      Csr like;  // for its number of edges
      like.num_edges = p.coo.num_edges;
      const Shape s = shape_of(like, p.dim > 0 ? p.dim : 1, vectors ? kVec<T> : 1);
      dispatch_shape<kVec<T>>(s, [&](auto vec, auto lanes) {
        int chunk = 32;
        while (lanes > 1 && chunk > 8 && p.coo.num_edges / chunk * s.tiles < kEnough) chunk /= 2;
        const int64_t warps = (p.coo.num_edges + chunk - 1) / chunk;
        const dim3 grid(blocks_for(warps * 32), s.tiles < 65535 ? s.tiles : 65535);
        scatter_kernel<T, I, vec, lanes><<<grid, kThreads, 0, stream>>>(p, sum, chunk, s.tiles,
                                                                       record);
      });
    }
    if constexpr (!std::is_same_v<T, Acc>) {
      if (total > 0)
        scatter_round_kernel<T>
            <<<blocks_for(total), kThreads, 0, stream>>>(sum, static_cast<T*>(p.out), total);
    }
    return last_error();
  });
}

const char* edge_dot(const EdgeDot& p, void* stream_) {
  if (p.coo.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const auto run = [&](auto* kernel, int lanes) {
      kernel<<<blocks_for(p.coo.num_edges * lanes), kThreads, 0, stream>>>(p);
    };
    if (p.dim % kVec<T> == 0 && aligned16(p.a) && aligned16(p.b)) {
      run(edge_dot_kernel<T, I, kVec<T>, 8>, 8);
    } else if (p.dim == 1) {
      run(edge_dot_kernel<T, I, 1, 1>, 1);
    } else {
      run(edge_dot_kernel<T, I, 1, 8>, 8);
    }
    return last_error();
  });
}

const char* gcn_degree(const GcnDegree& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.coo.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const unsigned nodes = blocks_for(p.coo.num_dst);
    const unsigned edges = blocks_for(32 * loop_chunks(p.coo.num_edges));
    int64_t* const record = error_record();
    if (p.weighted) {
      gcn_init_kernel<acc_t<T>><<<nodes, kThreads, 0, stream>>>(p);
      gcn_degree_kernel<T, I, true><<<edges, kThreads, 0, stream>>>(p, record);
    } else if constexpr (std::is_same_v<T, float>) {
      gcn_init_kernel<int><<<nodes, kThreads, 0, stream>>>(p);
      gcn_degree_kernel<T, I, false><<<edges, kThreads, 0, stream>>>(p, record);
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
