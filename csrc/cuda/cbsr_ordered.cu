// The gradient of CBSR values without atomics: each row of the transpose gathers the gradient at the
// columns of its entries, tile by tile.
#include "cbsr.cuh"
#include "params/cbsr.h"
#include "rows.cuh"
#include "scale.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kUnroll = 4;  // edges in flight per slot

// The entries of a warp's row with columns in the tile.
template <int COLUMNS>
struct Entries {
  int column[COLUMNS];    // within the tile
  int position[COLUMNS];  // in the row
};

template <typename T, typename I, typename C, int COLUMNS>
struct GatherRow {
  using Acc = acc_t<T>;
  using Index = I;
  static constexpr int kLanes = 32, kBlocks = 4;
  static constexpr Sums kSums = Sums::registers;
  using Edge = WeightedEdge<T, I, true>;
  static constexpr int kRounds = COLUMNS / 32;
  struct Sum {
    Acc data[kRounds];
  };
  using Part = Sum;

  const CbsrBackward& p;
  Entries<COLUMNS>* entries;  // of this warp
  int64_t first_column;
  const char* grad;
  uint32_t row_bytes;
  // Processes `slots` edges at once, one thread for each of their n entries. With more than 32 entries,
  // one edge at once: a thread has several entries.
  int n = 0, slots = 1, slot = 0;
  int column[kRounds];

  __device__ GatherRow(const CbsrBackward& p, int tile) : p(p) {
    __shared__ Entries<COLUMNS> of_warps[kWarps];
    entries = of_warps + threadIdx.x / 32;
    first_column = static_cast<int64_t>(tile) * COLUMNS;
    row_bytes = static_cast<uint32_t>(p.dim * sizeof(T));
    grad = static_cast<const char*>(p.grad) + first_column * sizeof(T);
  }

  __device__ Sum empty(int64_t row) {
    const int lane = threadIdx.x & 31;
    const C* columns = static_cast<const C*>(p.columns) + row * p.k;
    __syncwarp();
    n = 0;
    for (int64_t base = 0; base < p.k; base += 32) {
      const int64_t at = base + lane;
      const int64_t offset = at < p.k ? static_cast<int64_t>(columns[at]) - first_column : -1;
      const bool inside = offset >= 0 && offset < COLUMNS;
      const unsigned found = __ballot_sync(kWarpMask, inside);
      if (inside) {
        const int to = n + __popc(found & ((1u << lane) - 1));
        entries->column[to] = static_cast<int>(offset);
        entries->position[to] = static_cast<int>(at);
      }
      n += __popc(found);
    }
    __syncwarp();
    slots = n > 0 && n < 32 ? 32 / n : 1;
    slot = n > 0 && n < 32 ? lane / n : 0;
    Sum sum;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int entry = r * 32 + (n < 32 ? lane - slot * n : lane);
      column[r] = entry < n && slot < slots ? entries->column[entry] : -1;
      sum.data[r] = 0;
    }
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    if (n == 0) return;
#pragma unroll 1
    for (int first = 0; first < count; first += kUnroll * slots) {
      T v[kUnroll][kRounds];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int e = first + u * slots + slot;
        const Col source = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
        const T* row = reinterpret_cast<const T*>(row_at(grad, source, row_bytes));
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (column[r] >= 0) v[u][r] = __ldg(row + column[r]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int e = first + u * slots + slot;
        const Acc weight = __shfl_sync(kWarpMask, edge.weight, e < count ? e : count - 1);
        if (e >= count) continue;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (column[r] >= 0) sum.data[r] += weight * to_acc(v[u][r]);
        }
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
    int distance = 1;
    while (2 * distance < slots) distance *= 2;
    for (; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const Acc other = __shfl_down_sync(kWarpMask, sum.data[r], distance * n & 31);
        if (slot < distance && slot + distance < slots) sum.data[r] += other;
      }
    }
  }

  __device__ void merge(Sum& sum, const Sum& other) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) sum.data[r] += other.data[r];
  }

  __device__ void finish(int64_t row, int64_t, const Sum& sum) const {
    if (slot > 0) return;
    const Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc(1);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int entry = r * 32 + (threadIdx.x & 31);
      if (entry >= n) continue;
      Acc total = sum.data[r] * scale;
      if (p.diag) {
        total += static_cast<const Acc*>(p.diag)[row] *
                 to_acc(static_cast<const T*>(p.grad)[row * p.dim + first_column + column[r]]);
      }
      static_cast<T*>(p.grad_values)[row * p.k + entries->position[entry]] = from_acc<T>(total);
    }
  }
};

// Columns of a tile. Each tile reads the edges: with few entries, use all columns that fit L2. With more
// entries, narrower tiles make better use of L2.
int columns_of(const CbsrBackward& p) {
  return p.dtype == DType::f64 || (p.dtype == DType::f32 && 8 * p.k >= p.dim) ? 32 : 64;
}

int tiles_of(const CbsrBackward& p) {
  return static_cast<int>((p.dim + columns_of(p) - 1) / columns_of(p));
}

// Each tile reads the values.
bool orders_values(const CbsrBackward& p) { return tiles_of(p) > 1 && wants_ordered_values(p); }

int64_t value_bytes(const CbsrBackward& p) {
  return orders_values(p) ? aligned(p.csr.num_edges * acc_bytes(p.dtype)) : 0;
}

// Calls fn(Row, shape, T, I) with the row kernel for `p`.
template <typename Fn>
const char* with_row(const CbsrBackward& p, const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    Shape s = shape_of(p.csr, p.dim, 1);
    s.tiles = tiles_of(p);
    return dispatch_columns(p.column_type, [&](auto column) {
      using C = decltype(column);
      const auto with = [&](auto columns) {
        fn(std::common_type<GatherRow<T, I, C, columns>>{}, s, element, index);
        return last_error();
      };
      if constexpr (sizeof(T) >= 4) {
        if (columns_of(p) == 32) return with(std::integral_constant<int, 32>{});
      }
      if constexpr (sizeof(T) <= 4) with(std::integral_constant<int, 64>{});
      return last_error();
    });
  });
}

}  // namespace

int64_t cbsr_spmm_backward_ordered_scratch(const CbsrBackward& p) {
  int64_t bytes = 0;
  with_row(p, [&](auto row, const Shape& s, auto, auto) {
    bytes = value_bytes(p) + rows_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* cbsr_spmm_backward_ordered(const CbsrBackward& p_in, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.k == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  void* of_rows = static_cast<char*>(scratch) + value_bytes(p_in);
  return with_row(p_in, [&](auto row, const Shape& s, auto element, auto index) {
    CbsrBackward p = p_in;
    if (orders_values(p)) order_values<decltype(element), decltype(index)>(p, scratch, stream);
    launch_rows<typename decltype(row)::type>(p.csr, s, of_rows, stream, p);
  });
}

int64_t cbsr_spmm_backward_hubs_scratch(const CbsrBackward& p) {
  int64_t bytes = 0;
  with_row(p, [&](auto row, const Shape& s, auto, auto) {
    bytes = many_terms_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* cbsr_spmm_backward_hubs(const CbsrBackward& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.k == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return with_row(p, [&](auto row, const Shape& s, auto, auto) {
    launch_long_rows<typename decltype(row)::type>(p.csr, s, rows_of_many_terms(p.csr).in(scratch),
                                                   stream, p);
  });
}

}  // namespace pyg_fast::cuda
