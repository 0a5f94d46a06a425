// What the kernels of sampled mini-batches share.
#pragma once
#include "random.h"

namespace pyg_fast {

// Where each node was first met in a batch: at which position of the batch's list of ids. An entry
// is `stamp` (the batch) above and the position below. Stamps fall from batch to batch, so that the
// smallest entry of a node is its first position in the newest batch, and nothing has to be emptied.
// Direct: one entry per node. Hashed, where nodes are too many for that: slots found by `key`.
struct NodeMap {
  uint64_t* entry = nullptr;  // [num_slots]; all ones where there is none
  int64_t* key = nullptr;     // [num_slots] -1 where a slot is empty; nullptr: direct
  int64_t num_slots = 0;      // hashed: a power of two
  uint64_t stamp = 0;         // the lower 32 bits are zero
};

constexpr uint64_t kPositionMask = 0xffffffffu;
constexpr int64_t kNotFound = -1;

// The slot that probing for an id starts at.
PYG_FAST_DEVICE inline int64_t first_slot(const NodeMap& map, int64_t id) {
  return static_cast<int64_t>(mixed64(static_cast<uint64_t>(id))) & (map.num_slots - 1);
}

// An edge in [begin, end), drawn in proportion to weights of which running sums over all edges are
// given; some weight there is positive.
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
  // Rounded up to the end: not to an edge without weight.
  while (first > begin && sum[first] == sum[first - 1]) --first;
  return first;
}

}  // namespace pyg_fast
