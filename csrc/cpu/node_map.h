// The map from global to local ids; threads share it through atomics.
#pragma once
#include <cstddef>

#include "params/minibatch.h"

namespace pyg_fast::cpu {

// The slot of an id. If `adding`, a hashed map inserts a missing id; otherwise kNotFound.
template <bool adding>
inline int64_t slot_of(const NodeMap& map, int64_t id) {
  if (!map.key) return id;
  for (int64_t slot = first_slot(map, id);; slot = (slot + 1) & (map.num_slots - 1)) {
    int64_t held = __atomic_load_n(map.key + slot, __ATOMIC_RELAXED);
    if (adding && held == -1 &&
        __atomic_compare_exchange_n(map.key + slot, &held, id, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return slot;
    }
    if (held == id) return slot;
    if (!adding && held == -1) return kNotFound;
  }
}

// Records the position of an id unless an earlier position is recorded.
inline void insert(const NodeMap& map, int64_t id, int64_t position) {
  uint64_t* entry = map.entry + slot_of<true>(map, id);
  const uint64_t wanted = map.stamp | static_cast<uint64_t>(position);
  uint64_t held = __atomic_load_n(entry, __ATOMIC_RELAXED);
  while (wanted < held && !__atomic_compare_exchange_n(entry, &held, wanted, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
  }
}

// The first position of an id in this batch, or kNotFound.
inline int64_t find(const NodeMap& map, int64_t id) {
  const int64_t slot = slot_of<false>(map, id);
  if (slot == kNotFound) return kNotFound;
  const uint64_t entry = __atomic_load_n(map.entry + slot, __ATOMIC_RELAXED);
  return (entry & ~kPositionMask) == map.stamp ? static_cast<int64_t>(entry & kPositionMask)
                                               : kNotFound;
}

// Prepares a new batch: clears a hashed map.
inline void start(const NodeMap& map) {
  if (!map.key) return;
  __builtin_memset(map.key, 0xff, static_cast<std::size_t>(map.num_slots) * 8);
  __builtin_memset(map.entry, 0xff, static_cast<std::size_t>(map.num_slots) * 8);
}

}  // namespace pyg_fast::cpu
