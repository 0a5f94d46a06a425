// What every kernel is handed: plain pointers and sizes. Free of torch and of CUDA headers.
#pragma once
#include <cstdint>

namespace pyg_fast {

enum class DType : int8_t { f32, f64, f16, bf16 };

// What the columns of a CBSR are stored as.
enum class ColumnType : int8_t { u8, u16, i32 };

// One CSR structure: rows are destinations, `col` holds the source of each edge.
// All three arrays have the same type: int64_t if `index64`, else int32_t.
struct Csr {
  const void* rowptr = nullptr;  // [num_rows + 1]; rowptr[num_rows] may be below num_edges
  const void* col = nullptr;     // [num_edges]
  const void* perm = nullptr;    // [num_edges] edge -> position in `value`; nullptr: the identity
  bool index64 = false;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  int64_t num_edges = 0;
};

// out[i] = row_scale[i] * sum_e value[e] * col_scale[col[e]] * x[col[e]] + diag[i] * x[self] + bias
// where self is i or self_row[i]; there is no such term where that is no row of x.
// `acc` is float, for f64 double: all sums run in it, and the scales are stored in it.
// Everything but csr, x and out may be nullptr (value, scales: 1; diag, bias: 0).
struct Spmm {
  Csr csr;
  DType dtype = DType::f32;       // of x, bias, and of value and out unless told otherwise
  bool value_acc = false;         // value is stored as acc
  bool out_acc = false;           // out is stored as acc (bias too)
  bool mean = false;              // divide row i by its number of edges (after row_scale)
  int64_t dim = 0;                // columns of x and out, both row-major and contiguous
  const void* x = nullptr;          // [num_cols, dim]
  const void* value = nullptr;      // [num_values]
  const void* row_scale = nullptr;  // [num_rows] acc
  const void* col_scale = nullptr;  // [num_cols] acc
  const void* diag = nullptr;       // [num_rows] acc (num_rows == num_cols, unless self_row)
  const void* self_row = nullptr;   // [num_rows], of the csr's index type
  const void* bias = nullptr;       // [dim]
  void* out = nullptr;              // [num_rows, dim]
};

// How edges are sampled, see sample.h: a row's first ones; spread evenly; drawn at random; as the
// authors of ES-SpMM do, by multiples of 577, some of them several times.
enum class Strategy : int8_t { bucket, fastrand, unbiased, paper };

constexpr int64_t kMostSamples = 4096;

// At most num_samples edges of each row.
struct Sampling {
  int64_t num_samples = 0;
  Strategy strategy = Strategy::bucket;
  const int64_t* seed = nullptr;  // [1], where the graph is; for `unbiased`
};

// Spmm over a sample of the edges; a mean is that of those taken. Else `unbiased` multiplies sums by
// degree / num_samples where not all edges are taken. self_row is not read.
struct SampledSpmm : Spmm {
  Sampling sampling;
  bool quantized = false;  // x is int8; value and out are stored as acc, which is float
};

// The sampled edges themselves, row by row.
struct SampleEdges {
  Csr csr;
  Sampling sampling;
  int64_t num_slots = 0;
  const void* rowptr = nullptr;  // [num_rows + 1] where each row's begin; at most num_slots in all
  void* row = nullptr;           // [num_slots]; behind the last edge -1
  void* col = nullptr;           // [num_slots]; behind the last edge 0
  void* perm = nullptr;          // [num_slots] position in the values; behind the last edge 0
};

// The same edges out of the transpose, whose perm is the position of each edge in the order of the
// rows: in the transpose's order, found without the rows. Not for `paper`.
struct SampleTransposed {
  Csr csr;  // of the transpose
  Sampling sampling;
  int64_t num_slots = 0;
  const void* rowptr = nullptr;  // [num_cols + 1] of the rows that are sampled
  void* out_rowptr = nullptr;    // [num_rows + 1]
  void* col = nullptr;           // [num_slots]; behind the last edge 0
  void* perm = nullptr;          // [num_slots] from csr.perm; behind the last edge 0
};

// out[i] = round(x[i] / scale[i]) with scale[i] = max |x[i]| / 127. A row that holds infinity or NaN
// has a scale that is no number, or none that is finite, and zeros.
struct QuantizeRows {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t dim = 0;
  const void* x = nullptr;  // [num_rows, dim]
  int8_t* out = nullptr;    // [num_rows, dim]
  float* scale = nullptr;   // [num_rows]
};

// A graph's edges, in groups of at most `size` of one row each: what a GPU's threads are handed. All
// arrays have the type of those of the csr.
struct Groups {
  int64_t size = 0;
  bool atomic = false;  // long rows add up by atomic additions instead of partial sums
  int64_t num_groups = 0;
  int64_t num_long = 0;      // rows of several groups
  int64_t num_partials = 0;  // groups of such rows
  const void* ptr = nullptr;         // [num_groups + 1] first edge; groups follow one another
  const void* row = nullptr;         // [num_groups] row, or -1 - k for a group of long row k
  const void* long_row = nullptr;    // [num_long] row
  const void* long_ptr = nullptr;    // [num_long + 1] first partial sum
  const void* long_shift = nullptr;  // [num_long] group g makes partial sum g - shift
};

// out[i, f] = max (or min) over the row's edges of value[e] * x[col[e], f]; an empty row gives 0.
// arg[i, f] = position in `col` of the first edge that reaches it, -1 for an empty row.
// NaN counts as the largest (smallest) value, as in torch.amax and torch.amin.
struct SpmmMax {
  Csr csr;
  DType dtype = DType::f32;
  bool minimum = false;
  int64_t dim = 0;
  const void* x = nullptr;      // [num_cols, dim]
  const void* value = nullptr;  // [num_values] or nullptr
  void* out = nullptr;          // [num_rows, dim]
  void* arg = nullptr;          // [num_rows, dim], the csr's index type
};

// out[perm[e]] = row_scale[i] * col_scale[col[e]] * <a[i], b[col[e]]> for every edge e of row i
// (acc arithmetic). Positions that no edge names are left alone: the caller zeroes them.
struct Sddmm {
  Csr csr;
  DType dtype = DType::f32;  // of a, b and out
  int64_t dim = 0;
  const void* a = nullptr;          // [num_rows, dim]
  const void* b = nullptr;          // [num_cols, dim]
  const void* row_scale = nullptr;  // [num_rows] acc or nullptr
  const void* col_scale = nullptr;  // [num_cols] acc or nullptr
  bool mean = false;                // divide by the row's number of edges
  void* out = nullptr;              // [num_values]
};

// Backward of SpmmMax with respect to x:
//   grad_x[j, f] = sum over (i, f) with col[arg[i, f]] == j of value * grad[i, f]
// `grad_x` [num_cols, dim] is zeroed by the kernel.
struct SpmmMaxBackwardX {
  Csr csr;  // rowptr is not read
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* arg = nullptr;    // [num_rows, dim]
  const void* grad = nullptr;   // [num_rows, dim]
  const void* value = nullptr;  // [num_values] or nullptr
  void* grad_x = nullptr;       // [num_cols, dim]
};

// Backward of SpmmMax with respect to value:
//   grad_value[perm[e]] = sum_f [arg[i, f] == e] * grad[i, f] * x[col[e], f]
// Positions that no edge names are left alone.
struct SpmmMaxBackwardValue {
  Csr csr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const void* arg = nullptr;   // [num_rows, dim]
  const void* grad = nullptr;  // [num_rows, dim]
  const void* x = nullptr;     // [num_cols, dim]
  void* grad_value = nullptr;  // [num_values]
};

// What execution paths need beside sums. A position that is no row of x, such as -1, stands for none.
//   out[i] = x[position[i]], or fill
struct ExpandRows {
  DType dtype = DType::f32;
  bool index64 = false;  // what `position` is
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

// Dropout that knows its node: out[i, c] = x[i, c] * scale where keeps(...) of dropout.h says so of
// node nodes[i] (or i) and column c, else 0.
struct NodeDropout {
  DType dtype = DType::f32;
  int64_t num_rows = 0;
  int64_t dim = 0;
  double dropout = 0;
  const void* x = nullptr;         // [num_rows, dim]
  const int64_t* nodes = nullptr;  // [num_rows] or nullptr
  const int64_t* seed = nullptr;   // [1], where x is
  void* out = nullptr;             // [num_rows, dim]
};

// Stable counting sort of edges (row[e], col[e]) by row: the CSR arrays of a coordinate list.
// Edges with an index outside [0, num_rows) x [0, num_cols) are counted in `invalid` and left out;
// so are self-loops if `drop_loops`. `sorted_col` and `perm` beyond rowptr[num_rows] hold zeros.
struct ToCsr {
  const void* row = nullptr;  // [num_edges], int64_t if in64 else int32_t
  const void* col = nullptr;
  bool in64 = true;
  bool out64 = false;  // type of the three outputs
  bool by_src = false;  // rows are sources: `row` is row 0 of the user's edge_index
  bool drop_loops = false;
  bool report = true;  // whether an invalid edge is an error, of which CUDA makes a record
  int64_t num_edges = 0;
  int64_t num_rows = 0;
  int64_t num_cols = 0;
  void* rowptr = nullptr;      // [num_rows + 1]
  void* sorted_col = nullptr;  // [num_edges]
  void* perm = nullptr;        // [num_edges]: position of each sorted edge in the input
  int64_t* invalid = nullptr;  // [1]; nullptr: nobody asks
};

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

// out[i] = row_scale[i] * sum_{e: dst[e] == i} value[e] * col_scale[src[e]] * x[src[e]]
//          + diag[i] * x[i]
// Sums run in acc, as those of Spmm do; value, scales and diag may be nullptr.
struct Scatter {
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
  int64_t* invalid = nullptr;       // [1] number of invalid edges, or nullptr: not asked for
  bool report = false;              // whether CUDA makes a record of an invalid edge
};

// out[e] = row_scale[dst[e]] * col_scale[src[e]] * <a[dst[e]], b[src[e]]>, 0 for edges left out.
struct EdgeDot {
  Coo coo;
  DType dtype = DType::f32;  // of a, b and out
  int64_t dim = 0;
  const void* a = nullptr;          // [num_dst, dim]
  const void* b = nullptr;          // [num_src, dim]
  const void* row_scale = nullptr;  // [num_dst] acc or nullptr
  const void* col_scale = nullptr;  // [num_src] acc or nullptr
  void* out = nullptr;              // [num_edges]
};

// The symmetric normalisation of a GCN, in two steps. First
//   degree[i] = sum_{e: dst[e] == i} value[e], in acc; without values a count, in int32_t;
//   last[i] = 1 + the highest position of a loop of i, 0: none;
//   counts = (invalid edges, loops), and chunk_loops the loops of each kLoopChunk edges, from
//   which the second step knows where an edge goes. (num_src == num_dst in both.)
constexpr int64_t kLoopChunk = 128;

inline int64_t loop_chunks(int64_t num_edges) { return (num_edges + kLoopChunk - 1) / kLoopChunk; }

struct GcnDegree {
  Coo coo;
  DType dtype = DType::f32;  // of value
  bool weighted = false;     // whether there are values: those of no edges are a nullptr, too
  const void* value = nullptr;     // [num_edges] or nullptr
  void* degree = nullptr;          // [num_dst]
  int64_t* last = nullptr;         // [num_dst] or nullptr
  int64_t* counts = nullptr;       // [2]
  int64_t* chunk_loops = nullptr;  // [loop_chunks(num_edges)] or nullptr
};

// Then, with loop[i] = value[last[i] - 1], or fill_value if last[i] == 0 or there is no `last`,
//   scale[i] = (degree[i] + loop[i])^(-1/2), 0 for a sum of 0;
//   weight[k] = scale[src[e]] * value[e] * scale[dst[e]], 0 for invalid edges, where k is e less
//   the number of loops before e, which are left out; or e itself, if there is no `before`;
// and, if `loops` (else loop[i] = 0), a loop for each node behind the edges, of weight
// scale[i] * loop[i] * scale[i], together with the list of all edges. before[c] counts the loops of
// the chunks up to c.
struct GcnWeight {
  Coo coo;
  DType dtype = DType::f32;  // of value and weight
  bool loops = false;
  bool weighted = false;  // as above
  double fill_value = 1;
  int64_t num_kept = 0;             // 0: no edge is looked at
  const void* value = nullptr;      // [num_edges] or nullptr
  const void* degree = nullptr;     // [num_dst], as GcnDegree has it
  const int64_t* last = nullptr;    // [num_dst] or nullptr
  const int64_t* before = nullptr;  // [loop_chunks(num_edges)] or nullptr
  void* edge_index = nullptr;       // [2, num_kept + num_dst], as src and dst are, if `loops`
  void* weight = nullptr;           // [num_kept (+ num_dst)]
  void* scale = nullptr;            // [num_dst] acc
};

// And back: out[e] = grad[k] * scale[src[e]] * scale[dst[e]] + grad_degree[dst[e]], 0 for invalid
// edges; with `before`, k of a loop is num_kept + dst[e].
struct GcnWeightBackward {
  Coo coo;
  DType dtype = DType::f32;  // of grad and out
  int64_t num_kept = 0;
  const int64_t* before = nullptr;    // as above
  const void* grad = nullptr;         // [num_kept (+ num_dst)]
  const void* scale = nullptr;        // [num_dst] acc
  const void* grad_degree = nullptr;  // [num_dst] acc
  void* out = nullptr;                // [num_edges]
};

// The same scales of a graph whose edges are sorted, and what its loops weigh, with
//   degree[i] = sum of value[perm[e]] over the edges e of row i
//   loop[i] = value[last_loop[i]], or fill_value if last_loop[i] < 0 or there is no `last_loop`
//   scale[i] = (degree[i] + loop[i])^(-1/2), 0 for a sum of 0;  diag[i] = scale * loop * scale
// Without `loops` loop[i] is 0, and `diag` is not written.
struct GcnScale {
  Csr csr;  // no col; num_edges is the number of values where there is no perm
  DType dtype = DType::f32;  // of value
  bool loops = false;
  double fill_value = 1;
  int64_t num_values = 0;
  const void* value = nullptr;         // [num_values]
  const int64_t* last_loop = nullptr;  // [num_rows] or nullptr
  void* scale = nullptr;               // [num_rows] acc
  void* diag = nullptr;                // [num_rows] acc
};

// CBSR: a row of `dim` features of which k are stored, with their columns, distinct and in any
// order. Every struct below has values [rows, k] of `dtype` beside columns [rows, k].

// Row by row the k largest of x: NaN counts as largest, of equal ones the lowest column is taken.
// `balanced`: instead the largest of each of the k groups of columns that are equal modulo k.
// The order of the entries in a row is the kernel's to choose.
struct MaxK {
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool balanced = false;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t k = 0;  // 1 to dim
  const void* x = nullptr;  // [num_rows, dim]
  void* values = nullptr;   // [num_rows, k]
  void* columns = nullptr;  // [num_rows, k]
};

// dense[i, columns[i, c]] = values[i, c], zero elsewhere; or, sampling, the other way round.
struct CbsrDense {
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  int64_t num_rows = 0;
  int64_t dim = 0;
  int64_t k = 0;
  const void* columns = nullptr;  // [num_rows, k]
  const void* in = nullptr;       // values [num_rows, k]; sampling: dense [num_rows, dim]
  void* out = nullptr;            // dense [num_rows, dim]; sampling: values [num_rows, k]
};

// Spmm of a CBSR: x[j] is the row that columns[j] and values[j] stand for.
struct CbsrSpmm {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool value_acc = false;  // value is stored as acc
  bool out_acc = false;    // out is stored as acc (bias too)
  bool mean = false;
  int64_t dim = 0;
  int64_t k = 0;
  const void* values = nullptr;     // [num_cols, k]
  const void* columns = nullptr;    // [num_cols, k]
  const void* value = nullptr;      // [num_values] or nullptr
  const void* row_scale = nullptr;  // [num_rows] acc or nullptr
  const void* col_scale = nullptr;  // [num_cols] acc or nullptr
  const void* diag = nullptr;       // [num_rows] acc or nullptr (num_rows == num_cols)
  const void* bias = nullptr;       // [dim] or nullptr
  void* out = nullptr;              // [num_rows, dim]
};

// Backward of CbsrSpmm with respect to values, sampled at the same columns. With dY = row_scale *
// grad (divided by the row's number of edges if `mean`):
//   grad_values[j, c] = col_scale[j] * sum_{e in row i, col[e] == j} value[e] * dY[i, columns[j, c]]
//                       + diag[j] * grad[j, columns[j, c]]
// The same struct serves the ordered form, which walks the transpose: there `csr` has a row for
// each j, row_scale belongs to j, col_scale to i, and `mean` is not used:
//   grad_values[j, c] = row_scale[j] * sum_{e in row j} value[e] * col_scale[i] * grad[i, ...] + ...
struct CbsrBackward {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool value_acc = false;
  bool mean = false;
  int64_t dim = 0;
  int64_t k = 0;
  const void* columns = nullptr;  // [num_cols, k]; ordered: [num_rows, k]
  const void* grad = nullptr;     // [num_rows, dim]; ordered: [num_cols, dim]
  const void* value = nullptr;
  const void* row_scale = nullptr;
  const void* col_scale = nullptr;
  const void* diag = nullptr;
  void* grad_values = nullptr;  // like columns
};

// Backward of CbsrSpmm with respect to value, for every edge e of row i:
//   out[perm[e]] = row_scale[i] * col_scale[col[e]] * sum_c values[col[e], c] * grad[i, columns[...]]
// Positions that no edge names are left alone: the caller zeroes them.
struct CbsrSddmm {
  Csr csr;
  DType dtype = DType::f32;
  ColumnType column_type = ColumnType::u8;
  bool mean = false;  // divide by the row's number of edges
  int64_t dim = 0;
  int64_t k = 0;
  const void* grad = nullptr;     // [num_rows, dim]
  const void* values = nullptr;   // [num_cols, k]
  const void* columns = nullptr;  // [num_cols, k]
  const void* row_scale = nullptr;
  const void* col_scale = nullptr;
  void* out = nullptr;  // [num_values]
};

// Attention. Of an edge e = (j, i) and head h the logit is
//   GAT:   leaky(alpha_src[j, h] + alpha_dst[i, h] + alpha_edge[id, h])
//   GATv2: sum_c att[h, c] * leaky(x[j, h, c] + x_dst[i, h, c])
// with leaky(s) = s > 0 ? s : negative_slope * s; its weight p[e, h] is the softmax of the logits
// over the edges of i. Beside the listed edges, row i < num_loops has one from node i itself.
// The id of a listed edge is perm[e] (or e), that of the loop of i is csr.num_edges + i: the same
// in the graph and in its transpose. Dropout keeps id and head where keeps(...) of dropout.h says
// so: kept[e, h] = 1 / (1 - dropout), else 0.
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

// out[i, h] = sum_e kept * p * x[j, h] + bias[h]; a row without edges gives the bias.
// What the backward needs is written where it is not nullptr (all or nothing), all of it acc:
//   y[i, h] = out without bias; y_plus[i, h] = the part of y from edges of positive s;
//   lse[i, h] = log sum_e exp(logit) (0 for an empty row); mass_plus[i, h] = sum of p, before
//   dropout, over edges of positive s.
struct Gat : Attention {
  const void* x = nullptr;           // [num_cols, heads, channels]
  const void* alpha_src = nullptr;   // [num_cols, heads] acc
  const void* alpha_dst = nullptr;   // [num_rows, heads] acc
  const void* alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  const void* alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
  const void* bias = nullptr;        // [heads, channels] or nullptr
  void* out = nullptr;               // [num_rows, heads, channels]
  void* y = nullptr;                 // [num_rows, heads, channels]
  void* y_plus = nullptr;            // [num_rows, heads, channels]
  void* lse = nullptr;               // [num_rows, heads]
  void* mass_plus = nullptr;         // [num_rows, heads]
};

// Backward of Gat, for destinations first. G[i, h] = <grad[i, h], y[i, h]>:
//   stat[i] = (alpha_dst[i, :], lse[i, :], G[i, :])
//   grad_alpha_dst[i, h] = (1 - negative_slope) * (<grad[i, h], y_plus[i, h]> - G * mass_plus)
// Then, over the transpose (`csr`: a row for each source j, whose col names destinations i), with
// ds[e, h] = p * (kept * <grad[i, h], x[j, h]> - G[i, h]) * leaky'(s):
//   grad_x[j, h] = sum_e kept * p * grad[i, h];  grad_alpha_src[j, h] = sum_e ds[e, h]
//   grad_alpha_edge[id, h] = ds[e, h], and likewise for loops; ids that no edge has are left alone.
struct GatBackward : Attention {
  const void* x = nullptr;           // [num_rows, heads, channels]
  const void* alpha_src = nullptr;   // [num_rows, heads] acc
  const void* alpha_dst = nullptr;   // [num_cols, heads] acc
  const void* alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  const void* alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
  const void* y = nullptr;           // [num_cols, heads, channels] acc, as the next three
  const void* y_plus = nullptr;
  const void* lse = nullptr;        // [num_cols, heads]
  const void* mass_plus = nullptr;  // [num_cols, heads]
  const void* grad = nullptr;       // [num_cols, heads, channels]
  void* stat = nullptr;             // [num_cols, 3, heads] acc
  void* grad_alpha_dst = nullptr;   // [num_cols, heads] acc
  void* grad_x = nullptr;           // [num_rows, heads, channels]
  void* grad_alpha_src = nullptr;   // [num_rows, heads] acc
  void* grad_alpha_edge = nullptr;  // [num_edges, heads] acc or nullptr
  void* grad_alpha_loop = nullptr;  // [num_loops, heads] acc or nullptr
};

// What GAT's logits are made of, of one or both ends at once:
//   alpha[k][i, h] = <x[i, h], att[k][h]> for k < num_scores
struct HeadScores {
  static constexpr int kMost = 2;

