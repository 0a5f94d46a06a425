// Sums of columns over many rows, in two steps and in a fixed order.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

// A kernel that only reads its input needs as many blocks as run at once: a few more would run alone at the
// end. Few per SM leave registers for several loads in flight.
constexpr int kStreamBlocksPerSm = 4;
constexpr int kStreamBlocks = 512;     // of 132 SMs
constexpr int kFewestThreadRows = 16;  // fewer rows do not pay for another block

// How a launch covers a matrix. A thread reads the same vector of every row that it adds; a block reads
// kThreads / width rows at once.
struct ColumnShape {
  int width = 1;       // vectors of a row in a block
  int64_t tiles = 1;   // of `width` vectors
  int64_t blocks = 1;  // that divide the rows; each writes one row of sums

  dim3 grid() const { return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(blocks)); }
};

inline ColumnShape column_shape(int64_t num_rows, int64_t columns, int vec) {
  ColumnShape s;
  const int64_t vectors = columns / vec;
  s.tiles = vectors <= kThreads ? 1 : (vectors + kThreads - 1) / kThreads;
  s.width = vectors < 1 ? 1 : static_cast<int>((vectors + s.tiles - 1) / s.tiles);
  const int64_t rows = kThreads / s.width * kFewestThreadRows;
  const int64_t wanted = (num_rows + rows - 1) / rows, most = kStreamBlocks / s.tiles;
  s.blocks = wanted < most ? wanted : most;
  if (s.blocks < 1) s.blocks = 1;
  return s;
}

// The elements of a vector: those of 16 bytes if all rows are aligned.
template <typename T, typename... Pointers>
int column_vec(int64_t columns, Pointers... rows) {
  return columns % kVec<T> == 0 && (aligned16(rows) && ...) ? kVec<T> : 1;
}

// A thread's place: VEC columns, and every `step`-th row from `row` on.
template <int VEC>
struct ColumnThread {
  int width, groups, group;  // a group of `width` threads reads one row
  int64_t column, row, step;
  bool valid;

  __device__ ColumnThread(int64_t columns, int width_)
      : width(width_), groups(kThreads / width_), group(static_cast<int>(threadIdx.x) / width_) {
    const int lane = static_cast<int>(threadIdx.x) % width;
    column = (static_cast<int64_t>(blockIdx.x) * width + lane) * VEC;
    row = static_cast<int64_t>(blockIdx.y) * groups + group;
    step = static_cast<int64_t>(gridDim.y) * groups;
    valid = group < groups && column < columns;
  }

  // Calls add(first, number) for this thread's rows, in order: for STEPS of them from `first` on as long
  // as there are so many, then for half as many, and so on; `number` is a compile-time integer.
  template <int STEPS, typename Add>
  __device__ void for_rows(int64_t num_rows, const Add& add) const {
    if (valid) for_rows_from<STEPS>(row, num_rows, add);
  }

  template <int STEPS, typename Add>
  __device__ void for_rows_from(int64_t first, int64_t num_rows, const Add& add) const {
    for (; first + (STEPS - 1) * step < num_rows; first += STEPS * step)
      add(first, std::integral_constant<int, STEPS>{});
    if constexpr (STEPS > 1) for_rows_from<STEPS / 2>(first, num_rows, add);
  }

  // Adds the sums of all groups; the first gets the result. All threads of the block call it, those
  // that are not valid with zeros.
  template <typename Acc>
  __device__ void sum_of_groups(Acc (&sum)[VEC], Acc (&part)[VEC][kThreads]) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int c = 0; c < VEC; ++c) part[c][thread] = sum[c];
    __syncthreads();
    for (int left = groups; left > 1;) {
      const int half = (left + 1) / 2;
      if (group + half < left) {
#pragma unroll
        for (int c = 0; c < VEC; ++c) part[c][thread] += part[c][thread + half * width];
      }
      __syncthreads();
      left = half;
    }
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum[c] = part[c][thread];
  }
};

// out[blockIdx.y, c] = the sum of column c over every gridDim.y-th group of rows.
template <typename T, int VEC, typename Out>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    sum_columns_kernel(const T* x, Out* out, int64_t num_rows, int64_t columns, int width) {
  using Acc = acc_t<T>;
  constexpr int kSteps = VEC == 1 ? 8 : 4;  // rows in flight per thread
  __shared__ Acc part[VEC][kThreads];
  const ColumnThread<VEC> at(columns, width);
  Acc sum[VEC] = {};
  at.for_rows<kSteps>(num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const T* from = x + row * columns + at.column;
    Pack<T, VEC> v[steps];
#pragma unroll
    for (int u = 0; u < steps; ++u) v[u] = load<T, VEC>(from + u * at.step * columns);
#pragma unroll
    for (int u = 0; u < steps; ++u) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum[c] += element(v[u], c);
    }
  });
  at.sum_of_groups(sum, part);
  if (at.group > 0 || !at.valid) return;
  Out* to = out + blockIdx.y * columns + at.column;
#pragma unroll
  for (int c = 0; c < VEC; ++c) to[c] = from_acc<Out>(sum[c]);
}

// The second step: out[c] = the sum over blocks of parts[block, c].
template <typename Acc, typename Out>
void sum_column_blocks(const Acc* parts, Out* out, int64_t blocks, int64_t columns,
                       cudaStream_t stream) {
  constexpr int kWidth = 32 / sizeof(Acc);  // a sector of each row: most threads add rows
  const dim3 grid(static_cast<unsigned>((columns + kWidth - 1) / kWidth));
  sum_columns_kernel<Acc, 1, Out>
      <<<grid, kThreads, 0, stream>>>(parts, out, blocks, columns, kWidth);
}

// Bytes of scratch memory that sum_columns needs.
template <typename T>
int64_t sum_columns_scratch(const T* x, int64_t num_rows, int64_t columns) {
  const ColumnShape s = column_shape(num_rows, columns, column_vec<T>(columns, x));
  return s.blocks > 1 ? s.blocks * columns * static_cast<int64_t>(sizeof(acc_t<T>)) : 0;
}

// out[c] = sum_r x[r, c], in the type of x; zeros without rows.
template <typename T>
void sum_columns(const T* x, T* out, int64_t num_rows, int64_t columns, acc_t<T>* scratch,
                 cudaStream_t stream) {
  using Acc = acc_t<T>;
  if (columns == 0) return;
  const int vec = column_vec<T>(columns, x);
  const ColumnShape s = column_shape(num_rows, columns, vec);
  const auto into = [&](auto* to) {
    using Out = std::remove_pointer_t<decltype(to)>;
    const auto kernel =
        vec > 1 ? sum_columns_kernel<T, kVec<T>, Out> : sum_columns_kernel<T, 1, Out>;
    kernel<<<s.grid(), kThreads, 0, stream>>>(x, to, num_rows, columns, s.width);
  };
  if (s.blocks == 1) return into(out);
  into(scratch);
  sum_column_blocks<Acc>(scratch, out, s.blocks, columns, stream);
}

}  // namespace pyg_fast::cuda
