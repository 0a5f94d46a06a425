// Coordinate list to CSR: a counting sort in one launch for small graphs, else a radix sort over the bits
// that the row numbers need. Both are stable. Both orders of a graph that is not large are one sort.
#include <cub/device/device_radix_sort.cuh>

#include "common.cuh"
#include "params/runtime.h"
#include "params/to_csr.h"
#include "record.cuh"

namespace pyg_fast::cuda {
namespace {

int bits_for(int64_t largest) {
  int bits = 1;
  while (bits < 64 && (largest >> bits) != 0) ++bits;
  return bits;
}

// Sorts rows with their columns; without `temporary` it only asks for the bytes of that.
const char* sort_columns(const ToCsr& p, cub::DoubleBuffer<uint32_t>& rows,
                         cub::DoubleBuffer<Col>& cols, void* temporary, size_t& bytes,
                         cudaStream_t stream = nullptr) {
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      temporary, bytes, rows, cols, p.num_edges, 0, bits_for(p.num_rows), stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The same edges by one end or by both.
struct Orientations {
  ToCsr of[2];
  int count;

  Orientations(const ToCsr* p, int count) : of{p[0], p[count - 1]}, count(count) {}
  // A key of the second order comes after all of the first.
  __host__ __device__ int64_t first_key(int k) const { return k == 0 ? 0 : of[0].num_rows + 1; }
  int64_t largest_key() const { return first_key(count - 1) + of[count - 1].num_rows; }
  int64_t num_keys() const { return count * of[0].num_edges; }
  int64_t most_rows() const {
    return of[0].num_rows > of[1].num_rows ? of[0].num_rows : of[1].num_rows;
  }
};

// 4-byte keys if every key and every edge position fits.
bool narrow(const Orientations& o) {
  return o.largest_key() < 0xffffffff && o.of[0].num_edges < 0xfffffffe;
}

// Sorts keys with positions of edges; without `temporary` it only asks for the bytes of that.
template <typename Key>
const char* sort_positions(const Orientations& o, cub::DoubleBuffer<Key>& keys,
                           cub::DoubleBuffer<Key>& positions, void* temporary, size_t& bytes,
                           cudaStream_t stream = nullptr) {
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      temporary, bytes, keys, positions, o.num_keys(), 0, bits_for(o.largest_key()), stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Key>
const char* sort_bytes(const Orientations& o, size_t& bytes) {
  cub::DoubleBuffer<Key> keys, positions;
  return sort_positions(o, keys, positions, nullptr, bytes);
}

const char* sort_bytes_of_columns(const ToCsr& p, size_t& bytes) {
  cub::DoubleBuffer<uint32_t> rows;
  cub::DoubleBuffer<Col> cols;
  return sort_columns(p, rows, cols, nullptr, bytes);
}

template <typename I>
__device__ inline void record_edge(const ToCsr& p, int64_t* record, I row, I col) {
  if (p.by_src) record_ends(record, row, p.num_rows, col, p.num_cols);
  else record_ends(record, col, p.num_cols, row, p.num_rows);
}

// Skipped edges get the key num_rows, which sorts after all rows. With each key goes the position of the
// edge or, without `perm`, its column.
template <typename In, typename Key, bool kPerm>
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ Orientations o, Key* keys, Key* positions,
                int64_t* record) {
  const ToCsr& p = o.of[0];
  const In* row = static_cast<const In*>(p.row);
  const In* col = static_cast<const In*>(p.col);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  unsigned long long invalid = 0;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.num_edges;
       e += step) {
    const int64_t r = row[e], c = col[e];
    const bool valid = r >= 0 && r < p.num_rows && c >= 0 && c < p.num_cols;
    if (!valid) {
      if (invalid == 0) record_edge(p, record, r, c);
      ++invalid;
    }
    const bool kept = valid && !(p.drop_loops && r == c);
    keys[e] = static_cast<Key>(kept ? r : p.num_rows);
    if constexpr (kPerm) positions[e] = static_cast<Key>(e);
    else p.sorted_col[e] = kept ? static_cast<Col>(c) : 0;
    if (kPerm && o.count == 2) {
      keys[p.num_edges + e] = static_cast<Key>(o.first_key(1) + (kept ? c : p.num_cols));
      positions[p.num_edges + e] = static_cast<Key>(e);
    }
  }
  if (invalid && p.invalid) atomicAdd(reinterpret_cast<unsigned long long*>(p.invalid), invalid);
}

// rowptr[i] = the first sorted edge whose row is at least i.
template <typename Key, typename Out>
__global__ void __launch_bounds__(kThreads)
    rowptr_kernel(const __grid_constant__ Orientations o, const Key* keys) {
  const ToCsr& p = o.of[blockIdx.y];
  keys += blockIdx.y * p.num_edges;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i <= p.num_rows;
       i += step) {
    const Key key = static_cast<Key>(o.first_key(blockIdx.y) + i);
    Key low = 0, count = static_cast<Key>(p.num_edges);
    while (count > 0) {
      const Key half = count / 2;
      const bool below = keys[low + half] < key;
      low = below ? low + half + 1 : low;
      count = below ? count - half - 1 : half;
    }
    static_cast<Out*>(p.rowptr)[i] = static_cast<Out>(low);
  }
}

template <typename In, typename Key, typename Out>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const __grid_constant__ Orientations o, const Key* keys, const Key* positions) {
  const ToCsr& p = o.of[blockIdx.y];
  const In* col = static_cast<const In*>(p.col);
  keys += blockIdx.y * p.num_edges;
  positions += blockIdx.y * p.num_edges;
  const int64_t skipped = o.first_key(blockIdx.y) + p.num_rows;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.num_edges;
       e += step) {
    const bool kept = static_cast<int64_t>(keys[e]) < skipped;
    const Key from = positions[e];
    p.sorted_col[e] = kept ? static_cast<Col>(col[from]) : 0;
    static_cast<Out*>(p.perm)[e] = kept ? static_cast<Out>(from) : Out(0);
  }
}

