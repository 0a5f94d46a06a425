// Kernels that read the features of every (node, head) once.
#pragma once
#include "columns.cuh"

namespace pyg_fast::cuda {

// LANES threads share a pair of node and head. A thread keeps its head from pair to pair, and its block
// processes as many as are left: blocks of one pair per thread take longer to start than to read it.
template <int LANES>
struct NodeHead {
  int part;     // of the threads of this pair
  bool active;  // threads in excess repeat pairs of others, whose results they must not write
  int64_t at, head, node;
  int64_t first;  // of the warp's pairs: its threads exchange sums, so all of them continue
  int64_t step;   // pairs, of `nodes` nodes

  __device__ NodeHead(int64_t heads, int64_t nodes) {
    part = threadIdx.x % LANES;
    const int64_t base = static_cast<int64_t>(blockIdx.x) * (kThreads / LANES);
    at = base + threadIdx.x / LANES;
    first = base + threadIdx.x / 32 * (32 / LANES);
    step = nodes * heads;
    active = at < step;
    node = at / heads;
    head = at - node * heads;
  }

  // The sum over the threads of each pair; all threads of the warp call it.
  template <typename Acc>
  __device__ static Acc sum(Acc v) {
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1) v += __shfl_xor_sync(kWarpMask, v, offset);
    return v;
  }
};

struct NodeHeadShape {
  unsigned blocks;
  int64_t nodes;  // that all blocks process at once
};

inline NodeHeadShape node_head_shape(int64_t num_nodes, int64_t heads, int lanes) {
  const int64_t pairs = kThreads / lanes;
  int64_t blocks = (num_nodes * heads + pairs - 1) / pairs;
  if (blocks > kStreamBlocks) blocks = kStreamBlocks;
  const int64_t of_node = (heads + pairs - 1) / pairs;
  if (blocks < of_node) blocks = of_node;
  return {static_cast<unsigned>(blocks), blocks * pairs / heads};
}

// Calls fn(LANES) with the fewest threads that read `vectors` at once, at most MOST, as a compile-time
// integer.
template <int MOST, typename Fn>
void dispatch_lanes(int64_t vectors, Fn&& fn) {
  if constexpr (MOST > 1) {
    if (vectors <= MOST / 2) return dispatch_lanes<MOST / 2>(vectors, fn);
  }
  fn(std::integral_constant<int, MOST>{});
}

}  // namespace pyg_fast::cuda
