// Sums over a sample of each row's edges, the sample itself, and 8-bit features.
#pragma once
#include "sample.h"
#include "spmm.h"

namespace pyg_fast {

// Spmm over sampled edges; a mean divides by the number of sampled edges. Kernels do not read self_row
// or out_row.
struct SampledSpmm : Spmm {
  Sampling sampling;
  bool quantized = false;  // x is int8; value and out are stored as acc (float)
};

// The sampled edges themselves, row by row.
struct SampleEdges {
  Csr csr;
  Sampling sampling;
  int64_t num_slots = 0;
  const void* rowptr = nullptr;  // [num_rows + 1] row starts; at most num_slots edges
  Col* row = nullptr;            // [num_slots]; behind the last edge -1
  Col* col = nullptr;            // [num_slots]; behind the last edge 0
  void* perm = nullptr;          // [num_slots] position in the values; behind the last edge 0
};

// The same edges, computed from the transpose and in its order, without a pass over the rows. csr.perm
// gives the position of each edge in row order. Not for `paper`.
struct SampleTransposed {
  Csr csr;  // of the transpose
  Sampling sampling;
  int64_t num_slots = 0;
  const void* rowptr = nullptr;  // [num_cols + 1] of the rows to sample
  void* out_rowptr = nullptr;    // [num_rows + 1]
  Col* col = nullptr;            // [num_slots]; behind the last edge 0
  void* perm = nullptr;          // [num_slots] from csr.perm; behind the last edge 0
};

// out[i] = round(x[i] / scale[i]) with scale[i] = max |x[i]| / 127. A row with infinity or NaN gets a NaN
// or infinite scale and zeros.
struct QuantizeRows {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t dim = 0;
  const void* x = nullptr;  // [num_rows, dim]
  int8_t* out = nullptr;    // [num_rows, dim]
  float* scale = nullptr;   // [num_rows]
};

// The factor that maps the largest feature to 127; 0 if it is not finite.
PYG_FAST_DEVICE inline float quantization_of(float largest) {
  const float inverse = 127 / largest;
  return largest > 0 && largest <= 3.402823466e38f && inverse <= 3.402823466e38f ? inverse : 0.0f;
}

namespace cpu {
void sampled_spmm(const SampledSpmm& p, int64_t row_begin, int64_t row_end);
// Does not write slots after the last edge.
void sample_edges(const SampleEdges& p, int64_t row_begin, int64_t row_end);
void quantize_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
// One coprime stride per row.
int64_t sampling_scratch(const Csr& csr, const Sampling& sampling);
int64_t sampled_spmm_scratch(const SampledSpmm& p);
const char* sampled_spmm(const SampledSpmm& p, void* scratch, void* stream);
const char* sample_edges(const SampleEdges& p, void* scratch, void* stream);
int64_t sample_transposed_scratch(const SampleTransposed& p);
const char* sample_transposed(const SampleTransposed& p, void* scratch, void* stream);
const char* quantize_rows(const QuantizeRows& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
