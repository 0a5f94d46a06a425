#include "bindings/cbsr.h"
#include "params/cbsr.h"

namespace pyg_fast {
namespace {

// Checks shapes, types and devices of a CBSR and fills its parameters into `p`.
template <typename P>
void take_columns(P& p, const Tensor& columns, int64_t rows, int64_t dim, const Tensor& on) {
  STD_TORCH_CHECK(columns.dim() == 2 && columns.size(0) == rows, "columns must have shape [", rows,
                  ", k]");
  check_type(columns, "columns", type_of_columns(dim));
  check_device(columns, "columns", on);
  p.dim = dim;
  p.k = columns.size(1);
  STD_TORCH_CHECK(p.k >= 1 && p.k <= dim, "columns must be 1 to ", dim, " in a row, got ", p.k);
  p.column_type = column_type(columns.scalar_type());
  p.columns = columns.const_data_ptr();
}

// Converts to dense (`dim` columns), or from dense if `sampling`.
template <typename Run>
Tensor convert(const Tensor& in_, const Tensor& columns_, int64_t dim, bool sampling,
               const Run& run) {
  const char* name = sampling ? "dense" : "values";
  STD_TORCH_CHECK(in_.dim() == 2, name, " must have two dimensions, got ", in_.dim());
  CbsrDense p;
  p.dtype = dtype_of(in_, name);
  p.num_rows = in_.size(0);
  const Tensor in = to_contiguous(in_), columns = to_contiguous(columns_);
  take_columns(p, columns, p.num_rows, dim, in);
  check_matrix(in, name, p.num_rows, sampling ? dim : p.k);
  p.in = in.const_data_ptr();
  Tensor out = empty(in, {p.num_rows, sampling ? p.k : dim}, in.scalar_type());
  p.out = out.mutable_data_ptr();
  run(p, in);
  return out;
}

template <bool kCuda>
Tensor cbsr_to_dense(const Tensor& values, const Tensor& columns, int64_t dim) {
  return convert(values, columns, dim, false, [](const CbsrDense& p, const Tensor& on) {
    if constexpr (kCuda) {
      Launch launch(on);
      launch.check(cuda::cbsr_to_dense(p, launch.stream()), "cbsr_to_dense");
    } else {
      share_rows(p.num_rows, p.num_rows * (p.k + p.dim / 8),
                 [&](int64_t begin, int64_t end) { cpu::cbsr_to_dense(p, begin, end); });
    }
  });
}

template <bool kCuda>
Tensor cbsr_sample(const Tensor& dense, const Tensor& columns) {
  return convert(dense, columns, dense.size(-1), true, [](const CbsrDense& p, const Tensor& on) {
    if constexpr (kCuda) {
      Launch launch(on);
      launch.check(cuda::cbsr_sample(p, launch.stream()), "cbsr_sample");
    } else {
      share_rows(p.num_rows, p.num_rows * p.k,
                 [&](int64_t begin, int64_t end) { cpu::cbsr_sample(p, begin, end); });
    }
  });
}

template <bool kCuda>
Tensor cbsr_spmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                 const OptTensor& value_, const Tensor& values_, const Tensor& columns_,
                 int64_t dim, const OptTensor& row_scale_, const OptTensor& col_scale_,
                 const OptTensor& diag_, const OptTensor& bias_, bool mean, bool out_acc) {
  STD_TORCH_CHECK(values_.dim() == 2, "values must have two dimensions, got ", values_.dim());
  CbsrSpmm p;
  p.dtype = dtype_of(values_, "values");
  const ScalarType type = values_.scalar_type(), acc = acc_of(type);
  p.out_acc = out_acc && acc != type;
  p.mean = mean;
  p.csr = csr_of(rowptr, col, perm, values_.size(0));
  const Tensor values = to_contiguous(values_), columns = to_contiguous(columns_);
  take_columns(p, columns, p.csr.num_cols, dim, col);
  check_matrix(values, "values", p.csr.num_cols, p.k);
  check_device(values, "values", col);
  p.values = values.const_data_ptr();
  const OptTensor value = to_contiguous(value_), bias = to_contiguous(bias_);
  p.value = checked_value(value, p.csr, type, p.value_acc, col);
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const OptTensor diag = to_contiguous(diag_);
  p.row_scale = checked_scale(row_scale, "row_scale", p.csr.num_rows, type, col);
  p.col_scale = checked_scale(col_scale, "col_scale", p.csr.num_cols, type, col);
  p.diag = checked_scale(diag, "diag", p.csr.num_rows, type, col);
  STD_TORCH_CHECK(!diag || p.csr.num_rows == p.csr.num_cols, "diag needs a square graph");
  const ScalarType out_type = p.out_acc ? acc : type;
  check_vector(bias, "bias", dim);
  check_type(bias, "bias", out_type);
  check_device(bias, "bias", col);
  p.bias = pointer(bias);
  Tensor out = empty(values, {p.csr.num_rows, dim}, out_type);
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(values);
    void* scratch = launch.scratch(cuda::cbsr_spmm_scratch(p));
    launch.check(cuda::cbsr_spmm(p, scratch, launch.stream()), "cbsr_spmm");
  } else {
    share_edges(p.csr, p.csr.num_edges * p.k / 2 + p.csr.num_rows * p.dim / 8,
                [&](int64_t begin, int64_t end) { cpu::cbsr_spmm(p, begin, end); });
  }
  return out;
}

