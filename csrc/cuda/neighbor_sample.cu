// Sampled mini-batches: which edges to take, and the local ids of the nodes at their ends. One pass
// samples a source and inserts it into the map; the host waits for no size in between.
#include "draw.cuh"
#include "params/neighbor_sample.h"

namespace pyg_fast::cuda {
namespace {

// --- how many -----------------------------------------------------------------------------------

template <typename I>
__device__ inline DrawRow row_of(const SampleHop& p, int64_t node) {
  const int64_t id = p.n_id[node];
  const I* rowptr = static_cast<const I*>(p.graph.rowptr) + id;
  return {p.seed, id, rowptr[0], rowptr[1] - rowptr[0], p.fanout, p.replace, p.weight};
}

template <typename I>
struct EdgesOfNode {
  SampleHop p;

  __device__ int64_t operator()(int64_t k) const {
    const int64_t node = p.first() + k;
    return node < p.last() ? edges_to_draw(row_of<I>(p, node)) : 0;
  }
};

struct StartOfNode {
  SampleHop p;

  __device__ void operator()(int64_t k, int64_t sum) const {
    const int64_t end = p.num_edges[p.hop] + sum;
    const int64_t node = p.first() + k;
    if (k == 0) p.rowptr[node] = static_cast<int32_t>(p.num_edges[p.hop]);
    if (node < p.last()) p.rowptr[node + 1] = static_cast<int32_t>(end);
    if (k == p.max_nodes - 1) p.num_edges[p.hop + 1] = end;
  }
};

// --- which --------------------------------------------------------------------------------------

// Writes the graph's edge at `position` as edge `e` of the batch.
template <typename I>
__device__ inline void emit(const SampleHop& p, int64_t e, int64_t node, int64_t position) {
  const I neighbor = static_cast<I>(column(p.graph, position));
  static_cast<I*>(p.neighbor)[e] = neighbor;
  p.dst[e] = static_cast<int32_t>(node);
  p.e_id[e] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[position] : position;
  insert(p.map, neighbor, p.num_seeds + e);
}

// LANES threads per node.
template <typename I, int LANES>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleHop p) {
  const int lane = threadIdx.x % LANES;
  const unsigned mask =
      LANES == 32 ? kWarpMask : ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kThreads / LANES);
  const int64_t last = p.last();
  for (int64_t node =
           p.first() + (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / LANES;
       node < last; node += groups) {
    const int64_t start = p.rowptr[node];
    const int count = static_cast<int>(p.rowptr[node + 1] - start);
    draw<LANES>(row_of<I>(p, node), start, count, p.dst, mask, lane,
                [&](int64_t e, int64_t position) { emit<I>(p, e, node, position); });
  }
}

// Takes all edges of the rows: one thread per edge, to divide long rows.
template <typename I>
__global__ void __launch_bounds__(kThreads) all_edges_kernel(SampleHop p) {
  const int64_t end = p.num_edges[p.hop + 1], step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = p.first(), last = p.last();
  for (int64_t e = p.num_edges[p.hop] + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       e < end; e += step) {
    int64_t low = first, high = last;  // the last node with edges that begins at or before e
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (p.rowptr[middle] <= e) low = middle;
      else high = middle;
    }
    const int64_t begin = static_cast<const I*>(p.graph.rowptr)[p.n_id[low]];
    emit<I>(p, e, low, begin + (e - p.rowptr[low]));
  }
}

// --- local ids ----------------------------------------------------------------------------------

template <typename I>
struct IsNew {
  SampleHop p;

  __device__ int32_t operator()(int64_t k) const {
    const int64_t e = p.num_edges[p.hop] + k;
    return e < p.num_edges[p.hop + 1] &&
           find(p.map, static_cast<const I*>(p.neighbor)[e]) == p.num_seeds + e;
  }
};

template <typename I>
struct AddNode {
  SampleHop p;

  __device__ void operator()(int64_t k, int32_t sum) const {
    const int64_t e = p.num_edges[p.hop] + k, end = p.num_nodes[p.hop] + sum;
    if (IsNew<I>{p}(k)) {
      p.local[p.num_seeds + e] = static_cast<int32_t>(end - 1);
      p.n_id[end - 1] = static_cast<const I*>(p.neighbor)[e];
    }
    if (k == p.max_edges - 1) p.num_nodes[p.hop + 1] = end;
  }
};

