// Sampled mini-batches, hop by hop.
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
  void* neighbor = nullptr;        // by edge: its source, of the type of rowptr
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

namespace cpu {
// Seeds.
void begin_sample(const SampleHop& p, const int64_t* seeds, int64_t begin, int64_t end);
// Nodes of this hop, by local id: how many edges of each are taken goes into p.rowptr[node + 1].
void sample_counts(const SampleHop& p, int64_t begin, int64_t end);
// Nodes of this hop, by local id.
void sample_neighbors(const SampleHop& p, int64_t begin, int64_t end);
// Edges of this hop: their sources into the map; how many of them are new; those become nodes, the
// first of them `node`; the one after the last comes back.
void insert_sources(const SampleHop& p, int64_t begin, int64_t end);
int64_t count_new(const SampleHop& p, int64_t begin, int64_t end);
int64_t append_nodes(const SampleHop& p, int64_t begin, int64_t end, int64_t node);
// Edges; nodes.
void take_edges(const TakeSample& p, int64_t begin, int64_t end);
void take_nodes(const TakeSample& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
// The seeds become the first nodes of a batch.
const char* begin_sample(const SampleHop& p, const int64_t* seeds, void* stream);

// How many edges of each node are taken: where they begin.
int64_t sample_counts_scratch(const SampleHop& p);
const char* sample_counts(const SampleHop& p, void* scratch, void* stream);

// Which ones, and their sources into the map.
const char* sample_neighbors(const SampleHop& p, void* stream);

// Sources that are new become nodes.
int64_t append_nodes_scratch(const SampleHop& p);
const char* append_nodes(const SampleHop& p, void* scratch, void* stream);

const char* take_sample(const TakeSample& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
