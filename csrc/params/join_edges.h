// The edges of a batch of graphs, from those of a dataset.
#pragma once
#include "common.h"

namespace pyg_fast {

// Graph g has the rows node_start[g]... of `rowptr` and edge_start[g]... of `ends`, which count its nodes
// and edges from zero. In the batch its nodes are node_ptr[g]..., its edges edge_ptr[g]...
struct JoinEdges {
  int64_t num_edges = 0;   // columns of `edges`, at least edge_ptr[num_graphs]
  int64_t num_nodes = 0;   // columns of `out_rowptr` less one, at least node_ptr[num_graphs]
  int64_t num_graphs = 0;
  const int32_t* ends = nullptr;    // [*, 4] source, destination; in the transpose destination, position
  const int32_t* rowptr = nullptr;  // [*, 2] the first edge of each node, in both structures
  const int64_t* node_start = nullptr;  // [num_graphs]
  const int64_t* edge_start = nullptr;
  const int64_t* node_ptr = nullptr;    // [num_graphs + 1]
  const int64_t* edge_ptr = nullptr;
  int32_t* edges = nullptr;       // [4, num_edges]
  int32_t* out_rowptr = nullptr;  // [2, num_nodes + 1]
};

namespace cpu {
// Over graphs.
void join_edges(const JoinEdges& p, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace pyg_fast