// `ordered`: the graph is the transpose, whose rows are the sources.
template <typename Run>
Tensor backward(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                const OptTensor& value_, const Tensor& grad_, const Tensor& columns_,
                const OptTensor& row_scale_, const OptTensor& col_scale_, const OptTensor& diag_,
                bool mean, bool ordered, const Run& run) {
  STD_TORCH_CHECK(grad_.dim() == 2, "grad must have two dimensions, got ", grad_.dim());
  STD_TORCH_CHECK(columns_.dim() == 2, "columns must have two dimensions, got ", columns_.dim());
  CbsrBackward p;
  p.dtype = dtype_of(grad_, "grad");
  const ScalarType type = grad_.scalar_type();
  p.mean = mean;
  const int64_t num_src = columns_.size(0);
  p.csr = csr_of(rowptr, col, perm, ordered ? grad_.size(0) : num_src);
  const Tensor grad = to_contiguous(grad_), columns = to_contiguous(columns_);
  const int64_t dim = grad.size(1);
  take_columns(p, columns, ordered ? p.csr.num_rows : num_src, dim, col);
  check_matrix(grad, "grad", ordered ? p.csr.num_cols : p.csr.num_rows, dim);
  check_device(grad, "grad", col);
  p.grad = grad.const_data_ptr();
  const OptTensor value = to_contiguous(value_);
  p.value = checked_value(value, p.csr, type, p.value_acc, col);
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const OptTensor diag = to_contiguous(diag_);
  p.row_scale = checked_scale(row_scale, "row_scale", p.csr.num_rows, type, col);
  p.col_scale = checked_scale(col_scale, "col_scale", p.csr.num_cols, type, col);
  p.diag = checked_scale(diag, "diag", p.csr.num_rows, type, col);
  STD_TORCH_CHECK(!diag || p.csr.num_rows == p.csr.num_cols, "diag needs a square graph");
  Tensor out = empty(grad, {num_src, p.k}, type);
  p.grad_values = out.mutable_data_ptr();
  run(p, grad);
  return out;
}

// The transpose: sources of many edges gather over it.
template <bool kCuda>
Tensor cbsr_spmm_backward(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                          const OptTensor& value, const Tensor& grad, const Tensor& columns,
                          const OptTensor& row_scale, const OptTensor& col_scale,
                          const OptTensor& diag, bool mean, const OptTensor& t_rowptr,
                          const OptTensor& t_col, const OptTensor& t_perm) {
  Csr transposed;
  const bool has_transpose = t_rowptr && t_col;
  if (has_transpose) {
    transposed = csr_of(*t_rowptr, *t_col, t_perm, rowptr.numel() - 1);
    check_vector(*t_col, "t_col", col.numel());
    check_type(*t_rowptr, "t_rowptr", rowptr.scalar_type());
    check_device(*t_col, "t_col", col);
    STD_TORCH_CHECK(transposed.num_rows == columns.size(0), "t_rowptr must have ",
                    columns.size(0) + 1, " entries, got ", transposed.num_rows + 1);
  }
  [[maybe_unused]] const Csr* of_hubs = has_transpose ? &transposed : nullptr;
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, mean, false,
                  [&](const CbsrBackward& p, const Tensor& on) {
                    if constexpr (kCuda) {
                      Launch launch(on);
                      void* scratch = launch.scratch(cuda::cbsr_spmm_backward_scratch(p, of_hubs));
                      launch.check(cuda::cbsr_spmm_backward(p, of_hubs, scratch, launch.stream()),
                                   "cbsr_spmm_backward");
                    } else {
                      const int64_t work = p.csr.num_edges * p.k / 4 + p.csr.num_cols * p.k;
                      const int64_t shares = num_threads();
                      parallel(shares, work, [&](int64_t k) {
                        cpu::cbsr_spmm_backward(p, cpu::source_of_share(p.csr, k, shares),
                                                cpu::source_of_share(p.csr, k + 1, shares));
                      });
                    }
                  });
}

