// Sampled mini-batches: which edges to take, and the local ids of the nodes at their ends. One pass
// samples a source and inserts it into the map; the host waits for no size in between.
#include "minibatch.cuh"
#include "params/neighbor_sample.h"

namespace pyg_fast::cuda {
namespace {

// --- how many -----------------------------------------------------------------------------------

template <typename I>
struct EdgesOfNode {
  SampleHop p;

  __device__ int64_t operator()(int64_t k) const {
    const int64_t node = p.first() + k;
    if (node >= p.last()) return 0;
    const I* rowptr = static_cast<const I*>(p.graph.rowptr) + p.n_id[node];
    const int64_t begin = rowptr[0], degree = rowptr[1] - begin;
    if (p.fanout < 0 || degree == 0) return degree;
    if (p.replace) {
      if (!p.weight) return p.fanout;
      const double before = begin == 0 ? 0 : p.weight[begin - 1];
      return p.weight[begin + degree - 1] > before ? p.fanout : 0;
    }
    if (!p.weight) return degree < p.fanout ? degree : p.fanout;
    int64_t count = 0;  // edges that may be drawn
    for (int64_t e = begin; e < begin + degree && count < p.fanout; ++e) count += p.weight[e] > 0;
    return count;
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

// Floyd's algorithm: draw k of `count` draws from the first degree - count + k + 1 edges; if that edge
// was drawn before, take the last of these edges. Every set is equally likely.
template <typename I, int LANES>
__device__ inline void draw_distinct(const SampleHop& p, int64_t node, int64_t id, int64_t begin,
                                     int64_t degree, int64_t start, int count, unsigned mask,
                                     int lane) {
  for (int first = 0; first < count; first += LANES) {
    const int k = first + lane, here = count - first < LANES ? count - first : LANES;
    const int64_t last = degree - count + k;
    int chosen = 0;
    if (k < count) {
      chosen = static_cast<int>(random_below(random_bits(p.seed, id, k), last + 1));
      // The destinations' memory temporarily holds the earlier draws.
      for (int e = 0; e < first; ++e) {
        if (__ldcg(p.dst + start + e) == chosen) {
          chosen = static_cast<int>(last);
          break;
        }
      }
    }
    for (int m = 0; m < here; ++m) {
      const int drawn = __shfl_sync(mask, chosen, m, LANES);
      const bool taken = __ballot_sync(mask, lane < m && drawn == chosen) != 0;
      if (lane == m && taken) chosen = static_cast<int>(last);
    }
    if (k < count) {
      if (count <= LANES) emit<I>(p, start + k, node, begin + chosen);
      else p.dst[start + k] = chosen;
    }
    __syncwarp(mask);
  }
  if (count <= LANES) return;
  for (int k = lane; k < count; k += LANES) {
    emit<I>(p, start + k, node, begin + __ldcg(p.dst + start + k));
  }
}

// Takes the `count` smallest of -log(u) / weight, one warp's worth per pass (Efraimidis and Spirakis). It
// is equivalent to drawing edges one by one, each in proportion to its weight among the rest.
template <typename I>
__device__ inline void draw_weighted(const SampleHop& p, int64_t node, int64_t id, int64_t begin,
                                     int64_t degree, int64_t start, int count, int lane) {
  const double infinity = __longlong_as_double(0x7ff0000000000000);
  double last_key = -1;
  int64_t last = -1;
  const auto before = [](double a, int64_t i, double b, int64_t j) {
    return a < b || (a == b && i < j);
  };
  for (int first = 0; first < count; first += 32) {
    const int here = count - first < 32 ? count - first : 32;
    double best = infinity;  // per lane: the smallest keys, in order
    int64_t best_edge = degree;
    for (int64_t e0 = 0; e0 < degree; e0 += 32) {
      const int64_t e = e0 + lane;
      double key = infinity;
      if (e < degree) {
        const double weight = p.weight[begin + e];
        if (weight > 0) key = -log(random_unit(random_bits(p.seed, id, e))) / weight;
      }
      const double worst = __shfl_sync(kWarpMask, best, here - 1);
      const bool candidate = key < worst && before(last_key, last, key, e);
      unsigned left = __ballot_sync(kWarpMask, candidate);
      while (left) {
        const int from = __ffs(left) - 1;
        left &= left - 1;
        const double its_key = __shfl_sync(kWarpMask, key, from);
        const int64_t its_edge = e0 + from;
        const int place =
            __popc(__ballot_sync(kWarpMask, before(best, best_edge, its_key, its_edge)));
        const double moved_key = __shfl_up_sync(kWarpMask, best, 1);
        const int64_t moved_edge = __shfl_up_sync(kWarpMask, best_edge, 1);
        if (lane > place) {
          best = moved_key;
          best_edge = moved_edge;
        } else if (lane == place) {
          best = its_key;
          best_edge = its_edge;
        }
      }
    }
    if (lane < here) emit<I>(p, start + first + lane, node, begin + best_edge);
    last_key = __shfl_sync(kWarpMask, best, here - 1);
    last = __shfl_sync(kWarpMask, best_edge, here - 1);
  }
}

// LANES threads per node.
template <typename I, int LANES>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleHop p) {
  const int lane = threadIdx.x % LANES;
  const unsigned mask = LANES == 32 ? kWarpMask
                                    : ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kThreads / LANES);
  const int64_t last = p.last();
  for (int64_t node = p.first() + (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / LANES;
       node < last; node += groups) {
    const int64_t id = p.n_id[node];
    const I* rowptr = static_cast<const I*>(p.graph.rowptr) + id;
    const int64_t begin = rowptr[0], degree = rowptr[1] - begin;
    const int64_t start = p.rowptr[node];
    const int count = static_cast<int>(p.rowptr[node + 1] - start);
    if (p.replace && p.fanout >= 0) {
      for (int k = lane; k < count; k += LANES) {
        const uint64_t bits = random_bits(p.seed, id, k);
        emit<I>(p, start + k, node,
                p.weight ? drawn_edge(p.weight, begin, begin + degree, bits)
                         : begin + random_below(bits, degree));
      }
    } else if (count == degree) {
      for (int k = lane; k < count; k += LANES) emit<I>(p, start + k, node, begin + k);
    } else if constexpr (LANES == 32) {
      if (p.weight) draw_weighted<I>(p, node, id, begin, degree, start, count, lane);
      else draw_distinct<I, 32>(p, node, id, begin, degree, start, count, mask, lane);
    } else {
      draw_distinct<I, LANES>(p, node, id, begin, degree, start, count, mask, lane);
    }
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
  const auto launch = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    sample_kernel<I, kLanes><<<some_blocks(p.max_nodes * kLanes), kThreads, 0, stream>>>(p);
  };
  if (p.fanout < 0) {
    all_edges_kernel<I><<<some_blocks(p.max_edges), kThreads, 0, stream>>>(p);
  } else if (p.fanout > 16 || (p.weight && !p.replace)) {
    launch(std::integral_constant<int, 32>{});
  } else if (p.fanout > 8) {
    launch(std::integral_constant<int, 16>{});
  } else if (p.fanout > 4) {
    launch(std::integral_constant<int, 8>{});
  } else {
    launch(std::integral_constant<int, 4>{});
  }
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
  with_index(p.graph.index64, [&](auto index) {
    sample<decltype(index)>(p, static_cast<cudaStream_t>(stream));
  });
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
