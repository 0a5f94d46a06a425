// The rows and edges of a batch of graphs, from those of a dataset.
#pragma once
#include "common.h"

namespace pyg_fast {

// Rows of one kind, such as nodes: graph g of the batch has the rows start[g]... of the dataset, which are
// ptr[g]... of the batch. Rows of a padding are beyond the last row of the dataset, and all read `last`.
struct GraphRows {
  int64_t num_graphs = 0;
  int64_t num_rows = 0;  // ptr[num_graphs]
  int64_t last = 0;
  const int64_t* start = nullptr;  // [num_graphs]
  const int64_t* ptr = nullptr;    // [num_graphs + 1]
  int64_t* source = nullptr;       // [num_rows] in the dataset
  int64_t* owner = nullptr;        // [num_rows] the number of the graph
};

PYG_FAST_DEVICE inline void write_row(const GraphRows& p, int64_t graph, int64_t row) {
  const int64_t source = p.start[graph] + row - p.ptr[graph];
  p.source[row] = source < p.last ? source : p.last;
  p.owner[row] = graph;
}

// Graph g has the rows node_start[g]... of `rowptr` and edge_start[g]... of `ends`, which count its nodes
// and edges from zero. In the batch its nodes are node_ptr[g]..., its edges edge_ptr[g]...
struct JoinEdges {
  int64_t num_edges = 0;  // columns of `edges`, at least edge_ptr[num_graphs]
  int64_t num_nodes = 0;  // columns of `out_rowptr` less one, at least node_ptr[num_graphs]
  int64_t num_graphs = 0;
  const int32_t* ends =
      nullptr;  // [*, 4] source, destination; in the transpose destination, position
  const int32_t* rowptr = nullptr;      // [*, 2] the first edge of each node, in both structures
  const int64_t* node_start = nullptr;  // [num_graphs]
  const int64_t* edge_start = nullptr;
  const int64_t* node_ptr = nullptr;  // [num_graphs + 1]
  const int64_t* edge_ptr = nullptr;
  int32_t* edges = nullptr;       // [4, num_edges]
  int32_t* out_rowptr = nullptr;  // [2, num_nodes + 1]
};

PYG_FAST_DEVICE inline void write_edge(const JoinEdges& p, int64_t graph, int64_t edge) {
  const auto node = static_cast<int32_t>(p.node_ptr[graph]);
  const int32_t* ends = p.ends + 4 * (p.edge_start[graph] + edge - p.edge_ptr[graph]);
  int32_t* out = p.edges + edge;
  out[0] = ends[0] + node;
  out[p.num_edges] = ends[1] + node;
  out[2 * p.num_edges] = ends[2] + node;
  out[3 * p.num_edges] = ends[3] + static_cast<int32_t>(p.edge_ptr[graph]);
}

PYG_FAST_DEVICE inline void write_rowptr(const JoinEdges& p, int64_t graph, int64_t node) {
  const auto edge = static_cast<int32_t>(p.edge_ptr[graph]);
  const int32_t* rowptr = p.rowptr + 2 * (p.node_start[graph] + node - p.node_ptr[graph]);
  p.out_rowptr[node] = rowptr[0] + edge;
  p.out_rowptr[node + p.num_nodes + 1] = rowptr[1] + edge;
}

// The number of edges, after the last node and for nodes of a padding.
PYG_FAST_DEVICE inline void write_end(const JoinEdges& p, int64_t node) {
  const auto edges = static_cast<int32_t>(p.edge_ptr[p.num_graphs]);
  p.out_rowptr[node] = edges;
  p.out_rowptr[node + p.num_nodes + 1] = edges;
}

namespace cpu {
// Over graphs.
void graph_rows(const GraphRows& p, int64_t begin, int64_t end);
void join_edges(const JoinEdges& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
const char* graph_rows(const GraphRows& p, void* stream);
const char* join_edges(const JoinEdges& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
