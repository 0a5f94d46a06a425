// Sum and mean aggregation of CBSR features: each warp scatters into its own sums in shared memory.
#include "cbsr.cuh"
#include "params/cbsr.h"
#include "rows.cuh"
#include "scale.cuh"

namespace pyg_fast::cuda {
namespace {

// The columns whose sums a warp keeps. More columns are cut into tiles; each tile reads all entries.
template <typename Acc>
constexpr int kMostColumns = 2048 / static_cast<int>(sizeof(Acc));

// The entries of one pass: `begin` to `end` of each row's k. All passes but the last write their sums to
// `partial`; all but the first add the sums in `partial`.
struct Pass {
  int begin = 0, end = 0;
  void* partial = nullptr;  // [num_rows, dim] acc
  bool first = true, last = true;
  int tiles = 1, width = 0;  // columns of a tile, a multiple of 32
};

// A thread's STEPS entries of an edge: from separate values and columns, or (fp16 and bf16) from words
// that hold both, which saves one load per edge.
template <typename T, typename C, int STEPS, bool PACKED>
struct SeparateEntries {
  Pack<T, STEPS> values;
  Pack<C, STEPS> columns;

  __device__ void load(const CbsrSpmm& p, int64_t at, int lane, int entries) {
    values = load_entries<T, STEPS, PACKED>(static_cast<const T*>(p.values) + at, lane, entries);
    columns = load_entries<C, STEPS, PACKED>(static_cast<const C*>(p.columns) + at, lane, entries);
  }
  __device__ acc_t<T> value(int t) const { return element(values, t); }
  __device__ auto column(int t) const {
    return static_cast<std::conditional_t<sizeof(C) == 4, int64_t, uint32_t>>(columns.data[t]);
  }
};

template <typename T, int STEPS, bool PACKED>
struct JoinedEntries {
  Pack<uint32_t, STEPS> words;

  __device__ void load(const CbsrSpmm& p, int64_t at, int lane, int entries) {
    words = load_entries<uint32_t, STEPS, PACKED>(static_cast<const uint32_t*>(p.values) + at, lane,
                                                  entries);
  }
  __device__ float value(int t) const {
    const uint32_t word = words.data[t];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(word & 0xffff0000u);
    else return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
  __device__ uint32_t column(int t) const { return words.data[t] & 0xffffu; }
};

template <typename T, typename C>
constexpr bool kJoined = sizeof(T) == 2 && sizeof(C) <= 2;

template <typename C>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const uint16_t* values, const C* columns, uint32_t* words, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < total;
       at += step)
    words[at] = static_cast<uint32_t>(values[at]) << 16 | columns[at];
}

template <typename T, typename I, typename C, int STEPS, bool PACKED, bool WEIGHTED>
struct CbsrRow {
  using Acc = acc_t<T>;
  using Edge = WeightedEdge<T, I, WEIGHTED>;
  using Entries = std::conditional_t<kJoined<T, C>, JoinedEntries<T, STEPS, PACKED>,
                                     SeparateEntries<T, C, STEPS, PACKED>>;
  using Index = I;
  static constexpr int kLanes = 32, kBlocks = 4;
  static constexpr Sums kSums = Sums::shared;
  static constexpr int kUnroll = PACKED ? 4 : 2;  // edges in flight per slot
  struct Sum {};

  const CbsrSpmm& p;
  const Pass& pass;
  const void* values_self;  // values before any prologue
  Acc* shared;              // the sums of all warps; slots alternate every eight columns
  Acc* mine;                // the sums of this thread's slot
  int64_t first_column;
  int slot, entry_lane, entries, width;

  __device__ CbsrRow(const CbsrSpmm& p, const Pass& pass, const void* values_self, int tile)
      : p(p), pass(pass), values_self(values_self) {
    extern __shared__ float4 memory[];
    shared = reinterpret_cast<Acc*>(memory);
    Acc* const own = sums_of(threadIdx.x / 32);
    for (int w = threadIdx.x & 31; w < kEntrySlots * pass.width; w += 32) own[w] = 0;
    __syncwarp();
    first_column = static_cast<int64_t>(tile) * pass.width;
    slot = (threadIdx.x & 31) / kEntryLanes;
    entry_lane = threadIdx.x % kEntryLanes;
    mine = sums_of(threadIdx.x / 32) + slot * 8;
    entries = pass.end - pass.begin;
    width = p.dim - first_column < pass.width ? static_cast<int>(p.dim - first_column) : pass.width;
  }

