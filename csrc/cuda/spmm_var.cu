// Variances over a row's edges, of the differences from its first message.
#include "params/spmm_var.h"
#include "rows.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kUnroll = 4;  // loads in flight per thread

template <typename Acc, int VEC>
struct Moments {
  Acc sum[VEC], square[VEC];
};

template <typename T, typename I, int VEC, int LANES, bool STRIDED>
struct VarRow {
  using Acc = acc_t<T>;
  using Index = I;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  static constexpr int kLanes = LANES, kBlocks = VEC == 8 ? 2 : 3;
  static constexpr Sums kSums = Sums::registers;
  using Part = Moments<Acc, VEC>;
  struct Sum : Part {
    Acc first[VEC];
  };
  struct Edge {
    Col source = 0;

    __device__ void load(const VarRow& row, I e, I end) {
      if (e < end) source = load_once(static_cast<const Col*>(row.p.csr.col) + e);
    }
  };

  const SpmmVar& p;
  const char* x;  // at this thread's column
  uint32_t row_bytes;
  int64_t column;  // the first of this thread
  bool active;
  OfThread columns;

  __device__ VarRow(const SpmmVar& p, int tile)
      : p(p), column(OfThread::first(tile, threadIdx.x % LANES)), columns(column, p.dim) {
    active = column < p.dim;
    row_bytes = static_cast<uint32_t>(p.dim * sizeof(T));
    // Threads past the last column read the first column and write nothing.
    x = static_cast<const char*>(p.x) + (active ? column : 0) * sizeof(T);
    asm("" : "+l"(x));  // one pointer, instead of a base and an offset added at every load
  }

  __device__ Pack<T, VEC, STRIDED> message(Col source) const {
    return columns.load(reinterpret_cast<const T*>(row_at(x, source, row_bytes)));
  }

  __device__ Sum empty(int64_t row) const {
    const I* rowptr = static_cast<const I*>(p.csr.rowptr);
    const I begin = rowptr[row];
    const bool has_edges = begin < rowptr[row + 1];
    Pack<T, VEC, STRIDED> v;
    if (has_edges) v = message(static_cast<const Col*>(p.csr.col)[begin]);
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.first[c] = has_edges ? element(v, c) : Acc(0);
      sum.sum[c] = sum.square[c] = 0;
    }
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    constexpr int kSlots = 32 / LANES, kSteps = LANES < kUnroll ? LANES : kUnroll;
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
      for (int u = 0; u < kSteps; ++u) v[u] = message(source[u]);
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const bool exists = first + u * kSlots + slot < count;
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          const Acc d = exists ? element(v[u], c) - sum.first[c] : Acc(0);
          sum.sum[c] += d;
          sum.square[c] += d * d;
        }
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        sum.sum[c] += __shfl_xor_sync(kWarpMask, sum.sum[c], offset);
        sum.square[c] += __shfl_xor_sync(kWarpMask, sum.square[c], offset);
      }
    }
  }

  __device__ void merge(Part& sum, const Part& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.sum[c] += other.sum[c];
      sum.square[c] += other.square[c];
    }
  }

  __device__ void finish(int64_t row, int64_t degree, const Sum& sum) const {
    if (!active) return;
    const Acc count = degree > 0 ? static_cast<Acc>(degree) : Acc(1);
    Acc var[VEC], mean[VEC];
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc away = sum.sum[c] / count;
      var[c] = sum.square[c] / count - away * away;
      if (var[c] < 0) var[c] = 0;  // NaN stays
      mean[c] = sum.first[c] + away;
    }
    columns.write(static_cast<Acc*>(p.var) + row * p.dim + column, var);
    columns.write(static_cast<Acc*>(p.mean) + row * p.dim + column, mean);
  }
};

// Calls fn(Row, shape) with the row kernel for `p`.
template <typename Fn>
const char* with_var_row(const SpmmVar& p, const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const bool vectors =
        p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.var) && aligned16(p.mean);
    const Shape s = shape_of<T>(p.csr, p.dim, vectors);
    dispatch_shape<T>(s, [&](auto vec, auto lanes, auto strided) {
      fn(std::common_type<VarRow<T, I, vec, lanes, strided>>{}, s);
    });
    return last_error();
  });
}

}  // namespace

int64_t spmm_var_scratch(const SpmmVar& p) {
  int64_t bytes = 0;
  with_var_row(p, [&](auto row, const Shape& s) {
    bytes = rows_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* spmm_var(const SpmmVar& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return with_var_row(p, [&](auto row, const Shape& s) {
    launch_rows<typename decltype(row)::type>(p.csr, s, scratch, stream, p);
  });
}

}  // namespace pyg_fast::cuda
