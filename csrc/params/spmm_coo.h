// Sums and dot products over a coordinate list in any order.
#pragma once
#include "common.h"

namespace pyg_fast {

// out[i] = row_scale[i] * sum_{e: dst[e] == i} value[e] * col_scale[src[e]] * x[src[e]]
//          + diag[i] * x[i]
// Sums run in acc, as in Spmm; value, scales and diag may be nullptr.
struct SpmmCoo {
  Coo coo;
  DType dtype = DType::f32;
  bool value_acc = false;  // value is stored as acc
  int64_t dim = 0;
  const void* x = nullptr;          // [num_src, dim]
  const void* value = nullptr;      // [num_edges]
  const void* row_scale = nullptr;  // [num_dst] acc
  const void* col_scale = nullptr;  // [num_src] acc
  const void* diag = nullptr;       // [num_dst] acc (num_src == num_dst)
  void* out = nullptr;              // [num_dst, dim]
  int64_t* invalid = nullptr;       // [1] number of invalid edges, or nullptr: not counted
  bool report = false;              // whether CUDA records an invalid edge
};

// out[e] = row_scale[dst[e]] * col_scale[src[e]] * <a[dst[e]], b[src[e]]>, 0 for skipped edges.
struct SddmmCoo {
  Coo coo;
  DType dtype = DType::f32;  // of a, b and out
  int64_t dim = 0;
  const void* a = nullptr;          // [num_dst, dim]
  const void* b = nullptr;          // [num_src, dim]
  const void* row_scale = nullptr;  // [num_dst] acc or nullptr
  const void* col_scale = nullptr;  // [num_src] acc or nullptr
  void* out = nullptr;              // [num_edges]
};

namespace cpu {
// Destinations [begin, end): each call walks all edges. The call that begins at 0 writes p.invalid.
void spmm_coo(const SpmmCoo& p, int64_t dst_begin, int64_t dst_end);
void sddmm_coo(const SddmmCoo& p, int64_t edge_begin, int64_t edge_end);
}  // namespace cpu

namespace cuda {
// Uses atomic additions: fast, but the last bits of a sum vary. f16 and bf16 accumulate in scratch.
int64_t spmm_coo_scratch(const SpmmCoo& p);
const char* spmm_coo(const SpmmCoo& p, void* scratch, void* stream);

const char* sddmm_coo(const SddmmCoo& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
