// What the kernels that sample neighbours are handed.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// One hop of a mini-batch that grows outwards from its seeds. Its nodes have local ids in the order
// in which they were met. Positions of ids, as NodeMap has them, are those of the seeds and behind
// them of all sampled edges.
struct SampleHop {
  Csr graph;                       // perm: position of each edge in the user's list
  const double* weight = nullptr;  // [num_edges] > 0 where an edge may be drawn; its sum over all
                                   // edges up to it, if `replace`; nullptr: uniform
  int64_t hop = 0;
  int64_t fanout = 0;              // -1: all edges
  bool replace = false;
  uint64_t seed = 0;
  NodeMap map;
  int64_t max_nodes = 0;           // of which edges are sampled in this hop, at most
  int64_t max_edges = 0;           // of this hop, at most
  int64_t max_edges_of_all = 0;    // for which there is room
  int64_t num_seeds = 0;
  int64_t* num_nodes = nullptr;    // [num_hops + 1] known after each hop, and before the first
  int64_t* num_edges = nullptr;    // [num_hops + 1]
  int64_t* n_id = nullptr;         // by local id
  int32_t* rowptr = nullptr;       // by local id: where the sampled edges of a node begin
  void* neighbor = nullptr;        // by edge: its source, of the graph's index type
  int32_t* dst = nullptr;          // by edge: the local id of its destination
  int64_t* e_id = nullptr;         // by edge
  int32_t* local = nullptr;        // by position: the local id of what was first met there

  // Local ids whose edges are sampled: [first(), last()).
  PYG_FAST_DEVICE int64_t first() const { return hop == 0 ? 0 : num_nodes[hop - 1]; }
  PYG_FAST_DEVICE int64_t last() const { return num_nodes[hop]; }
};

// The finished batch, taken out of what its hops have filled.
struct TakeSample {
  NodeMap map;
  bool index64 = false;            // of neighbor
  int64_t num_nodes = 0;
  int64_t num_rows = 0;            // nodes whose edges were sampled; the others have none
  int64_t num_edges = 0;
  const int64_t* n_id = nullptr;
  const int32_t* rowptr = nullptr;
  const void* neighbor = nullptr;
  const int32_t* dst = nullptr;
  const int64_t* e_id = nullptr;
  const int32_t* local = nullptr;
  int64_t* out_n_id = nullptr;
  int32_t* out_rowptr = nullptr;   // [num_nodes + 1]
  int32_t* out_col = nullptr;      // [num_edges]
  int64_t* out_src = nullptr;      // [num_edges]
  int64_t* out_dst = nullptr;      // [num_edges]
  int64_t* out_e_id = nullptr;     // [num_edges]
};

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

// Distinct ids, in the order of their first occurrence, and the place of each id among them.
struct Relabel {
  NodeMap map;
  int64_t num_ids = 0;
  const int64_t* ids = nullptr;    // [num_ids]
  int64_t* unique = nullptr;       // [num_ids], of which `count` are written
  int64_t* place = nullptr;        // [num_ids]
  int32_t* rank = nullptr;         // [num_ids] scratch
  int64_t* count = nullptr;        // [1]
};

}  // namespace pyg_fast
