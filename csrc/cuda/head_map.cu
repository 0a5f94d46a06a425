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

// A thread computes the same vector of some rows.
template <typename T, int VEC>
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
  const ColumnThread<VEC> at(heads * p.out, width);
  const int64_t head = at.column / p.out, place = at.column % p.out;
  const Acc* block = weight + head * head_step(p) + place;
  at.template for_rows<kSteps>(p.num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const int64_t from = row * p.heads + first + head, step = at.step * p.heads;
    const T* x = static_cast<const T*>(p.x) + from * p.in;
    Acc sum[steps][VEC] = {};
    for (int64_t i = 0; i < p.in; i += VEC) {
      Pack<T, VEC> v[steps];
#pragma unroll
      for (int u = 0; u < steps; ++u) v[u] = load<T, VEC>(x + u * step * p.in + i);
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const auto w = *reinterpret_cast<const Pack<Acc, VEC>*>(block + (i + k) * p.out);
#pragma unroll
        for (int u = 0; u < steps; ++u) {
#pragma unroll
          for (int c = 0; c < VEC; ++c) sum[u][c] += element(v[u], k) * w.data[c];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      const int64_t to = (from + u * step) * p.out + place;
      Pack<T, VEC> y;
      Pack<T, VEC> other = {};
      if (p.other) other = load<T, VEC>(static_cast<const T*>(p.other) + to);
#pragma unroll
      for (int c = 0; c < VEC; ++c) y.data[c] = from_acc<T>(sum[u][c] + element(other, c));
      *reinterpret_cast<Pack<T, VEC>*>(static_cast<T*>(p.y) + to) = y;  // for L2: it is read next
    }
  });
}

// A thread sums VEC x VEC products over some rows; `out`: [gridDim.y, features, heads, channels].
template <typename T, int VEC, typename Out>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    head_map_weight_kernel(HeadMapWeight p, Out* out, int64_t products, int width) {
  using Acc = acc_t<T>;
  constexpr int kSteps = 2;  // rows in flight per thread
  __shared__ Acc part[VEC * VEC][kThreads];
  const ColumnThread<VEC * VEC> at(products, width);
  const int64_t tile = at.column / (VEC * VEC), channel_tiles = p.channels / VEC;
  const int64_t c = tile % channel_tiles * VEC, head = tile / channel_tiles % p.heads,
                d = tile / channel_tiles / p.heads * VEC;
  Acc sum[VEC * VEC] = {};
  at.template for_rows<kSteps>(p.num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const int64_t from = row * p.heads + head, step = at.step * p.heads;
    const T* x = static_cast<const T*>(p.x) + from * p.features + d;
    const T* grad = static_cast<const T*>(p.grad) + from * p.channels + c;
    Pack<T, VEC> of_x[steps], of_grad[steps];
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      of_x[u] = load<T, VEC>(x + u * step * p.features);
      of_grad[u] = load<T, VEC>(grad + u * step * p.channels);
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
  Out* to = out + blockIdx.y * products;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      to[((d + i) * p.heads + head) * p.channels + c + j] = from_acc<Out>(sum[i * VEC + j]);
  }
}

// Vectors must not cross a head.
template <typename T, typename... Pointers>
bool in_vectors(int64_t in, int64_t out, Pointers... rows) {
  return in % kHeadVec<T> == 0 && out % kHeadVec<T> == 0 && (aligned16(rows) && ...);
}

template <typename T>
int weight_vec(const HeadMapWeight& p) {
  return in_vectors<T>(p.features, p.channels, p.x, p.grad) ? kHeadVec<T> : 1;
}

template <typename T>
ColumnShape shape_of_weight(const HeadMapWeight& p) {
  const int vec = weight_vec<T>(p);
  return column_shape(p.num_rows, p.features * p.heads * p.channels, vec * vec);
}

}  // namespace

const char* head_map(const HeadMap& p, void* stream) {
  if (p.num_rows == 0 || p.out == 0) return nullptr;
  if (head_step(p) * acc_bytes(p.dtype) > kSharedBytes) return "a head's block of weight is too large";
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    const bool vectors = in_vectors<T>(p.in, p.out, p.x, p.other, p.y);
    const int64_t heads = heads_of_block(p);
    const ColumnShape s = column_shape(p.num_rows, heads * p.out, vectors ? kHeadVec<T> : 1);
    dim3 grid = s.grid();
    grid.z = static_cast<unsigned>((p.heads + heads - 1) / heads);
    const auto bytes = static_cast<size_t>(heads * head_step(p) * acc_bytes(p.dtype));
    const auto kernel = vectors ? head_map_kernel<T, kHeadVec<T>> : head_map_kernel<T, 1>;
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
      const auto kernel = weight_vec<T>(p) > 1 ? head_map_weight_kernel<T, kHeadVec<T>, Out>
                                               : head_map_weight_kernel<T, 1, Out>;
      kernel<<<s.grid(), kThreads, 0, stream>>>(p, to, products, s.width);
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
