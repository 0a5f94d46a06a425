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

// What threads without an edge read: a selection for each element that they add costs more. As many as 32
// lanes of strided columns read, which includes vectors of eight floats (partial sums of float16).
static __device__ uint4 zeros[32];

// TEAM threads process a row (or a part of one): a warp, or each team of a warp its own row.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED, int TEAM = 32>
struct SpmmRow {
  using Acc = acc_t<T>;
  using Index = I;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  static_assert(((VEC - 1) * OfThread::kStep + 1) * sizeof(T) <= sizeof(zeros));
  static constexpr int kLanes = LANES, kBlocks = cuda::kBlocks;
  static constexpr Sums kSums = Sums::registers;
  using Sum = VectorSum<Acc, VEC>;
  using Part = Sum;
  using Edge = WeightedEdge<T, I, WEIGHTED>;

  const Spmm& p;
  const void* x_self;  // x before any prologue
  const char* x;       // at this thread's column
  uint32_t row_bytes;
  int64_t column;  // the first of this thread
  bool active;
  OfThread columns;

  __device__ SpmmRow(const Spmm& p, const void* x_self, int tile)
      : p(p),
        x_self(x_self),
        column(OfThread::first(tile, threadIdx.x % LANES)),
        columns(column, p.dim) {
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
    constexpr int kStride = kSteps * kSlots;
    const int slot = threadIdx.x % TEAM / LANES;
    // Past the end there are other rows' edges: 0 times their weight would be NaN if that is infinite.
    Edge own = edge;
    if (WEIGHTED && static_cast<int>(threadIdx.x % TEAM) >= count) own.weight = 0;
    int first = 0;
    if constexpr (TEAM == 32) {
#pragma unroll 1
      for (; first + kStride <= count; first += kStride)
        add_steps<kSteps, true>(own, first + slot, count, sum);
      if (first < count) add_steps<kSteps, false>(own, first + slot, count, sum);
    } else {  // all teams of a warp take the same branches
      do {
        add_steps<kSteps, false>(own, first + slot, count, sum);
        first += kStride;
      } while (first < TEAM && __any_sync(kWarpMask, first < count));
    }
  }

  // Adds STEPS of the slot's edges, and zeros past the end.
  template <int STEPS, bool FULL>
  __device__ void add_steps(const Edge& edge, int e, int count, Sum& sum) const {
    constexpr int kSlots = TEAM / LANES;
    Pack<T, VEC, STRIDED> v[STEPS];
    Col source[STEPS];
#pragma unroll
    for (int u = 0; u < STEPS; ++u)
      source[u] = __shfl_sync(kWarpMask, edge.source, e + u * kSlots, TEAM);
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const T* from = features_of(source[u]);
      if (!FULL && e + u * kSlots >= count) from = reinterpret_cast<const T*>(zeros);
      v[u] = columns.load(from);
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const Acc weight =
          WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, e + u * kSlots, TEAM) : Acc(1);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += weight * element(v[u], c);
    }
  }

  // One wide multiply-add, if the multiplication is of 32 bits by name.
  __device__ const T* features_of(Col source) const {
    uint64_t offset;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(offset) : "r"(source), "r"(row_bytes));
    return reinterpret_cast<const T*>(x + offset);
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < TEAM; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += __shfl_xor_sync(kWarpMask, sum.data[c], offset);
    }
  }

  __device__ void merge(Sum& sum, const Sum& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] += other.data[c];
  }

  __device__ void finish(int64_t row, int64_t degree, Sum& sum) const {
    if (!active) return;
    int64_t to = row;
    if (p.out_row) {
      to = p.out_row[row];
      if (to < 0 || to >= p.num_out) return;
    }
    if (p.row_scale || p.mean) {
      Acc factor = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc(1);
      if (p.mean && degree > 1) factor /= static_cast<Acc>(degree);
      scale(sum, factor);
    }
    finish_scaled(row, to, sum);
  }

  __device__ void scale(Sum& sum, Acc factor) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] *= factor;
  }

  // Writes row `to` of the result, called by active threads.
  __device__ void finish_scaled(int64_t row, int64_t to, Sum& sum) const {
    if (p.diag) {
      const int64_t own = p.self_row ? static_cast<const Col*>(p.self_row)[row] : row;
      if (own >= 0 && own < p.csr.num_cols) {
        const Acc d = static_cast<const Acc*>(p.diag)[row];
        const auto self = columns.load(static_cast<const T*>(x_self) + own * p.dim + column);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum.data[c] += d * element(self, c);
      }
    }
    if constexpr (!std::is_same_v<T, Acc>) {
      if (p.out_acc) return write<Acc>(to, sum);
    }
    write<T>(to, sum);
  }

  template <typename Out>
  __device__ void write(int64_t row, Sum& sum) const {
    if (p.bias) {
      const Out* bias = static_cast<const Out*>(p.bias) + column;
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        if (columns.has(c)) sum.data[c] += to_acc(bias[c * OfThread::kStep]);
      }
    }
    columns.write(static_cast<Out*>(p.out) + row * p.dim + column, sum.data);
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

// A row of so many vectors is narrow: less than a warp reads it at once.
constexpr int kNarrow = 16;

// With one warp per row, short rows mostly cause waiting. A sampled mini-batch has such rows: most of its
// nodes have no edges. A kernel of their own, in spmm.cu, stores rows of the result as 32-bit numbers.
inline bool has_short_rows(const Spmm& p, bool vectors) {
  const bool has_kernel =
      vectors || (p.dtype != DType::f64 && !p.csr.index64);  // rare ones have none
  return has_kernel && p.csr.num_rows >= (1 << 14) && p.csr.num_edges <= 8 * p.csr.num_rows &&
         p.num_out < (int64_t{1} << 31);
}
// Whether rows of features are 16-byte vectors.
template <typename T>
bool takes_vectors(const Spmm& p) {
  return p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
}

int64_t short_rows_scratch(const Spmm& p, bool vectors);
const char* sum_short_rows(const Spmm& p, const void* x_self, bool vectors, void* scratch,
                           cudaStream_t stream);

}  // namespace pyg_fast::cuda
