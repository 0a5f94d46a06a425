// Subgraphs that nodes of a mini-batch induce.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// All edges of the graph among the nodes of a batch.
struct InducedEdges {
  Csr graph;
  NodeMap map;                     // holds the batch: positions that `local` knows
  int64_t num_nodes = 0;
  const int64_t* n_id = nullptr;   // [num_nodes]
  const int32_t* local = nullptr;
  int64_t* rowptr = nullptr;       // [num_nodes + 1], by the first pass
  int32_t* out_col = nullptr;      // the rest by the second
  int64_t* out_src = nullptr;
  int64_t* out_dst = nullptr;
  int64_t* out_e_id = nullptr;
};

namespace cpu {
// Nodes: how many edges of each are induced goes into p.rowptr[node + 1]; those edges.
void count_induced(const InducedEdges& p, int64_t begin, int64_t end);
void induced_edges(const InducedEdges& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
int64_t count_induced_scratch(const InducedEdges& p);
const char* count_induced(const InducedEdges& p, void* scratch, void* stream);
const char* induced_edges(const InducedEdges& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
