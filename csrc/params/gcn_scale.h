// The symmetric normalisation of a GCN for a graph in CSR.
#pragma once
#include "common.h"

namespace pyg_fast {

// The scales of gcn_norm.h for a graph with sorted edges, and the weights of its loops, with
//   degree[i] = sum of value[perm[e]] over the edges e of row i
//   loop[i] = value[last_loop[i]], or fill_value if last_loop[i] < 0 or there is no `last_loop`
//   scale[i] = (degree[i] + loop[i])^(-1/2), 0 for a sum of 0;  diag[i] = scale * loop * scale
// Without `loops`, loop[i] is 0 and the kernel does not write `diag`.
struct GcnScale {
  Csr csr;                   // no col; without perm, num_edges is the number of values
  DType dtype = DType::f32;  // of value
  bool loops = false;
  double fill_value = 1;
  int64_t num_values = 0;
  const void* value = nullptr;         // [num_values]
  const int64_t* last_loop = nullptr;  // [num_rows] or nullptr
  void* scale = nullptr;               // [num_rows] acc
  void* diag = nullptr;                // [num_rows] acc
};

namespace cpu {
void gcn_scale_rows(const GcnScale& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
// For large graphs: sums of rows that several warps share.
int64_t gcn_scale_scratch(const GcnScale& p);
const char* gcn_scale(const GcnScale& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