  __device__ Acc* sums_of(int warp) const { return shared + warp * kEntrySlots * pass.width; }

  // Each slot has eight banks: only entries of the same edge can conflict.
  __device__ static int word(unsigned column) {
    return static_cast<int>((column & ~7u) * kEntrySlots + (column & 7u));
  }

  __device__ bool in_tile(int64_t column) const {
    if constexpr (sizeof(C) == 1) return true;
    else return column >= first_column && column < first_column + pass.width;
  }

  // Each reader resets the sums to zero.
  __device__ Sum empty(int64_t) const { return Sum{}; }

  __device__ void add(const Edge& edge, I, int count, Sum&) const {
    const bool whole = PACKED && entries == kEntryLanes * STEPS && pass.tiles == 1;
    int first = 0;
    if (whole) {
#pragma unroll 1
      for (; first + kUnroll * kEntrySlots <= count; first += kUnroll * kEntrySlots)
        add_edges<true>(edge, first + slot, count);
    }
#pragma unroll 1
    for (; first < count; first += kUnroll * kEntrySlots)
      add_edges<false>(edge, first + slot, count);
  }

  // Adds kUnroll of the slot's edges, from edge e on. Without WHOLE, edges or entries may be missing.
  template <bool WHOLE>
  __device__ void add_edges(const Edge& edge, int e, int count) const {
    Entries found[kUnroll];
    const bool active = WHOLE || !PACKED || entry_lane * STEPS < entries;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = e + u * kEntrySlots;
      const Col source = __shfl_sync(kWarpMask, edge.source, WHOLE || at < count ? at : count - 1);
      found[u].load(p, static_cast<int64_t>(source) * p.k + pass.begin, active ? entry_lane : 0,
                    entries);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = e + u * kEntrySlots;
      const Acc weight = WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, at & 31) : Acc(1);
      // An edge's columns are distinct: all sums can be read before any write.
      if (WHOLE || (at < count && active)) {
        Acc* sum[STEPS];
        Acc total[STEPS];
        bool valid[STEPS];
#pragma unroll
        for (int t = 0; t < STEPS; ++t) {
          const auto column = found[u].column(t);
          valid[t] = WHOLE || (in_tile(column) &&
                               (PACKED || has_entry<STEPS, PACKED>(t, entry_lane, entries)));
          sum[t] =
              mine +
              word(static_cast<unsigned>(WHOLE || sizeof(C) == 1 ? column : column - first_column));
          total[t] = valid[t] ? *sum[t] : Acc(0);
        }
#pragma unroll
        for (int t = 0; t < STEPS; ++t) {
          total[t] += weight * found[u].value(t);
          if (valid[t]) *sum[t] = total[t];
        }
      }
      __syncwarp();
    }
  }

  __device__ void reduce(Sum&) const { __syncwarp(); }

  // Adds up and resets the sums of column f of some warps. Threads visit the slots in different orders,
  // to avoid bank conflicts.
  __device__ Acc take(int f, int first_warp, int warps) const {
    Acc total = 0;
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int r = 0; r < kEntrySlots; ++r) {
        Acc& part = sums_of(first_warp + w)[word(f) + (f / 8 + r) % kEntrySlots * 8];
        total += part;
        part = 0;
      }
    }
    return total;
  }

  __device__ void finish(int64_t row, int64_t degree, const Sum&) const {
    const int lane = threadIdx.x & 31;
    write(row, degree, threadIdx.x / 32, 1, lane, 32, [] { __syncwarp(); });
  }

  // A part of a row: a sum for each column.
  __device__ Acc* part(const LongRows& l, int64_t slot) const {
    return static_cast<Acc*>(l.parts) + slot * p.dim + first_column;
  }

  __device__ void keep_part(const LongRows& l, int64_t slot) const {
    Acc* to = part(l, slot);
    for (int f = threadIdx.x & 31; f < width; f += 32) to[f] = take(f, threadIdx.x / 32, 1);
    __syncwarp();
  }

  template <typename Parts>
  __device__ void add_parts(const Parts& parts, int64_t begin, int64_t end) const {
    Acc* sums = sums_of(threadIdx.x / 32);
    for (int f = threadIdx.x & 31; f < width; f += 32) {
      Acc total = 0;
      for (int64_t first = begin; first < end; first += kMergedInTurn) {
        const int64_t last = first + kMergedInTurn < end ? first + kMergedInTurn : end;
        Acc sum = 0;
#pragma unroll 4
        for (int64_t n = first; n < last; ++n) sum += part(parts.long_rows.l, parts(n))[f];
        total += sum;
      }
      sums[word(f)] = total;
    }
    __syncwarp();
  }

  __device__ void finish_all(int64_t row, int64_t degree) const {
    write(row, degree, 0, kWarps, threadIdx.x, kThreads, [] { __syncthreads(); });
  }

  // Writes the row from the sums of `warps` warps, with `threads` threads.
  template <typename Sync>
  __device__ void write(int64_t row, int64_t degree, int first_warp, int warps, int thread,
                        int threads, const Sync& sync) const {
    Acc* partial = static_cast<Acc*>(pass.partial) + row * p.dim + first_column;
    if (!pass.last) {
      for (int f = thread; f < width; f += threads) {
        const Acc total = take(f, first_warp, warps);
        partial[f] = pass.first ? total : partial[f] + total;
      }
      sync();
      return;
    }
    Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc(1);
    if (p.mean && degree > 1) scale /= static_cast<Acc>(degree);
    const auto scaled = [&](int f) {
      const Acc total = take(f, first_warp, warps);
      return scale * (pass.first ? total : partial[f] + total);
    };
    Acc* sums = sums_of(first_warp);
    if (p.diag) {  // Adds the entries of the row itself before any write.
      for (int f = thread; f < width; f += threads) {
        const Acc total = scaled(f);
        sums[word(f)] = total;
      }
      sync();
      const Acc d = static_cast<const Acc*>(p.diag)[row];
      for (int64_t at = row * p.k + thread; at < (row + 1) * p.k; at += threads) {
        const int64_t column = static_cast<const C*>(p.columns)[at];
        if (in_tile(column))
          sums[word(static_cast<unsigned>(column - first_column))] +=
              d * to_acc(static_cast<const T*>(values_self)[at]);
      }
      sync();
    }
    for (int f = thread; f < width; f += threads) {
      Acc total;
      if (p.diag) {
        total = sums[word(f)];
        sums[word(f)] = 0;
      } else {
        total = scaled(f);
      }
      const int64_t at = row * p.dim + first_column + f;
      if (p.out_acc) {
        if (p.bias) total += static_cast<const Acc*>(p.bias)[first_column + f];
        static_cast<Acc*>(p.out)[at] = total;
      } else {
        if (p.bias) total += to_acc(static_cast<const T*>(p.bias)[first_column + f]);
        static_cast<T*>(p.out)[at] = from_acc<T>(total);
      }
    }
    sync();
  }
};

