// Sum and mean aggregation by groups of edges: no thread waits for a longer row than a group.
#include "params/spmm.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {
namespace {

// Groups that a team processes in sequence, with prefetch, if there are enough groups for all teams.
constexpr int kMostInTurn = 8;

// Of larger groups a warp with slots hides the latency better than a team of less than 16 threads.
constexpr int kMostOfTeam = 128;

constexpr int kAtOnce = 8;  // loads of features in flight per thread of a team

template <typename Acc, int VEC, int LANES, bool STRIDED>
__device__ inline void keep(const Columns<VEC, LANES, STRIDED>& columns, Acc* out,
                            const VectorSum<Acc, VEC>& sum) {
  if constexpr (STRIDED) {
    columns.write(out, sum.data);
  } else {  // for L2: it is read next
    constexpr int kStep = VEC < kVec<Acc> ? VEC : kVec<Acc>;
#pragma unroll
    for (int c = 0; c < VEC; c += kStep)
      *reinterpret_cast<Pack<Acc, kStep>*>(out + c) =
          *reinterpret_cast<const Pack<Acc, kStep>*>(sum.data + c);
  }
}

// How kTeam threads sum a group, kEdges edges at once, of which each reads its own. Either TEAM threads,
// whose slots of LANES threads read the features of an edge each:
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED, int TEAM>
struct SlotsRow : SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED, TEAM> {
  using Base = SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED, TEAM>;
  using Edges = typename Base::Edge;
  static constexpr int kTeam = TEAM, kEdges = TEAM, kLanes = LANES;

  __device__ SlotsRow(const Spmm& p, const void* x_self, int tile) : Base(p, x_self, tile) {}

  __device__ void add(const Edges& edges, I count, typename Base::Sum& sum) const {
    Base::add(edges, 0, count <= 0 ? 0 : count < TEAM ? static_cast<int>(count) : TEAM, sum);
  }
};

// Or teams of LANES threads. All teams of a warp take the same branches: groups of the same length, which
// Groups::order brings together, suit them.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
struct TeamRow : SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED, LANES> {
  using Base = SpmmRow<T, I, VEC, LANES, STRIDED, WEIGHTED, LANES>;
  using typename Base::Acc, typename Base::Edge, typename Base::Sum;
  static constexpr int kTeam = LANES, kEdges = LANES < kAtOnce ? kAtOnce : LANES, kLanes = LANES;
  static constexpr int kOwn = kEdges / LANES;  // edges of a thread

  struct Edges {
    Edge own[kOwn];

    __device__ void load(const TeamRow& row, I e, I end) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i].load(row, e + i * LANES, end);
    }
  };

  __device__ TeamRow(const Spmm& p, const void* x_self, int tile) : Base(p, x_self, tile) {}

  // Adds the first `count` of the edges.
  __device__ void add(const Edges& edges, I count, Sum& sum) const {
#pragma unroll 1
    for (int first = 0; first < kEdges; first += kAtOnce) {
      if (first > 0 && !__any_sync(kWarpMask, first < count)) break;
      if (__all_sync(kWarpMask, first + kAtOnce <= count)) {
        add_some<0, kAtOnce, true>(edges, first, count, sum);
      } else {
        add_some<0, kAtOnce / 2, false>(edges, first, count, sum);
        if (__any_sync(kWarpMask, first + kAtOnce / 2 < count))
          add_some<kAtOnce / 2, kAtOnce / 2, false>(edges, first, count, sum);
      }
    }
  }

  // Adds STEPS edges from first + AT on, or zeros past the end.
  template <int AT, int STEPS, bool FULL>
  __device__ void add_some(const Edges& edges, int first, I count, Sum& sum) const {
    Pack<T, VEC, STRIDED> v[STEPS];
    Col source[STEPS];
    const auto own = [&](int u) -> const Edge& { return edges.own[(AT + u) / LANES % kOwn]; };
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      source[u] = __shfl_sync(kWarpMask, own(u).source, first + AT + u, LANES);
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const T* from = this->features_of(source[u]);
      if (!FULL && first + AT + u >= count) from = reinterpret_cast<const T*>(zeros);
      v[u] = this->columns.load(from);
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      const int e = first + AT + u;
      Acc weight = 1;
      if constexpr (WEIGHTED) {
        weight = __shfl_sync(kWarpMask, own(u).weight, e, LANES);
        // Past the end there are other rows' edges: 0 times their weight would be NaN if that is infinite.
        if (!FULL && e >= count) weight = 0;
      }
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += weight * element(v[u], c);
    }
  }
};

