// Parameters that the kernels of sampled mini-batches share.
#pragma once
#include "random.h"

namespace pyg_fast {

// Maps a node to its first position in the batch's list of ids. An entry has `stamp` (the batch) in the
// high bits and the position in the low bits. Stamps decrease from batch to batch: the smallest entry of
// a node is its first position in the newest batch, and the map needs no clearing.
// Direct: one entry per node. Hashed, for too many nodes: kernels find slots by `key`.
struct NodeMap {
  uint64_t* entry = nullptr;  // [num_slots]; all ones if empty
  int64_t* key = nullptr;     // [num_slots] -1 where a slot is empty; nullptr: direct
  int64_t num_slots = 0;      // hashed: a power of two
  uint64_t stamp = 0;         // the lower 32 bits are zero
};

constexpr uint64_t kPositionMask = 0xffffffffu;
constexpr int64_t kNotFound = -1;

// The slot where probing for an id starts.
PYG_FAST_DEVICE inline int64_t first_slot(const NodeMap& map, int64_t id) {
  return static_cast<int64_t>(mixed64(static_cast<uint64_t>(id))) & (map.num_slots - 1);
}

// Draws an edge in [begin, end) in proportion to its weight. `sum` holds running sums of the weights of
// all edges; at least one weight in the range is positive.
PYG_FAST_DEVICE inline int64_t drawn_edge(const double* sum, int64_t begin, int64_t end,
                                          uint64_t bits) {
  const double low = begin == 0 ? 0 : sum[begin - 1];
  double wanted = sum[end - 1] - random_unit(bits) * (sum[end - 1] - low);
  if (wanted < low) wanted = low;
  int64_t first = begin, last = end - 1;  // the first whose sum is above `wanted`
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (sum[middle] > wanted) last = middle;
    else first = middle + 1;
  }
  // Rounding can reach the end of the range: skip edges without weight.
  while (first > begin && sum[first] == sum[first - 1]) --first;
  return first;
}

}  // namespace pyg_fast
