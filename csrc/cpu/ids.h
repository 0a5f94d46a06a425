// Passes over node ids that look them up in the map.
#pragma once
#include <algorithm>

#include "node_map.h"

namespace pyg_fast::cpu {

constexpr int64_t kAhead = 16;  // prefetch distance in ids

inline void fetch_entry(const NodeMap& map, int64_t id) {
  __builtin_prefetch(map.key ? map.key + first_slot(map, id)
                             : reinterpret_cast<const int64_t*>(map.entry + id));
}

// Calls fn(k) for k in [begin, end) and prefetches the map's entries of id(k).
template <typename Id, typename Fn>
void for_ids(const NodeMap& map, int64_t begin, int64_t end, const Id& id, const Fn& fn) {
  for (int64_t k = begin; k < std::min(begin + kAhead, end); ++k) fetch_entry(map, id(k));
  for (int64_t k = begin; k < end; ++k) {
    if (k + kAhead < end) fetch_entry(map, id(k + kAhead));
    fn(k);
  }
}

// Calls fn(I{}) with the graph's index type.
template <typename Fn>
auto with_index(bool index64, const Fn& fn) {
  return index64 ? fn(int64_t{}) : fn(int32_t{});
}

}  // namespace pyg_fast::cpu
