// Sums over a sample of each row's edges, the sample itself and its transpose, and features of eight
// bits.
#include <cub/device/device_scan.cuh>

#include "../sample.h"
#include "cuda.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {

// Found by SpmmRow in place of the one for all types: a byte is put into the mantissa of 2^23, and that
// taken away again, in less time than the chip converts it in.
template <int VEC, typename = std::enable_if_t<VEC % 4 == 0>>
__device__ inline float element(const Pack<int8_t, VEC>& pack, int c) {
  const uint32_t word = reinterpret_cast<const uint32_t*>(&pack)[c / 4] ^ 0x80808080u;
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | c % 4)) - 8388736.0f;
}

namespace {

// Rows of a warp at most: its lanes hold where they begin, and where the one after them does.
constexpr int kMostRows = 8;

bool needs_table(const Sampling& s) {
  return s.strategy == Strategy::fastrand || s.strategy == Strategy::unbiased;
}

// What a coprime costs is paid by one thread per row, once.
template <typename I>
__global__ void __launch_bounds__(kThreads) row_samples_kernel(Csr csr, Sampling s,
                                                               RowSample<I>* out) {
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; row < csr.num_rows; row += step) {
    const I degree = rowptr[row + 1] - rowptr[row];
    out[row] = degree > static_cast<I>(s.num_samples)
                   ? row_sample<I>(s.strategy, s.seed, row, degree)
                   : RowSample<I>{0, 1};
  }
}

template <typename I>
const RowSample<I>* row_samples(const Csr& csr, const Sampling& s, void* scratch,
                                cudaStream_t stream) {
  if (!needs_table(s)) return nullptr;
  auto* table = static_cast<RowSample<I>*>(scratch);
  row_samples_kernel<I>
      <<<blocks_for(csr.num_rows), kThreads, 0, stream>>>(csr, s, table);
  return table;
}

// One row as its warp sees it.
template <typename I>
struct SampledRow {
  I begin = 0;
  I degree = 0;
  I count = 0;  // edges taken
  RowSample<I> sample{0, 1};

  SampledRow() = default;
  __device__ SampledRow(const Sampling& s, I begin, I end, RowSample<I> sample)
      : begin(begin), degree(end - begin), sample(sample) {
    const I most = static_cast<I>(s.num_samples);
    count = degree < most ? degree : most;
  }

  __device__ I edge(I k) const {
    return begin + (degree == count ? k : sampled_position<I>(sample, k, degree));
  }
};

template <typename I>
__device__ inline RowSample<I> default_sample(const Sampling& s, I degree) {
  return s.strategy == Strategy::paper && degree > static_cast<I>(s.num_samples)
             ? RowSample<I>{0, kPaperStride}
             : RowSample<I>{0, 1};
}

