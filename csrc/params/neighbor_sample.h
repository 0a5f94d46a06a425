// Sampled mini-batches, hop by hop.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// One hop of a mini-batch that grows outwards from its seeds. Local ids follow the order in which the
// nodes were found. Positions of ids (see NodeMap) count the seeds first, then all sampled edges.
struct SampleHop {
  Csr graph;  // perm: position of each edge in the user's list
  const double* weight =
      nullptr;  // [num_edges] > 0 if the edge may be drawn; if `replace`, the running
                // sum over all edges up to it; nullptr: uniform
  int64_t hop = 0;
  int64_t fanout = 0;  // -1: all edges
  bool replace = false;
  uint64_t seed = 0;
  NodeMap map;
  int64_t max_nodes = 0;         // upper bound: nodes whose edges this hop samples
  int64_t max_edges = 0;         // upper bound: edges of this hop
  int64_t max_edges_of_all = 0;  // the capacity for edges of all hops
  int64_t num_seeds = 0;
  int64_t* num_nodes = nullptr;  // [num_hops + 1] after each hop; [0]: before the first
  int64_t* num_edges = nullptr;  // [num_hops + 1]
  int64_t* n_id = nullptr;       // by local id
  int32_t* rowptr = nullptr;     // by local id: the first sampled edge of each node
  void* neighbor = nullptr;      // by edge: its source, of the type of rowptr
  int32_t* dst = nullptr;        // by edge: the local id of its destination
  int64_t* e_id = nullptr;       // by edge
  int32_t* local = nullptr;      // by position: the local id of the node first found there

  // The local ids of nodes whose edges this hop samples: [first(), last()).
  PYG_FAST_DEVICE int64_t first() const { return hop == 0 ? 0 : num_nodes[hop - 1]; }
  PYG_FAST_DEVICE int64_t last() const { return num_nodes[hop]; }
};

// Copies the finished batch from the buffers that its hops filled.
struct TakeSample {
  NodeMap map;
  bool index64 = false;  // of neighbor
  int64_t num_nodes = 0;
  int64_t num_rows = 0;  // nodes with sampled edges; the others have none
  int64_t num_edges = 0;
  const int64_t* n_id = nullptr;
  const int32_t* rowptr = nullptr;
  const void* neighbor = nullptr;
  const int32_t* dst = nullptr;
  const int64_t* e_id = nullptr;
  const int32_t* local = nullptr;
  int64_t* out_n_id = nullptr;
  int32_t* out_rowptr = nullptr;  // [num_nodes + 1]
  int32_t* out_col = nullptr;     // [num_edges]
  int64_t* out_src = nullptr;     // [num_edges]
  int64_t* out_dst = nullptr;     // [num_edges]
  int64_t* out_e_id = nullptr;    // [num_edges]
};

namespace cpu {
// Seeds.
void begin_sample(const SampleHop& p, const int64_t* seeds, int64_t begin, int64_t end);
// Nodes of this hop, by local id: writes the number of edges taken to p.rowptr[node + 1].
void sample_counts(const SampleHop& p, int64_t begin, int64_t end);
// Nodes of this hop, by local id.
void sample_neighbors(const SampleHop& p, int64_t begin, int64_t end);
// Edges of this hop: insert sources into the map; count the new ones; make them nodes from local id
// `node` on and return the id after the last.
void insert_sources(const SampleHop& p, int64_t begin, int64_t end);
int64_t count_new(const SampleHop& p, int64_t begin, int64_t end);
int64_t append_nodes(const SampleHop& p, int64_t begin, int64_t end, int64_t node);
// Over edges; over nodes.
void take_edges(const TakeSample& p, int64_t begin, int64_t end);
void take_nodes(const TakeSample& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
// Makes the seeds the first nodes of a batch.
const char* begin_sample(const SampleHop& p, const int64_t* seeds, void* stream);

// Counts the edges to take from each node and computes where they begin.
int64_t sample_counts_scratch(const SampleHop& p);
const char* sample_counts(const SampleHop& p, void* scratch, void* stream);

// Samples these edges and inserts their sources into the map.
const char* sample_neighbors(const SampleHop& p, void* stream);

// Makes new sources nodes.
int64_t append_nodes_scratch(const SampleHop& p);
const char* append_nodes(const SampleHop& p, void* scratch, void* stream);

const char* take_sample(const TakeSample& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
