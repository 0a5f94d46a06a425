#include "bindings/minibatch.h"
#include "params/typed_sample.h"

namespace pyg_fast {
namespace {

static_assert(sizeof(EdgeType) == 6 * sizeof(int64_t), "a row of the table of edge types");

// `counts`: nodes, before, work, edges and first_new of TypedHop, one after the other.
void fill_counts(TypedHop& p, const Tensor& counts, const Tensor& types, int64_t num_hops,
                 int64_t num_node_types, int64_t hop, const Tensor& on) {
  STD_TORCH_CHECK(types.dim() == 2 && types.size(1) == 6, "types must have shape [num_types, 6]");
  p.types = reinterpret_cast<const EdgeType*>(int64s(types, "types", on));
  p.num_types = types.size(0);
  p.num_node_types = num_node_types;
  p.hop = hop;
  STD_TORCH_CHECK(
      num_node_types > 0 && p.num_types > 0 && num_hops > 0 && hop >= 0 && hop <= num_hops,
      "there must be types and hops");
  const int64_t node_segments = (num_hops + 1) * num_node_types;
  const int64_t edge_segments = num_hops * p.num_types;
  check_vector(counts, "counts", 2 * node_segments + 2 * edge_segments + 2 * p.num_types + 3);
  p.nodes = int64s(counts, "counts", on);
  p.before = p.nodes + node_segments + 1;
  p.work = p.before + node_segments;
  p.edges = p.work + edge_segments + p.num_types + 1;
  p.first_new = p.edges + edge_segments + 1;
}

void fill_nodes(TypedHop& p, const Tensor& n_id, const OptTensor& root, int64_t num_graph_nodes) {
  p.n_id = int64s(n_id, "n_id", n_id);
  p.num_graph_nodes = num_graph_nodes;
  if (!root) return;
  p.root = int32s(*root, "root", n_id);
  STD_TORCH_CHECK(root->size(0) >= n_id.size(0), "root must have as much room as n_id");
}

void fill_edges(TypedHop& p, const Tensor& neighbor, const Tensor& map, int64_t stamp,
                int64_t num_seeds, int64_t max_edges, const Tensor& on) {
  p.neighbor = int64s(neighbor, "neighbor", on);
  STD_TORCH_CHECK(neighbor.size(0) >= max_edges, "neighbor must have room for the edges");
  p.map = node_map_of(map, stamp, on);
  p.num_seeds = num_seeds;
  p.max_edges = max_edges;
}

void fill_rules(TypedHop& p, const Tensor& rowptr, const OptTensor& col, const OptTensor& perm,
                const OptTensor& weight, const OptTensor& time, const OptTensor& seed_time,
                const Tensor& fanout, bool replace, bool last, int64_t max_age, const Tensor& on) {
  p.graph = sampled_graph(rowptr, col, perm, weight);
  p.weight = static_cast<const double*>(pointer(weight));
  check_type(time, "time", ScalarType::Long);
  STD_TORCH_CHECK(!time || time->is_contiguous(), "time must be contiguous");
  if (time && seed_time) {
    p.time = static_cast<const int64_t*>(pointer(time));
    p.seed_time = int64s(*seed_time, "seed_time", on);
  }
  check_vector(fanout, "fanout", p.num_types);
  p.fanout = int64s(fanout, "fanout", on);
  p.replace = replace;
  p.last = last;
  p.max_age = max_age;
}

template <bool kCuda>
void begin_typed(const Tensor& seeds, const OptTensor& seed_root, const Tensor& n_id,
                 const OptTensor& root, const Tensor& counts, const Tensor& types,
                 const Tensor& map, const Tensor& local, const Tensor& sampled_rowptr,
                 int64_t stamp, int64_t num_hops, int64_t num_node_types, int64_t num_graph_nodes) {
  TypedHop p;
  fill_counts(p, counts, types, num_hops, num_node_types, 0, n_id);
  fill_nodes(p, n_id, root, num_graph_nodes);
  p.num_seeds = seeds.size(0);
  STD_TORCH_CHECK(n_id.size(0) >= p.num_seeds && local.size(0) >= p.num_seeds,
                  "n_id and local must have room for the seeds");
  STD_TORCH_CHECK(sampled_rowptr.size(0) > 0, "sampled_rowptr must not be empty");
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  p.local = int32s(local, "local", n_id);
  p.map = node_map_of(map, stamp, n_id);
  const int64_t* ids = int64s(seeds, "seeds", n_id);
  STD_TORCH_CHECK(seed_root.has_value() == root.has_value(), "root must be given with seed_root");
  const int32_t* roots = nullptr;
  if (seed_root) {
    check_vector(seed_root, "seed_root", p.num_seeds);
    roots = int32s(*seed_root, "seed_root", n_id);
  }
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::begin_typed(p, ids, roots, launch.stream()), "begin_typed");
  } else {
    cpu::start(p.map);
    p.rowptr[0] = 0;
    share(0, p.num_seeds, [&](int64_t begin, int64_t end) {
      std::copy(ids + begin, ids + end, p.n_id + begin);
      if (roots) std::copy(roots + begin, roots + end, p.root + begin);
      cpu::begin_typed(p, begin, end);
    });
  }
}