// A warp takes `warp_rows` rows that follow one another. Rows of more than hub_degree sampled edges
// are shared by the warps of the block afterwards, in the same way as for_each_row does.
template <typename T, typename I, int VEC, int LANES, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sampled_spmm_kernel(SampledSpmm p, const void* x_self, const RowSample<I>* table, Shape s,
                        int warp_rows) {
  using Row = SpmmRow<T, I, VEC, LANES, WEIGHTED>;
  using Edge = typename Row::Edge;
  using Sum = typename Row::Sum;
  using Acc = acc_t<T>;
  __shared__ Sum partial[kWarps][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int64_t block_row = static_cast<int64_t>(blockIdx.x) * kWarps * warp_rows;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const bool weighs = p.sampling.strategy == Strategy::unbiased && !p.mean;

  const auto sampled_row = [&](int64_t row) {
    const I begin = rowptr[row], end = rowptr[row + 1];
    const auto sample = table ? table[row] : default_sample<I>(p.sampling, end - begin);
    return SampledRow<I>(p.sampling, begin, end, sample);
  };
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Row kernel(p, x_self, tile);
    const auto load = [&](Edge& edge, const SampledRow<I>& of, I k) {
      if (k >= of.count) return;
      const I e = of.edge(k);
      edge.load(kernel, e, e + 1);
    };
    const auto finish = [&](int64_t row, const SampledRow<I>& of, Sum& sum) {
      if (weighs && of.degree > of.count) {
        const Acc factor = static_cast<Acc>(of.degree) / static_cast<Acc>(of.count);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum.data[c] *= factor;
      }
      kernel.finish(row, of.count, sum);
    };

    const int64_t first_row = block_row + static_cast<int64_t>(warp) * warp_rows;
    const int64_t left_rows = p.csr.num_rows - first_row;
    const int rows = static_cast<int>(left_rows < warp_rows ? left_rows : warp_rows);
    I begins = 0;
    RowSample<I> samples{0, 1};
    if (lane <= rows) begins = rowptr[first_row + lane];
    if (table && lane < rows) samples = table[first_row + lane];
    Edge edge;
    SampledRow<I> next;
    const auto open = [&](int r) {
      if (r >= rows) return;
      const I begin = __shfl_sync(kWarpMask, begins, r);
      const I end = __shfl_sync(kWarpMask, begins, r + 1);
      RowSample<I> sample = default_sample<I>(p.sampling, end - begin);
      if (table) {
        sample.offset = __shfl_sync(kWarpMask, samples.offset, r);
        sample.stride = __shfl_sync(kWarpMask, samples.stride, r);
      }
      next = SampledRow<I>(p.sampling, begin, end, sample);
      load(edge, next, lane);
    };
    open(0);
    for (int r = 0; r < rows; ++r) {
      const SampledRow<I> row = next;
      if (row.count > s.hub_degree) {
        open(r + 1);
        continue;
      }
      Sum sum = kernel.empty(0);
      for (I base = 0; base < row.count; base += 32) {
        const Edge now = edge;
        const int left = static_cast<int>(row.count - base);
        // The next row's first edges are on their way while this one is summed.
        if (left > 32) load(edge, row, base + 32 + lane);
        else open(r + 1);
        kernel.add(now, base, left < 32 ? left : 32, sum);
      }
      if (row.count == 0) open(r + 1);
      kernel.reduce(sum);
      if (lane < LANES) finish(first_row + r, row, sum);
    }

    if (p.sampling.num_samples <= s.hub_degree) continue;
    for (int r = 0; r < kWarps * warp_rows && block_row + r < p.csr.num_rows; ++r) {
      const SampledRow<I> row = sampled_row(block_row + r);
      if (row.count <= s.hub_degree) continue;
      const I share = (row.count / kWarps + 32) / 32 * 32;
      const I first = share * warp;
      const I last = row.count - first > share ? first + share : row.count;
      Sum sum = kernel.empty(0);
      if (first < last) load(edge, row, first + lane);
      for (I base = first; base < last; base += 32) {
        const Edge now = edge;
        const I left = last - base;
        load(edge, row, base + 32 + lane);
        kernel.add(now, base, left < 32 ? static_cast<int>(left) : 32, sum);
      }
      kernel.reduce(sum);
      if (lane < LANES) partial[warp][lane] = sum;
      __syncthreads();
      if (threadIdx.x < LANES) {
        sum = partial[0][lane];
        for (int w = 1; w < kWarps; ++w) kernel.merge(sum, partial[w][lane]);
        finish(block_row + r, row, sum);
      }
      __syncthreads();
    }
  }
}

// Worth a pass over x where each row of it is read many times. Not for halves, which would round.
bool wants_scaled_rows(const SampledSpmm& p) {
  const int64_t edges = most_edges(p.csr, p.sampling);
  return p.col_scale && !p.value && !p.quantized && (p.dtype == DType::f32 || p.dtype == DType::f64) &&
         edges >= 12 * p.csr.num_cols && edges >= (1 << 20);
}

