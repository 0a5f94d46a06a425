// Sum and mean aggregation.
#include "params/spmm.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {
namespace {

// Blocks per SM: most time is spent waiting, so there should be as many as registers allow without spills.
template <typename T, typename I>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kShortBlocks = 4;  // the most of 7.5; code for 8.0 takes more registers
#else
constexpr int kShortBlocks = sizeof(T) == 8 || sizeof(I) == 8 ? 4
                             : sizeof(T) == 4                 ? 6
                                                              : 5;
#endif

// For rows of few edges and up to kNarrow vectors. A warp takes up to 32 rows and reads their pointers,
// scales and places at once, also kEdges of their edges. Its teams of LANES threads then sum one row each
// at a time, edge by edge. This is what the threads of a warp share.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
struct ShortRows {
  static constexpr int kEdges = 128, kTeams = 32 / LANES;
  static constexpr int kSteps =
      4;  // loads of features in flight per thread, in rows of as many edges
  using Row = SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED, LANES>;
  using Acc = typename Row::Acc;
  using Sum = typename Row::Sum;

  struct alignas(2 * sizeof(Acc)) Edge {
    Col source;
    Acc weight;
  };
  struct Line {
    I begin;
    int degree;  // the edges to add: none of a long row
    int place;   // the row of the result, -1: none
    Acc scale;
  };

  Edge edges[kEdges + kSteps - 1];  // the last ones are read, too, but not used
  Line lines[32];

  // Reads the edges from `base` on.
  __device__ void load(const Row& row, I base, I end) {
    const int lane = threadIdx.x & 31;
    typename Row::Edge edge[kEdges / 32];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEdges / 32; ++i) edge[i].load(row, base + i * 32 + lane, end);
#pragma unroll
    for (int i = 0; i < kEdges / 32; ++i)
      edges[i * 32 + lane] = Edge{edge[i].source, edge[i].weight};
    __syncwarp();
  }

  // Adds `count` edges from number `at` on. All teams of a warp take the same branches.
  __device__ void add(const Row& row, int at, int count, Sum& sum) const {
    if (__any_sync(kWarpMask, count >= 2)) {
#pragma unroll 1
      for (; __any_sync(kWarpMask, count >= kSteps); at += kSteps, count -= kSteps)
        add_steps<kSteps>(row, at, count, sum);
      if (__any_sync(kWarpMask, count >= 2)) {
        add_steps<2>(row, at, count, sum);
        at += 2;
        count -= 2;
      }
    }
    if (__any_sync(kWarpMask, count > 0)) add_steps<1>(row, at, count, sum);
  }

  // Adds STEPS edges, and zeros past the end.
  template <int STEPS>
  __device__ void add_steps(const Row& row, int at, int count, Sum& sum) const {
    if (count <= 0) at = 0;
    Pack<T, VEC, STRIDED> v[STEPS];
    const T* from[STEPS];
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      from[u] = row.features_of(edges[at + u].source);
      if (u >= count) from[u] = reinterpret_cast<const T*>(zeros);
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) v[u] = row.columns.load(from[u]);
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      // Past the end there are other rows' edges: 0 times their weight would be NaN if that is infinite.
      const Acc weight = !WEIGHTED ? Acc(1) : u < count ? edges[at + u].weight : Acc(0);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += weight * element(v[u], c);
    }
  }
};

template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kShortBlocks<T, I>)
    short_rows_kernel(Spmm p, const void* x_self, Shape s, LongRows l) {
  allow_next_kernel();
  if (blockIdx.x < l.grid())
    return process_long_rows<SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED>>(p.csr, s, l, p, x_self);
  using Rows = ShortRows<T, I, VEC, LANES, STRIDED, WEIGHTED>;
  using Row = typename Rows::Row;
  using Acc = typename Row::Acc;
  __shared__ Rows of_warps[kWarps];
  Rows& warp = of_warps[threadIdx.x / 32];
  const int lane = threadIdx.x & 31, warp_rows = s.block_rows / kWarps;
  const int first = threadIdx.x / 32 * warp_rows;  // in the block
  const int64_t block_row = (static_cast<int64_t>(blockIdx.x) - l.grid()) * s.block_rows;
  const int64_t left = p.csr.num_rows - block_row - first;
  const int rows = left < warp_rows ? static_cast<int>(left) : warp_rows;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr) + block_row;
  const Row kernel(p, x_self, 0);
  if (rows <= 0) return;
  const int64_t row = block_row + first + lane;
  typename Rows::Line line;
  line.begin = rowptr[first + (lane < rows ? lane : rows)];
  const I last = rowptr[first + rows];
  I degree = 0;
  int64_t to = -1;
  line.scale = 1;
  if (lane < rows) {
    degree = rowptr[first + lane + 1] - line.begin;
    to = p.out_row ? p.out_row[row] : row;
    if (p.row_scale) line.scale = static_cast<const Acc*>(p.row_scale)[row];
  }
  I base = __shfl_sync(kWarpMask, line.begin, 0);  // of the edges that were read
  warp.load(kernel, base, last);
  line.place = degree > l.size || to < 0 || to >= p.num_out ? -1 : static_cast<int>(to);
  line.degree = line.place < 0 ? 0 : static_cast<int>(degree);
  if (p.mean && line.degree > 1) line.scale /= static_cast<Acc>(line.degree);
  warp.lines[lane] = line;
  __syncwarp();