template <bool kCuda>
void typed_counts(const Tensor& rowptr, const OptTensor& weight, const OptTensor& time,
                  const OptTensor& seed_time, const Tensor& types, const Tensor& fanout,
                  const Tensor& n_id, const OptTensor& root, const Tensor& counts,
                  const Tensor& sampled_rowptr, int64_t num_hops, int64_t num_node_types,
                  int64_t hop, bool replace, bool last, int64_t max_age, int64_t max_work) {
  TypedHop p;
  fill_counts(p, counts, types, num_hops, num_node_types, hop, n_id);
  fill_nodes(p, n_id, root, 0);
  fill_rules(p, rowptr, std::nullopt, std::nullopt, weight, time, seed_time, fanout, replace, last,
             max_age, n_id);
  p.max_work = max_work;
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  STD_TORCH_CHECK(hop < num_hops && sampled_rowptr.size(0) > max_work,
                  "sampled_rowptr must have room for the work");
  if constexpr (kCuda) {
    if (max_work == 0) return;
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::typed_counts_scratch(p));
    launch.check(cuda::typed_counts(p, scratch, launch.stream()), "typed_counts");
  } else {
    const int64_t first = p.first_work(), end = p.last_work();
    STD_TORCH_CHECK(end < sampled_rowptr.size(0), "sampled_rowptr must have room for the work");
    share(first, end, [&](int64_t begin, int64_t stop) { cpu::typed_counts(p, begin, stop); });
    int64_t sum = p.rowptr[first];
    for (int64_t work = first; work < end; ++work) {
      sum += p.rowptr[work + 1];
      p.rowptr[work + 1] = end_of_edges(sum);
    }
  }
}

template <bool kCuda>
void typed_neighbors(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                     const OptTensor& weight, const OptTensor& time, const OptTensor& seed_time,
                     const Tensor& types, const Tensor& fanout, const Tensor& n_id,
                     const OptTensor& root, const Tensor& counts, const Tensor& sampled_rowptr,
                     const Tensor& neighbor, const Tensor& dst, const Tensor& e_id,
                     const Tensor& map, int64_t stamp, int64_t num_seeds, int64_t num_hops,
                     int64_t num_node_types, int64_t num_graph_nodes, int64_t hop, bool replace,
                     bool last, int64_t max_age, int64_t seed, int64_t most, bool has_all,
                     int64_t max_work, int64_t max_edges) {
  TypedHop p;
  fill_counts(p, counts, types, num_hops, num_node_types, hop, n_id);
  fill_nodes(p, n_id, root, num_graph_nodes);
  fill_rules(p, rowptr, col, perm, weight, time, seed_time, fanout, replace, last, max_age, n_id);
  fill_edges(p, neighbor, map, stamp, num_seeds, max_edges, n_id);
  check_vector(time, "time", p.graph.num_edges);
  p.seed = static_cast<uint64_t>(seed);
  p.most = most;
  p.has_all = has_all;
  p.max_work = max_work;
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  p.dst = int32s(dst, "dst", n_id);
  p.e_id = int64s(e_id, "e_id", n_id);
  STD_TORCH_CHECK(
      hop < num_hops && dst.size(0) >= neighbor.size(0) && e_id.size(0) >= neighbor.size(0),
      "dst and e_id must have as much room as neighbor");
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::typed_neighbors(p, launch.stream()), "typed_neighbors");
  } else {
    const int64_t first = p.first_work(), count = p.last_work() - first;
    STD_TORCH_CHECK(p.last_edge() <= neighbor.size(0), "neighbor must have room for all edges");
    // More shares than threads: the work per node varies.
    const int64_t shares = 8 * num_threads();
    parallel(shares, count * kLookup, [&](int64_t k) {
      cpu::typed_neighbors(p, first + count * k / shares, first + count * (k + 1) / shares);
    });
    share(p.first_edge(), p.last_edge(),
          [&](int64_t begin, int64_t end) { cpu::insert_typed(p, begin, end); });
  }
}

// Part of the edges of one type in a hop.
struct Piece {
  int64_t src, begin, end, num_new = 0, slot = 0, number = 0;
};

