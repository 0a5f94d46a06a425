// Sums of features over rows, with the steps before and after them.
#pragma once
#include "params/spmm.h"
#include "rows.cuh"
#include "scale.cuh"

namespace pyg_fast::cuda {

// Loads in flight per thread, and blocks per SM: both compete for registers.
constexpr int kUnroll = 4;
constexpr int kBlocks = 4;

template <typename Acc, int VEC>
struct VectorSum {
  Acc data[VEC];
};

// TEAM threads process a row (or a part of one): a warp, or each team of a warp its own row.
template <typename T, typename I, int VEC, int LANES, bool WEIGHTED, int TEAM = 32>
struct SpmmRow {
  using Acc = acc_t<T>;
  static constexpr bool kSharedSums = false;
  using Sum = VectorSum<Acc, VEC>;
  using Edge = WeightedEdge<T, I, WEIGHTED>;

  const Spmm& p;
  const void* x_self;  // x before any prologue
  const char* x;  // at this thread's column
  uint32_t row_bytes;
  int64_t column;
  bool active;

  __device__ SpmmRow(const Spmm& p, const void* x_self, int tile) : p(p), x_self(x_self) {
    column = (static_cast<int64_t>(tile) * LANES + threadIdx.x % LANES) * VEC;
    active = column < p.dim;
    row_bytes = static_cast<uint32_t>(p.dim * sizeof(T));
    // Threads past the last column read the first column and write nothing.
    x = static_cast<const char*>(p.x) + (active ? column : 0) * sizeof(T);
    asm("" : "+l"(x));  // one pointer, instead of a base and an offset added at every load
  }

  __device__ Sum empty(int64_t) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] = 0;
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    constexpr int kSlots = TEAM / LANES;
    constexpr int kSteps = LANES < kUnroll ? LANES : kUnroll;
    const int slot = threadIdx.x % TEAM / LANES;
    int first = 0;
    if constexpr (TEAM == 32) {
#pragma unroll 1
      for (; first + kSteps * kSlots <= count; first += kSteps * kSlots)
        add_steps<kSteps, true>(edge, first + slot, count, sum);
      if (first < count) add_steps<kSteps, false>(edge, first + slot, count, sum);
    } else {  // all teams of a warp take the same branches
#pragma unroll 1
      for (; first < TEAM && __any_sync(kWarpMask, first < count); first += kSteps * kSlots) {
        if (__all_sync(kWarpMask, first + kSteps * kSlots <= count))
          add_steps<kSteps, true>(edge, first + slot, count, sum);
        else add_steps<kSteps, false>(edge, first + slot, count, sum);
      }
    }
  }

  // Adds STEPS of the slot's edges. Past the end it rereads the last edge and adds nothing.
  template <int STEPS, bool FULL>
  __device__ void add_steps(const Edge& edge, int e, int count, Sum& sum) const {
    constexpr int kSlots = TEAM / LANES;
    Pack<T, VEC> v[STEPS];
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const int at = FULL || e + u * kSlots < count ? e + u * kSlots : count - 1;
      const Col source = __shfl_sync(kWarpMask, edge.source, at, TEAM);
      v[u] = pyg_fast::cuda::load<T, VEC>(
          reinterpret_cast<const T*>(row_at(x, source, row_bytes)));
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const bool valid = FULL || e + u * kSlots < count;
      const Acc weight =
          WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, e + u * kSlots, TEAM) : Acc(1);
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const Acc term = element(v[u], c);
        if (FULL) sum.data[c] += weight * term;
        else sum.data[c] += valid ? weight * term : Acc(0);
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < TEAM; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c)
        sum.data[c] += __shfl_xor_sync(kWarpMask, sum.data[c], offset);
    }
  }

  __device__ void merge(Sum& sum, const Sum& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] += other.data[c];
  }

  __device__ void finish(int64_t row, int64_t degree, Sum& sum) const {
    if (!active) return;
    Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc(1);
    if (p.mean && degree > 1) scale /= static_cast<Acc>(degree);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] *= scale;
    const int64_t own = p.self_row ? static_cast<const Col*>(p.self_row)[row] : row;
    if (p.diag && own >= 0 && own < p.csr.num_cols) {
      const Acc d = static_cast<const Acc*>(p.diag)[row];
      const auto self = pyg_fast::cuda::load<T, VEC>(
          static_cast<const T*>(x_self) + own * p.dim + column);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += d * element(self, c);
    }
    if (p.out_acc) {
      constexpr int kWide = VEC < kVec<Acc> ? VEC : kVec<Acc>;
      const Acc* bias = static_cast<const Acc*>(p.bias);
      Acc* out = static_cast<Acc*>(p.out) + row * p.dim + column;
#pragma unroll
      for (int at = 0; at < VEC; at += kWide) {
        Pack<Acc, kWide> result;
#pragma unroll
        for (int c = 0; c < kWide; ++c)
          result.data[c] = sum.data[at + c] + (bias ? bias[column + at + c] : Acc(0));
        store<Acc, kWide>(out + at, result);
      }
    } else {
      const T* bias = static_cast<const T*>(p.bias);
      Pack<T, VEC> result;
#pragma unroll
      for (int c = 0; c < VEC; ++c)
        result.data[c] = from_acc<T>(sum.data[c] + (bias ? to_acc(bias[column + c]) : Acc(0)));
      store<T, VEC>(static_cast<T*>(p.out) + row * p.dim + column, result);
    }
  }
};

// Work done once, before the rows: its scratch, and the changes to `p`.
inline int64_t prologue_scratch(const Spmm& p) {
  if (wants_ordered_values(p)) return p.csr.num_edges * acc_bytes(p.dtype);
  return wants_prologue(p) ? p.csr.num_cols * p.dim * acc_bytes(p.dtype) : 0;
}

template <typename T, typename I>
void prologue(Spmm& p, void* scratch, cudaStream_t stream) {
  if (wants_ordered_values(p)) order_values<T, I>(p, scratch, stream);
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (wants_prologue(p)) {
      scale_rows(static_cast<const T*>(p.x), static_cast<const T*>(p.col_scale),
                 static_cast<T*>(scratch), p.csr.num_cols, p.dim, stream);
      p.x = scratch;
      p.col_scale = nullptr;
    }
  }
}

// int64 graphs are rare: they use the weighted kernels.
inline bool is_weighted(const Spmm& p) { return p.value || p.col_scale || p.csr.index64; }

}  // namespace pyg_fast::cuda