template <typename T, typename I>
const char* run(SampledSpmm p, void* scratch, cudaStream_t stream) {
  const RowSample<I>* table = row_samples<I>(p.csr, p.sampling, scratch, stream);
  const void* x_self = p.x;
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    if (wants_scaled_rows(p)) {
      T* scaled = reinterpret_cast<T*>(static_cast<char*>(scratch) +
                                       aligned(sampling_scratch(p.csr, p.sampling)));
      scale_rows(static_cast<const T*>(p.x), static_cast<const T*>(p.col_scale), scaled,
                 p.csr.num_cols, p.dim, stream);
      p.x = scaled;
      p.col_scale = nullptr;
    }
  }
  const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
  Shape s = shape_of(p.csr, p.dim, vectors ? kVec<T> : 1);
  // Rows are about equally long: enough of them for each warp to hide how it starts, as long as
  // there are blocks to fill the chip.
  int warp_rows = 1;
  while (warp_rows < kMostRows && p.csr.num_rows * s.tiles / (kWarps * warp_rows) >= 4800)
    warp_rows *= 2;
  s.block_rows = kWarps * warp_rows;
  const dim3 grid = s.grid(p.csr.num_rows);
  dispatch_shape<kVec<T>>(s, [&](auto vec, auto lanes) {
    if constexpr (sizeof(I) == 4) {
      if (!is_weighted(p)) {
        sampled_spmm_kernel<T, I, vec, lanes, false>
            <<<grid, kThreads, 0, stream>>>(p, x_self, table, s, warp_rows);
        return;
      }
    }
    sampled_spmm_kernel<T, I, vec, lanes, true>
        <<<grid, kThreads, 0, stream>>>(p, x_self, table, s, warp_rows);
  });
  return last_error();
}

template <typename I>
__global__ void __launch_bounds__(kThreads) sample_edges_kernel(SampleEdges p,
                                                                const RowSample<I>* table) {
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const I* begins = static_cast<const I*>(p.rowptr);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = threadIdx.x & 31;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.csr.num_rows; row += step) {
    const I begin = rowptr[row], end = rowptr[row + 1], at = begins[row];
    const SampledRow<I> of(p.sampling, begin, end,
                           table ? table[row] : default_sample<I>(p.sampling, end - begin));
    for (I k = lane; k < of.count; k += 32) {
      const I e = of.edge(k);
      static_cast<I*>(p.row)[at + k] = static_cast<I>(row);
      static_cast<I*>(p.col)[at + k] = static_cast<const I*>(p.csr.col)[e];
      static_cast<I*>(p.perm)[at + k] = perm ? perm[e] : e;
    }
  }
}

template <typename I>
__global__ void __launch_bounds__(kThreads) clear_tail_kernel(SampleEdges p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t at = static_cast<int64_t>(static_cast<const I*>(p.rowptr)[p.csr.num_rows]) +
               static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; at < p.num_slots; at += step) {
    static_cast<I*>(p.row)[at] = -1;
    static_cast<I*>(p.col)[at] = static_cast<I*>(p.perm)[at] = 0;
  }
}

// One bit for each edge in the order of rows, `taken`, all zero before. A warp has a row, whose words
// it puts together in shared memory unless they are too many; of neighbours it may share the outermost.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    mark_taken_kernel(SampleTransposed p, const RowSample<I>* table, uint32_t* taken) {
  constexpr int kWords = 256;
  __shared__ uint32_t shared_words[kWarps][kWords];
  uint32_t* const words = shared_words[threadIdx.x / 32];
  const I* rowptr = static_cast<const I*>(p.rowptr);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = threadIdx.x & 31;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.csr.num_cols; row += step) {
    const I begin = rowptr[row], end = rowptr[row + 1];
    const SampledRow<I> of(p.sampling, begin, end, table ? table[row] : RowSample<I>{0, 1});
    if (of.count == 0) continue;
    const bool first_ones = of.sample.stride == 1 && of.sample.offset == 0;
    const I first = begin >> 5;
    const I last = (first_ones ? begin + of.count - 1 : end - 1) >> 5;
    if (!first_ones && last - first >= kWords) {
      for (I k = lane; k < of.count; k += 32) {
        const I e = of.edge(k);
        atomicOr(taken + (e >> 5), 1u << (e & 31));
      }
      continue;
    }
    if (!first_ones) {
      for (int w = lane; w <= last - first; w += 32) words[w] = 0;
      __syncwarp();
      for (I k = lane; k < of.count; k += 32) {
        const I e = of.edge(k);
        atomicOr(words + ((e >> 5) - first), 1u << (e & 31));
      }
      __syncwarp();
    }
    for (I word = first + lane; word <= last; word += 32) {
      uint32_t bits = first_ones ? ~0u : words[word - first];
      if (first_ones && word == first) bits &= ~0u << (begin & 31);
      if (first_ones && word == last) bits &= ~0u >> (31 - ((begin + of.count - 1) & 31));
      if (word == first || word == last) atomicOr(taken + word, bits);
      else taken[word] = bits;
    }
    __syncwarp();
  }
}

