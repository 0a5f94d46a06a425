// Operations of execution paths other than sums. A position outside the rows of x, such as -1, means no
// row.
#pragma once
#include "common.h"

namespace pyg_fast {

//   out[i] = x[position[i]], or fill
struct ExpandRows {
  DType dtype = DType::f32;
  bool index64 = false;  // type of `position`
  double fill = 0;
  int64_t num_rows = 0;  // of out
  int64_t num_x = 0;     // rows of x
  int64_t dim = 0;
  const void* x = nullptr;         // [num_x, dim]
  const void* position = nullptr;  // [num_rows]
  void* out = nullptr;             // [num_rows, dim]
};

// counter += the number of rows i with position[i] < 0 and an entry that is not zero
struct CountOutside {
  DType dtype = DType::f32;
  bool index64 = false;
  int64_t num_rows = 0;
  int64_t dim = 0;
  const void* x = nullptr;         // [num_rows, dim]
  const void* position = nullptr;  // [num_rows]
  int64_t* counter = nullptr;      // [1]
};

// Dropout keyed by node: out[i, c] = x[i, c] * scale if keeps(...) of dropout.h is true for node nodes[i]
// (or i) and column c, else 0.
struct NodeDropout {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t dim = 0;
  double dropout = 0;
  const void* x = nullptr;         // [num_rows, dim]
  const int64_t* nodes = nullptr;  // [num_rows] or nullptr
  const int64_t* seed = nullptr;   // [1], on the device of x
  void* out = nullptr;             // [num_rows, dim]
};

namespace cpu {
void expand_rows(const ExpandRows& p, int64_t row_begin, int64_t row_end);
void count_outside(const CountOutside& p, int64_t row_begin, int64_t row_end);
void node_dropout(const NodeDropout& p, int64_t row_begin, int64_t row_end);
}  // namespace cpu

namespace cuda {
const char* expand_rows(const ExpandRows& p, void* stream);
const char* count_outside(const CountOutside& p, void* stream);
const char* node_dropout(const NodeDropout& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
