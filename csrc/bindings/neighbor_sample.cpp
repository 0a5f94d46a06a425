#include "bindings/minibatch.h"
#include "params/neighbor_sample.h"

namespace pyg_fast {
namespace {

void fill_counts(SampleHop& p, const Tensor& counts, int64_t hop, const Tensor& on) {
  STD_TORCH_CHECK(counts.dim() == 2 && counts.size(0) == 2 && hop >= 0 && hop + 1 < counts.size(1),
                  "counts must have shape [2, num_hops + 1]");
  p.hop = hop;
  p.num_nodes = int64s(counts, "counts", on);
  p.num_edges = p.num_nodes + counts.size(1);
}

void fill_edges(SampleHop& p, const Tensor& neighbor, const Tensor& map, int64_t stamp,
                int64_t num_seeds, int64_t max_edges, const Tensor& on) {
  p.graph.index64 = is_index64(neighbor, "neighbor");
  check_device(neighbor, "neighbor", on);
  STD_TORCH_CHECK(neighbor.is_contiguous() && neighbor.size(0) >= max_edges,
                  "neighbor must have room for the edges");
  p.max_edges_of_all = neighbor.size(0);
  p.neighbor = const_cast<void*>(neighbor.const_data_ptr());
  p.map = node_map_of(map, stamp, on);
  p.num_seeds = num_seeds;
  p.max_edges = max_edges;
}

template <bool kCuda>
void begin_sample(const Tensor& seeds, const Tensor& n_id, const Tensor& counts, const Tensor& map,
                  const Tensor& local, int64_t stamp) {
  SampleHop p;
  fill_counts(p, counts, 0, seeds);
  p.num_seeds = seeds.size(0);
  STD_TORCH_CHECK(n_id.size(0) >= p.num_seeds && local.size(0) >= p.num_seeds,
                  "n_id and local must have room for the seeds");
  p.n_id = int64s(n_id, "n_id", seeds);
  p.local = int32s(local, "local", seeds);
  p.map = node_map_of(map, stamp, seeds);
  const int64_t* ids = int64s(seeds, "seeds", seeds);
  if constexpr (kCuda) {
    Launch launch(seeds);
    launch.check(cuda::begin_sample(p, ids, launch.stream()), "begin_sample");
  } else {
    cpu::start(p.map);
    p.num_nodes[0] = p.num_seeds;
    p.num_edges[0] = 0;
    share(0, p.num_seeds,
          [&](int64_t begin, int64_t end) { cpu::begin_sample(p, ids, begin, end); });
  }
}

template <bool kCuda>
void sample_counts(const Tensor& rowptr, const OptTensor& weight, const Tensor& n_id,
                   const Tensor& counts, const Tensor& sampled_rowptr, int64_t hop, int64_t fanout,
                   bool replace, int64_t max_nodes) {
  SampleHop p;
  p.graph = sampled_graph(rowptr, std::nullopt, std::nullopt, weight);
  p.weight = static_cast<const double*>(pointer(weight));
  fill_counts(p, counts, hop, n_id);
  p.fanout = fanout;
  p.replace = replace;
  p.max_nodes = max_nodes;
  p.n_id = int64s(n_id, "n_id", n_id);
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  STD_TORCH_CHECK(sampled_rowptr.size(0) > n_id.size(0),
                  "sampled_rowptr must have one entry more than n_id");
  if constexpr (kCuda) {
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::sample_counts_scratch(p));
    launch.check(cuda::sample_counts(p, scratch, launch.stream()), "sample_counts");
  } else {
    share(p.first(), p.last(),
          [&](int64_t begin, int64_t end) { cpu::sample_counts(p, begin, end); });
    int64_t sum = p.num_edges[p.hop];
    if (p.first() < p.last()) p.rowptr[p.first()] = static_cast<int32_t>(sum);
    for (int64_t node = p.first(); node < p.last(); ++node) {
      sum += p.rowptr[node + 1];
      p.rowptr[node + 1] = static_cast<int32_t>(sum);
    }
    p.num_edges[p.hop + 1] = sum;
  }
}

template <bool kCuda>
void sample_neighbors(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                      const OptTensor& weight, const Tensor& n_id, const Tensor& counts,
                      const Tensor& sampled_rowptr, const Tensor& neighbor, const Tensor& dst,
                      const Tensor& e_id, const Tensor& map, int64_t stamp, int64_t num_seeds,
                      int64_t hop, int64_t fanout, bool replace, int64_t seed, int64_t max_nodes,
                      int64_t max_edges) {
  SampleHop p;
  p.graph = sampled_graph(rowptr, col, perm, weight);
  p.weight = static_cast<const double*>(pointer(weight));
  check_type(neighbor, "neighbor", rowptr.scalar_type());
  fill_edges(p, neighbor, map, stamp, num_seeds, max_edges, n_id);
  fill_counts(p, counts, hop, n_id);
  p.fanout = fanout;
  p.replace = replace;
  p.seed = static_cast<uint64_t>(seed);
  p.max_nodes = max_nodes;
  p.n_id = int64s(n_id, "n_id", n_id);
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  p.dst = int32s(dst, "dst", n_id);
  p.e_id = int64s(e_id, "e_id", n_id);
  STD_TORCH_CHECK(dst.size(0) >= p.max_edges_of_all && e_id.size(0) >= p.max_edges_of_all,
                  "dst and e_id must have as much room as neighbor");
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::sample_neighbors(p, launch.stream()), "sample_neighbors");
  } else {
    STD_TORCH_CHECK(p.num_edges[p.hop + 1] <= p.max_edges_of_all,
                    "neighbor must have room for all edges");
    // More shares than threads: the work per node varies.
    const int64_t shares = 8 * num_threads(), nodes = p.last() - p.first();
    parallel(shares, nodes * kLookup, [&](int64_t k) {
      cpu::sample_neighbors(p, p.first() + nodes * k / shares,
                            p.first() + nodes * (k + 1) / shares);
    });
    share(p.num_edges[p.hop], p.num_edges[p.hop + 1],
          [&](int64_t begin, int64_t end) { cpu::insert_sources(p, begin, end); });
  }
}