// The same bits in the order of the transpose, and their number in each word; one more word, of zeros.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    taken_words_kernel(SampleTransposed p, const uint32_t* taken, uint32_t* words, I* counts,
                       int64_t num_words) {
  constexpr int kAtOnce = 4;
  const I* position = static_cast<const I*>(p.csr.perm);
  const int64_t num_edges = static_cast<const I*>(p.csr.rowptr)[p.csr.num_rows];
  const int lane = threadIdx.x & 31;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kAtOnce;
  int64_t word = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kAtOnce;
  for (; word < num_words; word += step) {
    I edge[kAtOnce];
    uint32_t bits[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t e = (word + u) * 32 + lane;
      edge[u] = e < num_edges ? load_once(position + e) : I(-1);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) bits[u] = edge[u] >= 0 ? __ldg(taken + (edge[u] >> 5)) : 0;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint32_t of_word = __ballot_sync(kWarpMask, bits[u] >> (edge[u] & 31) & 1);
      if (lane == 0 && word + u < num_words) {
        words[word + u] = of_word;
        counts[word + u] = __popc(of_word);
      }
    }
  }
}

// `before`: how many edges are taken before each word's.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    taken_rowptr_kernel(SampleTransposed p, const uint32_t* words, const I* before) {
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; row <= p.csr.num_rows; row += step) {
    const int64_t e = rowptr[row];
    const uint32_t below = (1u << (e & 31)) - 1;
    static_cast<I*>(p.out_rowptr)[row] =
        before[e >> 5] + static_cast<I>(__popc(words[e >> 5] & below));
  }
}

// A thread has a word.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    gather_taken_kernel(SampleTransposed p, const uint32_t* words, const I* before,
                        int64_t num_words) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  I* col = static_cast<I*>(p.col);
  I* perm = static_cast<I*>(p.perm);
  for (int64_t word = first; word < num_words; word += step) {
    int64_t to = before[word];
    for (uint32_t bits = words[word]; bits != 0; bits &= bits - 1, ++to) {
      const int64_t e = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      col[to] = static_cast<const I*>(p.csr.col)[e];
      perm[to] = static_cast<const I*>(p.csr.perm)[e];
    }
  }
  const int64_t taken = before[num_words - 1];  // the last word is empty
  for (int64_t at = taken + first; at < p.num_slots; at += step) col[at] = perm[at] = 0;
}

// How scratch is laid out.
template <typename I>
struct TransposedScratch {
  int64_t num_words, taken, words, counts, scan, bytes;
  size_t scan_bytes = 0;

  explicit TransposedScratch(const SampleTransposed& p) {
    num_words = (p.csr.num_edges + 31) / 32 + 1;
    taken = aligned(p.csr.num_cols * static_cast<int64_t>(sizeof(RowSample<I>)));
    words = taken + aligned(num_words * 4);
    counts = words + aligned(num_words * 4);
    scan = counts + aligned(num_words * static_cast<int64_t>(sizeof(I)));
    cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, static_cast<I*>(nullptr),
                                  static_cast<I*>(nullptr), num_words);
    bytes = scan + static_cast<int64_t>(scan_bytes);
  }
};

