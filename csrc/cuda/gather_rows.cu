// The nodes that two mini-batches share, and the feature rows of one batch from all their sources.
#include "params/gather_rows.h"

#include "common.cuh"
#include "node_map.cuh"

namespace pyg_fast::cuda {
namespace {

// --- matches --------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) note_previous_kernel(Match p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < p.num_previous;
       k += step) {
    const int64_t id = p.previous[k];
    if (p.map.may_hold(id)) insert(p.map, id, k);
  }
}

__global__ void __launch_bounds__(kThreads) match_kernel(Match p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < p.num_ids;
       k += step) {
    const int64_t id = p.n_id[k];
    p.out[k] = p.map.may_hold(id) ? find(p.map, id) : kNotFound;
  }
}

// Records that an id is in a batch; returns the bits of the batches recorded before. The entry holds the
// bits of the batches without the id: both steps then need one atomic each, whatever the old entry.
__device__ inline uint32_t note_batch(const NodeMap& map, int64_t id, uint32_t bit) {
  auto* entry = reinterpret_cast<unsigned long long*>(map.entry + slot_of<true>(map, id));
  atomicMin(entry, static_cast<unsigned long long>(map.stamp | kPositionMask));
  const unsigned long long held = atomicAnd(entry, ~static_cast<unsigned long long>(bit));
  return ~static_cast<uint32_t>(held);
}

// Each row of blocks processes one batch. If two batches share an id, the later one to note it counts it:
// a single thread's counts depend on this order, the sums do not.
__global__ void __launch_bounds__(kThreads) match_degree_kernel(MatchDegree p) {
  __shared__ unsigned long long count[kMostBatches];
  const int lane = threadIdx.x % 32, num_batches = static_cast<int>(p.num_batches);
  const uint32_t bit = 1u << blockIdx.y;
  if (threadIdx.x < kMostBatches) count[threadIdx.x] = 0;
  __syncthreads();
  const int64_t end = p.begin[blockIdx.y + 1], step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t of_lane = 0;  // ids shared with batch number `lane`
  for (int64_t k = p.begin[blockIdx.y] + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       __any_sync(kWarpMask, k < end); k += step) {
    uint32_t batches = 0;
    if (k < end && p.map.may_hold(p.ids[k])) {
      const uint32_t others = note_batch(p.map, p.ids[k], bit);
      if (!(others & bit)) batches = others | bit;  // else a repeated seed
    }
    for (int b = 0; b < num_batches; ++b) {
      const unsigned votes = __ballot_sync(kWarpMask, batches >> b & 1);
      if (lane == b) of_lane += __popc(votes);
    }
  }
  if (of_lane > 0) atomicAdd(count + lane, static_cast<unsigned long long>(of_lane));
  __syncthreads();
  if (threadIdx.x >= num_batches || count[threadIdx.x] == 0) return;
  auto* out = reinterpret_cast<unsigned long long*>(p.count);
  const int64_t a = blockIdx.y, b = threadIdx.x;
  atomicAdd(out + a * num_batches + b, count[b]);
  if (a != b) atomicAdd(out + b * num_batches + a, count[b]);
}

// --- rows -----------------------------------------------------------------------------------------

template <int BYTES>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<1> {
  using type = uint8_t;
};

// Rows per group of lanes and narrow words of a row per lane: loads in flight.
constexpr int kRowsAtOnce = 4;
template <int BYTES>
constexpr int kWordsAtOnce = BYTES == 16  ? 1
                             : BYTES == 8 ? 2
                                          : 4;

