#include "params/join_edges.h"

#include "stable.h"

namespace pyg_fast {
namespace {

// Row k of a matrix of int64 with at least so many columns.
const int64_t* row_of(const Tensor& t, const char* name, int64_t k, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == 2 && t.size(1) >= columns && t.is_contiguous(), name,
                  " must have shape [2, ", columns, "] and be contiguous");
  check_type(t, name, ScalarType::Long);
  return static_cast<const int64_t*>(t.const_data_ptr()) + k * t.size(1);
}

// Raises unless all graphs lie within the rows of the dataset and of the batch.
void check_graphs(const char* name, const int64_t* start, const int64_t* ptr, int64_t num_graphs,
                  int64_t rows, int64_t total) {
  for (int64_t g = 0; g < num_graphs; ++g) {
    const int64_t count = ptr[g + 1] - ptr[g];
    STD_TORCH_CHECK(ptr[g] >= 0 && count >= 0 && start[g] >= 0 && start[g] + count <= rows, "graph ", g,
                    " has ", name, " outside of the dataset");
  }
  STD_TORCH_CHECK(ptr[num_graphs] <= total && total <= INT32_MAX, "the batch must have from ",
                  ptr[num_graphs], " to 2^31 - 1 ", name, ", got ", total);
}

std::tuple<Tensor, Tensor> join_edges(const Tensor& ends, const Tensor& rowptr, const Tensor& start,
                                      const Tensor& ptr, int64_t num_graphs, int64_t num_nodes,
                                      int64_t num_edges) {
  check_matrix(ends, "ends", ends.size(0), 4);
  check_matrix(rowptr, "rowptr", rowptr.size(0), 2);
  check_type(ends, "ends", ScalarType::Int);
  check_type(rowptr, "rowptr", ScalarType::Int);
  STD_TORCH_CHECK(ends.is_contiguous() && rowptr.is_contiguous(),
                  "ends and rowptr must be contiguous");
  STD_TORCH_CHECK(num_graphs >= 0, "num_graphs must not be negative");
  JoinEdges p;
  p.num_graphs = num_graphs;
  p.num_nodes = num_nodes;
  p.num_edges = num_edges;
  p.ends = static_cast<const int32_t*>(ends.const_data_ptr());
  p.rowptr = static_cast<const int32_t*>(rowptr.const_data_ptr());
  p.node_start = row_of(start, "start", 0, num_graphs);
  p.edge_start = row_of(start, "start", 1, num_graphs);
  p.node_ptr = row_of(ptr, "ptr", 0, num_graphs + 1);
  p.edge_ptr = row_of(ptr, "ptr", 1, num_graphs + 1);
  check_graphs("nodes", p.node_start, p.node_ptr, num_graphs, rowptr.size(0), num_nodes);
  check_graphs("edges", p.edge_start, p.edge_ptr, num_graphs, ends.size(0), num_edges);
  Tensor edges = empty(ends, {4, num_edges}, ScalarType::Int);
  Tensor out_rowptr = empty(ends, {2, num_nodes + 1}, ScalarType::Int);
  p.edges = static_cast<int32_t*>(edges.mutable_data_ptr());
  p.out_rowptr = static_cast<int32_t*>(out_rowptr.mutable_data_ptr());
  share_rows(num_graphs, 2 * num_edges + num_nodes,
             [&](int64_t begin, int64_t end) { cpu::join_edges(p, begin, end); });
  for (int64_t k = 0; k < 2; ++k) {
    for (int64_t i = p.node_ptr[num_graphs]; i <= num_nodes; ++i) {
      p.out_rowptr[k * (num_nodes + 1) + i] = static_cast<int32_t>(p.edge_ptr[num_graphs]);
    }
  }
  return {edges, out_rowptr};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The edges of a batch of graphs and the first edge of each of its nodes, both by destination and by
  // source, from those of a dataset; what follows the last graph is not written in `edges`. CPU only.
  m.def(
      "join_edges(Tensor ends, Tensor rowptr, Tensor start, Tensor ptr, int num_graphs, int num_nodes, "
      "int num_edges) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("join_edges", TORCH_BOX(&pyg_fast::join_edges));
}
