// The map from global to local ids, with atomics.
#pragma once
#include "common.cuh"
#include "params/minibatch.h"

namespace pyg_fast::cuda {

// The slot of an id. If `adding`, a hashed map inserts a missing id; otherwise kNotFound.
template <bool adding>
__device__ inline int64_t slot_of(const NodeMap& map, int64_t id) {
  if (!map.key) return id;
  constexpr long long kEmpty = -1;
  for (int64_t slot = first_slot(map, id);; slot = (slot + 1) & (map.num_slots - 1)) {
    auto* key = reinterpret_cast<long long*>(map.key + slot);
    long long held = *reinterpret_cast<volatile long long*>(key);
    if (adding && held == kEmpty) {
      held = static_cast<long long>(atomicCAS(reinterpret_cast<unsigned long long*>(key),
                                              static_cast<unsigned long long>(kEmpty),
                                              static_cast<unsigned long long>(id)));
      if (held == kEmpty) return slot;
    }
    if (held == id) return slot;
    if (!adding && held == kEmpty) return kNotFound;
  }
}

// Records the position of an id unless an earlier position is recorded.
__device__ inline void insert(const NodeMap& map, int64_t id, int64_t position) {
  atomicMin(reinterpret_cast<unsigned long long*>(map.entry + slot_of<true>(map, id)),
            static_cast<unsigned long long>(map.stamp | static_cast<uint64_t>(position)));
}

// The first position of an id in this batch, or kNotFound.
__device__ inline int64_t find(const NodeMap& map, int64_t id) {
  const int64_t slot = slot_of<false>(map, id);
  if (slot == kNotFound) return kNotFound;
  const uint64_t entry = map.entry[slot];
  return (entry & ~kPositionMask) == map.stamp ? static_cast<int64_t>(entry & kPositionMask)
                                               : kNotFound;
}

// Prepares a new batch: clears a hashed map.
inline const char* start(const NodeMap& map, cudaStream_t stream) {
  if (!map.key) return nullptr;
  const size_t bytes = static_cast<size_t>(map.num_slots) * 8;
  cudaError_t error = cudaMemsetAsync(map.key, 0xff, bytes, stream);
  if (error == cudaSuccess) error = cudaMemsetAsync(map.entry, 0xff, bytes, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace pyg_fast::cuda