  DType dtype = DType::f32;
  int num_scores = 1;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t channels = 0;
  const void* x = nullptr;      // [num_rows, heads, channels]
  const void* att[kMost] = {};  // [heads, channels] acc
  void* alpha[kMost] = {};      // [num_rows, heads] acc
};

//   grad_x[i, h] = sum_k grad_alpha[k][i, h] * att[k][h]
//   grad_att[k, h] = sum_i grad_alpha[k][i, h] * x[i, h]
struct HeadScoresBackward {
  DType dtype = DType::f32;
  int num_scores = 1;
  int64_t num_rows = 0;
  int64_t heads = 0;
  int64_t channels = 0;
  const void* x = nullptr;                         // [num_rows, heads, channels]
  const void* att[HeadScores::kMost] = {};         // [heads, channels] acc
  const void* grad_alpha[HeadScores::kMost] = {};  // [num_rows, heads] acc
  void* grad_x = nullptr;                          // [num_rows, heads, channels]
  void* grad_att = nullptr;                        // [num_scores, heads, channels] acc
};

// out[i, h] = sum_e kept * p * x[j, h] + bias[h]; y and lse as above.
struct Gatv2 : Attention {
  const void* x = nullptr;      // [num_cols, heads, channels]
  const void* x_dst = nullptr;  // [num_rows, heads, channels]
  const void* att = nullptr;    // [heads, channels]
  const void* bias = nullptr;   // [heads, channels] or nullptr
  void* out = nullptr;          // [num_rows, heads, channels]
  void* y = nullptr;            // [num_rows, heads, channels] acc
  void* lse = nullptr;          // [num_rows, heads] acc
};

// Backward of Gatv2 in two passes. With s[e, h, c] = x[j, h, c] + x_dst[i, h, c] and
// dl[e, h] = p * (kept * <grad[i, h], x[j, h]> - G[i, h]), over the graph (`csr`):
//   stat[i] = (lse[i, :], G[i, :]);  grad_x_dst[i, h, c] = att[h, c] * sum_e dl * leaky'(s)
//   grad_att[h, c] = sum over all edges of dl * leaky(s)
// and over the transpose (`t_csr`):
//   grad_x[j, h, c] = sum_e kept * p * grad[i, h, c] + att[h, c] * dl * leaky'(s)
struct Gatv2Backward : Attention {
  Csr t_csr;
  const void* x = nullptr;      // [num_cols, heads, channels]
  const void* x_dst = nullptr;  // [num_rows, heads, channels]
  const void* att = nullptr;    // [heads, channels]
  const void* y = nullptr;      // [num_rows, heads, channels] acc
  const void* lse = nullptr;    // [num_rows, heads] acc
  const void* grad = nullptr;   // [num_rows, heads, channels]
  void* stat = nullptr;         // [num_rows, 2, heads] acc
  void* grad_x_dst = nullptr;   // [num_rows, heads, channels]
  void* grad_att = nullptr;     // [heads, channels] acc
  void* grad_x = nullptr;       // [num_cols, heads, channels]
};

}  // namespace pyg_fast
