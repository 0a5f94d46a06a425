#include "cpu/cpu.h"
#include "stable.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

ScalarType type_of_columns(int64_t dim) {
  return dim <= 256 ? ScalarType::Byte : dim <= 65536 ? ScalarType::UInt16 : ScalarType::Int;
}

ColumnType column_type(ScalarType type) {
  return type == ScalarType::Byte     ? ColumnType::u8
         : type == ScalarType::UInt16 ? ColumnType::u16
                                      : ColumnType::i32;
}

// Shapes, types and devices of a CBSR, with what kernels need to know of it filled into `p`.
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

template <typename Run>
std::tuple<Tensor, Tensor> maxk(const Tensor& x_, int64_t k, bool balanced, const Run& run) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  MaxK p;
  p.dtype = dtype_of(x_, "x");
  p.balanced = balanced;
  p.num_rows = x_.size(0);
  p.dim = x_.size(1);
  p.k = k;
  STD_TORCH_CHECK(k >= 1 && k <= p.dim, "k must be 1 to ", p.dim, ", got ", k);
  const Tensor x = to_contiguous(x_);
  Tensor values = empty(x, {p.num_rows, k}, x.scalar_type());
  Tensor columns = empty(x, {p.num_rows, k}, type_of_columns(p.dim));
  p.column_type = column_type(columns.scalar_type());
  p.x = x.const_data_ptr();
  p.values = values.mutable_data_ptr();
  p.columns = columns.mutable_data_ptr();
  run(p, x);
  return {values, columns};
}

// To dense (`dim` columns) if not `sampling`, else the other way round.
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

template <typename Run>
Tensor cbsr_spmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                 const OptTensor& value_, const Tensor& values_, const Tensor& columns_,
                 int64_t dim, const OptTensor& row_scale_, const OptTensor& col_scale_,
                 const OptTensor& diag_, const OptTensor& bias_, bool mean, bool out_acc,
                 const Run& run) {
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
  run(p, values);
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

template <typename Run>
Tensor cbsr_sddmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                  const Tensor& grad_, const Tensor& values_, const Tensor& columns_,
                  const OptTensor& row_scale_, const OptTensor& col_scale_, bool mean,
                  int64_t num_values, const Run& run) {
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
  // Zeros for the edges that the CSR leaves out.
  Tensor out = zeros(grad, {num_values});
  p.out = out.mutable_data_ptr();
  run(p, grad);
  return out;
}

// Shares of `rows` rows that cost the same.
template <typename P>
void in_equal_shares(void (*kernel)(const P&, int64_t, int64_t), const P& p, int64_t rows,
                     int64_t work) {
  const int64_t shares = num_threads();
  parallel(shares, work,
           [&](int64_t k) { kernel(p, rows * k / shares, rows * (k + 1) / shares); });
}

// Shares of rows (or of sources) of the graph, by their edges.
template <typename P>
void in_shares_of_edges(void (*kernel)(const P&, int64_t, int64_t), const P& p, int64_t work,
                        int64_t (*begin_of)(const Csr&, int64_t, int64_t) = cpu::row_of_share) {
  const int64_t shares = num_threads();
  parallel(shares, work, [&](int64_t k) {
    kernel(p, begin_of(p.csr, k, shares), begin_of(p.csr, k + 1, shares));
  });
}

std::tuple<Tensor, Tensor> maxk_cpu(const Tensor& x, int64_t k, bool balanced) {
  return maxk(x, k, balanced, [](const MaxK& p, const Tensor&) {
    in_equal_shares(cpu::maxk, p, p.num_rows, p.num_rows * p.dim);
  });
}

Tensor to_dense_cpu(const Tensor& values, const Tensor& columns, int64_t dim) {
  return convert(values, columns, dim, false, [](const CbsrDense& p, const Tensor&) {
    in_equal_shares(cpu::cbsr_to_dense, p, p.num_rows, p.num_rows * (p.k + p.dim / 8));
  });
}

Tensor sample_cpu(const Tensor& dense, const Tensor& columns) {
  return convert(dense, columns, dense.size(-1), true, [](const CbsrDense& p, const Tensor&) {
    in_equal_shares(cpu::cbsr_sample, p, p.num_rows, p.num_rows * p.k);
  });
}

Tensor cbsr_spmm_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                     const Tensor& values, const Tensor& columns, int64_t dim, OptTensor row_scale,
                     OptTensor col_scale, OptTensor diag, OptTensor bias, bool mean,
                     bool out_acc) {
  return cbsr_spmm(rowptr, col, perm, value, values, columns, dim, row_scale, col_scale, diag,
                   bias, mean, out_acc, [](const CbsrSpmm& p, const Tensor&) {
                     in_shares_of_edges(cpu::cbsr_spmm, p,
                                        p.csr.num_edges * p.k / 2 + p.csr.num_rows * p.dim / 8);
                   });
}

Tensor backward_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                    const Tensor& grad, const Tensor& columns, OptTensor row_scale,
                    OptTensor col_scale, OptTensor diag, bool mean) {
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, mean, false,
                  [](const CbsrBackward& p, const Tensor&) {
                    in_shares_of_edges(cpu::cbsr_spmm_backward, p,
                                       p.csr.num_edges * p.k / 4 + p.csr.num_cols * p.k,
                                       cpu::source_of_share);
                  });
}

