// Max and min aggregation with the edge that holds the result, and its gradients.
#include "params/spmm_max.h"
#include "rows.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kUnroll = 4;  // loads in flight per thread

// Computes minima as maxima of the negated values.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool WEIGHTED>
struct MaxRow {
  using Acc = acc_t<T>;
  using Index = I;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  static constexpr int kLanes = LANES, kBlocks = VEC == 8 ? 3 : 4;
  static constexpr Sums kSums = Sums::registers;
  // `edge`: -1 until a value exceeds -inf.
  struct Sum {
    Acc value[VEC];
    I edge[VEC];
  };
  using Part = Sum;
  struct Edge {
    Col source = 0;
    Acc weight = 1;

    __device__ void load(const MaxRow& row, I e, I end) {
      if (e >= end) return;
      const SpmmMax& p = row.p;
      source = load_once(static_cast<const Col*>(p.csr.col) + e);
      if constexpr (WEIGHTED) {
        weight = p.minimum ? Acc(-1) : Acc(1);
        if (p.value) {
          const I v = p.csr.perm ? load_once(static_cast<const I*>(p.csr.perm) + e) : e;
          weight *= to_acc(static_cast<const T*>(p.value)[v]);
        }
      }
    }
  };

  const SpmmMax& p;
  const char* x;  // at this thread's column
  uint32_t row_bytes;
  int64_t column;  // the first of this thread
  bool active;
  OfThread columns;

  __device__ MaxRow(const SpmmMax& p, int tile)
      : p(p), column(OfThread::first(tile, threadIdx.x % LANES)), columns(column, p.dim) {
    active = column < p.dim;
    row_bytes = static_cast<uint32_t>(p.dim * sizeof(T));
    // Threads past the last column read the first column and write nothing.
    x = static_cast<const char*>(p.x) + (active ? column : 0) * sizeof(T);
    asm("" : "+l"(x));  // one pointer, instead of a base and an offset added at every load
  }

  __device__ Sum empty(int64_t) const {
    Sum best;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      best.value[c] = -static_cast<Acc>(INFINITY);
      best.edge[c] = -1;
    }
    return best;
  }

  // A slot processes its edges in order: a later edge must be larger to win. The first NaN beats all
  // numbers and stays. Past the end it rereads the last edge, which changes nothing.
  __device__ void add(const Edge& edge, I base, int count, Sum& best) const {
    constexpr int kSlots = 32 / LANES;
    constexpr int kSteps = LANES < kUnroll ? LANES : kUnroll;
    const int slot = (threadIdx.x & 31) / LANES;
#pragma unroll 1
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Pack<T, VEC, STRIDED> v[kSteps];
      Col source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u)
        v[u] = columns.load(reinterpret_cast<const T*>(row_at(x, source[u], row_bytes)));
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot, at = e < count ? e : count - 1;
        const Acc weight = WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, at) : Acc(1);
        const I position = base + static_cast<I>(at);
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          const Acc term = element(v[u], c) * weight;
          const bool wins = !(term <= best.value[c]) && best.value[c] == best.value[c];
          best.value[c] = wins ? term : best.value[c];
          best.edge[c] = wins ? position : best.edge[c];
        }
      }
    }
  }

  // Combines two parts of a row; for equal values the lower edge wins.
  __device__ static void combine(Acc& value, I& edge, Acc other_value, I other_edge) {
    const bool nan = value != value, other_nan = other_value != other_value;
    const bool same = nan ? other_nan : other_value == value;
    const bool larger = nan ? false : other_nan || other_value > value;
    if (other_edge >= 0 && (edge < 0 || larger || (same && other_edge < edge))) {
      value = other_value;
      edge = other_edge;
    }
  }

  __device__ void reduce(Sum& best) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const Acc value = __shfl_xor_sync(kWarpMask, best.value[c], offset);
        const I edge = __shfl_xor_sync(kWarpMask, best.edge[c], offset);
        combine(best.value[c], best.edge[c], value, edge);
      }
    }
  }

  __device__ void merge(Sum& best, const Sum& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c)
      combine(best.value[c], best.edge[c], other.value[c], other.edge[c]);
  }

  __device__ void finish(int64_t row, int64_t degree, const Sum& best) const {
    if (!active) return;
    const I first = static_cast<const I*>(p.csr.rowptr)[row];
    Pack<T, VEC, STRIDED> out;
    Pack<I, VEC, STRIDED> arg;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      // If no value exceeds -inf, the whole row is -inf: take its first edge.
      const Acc value = degree == 0 ? Acc(0) : best.value[c];
      out.data[c] = from_acc<T>(p.minimum && degree > 0 ? -value : value);
      arg.data[c] = degree == 0 ? I(-1) : best.edge[c] < 0 ? first : best.edge[c];
    }
    columns.store(static_cast<T*>(p.out) + row * p.dim + column, out);
    columns.store(static_cast<I*>(p.arg) + row * p.dim + column, arg);
  }
};

