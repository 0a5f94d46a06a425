#include "params/spmm_max.h"
#include "stable.h"

namespace pyg_fast {
namespace {

const void* checked_value(const OptTensor& value, const Csr& csr, ScalarType type,
                          const Tensor& on) {
  if (!value) return nullptr;
  STD_TORCH_CHECK(value->dim() == 1, "value must have one dimension, got ", value->dim());
  STD_TORCH_CHECK(value->size(0) >= csr.num_edges, "value must name every edge");
  check_type(value, "value", type);
  check_device(value, "value", on);
  return pointer(value);
}

template <bool kCuda>
std::tuple<Tensor, Tensor> spmm_max(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                                    const OptTensor& value_, const Tensor& x_, bool minimum,
                                    int64_t longest_row) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  SpmmMax p;
  p.dtype = dtype_of(x_, "x");
  p.csr = csr_of(rowptr, col, perm, x_.size(0));
  p.dim = x_.size(1);
  p.minimum = minimum;
  p.longest_row = longest_row < 0 ? p.csr.num_edges : longest_row;
  check_device(x_, "x", col);
  const Tensor x = to_contiguous(x_);
  const OptTensor value = to_contiguous(value_);
  p.x = x.const_data_ptr();
  p.value = checked_value(value, p.csr, x.scalar_type(), col);
  Tensor out = empty(x, {p.csr.num_rows, p.dim}, x.scalar_type());
  Tensor arg = empty(x, {p.csr.num_rows, p.dim}, rowptr.scalar_type());
  p.out = out.mutable_data_ptr();
  p.arg = arg.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::spmm_max_scratch(p));
    launch.check(cuda::spmm_max(p, scratch, launch.stream()), "spmm_max");
  } else {
    share_edges(p.csr, (p.csr.num_edges + p.csr.num_rows) * (p.dim + 8) / 8,
                [&](int64_t begin, int64_t end) { cpu::spmm_max(p, begin, end); });
  }
  return {out, arg};
}

template <typename Run>
Tensor backward_x(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                  const OptTensor& value_, const Tensor& arg_, const Tensor& grad_,
                  int64_t num_cols, const Run& run) {
  STD_TORCH_CHECK(grad_.dim() == 2, "grad must have two dimensions, got ", grad_.dim());
  STD_TORCH_CHECK(num_cols >= 0, "num_cols must not be negative");
  SpmmMaxBackwardX p;
  p.dtype = dtype_of(grad_, "grad");
  p.csr = csr_of(rowptr, col, perm, num_cols);
  p.dim = grad_.size(1);
  check_matrix(grad_, "grad", p.csr.num_rows, p.dim);
  check_matrix(arg_, "arg", p.csr.num_rows, p.dim);
  check_type(arg_, "arg", rowptr.scalar_type());
  check_device(arg_, "arg", col);
  check_device(grad_, "grad", col);
  const Tensor grad = to_contiguous(grad_), arg = to_contiguous(arg_);
  const OptTensor value = to_contiguous(value_);
  p.grad = grad.const_data_ptr();
  p.arg = arg.const_data_ptr();
  p.value = checked_value(value, p.csr, grad.scalar_type(), col);
  Tensor grad_x = empty(grad, {num_cols, p.dim}, grad.scalar_type());
  p.grad_x = grad_x.mutable_data_ptr();
  run(p, grad);
  return grad_x;
}

// Each thread takes some columns: the order of additions never changes.
void run_backward_x_on_cpu(const SpmmMaxBackwardX& p) {
  const int64_t shares = num_threads();
  const int64_t work = (p.csr.num_rows + p.csr.num_cols) * p.dim;
  parallel(shares, work, [&](int64_t k) {
    cpu::spmm_max_backward_x(p, p.dim * k / shares, p.dim * (k + 1) / shares);
  });
}

// The transpose, which the backward pass may read in addition to the graph.
Csr transposed_of(const Tensor& rowptr, const Tensor& col, const Tensor& t_rowptr,
                  const Tensor& t_col, const OptTensor& t_position) {
  const Csr transposed = csr_of(t_rowptr, t_col, t_position, rowptr.numel() - 1);
  check_vector(t_col, "t_col", col.numel());
  check_type(t_rowptr, "t_rowptr", rowptr.scalar_type());
  check_device(t_col, "t_col", col);
  return transposed;
}