template <typename I>
const char* transpose(const SampleTransposed& p, void* scratch, cudaStream_t stream) {
  TransposedScratch<I> layout(p);
  char* memory = static_cast<char*>(scratch);
  auto* taken = reinterpret_cast<uint32_t*>(memory + layout.taken);
  auto* words = reinterpret_cast<uint32_t*>(memory + layout.words);
  I* counts = reinterpret_cast<I*>(memory + layout.counts);
  cudaError_t error = cudaMemsetAsync(taken, 0, layout.num_words * 4, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (p.csr.num_cols > 0) {
    Csr rows;  // as far as they are sampled
    rows.rowptr = p.rowptr;
    rows.num_rows = p.csr.num_cols;
    const RowSample<I>* table = row_samples<I>(rows, p.sampling, memory, stream);
    mark_taken_kernel<I>
        <<<blocks_for(rows.num_rows * 32), kThreads, 0, stream>>>(p, table, taken);
  }
  taken_words_kernel<I><<<blocks_for(layout.num_words * 8), kThreads, 0, stream>>>(
      p, taken, words, counts, layout.num_words);
  error = cub::DeviceScan::ExclusiveSum(memory + layout.scan, layout.scan_bytes, counts, counts,
                                        layout.num_words, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  taken_rowptr_kernel<I>
      <<<blocks_for(p.csr.num_rows + 1), kThreads, 0, stream>>>(p, words, counts);
  gather_taken_kernel<I><<<blocks_for(layout.num_words), kThreads, 0, stream>>>(
      p, words, counts, layout.num_words);
  return last_error();
}

// A warp has a row: once to find its largest entry, once more, from a cache, to divide by it.
template <typename T, int VEC>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(QuantizeRows p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = threadIdx.x & 31;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.num_rows; row += step) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    const auto larger = [](float a, float b) { return b > a || b != b ? b : a; };
    float largest = 0;
    for (int64_t c = lane * VEC; c < p.dim; c += 32 * VEC) {
      const Pack<T, VEC> pack = load<T, VEC>(x + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k)
        largest = larger(largest, fabsf(static_cast<float>(element(pack, k))));
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1)
      largest = larger(largest, __shfl_xor_sync(kWarpMask, largest, offset));
    const float inverse = quantization_of(largest);
    for (int64_t c = lane * VEC; c < p.dim; c += 32 * VEC) {
      const Pack<T, VEC> pack = load<T, VEC>(x + c);
      Pack<int8_t, VEC> out;
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const float v = inverse > 0 ? static_cast<float>(element(pack, k)) * inverse : 0.0f;
        out.data[k] = static_cast<int8_t>(rintf(v));
      }
      *reinterpret_cast<Pack<int8_t, VEC>*>(p.out + row * p.dim + c) = out;
    }
    if (lane == 0) p.scale[row] = largest / 127;
  }
}

}  // namespace

int64_t sampling_scratch(const Csr& csr, const Sampling& s) {
  return needs_table(s) ? csr.num_rows * (csr.index64 ? 16 : 8) : 0;
}

int64_t sampled_spmm_scratch(const SampledSpmm& p) {
  const int64_t table = sampling_scratch(p.csr, p.sampling);
  return wants_scaled_rows(p) ? aligned(table) + p.csr.num_cols * p.dim * acc_bytes(p.dtype) : table;
}

const char* sampled_spmm(const SampledSpmm& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.quantized) {
    return p.csr.index64 ? run<int8_t, int64_t>(p, scratch, stream)
                         : run<int8_t, int32_t>(p, scratch, stream);
  }
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) {
    return run<decltype(element), decltype(index)>(p, scratch, stream);
  });
}

const char* sample_edges(const SampleEdges& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(DType::f32, p.csr.index64, [&](auto, auto index) {
    using I = decltype(index);
    if (p.csr.num_rows > 0) {
      const RowSample<I>* table = row_samples<I>(p.csr, p.sampling, scratch, stream);
      sample_edges_kernel<I><<<blocks_for(p.csr.num_rows * 32), kThreads, 0, stream>>>(p, table);
    }
    if (p.num_slots > 0)
      clear_tail_kernel<I><<<blocks_for(p.num_slots / 16), kThreads, 0, stream>>>(p);
    return last_error();
  });
}

int64_t sample_transposed_scratch(const SampleTransposed& p) {
  return p.csr.index64 ? TransposedScratch<int64_t>(p).bytes : TransposedScratch<int32_t>(p).bytes;
}

const char* sample_transposed(const SampleTransposed& p, void* scratch, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  return p.csr.index64 ? transpose<int64_t>(p, scratch, stream)
                       : transpose<int32_t>(p, scratch, stream);
}

const char* quantize_rows(const QuantizeRows& p, void* stream_) {
  if (p.num_rows == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) {
    using T = decltype(element);
    const unsigned blocks = blocks_for(p.num_rows * 32);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    if (vectors) quantize_rows_kernel<T, kVec<T>><<<blocks, kThreads, 0, stream>>>(p);
    else quantize_rows_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