// A source that may win many rows has a bit here, which some others share.
struct Hubs {
  static constexpr int kWords = 32;
  uint32_t bits[kWords];

  __device__ static uint32_t place(int64_t source) {
    return static_cast<uint32_t>(source) * 2654435761u >> 22;  // of 32 * kWords
  }
};

// Marks the sources of more than `longest` edges, whose rows of the transpose are as long.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    mark_hubs_kernel(Csr transposed, int64_t longest, Hubs* hubs) {
  const I* rowptr = static_cast<const I*>(transposed.rowptr);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       k < transposed.num_rows; k += step) {
    if (rowptr[k + 1] - rowptr[k] <= longest) continue;
    const uint32_t place = Hubs::place(k);
    atomicOr(&hubs->bits[place / 32], 1u << place % 32);
  }
}

// Rows that a thread takes: what one source wins in them adds up before it is added to memory.
constexpr int kRowsInTurn = 8;

// A thread processes a column of kRowsInTurn rows: adds to the row of x that holds the maximum. With `hubs` it
// leaves out sources of more than `longest` edges: all threads would wait for the same memory.
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads)
    backward_x_kernel(SpmmMaxBackwardX p, acc_t<T>* sum, const Hubs* hubs, Csr transposed,
                      int64_t longest) {
  __shared__ uint32_t bits[Hubs::kWords];
  bool has_hubs = false;
  if (hubs) {
    uint32_t own = 0;
    if (threadIdx.x < Hubs::kWords) own = bits[threadIdx.x] = hubs->bits[threadIdx.x];
    has_hubs = __syncthreads_or(own != 0);
  }
  const auto is_hub = [&](int64_t source) {
    const uint32_t place = Hubs::place(source);
    if (!(bits[place / 32] >> place % 32 & 1)) return false;
    const I* rowptr = static_cast<const I*>(transposed.rowptr) + source;
    return rowptr[1] - rowptr[0] > longest;
  };
  const Col* col = static_cast<const Col*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const I* arg = static_cast<const I*>(p.arg);
  const T* grad = static_cast<const T*>(p.grad);
  const T* value = static_cast<const T*>(p.value);
  const int64_t total = (p.csr.num_rows + kRowsInTurn - 1) / kRowsInTurn * p.dim;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total;
       k += step) {
    const int64_t column = k % p.dim, first = k / p.dim * kRowsInTurn;
    I e[kRowsInTurn];
    acc_t<T> g[kRowsInTurn];
    Col source[kRowsInTurn];
#pragma unroll
    for (int r = 0; r < kRowsInTurn; ++r)
      e[r] = first + r < p.csr.num_rows ? load_once(arg + (first + r) * p.dim + column) : I(-1);
#pragma unroll
    for (int r = 0; r < kRowsInTurn; ++r) {
      source[r] = -1;
      g[r] = 0;
      if (e[r] < 0) continue;
      source[r] = col[e[r]];
      if (has_hubs && is_hub(source[r])) {
        source[r] = -1;
        continue;
      }
      g[r] = to_acc(grad[(first + r) * p.dim + column]);
      if (value) g[r] *= to_acc(value[perm ? perm[e[r]] : e[r]]);
    }
    // The first of two equal sources has the sum of both.
#pragma unroll
    for (int r = 0; r < kRowsInTurn; ++r) {
#pragma unroll
      for (int later = r + 1; later < kRowsInTurn; ++later) {
        if (source[later] != source[r]) continue;
        g[r] += g[later];
        g[later] = 0;
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsInTurn; ++r) {
      if (source[r] < 0 || g[r] == 0) continue;
      atomicAdd(sum + static_cast<int64_t>(source[r]) * p.dim + column, g[r]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) round_kernel(const float* in, T* out, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < total; k += step)
    out[k] = from_acc<T>(in[k]);
}

// A source walks its outgoing edges, a row of the transpose, and adds the gradients that they won.
// NUMBERS: the transpose has the numbers of its edges, of which p.csr.perm has that of each position.
template <typename T, typename I, int VEC, int LANES, bool STRIDED, bool NUMBERS>
struct WonRow {
  using Acc = acc_t<T>;
  using Index = I;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  static constexpr int kLanes = LANES, kBlocks = VEC == 8 ? 2 : 3;
  static constexpr Sums kSums = Sums::registers;
  struct Sum {
    Acc data[VEC];
  };
  using Part = Sum;
  struct Edge {
    Col row = 0;  // the destination
    I edge = 0;   // the edge's position there, or its number
    Acc weight = 1;

    __device__ void load(const WonRow& of, I e, I end) {
      if (e >= end) return;
      const I* position = static_cast<const I*>(of.transposed.perm);
      row = load_once(static_cast<const Col*>(of.transposed.col) + e);
      edge = position ? load_once(position + e) : e;
      if (!of.p.value) return;
      const I* perm = NUMBERS ? nullptr : static_cast<const I*>(of.p.csr.perm);
      weight = to_acc(static_cast<const T*>(of.p.value)[perm ? perm[edge] : edge]);
    }
  };

  const SpmmMaxBackwardX& p;
  const Csr& transposed;
  int64_t column;
  OfThread columns;
  bool active;

  __device__ WonRow(const SpmmMaxBackwardX& p, const Csr& transposed, int tile)
      : p(p),
        transposed(transposed),
        column(OfThread::first(tile, threadIdx.x % LANES)),
        columns(column, p.dim),
        active(column < p.dim) {}

  __device__ Sum empty(int64_t) const { return Sum{}; }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    constexpr int kSlots = 32 / LANES, kSteps = LANES < kUnroll ? LANES : kUnroll;
    const int slot = (threadIdx.x & 31) / LANES;
#pragma unroll 1
    for (int first = slot; first - slot < count; first += kSteps * kSlots) {
      Pack<I, VEC, STRIDED> arg[kSteps];
      Pack<T, VEC, STRIDED> grad[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots;
        const int64_t row = __shfl_sync(kWarpMask, edge.row, e < count ? e : count - 1);
        const int64_t at = row * p.dim + (active ? column : 0);
        arg[u] = columns.load(static_cast<const I*>(p.arg) + at);
        grad[u] = columns.load(static_cast<const T*>(p.grad) + at);
      }
      if constexpr (NUMBERS) {
        const I* number = static_cast<const I*>(p.csr.perm);
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
#pragma unroll
          for (int c = 0; c < VEC; ++c) arg[u].data[c] = __ldg(number + arg[u].data[c]);
        }
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots;
        const I own = __shfl_sync(kWarpMask, edge.edge, e & 31);
        const Acc weight = __shfl_sync(kWarpMask, edge.weight, e & 31);
#pragma unroll
        for (int c = 0; c < VEC; ++c)
          sum.data[c] += e < count && arg[u].data[c] == own ? weight * element(grad[u], c) : Acc(0);
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.data[c] += __shfl_xor_sync(kWarpMask, sum.data[c], offset);
    }
  }

  __device__ void merge(Part& sum, const Part& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.data[c] += other.data[c];
  }

  __device__ void finish(int64_t row, int64_t, const Sum& sum) const {
    if (!active) return;
    columns.write(static_cast<T*>(p.grad_x) + row * p.dim + column, sum.data);
  }
};

// Calls fn(Row, shape) with the row kernel for `p`.
template <typename Fn>
const char* with_max_row(const SpmmMax& p, const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    const Shape s = shape_of<T>(p.csr, p.dim, vectors);
    const bool weighted = p.value || p.minimum || sizeof(I) == 8;
    dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
      if constexpr (sizeof(I) == 4) {
        if (!weighted) return fn(std::common_type<MaxRow<T, I, vec, lanes, strided, false>>{}, s);
      }
      fn(std::common_type<MaxRow<T, I, vec, lanes, strided, true>>{}, s);
    });
    return last_error();
  });
}

