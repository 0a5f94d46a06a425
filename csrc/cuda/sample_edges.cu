// The sample itself, and its transpose.
#include <cub/device/device_scan.cuh>

#include "params/sampled.h"
#include "sampled.cuh"

namespace pyg_fast::cuda {
namespace {

template <typename I>
__global__ void __launch_bounds__(kThreads)
    sample_edges_kernel(SampleEdges p, const RowSample<I>* table) {
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
      p.row[at + k] = static_cast<Col>(row);
      p.col[at + k] = static_cast<const Col*>(p.csr.col)[e];
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
    p.row[at] = -1;
    p.col[at] = 0;
    static_cast<I*>(p.perm)[at] = 0;
  }
}

// Sets one bit in `taken` for each sampled edge, in row order; all bits start at zero. A warp builds the
// words of a row in shared memory unless there are too many. Neighbouring rows can share its first and
// last word.
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
    const SampledRow<I> of(p.sampling, begin, end,
                           table ? table[row] : default_sample<I>(p.sampling, end - begin));
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

// The same bits in the order of the transpose, and the count of each word; plus one zero word.
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

// `before`: the number of sampled edges before each word.
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

// One thread per word.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    gather_taken_kernel(SampleTransposed p, const uint32_t* words, const I* before,
                        int64_t num_words) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  I* perm = static_cast<I*>(p.perm);
  for (int64_t word = first; word < num_words; word += step) {
    int64_t to = before[word];
    for (uint32_t bits = words[word]; bits != 0; bits &= bits - 1, ++to) {
      const int64_t e = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      p.col[to] = static_cast<const Col*>(p.csr.col)[e];
      perm[to] = static_cast<const I*>(p.csr.perm)[e];
    }
  }
  const int64_t taken = before[num_words - 1];  // the last word is empty
  for (int64_t at = taken + first; at < p.num_slots; at += step) {
    p.col[at] = 0;
    perm[at] = 0;
  }
}

// The layout of scratch.
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
    Csr rows;  // only the sampled part
    rows.rowptr = p.rowptr;
    rows.num_rows = p.csr.num_cols;
    const RowSample<I>* table = row_samples<I>(rows, p.sampling, memory, stream);
    mark_taken_kernel<I><<<blocks_for(rows.num_rows * 32), kThreads, 0, stream>>>(p, table, taken);
  }
  taken_words_kernel<I><<<blocks_for(layout.num_words * 8), kThreads, 0, stream>>>(
      p, taken, words, counts, layout.num_words);
  error = cub::DeviceScan::ExclusiveSum(memory + layout.scan, layout.scan_bytes, counts, counts,
                                        layout.num_words, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  taken_rowptr_kernel<I><<<blocks_for(p.csr.num_rows + 1), kThreads, 0, stream>>>(p, words, counts);
  gather_taken_kernel<I>
      <<<blocks_for(layout.num_words), kThreads, 0, stream>>>(p, words, counts, layout.num_words);
  return last_error();
}

}  // namespace

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

}  // namespace pyg_fast::cuda