template <bool kCuda>
Tensor cbsr_spmm_backward_ordered(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                                  const OptTensor& value, const Tensor& grad, const Tensor& columns,
                                  const OptTensor& row_scale, const OptTensor& col_scale,
                                  const OptTensor& diag) {
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, false, true,
                  [](const CbsrBackward& p, const Tensor& on) {
                    if constexpr (kCuda) {
                      Launch launch(on);
                      void* scratch = launch.scratch(cuda::cbsr_spmm_backward_ordered_scratch(p));
                      launch.check(cuda::cbsr_spmm_backward_ordered(p, scratch, launch.stream()),
                                   "cbsr_spmm_backward_ordered");
                    } else {
                      share_edges(p.csr, p.csr.num_edges * p.k / 2 + p.csr.num_rows * p.k,
                                  [&](int64_t begin, int64_t end) {
                                    cpu::cbsr_spmm_backward_ordered(p, begin, end);
                                  });
                    }
                  });
}

template <bool kCuda>
Tensor cbsr_sddmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                  const Tensor& grad_, const Tensor& values_, const Tensor& columns_,
                  const OptTensor& row_scale_, const OptTensor& col_scale_, bool mean,
                  int64_t num_values) {
  STD_TORCH_CHECK(grad_.dim() == 2, "grad must have two dimensions, got ", grad_.dim());
  STD_TORCH_CHECK(values_.dim() == 2, "values must have two dimensions, got ", values_.dim());
  CbsrSddmm p;
  p.dtype = dtype_of(grad_, "grad");
  const ScalarType type = grad_.scalar_type();
  p.mean = mean;
  p.csr = csr_of(rowptr, col, perm, values_.size(0));
  const Tensor grad = to_contiguous(grad_), values = to_contiguous(values_);
  const Tensor columns = to_contiguous(columns_);
  take_columns(p, columns, p.csr.num_cols, grad.size(1), col);
  check_matrix(grad, "grad", p.csr.num_rows, p.dim);
  check_matrix(values, "values", p.csr.num_cols, p.k);
  check_type(values, "values", type);
  check_device(grad, "grad", col);
  check_device(values, "values", col);
  STD_TORCH_CHECK(num_values >= p.csr.num_edges, "num_values is below the edges");
  p.grad = grad.const_data_ptr();
  p.values = values.const_data_ptr();
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  p.row_scale = checked_scale(row_scale, "row_scale", p.csr.num_rows, type, col);
  p.col_scale = checked_scale(col_scale, "col_scale", p.csr.num_cols, type, col);
  // Edges that the CSR omits have gradient zero.
  Tensor out = zeros(grad, {num_values});
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(grad);
    launch.check(cuda::cbsr_sddmm(p, launch.stream()), "cbsr_sddmm");
  } else {
    share_edges(p.csr, p.csr.num_edges * p.k / 2,
                [&](int64_t begin, int64_t end) { cpu::cbsr_sddmm(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Dense rows of CBSR features; the entries of dense rows at CBSR columns.
  m.def("cbsr_to_dense(Tensor values, Tensor columns, int dim) -> Tensor");
  m.def("cbsr_sample(Tensor dense, Tensor columns) -> Tensor");

  // spmm of CBSR features with `dim` columns, and its gradients.
  m.def(
      "cbsr_spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor values, "
      "Tensor columns, int dim, Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, "
      "bool mean, bool out_acc) -> Tensor");
  m.def(
      "cbsr_spmm_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor grad, "
      "Tensor columns, Tensor? row_scale, Tensor? col_scale, Tensor? diag, bool mean, "
      "Tensor? t_rowptr=None, Tensor? t_col=None, Tensor? t_perm=None) -> Tensor");
  m.def(
      "cbsr_spmm_backward_ordered(Tensor t_rowptr, Tensor t_col, Tensor? t_perm, Tensor? value, "
      "Tensor grad, Tensor columns, Tensor? row_scale, Tensor? col_scale, Tensor? diag) -> Tensor");
  m.def(
      "cbsr_sddmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor grad, Tensor values, "
      "Tensor columns, Tensor? row_scale, Tensor? col_scale, bool mean, SymInt num_values) "
      "-> Tensor");
}

PYG_FAST_IMPL(cbsr_to_dense)
PYG_FAST_IMPL(cbsr_sample)
PYG_FAST_IMPL(cbsr_spmm)
PYG_FAST_IMPL(cbsr_spmm_backward)
PYG_FAST_IMPL(cbsr_spmm_backward_ordered)
PYG_FAST_IMPL(cbsr_sddmm)
