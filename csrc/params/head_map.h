// Linear maps of heads: each head has a block of one matrix.
#pragma once
#include "common.h"

namespace pyg_fast {

// W has a row for each feature that the heads share, and columns for the channels of all heads:
//   y[n, h, c] = sum_d x[n, h, d] * W[d, h, c] + other[n, h, c]    (in = features, out = channels)
//   y[n, h, d] = sum_c x[n, h, c] * W[d, h, c] + other[n, h, d]    (transposed)
struct HeadMap {
  DType dtype = DType::f32;
  bool transposed = false;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t in = 0;                // numbers of a head of x
  int64_t out = 0;               // and of y
  const void* x = nullptr;       // [num_rows, heads, in]
  const void* weight = nullptr;  // [in, heads, out], transposed [out, heads, in]
  const void* other = nullptr;   // [num_rows, heads, out] or nullptr
  void* y = nullptr;             // [num_rows, heads, out]

  // The place in W of what maps number i of a head to number o.
  PYG_FAST_DEVICE int64_t weight_at(int64_t head, int64_t i, int64_t o) const {
    return transposed ? (o * heads + head) * in + i : (i * heads + head) * out + o;
  }
};

// The gradient of W:  out[d, h, c] = sum_n x[n, h, d] * grad[n, h, c]
struct HeadMapWeight {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t features = 0;
  int64_t channels = 0;
  const void* x = nullptr;     // [num_rows, heads, features]
  const void* grad = nullptr;  // [num_rows, heads, channels]
  void* out = nullptr;         // [features, heads, channels]
};

namespace cpu {
void head_map(const HeadMap& p, int64_t row_begin, int64_t row_end);
// Adds the products of these rows to `sum` [features, heads, channels] acc; does not write p.out.
void head_map_weight(const HeadMapWeight& p, int64_t row_begin, int64_t row_end, void* sum);
// Writes p.out from sums.
void round_head_map_weight(const HeadMapWeight& p, const void* sum);
}  // namespace cpu

namespace cuda {
const char* head_map(const HeadMap& p, void* stream);
// Partial sums, one per block.
int64_t head_map_weight_scratch(const HeadMapWeight& p);
const char* head_map_weight(const HeadMapWeight& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
