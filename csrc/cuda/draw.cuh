// Draws edges of a row by several threads.
#pragma once
#include "minibatch.cuh"
#include "params/draw.h"

namespace pyg_fast::cuda {

// Floyd's algorithm: draw k of `count` draws from the first degree - count + k + 1 edges; if that edge
// was drawn before, take the last of these edges. Every set is equally likely. From `start` on, `held` is
// memory for `count` numbers, which emit(e, position) may overwrite at e.
template <int LANES, typename Emit>
__device__ inline void draw_distinct(const DrawRow& row, int64_t start, int count, int32_t* held,
                                     unsigned mask, int lane, const Emit& emit) {
  for (int first = 0; first < count; first += LANES) {
    const int k = first + lane, here = count - first < LANES ? count - first : LANES;
    const int64_t last = row.degree - count + k;
    int chosen = 0;
    if (k < count) {
      chosen = static_cast<int>(random_below(row.bits(k), last + 1));
      for (int e = 0; e < first; ++e) {
        if (__ldcg(held + start + e) == chosen) {
          chosen = static_cast<int>(last);
          break;
        }
      }
    }
    for (int m = 0; m < here; ++m) {
      const int drawn = __shfl_sync(mask, chosen, m, LANES);
      const bool taken = __ballot_sync(mask, lane < m && drawn == chosen) != 0;
      if (lane == m && taken) chosen = static_cast<int>(last);
    }
    if (k < count) {
      if (count <= LANES) emit(start + k, row.begin + chosen);
      else held[start + k] = chosen;
    }
    __syncwarp(mask);
  }
  if (count <= LANES) return;
  for (int k = lane; k < count; k += LANES) {
    emit(start + k, row.begin + __ldcg(held + start + k));
  }
}

// Takes the `count` smallest of -log(u) / weight, one warp's worth per pass (Efraimidis and Spirakis). It
// is equivalent to drawing edges one by one, each in proportion to its weight among the rest.
template <typename Emit>
__device__ inline void draw_weighted(const DrawRow& row, int64_t start, int count, int lane,
                                     const Emit& emit) {
  const double infinity = __longlong_as_double(0x7ff0000000000000);
  double last_key = -1;
  int64_t last = -1;
  const auto before = [](double a, int64_t i, double b, int64_t j) {
    return a < b || (a == b && i < j);
  };
  for (int first = 0; first < count; first += 32) {
    const int here = count - first < 32 ? count - first : 32;
    double best = infinity;  // per lane: the smallest keys, in order
    int64_t best_edge = row.degree;
    for (int64_t e0 = 0; e0 < row.degree; e0 += 32) {
      const int64_t e = e0 + lane;
      double key = infinity;
      if (e < row.degree) {
        const double weight = row.weight[row.begin + e];
        if (weight > 0) key = -log(random_unit(row.bits(e))) / weight;
      }
      const double worst = __shfl_sync(kWarpMask, best, here - 1);
      const bool candidate = key < worst && before(last_key, last, key, e);
      unsigned left = __ballot_sync(kWarpMask, candidate);
      while (left) {
        const int from = __ffs(left) - 1;
        left &= left - 1;
        const double its_key = __shfl_sync(kWarpMask, key, from);
        const int64_t its_edge = e0 + from;
        const int place =
            __popc(__ballot_sync(kWarpMask, before(best, best_edge, its_key, its_edge)));
        const double moved_key = __shfl_up_sync(kWarpMask, best, 1);
        const int64_t moved_edge = __shfl_up_sync(kWarpMask, best_edge, 1);
        if (lane > place) {
          best = moved_key;
          best_edge = moved_edge;
        } else if (lane == place) {
          best = its_key;
          best_edge = its_edge;
        }
      }
    }
    if (lane < here) emit(start + first + lane, row.begin + best_edge);
    last_key = __shfl_sync(kWarpMask, best, here - 1);
    last = __shfl_sync(kWarpMask, best_edge, here - 1);
  }
}

// Draws the edges of a row by LANES threads, with weights by 32: the edges `start` to `start` + `count` of
// the batch.
template <int LANES, typename Emit>
__device__ inline void draw(const DrawRow& row, int64_t start, int count, int32_t* held,
                            unsigned mask, int lane, const Emit& emit) {
  if (row.replace && row.fanout >= 0) {
    for (int k = lane; k < count; k += LANES) emit(start + k, drawn_again(row, k));
  } else if (count == row.degree) {
    for (int k = lane; k < count; k += LANES) emit(start + k, row.begin + k);
  } else if constexpr (LANES == 32) {
    if (row.weight) draw_weighted(row, start, count, lane, emit);
    else draw_distinct<32>(row, start, count, held, mask, lane, emit);
  } else {
    draw_distinct<LANES>(row, start, count, held, mask, lane, emit);
  }
}

// Calls fn with the number of threads that draw a row, as a constant.
template <typename Fn>
void with_lanes(int64_t fanout, bool weighted, const Fn& fn) {
  if (fanout > 16 || weighted) fn(std::integral_constant<int, 32>{});
  else if (fanout > 8) fn(std::integral_constant<int, 16>{});
  else if (fanout > 4) fn(std::integral_constant<int, 8>{});
  else fn(std::integral_constant<int, 4>{});
}

}  // namespace pyg_fast::cuda