template <typename T, typename I, typename C>
const char* launch_pass(const CbsrSpmm& p, Pass pass, const void* values_self, void* of_rows,
                        cudaStream_t stream) {
  const int64_t most = kMostColumns<acc_t<T>>;
  pass.tiles = static_cast<int>((p.dim + most - 1) / most);
  pass.width = multiple_of_32((p.dim + pass.tiles - 1) / pass.tiles);
  Shape s = shape_of(p.csr, p.dim, 1);
  s.tiles = pass.tiles;
  const int bytes = kWarps * kEntrySlots * pass.width * static_cast<int>(sizeof(acc_t<T>));
  const bool weighted = p.value || p.col_scale;
  const LongRows l = LongRows(p.csr).in(of_rows);
  const char* error = nullptr;
  dispatch_steps<kMostSteps<T>, C, I>(
      p.k, pass.end - pass.begin, p.columns, p.values, [&](auto steps, auto packed) {
        const auto run = [&](auto row) {
          using Row = typename decltype(row)::type;
          error = allow_shared(rows_kernel<Row, CbsrSpmm, Pass, const void*>, bytes);
          if (!error)
            error = allow_shared(merge_long_rows_kernel<Row, CbsrSpmm, Pass, const void*>, bytes);
          if (!error) launch_rows<Row>(p.csr, s, l, bytes, stream, p, pass, values_self);
        };
        if constexpr (packed) {
          if (!weighted) return run(std::common_type<CbsrRow<T, I, C, steps, packed, false>>{});
        }
        run(std::common_type<CbsrRow<T, I, C, steps, packed, true>>{});
      });
  return error ? error : last_error();
}

