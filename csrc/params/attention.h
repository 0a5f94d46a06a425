// What both kinds of graph attention share.
#pragma once
#include "common.h"

namespace pyg_fast {

// Attention. Of an edge e = (j, i) and head h the logit is
//   GAT:   leaky(alpha_src[j, h] + alpha_dst[i, h] + alpha_edge[id, h])
//   GATv2: sum_c att[h, c] * leaky(x[j, h, c] + x_dst[i, h, c])
// with leaky(s) = s > 0 ? s : negative_slope * s; its weight p[e, h] is the softmax of the logits
// over the edges of i. Beside the listed edges, row i < num_loops has one from node i itself.
// The id of a listed edge is perm[e] (or e), that of the loop of i is csr.num_edges + i: the same
// in the graph and in its transpose. Dropout keeps id and head where keeps(...) of dropout.h says
// so: factor[e, h] = 1 / (1 - dropout), else 0.
struct Attention {
  Csr csr;
  DType dtype = DType::f32;  // of x, x_dst, att and of out unless told otherwise
  bool out_acc = false;      // out and bias (backward: grad) are stored as acc
  int64_t num_loops = 0;     // at most num_rows and num_cols
  int64_t heads = 0;
  int64_t channels = 0;
  double negative_slope = 0;
  double dropout = 0;             // 0 to 1; at 1 nothing is kept
  const int64_t* seed = nullptr;  // [1], where the features are; read if dropout > 0 only
};

}  // namespace pyg_fast
