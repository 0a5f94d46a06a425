// Sampled mini-batches of graphs with types: the number of launches does not depend on that of types.
#include "draw.cuh"
#include "params/typed_sample.h"

namespace pyg_fast::cuda {
namespace {

// --- seeds --------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    begin_kernel(TypedHop p, const int64_t* seeds, const int32_t* roots) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread == 0) p.rowptr[0] = 0;
  for (int64_t slot = thread; slot < p.num_seeds; slot += step) {
    p.n_id[slot] = seeds[slot];
    if (roots) p.root[slot] = roots[slot];
    const int64_t type = segment_of(p.nodes, p.num_node_types, slot);
    p.local[slot] = static_cast<int32_t>(slot - p.nodes[type]);
    insert(p.map, key_of(p, slot, seeds[slot]), slot);
  }
}

// --- how many -----------------------------------------------------------------------------------

template <typename I>
struct EdgesOfWork {
  TypedHop p;

  __device__ int64_t operator()(int64_t k) const {
    const int64_t work = p.first_work() + k;
    return work < p.last_work() ? edges_to_draw(typed_row<I>(p, work).row) : 0;
  }
};

struct EndOfWork {
  TypedHop p;

  __device__ void operator()(int64_t k, int64_t sum) const {
    const int64_t work = p.first_work() + k;
    if (work < p.last_work()) p.rowptr[work + 1] = end_of_edges(p.first_edge() + sum);
  }
};

// --- which --------------------------------------------------------------------------------------

// Writes the graph's edge at `position` as edge `e` of the batch.
template <typename I>
__device__ inline void emit(const TypedHop& p, int64_t e, int64_t slot, int32_t dst,
                            int64_t position) {
  const int64_t key = key_of(p, slot, column(p.graph, position));
  p.neighbor[e] = key;
  p.dst[e] = dst;
  p.e_id[e] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[position] : position;
  insert(p.map, key, p.num_seeds + e);
}

// LANES threads for each piece of work, but for those that take all edges.
template <typename I, int LANES>
__global__ void __launch_bounds__(kThreads) sample_kernel(TypedHop p) {
  const int lane = threadIdx.x % LANES;
  const unsigned mask =
      LANES == 32 ? kWarpMask : ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kThreads / LANES);
  const int64_t last = p.last_work();
  for (int64_t work =
           p.first_work() + (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / LANES;
       work < last; work += groups) {
    const int64_t start = p.rowptr[work];
    const int count = static_cast<int>(p.rowptr[work + 1] - start);
    if (count == 0) continue;
    const TypedRow from = typed_row<I>(p, work);
    if (from.row.fanout < 0) continue;
    draw<LANES>(from.row, start, count, p.dst, mask, lane,
                [&](int64_t e, int64_t position) { emit<I>(p, e, from.slot, from.dst, position); });
  }
}

// Takes all edges where the fan-out is -1: one thread per edge, to divide long rows.
template <typename I>
__global__ void __launch_bounds__(kThreads) all_edges_kernel(TypedHop p) {
  const int64_t first = p.first_work(), count = p.last_work() - first;
  const int64_t end = p.last_edge(), step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = p.first_edge() + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       e < end; e += step) {
    const int64_t work = first + segment_of(p.rowptr + first, count, e);
    const TypedRow from = typed_row<I>(p, work);
    if (from.row.fanout >= 0) continue;
    emit<I>(p, e, from.slot, from.dst, from.row.begin + (e - p.rowptr[work]));
  }
}

// --- numbers of nodes ---------------------------------------------------------------------------

// A source is new where its key occurs first. Until it gets its number, `local` holds how many are new up
// to each edge of the hop, the complement of that where the edge's own source is new.
struct IsNew {
  TypedHop p;

  __device__ int32_t operator()(int64_t k) const {
    const int64_t e = p.first_edge() + k;
    return e < p.last_edge() && find(p.map, p.neighbor[e]) == p.num_seeds + e;
  }
};

struct MarkNew {
  TypedHop p;

  __device__ void operator()(int64_t k, int32_t sum) const {
    const int64_t e = p.first_edge() + k;
    if (e < p.last_edge()) p.local[p.num_seeds + e] = IsNew{p}(k) ? ~sum : sum;
  }
};

__device__ inline int32_t marked(int32_t mark) { return mark < 0 ? ~mark : mark; }

// Fills the counts of this hop's edges and of the next hop. One block: each step is over types.
__global__ void __launch_bounds__(kThreads) count_kernel(TypedHop p) {
  extern __shared__ int64_t shared[];
  const int64_t T = p.num_types, S = p.num_node_types;
  int64_t* found = shared;     // [T] how many each edge type found
  int64_t* size = shared + T;  // [S] how many nodes of each type were found
  int64_t* edges = p.edges + p.hop * T;
  const int64_t* work = p.work + p.hop * T;
  const int64_t begin = p.first_edge();
  const int32_t* mark = p.local + p.num_seeds;
  const auto up_to = [&](int64_t e) -> int64_t { return e == begin ? 0 : marked(mark[e - 1]); };
  for (int64_t t = threadIdx.x; t < T; t += kThreads) {
    const int64_t first = p.rowptr[work[t]], last = p.rowptr[work[t + 1]];
    edges[t + 1] = last;
    found[t] = up_to(last) - up_to(first);
  }
  __syncthreads();
  for (int64_t s = threadIdx.x; s < S; s += kThreads) {
    int64_t sum = 0;
    for (int64_t t = 0; t < T; ++t) sum += p.types[t].src == s ? found[t] : 0;
    size[s] = sum;
  }
  __syncthreads();
  int64_t* nodes = p.nodes + (p.hop + 1) * S;
  int64_t* before = p.before + (p.hop + 1) * S;
  int64_t* next = p.work + (p.hop + 1) * T;
  if (threadIdx.x == 0) {
    int64_t sum = nodes[0];
    for (int64_t s = 0; s < S; ++s) nodes[s + 1] = sum += size[s];
  } else if (threadIdx.x == 32) {
    int64_t sum = next[0];
    for (int64_t t = 0; t < T; ++t) next[t + 1] = sum += size[p.types[t].dst];
  }
  const int64_t* old = p.nodes + p.hop * S;
  for (int64_t s = threadIdx.x; s < S; s += kThreads) {
    // Not old[S], which thread 0 does not write: nodes[0] is the same number.
    before[s] = p.before[p.hop * S + s] + old[s + 1] - old[s];
  }
  __syncthreads();
  for (int64_t s = threadIdx.x; s < S; s += kThreads) {
    int64_t slot = nodes[s];
    for (int64_t t = 0; t < T; ++t) {
      if (p.types[t].src != s) continue;
      p.first_new[t] = slot - up_to(p.rowptr[work[t]]) - 1;
      slot += found[t];
    }
  }
}

