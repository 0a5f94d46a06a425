// The CUDA launchers of mini-batches, as those in cuda.h.
#pragma once
#include "../neighbor_sample.h"

namespace pyg_fast::cuda {

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

int64_t count_induced_scratch(const InducedEdges& p);
const char* count_induced(const InducedEdges& p, void* scratch, void* stream);
const char* induced_edges(const InducedEdges& p, void* stream);

int64_t relabel_scratch(const Relabel& p);
const char* relabel(const Relabel& p, void* scratch, void* stream);

}  // namespace pyg_fast::cuda