// `lanes` threads, a power of two, copy a row. For a row in host memory, they start below it at a
// multiple of `granule` bytes: their loads then request whole bus transfers.
template <int BYTES>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(GatherRows p, int lanes, int granule) {
  using Word = typename WordOf<BYTES>::type;
  __shared__ unsigned long long found[3];
  if (threadIdx.x < 3) found[threadIdx.x] = 0;
  __syncthreads();
  const int lane = threadIdx.x & (lanes - 1), groups = kThreads / lanes;
  const int64_t words = p.row_bytes / BYTES;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups * kRowsAtOnce;
  int64_t from_x = 0, from_previous = 0, from_cache = 0;
  for (int64_t first =
           static_cast<int64_t>(blockIdx.x) * groups * kRowsAtOnce + threadIdx.x / lanes;
       first < p.num_rows; first += step) {
    const Word* data[kRowsAtOnce];
    int skipped[kRowsAtOnce];  // words below the row's first
    int most_skipped = 0;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int64_t row = first + r * groups;
      FetchedRow source{nullptr, RowOf::none};
      if (row < p.num_rows) source = source_of(p, row);
      data[r] = reinterpret_cast<const Word*>(source.data);
      skipped[r] = 0;
      if (p.x_on_host && source.from == RowOf::x) {
        skipped[r] =
            static_cast<int>(reinterpret_cast<uintptr_t>(source.data) & (granule - 1)) / BYTES;
        most_skipped = skipped[r] > most_skipped ? skipped[r] : most_skipped;
      }
      from_x += source.from == RowOf::x;
      from_previous += source.from == RowOf::previous;
      from_cache += source.from == RowOf::cache;
    }
    constexpr int kWords = kWordsAtOnce<BYTES>;
    for (int64_t k = lane; k < words + most_skipped; k += lanes * kWords) {
      Word word[kRowsAtOnce][kWords];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const int64_t c = k + w * lanes - skipped[r];
          word[r][w] = Word{};
          if (data[r] && c >= 0 && c < words) word[r][w] = __ldcs(data[r] + c);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t row = first + r * groups;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const int64_t c = k + w * lanes - skipped[r];
          if (row < p.num_rows && c >= 0 && c < words)
            reinterpret_cast<Word*>(p.out + row * p.row_bytes)[c] = word[r][w];
        }
      }
    }
  }
  if (!p.counter) return;
  if (lane == 0) {
    if (from_x) atomicAdd(found, static_cast<unsigned long long>(from_x));
    if (from_previous) atomicAdd(found + 1, static_cast<unsigned long long>(from_previous));
    if (from_cache) atomicAdd(found + 2, static_cast<unsigned long long>(from_cache));
  }
  __syncthreads();
  if (threadIdx.x < 3 && found[threadIdx.x] > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counter) + threadIdx.x, found[threadIdx.x]);
  }
}

template <int BYTES>
const char* gather(const GatherRows& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * BYTES < p.row_bytes) lanes *= 2;
  const int granule = lanes * BYTES < 128 ? lanes * BYTES : 128;
  const int rows_of_block = kThreads / lanes * kRowsAtOnce;
  int64_t blocks = (p.num_rows + rows_of_block - 1) / rows_of_block;
  int64_t most = 1 << 20;
  if (p.x_on_host) {
    // One block on every fourth multiprocessor saturates the bus. More blocks would only delay kernels of
    // other streams.
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    most = (processors + 3) / 4;
  }
  if (blocks > most) blocks = most;
  gather_rows_kernel<BYTES>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, lanes, granule);
  return last_error();
}

}  // namespace

const char* match(const Match& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.num_ids == 0) return nullptr;
  if (const char* error = start(p.map, stream)) return error;
  if (p.num_previous > 0)
    note_previous_kernel<<<blocks_for(p.num_previous), kThreads, 0, stream>>>(p);
  match_kernel<<<blocks_for(p.num_ids), kThreads, 0, stream>>>(p);
  return last_error();
}

const char* match_degree(const MatchDegree& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.num_batches == 0) return nullptr;
  if (const char* error = start(p.map, stream)) return error;
  const cudaError_t error =
      cudaMemsetAsync(p.count, 0, static_cast<size_t>(p.num_batches * p.num_batches) * 8, stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  int64_t longest = 0;
  for (int64_t b = 0; b < p.num_batches; ++b) {
    const int64_t size = p.begin[b + 1] - p.begin[b];
    longest = size > longest ? size : longest;
  }
  if (longest == 0) return nullptr;
  constexpr int64_t kIdsOfThread = 4;  // reduces atomic additions to the global counts
  const dim3 grid(blocks_for((longest + kIdsOfThread - 1) / kIdsOfThread),
                  static_cast<unsigned>(p.num_batches));
  match_degree_kernel<<<grid, kThreads, 0, stream>>>(p);
  return last_error();
}

const char* gather_rows(const GatherRows& p, void* stream_) {
  if (p.num_rows == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint64_t bits = static_cast<uint64_t>(p.row_bytes) | reinterpret_cast<uintptr_t>(p.x) |
                        reinterpret_cast<uintptr_t>(p.previous) |
                        reinterpret_cast<uintptr_t>(p.cache) | reinterpret_cast<uintptr_t>(p.out);
  if (bits % 16 == 0) return gather<16>(p, stream);
  if (bits % 8 == 0) return gather<8>(p, stream);
  if (bits % 4 == 0) return gather<4>(p, stream);
  if (bits % 2 == 0) return gather<2>(p, stream);
  return gather<1>(p, stream);
}

}  // namespace pyg_fast::cuda