#pragma unroll 1
  for (int at = lane / LANES; at - lane / LANES < rows; at += Rows::kTeams) {
    const auto& mine = warp.lines[at];
    I next = mine.begin;
    int left = mine.degree;
    auto sum = kernel.empty(0);
    unsigned waiting;
    while ((waiting = __ballot_sync(kWarpMask, left > 0)) != 0) {
      const bool is_here = next >= base && next - base < Rows::kEdges;
      if (!__any_sync(kWarpMask, left > 0 && is_here)) {
        base = __shfl_sync(kWarpMask, next, __ffs(waiting) - 1);
        warp.load(kernel, base, last);
        continue;
      }
      const int from = static_cast<int>(next - base);
      const int count = !is_here ? 0 : left < Rows::kEdges - from ? left : Rows::kEdges - from;
      warp.add(kernel, from, count, sum);
      next += count;
      left -= count;
    }
    const int place = mine.place;
    if (place < 0 || !kernel.active) continue;
    kernel.scale(sum, mine.scale);
    kernel.finish_scaled(block_row + first + at, place, sum);
  }
}

// For wide rows of few edges: a warp processes all columns of a row, and prefetches the next row.
template <typename T, typename I, int VEC, bool STRIDED, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    wide_short_rows_kernel(Spmm p, const void* x_self, Shape s, LongRows l) {
  constexpr int LANES = 32;
  using Row = SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED>;
  using Edge = typename Row::Edge;
  allow_next_kernel();
  if (blockIdx.x < l.grid()) return process_long_rows<Row>(p.csr, s, l, p, x_self);
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) - l.grid()) * s.block_rows;
  const int rows = p.csr.num_rows - first_row < s.block_rows
                       ? static_cast<int>(p.csr.num_rows - first_row)
                       : s.block_rows;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr) + first_row;
  const int lane = threadIdx.x % LANES;
  const Row kernel(p, x_self, 0);
  Edge head;
  I begin = 0, end = 0;
  bool is_long = false;
  const auto open = [&](int row) {
    begin = end = 0;
    if (row < rows) {
      begin = rowptr[row];
      end = rowptr[row + 1];
    }
    is_long = end - begin > l.size;
    if (is_long) begin = end;
    head = Edge();
    head.load(kernel, begin + lane, end);
  };
  open(threadIdx.x / LANES);
  for (int row = threadIdx.x / LANES; row < rows; row += kWarps) {
    const Edge its_head = head;
    const I its_begin = begin, degree = end - begin;
    const bool is_mine = !is_long;
    open(row + kWarps);
    if (!is_mine) continue;
    for (int tile = 0; tile < s.tiles; ++tile) {
      const Row of_tile(p, x_self, tile);
      auto sum = of_tile.empty(first_row + row);
      for (I at = 0; at < degree; at += LANES) {
        Edge edge = its_head;
        if (at > 0) {
          edge = Edge();
          edge.load(of_tile, its_begin + at + lane, its_begin + degree);
        }
        const I left = degree - at;
        of_tile.add(edge, its_begin + at, left < LANES ? static_cast<int>(left) : LANES, sum);
      }
      of_tile.finish(first_row + row, degree, sum);
    }
  }
}

// Calls fn(VEC, LANES, STRIDED, tiles) for the kernels of short rows.
template <typename T, typename I, typename Fn>
void with_short_rows(const Spmm& p, bool vectors, const Fn& fn) {
  const auto with = [&](auto vec, auto strided) {
    const int64_t count = (p.dim + vec - 1) / vec;
    using std::integral_constant;
    if (count <= 4) fn(vec, integral_constant<int, 4>{}, strided, 1);
    else if (count <= 8) fn(vec, integral_constant<int, 8>{}, strided, 1);
    else if (count <= kNarrow) fn(vec, integral_constant<int, kNarrow>{}, strided, 1);
    else fn(vec, integral_constant<int, 32>{}, strided, static_cast<int>((count + 31) / 32));
  };
  if (vectors) {
    with(std::integral_constant<int, kVec<T>>{}, std::false_type{});
  } else if constexpr (sizeof(T) <= 4 && sizeof(I) == 4) {
    with(std::integral_constant<int, kStridedVec<T>>{}, std::true_type{});
  }
}

