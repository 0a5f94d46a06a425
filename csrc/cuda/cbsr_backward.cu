// Gradients of the aggregation of CBSR features. A warp keeps its row of the gradient in shared memory
// and reads it at the columns of each edge's source entries.
#include "cbsr.cuh"
#include "params/cbsr.h"
#include "rows.cuh"

namespace pyg_fast::cuda {
namespace {

// Longer rows of the gradient stay in global memory.
constexpr int kMostStaged = 2048;

// Entries per thread: the sums have float32 (float64) whatever the input type.
constexpr int kMostAdded = 4;

struct Staged {
  Csr csr;
  bool value_acc = false;
  bool mean = false;
  int64_t dim = 0;
  int64_t k = 0;
  int begin = 0, end = 0;  // the range of each row's entries to process
  const void* columns = nullptr;
  const void* grad = nullptr;       // [num_rows, dim]
  const void* row_scale = nullptr;  // applied to grad
  const void* value = nullptr;      // of edges
  const void* col_scale = nullptr;
  const void* values = nullptr;  // [num_cols, k], of dot products
  void* out = nullptr;           // [num_cols, k] acc; for dot products [num_values]
};

// DOT: out[perm[e]] = <values of the edge's source, grad>; else out[source, c] += value * grad.
// LANES threads read an edge. STAGED: the row of the gradient is in shared memory.
template <typename T, typename I, typename C, int STEPS, bool PACKED, bool WEIGHTED, bool DOT,
          int LANES = kEntryLanes, bool STAGED = true>
struct StagedRow {
  using Acc = acc_t<T>;
  static constexpr int kSlots = 32 / LANES;
  using Index = I;
  static constexpr int kLanes = 32, kBlocks = 4;
  static constexpr Sums kSums = Sums::none;
  struct Sum {};
  struct Edge : WeightedEdge<T, I, WEIGHTED> {
    I position = 0;

    __device__ void load(const StagedRow& row, I e, I end) {
      WeightedEdge<T, I, WEIGHTED>::load(row, e, end);
      if constexpr (DOT) {
        const I* perm = static_cast<const I*>(row.p.csr.perm);
        if (e < end) position = perm ? load_once(perm + e) : e;
      }
    }
  };
  // Edges in flight per slot; all slots together have at most 32.
  static constexpr int kUnroll = PACKED && sizeof(Acc) * STEPS <= 16 && LANES >= 4 ? 4 : 2;

  const Staged& p;
  Acc* staged;  // of this warp
  int slot, entry_lane;
  const T* grad = nullptr;
  Acc scale = 0;

  __device__ StagedRow(const Staged& p, int width, int) : p(p) {
    extern __shared__ float4 memory[];
    staged = reinterpret_cast<Acc*>(memory) + threadIdx.x / 32 * width;
    slot = (threadIdx.x & 31) / LANES;
    entry_lane = threadIdx.x % LANES;
  }

  __device__ Sum empty(int64_t row) {
    grad = static_cast<const T*>(p.grad) + row * p.dim;
    scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc(1);
    if (p.mean) {
      const I* rowptr = static_cast<const I*>(p.csr.rowptr);
      const I degree = rowptr[row + 1] - rowptr[row];
      if (degree > 1) scale /= static_cast<Acc>(degree);
    }
    if constexpr (STAGED) {
      __syncwarp();
      for (int64_t f = threadIdx.x & 31; f < p.dim; f += 32) staged[f] = to_acc(grad[f]) * scale;
      __syncwarp();
    }
    return Sum{};
  }

  __device__ Acc at(int64_t column) const {
    if constexpr (STAGED) return staged[column];
    else return to_acc(grad[column]) * scale;
  }

  __device__ void add(const Edge& edge, I, int count, Sum&) const {
#pragma unroll 1
    for (int first = 0; first < count; first += kUnroll * kSlots) {
      if constexpr (DOT) dots(edge, first, count);
      else add_to_sources(edge, first, count);
    }
  }

  __device__ void add_to_sources(const Edge& edge, int first, int count) const {
    const C* columns = static_cast<const C*>(p.columns) + p.begin;
    Acc* out = static_cast<Acc*>(p.out) + p.begin;
    const int entries = p.end - p.begin;
    const uint32_t k = static_cast<uint32_t>(p.k);
    const int lane = !PACKED || entry_lane * STEPS < entries ? entry_lane : 0;
    Pack<C, STEPS> c[kUnroll];
    Col source[kUnroll];  // offsets would take twice the registers
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int e = first + u * kSlots + slot;
      source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      c[u] = load_entries<C, STEPS, PACKED>(columns + offset(source[u], k), lane, entries);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int e = first + u * kSlots + slot;
      const Acc weight = WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, e & 31) : Acc(1);
      if (e >= count) continue;
      Acc* const to = out + offset(source[u], k);
      if constexpr (PACKED) {
        if (entry_lane * STEPS >= entries) continue;
        Acc g[STEPS];
#pragma unroll
        for (int t = 0; t < STEPS; ++t) g[t] = weight * at(c[u].data[t]);
        add_packed(to + entry_lane * STEPS, g);
      } else {
#pragma unroll
        for (int t = 0; t < STEPS; ++t) {
          if (has_entry<STEPS, PACKED>(t, entry_lane, entries))
            atomicAdd(to + t * LANES + entry_lane, weight * at(c[u].data[t]));
        }
      }
    }
  }