__global__ void __launch_bounds__(kThreads) begin_kernel(SampleHop p, const int64_t* seeds) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread == 0) {
    p.num_nodes[0] = p.num_seeds;
    p.num_edges[0] = 0;
  }
  for (int64_t k = thread; k < p.num_seeds; k += step) {
    p.n_id[k] = seeds[k];
    p.local[k] = static_cast<int32_t>(k);
    insert(p.map, seeds[k], k);
  }
}

// Hops without nodes or edges leave the counts unchanged.
__global__ void same_edges_kernel(SampleHop p) { p.num_edges[p.hop + 1] = p.num_edges[p.hop]; }
__global__ void same_nodes_kernel(SampleHop p) { p.num_nodes[p.hop + 1] = p.num_nodes[p.hop]; }

template <typename I>
__global__ void __launch_bounds__(kThreads) take_kernel(TakeSample p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t e = thread; e < p.num_edges; e += step) {
    const int32_t source = p.local[find(p.map, static_cast<const I*>(p.neighbor)[e])];
    p.out_col[e] = source;
    p.out_src[e] = source;
    p.out_dst[e] = p.dst[e];
    p.out_e_id[e] = p.e_id[e];
  }
  for (int64_t k = thread; k <= p.num_nodes; k += step) {
    p.out_rowptr[k] = k < p.num_rows ? p.rowptr[k] : static_cast<int32_t>(p.num_edges);
    if (k < p.num_nodes) p.out_n_id[k] = p.n_id[k];
  }
}

template <typename I>
void sample(const SampleHop& p, cudaStream_t stream) {
  if (p.fanout < 0) {
    all_edges_kernel<I><<<some_blocks(p.max_edges), kThreads, 0, stream>>>(p);
    return;
  }
  with_lanes(p.fanout, p.weight && !p.replace, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    sample_kernel<I, kLanes><<<some_blocks(p.max_nodes * kLanes), kThreads, 0, stream>>>(p);
  });
}

}  // namespace

const char* begin_sample(const SampleHop& p, const int64_t* seeds, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (const char* error = start(p.map, s)) return error;
  begin_kernel<<<some_blocks(p.num_seeds), kThreads, 0, s>>>(p, seeds);
  return last_error();
}

int64_t sample_counts_scratch(const SampleHop& p) {
  return with_index(p.graph.index64, [&](auto index) {
    return scratch_of(EdgesOfNode<decltype(index)>{p}, StartOfNode{p}, p.max_nodes);
  });
}

const char* sample_counts(const SampleHop& p, void* scratch, void* stream) {
  if (p.max_nodes == 0) {
    same_edges_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return last_error();
  }
  const int64_t bytes = sample_counts_scratch(p);
  return with_index(p.graph.index64, [&](auto index) {
    return run_sum(scratch, bytes, EdgesOfNode<decltype(index)>{p}, StartOfNode{p}, p.max_nodes,
                   stream);
  });
}

const char* sample_neighbors(const SampleHop& p, void* stream) {
  if (p.max_nodes == 0 || p.max_edges == 0) return nullptr;
  with_index(p.graph.index64,
             [&](auto index) { sample<decltype(index)>(p, static_cast<cudaStream_t>(stream)); });
  return last_error();
}

int64_t append_nodes_scratch(const SampleHop& p) {
  return with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    return scratch_of(IsNew<I>{p}, AddNode<I>{p}, p.max_edges);
  });
}

const char* append_nodes(const SampleHop& p, void* scratch, void* stream) {
  if (p.max_edges == 0) {
    same_nodes_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return last_error();
  }
  const int64_t bytes = append_nodes_scratch(p);
  return with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    return run_sum(scratch, bytes, IsNew<I>{p}, AddNode<I>{p}, p.max_edges, stream);
  });
}

const char* take_sample(const TakeSample& p, void* stream) {
  const int64_t most = p.num_edges > p.num_nodes ? p.num_edges : p.num_nodes + 1;
  with_index(p.index64, [&](auto index) {
    take_kernel<decltype(index)>
        <<<some_blocks(most), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  });
  return last_error();
}

}  // namespace pyg_fast::cuda
