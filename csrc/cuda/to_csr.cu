// Coordinate list to CSR by a stable radix sort over the bits that the row numbers need.
#include <cub/device/device_radix_sort.cuh>

#include "common.cuh"
#include "cuda.h"

namespace pyg_fast::cuda {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int bits_for(int64_t largest) {
  int bits = 1;
  while (bits < 64 && (largest >> bits) != 0) ++bits;
  return bits;
}

// Keys of 4 bytes where every row (and one past them) and every edge position fits.
bool small(const ToCsr& p) { return p.num_rows < 0xfffffffe && p.num_edges < 0xfffffffe; }

template <typename Key>
const char* sort_bytes(const ToCsr& p, size_t& bytes) {
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      nullptr, bytes, static_cast<const Key*>(nullptr), static_cast<Key*>(nullptr),
      static_cast<const Key*>(nullptr), static_cast<Key*>(nullptr), p.num_edges, 0,
      bits_for(p.num_rows));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Edges that are left out get the key num_rows, which sorts behind all rows.
template <typename In, typename Key>
__global__ void __launch_bounds__(kThreads) keys_kernel(ToCsr p, Key* keys, Key* positions) {
  const In* row = static_cast<const In*>(p.row);
  const In* col = static_cast<const In*>(p.col);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  unsigned long long invalid = 0;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.num_edges;
       e += step) {
    const int64_t r = row[e], c = col[e];
    const bool valid = r >= 0 && r < p.num_rows && c >= 0 && c < p.num_cols;
    invalid += !valid;
    keys[e] = static_cast<Key>(valid && !(p.drop_loops && r == c) ? r : p.num_rows);
    positions[e] = static_cast<Key>(e);
  }
  if (invalid) atomicAdd(reinterpret_cast<unsigned long long*>(p.invalid), invalid);
}

// rowptr[i] = the first sorted edge whose row is at least i.
template <typename Key, typename Out>
__global__ void __launch_bounds__(kThreads) rowptr_kernel(ToCsr p, const Key* keys) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i <= p.num_rows;
       i += step) {
    int64_t low = 0, high = p.num_edges;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (static_cast<int64_t>(keys[middle]) < i) low = middle + 1;
      else high = middle;
    }
    static_cast<Out*>(p.rowptr)[i] = static_cast<Out>(low);
  }
}

template <typename In, typename Key, typename Out>
__global__ void __launch_bounds__(kThreads) columns_kernel(ToCsr p, const Key* keys,
                                                           const Key* positions) {
  const In* col = static_cast<const In*>(p.col);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; e < p.num_edges;
       e += step) {
    const bool kept = static_cast<int64_t>(keys[e]) < p.num_rows;
    const Key from = positions[e];
    static_cast<Out*>(p.sorted_col)[e] = kept ? static_cast<Out>(col[from]) : Out(0);
    static_cast<Out*>(p.perm)[e] = kept ? static_cast<Out>(from) : Out(0);
  }
}

unsigned grid_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < (1 << 20) ? blocks : 1 << 20);
}

template <typename In, typename Key, typename Out>
const char* run(const ToCsr& p, void* scratch, cudaStream_t stream) {
  char* memory = static_cast<char*>(scratch);
  const int64_t array = aligned(p.num_edges * static_cast<int64_t>(sizeof(Key)));
  Key* keys = reinterpret_cast<Key*>(memory);
  Key* sorted = reinterpret_cast<Key*>(memory + array);
  Key* positions = reinterpret_cast<Key*>(memory + 2 * array);
  Key* sorted_positions = reinterpret_cast<Key*>(memory + 3 * array);
  cudaError_t error = cudaMemsetAsync(p.invalid, 0, sizeof(int64_t), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (p.num_edges > 0) {
    keys_kernel<In, Key><<<grid_for(p.num_edges), kThreads, 0, stream>>>(p, keys, positions);
    size_t bytes = 0;
    if (const char* text = sort_bytes<Key>(p, bytes)) return text;
    error = cub::DeviceRadixSort::SortPairs(memory + 4 * array, bytes, keys, sorted, positions,
                                            sorted_positions, p.num_edges, 0, bits_for(p.num_rows),
                                            stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    columns_kernel<In, Key, Out>
        <<<grid_for(p.num_edges), kThreads, 0, stream>>>(p, sorted, sorted_positions);
  }
  rowptr_kernel<Key, Out><<<grid_for(p.num_rows + 1), kThreads, 0, stream>>>(p, sorted);
  return last_error();
}

template <typename In>
const char* run(const ToCsr& p, void* scratch, cudaStream_t stream) {
  if (!small(p)) return run<In, uint64_t, int64_t>(p, scratch, stream);
  if (p.out64) return run<In, uint32_t, int64_t>(p, scratch, stream);
  return run<In, uint32_t, int32_t>(p, scratch, stream);
}

}  // namespace

int64_t to_csr_scratch(const ToCsr& p) {
  if (p.num_edges == 0) return 0;
  size_t bytes = 0;
  const bool is_small = small(p);
  const char* error = is_small ? sort_bytes<uint32_t>(p, bytes) : sort_bytes<uint64_t>(p, bytes);
  if (error) return 0;  // to_csr meets the same error and reports it
  return 4 * aligned(p.num_edges * (is_small ? 4 : 8)) + static_cast<int64_t>(bytes);
}

const char* to_csr(const ToCsr& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return p.in64 ? run<int64_t>(p, scratch, s) : run<int32_t>(p, scratch, s);
}

}  // namespace pyg_fast::cuda
