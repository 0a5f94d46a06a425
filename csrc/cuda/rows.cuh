// The kernels that walk rows: their time depends on the edges, not on the longest row. Warps take short rows
// from the queue of their block, to avoid waiting for longer ones. Long rows are cut at multiples of
// LongRows::size edges: a warp adds a piece and stores its part of the row; further kernels merge the parts.
// The mapping of rows to warps varies from run to run; the order of additions in a row does not.
#pragma once
#include "common.cuh"
#include "launch.cuh"

namespace pyg_fast::cuda {

// An edge with the factor of its source's features: value * col_scale.
template <typename T, typename I, bool WEIGHTED>
struct WeightedEdge {
  using Acc = acc_t<T>;
  Col source = 0;
  Acc weight = 0;

  template <typename Row>
  __device__ void load(const Row& row, I e, I end) {
    if (e >= end) return;
    const auto& p = row.p;
    source = load_once(static_cast<const Col*>(p.csr.col) + e);
    if constexpr (WEIGHTED) {
      weight = 1;
      if (p.value) {
        const I v = p.csr.perm ? load_once(static_cast<const I*>(p.csr.perm) + e) : e;
        weight = p.value_acc ? static_cast<const Acc*>(p.value)[v]
                             : to_acc(static_cast<const T*>(p.value)[v]);
      }
      if (p.col_scale) weight *= __ldg(static_cast<const Acc*>(p.col_scale) + source);
    }
  }
};

// Where a kernel keeps the sum of a row: in the registers of its threads, in shared memory, or nowhere, as
// it adds to global memory.
enum class Sums { registers, shared, none };

// `Row` defines how a kernel processes a row, for one tile of columns:
//   Index, kLanes, kBlocks                   the type of edge positions; the threads of a row's result;
//                                            blocks per SM
//   kSums                                    see Sums
//   Row(args..., tile)                       `args` as launch_rows gets them; all threads call it
//   Edge                                     a thread's edge of the 32 that its warp reads at once
//   Edge::load(row_kernel, e, end)           reads edge e, if e < end
//   Sum, empty(row)                          the accumulator, and its initial value; all threads call it
//   add(edge, base, count, sum)              adds the warp's edges base, ..., base + count - 1
//   reduce(sum)                              combines the warp's slots; its first kLanes threads
//                                            then hold the result
//   finish(row, degree, sum)                 writes the row, called by kLanes threads
// For Sums::registers:
//   Part                                     Sum or a base of it: what the pieces of a row have
//   merge(part, other)                       combines two parts, the earlier edges in `part`
// For Sums::shared:
//   keep_part(long_rows, slot)               moves the warp's sums to memory
//   add_parts(parts, begin, end)             adds the parts from `begin` to `end` of a row to them
//   finish_all(row, degree)                  writes the sum of all warps, called by all threads

// Rows of more than `size` edges are long, or those of more than `longer_than`. A block of `size` edges has
// pieces of at most two of them: of the row with its first edge, and of one that begins in it. The numbers
// depend on the graph's size only.
struct LongRows {
  static constexpr int64_t kMostBlocks = 1 << 14;  // bounds the memory for parts
  int64_t size = 256;
  int64_t longest = 256;   // of rows that are not long; at least `size`
  int64_t blocks = 0;      // 0: no row can be long
  int64_t* row = nullptr;  // [2 * blocks] the long row of a piece, or -1: see slot()
  void* parts = nullptr;   // [2 * blocks, tiles, kLanes] of type Part

  explicit LongRows(const Csr& csr, int64_t least = 256, int64_t longer_than = 0) : size(least) {
    const int64_t share = (csr.num_edges + kMostBlocks - 1) / kMostBlocks;
    if (share > size) size = (share + 31) / 32 * 32;
    longest = longer_than > size ? longer_than : size;
    if (csr.num_edges > longest) blocks = (csr.num_edges + size - 1) / size;
  }