// T and I are parameters of a template: GCC 12 takes the types of a captured variable for references in a
// lambda with `if constexpr`, and then launches kernels that do not exist.
template <typename T, typename I, typename Fn>
void dispatch_won_row(const Shape& s, bool numbers, const Fn& fn) {
  dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
    if constexpr (strided || vec == 1) {  // Fewer kernels: numbers are for few rows.
      if (numbers) return fn(std::common_type<WonRow<T, I, vec, lanes, strided, true>>{}, s);
    }
    fn(std::common_type<WonRow<T, I, vec, lanes, strided, false>>{}, s);
  });
}

template <typename Fn>
const char* with_won_row(const SpmmMaxBackwardX& p, const Csr& transposed, bool numbers,
                         const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    const bool vectors = !numbers && p.dim % kVec<T> == 0 && aligned16(p.grad) &&
                         aligned16(p.arg) && aligned16(p.grad_x);
    dispatch_won_row<T, decltype(index)>(shape_of<T>(transposed, p.dim, vectors), numbers, fn);
    return last_error();
  });
}

// Whether a source may win so many rows that it gathers them. In small graphs it would take more time.
bool has_many_terms(const SpmmMaxBackwardX& p, const Csr* transposed) {
  return transposed && p.dtype != DType::f64 && p.csr.num_rows > kManyTerms &&
         p.csr.num_edges > 4 * kManyTerms;
}

