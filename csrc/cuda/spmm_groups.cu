// Sum and mean aggregation by groups of edges: no thread waits for a longer row than a group.
#include <atomic>

#include "params/spmm.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {
namespace {

// Groups that a team processes in sequence, with prefetch, if there are enough groups for all teams.
constexpr int kMostInTurn = 8;

// A kernel that launch_early launches may start while the last blocks of the kernel before it still run,
// if that one calls allow_next_kernel. It must call wait_for_previous_kernel before it uses memory: the
// call returns when the kernel before it has ended and its writes are visible.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

template <typename Acc, int VEC>
__device__ inline void keep(Acc* out, const VectorSum<Acc, VEC>& sum) {
  constexpr int kStep = VEC < kVec<Acc> ? VEC : kVec<Acc>;
#pragma unroll
  for (int c = 0; c < VEC; c += kStep)
    *reinterpret_cast<Pack<Acc, kStep>*>(out + c) =
        *reinterpret_cast<const Pack<Acc, kStep>*>(sum.data + c);
}

// A team of threads takes a group; all teams of a warp take the same branches.
template <typename T, typename I, int VEC, int LANES, bool WEIGHTED, int TEAM>
__global__ void __launch_bounds__(kThreads, kBlocks)
    spmm_groups_kernel(Spmm p, const void* x_self, Groups g, acc_t<T>* partial, Shape s) {
  using Row = SpmmRow<T, I, VEC, LANES, WEIGHTED, TEAM>;
  using Edge = typename Row::Edge;
  constexpr int kTeams = kThreads / TEAM;
  const int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * s.block_rows;
  const int groups = g.num_groups - first < s.block_rows ? static_cast<int>(g.num_groups - first)
                                                         : s.block_rows;
  const I* ptr = static_cast<const I*>(g.ptr) + first;
  const I* row_of = static_cast<const I*>(g.row) + first;
  const I* shift = static_cast<const I*>(g.long_shift);
  allow_next_kernel();

  struct Span {
    I begin = 0, end = 0;
  };
  const auto span = [&](int k) { return k < groups ? Span{ptr[k], ptr[k + 1]} : Span{}; };

  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    const Row row(p, x_self, tile);
    Span next = span(team), after = span(team + kTeams);
    Edge edge;
    edge.load(row, next.begin + lane, next.end);
    for (int k = team; k - team < groups; k += kTeams) {
      const Span now = next;
      next = after;
      after = span(k + 2 * kTeams);
      const I of = k < groups ? row_of[k] : 0;
      auto sum = row.empty(0);
      I left = now.end - now.begin;
      bool is_read = false;
      do {
        const Edge current = edge;
        // Reads the next edges, or once the first ones of the next group, while these are summed.
        const bool is_last = left <= TEAM;
        const I at = is_last ? next.begin : now.end - left + TEAM;
        const I end = is_read ? at : is_last ? next.end : now.end;
        edge.load(row, at + lane, end);
        is_read = is_last;
        row.add(current, 0, left <= 0 ? 0 : left < TEAM ? static_cast<int>(left) : TEAM, sum);
        left -= TEAM;
      } while (TEAM == 32 ? left > 0 : __any_sync(kWarpMask, left > 0));
      row.reduce(sum);
      if (k >= groups || lane >= LANES) continue;
      if (of >= 0) {
        row.finish(of, p.mean ? ptr[k + 1] - ptr[k] : 0, sum);
      } else if (row.active) {
        const int64_t long_row = -1 - static_cast<int64_t>(of);
        if (g.atomic) {
          add_to<acc_t<T>, VEC>(partial + long_row * p.dim + row.column, sum.data);
        } else {
          const int64_t slot = first + k - shift[long_row];
          keep(partial + slot * p.dim + row.column, sum);
        }
      }
    }
  }
}

// Adds the partial sums of a long row in order, each read as an edge.
template <typename T, typename I, int VEC, int LANES>
struct LongRow : SpmmRow<acc_t<T>, I, VEC, LANES, false> {
  using Sums = SpmmRow<acc_t<T>, I, VEC, LANES, false>;
  struct Edge : Sums::Edge {
    template <typename Row>
    __device__ void load(const Row&, I e, I end) {
      if (e < end) this->source = static_cast<Col>(e);
    }
  };

  const SpmmRow<T, I, VEC, LANES, false> out;
  const Groups& g;

  __device__ LongRow(const Spmm& sums, const Spmm& p, const void* x_self, const Groups& g, int tile)
      : Sums(sums, nullptr, tile), out(p, x_self, tile), g(g) {}

  __device__ void finish(int64_t k, int64_t, typename Sums::Sum& sum) const {
    const I row = static_cast<const I*>(g.long_row)[k];
    const I* rowptr = static_cast<const I*>(out.p.csr.rowptr);
    out.finish(row, rowptr[row + 1] - rowptr[row], sum);
  }
};

template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads, kBlocks)
    long_rows_kernel(Spmm sums, Spmm p, const void* x_self, Groups g, Shape s) {
  wait_for_previous_kernel();
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    LongRow<T, I, VEC, LANES> row(sums, p, x_self, g, tile);
    for_each_row<I, LANES>(sums.csr, s, row);
  }
}