  // The memory that they need if the parts of a block's row have so many bytes.
  int64_t bytes(int64_t of_parts) const {
    return blocks == 0 ? 0 : aligned(2 * blocks * 8) + 2 * blocks * of_parts;
  }
  LongRows in(void* scratch) const {
    LongRows l = *this;
    l.row = static_cast<int64_t*>(scratch);
    l.parts = static_cast<char*>(scratch) + aligned(2 * blocks * 8);
    return l;
  }
  // A block's piece of the row that it continues, or of the one that begins in it.
  __device__ static int64_t slot(int64_t block, bool begins) { return 2 * block + begins; }
  // CUDA blocks whose warps process the pieces of kOfWarp blocks each.
  static constexpr int kOfWarp = 2;
  __host__ __device__ unsigned grid() const {
    return static_cast<unsigned>((blocks + kOfWarp * kWarps - 1) / (kOfWarp * kWarps));
  }
};

// The last row that begins at edge e or before it. Each WAYS threads of a warp search for an edge.
template <int WAYS, typename I>
__device__ inline int64_t row_of_edge(const I* rowptr, int64_t num_rows, int64_t e) {
  const int lane = threadIdx.x % WAYS, first = threadIdx.x % 32 - lane;
  int64_t low = 0, count = num_rows;  // it is one of low, ..., low + count - 1
  while (count > 1) {
    const int64_t step = (count + WAYS - 1) / WAYS, row = low + lane * step;
    const bool below = row < num_rows && static_cast<int64_t>(rowptr[row]) <= e;
    low += (__popc(__ballot_sync(kWarpMask, below) >> first & ((1u << WAYS) - 1)) - 1) * step;
    count = step;
  }
  return low;
}

// Adds the edges of a row from `begin` to `end` to `sum`, by one warp.
template <typename Row, typename I>
__device__ inline void add_range(Row& kernel, I begin, I end, typename Row::Sum& sum) {
  const int lane = threadIdx.x & 31;
  typename Row::Edge edge;
  edge.load(kernel, begin + lane, end);
#pragma unroll 1
  for (I base = begin; base < end; base += 32) {
    const typename Row::Edge now = edge;
    const I left = end - base;
    edge.load(kernel, base + 32 + lane, end);
    kernel.add(now, base, left < 32 ? static_cast<int>(left) : 32, sum);
  }
  kernel.reduce(sum);
}

template <typename Row, Sums SUMS = Row::kSums>
constexpr int kPartBytes = 0;
template <typename Row>
constexpr int kPartBytes<Row, Sums::registers> = sizeof(typename Row::Part);

// The place of this thread's column of a part.
template <typename Row>
__device__ inline typename Row::Part* part_at(const LongRows& l, int64_t slot, int tile,
                                              int tiles) {
  return static_cast<typename Row::Part*>(l.parts) + (slot * tiles + tile) * Row::kLanes +
         threadIdx.x % Row::kLanes;
}

// The piece of a long row that a thread finds: each warp searches in LongRows::kOfWarp blocks of edges.
template <typename I>
struct Piece {
  static constexpr int kWays = 16 / LongRows::kOfWarp;  // threads that search for the same edge
  int64_t block, row = 0;
  I begin = 0, end = 0;
  bool begins;           // whether it is of the row that begins in the block
  bool is_long = false;  // whether there is a piece

