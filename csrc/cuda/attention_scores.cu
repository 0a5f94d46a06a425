// Dot products of each head's channels with attention vectors, and their gradients.
#include "attention.cuh"
#include "columns.cuh"
#include "params/attention_scores.h"

namespace pyg_fast::cuda {
namespace {

constexpr int kNodeLanes = 8;  // threads per (node, head)

template <typename T>
__global__ void __launch_bounds__(kThreads) attention_scores_kernel(AttentionScores p) {
  using Acc = acc_t<T>;
  const int64_t count = p.num_rows * p.heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kNodeLanes);
  const int part = threadIdx.x % kNodeLanes;
  // All threads of a warp continue: they exchange sums.
  constexpr int kNodes = kThreads / kNodeLanes;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kNodes + threadIdx.x / kNodeLanes;
  for (; __any_sync(kWarpMask, at < count); at += step) {
    Acc sum[AttentionScores::kMost] = {};
    if (at < count) {
      const T* x = static_cast<const T*>(p.x) + at * p.channels;
      const int64_t from = at % p.heads * p.channels;
      for (int64_t c = part; c < p.channels; c += kNodeLanes) {
        const Acc v = to_acc(x[c]);
        for (int k = 0; k < p.num_scores; ++k)
          sum[k] += v * static_cast<const Acc*>(p.att[k])[from + c];
      }
    }
#pragma unroll
    for (int offset = 1; offset < kNodeLanes; offset <<= 1) {
#pragma unroll
      for (int k = 0; k < AttentionScores::kMost; ++k)
        sum[k] += __shfl_xor_sync(kWarpMask, sum[k], offset);
    }
    if (part != 0 || at >= count) continue;
    for (int k = 0; k < p.num_scores; ++k) static_cast<Acc*>(p.alpha[k])[at] = sum[k];
  }
}

// A thread sums one column over rows at a fixed stride; `out`: [gridDim.y, num_scores, size].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    attention_scores_backward_kernel(AttentionScoresBackward p, acc_t<T>* out) {
  using Acc = acc_t<T>;
  __shared__ Acc part[AttentionScores::kMost][kColumnRows][32];
  const int64_t size = p.heads * p.channels;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  const bool valid = column < size;
  const int64_t head = valid ? column / p.channels : 0;
  const int group = threadIdx.x / 32;
  Acc att[AttentionScores::kMost], sum[AttentionScores::kMost] = {};
#pragma unroll
  for (int k = 0; k < AttentionScores::kMost; ++k)
    att[k] = valid && k < p.num_scores ? static_cast<const Acc*>(p.att[k])[column] : Acc(0);
  int64_t row = static_cast<int64_t>(blockIdx.y) * kColumnRows + group;
  for (; valid && row < p.num_rows; row += static_cast<int64_t>(gridDim.y) * kColumnRows) {
    const int64_t at = row * size + column;
    const Acc x = to_acc(static_cast<const T*>(p.x)[at]);
    Acc grad = 0;
#pragma unroll
    for (int k = 0; k < AttentionScores::kMost; ++k) {
      if (k >= p.num_scores) break;
      const Acc g = static_cast<const Acc*>(p.grad_alpha[k])[row * p.heads + head];
      grad += g * att[k];
      sum[k] += g * x;
    }
    static_cast<T*>(p.grad_x)[at] = from_acc<T>(grad);
  }
#pragma unroll
  for (int k = 0; k < AttentionScores::kMost; ++k) {
    if (k >= p.num_scores) break;
    const Acc total = sum_of_block(sum[k], part[k]);
    if (group == 0 && valid) out[(blockIdx.y * p.num_scores + k) * size + column] = total;
  }
}

}  // namespace

const char* attention_scores(const AttentionScores& p, void* stream_) {
  if (p.num_rows == 0 || p.heads == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    const unsigned blocks = blocks_for(p.num_rows * p.heads * kNodeLanes);
    attention_scores_kernel<decltype(element)><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

int64_t attention_scores_backward_scratch(const AttentionScoresBackward& p) {
  const int64_t blocks = column_blocks(p.num_rows);
  return blocks > 1 ? blocks * p.num_scores * p.heads * p.channels * acc_bytes(p.dtype) : 0;
}

const char* attention_scores_backward(const AttentionScoresBackward& p, void* scratch, void* stream_) {
  const int64_t size = p.heads * p.channels;
  if (size == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    using Acc = acc_t<T>;
    const auto blocks = static_cast<unsigned>(column_blocks(p.num_rows));
    auto* parts = static_cast<Acc*>(scratch ? scratch : p.grad_att);
    const dim3 grid(static_cast<unsigned>((size + 31) / 32), blocks);
    attention_scores_backward_kernel<T><<<grid, kThreads, 0, stream>>>(p, parts);
    if (scratch) {
      const int64_t columns = p.num_scores * size;
      const dim3 few(static_cast<unsigned>((columns + 31) / 32), 1);
      sum_columns_kernel<Acc><<<few, kThreads, 0, stream>>>(
          parts, static_cast<Acc*>(p.grad_att), blocks, columns);
    }
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
