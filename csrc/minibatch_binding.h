// What the bindings of sampled mini-batches share.
#pragma once
#include "minibatch.h"
#include "stable.h"

namespace pyg_fast {

// A map is int64 [1, num_nodes] or, hashed, [2, num_slots]: entries, keys.
inline NodeMap node_map_of(const Tensor& map, int64_t stamp, const Tensor& on) {
  STD_TORCH_CHECK(map.dim() == 2 && (map.size(0) == 1 || map.size(0) == 2),
                  "map must have shape [1, num_nodes] or [2, num_slots]");
  check_type(map, "map", ScalarType::Long);
  check_device(map, "map", on);
  STD_TORCH_CHECK(map.is_contiguous(), "map must be contiguous");
  STD_TORCH_CHECK(stamp >= 0 && stamp < static_cast<int64_t>(kPositionMask),
                  "stamp must be from 0 to 2^32 - 2, got ", stamp);
  NodeMap m;
  m.num_slots = map.size(1);
  m.entry = static_cast<uint64_t*>(const_cast<void*>(map.const_data_ptr()));
  if (map.size(0) == 2) {
    STD_TORCH_CHECK((m.num_slots & (m.num_slots - 1)) == 0 && m.num_slots > 0,
                    "a hashed map must have 2^n slots");
    m.key = reinterpret_cast<int64_t*>(m.entry + m.num_slots);
  }
  m.stamp = static_cast<uint64_t>(stamp) << 32;
  return m;
}

}  // namespace pyg_fast