Tensor backward_ordered_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                            OptTensor value, const Tensor& grad, const Tensor& columns,
                            OptTensor row_scale, OptTensor col_scale, OptTensor diag) {
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, false, true,
                  [](const CbsrBackward& p, const Tensor&) {
                    in_shares_of_edges(cpu::cbsr_spmm_backward_ordered, p,
                                       p.csr.num_edges * p.k / 2 + p.csr.num_rows * p.k);
                  });
}

Tensor cbsr_sddmm_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& grad,
                      const Tensor& values, const Tensor& columns, OptTensor row_scale,
                      OptTensor col_scale, bool mean, int64_t num_values) {
  return cbsr_sddmm(rowptr, col, perm, grad, values, columns, row_scale, col_scale, mean,
                    num_values, [](const CbsrSddmm& p, const Tensor&) {
                      in_shares_of_edges(cpu::cbsr_sddmm, p, p.csr.num_edges * p.k / 2);
                    });
}

#ifdef PYG_FAST_WITH_CUDA
std::tuple<Tensor, Tensor> maxk_cuda(const Tensor& x, int64_t k, bool balanced) {
  return maxk(x, k, balanced, [](const MaxK& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::maxk(p, launch.stream()), "maxk");
  });
}

Tensor to_dense_cuda(const Tensor& values, const Tensor& columns, int64_t dim) {
  return convert(values, columns, dim, false, [](const CbsrDense& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::cbsr_to_dense(p, launch.stream()), "cbsr_to_dense");
  });
}

Tensor sample_cuda(const Tensor& dense, const Tensor& columns) {
  return convert(dense, columns, dense.size(-1), true, [](const CbsrDense& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::cbsr_sample(p, launch.stream()), "cbsr_sample");
  });
}

Tensor cbsr_spmm_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                      const Tensor& values, const Tensor& columns, int64_t dim,
                      OptTensor row_scale, OptTensor col_scale, OptTensor diag, OptTensor bias,
                      bool mean, bool out_acc) {
  return cbsr_spmm(rowptr, col, perm, value, values, columns, dim, row_scale, col_scale, diag,
                   bias, mean, out_acc, [](const CbsrSpmm& p, const Tensor& on) {
                     Launch launch(on);
                     void* scratch = launch.scratch(cuda::cbsr_spmm_scratch(p));
                     launch.check(cuda::cbsr_spmm(p, scratch, launch.stream()), "cbsr_spmm");
                   });
}

Tensor backward_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, OptTensor value,
                     const Tensor& grad, const Tensor& columns, OptTensor row_scale,
                     OptTensor col_scale, OptTensor diag, bool mean) {
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, mean, false,
                  [](const CbsrBackward& p, const Tensor& on) {
                    Launch launch(on);
                    void* scratch = launch.scratch(cuda::cbsr_spmm_backward_scratch(p));
                    launch.check(cuda::cbsr_spmm_backward(p, scratch, launch.stream()),
                                 "cbsr_spmm_backward");
                  });
}

Tensor backward_ordered_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                             OptTensor value, const Tensor& grad, const Tensor& columns,
                             OptTensor row_scale, OptTensor col_scale, OptTensor diag) {
  return backward(rowptr, col, perm, value, grad, columns, row_scale, col_scale, diag, false, true,
                  [](const CbsrBackward& p, const Tensor& on) {
                    Launch launch(on);
                    void* scratch = launch.scratch(cuda::cbsr_spmm_backward_ordered_scratch(p));
                    launch.check(cuda::cbsr_spmm_backward_ordered(p, scratch, launch.stream()),
                                 "cbsr_spmm_backward_ordered");
                  });
}

Tensor cbsr_sddmm_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                       const Tensor& grad, const Tensor& values, const Tensor& columns,
                       OptTensor row_scale, OptTensor col_scale, bool mean, int64_t num_values) {
  return cbsr_sddmm(rowptr, col, perm, grad, values, columns, row_scale, col_scale, mean,
                    num_values, [](const CbsrSddmm& p, const Tensor& on) {
                      Launch launch(on);
                      launch.check(cuda::cbsr_sddmm(p, launch.stream()), "cbsr_sddmm");
                    });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("maxk", TORCH_BOX(&pyg_fast::maxk_cpu));
  m.impl("cbsr_to_dense", TORCH_BOX(&pyg_fast::to_dense_cpu));
  m.impl("cbsr_sample", TORCH_BOX(&pyg_fast::sample_cpu));
  m.impl("cbsr_spmm", TORCH_BOX(&pyg_fast::cbsr_spmm_cpu));
  m.impl("cbsr_spmm_backward", TORCH_BOX(&pyg_fast::backward_cpu));
  m.impl("cbsr_spmm_backward_ordered", TORCH_BOX(&pyg_fast::backward_ordered_cpu));
  m.impl("cbsr_sddmm", TORCH_BOX(&pyg_fast::cbsr_sddmm_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("maxk", TORCH_BOX(&pyg_fast::maxk_cuda));
  m.impl("cbsr_to_dense", TORCH_BOX(&pyg_fast::to_dense_cuda));
  m.impl("cbsr_sample", TORCH_BOX(&pyg_fast::sample_cuda));
  m.impl("cbsr_spmm", TORCH_BOX(&pyg_fast::cbsr_spmm_cuda));
  m.impl("cbsr_spmm_backward", TORCH_BOX(&pyg_fast::backward_cuda));
  m.impl("cbsr_spmm_backward_ordered", TORCH_BOX(&pyg_fast::backward_ordered_cuda));
  m.impl("cbsr_sddmm", TORCH_BOX(&pyg_fast::cbsr_sddmm_cuda));
}
#endif