// Gives numbers to the nodes found in a hop, and fills the counts of the next one.
void append_on_cpu(const TypedHop& p) {
  const int64_t total = p.last_edge() - p.first_edge(), T = p.num_types, S = p.num_node_types;
  const int64_t longest =
      num_threads() > 1 ? std::max<int64_t>(total / num_threads(), 4096) : total;
  int64_t* edges = p.edges + p.hop * T;
  std::vector<Piece> pieces;
  for (int64_t type = 0; type < T; ++type) {
    edges[type + 1] = p.rowptr[p.work[p.hop * T + type + 1]];
    for (int64_t begin = edges[type]; begin < edges[type + 1]; begin += longest) {
      pieces.push_back({p.types[type].src, begin, std::min(begin + longest, edges[type + 1])});
    }
  }
  const int64_t count = static_cast<int64_t>(pieces.size());
  parallel(count, total * kLookup, [&](int64_t k) {
    Piece& piece = pieces[static_cast<size_t>(k)];
    piece.num_new = cpu::mark_new(p, piece.begin, piece.end);
  });
  const int64_t* old = p.nodes + p.hop * S;
  int64_t* nodes = p.nodes + (p.hop + 1) * S;
  int64_t* before = p.before + (p.hop + 1) * S;
  std::vector<int64_t> found(static_cast<size_t>(S), 0);
  for (Piece& piece : pieces) {
    int64_t& of_type = found[static_cast<size_t>(piece.src)];
    piece.slot = piece.number = of_type;
    of_type += piece.num_new;
  }
  for (int64_t type = 0; type < S; ++type) {
    nodes[type + 1] = nodes[type] + found[static_cast<size_t>(type)];
    before[type] = p.before[p.hop * S + type] + old[type + 1] - old[type];
  }
  int64_t* work = p.work + (p.hop + 1) * T;
  for (int64_t type = 0; type < T; ++type) {
    const int64_t dst = p.types[type].dst;
    work[type + 1] = work[type] + nodes[dst + 1] - nodes[dst];
  }
  parallel(count, total * kLookup, [&](int64_t k) {
    const Piece& piece = pieces[static_cast<size_t>(k)];
    cpu::append_typed(p, piece.begin, piece.end, nodes[piece.src] + piece.slot,
                      before[piece.src] + piece.number);
  });
}

template <bool kCuda>
void append_typed(const Tensor& types, const Tensor& sampled_rowptr, const Tensor& neighbor,
                  const Tensor& n_id, const OptTensor& root, const Tensor& counts,
                  const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_seeds,
                  int64_t num_hops, int64_t num_node_types, int64_t num_graph_nodes, int64_t hop,
                  int64_t max_edges) {
  TypedHop p;
  fill_counts(p, counts, types, num_hops, num_node_types, hop, n_id);
  fill_nodes(p, n_id, root, num_graph_nodes);
  fill_edges(p, neighbor, map, stamp, num_seeds, max_edges, n_id);
  p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  p.local = int32s(local, "local", n_id);
  STD_TORCH_CHECK(hop < num_hops && local.size(0) >= num_seeds + neighbor.size(0),
                  "local must have room for all positions");
  if constexpr (kCuda) {
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::append_typed_scratch(p));
    launch.check(cuda::append_typed(p, scratch, launch.stream()), "append_typed");
  } else {
    STD_TORCH_CHECK(p.last_edge() <= neighbor.size(0), "neighbor must have room for all edges");
    append_on_cpu(p);
  }
}

