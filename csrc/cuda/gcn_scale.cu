// The symmetric normalisation of sorted weighted edges. Workers of LANES threads take equal shares of
// edges and rows; a share can start and end inside a row. Rows that several workers share leave partial
// sums in scratch memory, which are added in order.
#include "common.cuh"
#include "params/gcn_scale.h"

namespace pyg_fast::cuda {
namespace {

constexpr int64_t kRowCost = 4;  // cost of a row itself, in edges
constexpr int kUnroll = 4;       // loads in flight per thread

template <typename Acc>
__device__ inline Acc inverse_root(Acc degree) {
  if (degree == 0) return 0;
  if constexpr (std::is_same_v<Acc, double>) return 1 / sqrt(degree);
  else return rsqrtf(degree);
}

template <typename T>
__device__ inline void write_scale(const GcnScale& p, int64_t row, acc_t<T> degree) {
  using Acc = acc_t<T>;
  Acc loop = 0;
  if (p.loops) {
    const int64_t last = p.last_loop ? p.last_loop[row] : -1;
    const bool found = last >= 0 && last < p.num_values;
    loop = found ? to_acc(static_cast<const T*>(p.value)[last]) : static_cast<Acc>(p.fill_value);
  }
  const Acc scale = inverse_root(degree + loop);
  static_cast<Acc*>(p.scale)[row] = scale;
  if (p.loops) static_cast<Acc*>(p.diag)[row] = scale * loop * scale;
}

// A worker's partial sums of shared rows: of the row that its share begins inside, and of the row that
// begins in its share and continues after it.
template <typename Acc>
struct Parts {
  Acc* head;       // [workers]
  Acc* tail;       // [workers]
  int64_t* row;    // [workers] the row of `tail`, -1: none
  int* head_ends;  // [workers] whether the row of `head` ends there

  static int64_t bytes(int64_t workers) {
    return 2 * aligned(workers * static_cast<int64_t>(sizeof(Acc))) + aligned(workers * 8) +
           aligned(workers * 4);
  }
  Parts(void* scratch, int64_t workers) {
    char* at = static_cast<char*>(scratch);
    const int64_t sums = aligned(workers * static_cast<int64_t>(sizeof(Acc)));
    head = reinterpret_cast<Acc*>(at);
    tail = reinterpret_cast<Acc*>(at + sums);
    row = reinterpret_cast<int64_t*>(at + 2 * sums);
    head_ends = reinterpret_cast<int*>(at + 2 * sums + aligned(workers * 8));
  }
};

// The row where a share at `cost` begins: the last i with rowptr[i] + kRowCost * i <= cost. All threads
// of a warp call it; each LANES threads search for the same row.
template <typename I, int LANES>
__device__ inline int64_t row_at_cost(const I* rowptr, int64_t num_rows, int64_t num_edges,
                                      int64_t cost) {
  constexpr unsigned kMask = LANES == 32 ? kWarpMask : (1u << LANES) - 1;
  const int lane = threadIdx.x % LANES, shift = (threadIdx.x & 31) / LANES * LANES;
  int64_t low = 0, count = num_rows;  // the row is one of low, ..., low + count - 1
  while (__any_sync(kWarpMask, count > 1)) {
    const int64_t step = (count + LANES - 1) / LANES;
    const int64_t i = low + lane * step;
    bool below = false;
    if (lane * step < count) {
      const int64_t e = rowptr[i] < num_edges ? static_cast<int64_t>(rowptr[i]) : num_edges;
      below = lane == 0 || e + kRowCost * i <= cost;
    }
    const unsigned set = __ballot_sync(kWarpMask, below) >> shift & kMask;
    const int64_t passed = (__popc(set) - 1) * step;
    low += passed;
    count = count - passed < step ? count - passed : step;
  }
  return low;
}

template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads)
    gcn_scale_kernel(GcnScale p, Parts<acc_t<T>> parts, int64_t workers) {
  using Acc = acc_t<T>;
  const int lane = threadIdx.x % LANES;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const T* value = static_cast<const T*>(p.value);
  const int64_t num_rows = p.csr.num_rows;
  const auto bounded = [&](int64_t e) { return e < p.csr.num_edges ? e : p.csr.num_edges; };
  const int64_t total = bounded(rowptr[num_rows]) + kRowCost * num_rows;
  const int64_t worker =
      static_cast<int64_t>(blockIdx.x) * (kThreads / LANES) + threadIdx.x / LANES;
  const bool working = worker < workers;
  // The begins of this share and of the next one.
  const auto begin_of = [&](int64_t k, int64_t& row, int64_t& edge) {
    const int64_t cost = total / workers * k + total % workers * k / workers;
    row = row_at_cost<I, LANES>(rowptr, num_rows, p.csr.num_edges, cost);
    if (cost >= total) {
      row = num_rows;
      edge = bounded(rowptr[num_rows]);
      return;
    }
    const int64_t first = bounded(rowptr[row]), last = bounded(rowptr[row + 1]);
    edge = first + cost - (first + kRowCost * row);
    // After the edges of its row, a share begins with the next row.
    if (edge >= last && cost > first + kRowCost * row) {
      edge = last;
      ++row;
    }
  };
  int64_t row, edge, row_end, edge_end;
  begin_of(working ? worker : 0, row, edge);
  begin_of(working ? worker + 1 : 0, row_end, edge_end);

  const bool within = working && row < num_rows && edge > bounded(rowptr[row]);
  bool head = within;  // whether `row` began in an earlier share
  // True past the share's end, also for a share that begins and ends inside the same row.
  const auto behind = [&] { return row > row_end || (row == row_end && edge >= edge_end); };
  bool active = working && !behind();
  int64_t last = active ? bounded(rowptr[row + 1]) : 0;  // of the row
  if (working && lane == 0) {
    parts.row[worker] = -1;
    parts.head_ends[worker] = 0;
  }
  Acc sum = 0;
  while (__any_sync(kWarpMask, active)) {
    const int64_t stop = active ? (row < row_end ? last : edge_end) : 0;
    const int64_t next = active && row + 1 < num_rows ? bounded(rowptr[row + 2]) : last;
    if (active) {
      constexpr int kStep = LANES * VEC;
      // Starts at the vector that contains `edge`.
      const int64_t base = edge / VEC * VEC, left = stop - base;
      const int from = static_cast<int>(edge - base);
      const int to = left < kUnroll * kStep ? static_cast<int>(left) : kUnroll * kStep;
      if constexpr (VEC > 1) {
        Pack<T, VEC> v[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = u * kStep + lane * VEC;
          if (at < to && base + at + VEC <= p.num_values) {
            *reinterpret_cast<uint4*>(&v[u]) =
                __ldcs(reinterpret_cast<const uint4*>(value + base + at));
          } else {
#pragma unroll
            for (int c = 0; c < VEC; ++c)
              v[u].data[c] = at + c < to ? value[base + at + c] : T(0.0f);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
          for (int c = 0; c < VEC; ++c) {
            const int at = u * kStep + lane * VEC + c;
            if (at >= from && at < to) sum += element(v[u], c);
          }
        }
      } else {
        I at[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int k = u * kStep + lane;
          at[u] = perm && k < to ? load_once(perm + base + k) : static_cast<I>(base + k);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (u * kStep + lane < to) sum += to_acc(value[at[u]]);
      }
      edge = base + kUnroll * kStep;
    }
    const bool done = active && edge >= stop;
    if (!__any_sync(kWarpMask, done)) continue;
    Acc all = sum;
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1)
      all += __shfl_xor_sync(kWarpMask, all, offset);
    if (!done) continue;
    const bool ends = row < row_end;
    if (lane == 0) {
      if (head) {
        parts.head[worker] = all;
        parts.head_ends[worker] = ends;
      } else if (ends) {
        write_scale<T>(p, row, all);
      } else {
        parts.tail[worker] = all;
        parts.row[worker] = row;
      }
    }
    sum = 0;
    head = false;
    edge = stop;
    if (ends) {
      ++row;
      last = next;
    }
    active = ends && !behind();
  }
}

// One warp for each row that several workers share.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gcn_scale_shared_kernel(GcnScale p, Parts<acc_t<T>> parts, int64_t workers) {
  using Acc = acc_t<T>;
  const int lane = threadIdx.x & 31;
  const int64_t worker = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (worker >= workers) return;
  const int64_t row = parts.row[worker];
  if (row < 0) return;
  Acc sum = 0;
  for (int64_t base = worker + 1; base < workers; base += 32) {
    const int64_t k = base + lane;
    const unsigned ends = __ballot_sync(kWarpMask, k < workers && parts.head_ends[k]);
    const int most = ends ? __ffs(ends) : 32;
    if (lane < most && k < workers) sum += parts.head[k];
    if (ends) break;
  }
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) sum += __shfl_xor_sync(kWarpMask, sum, offset);
  if (lane == 0) write_scale<T>(p, row, parts.tail[worker] + sum);
}