template <typename Row, typename T, typename I, int VEC>
__global__ void __launch_bounds__(kThreads, kBlocks)
    spmm_groups_kernel(Spmm p, const void* x_self, Groups g, acc_t<T>* partial, Shape s) {
  constexpr int kTeam = Row::kTeam, kTeams = kThreads / kTeam;
  const int team = threadIdx.x / kTeam, lane = threadIdx.x % kTeam;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * s.block_rows;
  const int groups =
      g.num_groups - first < s.block_rows ? static_cast<int>(g.num_groups - first) : s.block_rows;
  const I* order = static_cast<const I*>(g.order);
  const I* ptr = static_cast<const I*>(g.ptr);
  allow_next_kernel();

  struct Span {
    I group = 0, begin = 0, end = 0;
  };
  const auto number = [&](int k) {
    return k >= groups ? I(0) : order ? order[first + k] : static_cast<I>(first + k);
  };
  const auto span = [&](int k, I group) {
    return k < groups ? Span{group, ptr[group], ptr[group + 1]} : Span{};
  };

  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    const Row row(p, x_self, tile);
    Span next = span(team, number(team)), after = span(team + kTeams, number(team + kTeams));
    I then = number(team + 2 * kTeams);
    typename Row::Edges edges;
    edges.load(row, next.begin + lane, next.end);
    for (int k = team; k - team % (32 / kTeam) < groups; k += kTeams) {
      const Span now = next;
      next = after;
      after = span(k + 2 * kTeams, then);
      then = number(k + 3 * kTeams);
      const I of = k < groups ? static_cast<const I*>(g.row)[now.group] : 0;
      auto sum = row.empty(0);
      I left = now.end - now.begin;
      bool is_read = false;
      do {
        const typename Row::Edges current = edges;
        // Reads the next edges, or once the first ones of the next group, while these are summed.
        const bool is_last = left <= Row::kEdges;
        const I at = is_last ? next.begin : now.end - left + Row::kEdges;
        const I end = is_read ? at : is_last ? next.end : now.end;
        edges.load(row, at + lane, end);
        is_read = is_last;
        row.add(current, left, sum);
        left -= Row::kEdges;
      } while (__any_sync(kWarpMask, left > 0));
      row.reduce(sum);
      if (k >= groups || lane >= Row::kLanes) continue;
      if (of >= 0) {
        row.finish(of, p.mean ? now.end - now.begin : 0, sum);
      } else if (row.active) {
        const int64_t long_row = -1 - static_cast<int64_t>(of);
        if (g.atomic) {
          row.columns.add_to(partial + long_row * p.dim + row.column, sum.data);
        } else {
          const int64_t slot = now.group - static_cast<const I*>(g.long_shift)[long_row];
          keep(row.columns, partial + slot * p.dim + row.column, sum);
        }
      }
    }
  }
}

// The long rows, whose groups have written partial sums.
template <typename Row>
struct LongRowsOfGroups {
  using I = typename Row::Index;
  using Acc = typename Row::Acc;
  const Groups& g;
  Acc* partial;
  int64_t dim, count;
  bool ranges;  // whether merge_ranges merges parts

  __device__ LongRowsOfGroups(const Groups& g, Acc* partial, int64_t dim, bool ranges)
      : g(g), partial(partial), dim(dim), count(g.num_long), ranges(ranges) {}
  __device__ int64_t row(int64_t k) const { return static_cast<const I*>(g.long_row)[k]; }
  // By its number `k` among long rows. All threads of a warp call it.
  __device__ int64_t row_across(int64_t group) const {
    if (group >= g.num_partials) return -1;
    const I* ptr = static_cast<const I*>(g.long_ptr);
    const int64_t k = row_of_edge<16>(ptr, g.num_long, group);
    return ptr[k] < group ? k : -1;
  }
  __device__ Places places(int64_t k) const {
    const I* of_row = static_cast<const I*>(g.long_ptr) + k;
    return {of_row[0], of_row[1], ranges && of_row[1] - of_row[0] > kMostOfBlock};
  }
  __device__ auto parts(int64_t k, const Row& kernel, int tile) const {
    return Parts<Row, LongRowsOfGroups>(*this, kernel, tile, places(k));
  }
  __device__ auto part(const Row& kernel, const Places&, int64_t group, int) const {
    typename Row::Part part;
    kernel.columns.read(partial + group * dim + (kernel.active ? kernel.column : 0), part.data);
    return part;
  }
  template <typename Part>
  __device__ void keep(const Row& kernel, const Places&, int64_t group, int,
                       const Part& sum) const {
    if (kernel.active)
      pyg_fast::cuda::keep(kernel.columns, partial + group * dim + kernel.column, sum);
  }
};