// The same if atomic additions have produced one sum per row.
template <typename T, typename I, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_long_rows_kernel(Spmm sums, Spmm p, const void* x_self, Groups g, Shape s) {
  wait_for_previous_kernel();
  const int64_t k = static_cast<int64_t>(blockIdx.x) * s.block_rows + threadIdx.x / LANES;
  if (k >= g.num_long) return;
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    const LongRow<T, I, VEC, LANES> row(sums, p, x_self, g, tile);
    if (!row.active) continue;
    const auto* from = static_cast<const acc_t<T>*>(sums.x) + k * p.dim + row.column;
    VectorSum<acc_t<T>, VEC> sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] = from[c];
    row.finish(k, 0, sum);
  }
}

// Whether the current device runs code of 9.0 or newer, whose kernels wait for the one before them: newer
// GPUs also run code of older architectures. All kernels here are compiled for the same ones.
bool may_start_early() {
  constexpr int kDevices = 64;
  enum : signed char { unknown, no, yes };
  static std::atomic<signed char> known[kDevices];
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const bool has_place = device < kDevices;
  if (has_place && known[device] != unknown) return known[device] == yes;
  cudaFuncAttributes code = {};
  if (cudaFuncGetAttributes(&code, long_rows_kernel<float, int32_t, 1, 1>) != cudaSuccess) return false;
  const bool early = code.ptxVersion >= 90;
  if (has_place) known[device] = early ? yes : no;
  return early;
}

// Launches `kernel` after the one before it, early if it may. The caller checks for errors.
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = may_start_early() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

int64_t partial_bytes(const Spmm& p, const Groups& g) {
  const int64_t bytes = (g.atomic ? g.num_long : g.num_partials) * p.dim * acc_bytes(p.dtype);
  return (bytes + 255) / 256 * 256;
}

// Whether a warp is too wide for most groups. Then teams of fewer threads take one group each, unless the
// longest groups would delay them; teams of few slots gain less.
bool wants_teams(const Spmm& p, const Groups& g, const Shape& s) {
  const int64_t slots = 32 / s.lanes;
  const int64_t few = (slots > 4 ? kUnroll : 2) * slots;
  return slots > 1 && p.csr.num_edges <= few * g.num_groups && g.size <= 4 * kUnroll * slots;
}

}  // namespace

int64_t spmm_groups_scratch(const Spmm& p, const Groups& g) {
  return partial_bytes(p, g) + prologue_scratch(p);
}

const char* spmm_groups(const Spmm& p_in, const Groups& g, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int64_t bytes = partial_bytes(p_in, g);
  if (g.atomic && bytes > 0) cudaMemsetAsync(scratch, 0, bytes, stream);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    Spmm p = p_in;
    prologue<T, I>(p, static_cast<char*>(scratch) + bytes, stream);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    Shape s = shape_of(p.csr, p.dim, vectors ? kVec<T> : 1);
    dispatch_shape<kVec<T>>(s, [&](auto vec, auto lanes) {
      constexpr int kTeam = lanes < 8 ? 8 : lanes;
      auto* partial = static_cast<acc_t<T>*>(scratch);
      const auto launch = [&](auto edge_lanes, auto team) {
        s.block_rows = kThreads / team;
        for (int turns = 1; turns < kMostInTurn && g.num_groups * s.tiles / s.block_rows >= 2400;
             turns *= 2)
          s.block_rows *= 2;
        const dim3 grid = s.grid(g.num_groups);
        if constexpr (sizeof(I) == 4) {
          if (!is_weighted(p)) {
            spmm_groups_kernel<T, I, vec, edge_lanes, false, team>
                <<<grid, kThreads, 0, stream>>>(p, p_in.x, g, partial, s);
            return;
          }
        }
        spmm_groups_kernel<T, I, vec, edge_lanes, true, team>
            <<<grid, kThreads, 0, stream>>>(p, p_in.x, g, partial, s);
      };
      using Team = std::integral_constant<int, kTeam>;
      if (!wants_teams(p, g, s)) {
        launch(lanes, std::integral_constant<int, 32>{});
      } else if constexpr (vec > 1 && lanes == 4) {  // of which one or two vectors leave half idle
        if (p.dim <= 2 * vec) launch(std::integral_constant<int, 2>{}, Team{});
        else launch(lanes, Team{});
      } else {
        launch(lanes, Team{});
      }
      if (g.num_long == 0) return;
      Spmm sums;
      sums.x = scratch;
      sums.dim = p.dim;
      sums.csr.rowptr = g.long_ptr;
      sums.csr.num_rows = g.num_long;
      sums.csr.num_edges = g.num_partials;
      if (g.atomic) {
        s.block_rows = kThreads / lanes;
        launch_early(finish_long_rows_kernel<T, I, vec, lanes>, s.grid(g.num_long), stream, sums, p,
                     p_in.x, g, s);
      } else {
        s.block_rows = kWarps;
        share_rows(s, sums.csr);
        launch_early(long_rows_kernel<T, I, vec, lanes>, s.grid(g.num_long), stream, sums, p, p_in.x,
                     g, s);
      }
    });
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