template <bool kCuda>
void append_nodes(const Tensor& neighbor, const Tensor& n_id, const Tensor& counts,
                  const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_seeds,
                  int64_t hop, int64_t max_edges) {
  SampleHop p;
  fill_edges(p, neighbor, map, stamp, num_seeds, max_edges, n_id);
  fill_counts(p, counts, hop, n_id);
  p.n_id = int64s(n_id, "n_id", n_id);
  p.local = int32s(local, "local", n_id);
  STD_TORCH_CHECK(local.size(0) >= num_seeds + p.max_edges_of_all,
                  "local must have room for all positions");
  if constexpr (kCuda) {
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::append_nodes_scratch(p));
    launch.check(cuda::append_nodes(p, scratch, launch.stream()), "append_nodes");
  } else {
    const int64_t first = p.num_edges[p.hop], last = p.num_edges[p.hop + 1];
    STD_TORCH_CHECK(last <= p.max_edges_of_all, "neighbor must have room for all edges");
    p.num_nodes[p.hop + 1] = number_found(
        first, last, p.num_nodes[p.hop],
        [&](int64_t begin, int64_t end) { return cpu::count_new(p, begin, end); },
        [&](int64_t begin, int64_t end, int64_t node) {
          return cpu::append_nodes(p, begin, end, node);
        });
  }
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> take_sample(
    const Tensor& n_id, const Tensor& sampled_rowptr, const Tensor& neighbor, const Tensor& dst,
    const Tensor& e_id, const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_nodes,
    int64_t num_rows, int64_t num_edges) {
  STD_TORCH_CHECK(num_rows >= 0 && num_rows <= num_nodes && num_nodes <= n_id.size(0) &&
                      num_nodes < sampled_rowptr.size(0) && num_edges >= 0 &&
                      num_edges <= neighbor.size(0) && num_edges <= dst.size(0) &&
                      num_edges <= e_id.size(0),
                  "there is not as much to take");
  TakeSample p;
  p.map = node_map_of(map, stamp, n_id);
  p.index64 = is_index64(neighbor, "neighbor");
  check_device(neighbor, "neighbor", n_id);
  p.num_nodes = num_nodes;
  p.num_rows = num_rows;
  p.num_edges = num_edges;
  p.n_id = int64s(n_id, "n_id", n_id);
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  p.neighbor = neighbor.const_data_ptr();
  p.dst = int32s(dst, "dst", n_id);
  p.e_id = int64s(e_id, "e_id", n_id);
  p.local = int32s(local, "local", n_id);
  Tensor out_n_id = empty(n_id, {num_nodes}, ScalarType::Long);
  Tensor rowptr = empty(n_id, {num_nodes + 1}, ScalarType::Int);
  Tensor col = empty(n_id, {num_edges}, ScalarType::Int);
  Tensor edge_index = empty(n_id, {2, num_edges}, ScalarType::Long);
  Tensor out_e_id = empty(n_id, {num_edges}, ScalarType::Long);
  p.out_n_id = static_cast<int64_t*>(out_n_id.mutable_data_ptr());
  p.out_rowptr = static_cast<int32_t*>(rowptr.mutable_data_ptr());
  p.out_col = static_cast<int32_t*>(col.mutable_data_ptr());
  p.out_src = static_cast<int64_t*>(edge_index.mutable_data_ptr());
  p.out_dst = p.out_src + num_edges;
  p.out_e_id = static_cast<int64_t*>(out_e_id.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::take_sample(p, launch.stream()), "take_sample");
  } else {
    share(0, p.num_edges, [&](int64_t begin, int64_t end) { cpu::take_edges(p, begin, end); });
    cpu::take_nodes(p, 0, p.num_nodes);
  }
  return {out_n_id, rowptr, col, edge_index, out_e_id};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Sampled mini-batches. `map` and `stamp`: NodeMap in params/minibatch.h; `counts`: numbers of nodes
  // and edges after each hop, and before the first; `local`: local ids by position, seeds first, then
  // edges.
  m.def(
      "begin_sample(Tensor seeds, Tensor(a!) n_id, Tensor(b!) counts, Tensor(c!) map, "
      "Tensor(d!) local, int stamp) -> ()");
  // One hop: where the edges of each node begin; the edges, and their sources into the map; new nodes.
  // `max_nodes`, `max_edges`: limits for this hop; the graph may be in pinned host memory.
  m.def(
      "sample_counts(Tensor rowptr, Tensor? weight, Tensor n_id, Tensor(a!) counts, "
      "Tensor(b!) sampled_rowptr, int hop, int fanout, bool replace, int max_nodes) -> ()");
  m.def(
      "sample_neighbors(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor n_id, "
      "Tensor counts, Tensor sampled_rowptr, Tensor(a!) neighbor, Tensor(b!) dst, Tensor(c!) e_id, "
      "Tensor(d!) map, int stamp, int num_seeds, int hop, int fanout, bool replace, int seed, "
      "int max_nodes, int max_edges) -> ()");
  m.def(
      "append_nodes(Tensor neighbor, Tensor(a!) n_id, Tensor(b!) counts, Tensor(c!) map, "
      "Tensor(d!) local, int stamp, int num_seeds, int hop, int max_edges) -> ()");
  // The batch: n_id, rowptr, col, edge_index, e_id.
  m.def(
      "take_sample(Tensor n_id, Tensor sampled_rowptr, Tensor neighbor, Tensor dst, Tensor e_id, "
      "Tensor map, Tensor local, int stamp, int num_nodes, int num_rows, int num_edges) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(begin_sample)
PYG_FAST_IMPL(sample_counts)
PYG_FAST_IMPL(sample_neighbors)
PYG_FAST_IMPL(append_nodes)
PYG_FAST_IMPL(take_sample)
