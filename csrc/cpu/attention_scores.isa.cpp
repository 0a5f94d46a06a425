// Dot products of each head's channels with attention vectors, and their gradients.
#include "head_features.h"
#include "params/attention_scores.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename T>
void attention_scores_rows(const AttentionScores& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  constexpr int64_t kBlock = 64;
  const Columns columns(p.heads, p.channels);
  HeadDots<Acc> dots[AttentionScores::kMost] = {HeadDots<Acc>(columns), HeadDots<Acc>(columns)};
  for (int k = 0; k < p.num_scores; ++k) dots[k].set(static_cast<const Acc*>(p.att[k]));
  int64_t nodes[kBlock + kPrefetchEdges];
  for (int64_t row = row_begin; row < row_end; row += kBlock) {
    const int64_t count = row_end - row < kBlock ? row_end - row : kBlock;
    for (int64_t e = 0; e < kBlock + kPrefetchEdges; ++e) nodes[e] = row + (e < count ? e : 0);
    for (int k = 0; k < p.num_scores; ++k) {
      Acc* alpha = static_cast<Acc*>(p.alpha[k]) + row * p.heads;
      dots[k].dots(static_cast<const T*>(p.x), nodes, count, alpha, p.heads);
    }
  }
}

void attention_scores(const AttentionScores& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    attention_scores_rows<typename decltype(type)::type>(p, row_begin, row_end);
  });
}

template <typename T, bool kBoth>
void attention_scores_backward_rows(const AttentionScoresBackward& p, int64_t row_begin,
                                    int64_t row_end, acc_t<T>* grad_att) {
  using Acc = acc_t<T>;
  const int64_t size = p.heads * p.channels;
  const auto* att = static_cast<const Acc*>(p.att[0]);
  const auto* more = static_cast<const Acc*>(p.att[1]);
  const int64_t num_sums = (kBoth ? 2 : 1) * size;
  Scratch<Acc> scratch;
  Acc* sum = scratch.of_size(2 * num_sums);
  LongSums<Acc> sums(sum, num_sums);
  sums.start();
  for (int64_t row = row_begin; row < row_end; ++row) {
    if ((row - row_begin) % kSumBlock == 0) sums.next();
    const T* x = static_cast<const T*>(p.x) + row * size;
    T* grad_x = static_cast<T*>(p.grad_x) + row * size;
    const T* more_grad_x =
        p.more_grad_x ? static_cast<const T*>(p.more_grad_x) + row * size : nullptr;
    for (int64_t h = 0; h < p.heads; ++h) {
      const Acc g = static_cast<const Acc*>(p.grad_alpha[0])[row * p.heads + h];
      const Acc of_more =
          kBoth ? static_cast<const Acc*>(p.grad_alpha[1])[row * p.heads + h] : Acc{0};
      const auto add = [&](auto v, int64_t f) PYG_FAST_ALWAYS {
        constexpr int V = decltype(v)::value;
        const auto of_x = load<V>(x + f);
        auto grad = g * load<V>(att + f);
        store<V>(sum + f, load<V>(sum + f) + g * of_x);
        if constexpr (kBoth) {
          grad += of_more * load<V>(more + f);
          store<V>(sum + size + f, load<V>(sum + size + f) + of_more * of_x);
        }
        if (more_grad_x) grad += load<V>(more_grad_x + f);
        store<V>(grad_x + f, grad);
      };
      for_chunks<kLanes<T>>(h * p.channels, (h + 1) * p.channels, add);
    }
  }
  sums.end();
  __builtin_memcpy(grad_att, sum, static_cast<size_t>(num_sums) * sizeof(Acc));
}

void attention_scores_backward(const AttentionScoresBackward& p, int64_t row_begin, int64_t row_end,
                               void* grad_att) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    auto* sum = static_cast<acc_t<T>*>(grad_att);
    p.num_scores > 1 ? attention_scores_backward_rows<T, true>(p, row_begin, row_end, sum)
                     : attention_scores_backward_rows<T, false>(p, row_begin, row_end, sum);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(attention_scores, (const AttentionScores& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(attention_scores_backward,
                (const AttentionScoresBackward& p, int64_t row_begin, int64_t row_end,
                 void* grad_att),
                (p, row_begin, row_end, grad_att))
