// The CPU kernels of random walks. The caller shares out [begin, end).
#pragma once
#include "../walk.h"

namespace pyg_fast::cpu {

void random_walk(const RandomWalk& p, int64_t begin, int64_t end);
void visited_neighbors(const VisitedNeighbors& p, int64_t begin, int64_t end);

}  // namespace pyg_fast::cpu
