// GAT: a warp computes the weights of (edge, head) pairs, then sums the features of (edge, channels).
#pragma once
#include "attention.cuh"
#include "params/gat.h"

namespace pyg_fast::cuda {

constexpr int kUnroll = 4;  // loads in flight per thread

// Code that the passes over the graph and over its transpose share. T is the type of the features to sum.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED>
struct PairTile {
  using Acc = acc_t<T>;
  using Edge = AttentionEdge<I>;
  using Index = I;
  static constexpr int kLanes = LANES;
  static constexpr Sums kSums = Sums::registers;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kGroup = 32 / HEADS;  // edges whose weights the warp computes at once
  static constexpr int kSteps = kUnroll < LANES ? kUnroll : LANES;
  static constexpr int kStepsOfGroup = LANES / HEADS;

  const Csr& csr;
  Dropout<Acc> dropout;
  bool names_edges;
  HeadTile<VEC, LANES, HEADS, STRIDED> tile;
  int pair_head;  // the head of this thread as an (edge, head) pair
  bool pairs;     // whether this head exists
  Acc slope;
  const char* features;  // at this thread's channels
  uint32_t row_bytes;

  __device__ PairTile(const Attention& p, const void* features_, bool names_edges_,
                      uint32_t threshold, acc_t<T> scale, int tile_index)
      : csr(p.csr), dropout(p, threshold, scale), tile(p, tile_index) {
    names_edges = dropout.on || names_edges_;
    pair_head = tile.first_head + static_cast<int>(threadIdx.x % HEADS);
    pairs = pair_head < p.heads;
    slope = static_cast<Acc>(p.negative_slope);
    features = static_cast<const char*>(features_) + tile.at * sizeof(T);
    asm("" : "+l"(features));
    row_bytes = static_cast<uint32_t>(p.heads * p.channels * sizeof(T));
  }

  // The number of this thread's head in the row `id`, which no other thread reads soon; any number of the
  // row if that head does not exist.
  __device__ Acc of_pair(const void* rows, I id, int64_t heads) const {
    return __ldcs(static_cast<const Acc*>(rows) + static_cast<int64_t>(id) * heads +
                  (pairs ? pair_head : 0));
  }

  // weigh() computes for each g this thread's weight of the pair (g * kGroup + lane / HEADS, pair_head).
  // add(w, features, valid, step) adds the features of the slot's edge of a step if `valid`.
  template <bool FULL, typename Weigh, typename Add>
  __device__ void for_edges(const Edge& edge, int count, Acc (&weight)[HEADS], const Weigh& weigh,
                            const Add& add) const {
    Pack<T, VEC, STRIDED> v[kSteps];
    gather<FULL>(edge, 0, count, v);
    weigh();
#pragma unroll
    for (int step = 0; step < LANES; step += kSteps) {
      if (!FULL && step * kSlots >= count) break;
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int group = (step + u) / kStepsOfGroup;
        const int slot = (step + u) % kStepsOfGroup * kSlots + (threadIdx.x & 31) / LANES;
        const Acc w = __shfl_sync(kWarpMask, weight[group], slot * HEADS + tile.in_tile);
        add(w, v[u], FULL || group * kGroup + slot < count, step + u);
      }
      if (step + kSteps < LANES) gather<FULL>(edge, step + kSteps, count, v);
    }
  }

  // The features of the slot's edges; past the end those of the last edge, which remain unused.
  template <bool FULL>
  __device__ void gather(const Edge& edge, int step, int count,
                         Pack<T, VEC, STRIDED> (&v)[kSteps]) const {
    Col node[kSteps];
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int e = (step + u) * kSlots + (threadIdx.x & 31) / LANES;
      node[u] = __shfl_sync(kWarpMask, edge.source, FULL || e < count ? e : count - 1);
    }
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      v[u] = tile.columns.load(reinterpret_cast<const T*>(row_at(features, node[u], row_bytes)));
    }
  }
};

}  // namespace pyg_fast::cuda