// `layout`: first_node, node_shift, edge_shift, out_edges, count and out_rows of TakeTyped, one after the
// other; `room`: of the output for edges.
template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> take_typed(
    const Tensor& types, const Tensor& counts, const Tensor& layout, const Tensor& n_id,
    const OptTensor& root, const Tensor& sampled_rowptr, const Tensor& neighbor, const Tensor& dst,
    const Tensor& e_id, const Tensor& map, const Tensor& local, int64_t stamp, int64_t num_hops,
    int64_t num_node_types, int64_t num_nodes, int64_t num_rows, int64_t num_edges, int64_t room) {
  STD_TORCH_CHECK(num_nodes >= 0 && num_nodes <= n_id.size(0) && num_edges >= 0 && num_rows >= 0 &&
                      num_edges <= room && num_edges <= neighbor.size(0) &&
                      num_edges <= dst.size(0) && num_edges <= e_id.size(0),
                  "there is not as much to take");
  TakeTyped t;
  fill_counts(t.p, counts, types, num_hops, num_node_types, num_hops, n_id);
  fill_nodes(t.p, n_id, root, 0);
  fill_edges(t.p, neighbor, map, stamp, 0, num_edges, n_id);
  t.p.rowptr = int32s(sampled_rowptr, "sampled_rowptr", n_id);
  t.p.dst = int32s(dst, "dst", n_id);
  t.p.e_id = int64s(e_id, "e_id", n_id);
  t.p.local = int32s(local, "local", n_id);
  t.num_nodes = num_nodes;
  t.num_rows = num_rows;
  t.num_edges = num_edges;
  const int64_t T = t.p.num_types, segments = (num_hops + 1) * num_node_types;
  check_vector(layout, "layout", num_node_types + segments + num_hops * T + 3 * T);
  t.first_node = int64s(layout, "layout", n_id);
  t.node_shift = t.first_node + num_node_types;
  t.edge_shift = t.node_shift + segments;
  t.out_edges = t.edge_shift + num_hops * T;
  t.count = t.out_edges + T;
  t.out_rows = t.count + T;
  Tensor out_n_id = empty(n_id, {num_nodes}, ScalarType::Long);
  Tensor out_root = empty(n_id, {root ? num_nodes : 0}, ScalarType::Long);
  Tensor rowptr = empty(n_id, {num_rows}, ScalarType::Int);
  Tensor col = empty(n_id, {room}, ScalarType::Int);
  Tensor ends = empty(n_id, {2 * room}, ScalarType::Long);
  Tensor out_e_id = empty(n_id, {room}, ScalarType::Long);
  t.out_n_id = static_cast<int64_t*>(out_n_id.mutable_data_ptr());
  t.out_root = root ? static_cast<int64_t*>(out_root.mutable_data_ptr()) : nullptr;
  t.out_rowptr = static_cast<int32_t*>(rowptr.mutable_data_ptr());
  t.out_col = static_cast<int32_t*>(col.mutable_data_ptr());
  t.out_ends = static_cast<int64_t*>(ends.mutable_data_ptr());
  t.out_e_id = static_cast<int64_t*>(out_e_id.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::take_typed(t, launch.stream()), "take_typed");
  } else {
    share(0, num_nodes, [&](int64_t begin, int64_t end) { cpu::take_nodes(t, begin, end); });
    share(0, num_edges, [&](int64_t begin, int64_t end) { cpu::take_edges(t, begin, end); });
    share(0, num_rows, [&](int64_t begin, int64_t end) { cpu::take_rows(t, begin, end); });
  }
  return {out_n_id, out_root, rowptr, col, ends, out_e_id};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Sampled mini-batches of graphs with types of nodes and edges, see params/typed_sample.h. `types`:
  // EdgeType of each; `counts`: as TypedHop has them; `root`: where each seed has a subgraph.
  m.def(
      "begin_typed(Tensor seeds, Tensor? seed_root, Tensor(a!) n_id, Tensor(b!)? root, Tensor counts, "
      "Tensor types, Tensor(c!) map, Tensor(d!) local, Tensor(e!) sampled_rowptr, int stamp, "
      "int num_hops, int num_node_types, int num_graph_nodes) -> ()");
  // One hop: where the edges of each node begin; the edges, and their sources into the map; new nodes.
  // `max_work`, `max_edges`: limits for this hop; the graph may be in pinned host memory.
  m.def(
      "typed_counts(Tensor rowptr, Tensor? weight, Tensor? time, Tensor? seed_time, Tensor types, "
      "Tensor fanout, Tensor n_id, Tensor? root, Tensor counts, Tensor(a!) sampled_rowptr, "
      "int num_hops, int num_node_types, int hop, bool replace, bool last, int max_age, "
      "int max_work) -> ()");
  m.def(
      "typed_neighbors(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor? time, "
      "Tensor? seed_time, Tensor types, Tensor fanout, Tensor n_id, Tensor? root, Tensor counts, "
      "Tensor sampled_rowptr, Tensor(a!) neighbor, Tensor(b!) dst, Tensor(c!) e_id, Tensor(d!) map, "
      "int stamp, int num_seeds, int num_hops, int num_node_types, int num_graph_nodes, int hop, "
      "bool replace, bool last, int max_age, int seed, int most, bool has_all, int max_work, "
      "int max_edges) -> ()");
  m.def(
      "append_typed(Tensor types, Tensor sampled_rowptr, Tensor neighbor, Tensor(a!) n_id, "
      "Tensor(b!)? root, Tensor(c!) counts, Tensor(d!) map, Tensor(e!) local, int stamp, "
      "int num_seeds, int num_hops, int num_node_types, int num_graph_nodes, int hop, "
      "int max_edges) -> ()");
  // The batch: nodes by type, their seeds, and by edge type rowptr, col, edge_index, e_id.
  m.def(
      "take_typed(Tensor types, Tensor counts, Tensor layout, Tensor n_id, Tensor? root, "
      "Tensor sampled_rowptr, Tensor neighbor, Tensor dst, Tensor e_id, Tensor map, Tensor local, "
      "int stamp, int num_hops, int num_node_types, int num_nodes, int num_rows, int num_edges, "
      "int room) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(begin_typed)
PYG_FAST_IMPL(typed_counts)
PYG_FAST_IMPL(typed_neighbors)
PYG_FAST_IMPL(append_typed)
PYG_FAST_IMPL(take_typed)