// Teams of few threads take longer for a row.
LongRows long_rows_of(const Spmm& p) { return LongRows(p.csr, 128); }

template <typename T, typename I>
void sum_short_rows(const Spmm& p, const void* x_self, bool vectors, void* scratch,
                    cudaStream_t stream) {
  constexpr int64_t kFewBlocks = 400;  // 3 on each of 132 SMs
  const LongRows l = long_rows_of(p).in(scratch);
  with_short_rows<T, I>(p, vectors, [&](auto vec, auto lanes, auto strided, int tiles) {
    constexpr bool is_wide = lanes > kNarrow;
    Shape s;
    s.tiles = tiles;
    s.block_rows = is_wide ? kMaxBlockRows : kThreads;
    while (!is_wide && s.block_rows > kThreads / 4 && p.csr.num_rows / s.block_rows < kFewBlocks)
      s.block_rows /= 2;
    const unsigned blocks =
        static_cast<unsigned>((p.csr.num_rows + s.block_rows - 1) / s.block_rows) + l.grid();
    const auto launch = [&](auto weighted) {
      if constexpr (is_wide) {
        wide_short_rows_kernel<T, I, vec, strided, weighted>
            <<<blocks, kThreads, 0, stream>>>(p, x_self, s, l);
      } else {
        short_rows_kernel<T, I, vec, lanes, strided, weighted>
            <<<blocks, kThreads, 0, stream>>>(p, x_self, s, l);
      }
      if (l.blocks == 0) return;
      using Row = SpmmRow<T, I, vec, lanes, strided, weighted>;
      launch_merge<Row>(p.csr, s, l, s.tiles, 0, stream, p, x_self);
    };
    if constexpr (sizeof(I) == 4) {
      if (!is_weighted(p)) return launch(std::false_type{});
    }
    launch(std::true_type{});
  });
}

// Calls fn(Row, shape) with the row kernel for `p`.
template <typename T, typename I, typename Fn>
void with_row(const Spmm& p, bool vectors, const Fn& fn) {
  const Shape s = shape_of<T>(p.csr, p.dim, vectors);
  dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
    if constexpr (sizeof(I) == 4) {
      if (!is_weighted(p))
        return fn(std::common_type<SpmmRow<T, I, vec, lanes, strided, false>>{}, s);
    }
    fn(std::common_type<SpmmRow<T, I, vec, lanes, strided, true>>{}, s);
  });
}

}  // namespace

int64_t short_rows_scratch(const Spmm& p, bool vectors) {
  int64_t bytes = 0;
  dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    with_short_rows<T, decltype(index)>(p, vectors, [&](auto vec, auto lanes, auto, int tiles) {
      bytes = long_rows_of(p).bytes(int64_t{tiles} * lanes * vec *
                                    static_cast<int64_t>(sizeof(acc_t<T>)));
    });
    return nullptr;
  });
  return bytes;
}

const char* sum_short_rows(const Spmm& p, const void* x_self, bool vectors, void* scratch,
                           cudaStream_t stream) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    sum_short_rows<decltype(element), decltype(index)>(p, x_self, vectors, scratch, stream);
    return last_error();
  });
}

int64_t spmm_scratch(const Spmm& p_in) {
  int64_t rows = 0;
  Spmm p = p_in;
  if (wants_prologue(p)) p.x = nullptr;  // scratch memory, which is aligned
  dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    const bool vectors = takes_vectors<T>(p);
    if (has_short_rows(p, vectors)) {
      rows = short_rows_scratch(p, vectors);
      return nullptr;
    }
    with_row<T, decltype(index)>(p, vectors, [&](auto row, const Shape& s) {
      rows = rows_scratch<typename decltype(row)::type>(p.csr, s);
    });
    return nullptr;
  });
  return aligned(prologue_scratch(p_in)) + rows;
}

const char* spmm(const Spmm& p_in, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    Spmm p = p_in;
    prologue<T, I>(p, scratch, stream);
    void* of_rows = static_cast<char*>(scratch) + aligned(prologue_scratch(p_in));
    const bool vectors = takes_vectors<T>(p);
    if (has_short_rows(p, vectors)) return sum_short_rows(p, p_in.x, vectors, of_rows, stream);
    with_row<T, I>(p, vectors, [&](auto row, const Shape& s) {
      launch_rows<typename decltype(row)::type>(p.csr, s, of_rows, stream, p, p_in.x);
    });
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