unsigned grid_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < (1 << 20) ? blocks : 1 << 20);
}

template <typename In, typename Key, typename Out>
const char* run(const Orientations& o, void* scratch, int64_t* record, cudaStream_t stream) {
  const ToCsr& p = o.of[0];
  char* memory = static_cast<char*>(scratch);
  const int64_t array = aligned(o.num_keys() * static_cast<int64_t>(sizeof(Key)));
  const auto at = [&](int k) { return reinterpret_cast<Key*>(memory + k * array); };
  cub::DoubleBuffer<Key> keys(at(0), at(1)), positions(at(2), at(3));
  cudaError_t error = cudaSuccess;
  if (p.invalid) error = cudaMemsetAsync(p.invalid, 0, sizeof(int64_t), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const dim3 of_edges(grid_for(p.num_edges), o.count),
      of_rows(grid_for(o.most_rows() + 1), o.count);
  if (p.num_edges > 0) {
    keys_kernel<In, Key, true>
        <<<of_edges.x, kThreads, 0, stream>>>(o, keys.Current(), positions.Current(), record);
    size_t bytes = 0;
    if (const char* text = sort_bytes<Key>(o, bytes)) return text;
    if (const char* text = sort_positions(o, keys, positions, memory + 4 * array, bytes, stream))
      return text;
    columns_kernel<In, Key, Out>
        <<<of_edges, kThreads, 0, stream>>>(o, keys.Current(), positions.Current());
  }
  rowptr_kernel<Key, Out><<<of_rows, kThreads, 0, stream>>>(o, keys.Current());
  return last_error();
}

// Sorts the keys in scratch memory with the columns in `sorted_col`.
template <typename Out>
const char* run_columns(ToCsr& p, void* scratch, cudaStream_t stream) {
  char* memory = static_cast<char*>(scratch);
  const int64_t array = aligned(p.num_edges * static_cast<int64_t>(sizeof(uint32_t)));
  cub::DoubleBuffer<uint32_t> rows(reinterpret_cast<uint32_t*>(memory),
                                   reinterpret_cast<uint32_t*>(memory + array));
  cub::DoubleBuffer<Col> cols(p.sorted_col, p.spare_col);
  if (p.num_edges > 0) {
    size_t bytes = 0;
    if (const char* text = sort_columns(p, rows, cols, nullptr, bytes)) return text;
    if (const char* text = sort_columns(p, rows, cols, memory + 2 * array, bytes, stream))
      return text;
  }
  p.sorted_col = cols.Current();
  p.spare_col = cols.Alternate();
  rowptr_kernel<uint32_t, Out>
      <<<grid_for(p.num_rows + 1), kThreads, 0, stream>>>(Orientations(&p, 1), rows.Current());
  return last_error();
}

const char* run_columns(ToCsr& p, void* scratch, cudaStream_t stream) {
  return p.out64 ? run_columns<int64_t>(p, scratch, stream)
                 : run_columns<int32_t>(p, scratch, stream);
}

template <typename In>
const char* run_without_perm(ToCsr& p, void* scratch, int64_t* record, cudaStream_t stream) {
  if (p.invalid) {
    const cudaError_t error = cudaMemsetAsync(p.invalid, 0, sizeof(int64_t), stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  if (p.num_edges > 0) {
    keys_kernel<In, uint32_t, false><<<grid_for(p.num_edges), kThreads, 0, stream>>>(
        Orientations(&p, 1), static_cast<uint32_t*>(scratch), nullptr, record);
  }
  return run_columns(p, scratch, stream);
}

// The inclusive prefix sum over the threads of a warp.
__device__ inline int sum_so_far(int v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(kWarpMask, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

// The number of row pointers among the first `high` that are at most e, and so the row of e plus one. The
// threads of a warp look at as many places at once.
template <typename I>
__device__ inline int64_t rows_until(const I* rowptr, int64_t high, int64_t e) {
  const int lane = threadIdx.x & 31;
  int64_t low = 0;
  while (low < high) {
    const int64_t share = (high - low + 31) / 32, last = low + (lane + 1) * share - 1;
    const bool is_below = last < high && static_cast<int64_t>(rowptr[last]) <= e;
    low += __popc(__ballot_sync(kWarpMask, is_below)) * share;
    high = low + share - 1 < high ? low + share - 1 : high;
  }
  return low;
}

// Calls fn(e, row) for the edges of [begin, end). Each block takes consecutive edges: it finds the rows of
// the first and the last one, notes where the others between begin, and adds up.
constexpr int kEdgesOfThread = 8, kEdgesOfBlock = kThreads * kEdgesOfThread;

template <typename I, typename Fn>
__device__ inline void with_rows(const I* rowptr, int64_t num_rows, int64_t begin, int64_t end,
                                 const Fn& fn) {
  __shared__ int64_t ends[2];
  __shared__ int further[kEdgesOfBlock], of_warps[kWarps];  // rows
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  int* const own = further + threadIdx.x * kEdgesOfThread;
  for (int64_t first = begin + static_cast<int64_t>(blockIdx.x) * kEdgesOfBlock; first < end;
       first += static_cast<int64_t>(gridDim.x) * kEdgesOfBlock) {
    const int count = end - first < kEdgesOfBlock ? static_cast<int>(end - first) : kEdgesOfBlock;
    __syncthreads();
    for (int k = threadIdx.x; k < kEdgesOfBlock; k += kThreads) further[k] = 0;
    if (warp < 2) {
      const int64_t found = rows_until(rowptr, num_rows + 1, warp == 0 ? first : first + count - 1);
      if (lane == 0) ends[warp] = found;
    }
    __syncthreads();
    for (int64_t row = ends[0] + threadIdx.x; row < ends[1]; row += kThreads)
      atomicAdd(further + (static_cast<int64_t>(rowptr[row]) - first), 1);
    __syncthreads();
    int sum = 0;
#pragma unroll
    for (int u = 0; u < kEdgesOfThread; ++u) sum += own[u];
    int so_far = sum_so_far(sum);
    if (lane == 31) of_warps[warp] = so_far;
    __syncthreads();
    so_far -= sum;
    for (int w = 0; w < warp; ++w) so_far += of_warps[w];
#pragma unroll
    for (int u = 0; u < kEdgesOfThread; ++u) own[u] = so_far += own[u];
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += kThreads) fn(first + k, ends[0] - 1 + further[k]);
  }
}

template <typename I>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const I* rowptr, int64_t num_rows, int64_t begin, int64_t end, Col* rows) {
  with_rows(rowptr, num_rows, begin, end,
            [&](int64_t e, int64_t row) { rows[e - begin] = static_cast<Col>(row); });
}

// The keys of a transpose: columns, and their rows.
template <typename I>
__global__ void __launch_bounds__(kThreads) transposed_kernel(Csr csr, ToCsr p, uint32_t* keys) {
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const Col* col = static_cast<const Col*>(csr.col);
  with_rows(rowptr, csr.num_rows, 0, csr.num_edges, [&](int64_t e, int64_t row) {
    const bool exists = row < csr.num_rows;
    keys[e] = exists ? static_cast<uint32_t>(col[e]) : static_cast<uint32_t>(p.num_rows);
    p.sorted_col[e] = exists ? static_cast<Col>(row) : 0;
  });
}

template <typename In>
const char* run(const Orientations& o, void* scratch, int64_t* record, cudaStream_t stream) {
  if (!narrow(o)) return run<In, uint64_t, int64_t>(o, scratch, record, stream);
  if (o.of[0].out64) return run<In, uint32_t, int64_t>(o, scratch, record, stream);
  return run<In, uint32_t, int32_t>(o, scratch, record, stream);
}

// For a small graph, each block reads all edges and sorts some of the rows: blocks need no communication.
// Its warps take consecutive shares of the edges. They count the edges of each row, then walk their
// shares again and compute where each edge goes: after those of earlier rows, earlier shares and earlier
// threads. The time does not depend on the distribution of edges over rows.
constexpr int kSmallThreads = 1024;
constexpr int kShares = kSmallThreads / 32;
constexpr int kSmallRows = 256;  // rows per block
constexpr int kRowsOfWarp = kSmallRows / kShares;
constexpr int kSmallUnroll = 4;      // edges in flight per thread
constexpr int64_t kSmall = 1 << 15;  // maximum rows, or edges

bool small(const ToCsr& p) { return p.num_rows <= kSmall && p.num_edges <= kSmall; }

__device__ inline int sum_of_warp(int v) { return __shfl_sync(kWarpMask, sum_so_far(v), 31); }

template <typename In, typename Out>
__global__ void __launch_bounds__(kSmallThreads, 1)
    small_kernel(const __grid_constant__ Orientations orientations, int64_t* record) {
  const ToCsr& p = orientations.of[blockIdx.y];
  const In* row = static_cast<const In*>(p.row);
  const In* col = static_cast<const In*>(p.col);
  Out* rowptr = static_cast<Out*>(p.rowptr);
  Col* sorted_col = p.sorted_col;
  Out* perm = static_cast<Out*>(p.perm);
  // The number of a row's edges in a share, then the position of the next one, relative to the first edge
  // of the rows of that row's warp. Padded columns avoid bank conflicts.
  __shared__ int count[kSmallRows][kShares + 1];
  __shared__ int below[kShares], invalid[kShares], of_warps[kShares];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int num_edges = static_cast<int>(p.num_edges), num_rows = static_cast<int>(p.num_rows);
  const int first_row = static_cast<int>(blockIdx.x) * kSmallRows;
  const int share = (num_edges + kSmallThreads - 1) / kSmallThreads * 32;
  const int begin = share * warp;
  const int end = begin + share < num_edges ? begin + share : num_edges;

  // Calls fn(e, row[e], col[e], place, is_invalid) in all threads of a warp. `place` is the row's index
  // in this block: negative for earlier rows, >= kSmallRows for later rows and skipped edges.
  const auto walk = [&](const auto& fn) {
    for (int base = begin; base < end; base += 32 * kSmallUnroll) {
      In r[kSmallUnroll], c[kSmallUnroll];
#pragma unroll
      for (int u = 0; u < kSmallUnroll; ++u) {
        const int e = base + u * 32 + lane;
        r[u] = e < end ? __ldg(row + e) : In(0);
        c[u] = e < end ? __ldg(col + e) : In(0);
      }
#pragma unroll
      for (int u = 0; u < kSmallUnroll; ++u) {
        const int e = base + u * 32 + lane;
        const bool valid = r[u] >= 0 && r[u] < p.num_rows && c[u] >= 0 && c[u] < p.num_cols;
        const bool kept = e < end && valid && !(p.drop_loops && r[u] == c[u]);
        const int place = kept ? static_cast<int>(r[u]) - first_row : kSmallRows;
        fn(e, r[u], c[u], place, e < end && !valid);
      }
    }
  };

  for (int r = warp; r < kSmallRows; r += kShares) count[r][lane] = 0;
  __syncthreads();
  int num_below = 0, num_invalid = 0;
  walk([&](int, In r, In c, int place, bool is_invalid) {
    num_below += place < 0;
    num_invalid += is_invalid;
    if (is_invalid && blockIdx.x + blockIdx.y == 0) record_edge(p, record, r, c);
    if (place >= 0 && place < kSmallRows) atomicAdd(&count[place][warp], 1);
  });
  num_below = sum_of_warp(num_below);
  num_invalid = sum_of_warp(num_invalid);
  __syncthreads();

  int of_warp = 0;  // edges of the rows that this warp sums
#pragma unroll
  for (int r = warp * kRowsOfWarp; r < (warp + 1) * kRowsOfWarp; ++r) {
    const int n = count[r][lane], sum = sum_so_far(n);
    count[r][lane] = of_warp + sum - n;
    of_warp += __shfl_sync(kWarpMask, sum, 31);
  }
  if (lane == 0) {
    below[warp] = num_below;
    invalid[warp] = num_invalid;
    of_warps[warp] = of_warp;
  }
  __syncthreads();
  // Lane w holds the first edge position of warp w's rows.
  const int edges_of_lane = of_warps[lane];
  const int first_edge = sum_of_warp(below[lane]);
  const int starts = first_edge + sum_so_far(edges_of_lane) - edges_of_lane;
  const int start = __shfl_sync(kWarpMask, starts, warp);
  const int row_of_lane = warp * kRowsOfWarp + lane;
  if (lane < kRowsOfWarp && first_row + row_of_lane <= num_rows)
    rowptr[first_row + row_of_lane] = static_cast<Out>(start + count[row_of_lane][0]);
  if (blockIdx.x == 0 && p.invalid && warp == 0) {
    const int sum = sum_of_warp(invalid[lane]);
    if (lane == 0) *p.invalid = sum;
  }
  __syncthreads();

  walk([&](int e, In, In c, int place, bool) {
    const bool mine = place >= 0 && place < kSmallRows;
    if (!__any_sync(kWarpMask, mine)) return;
    const unsigned peers = __match_any_sync(kWarpMask, mine ? place : -1);
    const int rank = __popc(peers & ((1u << lane) - 1));
    const int from = __shfl_sync(kWarpMask, starts, mine ? place / kRowsOfWarp : 0);
    const int next = mine ? count[place][warp] : 0;
    __syncwarp();
    if (mine) {
      if (rank == 0) count[place][warp] = next + __popc(peers);
      sorted_col[from + next + rank] = static_cast<Col>(c);
      if (perm) perm[from + next + rank] = static_cast<Out>(e);
    }
    __syncwarp();
  });
  // The last block fills the slots after the last edge.
  if (blockIdx.x + 1 < gridDim.x) return;
  const int num_kept = first_edge + sum_of_warp(edges_of_lane);
  for (int e = num_kept + threadIdx.x; e < num_edges; e += kSmallThreads) {
    sorted_col[e] = 0;
    if (perm) perm[e] = 0;
  }
}

const char* run_small(const ToCsr* p, int count, cudaStream_t stream) {
  const Orientations orientations(p, count);
  // One block for each kSmallRows entries of rowptr (num_rows + 1 entries).
  const dim3 grid(static_cast<unsigned>(orientations.most_rows() / kSmallRows + 1), count);
  const auto with = [&](auto in, auto out) {
    small_kernel<decltype(in), decltype(out)>
        <<<grid, kSmallThreads, 0, stream>>>(orientations, p->report ? error_record() : nullptr);
  };
  if (p->in64) p->out64 ? with(int64_t{}, int64_t{}) : with(int64_t{}, int32_t{});
  else p->out64 ? with(int32_t{}, int64_t{}) : with(int32_t{}, int32_t{});
  return last_error();
}

bool all_small(const ToCsr* p, int count) { return small(p[0]) && small(p[count - 1]); }

int64_t sort_scratch(const Orientations& o) {
  const ToCsr& p = o.of[0];
  if (p.num_edges == 0) return 0;
  size_t bytes = 0;
  const bool wide = p.perm && !narrow(o);
  const char* error = !p.perm ? sort_bytes_of_columns(p, bytes)
                      : wide  ? sort_bytes<uint64_t>(o, bytes)
                              : sort_bytes<uint32_t>(o, bytes);
  if (error) return 0;  // to_csr gets the same error and reports it
  const int64_t arrays = p.perm ? 4 : 2;
  return arrays * aligned(o.num_keys() * (wide ? 8 : 4)) + static_cast<int64_t>(bytes);
}

// Whether one sort makes both orders: in twice the memory, and half of the launches. Those take most of the
// time of few edges; of more, if it takes no more passes.
constexpr int64_t kLaunchBound = 1 << 19, kMostOfBoth = 1 << 22;  // edges
constexpr int kBitsOfPass = 8;                                    // of CUB's sort

bool one_sort(const ToCsr* p, int count) {
  if (count == 1 || !p->perm || p->num_edges > kMostOfBoth) return false;
  const Orientations both(p, 2);
  const auto passes = [](int64_t key) { return (bits_for(key) + kBitsOfPass - 1) / kBitsOfPass; };
  return p->num_edges <= kLaunchBound || passes(both.largest_key()) <= passes(both.most_rows());
}

}  // namespace

int64_t to_csr_scratch(const ToCsr* p, int count) {
  if (all_small(p, count)) return 0;
  if (one_sort(p, count)) return sort_scratch(Orientations(p, 2));
  const int64_t one = sort_scratch(Orientations(p, 1)),
                other = sort_scratch(Orientations(p + count - 1, 1));
  return one > other ? one : other;
}

int64_t transpose_csr_scratch(const ToCsr& p) { return sort_scratch(Orientations(&p, 1)); }

const char* to_csr(ToCsr* p, int count, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (all_small(p, count)) return run_small(p, count, stream);
  int64_t* const record = p->report ? error_record() : nullptr;
  const int sorts = one_sort(p, count) ? 1 : count;
  for (int k = 0; k < sorts; ++k) {
    const auto with = [&](auto in) {
      using In = decltype(in);
      return p[k].perm ? run<In>(Orientations(p + k, count / sorts), scratch, record, stream)
                       : run_without_perm<In>(p[k], scratch, record, stream);
    };
    const char* error = p[k].in64 ? with(int64_t{}) : with(int32_t{});
    if (error) return error;
  }
  return nullptr;
}

const char* transpose_csr(const Csr& csr, ToCsr& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (csr.num_edges > 0) {
    const unsigned grid = grid_for((csr.num_edges + 7) / 8);
    uint32_t* keys = static_cast<uint32_t*>(scratch);
    if (csr.index64) transposed_kernel<int64_t><<<grid, kThreads, 0, stream>>>(csr, p, keys);
    else transposed_kernel<int32_t><<<grid, kThreads, 0, stream>>>(csr, p, keys);
  }
  return run_columns(p, scratch, stream);
}

const char* csr_rows(const Csr& csr, int64_t begin, int64_t end, Col* rows, void* stream_) {
  if (begin == end) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const unsigned grid = grid_for((end - begin + 7) / 8);
  const auto with = [&](auto index) {
    using I = decltype(index);
    rows_kernel<I><<<grid, kThreads, 0, stream>>>(static_cast<const I*>(csr.rowptr), csr.num_rows,
                                                  begin, end, rows);
  };
  if (csr.index64) with(int64_t{});
  else with(int32_t{});
  return last_error();
}

}  // namespace pyg_fast::cuda
