#include "cpu/neighbor_sample.h"

#include <numeric>
#include <vector>

#include "cpu/node_map.h"
#include "minibatch_binding.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/neighbor_sample.h"
#endif

namespace pyg_fast {
namespace {

template <typename T>
T* data_of(const Tensor& t, const char* name, ScalarType type, const Tensor& on) {
  check_type(t, name, type);
  check_device(t, name, on);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}

int64_t* int64s(const Tensor& t, const char* name, const Tensor& on) {
  return data_of<int64_t>(t, name, ScalarType::Long, on);
}

int32_t* int32s(const Tensor& t, const char* name, const Tensor& on) {
  return data_of<int32_t>(t, name, ScalarType::Int, on);
}

void fill_counts(SampleHop& p, const Tensor& counts, int64_t hop, const Tensor& on) {
  STD_TORCH_CHECK(counts.dim() == 2 && counts.size(0) == 2 && hop >= 0 && hop + 1 < counts.size(1),
                  "counts must have shape [2, num_hops + 1]");
  p.hop = hop;
  p.num_nodes = int64s(counts, "counts", on);
  p.num_edges = p.num_nodes + counts.size(1);
}

// The graph may lie in host memory that a GPU reads.
void fill_graph(SampleHop& p, const Tensor& rowptr, const OptTensor& col, const OptTensor& perm,
                const OptTensor& weight) {
  p.graph.index64 = is_index64(rowptr, "rowptr");
  check_type(col, "col", rowptr.scalar_type());
  check_type(perm, "perm", rowptr.scalar_type());
  check_type(weight, "weight", ScalarType::Double);
  STD_TORCH_CHECK(rowptr.is_contiguous() && (!col || col->is_contiguous()) &&
                      (!perm || perm->is_contiguous()) && (!weight || weight->is_contiguous()),
                  "rowptr, col, perm and weight must be contiguous");
  p.graph.num_rows = p.graph.num_cols = rowptr.size(0) - 1;
  p.graph.rowptr = rowptr.const_data_ptr();
  p.graph.col = pointer(col);
  p.graph.perm = pointer(perm);
  if (col) p.graph.num_edges = col->size(0);
  if (col) check_vector(perm, "perm", p.graph.num_edges);
  if (col) check_vector(weight, "weight", p.graph.num_edges);
  p.weight = static_cast<const double*>(pointer(weight));
}

template <typename Run>
void begin_sample(const Tensor& seeds, const Tensor& n_id, const Tensor& counts, const Tensor& map,
                  const Tensor& local, int64_t stamp, const Run& run) {
  SampleHop p;
  fill_counts(p, counts, 0, seeds);
  p.num_seeds = seeds.size(0);
  STD_TORCH_CHECK(n_id.size(0) >= p.num_seeds && local.size(0) >= p.num_seeds,
                  "n_id and local must have room for the seeds");
  p.n_id = int64s(n_id, "n_id", seeds);
  p.local = int32s(local, "local", seeds);
  p.map = node_map_of(map, stamp, seeds);
  run(p, int64s(seeds, "seeds", seeds));
}

template <typename Run>
void sample_counts(const Tensor& rowptr, const OptTensor& weight, const Tensor& n_id,
                   const Tensor& counts, const Tensor& sampled_rowptr, int64_t hop, int64_t fanout,
                   bool replace, int64_t max_nodes, const Run& run) {
  SampleHop p;
  fill_graph(p, rowptr, std::nullopt, std::nullopt, weight);
  fill_counts(p, counts, hop, n_id);
  p.fanout = fanout;
  p.replace = replace;
  p.max_nodes = max_nodes;
  p.n_id = int64s(n_id, "n_id", n_id);
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  STD_TORCH_CHECK(sampled_rowptr.size(0) > n_id.size(0),
                  "sampled_rowptr must have one entry more than n_id");
  run(p);
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

template <typename Run>
void sample_neighbors(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                      const OptTensor& weight, const Tensor& n_id, const Tensor& counts,
                      const Tensor& sampled_rowptr, const Tensor& neighbor, const Tensor& dst,
                      const Tensor& e_id, const Tensor& map, int64_t stamp, int64_t num_seeds,
                      int64_t hop, int64_t fanout, bool replace, int64_t seed, int64_t max_nodes,
                      int64_t max_edges, const Run& run) {
  SampleHop p;
  fill_graph(p, rowptr, col, perm, weight);
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
  run(p);
}

template <typename Run>
void append_nodes(const Tensor& neighbor, const Tensor& n_id, const Tensor& counts,
                  const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_seeds,
                  int64_t hop, int64_t max_edges, const Run& run) {
  SampleHop p;
  fill_edges(p, neighbor, map, stamp, num_seeds, max_edges, n_id);
  fill_counts(p, counts, hop, n_id);
  p.n_id = int64s(n_id, "n_id", n_id);
  p.local = int32s(local, "local", n_id);
  STD_TORCH_CHECK(local.size(0) >= num_seeds + p.max_edges_of_all,
                  "local must have room for all positions");
  run(p);
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> take_sample(
    const Tensor& n_id, const Tensor& sampled_rowptr, const Tensor& neighbor, const Tensor& dst,
    const Tensor& e_id, const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_nodes,
    int64_t num_rows, int64_t num_edges, const Run& run) {
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
  run(p);
  return {out_n_id, rowptr, col, edge_index, out_e_id};
}

InducedEdges induced_of(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                        const Tensor& n_id, const Tensor& map, int64_t stamp) {
  SampleHop graph;
  fill_graph(graph, rowptr, col, perm, std::nullopt);
  InducedEdges p;
  p.graph = graph.graph;
  p.map = node_map_of(map, stamp, n_id);
  p.num_nodes = n_id.size(0);
  p.n_id = int64s(n_id, "n_id", n_id);
  return p;
}

template <typename Run>
Tensor count_induced(const Tensor& rowptr, const Tensor& col, const Tensor& n_id, const Tensor& map,
                     int64_t stamp, const Run& run) {
  InducedEdges p = induced_of(rowptr, col, std::nullopt, n_id, map, stamp);
  Tensor out = empty(n_id, {p.num_nodes + 1}, ScalarType::Long);
  p.rowptr = static_cast<int64_t*>(out.mutable_data_ptr());
  run(p);
  return out;
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor> induced_edges(const Tensor& rowptr, const Tensor& col,
                                                 const OptTensor& perm, const Tensor& n_id,
                                                 const Tensor& induced_rowptr, const Tensor& map,
                                                 const Tensor& local, int64_t stamp,
                                                 int64_t num_edges, const Run& run) {
  InducedEdges p = induced_of(rowptr, col, perm, n_id, map, stamp);
  check_vector(induced_rowptr, "induced_rowptr", p.num_nodes + 1);
  p.rowptr = int64s(induced_rowptr, "induced_rowptr", n_id);
  p.local = int32s(local, "local", n_id);
  Tensor out_col = empty(n_id, {num_edges}, ScalarType::Int);
  Tensor edge_index = empty(n_id, {2, num_edges}, ScalarType::Long);
  Tensor e_id = empty(n_id, {num_edges}, ScalarType::Long);
  p.out_col = static_cast<int32_t*>(out_col.mutable_data_ptr());
  p.out_src = static_cast<int64_t*>(edge_index.mutable_data_ptr());
  p.out_dst = p.out_src + num_edges;
  p.out_e_id = static_cast<int64_t*>(e_id.mutable_data_ptr());
  run(p);
  return {out_col, edge_index, e_id};
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor> relabel(const Tensor& ids_, const Tensor& map, int64_t stamp,
                                           const Run& run) {
  STD_TORCH_CHECK(ids_.dim() == 1, "ids must have one dimension, got ", ids_.dim());
  const Tensor ids = to_contiguous(ids_);
  Relabel p;
  p.map = node_map_of(map, stamp, ids);
  p.num_ids = ids.size(0);
  p.ids = int64s(ids, "ids", ids);
  Tensor unique = empty(ids, {p.num_ids}, ScalarType::Long);
  Tensor place = empty(ids, {p.num_ids}, ScalarType::Long);
  Tensor rank = empty(ids, {p.num_ids}, ScalarType::Int);
  Tensor count = empty(ids, {1}, ScalarType::Long);
  p.unique = static_cast<int64_t*>(unique.mutable_data_ptr());
  p.place = static_cast<int64_t*>(place.mutable_data_ptr());
  p.rank = static_cast<int32_t*>(rank.mutable_data_ptr());
  p.count = static_cast<int64_t*>(count.mutable_data_ptr());
  run(p);
  return {unique, place, count};
}

// --- on the CPU -----------------------------------------------------------------------------------

constexpr int64_t kCost = 20;  // of an id that is looked up, in nanoseconds

// run(begin, end) of shares of [first, last).
template <typename Run>
void share(int64_t first, int64_t last, const Run& run) {
  share_rows(last - first, (last - first) * kCost,
             [&](int64_t begin, int64_t end) { run(first + begin, first + end); });
}

// Numbers what list(begin, end, number) finds in [first, last) from `number` on, and returns the
// number after the last; several shares are counted first.
template <typename Count, typename List>
int64_t number_found(int64_t first, int64_t last, int64_t number, const Count& count,
                     const List& list) {
  const int64_t shares = num_threads(), total = last - first;
  if (shares == 1) return list(first, last, number);
  const auto start = [&](int64_t k) { return first + total * k / shares; };
  std::vector<int64_t> numbers(static_cast<size_t>(shares) + 1, number);
  parallel(shares, total * kCost, [&](int64_t k) {
    numbers[static_cast<size_t>(k) + 1] = count(start(k), start(k + 1));
  });
  std::partial_sum(numbers.begin(), numbers.end(), numbers.begin());
  parallel(shares, total * kCost, [&](int64_t k) {
    list(start(k), start(k + 1), numbers[static_cast<size_t>(k)]);
  });
  return numbers.back();
}

void begin_sample_cpu(const Tensor& seeds, Tensor n_id, Tensor counts, Tensor map, Tensor local,
                      int64_t stamp) {
  begin_sample(seeds, n_id, counts, map, local, stamp, [](const SampleHop& p, const int64_t* ids) {
    cpu::start(p.map);
    p.num_nodes[0] = p.num_seeds;
    p.num_edges[0] = 0;
    share(0, p.num_seeds,
          [&](int64_t begin, int64_t end) { cpu::begin_sample(p, ids, begin, end); });
  });
}

void sample_counts_cpu(const Tensor& rowptr, OptTensor weight, const Tensor& n_id, Tensor counts,
                       Tensor sampled_rowptr, int64_t hop, int64_t fanout, bool replace,
                       int64_t max_nodes) {
  sample_counts(rowptr, weight, n_id, counts, sampled_rowptr, hop, fanout, replace, max_nodes,
                [](const SampleHop& p) {
                  share(p.first(), p.last(), [&](int64_t begin, int64_t end) {
                    cpu::sample_counts(p, begin, end);
                  });
                  int64_t sum = p.num_edges[p.hop];
                  if (p.first() < p.last()) p.rowptr[p.first()] = static_cast<int32_t>(sum);
                  for (int64_t node = p.first(); node < p.last(); ++node) {
                    sum += p.rowptr[node + 1];
                    p.rowptr[node + 1] = static_cast<int32_t>(sum);
                  }
                  p.num_edges[p.hop + 1] = sum;
                });
}

void sample_neighbors_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor weight,
                          const Tensor& n_id, const Tensor& counts, const Tensor& sampled_rowptr,
                          Tensor neighbor, Tensor dst, Tensor e_id, Tensor map, int64_t stamp,
                          int64_t num_seeds, int64_t hop, int64_t fanout, bool replace,
                          int64_t seed, int64_t max_nodes, int64_t max_edges) {
  sample_neighbors(rowptr, col, perm, weight, n_id, counts, sampled_rowptr, neighbor, dst, e_id, map,
                   stamp, num_seeds, hop, fanout, replace, seed, max_nodes, max_edges,
                   [](const SampleHop& p) {
                     STD_TORCH_CHECK(p.num_edges[p.hop + 1] <= p.max_edges_of_all,
                                     "neighbor must have room for all edges");
                     // More shares than threads: nodes differ in what they cost.
                     const int64_t shares = 8 * num_threads(), nodes = p.last() - p.first();
                     parallel(shares, nodes * kCost, [&](int64_t k) {
                       cpu::sample_neighbors(p, p.first() + nodes * k / shares,
                                             p.first() + nodes * (k + 1) / shares);
                     });
                     share(p.num_edges[p.hop], p.num_edges[p.hop + 1],
                           [&](int64_t begin, int64_t end) { cpu::insert_sources(p, begin, end); });
                   });
}

void append_nodes_cpu(const Tensor& neighbor, Tensor n_id, Tensor counts, Tensor map, Tensor local,
                      int64_t stamp, int64_t num_seeds, int64_t hop, int64_t max_edges) {
  append_nodes(neighbor, n_id, counts, map, local, stamp, num_seeds, hop, max_edges,
               [](const SampleHop& p) {
                 const int64_t first = p.num_edges[p.hop], last = p.num_edges[p.hop + 1];
                 STD_TORCH_CHECK(last <= p.max_edges_of_all,
                                 "neighbor must have room for all edges");
                 p.num_nodes[p.hop + 1] = number_found(
                     first, last, p.num_nodes[p.hop],
                     [&](int64_t begin, int64_t end) { return cpu::count_new(p, begin, end); },
                     [&](int64_t begin, int64_t end, int64_t node) {
                       return cpu::append_nodes(p, begin, end, node);
                     });
               });
}

auto take_sample_cpu(const Tensor& n_id, const Tensor& sampled_rowptr, const Tensor& neighbor,
                     const Tensor& dst, const Tensor& e_id, const Tensor& map, const Tensor& local,
                     int64_t stamp, int64_t num_nodes, int64_t num_rows, int64_t num_edges) {
  return take_sample(n_id, sampled_rowptr, neighbor, dst, e_id, map, local, stamp, num_nodes,
                     num_rows, num_edges, [](const TakeSample& p) {
                       share(0, p.num_edges, [&](int64_t begin, int64_t end) {
                         cpu::take_edges(p, begin, end);
                       });
                       cpu::take_nodes(p, 0, p.num_nodes);
                     });
}

Tensor count_induced_cpu(const Tensor& rowptr, const Tensor& col, const Tensor& n_id,
                         const Tensor& map, int64_t stamp) {
  return count_induced(rowptr, col, n_id, map, stamp, [](const InducedEdges& p) {
    p.rowptr[0] = 0;
    share(0, p.num_nodes,
          [&](int64_t begin, int64_t end) { cpu::count_induced(p, begin, end); });
    std::partial_sum(p.rowptr, p.rowptr + p.num_nodes + 1, p.rowptr);
  });
}

auto induced_edges_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& n_id,
                       const Tensor& induced_rowptr, const Tensor& map, const Tensor& local,
                       int64_t stamp, int64_t num_edges) {
  return induced_edges(rowptr, col, perm, n_id, induced_rowptr, map, local, stamp, num_edges,
                       [](const InducedEdges& p) {
                         share(0, p.num_nodes, [&](int64_t begin, int64_t end) {
                           cpu::induced_edges(p, begin, end);
                         });
                       });
}

auto relabel_cpu(const Tensor& ids, Tensor map, int64_t stamp) {
  return relabel(ids, map, stamp, [](const Relabel& p) {
    cpu::start(p.map);
    share(0, p.num_ids, [&](int64_t begin, int64_t end) { cpu::insert_ids(p, begin, end); });
    *p.count = number_found(
        0, p.num_ids, 0,
        [&](int64_t begin, int64_t end) { return cpu::count_first(p, begin, end); },
        [&](int64_t begin, int64_t end, int64_t rank) {
          return cpu::rank_first(p, begin, end, rank);
        });
    share(0, p.num_ids, [&](int64_t begin, int64_t end) { cpu::places(p, begin, end); });
  });
}

#ifdef PYG_FAST_WITH_CUDA
void begin_sample_cuda(const Tensor& seeds, Tensor n_id, Tensor counts, Tensor map, Tensor local,
                       int64_t stamp) {
  begin_sample(seeds, n_id, counts, map, local, stamp, [&](const SampleHop& p, const int64_t* ids) {
    Launch launch(seeds);
    launch.check(cuda::begin_sample(p, ids, launch.stream()), "begin_sample");
  });
}

void sample_counts_cuda(const Tensor& rowptr, OptTensor weight, const Tensor& n_id, Tensor counts,
                        Tensor sampled_rowptr, int64_t hop, int64_t fanout, bool replace,
                        int64_t max_nodes) {
  sample_counts(rowptr, weight, n_id, counts, sampled_rowptr, hop, fanout, replace, max_nodes,
                [&](const SampleHop& p) {
                  Launch launch(n_id);
                  void* scratch = launch.scratch(cuda::sample_counts_scratch(p));
                  launch.check(cuda::sample_counts(p, scratch, launch.stream()), "sample_counts");
                });
}

void sample_neighbors_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                           OptTensor weight, const Tensor& n_id, const Tensor& counts,
                           const Tensor& sampled_rowptr, Tensor neighbor, Tensor dst, Tensor e_id,
                           Tensor map, int64_t stamp, int64_t num_seeds, int64_t hop,
                           int64_t fanout, bool replace, int64_t seed, int64_t max_nodes,
                           int64_t max_edges) {
  sample_neighbors(rowptr, col, perm, weight, n_id, counts, sampled_rowptr, neighbor, dst, e_id, map,
                   stamp, num_seeds, hop, fanout, replace, seed, max_nodes, max_edges,
                   [&](const SampleHop& p) {
                     Launch launch(n_id);
                     launch.check(cuda::sample_neighbors(p, launch.stream()), "sample_neighbors");
                   });
}

void append_nodes_cuda(const Tensor& neighbor, Tensor n_id, Tensor counts, Tensor map, Tensor local,
                       int64_t stamp, int64_t num_seeds, int64_t hop, int64_t max_edges) {
  append_nodes(neighbor, n_id, counts, map, local, stamp, num_seeds, hop, max_edges,
               [&](const SampleHop& p) {
                 Launch launch(n_id);
                 void* scratch = launch.scratch(cuda::append_nodes_scratch(p));
                 launch.check(cuda::append_nodes(p, scratch, launch.stream()), "append_nodes");
               });
}

auto take_sample_cuda(const Tensor& n_id, const Tensor& sampled_rowptr, const Tensor& neighbor,
                      const Tensor& dst, const Tensor& e_id, const Tensor& map, const Tensor& local,
                      int64_t stamp, int64_t num_nodes, int64_t num_rows, int64_t num_edges) {
  return take_sample(n_id, sampled_rowptr, neighbor, dst, e_id, map, local, stamp, num_nodes,
                     num_rows, num_edges, [&](const TakeSample& p) {
                       Launch launch(n_id);
                       launch.check(cuda::take_sample(p, launch.stream()), "take_sample");
                     });
}

Tensor count_induced_cuda(const Tensor& rowptr, const Tensor& col, const Tensor& n_id,
                          const Tensor& map, int64_t stamp) {
  return count_induced(rowptr, col, n_id, map, stamp, [&](const InducedEdges& p) {
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::count_induced_scratch(p));
    launch.check(cuda::count_induced(p, scratch, launch.stream()), "count_induced");
  });
}

auto induced_edges_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& n_id,
                        const Tensor& induced_rowptr, const Tensor& map, const Tensor& local,
                        int64_t stamp, int64_t num_edges) {
  return induced_edges(rowptr, col, perm, n_id, induced_rowptr, map, local, stamp, num_edges,
                       [&](const InducedEdges& p) {
                         Launch launch(n_id);
                         launch.check(cuda::induced_edges(p, launch.stream()), "induced_edges");
                       });
}

auto relabel_cuda(const Tensor& ids, Tensor map, int64_t stamp) {
  return relabel(ids, map, stamp, [&](const Relabel& p) {
    Launch launch(ids);
    void* scratch = launch.scratch(cuda::relabel_scratch(p));
    launch.check(cuda::relabel(p, scratch, launch.stream()), "relabel");
  });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("begin_sample", TORCH_BOX(&pyg_fast::begin_sample_cpu));
  m.impl("sample_counts", TORCH_BOX(&pyg_fast::sample_counts_cpu));
  m.impl("sample_neighbors", TORCH_BOX(&pyg_fast::sample_neighbors_cpu));
  m.impl("append_nodes", TORCH_BOX(&pyg_fast::append_nodes_cpu));
  m.impl("take_sample", TORCH_BOX(&pyg_fast::take_sample_cpu));
  m.impl("count_induced", TORCH_BOX(&pyg_fast::count_induced_cpu));
  m.impl("induced_edges", TORCH_BOX(&pyg_fast::induced_edges_cpu));
  m.impl("relabel", TORCH_BOX(&pyg_fast::relabel_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("begin_sample", TORCH_BOX(&pyg_fast::begin_sample_cuda));
  m.impl("sample_counts", TORCH_BOX(&pyg_fast::sample_counts_cuda));
  m.impl("sample_neighbors", TORCH_BOX(&pyg_fast::sample_neighbors_cuda));
  m.impl("append_nodes", TORCH_BOX(&pyg_fast::append_nodes_cuda));
  m.impl("take_sample", TORCH_BOX(&pyg_fast::take_sample_cuda));
  m.impl("count_induced", TORCH_BOX(&pyg_fast::count_induced_cuda));
  m.impl("induced_edges", TORCH_BOX(&pyg_fast::induced_edges_cuda));
  m.impl("relabel", TORCH_BOX(&pyg_fast::relabel_cuda));
}
#endif
