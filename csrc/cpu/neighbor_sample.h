// The CPU kernels of mini-batches, as those in cpu.h: ranges are of what the comment names.
#pragma once
#include "../neighbor_sample.h"

namespace pyg_fast::cpu {

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
// Nodes: how many edges of each are induced goes into p.rowptr[node + 1]; those edges.
void count_induced(const InducedEdges& p, int64_t begin, int64_t end);
void induced_edges(const InducedEdges& p, int64_t begin, int64_t end);
// Ids: into the map; how many occur for the first time; those get ranks from `rank` on, and the one
// after the last comes back; the places.
void insert_ids(const Relabel& p, int64_t begin, int64_t end);
int64_t count_first(const Relabel& p, int64_t begin, int64_t end);
int64_t rank_first(const Relabel& p, int64_t begin, int64_t end, int64_t rank);
void places(const Relabel& p, int64_t begin, int64_t end);

}  // namespace pyg_fast::cpu
