// The rows and edges of a batch of graphs, from those of a dataset.
#pragma once
#include "common.h"

namespace pyg_fast {

// What is written for each row of a batch at one level, such as nodes.
enum class Take : int8_t {
  copy,     // the row of the dataset
  shift32,  // the same, plus the first row of its graph at another level: numbers of 4 bytes
  shift64,  // of 8 bytes
  owner,    // the number of its graph, int64
  is_real,  // whether the graph is no padding, one byte
};

// Graph g has the rows start[g]... of the dataset, which are ptr[g]... of the batch. Rows of a padding are
// beyond the last row of the dataset, and all read `last`.
struct TakeTask {
  Take take = Take::copy;
  int8_t word_bytes = 1;  // rows are copied in words of 16, 8, 4, 2 or 1 bytes
  int64_t words = 1;      // of a row
  int64_t num_rows = 0;   // ptr[num_graphs]
  int64_t last = 0;
  const int64_t* start = nullptr;  // [num_graphs]
  const int64_t* ptr = nullptr;    // [num_graphs + 1]
  const int64_t* shift = nullptr;  // [num_graphs]
  const char* rows = nullptr;
  char* out = nullptr;
};

// Some results of a batch: one launch writes them all.
constexpr int kMostTasks = 24;
struct TakeRows {
  int64_t num_graphs = 0;
  int64_t num_real = 0;  // graphs that are no padding
  int num_tasks = 0;
  TakeTask task[kMostTasks];
};

PYG_FAST_DEVICE inline int64_t source_row(const TakeTask& t, int64_t graph, int64_t row) {
  const int64_t source = t.start[graph] + row - t.ptr[graph];
  return source < t.last ? source : t.last;
}

template <typename Word>
PYG_FAST_DEVICE Word& word_of(const char* rows, const TakeTask& t, int64_t row, int64_t word) {
  return reinterpret_cast<Word*>(const_cast<char*>(rows))[row * t.words + word];
}

// Unsigned: numbers wrap around, as those of torch.
template <typename Word>
PYG_FAST_DEVICE void write_shifted(const TakeTask& t, int64_t graph, int64_t row, int64_t word) {
  word_of<Word>(t.out, t, row, word) =
      word_of<Word>(t.rows, t, source_row(t, graph, row), word) + static_cast<Word>(t.shift[graph]);
}

// Graph g has the rows node_start[g]... of `rowptr` and edge_start[g]... of `ends`, which count its nodes
// and edges from zero. In the batch its nodes are node_ptr[g]..., its edges edge_ptr[g]... What follows the
// last graph is that of `ring` and `ring_rowptr`, if they are given.
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
  const int32_t* ring = nullptr;         // [4, num_edges], or nullptr
  const int32_t* ring_rowptr = nullptr;  // [2, num_nodes + 1], or nullptr
  int32_t* edges = nullptr;              // [4, num_edges]
  int32_t* out_rowptr = nullptr;         // [2, num_nodes + 1]
  int64_t* edge_index = nullptr;         // [2, num_edges], sources and destinations again
  int64_t* indptr = nullptr;             // [num_nodes + 1], row pointers by destination again
};

PYG_FAST_DEVICE inline void write_ends(const JoinEdges& p, int64_t edge, int32_t src, int32_t dst,
                                       int32_t t_dst, int32_t position) {
  int32_t* out = p.edges + edge;
  out[0] = src;
  out[p.num_edges] = dst;
  out[2 * p.num_edges] = t_dst;
  out[3 * p.num_edges] = position;
  p.edge_index[edge] = src;
  p.edge_index[edge + p.num_edges] = dst;
}

PYG_FAST_DEVICE inline void write_edge(const JoinEdges& p, int64_t graph, int64_t edge) {
  const auto node = static_cast<int32_t>(p.node_ptr[graph]);
  const int32_t* ends = p.ends + 4 * (p.edge_start[graph] + edge - p.edge_ptr[graph]);
  write_ends(p, edge, ends[0] + node, ends[1] + node, ends[2] + node,
             ends[3] + static_cast<int32_t>(p.edge_ptr[graph]));
}

// An edge after the last graph.
PYG_FAST_DEVICE inline void write_ring(const JoinEdges& p, int64_t edge) {
  const int32_t* ring = p.ring + edge;
  write_ends(p, edge, ring[0], ring[p.num_edges], ring[2 * p.num_edges], ring[3 * p.num_edges]);
}

PYG_FAST_DEVICE inline void write_pointers(const JoinEdges& p, int64_t node, int32_t by_dst,
                                           int32_t by_src) {
  p.out_rowptr[node] = by_dst;
  p.out_rowptr[node + p.num_nodes + 1] = by_src;
  p.indptr[node] = by_dst;
}

PYG_FAST_DEVICE inline void write_rowptr(const JoinEdges& p, int64_t graph, int64_t node) {
  const auto edge = static_cast<int32_t>(p.edge_ptr[graph]);
  const int32_t* rowptr = p.rowptr + 2 * (p.node_start[graph] + node - p.node_ptr[graph]);
  write_pointers(p, node, rowptr[0] + edge, rowptr[1] + edge);
}

// After the last node of the graphs.
PYG_FAST_DEVICE inline void write_end(const JoinEdges& p, int64_t node) {
  if (p.ring_rowptr) {
    write_pointers(p, node, p.ring_rowptr[node], p.ring_rowptr[node + p.num_nodes + 1]);
    return;
  }
  const auto edges = static_cast<int32_t>(p.edge_ptr[p.num_graphs]);
  write_pointers(p, node, edges, edges);
}

namespace cpu {
// Over graphs.
void take_rows(const TakeRows& p, int64_t begin, int64_t end);
void join_edges(const JoinEdges& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
const char* take_rows(const TakeRows& p, void* stream);
const char* join_edges(const JoinEdges& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
