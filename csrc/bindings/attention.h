// Checks and parameters that the bindings of GAT and GATv2 share.
#pragma once
#include <algorithm>

#include "params/attention.h"
#include "stable.h"

namespace pyg_fast {

inline void check_features(const Tensor& t, const char* name, int64_t nodes, const Attention& p,
                           ScalarType type, const Tensor& on) {
  STD_TORCH_CHECK(
      t.dim() == 3 && t.size(0) == nodes && t.size(1) == p.heads && t.size(2) == p.channels, name,
      " must have shape [", nodes, ", ", p.heads, ", ", p.channels, "]");
  check_type(t, name, type);
  check_device(t, name, on);
}

// Checks a matrix with one number of type acc per node (or edge) and head.
inline void check_scores(const OptTensor& t, const char* name, int64_t rows, const Attention& p,
                         ScalarType acc, const Tensor& on) {
  if (!t) return;
  check_matrix(*t, name, rows, p.heads);
  check_type(t, name, acc);
  check_device(t, name, on);
}

inline void check_softmax(const Tensor& t, int64_t rows, const Attention& p, ScalarType acc,
                          const Tensor& on) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == rows && t.size(1) == 2 && t.size(2) == p.heads,
                  "softmax must have shape [", rows, ", 2, ", p.heads, "]");
  check_type(t, "softmax", acc);
  check_device(t, "softmax", on);
}

inline void check_per_channel(const OptTensor& t, const char* name, const Attention& p,
                              ScalarType type, const Tensor& on) {
  STD_TORCH_CHECK(!t || t->numel() == p.heads * p.channels, name, " must have ",
                  p.heads * p.channels, " elements");
  check_type(t, name, type);
  check_device(t, name, on);
}

// Fills the parameters that all attention ops share.
inline void fill(Attention& p, const Csr& csr, const Tensor& x, const OptTensor& seed,
                 int64_t num_loops, double negative_slope, double dropout) {
  STD_TORCH_CHECK(x.dim() == 3, "x must have three dimensions, got ", x.dim());
  p.csr = csr;
  p.dtype = dtype_of(x, "x");
  p.heads = x.size(1);
  p.channels = x.size(2);
  p.num_loops = num_loops;
  p.negative_slope = negative_slope;
  p.dropout = dropout;
  STD_TORCH_CHECK(num_loops >= 0 && num_loops <= std::min(csr.num_rows, csr.num_cols),
                  "num_loops must be at most the nodes of either side");
  STD_TORCH_CHECK(dropout >= 0 && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
  STD_TORCH_CHECK(dropout == 0 || seed, "dropout needs a seed");
  check_vector(seed, "seed", 1);
  check_type(seed, "seed", ScalarType::Long);
  check_device(seed, "seed", x);
  p.seed = static_cast<const int64_t*>(pointer(seed));
}

inline Tensor empty_as(const Tensor& like, int64_t nodes, const Attention& p, ScalarType type) {
  return empty(like, {nodes, p.heads, p.channels}, type);
}

// Work of one pass over the edges: the features and an exponential per head.
inline int64_t work_of(const Attention& p) {
  return (p.csr.num_edges + p.csr.num_rows + p.csr.num_cols) * p.heads * (p.channels + 32) / 8;
}

}  // namespace pyg_fast