__global__ void __launch_bounds__(kThreads) append_kernel(TypedHop p) {
  const int64_t end = p.last_edge(), step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t* edges = p.edges + p.hop * p.num_types;
  const int64_t of_nodes = (p.hop + 1) * p.num_node_types;
  for (int64_t e = p.first_edge() + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       e < end; e += step) {
    int32_t* local = p.local + p.num_seeds + e;
    if (*local >= 0) continue;
    const int64_t type = segment_of(edges, p.num_types, e), src = p.types[type].src;
    const int64_t slot = p.first_new[type] + marked(*local), key = p.neighbor[e];
    *local = static_cast<int32_t>(p.before[of_nodes + src] + slot - p.nodes[of_nodes + src]);
    if (p.root) {
      const int64_t root = key / p.num_graph_nodes;
      p.root[slot] = static_cast<int32_t>(root);
      p.n_id[slot] = key - root * p.num_graph_nodes;
    } else {
      p.n_id[slot] = key;
    }
  }
}

// --- the batch ----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) take_kernel(TakeTyped t) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t e = thread; e < t.num_edges; e += step) {
    const int64_t segment = segment_of(t.p.edges, t.p.hop * t.p.num_types, e);
    take_edge(t, segment, e, t.p.local[find(t.p.map, t.p.neighbor[e])]);
  }
  for (int64_t slot = thread; slot < t.num_nodes; slot += step) {
    take_node(t, segment_of(t.p.nodes, (t.p.hop + 1) * t.p.num_node_types, slot), slot);
  }
  for (int64_t k = thread; k < t.num_rows; k += step) take_row(t, k);
}

template <typename I>
void sample(const TypedHop& p, cudaStream_t stream) {
  if (p.has_all) {
    all_edges_kernel<I><<<some_blocks(p.max_edges), kThreads, 0, stream>>>(p);
  }
  if (p.most <= 0) return;
  with_lanes(p.most, p.weight && !p.replace, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    sample_kernel<I, kLanes><<<some_blocks(p.max_work * kLanes), kThreads, 0, stream>>>(p);
  });
}

}  // namespace

const char* begin_typed(const TypedHop& p, const int64_t* seeds, const int32_t* roots,
                        void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (const char* error = start(p.map, s)) return error;
  begin_kernel<<<some_blocks(p.num_seeds), kThreads, 0, s>>>(p, seeds, roots);
  return last_error();
}

int64_t typed_counts_scratch(const TypedHop& p) {
  return with_index(p.graph.index64, [&](auto index) {
    return scratch_of(EdgesOfWork<decltype(index)>{p}, EndOfWork{p}, p.max_work);
  });
}

const char* typed_counts(const TypedHop& p, void* scratch, void* stream) {
  const int64_t bytes = typed_counts_scratch(p);
  return with_index(p.graph.index64, [&](auto index) {
    return run_sum(scratch, bytes, EdgesOfWork<decltype(index)>{p}, EndOfWork{p}, p.max_work,
                   stream);
  });
}

const char* typed_neighbors(const TypedHop& p, void* stream) {
  if (p.max_work == 0 || p.max_edges == 0) return nullptr;
  with_index(p.graph.index64,
             [&](auto index) { sample<decltype(index)>(p, static_cast<cudaStream_t>(stream)); });
  return last_error();
}

int64_t append_typed_scratch(const TypedHop& p) {
  return scratch_of(IsNew{p}, MarkNew{p}, p.max_edges);
}

const char* append_typed(const TypedHop& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.max_edges > 0) {
    const int64_t bytes = append_typed_scratch(p);
    if (const char* error = run_sum(scratch, bytes, IsNew{p}, MarkNew{p}, p.max_edges, stream)) {
      return error;
    }
  }
  const size_t shared = static_cast<size_t>(p.num_types + p.num_node_types) * sizeof(int64_t);
  count_kernel<<<1, kThreads, shared, s>>>(p);
  if (p.max_edges > 0) append_kernel<<<some_blocks(p.max_edges), kThreads, 0, s>>>(p);
  return last_error();
}

const char* take_typed(const TakeTyped& t, void* stream) {
  int64_t most = t.num_edges > t.num_nodes ? t.num_edges : t.num_nodes;
  if (t.num_rows > most) most = t.num_rows;
  take_kernel<<<some_blocks(most), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(t);
  return last_error();
}

}  // namespace pyg_fast::cuda
