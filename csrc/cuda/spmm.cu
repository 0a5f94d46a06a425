// Sum and mean aggregation.
#include "params/spmm.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {
namespace {

template <typename T, typename I, int VEC, int LANES, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    spmm_kernel(Spmm p, const void* x_self, Shape s) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    SpmmRow<T, I, VEC, LANES, WEIGHTED> row(p, x_self, tile);
    for_each_row<I, LANES>(p.csr, s, row);
  }
}

// For rows of few edges: a team has as many threads as the row has vectors, up to a warp, and processes
// all columns of the row. It prefetches the next row while it sums one.
template <typename T, typename I, int VEC, int LANES, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    short_rows_kernel(Spmm p, const void* x_self, Shape s) {
  constexpr int kTeams = kThreads / LANES;
  using Row = SpmmRow<T, I, VEC, LANES, WEIGHTED, LANES>;
  using Edge = typename Row::Edge;
  __shared__ int num_hubs;
  __shared__ int hubs[kMaxBlockRows];
  if (threadIdx.x == 0) num_hubs = 0;
  __syncthreads();
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * s.block_rows;
  const int rows = p.csr.num_rows - first_row < s.block_rows
                       ? static_cast<int>(p.csr.num_rows - first_row) : s.block_rows;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr) + first_row;
  const int lane = threadIdx.x % LANES;
  Row kernel(p, x_self, 0);
  Edge head;
  I begin = 0, end = 0;
  const auto open = [&](int row) {
    begin = end = 0;
    if (row < rows) {
      begin = rowptr[row];
      end = rowptr[row + 1];
    }
    if (end - begin > s.hub_degree) {
      if (lane == 0) hubs[atomicAdd(&num_hubs, 1)] = row;
      begin = end;
    }
    head = Edge();
    head.load(kernel, begin + lane, end);
  };
  const int team = threadIdx.x / LANES;
  open(team);
  // All teams of a warp take the same branches.
  for (int row = team; row - team % (32 / LANES) < rows; row += kTeams) {
    const Edge its_head = head;
    const I its_begin = begin, degree = end - begin;
    const bool is_mine = row < rows && (degree > 0 || rowptr[row] == rowptr[row + 1]);
    open(row + kTeams);
    for (int tile = 0; tile < s.tiles; ++tile) {
      Row of_tile(p, x_self, tile);
      auto sum = of_tile.empty(first_row + row);
      for (I at = 0; __any_sync(kWarpMask, at < degree); at += LANES) {
        Edge edge = its_head;
        if (at > 0) {
          edge = Edge();
          edge.load(of_tile, its_begin + at + lane, its_begin + degree);
        }
        const I left = at < degree ? degree - at : 0;
        of_tile.add(edge, its_begin + at, left < LANES ? static_cast<int>(left) : LANES, sum);
      }
      if (is_mine) of_tile.finish(first_row + row, degree, sum);
    }
  }
  __syncthreads();
  if (num_hubs == 0) return;
  for (int tile = 0; tile < s.tiles; ++tile) {
    SpmmRow<T, I, VEC, LANES, WEIGHTED> of_tile(p, x_self, tile);
    sum_hubs<I, LANES>(of_tile, rowptr, first_row, hubs, num_hubs);
  }
}

// With one warp per row, short rows mostly cause waiting. A sampled mini-batch has such rows: most of its
// nodes have no edges.
bool has_short_rows(const Spmm& p, int vec) {
  return vec > 1 && p.csr.num_rows >= (1 << 14) && p.csr.num_edges <= 8 * p.csr.num_rows;
}

template <typename T, typename I>
void sum_short_rows(const Spmm& p, const void* x_self, cudaStream_t stream) {
  Shape s;
  s.block_rows = kMaxBlockRows;
  s.hub_degree = 128;
  const int64_t vectors = p.dim / kVec<T>;
  const unsigned blocks =
      static_cast<unsigned>((p.csr.num_rows + s.block_rows - 1) / s.block_rows);
  const auto launch = [&](auto lanes, auto weighted) {
    s.tiles = static_cast<int>((vectors + lanes - 1) / lanes);
    short_rows_kernel<T, I, kVec<T>, lanes, weighted><<<blocks, kThreads, 0, stream>>>(p, x_self, s);
  };
  const auto with_lanes = [&](auto weighted) {
    if (vectors <= 4) launch(std::integral_constant<int, 4>{}, weighted);
    else if (vectors <= 8) launch(std::integral_constant<int, 8>{}, weighted);
    else if (vectors <= 16) launch(std::integral_constant<int, 16>{}, weighted);
    else launch(std::integral_constant<int, 32>{}, weighted);
  };
  if constexpr (sizeof(I) == 4) {
    if (!is_weighted(p)) return with_lanes(std::false_type{});
  }
  with_lanes(std::true_type{});
}

}  // namespace

int64_t spmm_scratch(const Spmm& p) { return prologue_scratch(p); }

const char* spmm(const Spmm& p_in, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    Spmm p = p_in;
    prologue<T, I>(p, scratch, stream);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    const Shape s = shape_of(p.csr, p.dim, vectors ? kVec<T> : 1);
    if (has_short_rows(p, s.vec)) {
      sum_short_rows<T, I>(p, p_in.x, stream);
      return last_error();
    }
    const dim3 grid = s.grid(p.csr.num_rows);
    dispatch_shape<kVec<T>>(s, [&](auto vec, auto lanes) {
      if constexpr (sizeof(I) == 4) {
        if (!is_weighted(p)) {
          spmm_kernel<T, I, vec, lanes, false><<<grid, kThreads, 0, stream>>>(p, p_in.x, s);
          return;
        }
      }
      spmm_kernel<T, I, vec, lanes, true><<<grid, kThreads, 0, stream>>>(p, p_in.x, s);
    });
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
