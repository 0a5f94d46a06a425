// Subgraphs that the nodes of a mini-batch induce.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// All graph edges between nodes of a batch.
struct InducedEdges {
  Csr graph;
  NodeMap map;  // holds the batch; its positions index `local`
  int64_t num_nodes = 0;
  const int64_t* n_id = nullptr;  // [num_nodes]
  const int32_t* local = nullptr;
  int64_t* rowptr = nullptr;   // [num_nodes + 1], written by the first pass
  int32_t* out_col = nullptr;  // this and the rest by the second pass
  int64_t* out_src = nullptr;
  int64_t* out_dst = nullptr;
  int64_t* out_e_id = nullptr;
};

namespace cpu {
// Both work on nodes: the first writes each node's number of induced edges to p.rowptr[node + 1], the
// second writes the edges.
void count_induced(const InducedEdges& p, int64_t begin, int64_t end);
void induced_edges(const InducedEdges& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
int64_t count_induced_scratch(const InducedEdges& p);
const char* count_induced(const InducedEdges& p, void* scratch, void* stream);
const char* induced_edges(const InducedEdges& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
