// One edge that kernels had to skip, for a host that does not wait for them:
//   word 0: bit 63 set | end << 62 (0 source, 1 destination) | the index, clamped, in 62 bits;
//           zero without an edge, and written last
//   word 1: the number of nodes that the index must be below
// The first edge stays until the host writes zero to word 0.
#pragma once
#include <cstdint>

namespace pyg_fast::cuda {

constexpr int kRecordWords = 2;

// `taken` locks the record: other threads with an invalid edge at the same time drop theirs. Both words
// thus describe one edge.
__device__ inline void record_index(int64_t* record, int end, int64_t index, int64_t num_nodes,
                                    unsigned* taken) {
  if (atomicExch(taken, 1u) != 0) return;
  volatile auto* words = reinterpret_cast<volatile unsigned long long*>(record);
  if (words[0] == 0) {
    constexpr int64_t kMost = int64_t{1} << 61;
    if (index < -kMost) index = -kMost;
    if (index >= kMost) index = kMost - 1;
    constexpr unsigned long long kIndexBits = (1ull << 62) - 1;
    words[1] = static_cast<unsigned long long>(num_nodes);
    __threadfence_system();
    words[0] = 1ull << 63 | static_cast<unsigned long long>(end) << 62 |
               (static_cast<unsigned long long>(index) & kIndexBits);
  }
  __threadfence();
  atomicExch(taken, 0u);
}

__device__ static unsigned record_taken = 0;

// Records an edge with the ends `first` (row 0 of the user's edge_index) and `second`. Call it only for
// invalid edges: of a warp's threads that call it together, one reports.
__device__ inline void record_ends(int64_t* record, int64_t first, int64_t num_first,
                                   int64_t second, int64_t num_second) {
  const unsigned calling = __activemask();
  if (record == nullptr || (threadIdx.x & 31) != __ffs(calling) - 1) return;
  if (first < 0 || first >= num_first) record_index(record, 0, first, num_first, &record_taken);
  else record_index(record, 1, second, num_second, &record_taken);
}

}  // namespace pyg_fast::cuda