  __device__ static uint64_t offset(Col source, uint32_t k) {
    return static_cast<uint64_t>(static_cast<uint32_t>(source)) * k;
  }

  __device__ static void add_packed(Acc* out, const Acc (&g)[STEPS]) {
#if __CUDA_ARCH__ >= 900
    if constexpr (std::is_same_v<Acc, float> && STEPS == 4) {
      atomicAdd(reinterpret_cast<float4*>(out), make_float4(g[0], g[1], g[2], g[3]));
    } else if constexpr (std::is_same_v<Acc, float> && STEPS == 2) {
      atomicAdd(reinterpret_cast<float2*>(out), make_float2(g[0], g[1]));
    } else
#endif
    {
#pragma unroll
      for (int t = 0; t < STEPS; ++t) atomicAdd(out + t, g[t]);
    }
  }

  __device__ void dots(const Edge& edge, int first, int count) const {
    Acc dot[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) dot[u] = 0;
    for (int begin = p.begin; begin < p.end; begin += LANES * STEPS) {
      const C* columns = static_cast<const C*>(p.columns) + begin;
      const T* values = static_cast<const T*>(p.values) + begin;
      const int entries = p.end - begin;
      const int lane = !PACKED || entry_lane * STEPS < entries ? entry_lane : 0;
      Pack<C, STEPS> c[kUnroll];
      Pack<T, STEPS> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int e = first + u * kSlots + slot;
        const int64_t row = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1) * p.k;
        c[u] = load_entries<C, STEPS, PACKED>(columns + row, lane, entries);
        v[u] = load_entries<T, STEPS, PACKED>(values + row, lane, entries);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int t = 0; t < STEPS; ++t) {
          if (has_entry<STEPS, PACKED>(t, entry_lane, entries))
            dot[u] += element(v[u], t) * at(c[u].data[t]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int e = first + u * kSlots + slot;
#pragma unroll
      for (int offset = 1; offset < LANES; offset <<= 1)
        dot[u] += __shfl_xor_sync(kWarpMask, dot[u], offset);
      const I position = __shfl_sync(kWarpMask, edge.position, e & 31);
      const Acc weight = WEIGHTED ? __shfl_sync(kWarpMask, edge.weight, e & 31) : Acc(1);
      if (e < count && entry_lane == 0)
        static_cast<T*>(p.out)[position] = from_acc<T>(weight * dot[u]);
    }
  }

  __device__ void reduce(Sum&) const {}
  __device__ void finish(int64_t, int64_t, const Sum&) const {}
};

template <typename T, typename I, typename C, bool DOT>
const char* launch(const Staged& p, cudaStream_t stream) {
  const Shape s = shape_of(p.csr, 32, 1);
  const int width = p.dim <= kMostStaged ? multiple_of_32(p.dim) : 0;
  const int bytes = kWarps * width * static_cast<int>(sizeof(acc_t<T>));
  const char* error = nullptr;
  const auto run = [&](auto row) {
    using Row = typename decltype(row)::type;
    error = allow_shared(rows_kernel<Row, Staged, int>, bytes);
    if (!error) launch_rows<Row>(p.csr, s, LongRows(p.csr), bytes, stream, p, width);
  };
  if (width == 0) {
    run(std::common_type<StagedRow<T, I, C, kMostAdded, false, true, DOT, kEntryLanes, false>>{});
  } else if constexpr (DOT) {
    if constexpr (sizeof(C) <= 2 && sizeof(I) == 4) {
      if (packs<kMostAdded>(p.k, p.columns, p.values)) {
        run(std::common_type<StagedRow<T, I, C, kMostAdded, true, true, true>>{});
        return error ? error : last_error();
      }
    }
    run(std::common_type<StagedRow<T, I, C, kMostAdded, false, true, true>>{});
  } else {
    const auto with_lanes = [&](auto steps, auto packed, auto lanes) {
      if constexpr (packed) {
        if (!p.value)
          return run(std::common_type<StagedRow<T, I, C, steps, packed, false, false, lanes>>{});
      }
      run(std::common_type<StagedRow<T, I, C, steps, packed, true, false, lanes>>{});
    };
    const int64_t entries = p.end - p.begin;
    if constexpr (sizeof(C) <= 2 && sizeof(I) == 4 && sizeof(acc_t<T>) == 4) {
      // Fewer threads, each with a wider atomic addition.
      if (entries <= 4 * kMostAdded && packs<kMostAdded>(p.k, p.columns, p.out)) {
        const auto narrow = [&](auto lanes) {
          with_lanes(Int<kMostAdded>{}, std::true_type{}, lanes);
        };
        if (entries <= 2 * kMostAdded) narrow(Int<2>{});
        else narrow(Int<4>{});
        return error ? error : last_error();
      }
    }
    dispatch_steps<kMostAdded, C, I>(p.k, entries, p.columns, p.out, [&](auto steps, auto packed) {
      with_lanes(steps, packed, Int<kEntryLanes>{});
    });
  }
  return error ? error : last_error();
}