// `t_perm` gives the numbers of its edges.
template <bool kCuda>
Tensor spmm_max_backward_x(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                           const OptTensor& value, const Tensor& arg, const Tensor& grad,
                           int64_t num_cols, const OptTensor& t_rowptr, const OptTensor& t_col,
                           const OptTensor& t_perm) {
  Csr transposed;
  if (t_rowptr && t_col) {
    transposed = transposed_of(rowptr, col, *t_rowptr, *t_col, t_perm);
    STD_TORCH_CHECK(transposed.num_rows == num_cols, "t_rowptr must have ", num_cols + 1,
                    " entries, got ", transposed.num_rows + 1);
  }
  [[maybe_unused]] const Csr* of_hubs = t_rowptr && t_col ? &transposed : nullptr;
  return backward_x(
      rowptr, col, perm, value, arg, grad, num_cols,
      [&](const SpmmMaxBackwardX& p, const Tensor& on) {
        if constexpr (kCuda) {
          Launch launch(on);
          void* scratch = launch.scratch(cuda::spmm_max_backward_x_scratch(p, of_hubs));
          launch.check(cuda::spmm_max_backward_x(p, of_hubs, scratch, launch.stream()),
                       "spmm_max_backward_x");
        } else {
          run_backward_x_on_cpu(p);
        }
      });
}

template <bool kCuda>
Tensor spmm_max_backward_x_ordered(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                                   const OptTensor& value, const Tensor& arg, const Tensor& grad,
                                   const Tensor& t_rowptr, const Tensor& t_col,
                                   const OptTensor& t_position) {
  [[maybe_unused]] const Csr transposed = transposed_of(rowptr, col, t_rowptr, t_col, t_position);
  return backward_x(
      rowptr, col, perm, value, arg, grad, t_rowptr.numel() - 1,
      [&](const SpmmMaxBackwardX& p, const Tensor& on) {
        if constexpr (kCuda) {
          Launch launch(on);
          void* scratch = launch.scratch(cuda::spmm_max_backward_x_ordered_scratch(p, transposed));
          launch.check(cuda::spmm_max_backward_x_ordered(p, transposed, scratch, launch.stream()),
                       "spmm_max_backward_x_ordered");
        } else {
          run_backward_x_on_cpu(p);
        }
      });
}

template <bool kCuda>
Tensor spmm_max_backward_value(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                               const Tensor& arg_, const Tensor& grad_, const Tensor& x_,
                               int64_t num_values) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  SpmmMaxBackwardValue p;
  p.dtype = dtype_of(grad_, "grad");
  p.csr = csr_of(rowptr, col, perm, x_.size(0));
  p.dim = x_.size(1);
  check_matrix(grad_, "grad", p.csr.num_rows, p.dim);
  check_matrix(arg_, "arg", p.csr.num_rows, p.dim);
  check_type(arg_, "arg", rowptr.scalar_type());
  check_type(x_, "x", grad_.scalar_type());
  check_device(arg_, "arg", col);
  check_device(grad_, "grad", col);
  check_device(x_, "x", col);
  STD_TORCH_CHECK(num_values >= p.csr.num_edges, "num_values is below the edges");
  const Tensor grad = to_contiguous(grad_), arg = to_contiguous(arg_), x = to_contiguous(x_);
  p.grad = grad.const_data_ptr();
  p.arg = arg.const_data_ptr();
  p.x = x.const_data_ptr();
  // Edges that the CSR omits have gradient zero.
  Tensor out = zeros(grad, {num_values});
  p.grad_value = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(grad);
    launch.check(cuda::spmm_max_backward_value(p, launch.stream()), "spmm_max_backward_value");
  } else {
    share_edges(p.csr, p.csr.num_rows * p.dim,
                [&](int64_t begin, int64_t end) { cpu::spmm_max_backward_value(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Maximum (or minimum) over each row's edges, and the edge that holds it. Rows have at most `longest_row` edges
  // (negative: unknown): where that is few, a GPU does not look for long rows.
  m.def(
      "spmm_max(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, bool minimum, "
      "SymInt longest_row=-1) -> (Tensor, Tensor)");
  m.def(
      "spmm_max_backward_x(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor arg, "
      "Tensor grad, SymInt num_cols, Tensor? t_rowptr=None, Tensor? t_col=None, "
      "Tensor? t_perm=None) -> Tensor");
  m.def(
      "spmm_max_backward_x_ordered(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, "
      "Tensor arg, Tensor grad, Tensor t_rowptr, Tensor t_col, Tensor? t_position) -> Tensor");
  m.def(
      "spmm_max_backward_value(Tensor rowptr, Tensor col, Tensor? perm, Tensor arg, Tensor grad, "
      "Tensor x, SymInt num_values) -> Tensor");
}

PYG_FAST_IMPL(spmm_max)
PYG_FAST_IMPL(spmm_max_backward_x)
PYG_FAST_IMPL(spmm_max_backward_x_ordered)
PYG_FAST_IMPL(spmm_max_backward_value)