// Short rows use fewer threads.
int lanes_of(const GcnScale& p) {
  const int64_t mean = p.csr.num_edges / (p.csr.num_rows > 0 ? p.csr.num_rows : 1);
  return mean < 16 ? 4 : mean < 64 ? 8 : 32;
}

// With fewer edges the shares are smaller: the GPU needs enough of them.
int64_t workers_of(const GcnScale& p) {
  const int64_t cost = p.csr.num_edges + kRowCost * p.csr.num_rows;
  const int64_t share = (cost < (1 << 23) ? 32 : 128) * lanes_of(p);
  return (cost + share - 1) / share;
}

}  // namespace

int64_t gcn_scale_scratch(const GcnScale& p) {
  if (p.csr.num_rows == 0) return 0;
  return p.dtype == DType::f64 ? Parts<double>::bytes(workers_of(p))
                               : Parts<float>::bytes(workers_of(p));
}

const char* gcn_scale(const GcnScale& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    using std::integral_constant;
    const int64_t workers = workers_of(p);
    const Parts<acc_t<T>> parts(scratch, workers);
    const auto run = [&](auto vec, auto lanes) {
      const int64_t in_block = kThreads / lanes;
      const auto blocks = static_cast<unsigned>((workers + in_block - 1) / in_block);
      gcn_scale_kernel<T, I, vec, lanes><<<blocks, kThreads, 0, stream>>>(p, parts, workers);
    };
    const auto with_lanes = [&](auto vec) {
      const int lanes = lanes_of(p);
      if (lanes == 4) run(vec, integral_constant<int, 4>{});
      else if (lanes == 8) run(vec, integral_constant<int, 8>{});
      else run(vec, integral_constant<int, 32>{});
    };
    if (!p.csr.perm && aligned16(p.value)) with_lanes(integral_constant<int, kVec<T>>{});
    else with_lanes(integral_constant<int, 1>{});
    const auto blocks = static_cast<unsigned>((workers + kWarps - 1) / kWarps);
    gcn_scale_shared_kernel<T><<<blocks, kThreads, 0, stream>>>(p, parts, workers);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
