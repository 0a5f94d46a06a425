// GAT: the score of an edge is a sum of one number for each of its ends.
#pragma once
#include "attention.h"

namespace pyg_fast {

// out[i, h] = sum_e factor * p * x[j, h] + bias[h]; a row without edges gives the bias.
// The kernel writes the inputs of the backward, all of type acc, if these pointers (all or none) are set:
//   y[i, h] = out without bias; y_plus[i, h] = the part of y from edges of positive s;
//   softmax as in Attention; mass_plus[i, h] = sum of p, before dropout, over edges of positive s.
struct Gat : Attention {
  const void* x = nullptr;           // [num_cols, heads, channels]
  const void* alpha_src = nullptr;   // [num_cols, heads] acc
  const void* alpha_dst = nullptr;   // [num_rows, heads] acc
  const void* alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  const void* alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
  const void* bias = nullptr;        // [heads, channels] or nullptr
  void* out = nullptr;               // [num_rows, heads, channels]
  void* y = nullptr;                 // [num_rows, heads, channels]
  void* y_plus = nullptr;            // [num_rows, heads, channels]
  void* softmax = nullptr;           // [num_rows, 2, heads]
  void* mass_plus = nullptr;         // [num_rows, heads]
};

// Backward of Gat, first for destinations. With G[i, h] = <grad[i, h], y[i, h]>:
//   stat[i] = (alpha_dst[i, :], softmax[i, :, :], G[i, :]); on CUDA the four numbers of a head are adjacent
//   grad_alpha_dst[i, h] = (1 - negative_slope) * (<grad[i, h], y_plus[i, h]> - G * mass_plus)
// Then over the transpose (`csr`: a row for each source j; col holds destinations i), with ds[e, h] = p *
// (factor * <grad[i, h], x[j, h]> - G[i, h]) * leaky'(s):
//   grad_x[j, h] = sum_e factor * p * grad[i, h];  grad_alpha_src[j, h] = sum_e ds[e, h]
//   grad_alpha_edge[id, h] = ds[e, h], the same for loops; ids without an edge are not written.
struct GatBackward : Attention {
  const void* x = nullptr;           // [num_rows, heads, channels]
  const void* alpha_src = nullptr;   // [num_rows, heads] acc
  const void* alpha_dst = nullptr;   // [num_cols, heads] acc
  const void* alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  const void* alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
  const void* y = nullptr;           // [num_cols, heads, channels] acc, like the next three
  const void* y_plus = nullptr;
  const void* softmax = nullptr;    // [num_cols, 2, heads]
  const void* mass_plus = nullptr;  // [num_cols, heads]
  const void* grad = nullptr;       // [num_cols, heads, channels]
  void* stat = nullptr;             // [num_cols, 4, heads] acc, CUDA: [num_cols, heads, 4]
  void* grad_alpha_dst = nullptr;   // [num_cols, heads] acc
  void* grad_x = nullptr;           // [num_rows, heads, channels]
  void* grad_alpha_src = nullptr;   // [num_rows, heads] acc
  void* grad_alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  void* grad_alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
};

namespace cpu {
void gat(const Gat& p, int64_t row_begin, int64_t row_end);
// Process destinations [begin, end) (columns of the csr); after all of them, sources.
void gat_backward_dst(const GatBackward& p, int64_t begin, int64_t end);
void gat_backward_src(const GatBackward& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
int64_t gat_scratch(const Gat& p);
const char* gat(const Gat& p, void* scratch, void* stream);
// For heads wider than one tile: one partial sum per tile.
int64_t gat_backward_scratch(const GatBackward& p);
const char* gat_backward(const GatBackward& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