template <typename Row>
__global__ void __launch_bounds__(kThreads, kBlocks)
    merge_ranges_of_groups_kernel(Spmm p, const void* x_self, Groups g, typename Row::Acc* partial,
                                  Shape s) {
  allow_next_kernel();
  wait_for_previous_kernel();
  merge_ranges<Row>(s, LongRowsOfGroups<Row>(g, partial, p.dim, true), p, x_self);
}

template <typename Row>
__global__ void __launch_bounds__(kThreads, kBlocks)
    merge_groups_kernel(Spmm p, const void* x_self, Groups g, typename Row::Acc* partial, Shape s,
                        bool ranges) {
  wait_for_previous_kernel();
  merge_long_rows<Row, kWarps>(p.csr, s, LongRowsOfGroups<Row>(g, partial, p.dim, ranges), p,
                               x_self);
}

// The same if atomic additions have produced one sum per row.
template <typename Row>
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_long_rows_kernel(Spmm p, const void* x_self, Groups g, const typename Row::Acc* partial,
                            Shape s) {
  using I = typename Row::Index;
  wait_for_previous_kernel();
  const int64_t k =
      static_cast<int64_t>(blockIdx.x) * (kThreads / Row::kLanes) + threadIdx.x / Row::kLanes;
  if (k >= g.num_long) return;
  const int64_t of = static_cast<const I*>(g.long_row)[k];
  const I* rowptr = static_cast<const I*>(p.csr.rowptr) + of;
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    const Row row(p, x_self, tile);
    if (!row.active) continue;
    auto sum = row.empty(of);
    row.columns.read(partial + k * p.dim + row.column, sum.data);
    row.finish(of, rowptr[1] - rowptr[0], sum);
  }
}

int64_t partial_bytes(const Spmm& p, const Groups& g) {
  return (g.atomic ? g.num_long : g.num_partials) * p.dim * acc_bytes(p.dtype);
}

// Whether whole warps read the features of an edge, 512 bytes: such a part of a small x is soon in L1, and
// indices are read half as often. Of a larger x the parts should be narrow, as in shape_of.
bool wants_warps(const Spmm& p, int vec) {
  constexpr int64_t kSmall = 4 << 20;
  return p.dim % (32 * vec) == 0 && p.csr.num_cols * 512 <= kSmall;
}

// Whether rows are so short and narrow that dividing them costs more than it gains. Among few rows the
// longer ones soon determine the time, of narrow rows sooner.
template <typename T>
bool has_shortest_rows(const Spmm& p, bool vectors) {
  const int vec = vectors ? kVec<T> : kStridedVec<T>;
  const int64_t most = p.csr.num_rows >= (1 << 20) ? 8 : 2 * p.dim > kNarrow * vec ? 3 : 2;
  return has_short_rows(p, vectors) && p.csr.num_edges <= most * p.csr.num_rows &&
         p.dim <= kNarrow * vec;
}

// Whether no row is so long that one block, which sums it if groups do not divide it, would determine the
// time.
bool has_no_hub(const Groups& g) {
  constexpr int64_t kMost = 1024;
  return g.size <= kMost && g.most_groups <= kMost / g.size;
}

int64_t sums_bytes(const Spmm& p_in, const Groups& g) {
  int64_t bytes = partial_bytes(p_in, g);
  Spmm p = p_in;
  if (wants_prologue(p)) p.x = nullptr;  // scratch memory, which is aligned
  dispatch(p.dtype, p.csr.index64, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    const bool vectors = takes_vectors<T>(p);
    if (!g.atomic && has_no_hub(g) && has_shortest_rows<T>(p, vectors))
      bytes = short_rows_scratch(p, vectors);
    return nullptr;
  });
  return aligned(bytes);
}

}  // namespace

