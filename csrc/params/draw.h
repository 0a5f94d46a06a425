// Draws edges of a row: the same ones on a CPU and a GPU.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// The edges of a row that may be drawn, and how.
struct DrawRow {
  uint64_t seed = 0;
  int64_t id = 0;  // of the row's random numbers
  int64_t begin = 0;
  int64_t degree = 0;
  int64_t fanout = 0;  // -1: all edges
  bool replace = false;
  const double* weight = nullptr;  // see SampleHop

  PYG_FAST_DEVICE uint64_t bits(int64_t draw) const {
    return random_bits(seed, static_cast<uint64_t>(id), static_cast<uint64_t>(draw));
  }
};

// The number of edges to take.
PYG_FAST_DEVICE inline int64_t edges_to_draw(const DrawRow& row) {
  if (row.fanout < 0 || row.degree == 0) return row.degree;
  if (row.replace) {
    if (!row.weight) return row.fanout;
    const double before = row.begin == 0 ? 0 : row.weight[row.begin - 1];
    return row.weight[row.begin + row.degree - 1] > before ? row.fanout : 0;
  }
  if (!row.weight) return row.degree < row.fanout ? row.degree : row.fanout;
  int64_t count = 0;  // edges that may be drawn
  for (int64_t e = row.begin; e < row.begin + row.degree && count < row.fanout; ++e) {
    count += row.weight[e] > 0;
  }
  return count;
}

// The k-th edge of draws with replacement.
PYG_FAST_DEVICE inline int64_t drawn_again(const DrawRow& row, int64_t k) {
  return row.weight ? drawn_edge(row.weight, row.begin, row.begin + row.degree, row.bits(k))
                    : row.begin + random_below(row.bits(k), row.degree);
}

}  // namespace pyg_fast
