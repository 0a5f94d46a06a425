// The CUDA kernels of random walks. The graph may lie in host memory that the GPU reads; each returns
// what went wrong, or nullptr.
#pragma once
#include "../walk.h"

namespace pyg_fast::cuda {

const char* random_walk(const RandomWalk& p, void* stream);
const char* visited_neighbors(const VisitedNeighbors& p, void* stream);

}  // namespace pyg_fast::cuda