  // All threads of a warp call it.
  __device__ Piece(const Csr& csr, const LongRows& l) {
    const int lane = threadIdx.x & 31;
    block = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * LongRows::kOfWarp +
            lane / (2 * kWays);
    begins = lane / kWays % 2 == 1;
    const I* rowptr = static_cast<const I*>(csr.rowptr);
    // The first rows of a larger graph may be left out.
    const int64_t first_listed = rowptr[0], last_listed = rowptr[csr.num_rows];
    const int64_t first = block * l.size;
    const int64_t from = first > first_listed ? first : first_listed;
    const int64_t to = first + l.size < last_listed ? first + l.size : last_listed;
    const bool exists = block < l.blocks && from < to;
    row = row_of_edge<kWays>(rowptr, csr.num_rows, !exists ? first_listed : begins ? to - 1 : from);
    const I row_begin = rowptr[row], row_end = rowptr[row + 1];
    // With its first edge a block continues a long row, with its last edge it begins one.
    is_long = exists && row_end - row_begin > l.longest && (row_begin >= first) == begins;
    begin = row_begin < from ? static_cast<I>(from) : row_begin;
    end = row_end < to ? row_end : static_cast<I>(to);
  }

  // Calls fn(block, begins, row, begin, end) for each piece that the warp has found.
  template <typename Fn>
  __device__ void for_each(const Fn& fn) const {
#pragma unroll 1
    for (int from = 0; from < 32; from += kWays) {
      if (!__shfl_sync(kWarpMask, is_long, from)) continue;
      fn(__shfl_sync(kWarpMask, block, from), from / kWays % 2 == 1,
         __shfl_sync(kWarpMask, row, from), __shfl_sync(kWarpMask, begin, from),
         __shfl_sync(kWarpMask, end, from));
    }
  }
};

// A warp adds the pieces of long rows that it finds, for all tiles.
template <typename Row, typename... Args>
__device__ inline void process_long_rows(const Csr& csr, const Shape& s, const LongRows& l,
                                         const Args&... args) {
  using I = typename Row::Index;
  const int lane = threadIdx.x & 31;
  const Piece<I> own(csr, l);
  if constexpr (Row::kSums != Sums::none) {
    if (lane % Piece<I>::kWays == 0 && own.block < l.blocks)
      l.row[l.slot(own.block, own.begins)] = own.is_long ? own.row : -1;
  }
  if (!__any_sync(kWarpMask, own.is_long)) return;
  for (int tile = 0; tile < s.tiles; ++tile) {
    Row kernel(args..., tile);
    own.for_each([&](int64_t block, bool begins, int64_t row, I begin, I end) {
      auto sum = kernel.empty(row);
      add_range<Row, I>(kernel, begin, end, sum);
      const int64_t slot = l.slot(block, begins);
      if constexpr (Row::kSums == Sums::registers) {
        if (lane < Row::kLanes) *part_at<Row>(l, slot, tile, s.tiles) = sum;
      } else if constexpr (Row::kSums == Sums::shared) {
        kernel.keep_part(l, slot);
      }
    });
  }
}

template <typename Row>
__device__ inline void process_short_rows(const Csr& csr, const Shape& s, const LongRows& l,
                                          Row& kernel) {
  using I = typename Row::Index;
  using Edge = typename Row::Edge;
  using Sum = typename Row::Sum;
  __shared__ int next_row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  // Computed again for each row: a thread has few registers left.
  const auto first_row = [&] {
    return (static_cast<int64_t>(blockIdx.x) - l.grid()) * s.block_rows;
  };
  const int rows = csr.num_rows - first_row() < s.block_rows
                       ? static_cast<int>(csr.num_rows - first_row())
                       : s.block_rows;
  const I* rowptr = static_cast<const I*>(csr.rowptr) + first_row();
  __syncthreads();  // warps may still read the previous tile
  if (threadIdx.x == 0) next_row = kWarps;
  __syncthreads();

  Edge edge;
  I begin = 0, end = 0;
  const auto open = [&](int row) {
    begin = end = 0;
    if (row >= rows) return;
    begin = rowptr[row];
    end = rowptr[row + 1];
    edge.load(kernel, begin + lane, end);
  };
  int row = warp;
  open(row);
  while (row < rows) {
    int following = 0;
    if (lane == 0) following = atomicAdd(&next_row, 1);
    following = __shfl_sync(kWarpMask, following, 0);
    const I row_begin = begin, row_end = end;
    if (row_end - row_begin > static_cast<I>(l.size)) {
      open(following);
    } else {
      Sum sum = kernel.empty(first_row() + row);
      for (I base = row_begin; base < row_end; base += 32) {
        const Edge now = edge;
        const int left = static_cast<int>(row_end - base);
        // Prefetches the next row's first edges while this row is summed.
        if (left > 32) edge.load(kernel, base + 32 + lane, row_end);
        else open(following);
        kernel.add(now, base, left < 32 ? left : 32, sum);
      }
      if (row_begin == row_end) open(following);
      kernel.reduce(sum);
      // finish() computes its addresses: kept from empty(), they would be spilled.
      asm("" : "+r"(row));
      if (lane < Row::kLanes) kernel.finish(first_row() + row, row_end - row_begin, sum);
    }
    row = following;
  }
}

template <typename Row, typename... Args>
__global__ void __launch_bounds__(kThreads, Row::kBlocks)
    rows_kernel(Csr csr, Shape s, LongRows l, Args... args) {
  allow_next_kernel();
  if (blockIdx.x < l.grid()) {  // They come first, and long pieces not last.
    if (blockIdx.y == 0) process_long_rows<Row>(csr, s, l, args...);
    return;
  }
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Row row(args..., tile);
    process_short_rows(csr, s, l, row);
  }
}