int64_t entries_of_pass(DType dtype) { return kEntryLanes * (dtype == DType::f64 ? 2 : 4); }

bool joins(const CbsrSpmm& p) {
  return (p.dtype == DType::f16 || p.dtype == DType::bf16) && p.column_type != ColumnType::i32;
}

bool keeps_partial_in_out(const CbsrSpmm& p) {
  return p.out_acc || p.dtype == DType::f32 || p.dtype == DType::f64;
}

// Scratch memory: scaled or joined entries, the sums of earlier passes, parts of long rows.
int64_t entry_bytes(const CbsrSpmm& p) {
  if (!joins(p) && !wants_prologue(p)) return 0;
  return aligned(p.csr.num_cols * p.k * acc_bytes(p.dtype));
}

int64_t partial_bytes(const CbsrSpmm& p) {
  if (p.k <= entries_of_pass(p.dtype) || keeps_partial_in_out(p)) return 0;
  return aligned(p.csr.num_rows * p.dim * acc_bytes(p.dtype));
}

template <typename T, typename C>
void prepare_entries(CbsrSpmm& p, void* scratch, cudaStream_t stream) {
  if constexpr (kJoined<T, C>) {
    const int64_t total = p.csr.num_cols * p.k;
    join_kernel<<<blocks_for(total), kThreads, 0, stream>>>(static_cast<const uint16_t*>(p.values),
                                                            static_cast<const C*>(p.columns),
                                                            static_cast<uint32_t*>(scratch), total);
    p.values = scratch;
  } else if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (!wants_prologue(p)) return;
    scale_rows(static_cast<const T*>(p.values), static_cast<const T*>(p.col_scale),
               static_cast<T*>(scratch), p.csr.num_cols, p.k, stream);
    p.values = scratch;
    p.col_scale = nullptr;
  }
}

}  // namespace

int64_t cbsr_spmm_scratch(const CbsrSpmm& p) {
  return entry_bytes(p) + partial_bytes(p) + LongRows(p.csr).bytes(p.dim * acc_bytes(p.dtype));
}

const char* cbsr_spmm(const CbsrSpmm& p_in, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    return dispatch_columns(p_in.column_type, [&](auto column) -> const char* {
      using C = decltype(column);
      CbsrSpmm p = p_in;
      prepare_entries<T, C>(p, scratch, stream);
      char* const partial = static_cast<char*>(scratch) + entry_bytes(p_in);
      Pass pass;
      pass.partial = keeps_partial_in_out(p) ? p.out : partial;
      const int64_t most = entries_of_pass(p.dtype);
      for (int64_t begin = 0; begin < p.k; begin += most) {
        pass.begin = static_cast<int>(begin);
        pass.end = static_cast<int>(begin + most < p.k ? begin + most : p.k);
        pass.first = begin == 0;
        pass.last = pass.end == p.k;
        const char* error =
            launch_pass<T, I, C>(p, pass, p_in.values, partial + partial_bytes(p_in), stream);
        if (error) return error;
      }
      return nullptr;
    });
  });
}

}  // namespace pyg_fast::cuda
