// The counter-based generator of attention dropout: what it says of an edge depends on nothing but
// the seed, the edge's id and the head, so that any kernel can ask again.
#pragma once
#include "common.h"

namespace pyg_fast {

// A mixer of 32 bits: every bit of the input moves about half of those of the result.
PYG_FAST_DEVICE inline uint32_t mixed(uint32_t h) {
  h = (h ^ h >> 16) * 0x21f0aaadu;
  h = (h ^ h >> 15) * 0x735a2d97u;
  return h ^ h >> 15;
}

// What all heads of an edge share.
PYG_FAST_DEVICE inline uint32_t edge_bits(uint64_t seed, uint64_t id) {
  // The seed is mixed by itself: neighbouring ones must not give the same bits in another order.
  const uint32_t low = mixed(static_cast<uint32_t>(id) ^ mixed(static_cast<uint32_t>(seed)));
  return mixed(low + static_cast<uint32_t>(id >> 32) * 0x85ebca6bu) ^
         static_cast<uint32_t>(seed >> 32);
}

// `threshold` of dropout_threshold: about 2^32 times the probability of dropout.
PYG_FAST_DEVICE inline bool keeps(uint32_t edge_bits, uint32_t head, uint32_t threshold) {
  return mixed(edge_bits + (head + 1) * 0x9e3779b9u) >= threshold;
}

// At a probability of 1 the few that are kept are scaled by zero.
inline uint32_t dropout_threshold(double dropout) {
  const double threshold = dropout * 4294967296.0;
  return threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
}

// What keeps the expectation.
inline double dropout_scale(double dropout) { return dropout < 1 ? 1 / (1 - dropout) : 0; }

}  // namespace pyg_fast