// Merging parts -----------------------------------------------------------------------------------

// The most parts that a warp merges alone; the block shares longer rows.
constexpr int kMostOfWarp = 32;
constexpr int kMergedInTurn = 32;  // parts that a thread merges before it merges their sum; of many
constexpr int kMostMergedInTurn = 128;

// How threads merge `count` parts of a row, `threads` of a warp or of a block, of which this one is number
// `thread`. part(k) returns this thread's column of the k-th part. The order is a tree: no thread merges
// many parts one by one. The first kLanes threads get the result; `shared` has a place for each thread.
template <typename Row, typename Parts, typename Sync>
__device__ inline typename Row::Part merge_parts(const Row& kernel, int64_t count,
                                                 const Parts& part, typename Row::Part* shared,
                                                 int thread, int threads, const Sync& sync) {
  using Part = typename Row::Part;
  constexpr int kLanes = Row::kLanes;
  constexpr int kAhead = sizeof(Part) <= 16 ? 8 : sizeof(Part) <= 40 ? 4 : 2;  // loads in flight
  const int teams = threads / kLanes, team = thread / kLanes;
  const int64_t share = (count + teams - 1) / teams, begin = team * share;
  const int64_t end = begin + share < count ? begin + share : count;
  if (begin < end) {
    Part total;
    const int64_t turn =
        share > kMergedInTurn * kMostMergedInTurn ? kMostMergedInTurn : kMergedInTurn;
    for (int64_t first = begin; first < end; first += turn) {
      const int64_t last = first + turn < end ? first + turn : end;
      Part sum = part(first);
#pragma unroll 1
      for (int64_t k = first + 1; k < last; k += kAhead) {
        Part next[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) next[u] = part(k + u < last ? k + u : last - 1);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
          if (k + u < last) kernel.merge(sum, next[u]);
        }
      }
      if (first == begin) total = sum;
      else kernel.merge(total, sum);
    }
    shared[thread] = total;
  }
  sync();
  for (int left = static_cast<int>((count + share - 1) / share); left > 1;) {
    const int half = (left + 1) / 2;
    if (team + half < left) {
      Part sum = shared[thread];
      kernel.merge(sum, shared[thread + half * kLanes]);
      shared[thread] = sum;
    }
    sync();
    left = half;
  }
  const Part result = shared[thread % kLanes];
  sync();  // before the places are used again
  return result;
}

// Of a row of more parts than kMostOfBlock, a first kernel merges each range of parts: one block would take
// long for all. The ranges are the same for all rows: multiples of kPartsOfRange.
constexpr int kMostOfBlock = 256;
constexpr int kPartsOfRange = 64;

