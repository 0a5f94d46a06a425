// GATv2: the score applies the leaky ReLU to all channels.
#pragma once
#include "attention.h"

namespace pyg_fast {

// out[i, h] = sum_e factor * p * x[j, h] + bias[h]; y and softmax as in Gat.
struct Gatv2 : Attention {
  const void* x = nullptr;      // [num_cols, heads, channels]
  const void* x_dst = nullptr;  // [num_rows, heads, channels]
  const void* att = nullptr;    // [heads, channels]
  const void* bias = nullptr;   // [heads, channels] or nullptr
  void* out = nullptr;          // [num_rows, heads, channels]
  void* y = nullptr;            // [num_rows, heads, channels] acc
  void* softmax = nullptr;      // [num_rows, 2, heads] acc
};

// Backward of Gatv2 in two passes. With s[e, h, c] = x[j, h, c] + x_dst[i, h, c] and dl[e, h] = p *
// (factor * <grad[i, h], x[j, h]> - G[i, h]), over the graph (`csr`):
//   stat[i] = (softmax[i, :, :], G[i, :]); on CUDA the two numbers of a head's softmax are adjacent
//   grad_x_dst[i, h, c] = att[h, c] * sum_e dl * leaky'(s)
//   grad_att[h, c] = sum over all edges of dl * leaky(s)
// and over the transpose (`t_csr`):
//   grad_x[j, h, c] = sum_e factor * p * grad[i, h, c] + att[h, c] * dl * leaky'(s)
struct Gatv2Backward : Attention {
  Csr t_csr;
  const void* x = nullptr;        // [num_cols, heads, channels]
  const void* x_dst = nullptr;    // [num_rows, heads, channels]
  const void* att = nullptr;      // [heads, channels]
  const void* y = nullptr;        // [num_rows, heads, channels] acc
  const void* softmax = nullptr;  // [num_rows, 2, heads] acc
  const void* grad = nullptr;     // [num_rows, heads, channels]
  void* stat = nullptr;           // [num_rows, stat_size()] acc
  void* grad_x_dst = nullptr;     // [num_rows, heads, channels]
  void* grad_att = nullptr;       // [heads, channels] acc
  void* grad_x = nullptr;         // [num_cols, heads, channels]

  // Three numbers per head; even, to align pairs.
  PYG_FAST_DEVICE int64_t stat_size() const { return (3 * heads + 1) / 2 * 2; }
};

namespace cpu {
void gatv2(const Gatv2& p, int64_t row_begin, int64_t row_end);
// Rows of the csr; grad_att [heads, channels] acc gets the contribution of these rows only.
void gatv2_backward_dst(const Gatv2Backward& p, int64_t row_begin, int64_t row_end, void* grad_att);
void gatv2_backward_src(const Gatv2Backward& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
int64_t gatv2_scratch(const Gatv2& p);
const char* gatv2(const Gatv2& p, void* scratch, void* stream);
// Partial sums of grad_att, one per block.
int64_t gatv2_backward_scratch(const Gatv2Backward& p);
const char* gatv2_backward(const Gatv2Backward& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
