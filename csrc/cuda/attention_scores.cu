// Dot products of each head's channels with attention vectors, and their gradients.
#include "node_heads.cuh"
#include "params/attention_scores.h"

namespace pyg_fast::cuda {
namespace {

constexpr int kMost = AttentionScores::kMost;

// LANES threads per (node, head) read VEC channels each. WIDE: several times, for more channels than fit
// at once; otherwise a thread keeps its part of the attention vectors.
template <typename T, int VEC, int LANES, bool WIDE>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    attention_scores_kernel(AttentionScores p, int64_t nodes) {
  using Acc = acc_t<T>;
  constexpr int kSteps = VEC == 1 && sizeof(Acc) == 4 ? 8 : 4;  // pairs in flight per thread
  const int64_t count = p.num_rows * p.heads;
  NodeHead<LANES> pair(p.heads, nodes);
  Acc att[kMost][VEC] = {};
  const auto read_att = [&](int64_t c) {
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k >= p.num_scores) break;
      const auto v = load<Acc, VEC>(static_cast<const Acc*>(p.att[k]) + pair.head * p.channels + c);
#pragma unroll
      for (int i = 0; i < VEC; ++i) att[k][i] = v.data[i];
    }
  };
  const int64_t channel = pair.part * VEC;
  if (!WIDE && channel < p.channels) read_att(channel);

  // The scores of some pairs of this thread.
  const auto add = [&](auto number, bool valid) {
    constexpr int steps = decltype(number)::value;
    const T* x = static_cast<const T*>(p.x) + pair.at * p.channels;
    Acc sum[steps][kMost] = {};
#pragma unroll 1
    for (int64_t c = channel; valid && c < p.channels; c += LANES * VEC) {
      Pack<T, VEC> v[steps];
#pragma unroll
      for (int u = 0; u < steps; ++u) v[u] = load<T, VEC>(x + u * pair.step * p.channels + c);
      if constexpr (WIDE) read_att(c);
#pragma unroll
      for (int u = 0; u < steps; ++u) {
#pragma unroll
        for (int k = 0; k < kMost; ++k) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) sum[u][k] += element(v[u], i) * att[k][i];
        }
      }
      if constexpr (!WIDE) break;
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k >= p.num_scores) break;
#pragma unroll
      for (int u = 0; u < steps; ++u) sum[u][k] = pair.sum(sum[u][k]);
      if (pair.part != 0 || !pair.active || !valid) continue;
      Acc* to = static_cast<Acc*>(p.alpha[k]) + pair.at;
#pragma unroll
      for (int u = 0; u < steps; ++u) to[u * pair.step] = sum[u][k];
    }
    pair.first += steps * pair.step;
    pair.at += steps * pair.step;
  };
  // While all pairs of the warp exist, inactive ones included, whose scores are not written.
  const auto add_all = [&](auto number) {
    constexpr int steps = decltype(number)::value;
    while (pair.first + 32 / LANES - 1 + (steps - 1) * pair.step < count) add(number, true);
  };
  add_all(std::integral_constant<int, kSteps>{});
  add_all(std::integral_constant<int, kSteps / 2>{});
  while (pair.first < count) add(std::integral_constant<int, 1>{}, pair.active && pair.at < count);
}

// A thread sums its columns over some rows; `out`: [gridDim.y, num_scores, size].
template <typename T, int VEC>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    attention_scores_backward_kernel(AttentionScoresBackward p, acc_t<T>* out, int width) {
  using Acc = acc_t<T>;
  // Rows in flight per thread.
  constexpr int kSteps = VEC == 8 ? 1 : VEC > 1 ? 2 : sizeof(Acc) == 4 ? 8 : 4;
  __shared__ Acc part[VEC][kThreads];
  const int64_t size = p.heads * p.channels;
  const ColumnThread<VEC> at(size, width);
  const int64_t head = at.valid ? at.column / p.channels : 0;
  Acc att[kMost][VEC] = {}, sum[kMost][VEC] = {};
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (k >= p.num_scores || !at.valid) break;
#pragma unroll
    for (int c = 0; c < VEC; ++c) att[k][c] = static_cast<const Acc*>(p.att[k])[at.column + c];
  }
  at.for_rows<kSteps>(p.num_rows, [&](int64_t row, auto number) {
    constexpr int steps = decltype(number)::value;
    const auto* of_x = static_cast<const T*>(p.x) + at.column;
    const auto* more = static_cast<const T*>(p.more_grad_x) + (p.more_grad_x ? at.column : 0);
    Pack<T, VEC> x[steps], grad_x[steps] = {};
    Acc grad[steps][kMost] = {};
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      const int64_t r = row + u * at.step;
      x[u] = load<T, VEC>(of_x + r * size);
      if (more) grad_x[u] = load<T, VEC>(more + r * size);
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k < p.num_scores)
          grad[u][k] = static_cast<const Acc*>(p.grad_alpha[k])[r * p.heads + head];
      }
    }