// The places of a row's parts, from `begin` to `end`, or with `ranges` the first of each range. A place is a
// block of edges or the number of a group.
struct Places {
  int64_t begin, end;
  bool ranges;

  __device__ int64_t count() const {
    return ranges ? (end - 1) / kPartsOfRange - begin / kPartsOfRange + 1 : end - begin;
  }
  __device__ int64_t operator[](int64_t n) const {
    if (!ranges || n == 0) return begin + n;
    return (begin / kPartsOfRange + n) * kPartsOfRange;
  }
};

// `long_rows`: row_across(place) is the long row with parts at `place` and before it, or -1; places(row);
// part(row_kernel, places, place, tile) and keep(...) read and write this thread's columns of a part.
template <typename Row, typename Rows, typename... Args>
__device__ inline void merge_ranges(const Shape& s, const Rows& long_rows, const Args&... args) {
  __shared__ double2 shared[(kThreads * kPartBytes<Row> + 15) / 16];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPartsOfRange,
                last = first + kPartsOfRange;
  const int64_t before = long_rows.row_across(first), after = long_rows.row_across(last);
  for (const bool begins : {false, true}) {  // A range has at most two such rows.
    const int64_t of = begins ? after : before;
    if (of < 0 || (begins && after == before)) continue;
    const Places all = long_rows.places(of);
    if (all.end - all.begin <= kMostOfBlock) continue;
    const int64_t begin = begins ? all.begin : first, end = all.end < last ? all.end : last;
    for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
      Row kernel(args..., tile);
      const auto part = [&](int64_t n) { return long_rows.part(kernel, all, begin + n, tile); };
      const auto sum =
          merge_parts(kernel, end - begin, part, reinterpret_cast<typename Row::Part*>(shared),
                      static_cast<int>(threadIdx.x), kThreads, [] { __syncthreads(); });
      if (threadIdx.x < Row::kLanes) long_rows.keep(kernel, all, begin, tile, sum);
    }
  }
}

// Blocks of edges of which a CUDA block merges long rows: mostly there are none.
constexpr int kBlocksToMerge = 64;

inline unsigned merge_grid(const LongRows& l) {
  return static_cast<unsigned>((l.blocks + kBlocksToMerge - 1) / kBlocksToMerge);
}

// Merges and finishes long rows, ROWS of them in a CUDA block, for all tiles of blockIdx.y. `long_rows`:
// `count` of them; row(k) is the row, or -1; parts(k, kernel, tile) are its parts: `count`, and operator()(n)
// gives this thread's columns of part n, or for Sums::shared its slot.
template <typename Row, int ROWS, typename Rows, typename... Args>
__device__ inline void merge_long_rows(const Csr& csr, const Shape& s, const Rows& long_rows,
                                       const Args&... args) {
  using I = typename Row::Index;
  __shared__ int64_t rows[ROWS];
  __shared__ double2 places[(kThreads * kPartBytes<Row> + 15) / 16 + 1];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * ROWS;
  int64_t own = -1;
  if (threadIdx.x < ROWS) {
    if (first + threadIdx.x < long_rows.count) own = long_rows.row(first + threadIdx.x);
    rows[threadIdx.x] = own;
  }
  if (!__syncthreads_or(own >= 0)) return;
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Row kernel(args..., tile);
    const auto finish = [&](int64_t row, const auto& parts, int thread, int threads,
                            const auto& sync) {
      const int64_t degree = rowptr[row + 1] - rowptr[row];
      auto sum = kernel.empty(row);
      if constexpr (Row::kSums == Sums::registers) {
        using Part = typename Row::Part;
        Part* const shared = reinterpret_cast<Part*>(places) + (threadIdx.x - thread);
        static_cast<Part&>(sum) =
            merge_parts(kernel, parts.count, parts, shared, thread, threads, sync);
        if (thread < Row::kLanes) kernel.finish(row, degree, sum);
      } else {
        const int64_t share = (parts.count * 32 + threads - 1) / threads,
                      begin = thread / 32 * share;
        kernel.add_parts(parts, begin, begin + share < parts.count ? begin + share : parts.count);
        sync();
        if (threads == 32) kernel.finish(row, degree, sum);
        else kernel.finish_all(row, degree);
        sync();
      }
    };
    bool is_any_shared = false;
    for (int k = warp; k < ROWS; k += kWarps) {
      if (rows[k] < 0) continue;
      const auto parts = long_rows.parts(first + k, kernel, tile);
      if (parts.count <= kMostOfWarp) finish(rows[k], parts, lane, 32, [] { __syncwarp(); });
      else is_any_shared = true;
    }
    if (!__syncthreads_or(is_any_shared)) continue;
    for (int k = 0; k < ROWS; ++k) {
      if (rows[k] < 0) continue;
      const auto parts = long_rows.parts(first + k, kernel, tile);
      if (parts.count <= kMostOfWarp) continue;
      finish(rows[k], parts, static_cast<int>(threadIdx.x), kThreads, [] { __syncthreads(); });
    }
    __syncthreads();  // Warps may still use the places.
  }
}

