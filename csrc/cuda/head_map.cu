// Linear maps of heads, and the gradients of their weight.
#include "columns.cuh"
#include "params/head_map.h"

namespace pyg_fast::cuda {
namespace {

// Numbers of a head that a thread reads or writes at once.
template <typename T>
constexpr int kHeadVec = sizeof(T) == 8 ? 2 : 4;

constexpr int64_t kSharedBytes = 48 << 10;
constexpr int64_t kWantedBytes = 24 << 10;  // of a block, so that several run at once

// Consecutive heads are this far apart in shared memory: in other banks.
__host__ __device__ inline int64_t head_step(const HeadMap& p) { return (p.in + 1) * p.out; }

// The heads of a block, whose blocks of the weight it keeps.
int64_t heads_of_block(const HeadMap& p) {
  const int64_t bytes = head_step(p) * acc_bytes(p.dtype);
  const int64_t heads = bytes > 0 ? kWantedBytes / bytes : p.heads;
  return heads < 1 ? 1 : heads < p.heads ? heads : p.heads;
}

// VEC of the numbers of a head, for one of the threads that share it. STRIDED as in Columns, for heads of any
// size.
template <int VEC, bool STRIDED>
struct OfHead {
  int64_t first, step, size;

  // `place`: VEC times the number of the thread.
  __device__ OfHead(int64_t place, int64_t size)
      : first(STRIDED ? place / VEC : place), step(STRIDED ? threads(size) : 1), size(size) {}
  __host__ __device__ static int64_t threads(int64_t size) { return (size + VEC - 1) / VEC; }

  __device__ int64_t at(int k) const { return first + k * step; }
  __device__ bool has(int k) const { return !STRIDED || at(k) < size; }

  // `p` is at the first.
  template <typename T>
  __device__ Pack<T, VEC, STRIDED> load(const T* p) const {
    if constexpr (!STRIDED) {
      return pyg_fast::cuda::load<T, VEC>(p);
    } else {
      Pack<T, VEC, true> pack;
#pragma unroll
      for (int k = 0; k < VEC; ++k) pack.data[k] = has(k) ? __ldg(p + k * step) : T{};
      return pack;
    }
  }
};

// A thread computes the same vector of some rows.
template <typename T, int VEC, bool STRIDED>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    head_map_kernel(HeadMap p, int64_t block_heads, int width) {
  using Acc = acc_t<T>;
  constexpr int kSteps = 4;  // rows in flight per thread
  extern __shared__ float4 memory[];
  auto* weight = reinterpret_cast<Acc*>(memory);  // [heads, in + 1, out]
  const int64_t first = blockIdx.z * block_heads;
  const int64_t left = p.heads - first, heads = left < block_heads ? left : block_heads;
  for (int64_t t = threadIdx.x; t < heads * p.in * p.out; t += kThreads) {
    const int64_t o = t % p.out, i = t / p.out % p.in, h = t / p.out / p.in;
    weight[h * head_step(p) + i * p.out + o] =
        to_acc(static_cast<const T*>(p.weight)[p.weight_at(first + h, i, o)]);
  }
  __syncthreads();
  using Outputs = OfHead<VEC, STRIDED>;
  const int64_t places = Outputs::threads(p.out) * VEC;
  const ColumnThread<VEC> at(heads * places, width);
  const int64_t head = at.column / places;
  const Outputs outputs(at.column % places, p.out);
  const Acc* block = weight + head * head_step(p) + outputs.first;
  at.template for_rows<kSteps>(p.num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const int64_t from = row * p.heads + first + head, step = at.step * p.heads;
    const T* x = static_cast<const T*>(p.x) + from * p.in;
    Acc sum[steps][VEC] = {};
    for (int64_t i = 0; i < p.in; i += VEC) {
      Pack<T, VEC, STRIDED> v[steps];
#pragma unroll
      for (int u = 0; u < steps; ++u)
        v[u] = Columns<VEC, 1, STRIDED>(i, p.in).load(x + u * step * p.in + i);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        if (STRIDED && i + k >= p.in) break;
        Pack<Acc, VEC, STRIDED> w;
        if constexpr (STRIDED) {
#pragma unroll
          for (int c = 0; c < VEC; ++c)
            w.data[c] = outputs.has(c) ? block[(i + k) * p.out + c * outputs.step] : Acc(0);
        } else {
          w = *reinterpret_cast<const Pack<Acc, VEC>*>(block + (i + k) * p.out);
        }
#pragma unroll
        for (int u = 0; u < steps; ++u) {
#pragma unroll
          for (int c = 0; c < VEC; ++c) sum[u][c] += element(v[u], k) * w.data[c];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      const int64_t to = (from + u * step) * p.out + outputs.first;
      Pack<T, VEC, STRIDED> y, other = {};
      if (p.other) other = outputs.load(static_cast<const T*>(p.other) + to);
#pragma unroll
      for (int c = 0; c < VEC; ++c) y.data[c] = from_acc<T>(sum[u][c] + element(other, c));
      if constexpr (STRIDED) {
#pragma unroll
        for (int c = 0; c < VEC; ++c) {
          if (outputs.has(c)) static_cast<T*>(p.y)[to + c * outputs.step] = y.data[c];
        }
      } else {  // for L2: it is read next
        *reinterpret_cast<Pack<T, VEC>*>(static_cast<T*>(p.y) + to) = y;
      }
    }
  });
}

// The tiles of VEC x VEC products.
template <int VEC>
__host__ __device__ int64_t tiles_of_weight(const HeadMapWeight& p) {
  return (p.features + VEC - 1) / VEC * p.heads * ((p.channels + VEC - 1) / VEC);
}

// A thread sums VEC x VEC products over some rows; `out`: [gridDim.y, features, heads, channels].
template <typename T, int VEC, bool STRIDED, typename Out>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    head_map_weight_kernel(HeadMapWeight p, Out* out, int width) {
  using Acc = acc_t<T>;
  using Part = OfHead<VEC, STRIDED>;
  constexpr int kSteps = 2;  // rows in flight per thread
  __shared__ Acc part[VEC * VEC][kThreads];
  const ColumnThread<VEC * VEC> at(tiles_of_weight<VEC>(p) * VEC * VEC, width);
  const int64_t tile = at.column / (VEC * VEC), channel_tiles = Part::threads(p.channels);
  const Part channels(tile % channel_tiles * VEC, p.channels),
      features(tile / channel_tiles / p.heads * VEC, p.features);
  const int64_t head = tile / channel_tiles % p.heads;
  Acc sum[VEC * VEC] = {};
  at.template for_rows<kSteps>(p.num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const int64_t from = row * p.heads + head, step = at.step * p.heads;
    const T* x = static_cast<const T*>(p.x) + from * p.features + features.first;
    const T* grad = static_cast<const T*>(p.grad) + from * p.channels + channels.first;
    Pack<T, VEC, STRIDED> of_x[steps], of_grad[steps];
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      of_x[u] = features.load(x + u * step * p.features);
      of_grad[u] = channels.load(grad + u * step * p.channels);
    }
#pragma unroll
    for (int u = 0; u < steps; ++u) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
#pragma unroll
        for (int j = 0; j < VEC; ++j)
          sum[i * VEC + j] += element(of_x[u], i) * element(of_grad[u], j);
      }
    }
  });
  at.sum_of_groups(sum, part);
  if (at.group > 0 || !at.valid) return;
  Out* to = out + blockIdx.y * p.features * p.heads * p.channels;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if (features.has(i) && channels.has(j))
        to[(features.at(i) * p.heads + head) * p.channels + channels.at(j)] =
            from_acc<Out>(sum[i * VEC + j]);
    }
  }
}

