// Counter-based random numbers: each depends only on a seed, a node and a draw index. Any kernel can draw
// it again.
#pragma once
#include "common.h"

namespace pyg_fast {

PYG_FAST_DEVICE inline uint64_t high_of_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// A 64-bit mixer: each input bit flips about half of the result bits.
PYG_FAST_DEVICE inline uint64_t mixed64(uint64_t h) {
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}

// The `draw`-th number of a node: 64 random bits.
PYG_FAST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t node, uint64_t draw) {
  return mixed64(mixed64(seed + draw * 0xd1342543de82ef95u) + node * 0x9e3779b97f4a7c15u);
}

// A random integer in [0, count).
PYG_FAST_DEVICE inline int64_t random_below(uint64_t bits, int64_t count) {
  return static_cast<int64_t>(high_of_product(bits, static_cast<uint64_t>(count)));
}

// A random number in (0, 1].
PYG_FAST_DEVICE inline double random_unit(uint64_t bits) {
  return static_cast<double>((bits >> 11) + 1) * 0x1p-53;
}

}  // namespace pyg_fast
