// The edges of a coordinate list, one at a time.
#pragma once
#include "common.cuh"
#include "record.cuh"

namespace pyg_fast::cuda {

constexpr int kUnroll = 4;  // loads in flight per thread

struct CooEdge {
  int64_t src = -1, dst = -1;
  bool invalid = false;
  bool used = false;
};

__device__ inline CooEdge coo_edge(const Coo& coo, int64_t src, int64_t dst) {
  CooEdge edge;
  edge.src = src;
  edge.dst = dst;
  edge.invalid = src < 0 || src >= coo.num_src || dst < 0 || dst >= coo.num_dst;
  edge.used = !edge.invalid && !(coo.drop_loops && src == dst);
  return edge;
}

template <typename I>
__device__ inline CooEdge coo_edge(const Coo& coo, int64_t e) {
  return coo_edge(coo, load_once(static_cast<const I*>(coo.src) + e),
                  load_once(static_cast<const I*>(coo.dst) + e));
}

// Records invalid edge `e`; -1: none. Kernels pass its position after their loop: an edge kept for the
// record would cost registers in the loop.
template <typename I>
__device__ inline void record_edge(const Coo& coo, int64_t* record, int64_t e) {
  if (e < 0) return;
  const CooEdge edge = coo_edge<I>(coo, e);
  if (coo.reversed) record_ends(record, edge.dst, coo.num_dst, edge.src, coo.num_src);
  else record_ends(record, edge.src, coo.num_src, edge.dst, coo.num_dst);
}

}  // namespace pyg_fast::cuda
