// Functions that the bindings of sums over edges share.
#pragma once
#include <type_traits>

#include "params/spmm.h"
#include "stable.h"

namespace pyg_fast {

// Checks the arguments, allocates the result, and calls run(p, x) with all parameters set.
template <typename P, typename Run>
Tensor aggregate(P p, const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                 const OptTensor& value_, const Tensor& x_, const OptTensor& row_scale_,
                 const OptTensor& col_scale_, const OptTensor& diag_, const OptTensor& bias_,
                 bool mean, bool out_acc, const OptTensor& self_row_, const OptTensor& out_row_,
                 int64_t num_out, const Run& run) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  ScalarType type = x_.scalar_type();
  bool quantized = false;
  if constexpr (!std::is_same_v<P, Spmm>) {
    quantized = p.quantized = type == ScalarType::Char;
    if (quantized) type = ScalarType::Float;
  }
  p.dtype = quantized ? DType::f32 : dtype_of(x_, "x");
  const ScalarType acc = acc_of(type);
  p.out_acc = quantized || (out_acc && acc != type);
  p.mean = mean;
  p.dim = x_.size(1);
  p.csr = csr_of(rowptr, col, perm, x_.size(0));
  check_device(x_, "x", col);
  const Tensor x = to_contiguous(x_);
  p.x = x.const_data_ptr();

  const OptTensor value = to_contiguous(value_), bias = to_contiguous(bias_);
  p.value = checked_value(value, p.csr, type, p.value_acc, col);
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const OptTensor diag = to_contiguous(diag_);
  p.row_scale = checked_scale(row_scale, "row_scale", p.csr.num_rows, type, col);
  p.col_scale = checked_scale(col_scale, "col_scale", p.csr.num_cols, type, col);
  p.diag = checked_scale(diag, "diag", p.csr.num_rows, type, col);
  const OptTensor self_row = to_contiguous(self_row_);
  check_vector(self_row, "self_row", p.csr.num_rows);
  check_type(self_row, "self_row", ScalarType::Int);
  check_device(self_row, "self_row", col);
  p.self_row = pointer(self_row);
  STD_TORCH_CHECK(!diag || self_row || p.csr.num_rows == p.csr.num_cols,
                  "diag needs a square graph, or self_row");
  const ScalarType out_type = p.out_acc ? acc : type;
  check_vector(bias, "bias", p.dim);
  check_type(bias, "bias", out_type);
  check_device(bias, "bias", col);
  p.bias = pointer(bias);

  const OptTensor out_row = to_contiguous(out_row_);
  check_vector(out_row, "out_row", p.csr.num_rows);
  check_type(out_row, "out_row", ScalarType::Long);
  check_device(out_row, "out_row", col);
  STD_TORCH_CHECK(num_out >= 0, "num_out must not be negative, got ", num_out);
  p.out_row = static_cast<const int64_t*>(pointer(out_row));
  p.num_out = out_row ? num_out : p.csr.num_rows;

  Tensor out =
      out_row ? zeros(x, {p.num_out, p.dim}, out_type) : empty(x, {p.num_out, p.dim}, out_type);
  p.out = out.mutable_data_ptr();
  run(p, x);
  return out;
}

}  // namespace pyg_fast