// out = col_scale[j] * sum + diag[j] * grad, in place if `sum` is the output.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) finish_kernel(CbsrBackward p, const acc_t<T>* sum) {
  using Acc = acc_t<T>;
  const int64_t total = p.csr.num_cols * p.k, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < total;
       at += step) {
    const int64_t j = at / p.k;
    Acc out = sum[at];
    if (p.col_scale) out *= static_cast<const Acc*>(p.col_scale)[j];
    if (p.diag) {
      const int64_t column = static_cast<const C*>(p.columns)[at];
      out += static_cast<const Acc*>(p.diag)[j] *
             to_acc(static_cast<const T*>(p.grad)[j * p.dim + column]);
    }
    static_cast<T*>(p.grad_values)[at] = from_acc<T>(out);
  }
}

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

// The ordered form of the same gradient.
CbsrBackward ordered(const CbsrBackward& p, const Csr& transposed) {
  CbsrBackward o = p;
  o.csr = transposed;
  o.row_scale = p.col_scale;
  o.col_scale = p.row_scale;
  return o;
}

bool has_many_terms(const CbsrBackward& p, const Csr* transposed) {
  return transposed && !p.mean && p.dtype != DType::f64 && p.csr.num_edges > kManyTerms;
}

}  // namespace

int64_t cbsr_spmm_backward_scratch(const CbsrBackward& p, const Csr* transposed) {
  const int64_t bytes = is_half(p.dtype) ? p.csr.num_cols * p.k * acc_bytes(p.dtype) : 0;
  if (!has_many_terms(p, transposed)) return bytes;
  const int64_t of_hubs = cbsr_spmm_backward_hubs_scratch(ordered(p, *transposed));
  return of_hubs > bytes ? of_hubs : bytes;  // one after the other
}

const char* cbsr_spmm_backward(const CbsrBackward& p, const Csr* transposed, void* scratch,
                               void* stream_) {
  const int64_t total = p.csr.num_cols * p.k;
  if (total == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const char* failed = dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    return dispatch_columns(p.column_type, [&](auto column) -> const char* {
      using C = decltype(column);
      using Acc = acc_t<T>;
      Staged staged;
      staged.csr = p.csr;
      staged.value_acc = p.value_acc;
      staged.mean = p.mean;
      staged.dim = p.dim;
      staged.k = p.k;
      staged.columns = p.columns;
      staged.grad = p.grad;
      staged.row_scale = p.row_scale;
      staged.value = p.value;
      staged.out = is_half(p.dtype) ? scratch : p.grad_values;
      const cudaError_t error = cudaMemsetAsync(staged.out, 0, total * sizeof(Acc), stream);
      if (error != cudaSuccess) return cudaGetErrorString(error);
      // Processes the entries in blocks: the sums of a block stay in L2.
      for (int64_t begin = 0; begin < p.k && p.csr.num_rows > 0;
           begin += kEntryLanes * kMostAdded) {
        const int64_t end = begin + kEntryLanes * kMostAdded;
        staged.begin = static_cast<int>(begin);
        staged.end = static_cast<int>(end < p.k ? end : p.k);
        const char* failed = launch<T, I, C, false>(staged, stream);
        if (failed) return failed;
      }
      if (is_half(p.dtype) || p.col_scale || p.diag)
        finish_kernel<T, C>
            <<<blocks_for(total), kThreads, 0, stream>>>(p, static_cast<const Acc*>(staged.out));
      return last_error();
    });
  });
  if (failed || !has_many_terms(p, transposed)) return failed;
  return cbsr_spmm_backward_hubs(ordered(p, *transposed), scratch, stream);
}

const char* cbsr_sddmm(const CbsrSddmm& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.csr.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    return dispatch_columns(p.column_type, [&](auto column) {
      Staged staged;
      staged.csr = p.csr;
      staged.mean = p.mean;
      staged.dim = p.dim;
      staged.k = p.k;
      staged.end = static_cast<int>(p.k);
      staged.columns = p.columns;
      staged.grad = p.grad;
      staged.row_scale = p.row_scale;
      staged.col_scale = p.col_scale;
      staged.values = p.values;
      staged.out = p.out;
      return launch<T, I, decltype(column), true>(staged, stream);
    });
  });
}

}  // namespace pyg_fast::cuda