// None where the caller knows that no row is long. All are processed, even if that is wrong.
LongRows long_rows_of(const SpmmMax& p) {
  LongRows l(p.csr);
  if (p.longest_row <= l.longest) {
    l.size = l.longest = p.csr.num_edges;
    l.blocks = 0;
  }
  return l;
}

}  // namespace

int64_t spmm_max_scratch(const SpmmMax& p) {
  int64_t bytes = 0;
  with_max_row(p, [&](auto row, const Shape& s) {
    bytes = long_rows_of(p).bytes(part_bytes<typename decltype(row)::type>(s));
  });
  return bytes;
}

const char* spmm_max(const SpmmMax& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return with_max_row(p, [&](auto row, const Shape& s) {
    launch_rows<typename decltype(row)::type>(p.csr, s, long_rows_of(p).in(scratch), 0, stream, p);
  });
}

int64_t spmm_max_backward_x_scratch(const SpmmMaxBackwardX& p, const Csr* transposed) {
  const bool half = p.dtype == DType::f16 || p.dtype == DType::bf16;
  int64_t bytes = half ? p.csr.num_cols * p.dim * static_cast<int64_t>(sizeof(float)) : 0;
  if (!has_many_terms(p, transposed)) return bytes;
  with_won_row(p, *transposed, p.csr.perm != nullptr, [&](auto row, const Shape& s) {
    const int64_t of_rows = many_terms_scratch<typename decltype(row)::type>(*transposed, s);
    bytes = of_rows > bytes ? of_rows : bytes;  // one after the other
  });
  return aligned(sizeof(Hubs)) + bytes;
}

const char* spmm_max_backward_x(const SpmmMaxBackwardX& p, const Csr* transposed, void* scratch,
                                void* stream_) {
  const int64_t total = p.csr.num_cols * p.dim;
  if (total == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const bool gathers = has_many_terms(p, transposed);
  const Csr of_hubs = gathers ? *transposed : Csr{};
  const int64_t longest = rows_of_many_terms(of_hubs).longest;
  Hubs* hubs = nullptr;
  if (gathers) {
    hubs = static_cast<Hubs*>(scratch);
    scratch = static_cast<char*>(scratch) + aligned(sizeof(Hubs));
    const cudaError_t error = cudaMemsetAsync(hubs, 0, sizeof(Hubs), stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  const char* failed =
      dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
        using T = decltype(element);
        using I = decltype(index);
        using Acc = acc_t<T>;
        constexpr bool half = !std::is_same_v<T, Acc>;
        Acc* sum = static_cast<Acc*>(half ? scratch : p.grad_x);
        const cudaError_t error = cudaMemsetAsync(sum, 0, total * sizeof(Acc), stream);
        if (error != cudaSuccess) return cudaGetErrorString(error);
        if (gathers)
          mark_hubs_kernel<I>
              <<<blocks_for(of_hubs.num_rows), kThreads, 0, stream>>>(of_hubs, longest, hubs);
        const int64_t threads = (p.csr.num_rows + kRowsInTurn - 1) / kRowsInTurn * p.dim;
        if (threads > 0)
          backward_x_kernel<T, I>
              <<<blocks_for(threads), kThreads, 0, stream>>>(p, sum, hubs, of_hubs, longest);
        if constexpr (half)
          round_kernel<T>
              <<<blocks_for(total), kThreads, 0, stream>>>(sum, static_cast<T*>(p.grad_x), total);
        return last_error();
      });
  if (failed || !gathers) return failed;
  return with_won_row(p, *transposed, p.csr.perm != nullptr, [&](auto row, const Shape& s) {
    using Row = typename decltype(row)::type;
    const LongRows l = rows_of_many_terms(*transposed).in(scratch);
    launch_long_rows<Row>(*transposed, s, l, stream, p, *transposed);
  });
}

int64_t spmm_max_backward_x_ordered_scratch(const SpmmMaxBackwardX& p, const Csr& transposed) {
  int64_t bytes = 0;
  with_won_row(p, transposed, false, [&](auto row, const Shape& s) {
    bytes = rows_scratch<typename decltype(row)::type>(transposed, s);
  });
  return bytes;
}

const char* spmm_max_backward_x_ordered(const SpmmMaxBackwardX& p, const Csr& transposed,
                                        void* scratch, void* stream_) {
  if (p.csr.num_cols == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return with_won_row(p, transposed, false, [&](auto row, const Shape& s) {
    launch_rows<typename decltype(row)::type>(transposed, s, scratch, stream, p, transposed);
  });
}

}  // namespace pyg_fast::cuda