// The parts of a row, where `long_rows` has them.
template <typename Row, typename Rows>
struct Parts {
  const Rows& long_rows;
  const Row& kernel;
  int tile;
  Places places;
  int64_t count;

  __device__ Parts(const Rows& long_rows, const Row& kernel, int tile, const Places& places)
      : long_rows(long_rows), kernel(kernel), tile(tile), places(places), count(places.count()) {}
  __device__ auto operator()(int64_t n) const {
    return long_rows.part(kernel, places, places[n], tile);
  }
};

// The long rows by the blocks of edges in which they begin.
template <typename Row>
struct LongRowsOfBlocks {
  const typename Row::Index* rowptr;
  const LongRows& l;
  int tiles;
  int64_t count;

  __device__ LongRowsOfBlocks(const Csr& csr, const Shape& s, const LongRows& l)
      : rowptr(static_cast<const typename Row::Index*>(csr.rowptr)),
        l(l),
        tiles(s.tiles),
        count(l.blocks) {}
  __device__ int64_t row(int64_t k) const { return l.row[l.slot(k, true)]; }
  __device__ int64_t row_across(int64_t k) const {
    return k < l.blocks ? l.row[l.slot(k, false)] : -1;
  }
  __device__ Places places(int64_t row) const {
    const int64_t begin = rowptr[row] / l.size, end = (rowptr[row + 1] - 1) / l.size + 1;
    return {begin, end, Row::kSums == Sums::registers && end - begin > kMostOfBlock};
  }
  __device__ auto parts(int64_t k, const Row& kernel, int tile) const {
    return Parts<Row, LongRowsOfBlocks>(*this, kernel, tile, places(row(k)));
  }
  __device__ auto part(const Row&, const Places& of, int64_t k, int tile) const {
    const int64_t slot = l.slot(k, k == of.begin);
    if constexpr (Row::kSums == Sums::registers) return *part_at<Row>(l, slot, tile, tiles);
    else return slot;
  }
  template <typename Part>
  __device__ void keep(const Row&, const Places& of, int64_t k, int tile, const Part& sum) const {
    *part_at<Row>(l, l.slot(k, k == of.begin), tile, tiles) = sum;
  }
};

template <typename Row, typename... Args>
__global__ void __launch_bounds__(kThreads)
    merge_ranges_kernel(Csr csr, Shape s, LongRows l, Args... args) {
  allow_next_kernel();
  wait_for_previous_kernel();
  merge_ranges<Row>(s, LongRowsOfBlocks<Row>(csr, s, l), args...);
}

