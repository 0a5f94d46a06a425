// Parameters of the random walk kernels, and one step of a walk.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// Walks go from a node to the sources of its edges. The graph may be in host memory that a GPU reads.
struct Walk {
  Csr graph;
  int64_t length = 0;  // steps
  double restart = 0;  // the probability that a step starts over
  uint64_t seed = 0;
};

// out[i, k]: the node of walk i after k steps.
struct RandomWalk : Walk {
  int64_t num_walks = 0;
  const int64_t* start = nullptr;  // [num_walks]
  int64_t* out = nullptr;          // [num_walks, length + 1]
};

constexpr int64_t kMostVisits = 1024;

// The nodes that `num_walks` walks from each node visit most; ties go to the node visited first, walk by
// walk.
struct PinsageNeighbors : Walk {
  int64_t num_walks = 0;  // num_walks * length <= kMostVisits
  int64_t num_nodes = 0;
  int64_t num_neighbors = 0;
  const int64_t* nodes = nullptr;  // [num_nodes]
  int64_t* neighbor = nullptr;     // [num_nodes, num_neighbors]; -1 if there are fewer
  int64_t* visits = nullptr;       // [num_nodes, num_neighbors]; 0 if there are fewer
};

// The next node of a walk from `start` that is at `node`, from two random numbers for `key`; -1 if `node`
// has no edge or is outside the graph. Clamps the row to the last edge.
template <typename I>
PYG_FAST_DEVICE inline int64_t next_node(const Walk& p, int64_t start, int64_t node, uint64_t key,
                                         uint64_t step) {
  if (p.restart > 0 && random_unit(random_bits(p.seed, key, 2 * step)) <= p.restart) node = start;
  if (node < 0 || node >= p.graph.num_rows) return -1;
  const I* rowptr = static_cast<const I*>(p.graph.rowptr) + node;
  const int64_t begin = rowptr[0], limit = rowptr[1];
  const int64_t end = limit < p.graph.num_edges ? limit : p.graph.num_edges;
  if (begin < 0 || begin >= end) return -1;
  const uint64_t bits = random_bits(p.seed, key, 2 * step + 1);
  return column(p.graph, begin + static_cast<int64_t>(random_below(bits, end - begin)));
}

namespace cpu {
void random_walk(const RandomWalk& p, int64_t begin, int64_t end);
void pinsage_neighbors(const PinsageNeighbors& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
const char* random_walk(const RandomWalk& p, void* stream);
const char* pinsage_neighbors(const PinsageNeighbors& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