// Vectors must not cross a head.
template <typename T, typename... Pointers>
bool in_vectors(int64_t in, int64_t out, Pointers... rows) {
  return in % kHeadVec<T> == 0 && out % kHeadVec<T> == 0 && (aligned16(rows) && ...);
}

template <typename T>
ColumnShape shape_of_weight(const HeadMapWeight& p) {
  constexpr int kVecs = kHeadVec<T>;
  return column_shape(p.num_rows, tiles_of_weight<kVecs>(p) * kVecs * kVecs, kVecs * kVecs);
}

}  // namespace

const char* head_map(const HeadMap& p, void* stream) {
  if (p.num_rows == 0 || p.out == 0) return nullptr;
  if (head_step(p) * acc_bytes(p.dtype) > kSharedBytes)
    return "a head's block of weight is too large";
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    const bool vectors = in_vectors<T>(p.in, p.out, p.x, p.other, p.y);
    const int64_t heads = heads_of_block(p);
    constexpr int kVecs = kHeadVec<T>;
    const ColumnShape s =
        column_shape(p.num_rows, heads * ((p.out + kVecs - 1) / kVecs) * kVecs, kVecs);
    dim3 grid = s.grid();
    grid.z = static_cast<unsigned>((p.heads + heads - 1) / heads);
    const auto bytes = static_cast<size_t>(heads * head_step(p) * acc_bytes(p.dtype));
    const auto kernel =
        vectors ? head_map_kernel<T, kVecs, false> : head_map_kernel<T, kVecs, true>;
    kernel<<<grid, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(p, heads, s.width);
    return last_error();
  });
}

int64_t head_map_weight_scratch(const HeadMapWeight& p) {
  int64_t blocks = 0;
  dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    blocks = shape_of_weight<decltype(element)>(p).blocks;
    return nullptr;
  });
  return blocks > 1 ? blocks * p.features * p.heads * p.channels * acc_bytes(p.dtype) : 0;
}

const char* head_map_weight(const HeadMapWeight& p, void* scratch, void* stream_) {
  const int64_t products = p.features * p.heads * p.channels;
  if (products == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    using Acc = acc_t<T>;
    const ColumnShape s = shape_of_weight<T>(p);
    auto* out = static_cast<T*>(p.out);
    const auto into = [&](auto* to) {
      using Out = std::remove_pointer_t<decltype(to)>;
      const auto kernel = in_vectors<T>(p.features, p.channels, p.x, p.grad)
                              ? head_map_weight_kernel<T, kHeadVec<T>, false, Out>
                              : head_map_weight_kernel<T, kHeadVec<T>, true, Out>;
      kernel<<<s.grid(), kThreads, 0, stream>>>(p, to, s.width);
    };
    if (s.blocks == 1) {
      into(out);
    } else {
      auto* parts = static_cast<Acc*>(scratch);
      into(parts);
      sum_column_blocks(parts, out, s.blocks, products, stream);
    }
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
