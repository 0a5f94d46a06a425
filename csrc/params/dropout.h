// The counter-based generator of attention dropout. Its result depends only on the seed, the edge's id
// and the head: any kernel can compute it again.
#pragma once
#include "common.h"

namespace pyg_fast {

// A 32-bit mixer: each input bit flips about half of the result bits.
PYG_FAST_DEVICE inline uint32_t mixed(uint32_t h) {
  h = (h ^ h >> 16) * 0x21f0aaadu;
  h = (h ^ h >> 15) * 0x735a2d97u;
  return h ^ h >> 15;
}

// The bits that all heads of an edge share.
PYG_FAST_DEVICE inline uint32_t edge_bits(uint64_t seed, uint64_t id) {
  // Mixes the seed separately: close seeds must not give the same bits in another order.
  const uint32_t low = mixed(static_cast<uint32_t>(id) ^ mixed(static_cast<uint32_t>(seed)));
  return mixed(low + static_cast<uint32_t>(id >> 32) * 0x85ebca6bu) ^
         static_cast<uint32_t>(seed >> 32);
}

// `threshold` comes from dropout_threshold: about 2^32 times the dropout probability.
PYG_FAST_DEVICE inline bool keeps(uint32_t edge_bits, uint32_t head, uint32_t threshold) {
  return mixed(edge_bits + (head + 1) * 0x9e3779b9u) >= threshold;
}

// At probability 1 a few elements still pass, but dropout_scale is 0.
inline uint32_t dropout_threshold(double dropout) {
  const double threshold = dropout * 4294967296.0;
  return threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
}

// The scale that preserves the expectation.
inline double dropout_scale(double dropout) { return dropout < 1 ? 1 / (1 - dropout) : 0; }

}  // namespace pyg_fast
