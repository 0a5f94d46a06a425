// Dot products of each head's channels with attention vectors.
#pragma once
#include "common.h"

namespace pyg_fast {

// The terms of GAT's logits, for one or both ends of the edges at once:
//   alpha[k][i, h] = <x[i, h], att[k][h]> for k < num_scores
struct AttentionScores {
  static constexpr int kMost = 2;

  DType dtype = DType::f32;
  int num_scores = 1;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t channels = 0;
  const void* x = nullptr;      // [num_rows, heads, channels]
  const void* att[kMost] = {};  // [heads, channels] acc
  void* alpha[kMost] = {};      // [num_rows, heads] acc
};

//   grad_x[i, h] = sum_k grad_alpha[k][i, h] * att[k][h] + more_grad_x[i, h]
//   grad_att[k, h] = sum_i grad_alpha[k][i, h] * x[i, h]
struct AttentionScoresBackward {
  DType dtype = DType::f32;
  int num_scores = 1;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t channels = 0;
  const void* x = nullptr;                              // [num_rows, heads, channels]
  const void* att[AttentionScores::kMost] = {};         // [heads, channels] acc
  const void* grad_alpha[AttentionScores::kMost] = {};  // [num_rows, heads] acc
  const void* more_grad_x = nullptr;                    // [num_rows, heads, channels] or nullptr
  void* grad_x = nullptr;                               // [num_rows, heads, channels]
  void* grad_att = nullptr;                             // [num_scores, heads, channels] acc
};

namespace cpu {
void attention_scores(const AttentionScores& p, int64_t row_begin, int64_t row_end);
// Adds the contribution of these rows to grad_att [num_scores, heads, channels] acc; does not write
// p.grad_att.
void attention_scores_backward(const AttentionScoresBackward& p, int64_t row_begin, int64_t row_end,
                               void* grad_att);
}  // namespace cpu

namespace cuda {
const char* attention_scores(const AttentionScores& p, void* stream);
// Partial sums of grad_att, one per block.
int64_t attention_scores_backward_scratch(const AttentionScoresBackward& p);
const char* attention_scores_backward(const AttentionScoresBackward& p, void* scratch,
                                      void* stream);
}  // namespace cuda

}  // namespace pyg_fast
