#include "params/join_edges.h"

#include "stable.h"

namespace pyg_fast {
namespace {

// Row k of a matrix of int64 with at least so many columns.
const int64_t* row_of(const Tensor& t, const char* name, int64_t k, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) >= columns && t.is_contiguous(), name, " must have ",
                  columns, " columns and be contiguous");
  STD_TORCH_CHECK(k >= 0 && k < t.size(0), name, " must have a row ", k);
  check_type(t, name, ScalarType::Long);
  return static_cast<const int64_t*>(t.const_data_ptr()) + k * t.size(1);
}

// Raises unless all graphs lie within the rows of the dataset and of the batch, both on the host.
void check_graphs(const char* name, const int64_t* start, const int64_t* ptr, int64_t num_graphs,
                  int64_t rows, int64_t total) {
  for (int64_t g = 0; g < num_graphs; ++g) {
    const int64_t count = ptr[g + 1] - ptr[g];
    STD_TORCH_CHECK(ptr[g] >= 0 && count >= 0 && start[g] >= 0 && start[g] + count <= rows,
                    "graph ", g, " has ", name, " outside of the dataset");
  }
  STD_TORCH_CHECK(ptr[num_graphs] <= total && total <= INT32_MAX, "the batch must have from ",
                  ptr[num_graphs], " to 2^31 - 1 ", name, ", got ", total);
}

template <bool kCuda>
std::tuple<Tensor, Tensor> graph_rows(const Tensor& start, const Tensor& ptr, int64_t level,
                                      int64_t num_rows, int64_t last) {
  GraphRows p;
  STD_TORCH_CHECK(start.dim() == 2, "start must have two dimensions, got ", start.dim());
  p.num_graphs = start.size(1);
  p.num_rows = num_rows;
  p.last = last;
  p.start = row_of(start, "start", level, p.num_graphs);
  p.ptr = row_of(ptr, "ptr", level, p.num_graphs + 1);
  check_device(ptr, "ptr", start);
  Tensor source = empty(start, {num_rows}, ScalarType::Long);
  Tensor owner = empty(start, {num_rows}, ScalarType::Long);
  p.source = static_cast<int64_t*>(source.mutable_data_ptr());
  p.owner = static_cast<int64_t*>(owner.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(start);
    launch.check(cuda::graph_rows(p, launch.stream()), "graph_rows");
  } else {
    for (int64_t g = 0; g < p.num_graphs; ++g) {
      STD_TORCH_CHECK(p.start[g] >= 0 && p.ptr[g] <= p.ptr[g + 1], "graph ", g,
                      " has invalid rows");
    }
    STD_TORCH_CHECK(p.ptr[0] == 0 && p.ptr[p.num_graphs] == num_rows, "ptr must end with ",
                    num_rows);
    share_rows(p.num_graphs, 2 * num_rows,
               [&](int64_t begin, int64_t end) { cpu::graph_rows(p, begin, end); });
  }
  return {source, owner};
}

// `ends` and `rowptr` may be in host memory that the device of `start` reads; the caller ensures this.
template <bool kCuda>
std::tuple<Tensor, Tensor> join_edges(const Tensor& ends, const Tensor& rowptr, const Tensor& start,
                                      const Tensor& ptr, int64_t num_graphs, int64_t num_nodes,
                                      int64_t num_edges) {
  check_matrix(ends, "ends", ends.size(0), 4);
  check_matrix(rowptr, "rowptr", rowptr.size(0), 2);
  check_type(ends, "ends", ScalarType::Int);
  check_type(rowptr, "rowptr", ScalarType::Int);
  check_device(ptr, "ptr", start);
  STD_TORCH_CHECK(ends.is_contiguous() && rowptr.is_contiguous(),
                  "ends and rowptr must be contiguous");
  STD_TORCH_CHECK(num_graphs >= 0, "num_graphs must not be negative");
  // Rows of `start` and `ptr`: those of graphs come before.
  constexpr int64_t kNodes = 1, kEdges = 2;
  JoinEdges p;
  p.num_graphs = num_graphs;
  p.num_nodes = num_nodes;
  p.num_edges = num_edges;
  p.ends = static_cast<const int32_t*>(ends.const_data_ptr());
  p.rowptr = static_cast<const int32_t*>(rowptr.const_data_ptr());
  p.node_start = row_of(start, "start", kNodes, num_graphs);
  p.edge_start = row_of(start, "start", kEdges, num_graphs);
  p.node_ptr = row_of(ptr, "ptr", kNodes, num_graphs + 1);
  p.edge_ptr = row_of(ptr, "ptr", kEdges, num_graphs + 1);
  if constexpr (!kCuda) {
    check_graphs("nodes", p.node_start, p.node_ptr, num_graphs, rowptr.size(0), num_nodes);
    check_graphs("edges", p.edge_start, p.edge_ptr, num_graphs, ends.size(0), num_edges);
  }
  Tensor edges = empty(start, {4, num_edges}, ScalarType::Int);
  Tensor out_rowptr = empty(start, {2, num_nodes + 1}, ScalarType::Int);
  p.edges = static_cast<int32_t*>(edges.mutable_data_ptr());
  p.out_rowptr = static_cast<int32_t*>(out_rowptr.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(start);
    launch.check(cuda::join_edges(p, launch.stream()), "join_edges");
  } else {
    share_rows(num_graphs, 2 * num_edges + num_nodes,
               [&](int64_t begin, int64_t end) { cpu::join_edges(p, begin, end); });
    for (int64_t k = p.node_ptr[num_graphs]; k <= num_nodes; ++k) write_end(p, k);
  }
  return {edges, out_rowptr};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Of a batch of graphs the rows of one level, a row of `start` and `ptr`: their rows in the dataset, at
  // most `last`, and the number of the graph of each.
  m.def(
      "graph_rows(Tensor start, Tensor ptr, int level, int num_rows, int last) -> (Tensor, Tensor)");
  // The edges of a batch of graphs and the first edge of each of its nodes, both by destination and by
  // source, from those of a dataset; what follows the last graph is not written in `edges`. Levels 1 and 2
  // of `start` and `ptr` are those of nodes and edges.
  m.def(
      "join_edges(Tensor ends, Tensor rowptr, Tensor start, Tensor ptr, int num_graphs, int num_nodes, "
      "int num_edges) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(graph_rows)
PYG_FAST_IMPL(join_edges)