template <typename Row, typename... Args>
__global__ void __launch_bounds__(kThreads)
    merge_long_rows_kernel(Csr csr, Shape s, LongRows l, Args... args) {
  wait_for_previous_kernel();
  merge_long_rows<Row, kBlocksToMerge>(csr, s, LongRowsOfBlocks<Row>(csr, s, l), args...);
}

// Merges and finishes the long rows, whose pieces the kernel before has added. Row's constructor gets `args`
// and the tile; `shared`: bytes of dynamic shared memory; `tiles`: of the grid.
template <typename Row, typename... Args>
void launch_merge(const Csr& csr, const Shape& s, const LongRows& l, unsigned tiles, size_t shared,
                  cudaStream_t stream, const Args&... args) {
  if constexpr (Row::kSums == Sums::registers) {
    if (l.blocks > kMostOfBlock) {
      const auto ranges = static_cast<unsigned>((l.blocks + kPartsOfRange - 1) / kPartsOfRange);
      launch_early(merge_ranges_kernel<Row, Args...>, dim3(ranges, tiles), 0, stream, csr, s, l,
                   args...);
    }
  }
  launch_early(merge_long_rows_kernel<Row, Args...>, dim3(merge_grid(l), tiles), shared, stream,
               csr, s, l, args...);
}

// Bytes of a row's part, with all tiles.
template <typename Row>
int64_t part_bytes(const Shape& s) {
  return int64_t{s.tiles} * Row::kLanes * kPartBytes<Row>;
}

// Bytes of scratch memory that launch_rows needs.
template <typename Row>
int64_t rows_scratch(const Csr& csr, const Shape& s) {
  return Row::kSums == Sums::none ? 0 : LongRows(csr).bytes(part_bytes<Row>(s));
}

// Terms that kernels add atomically to one sum, one after another. A float32 sum of more is less exact than
// pairwise, and waits for its memory: a row of the transpose gathers it, see launch_long_rows.
constexpr int64_t kManyTerms = 1 << 14;

inline LongRows rows_of_many_terms(const Csr& csr) { return LongRows(csr, 256, kManyTerms); }

// Bytes of scratch memory that launch_long_rows needs for them.
template <typename Row>
int64_t many_terms_scratch(const Csr& csr, const Shape& s) {
  return rows_of_many_terms(csr).bytes(part_bytes<Row>(s));
}

// A compiler that gets a type wrong on the host only would launch a kernel that does not exist.
template <typename Row>
constexpr bool kIsPlain = !std::is_reference_v<typename Row::Index>;

// Processes only the long rows.
template <typename Row, typename... Args>
void launch_long_rows(const Csr& csr, const Shape& s, const LongRows& l, cudaStream_t stream,
                      const Args&... args) {
  static_assert(kIsPlain<Row>);
  if (l.blocks == 0) return;
  rows_kernel<Row, Args...><<<l.grid(), kThreads, 0, stream>>>(csr, s, l, args...);
  launch_merge<Row>(csr, s, l, s.grid(csr.num_rows).y, 0, stream, args...);
}

// Processes all rows; Row's constructor gets `args` and the tile. `shared`: bytes of dynamic shared memory.
template <typename Row, typename... Args>
void launch_rows(const Csr& csr, const Shape& s, LongRows l, size_t shared, cudaStream_t stream,
                 const Args&... args) {
  static_assert(kIsPlain<Row>);
  dim3 grid = s.grid(csr.num_rows);
  grid.x += l.grid();
  rows_kernel<Row, Args...><<<grid, kThreads, shared, stream>>>(csr, s, l, args...);
  if constexpr (Row::kSums != Sums::none) {
    if (l.blocks > 0) launch_merge<Row>(csr, s, l, grid.y, shared, stream, args...);
  }
}
template <typename Row, typename... Args>
void launch_rows(const Csr& csr, const Shape& s, void* scratch, cudaStream_t stream,
                 const Args&... args) {
  launch_rows<Row>(csr, s, LongRows(csr).in(scratch), 0, stream, args...);
}

}  // namespace pyg_fast::cuda
