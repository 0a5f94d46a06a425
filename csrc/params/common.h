// Parameter types that several families of ops share. Each params/<family>.h declares the family's kernel
// entry points and the plain structs (pointers and sizes) that the kernels take. These files include no
// torch and no CUDA headers. No file in params/, cpu/ or cuda/ includes torch.
//
// namespace cpu: every kernel picks the widest instruction set of the machine (cpu/isa.h). Kernels with
// [begin, end) process only those rows (or the items that a comment names): the caller divides the work.
// namespace cuda: launchers. Each returns nullptr, or the text of a CUDA error. `scratch` is device memory
// of the size that the matching *_scratch function returns. No launcher synchronises; only error_record
// allocates.
#pragma once
#include <cstdint>

// Marks functions that both CPU and CUDA kernels call.
#ifdef __CUDACC__
#define PYG_FAST_DEVICE __host__ __device__
#else
#define PYG_FAST_DEVICE
#endif

namespace pyg_fast {

enum class DType : int8_t { f32, f64, f16, bf16 };

// The storage type of CBSR columns.
enum class ColumnType : int8_t { u8, u16, i32 };

// Node ids have 32 bits, edge positions 32 or 64: columns need only one type.
using Col = int32_t;

// One CSR structure: rows are destinations, `col` holds the source of each edge. Edge positions (rowptr
// and perm) are int64_t if `index64`, else int32_t; kernels call this type I or Index.
struct Csr {
  const void* rowptr = nullptr;  // [num_rows + 1]; rowptr[num_rows] may be below num_edges
  const void* col = nullptr;     // [num_edges] Col; a graph to sample from: see `col64`
  const void* perm = nullptr;    // [num_edges] edge -> position in `value`; nullptr: the identity
  bool index64 = false;
  bool col64 = false;  // col is int64_t: only for kernels that read it by column()
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  int64_t num_edges = 0;
};

// Reads `col` of a graph in the user's type, for kernels that read few of its edges.
PYG_FAST_DEVICE inline int64_t column(const Csr& csr, int64_t edge) {
  return csr.col64 ? static_cast<const int64_t*>(csr.col)[edge]
                   : static_cast<const Col*>(csr.col)[edge];
}

// A coordinate list in any order: edge e goes from src[e] to dst[e]. Kernels skip invalid edges, whose
// indices are outside [0, num_src) x [0, num_dst), and, if `drop_loops`, self-loops.
struct Coo {
  const void* src = nullptr;  // [num_edges], int64_t if `index64` else int32_t
  const void* dst = nullptr;
  bool index64 = false;
  bool drop_loops = false;
  bool reversed = false;  // `dst` is row 0 of the user's edge_index
  int64_t num_src = 0;
  int64_t num_dst = 0;
  int64_t num_edges = 0;
};

}  // namespace pyg_fast
