// Parameters that GAT and GATv2 share.
#pragma once
#include "common.h"

namespace pyg_fast {

// Attention. The logit of an edge e = (j, i) and head h is
//   GAT:   leaky(alpha_src[j, h] + alpha_dst[i, h] + alpha_edge[id, h])
//   GATv2: sum_c att[h, c] * leaky(x[j, h, c] + x_dst[i, h, c])
// with leaky(s) = s > 0 ? s : negative_slope * s. The weight p[e, h] is the softmax of the logits over
// the edges of i. In addition to the listed edges, row i < num_loops has a self-loop of node i.
// The id of a listed edge is perm[e] (or e); the id of the loop of i is csr.num_edges + i. The graph and
// its transpose use the same ids. Dropout: factor[e, h] = 1 / (1 - dropout) if keeps(...) of dropout.h is
// true for id and head, else 0.
//
// The forward writes `softmax` [num_rows, 2, heads] acc for the backward: (m, r) with p = exp(logit - m) * r,
// 0 for an empty row. m is a logit near the largest (on a CPU the largest), r the inverse of the sum of
// exp(logit - m). The single number m - log(r) would lose digits: near 1e4, float32 rounds it by 1e-3.
struct Attention {
  Csr csr;
  DType dtype = DType::f32;  // of x, x_dst, att and out unless stated otherwise
  bool out_acc = false;      // out and bias (backward: grad) are stored as acc
  int64_t num_loops = 0;     // at most num_rows and num_cols
  int64_t heads = 0;
  int64_t channels = 0;
  double negative_slope = 0;
  double dropout = 0;             // 0 to 1; 1 drops everything
  const int64_t* seed = nullptr;  // [1], on the features' device; read if dropout > 0 only
};

}  // namespace pyg_fast