#pragma unroll
    for (int u = 0; u < steps; ++u) {
      Pack<T, VEC> out_x;
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        Acc total = element(grad_x[u], c);
#pragma unroll
        for (int k = 0; k < kMost; ++k) {
          total += grad[u][k] * att[k][c];
          sum[k][c] += grad[u][k] * element(x[u], c);
        }
        out_x.data[c] = from_acc<T>(total);
      }
      T* to = static_cast<T*>(p.grad_x) + (row + u * at.step) * size + at.column;
      *reinterpret_cast<Pack<T, VEC>*>(to) = out_x;  // for L2: a product reads it next
    }
  });
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (k >= p.num_scores) break;
    at.sum_of_groups(sum[k], part);
    if (at.group > 0 || !at.valid) continue;
    Acc* to = out + (blockIdx.y * p.num_scores + k) * size + at.column;
#pragma unroll
    for (int c = 0; c < VEC; ++c) to[c] = sum[k][c];
  }
}

template <typename T>
int backward_vec(const AttentionScoresBackward& p) {
  return p.channels % kVec<T> == 0
             ? column_vec<T>(p.heads * p.channels, p.x, p.more_grad_x, p.grad_x)
             : 1;
}

template <typename T>
ColumnShape shape_of_backward(const AttentionScoresBackward& p) {
  return column_shape(p.num_rows, p.heads * p.channels, backward_vec<T>(p));
}

}  // namespace

const char* attention_scores(const AttentionScores& p, void* stream_) {
  if (p.num_rows == 0 || p.heads == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    const auto with = [&](auto vec) {
      const int64_t vectors = (p.channels + vec - 1) / vec;
      dispatch_lanes<32>(vectors, [&](auto lanes) {
        const NodeHeadShape s = node_head_shape(p.num_rows, p.heads, lanes);
        if constexpr (lanes == 32) {
          if (vectors > lanes) {
            attention_scores_kernel<T, vec, lanes, true>
                <<<s.blocks, kThreads, 0, stream>>>(p, s.nodes);
            return;
          }
        }
        attention_scores_kernel<T, vec, lanes, false>
            <<<s.blocks, kThreads, 0, stream>>>(p, s.nodes);
      });
    };
    // Vectors must not cross a head. Those of sums take up to 32 bytes.
    const auto aligned32 = [](const void* to) {
      return (reinterpret_cast<uintptr_t>(to) & 31) == 0;
    };
    const bool vectors =
        p.channels % kVec<T> == 0 && aligned16(p.x) && aligned32(p.att[0]) && aligned32(p.att[1]);
    if (vectors) with(std::integral_constant<int, kVec<T>>{});
    else with(std::integral_constant<int, 1>{});
    return last_error();
  });
}

int64_t attention_scores_backward_scratch(const AttentionScoresBackward& p) {
  int64_t blocks = 0;
  dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    blocks = shape_of_backward<decltype(element)>(p).blocks;
    return nullptr;
  });
  return blocks > 1 ? blocks * p.num_scores * p.heads * p.channels * acc_bytes(p.dtype) : 0;
}

const char* attention_scores_backward(const AttentionScoresBackward& p, void* scratch,
                                      void* stream_) {
  const int64_t size = p.heads * p.channels;
  if (size == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) -> const char* {
    using T = decltype(element);
    using Acc = acc_t<T>;
    const ColumnShape s = shape_of_backward<T>(p);
    auto* grad_att = static_cast<Acc*>(p.grad_att);
    auto* parts = s.blocks > 1 ? static_cast<Acc*>(scratch) : grad_att;
    const auto kernel = backward_vec<T>(p) > 1 ? attention_scores_backward_kernel<T, kVec<T>>
                                               : attention_scores_backward_kernel<T, 1>;
    kernel<<<s.grid(), kThreads, 0, stream>>>(p, parts, s.width);
    if (s.blocks > 1)
      sum_column_blocks<Acc>(parts, grad_att, s.blocks, p.num_scores * size, stream);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
