// What the parameters of several families of ops are made of. A family's params/<family>.h has the plain
// structs that its kernels are handed, pointers and sizes, and the kernels' entry points. Free of torch and
// of CUDA headers, as everything in params/, cpu/ and cuda/ is of torch.
//
// namespace cpu: every kernel picks the widest instruction set that the machine has (cpu/isa.h). Those that
// take [begin, end) work on those rows (or what a comment names) only: the caller shares them out.
// namespace cuda: launchers. Each returns nullptr, or the text of a CUDA error. `scratch` is device memory
// of the size that the matching *_scratch function names. None synchronises, and error_record alone
// allocates.
#pragma once
#include <cstdint>

// Before functions that CPU and CUDA kernels both call.
#ifdef __CUDACC__
#define PYG_FAST_DEVICE __host__ __device__
#else
#define PYG_FAST_DEVICE
#endif

namespace pyg_fast {

enum class DType : int8_t { f32, f64, f16, bf16 };

// What the columns of a CBSR are stored as.
enum class ColumnType : int8_t { u8, u16, i32 };

// Nodes are counted in 32 bits, edges in 32 or 64: of columns one type is enough.
using Col = int32_t;

// One CSR structure: rows are destinations, `col` holds the source of each edge. What counts edges,
// rowptr and perm, is int64_t if `index64`, else int32_t; kernels call its type I or Index.
struct Csr {
  const void* rowptr = nullptr;  // [num_rows + 1]; rowptr[num_rows] may be below num_edges
  const void* col = nullptr;     // [num_edges] Col; that of a graph to sample from: see `col64`
  const void* perm = nullptr;    // [num_edges] edge -> position in `value`; nullptr: the identity
  bool index64 = false;
  bool col64 = false;  // col is int64_t: only kernels that read it by column() take that
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  int64_t num_edges = 0;
};

// Of a graph that a user has made, for kernels that read few of its edges.
PYG_FAST_DEVICE inline int64_t column(const Csr& csr, int64_t edge) {
  return csr.col64 ? static_cast<const int64_t*>(csr.col)[edge] : static_cast<const Col*>(csr.col)[edge];
}

// A coordinate list in any order: edge e goes from src[e] to dst[e]. Invalid edges, with an index
// outside [0, num_src) x [0, num_dst), are left out; so are self-loops if `drop_loops`.
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