// Partial sums, or those of short rows, and then what the prologue needs.
int64_t spmm_groups_scratch(const Spmm& p, const Groups& g) {
  return sums_bytes(p, g) + prologue_scratch(p);
}

const char* spmm_groups(const Spmm& p_in, const Groups& g, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (g.atomic && g.num_long > 0) cudaMemsetAsync(scratch, 0, partial_bytes(p_in, g), stream);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    Spmm p = p_in;
    prologue<T, I>(p, static_cast<char*>(scratch) + sums_bytes(p_in, g), stream);
    const bool vectors = takes_vectors<T>(p);
    Shape s = shape_of<T>(p.csr, p.dim, vectors);
    if (!g.atomic && has_no_hub(g) && has_shortest_rows<T>(p, vectors))
      return sum_short_rows(p, p_in.x, vectors, scratch, stream);
    dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
      auto* partial = static_cast<acc_t<T>*>(scratch);
      const auto launch = [&](auto row, const Groups& groups) {
        using Row = typename decltype(row)::type;
        Shape of_groups = s;
        of_groups.tiles = static_cast<int>((p.dim + vec * Row::kLanes - 1) / (vec * Row::kLanes));
        of_groups.block_rows = kThreads / Row::kTeam;
        for (int turns = 1;
             turns < kMostInTurn && g.num_groups * of_groups.tiles / of_groups.block_rows >= 2400;
             turns *= 2)
          of_groups.block_rows *= 2;
        spmm_groups_kernel<Row, T, I, vec><<<of_groups.grid(g.num_groups), kThreads, 0, stream>>>(
            p, p_in.x, groups, partial, of_groups);
      };
      const auto with = [&](auto weighted) {
        const auto teams = [&](auto team) {
          launch(std::common_type<TeamRow<T, I, vec, team, strided, weighted>>{}, g);
        };
        [[maybe_unused]] const auto slots = [&](auto edge_lanes, auto team) {
          Groups as_they_are = g;
          as_they_are.order = nullptr;
          launch(std::common_type<SlotsRow<T, I, vec, edge_lanes, strided, weighted, team>>{},
                 as_they_are);
        };
        using Two = std::integral_constant<int, 2>;
        using Eight = std::integral_constant<int, 8>;
        using Warp = std::integral_constant<int, 32>;
        if constexpr (lanes < 16) {
          if (g.size > kMostOfTeam) return slots(lanes, Warp{});
        }
        if constexpr (lanes == 1) {
          return slots(lanes, Eight{});
        } else if constexpr (lanes == 4) {  // of which one or two vectors leave half idle
          if (p.dim <= 2 * vec) {
            if (sizeof(T) >= 4 || g.num_groups < (1 << 15)) return slots(Two{}, Eight{});
            return teams(Two{});
          }
        } else if constexpr (!strided && lanes == 16) {
          if (wants_warps(p, vec)) return teams(Warp{});
        }
        teams(lanes);
      };
      if constexpr (sizeof(I) == 4) {
        if (is_weighted(p)) with(std::true_type{});
        else with(std::false_type{});
      } else {
        with(std::true_type{});
      }
      if (g.num_long == 0) return;
      using Row = SpmmRow<T, I, vec, lanes, strided, false>;
      auto* sums = static_cast<acc_t<T>*>(scratch);
      const auto grid = [&](int64_t count, int of_block) {
        return dim3(static_cast<unsigned>((count + of_block - 1) / of_block),
                    s.tiles < 65535 ? s.tiles : 65535);
      };
      if (g.atomic) {
        return launch_early(finish_long_rows_kernel<Row>, grid(g.num_long, kThreads / lanes), 0,
                            stream, p, p_in.x, g, sums, s);
      }
      const bool ranges = g.most_groups > kMostOfBlock;
      if (ranges) {
        launch_early(merge_ranges_of_groups_kernel<Row>, grid(g.num_partials, kPartsOfRange), 0,
                     stream, p, p_in.x, g, sums, s);
      }
      launch_early(merge_groups_kernel<Row>, grid(g.num_long, kWarps), 0, stream, p, p_in.x, g,
                   sums, s, ranges);
    });
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
