#include "bindings/attention.h"
#include "params/gatv2.h"

namespace pyg_fast {
namespace {

using Gatv2Result = std::tuple<Tensor, Tensor, Tensor>;

template <bool kCuda>
Gatv2Result gatv2(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& x_,
                  const Tensor& x_dst_, const Tensor& att_, const OptTensor& bias_,
                  const OptTensor& seed, int64_t num_loops, double negative_slope, double dropout,
                  bool training, bool out_acc) {
  Gatv2 p;
  fill(p, csr_of(rowptr, col, perm, x_.size(0)), x_, seed, num_loops, negative_slope, dropout);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const int64_t rows = p.csr.num_rows;
  p.out_acc = out_acc && acc != type;
  check_device(x_, "x", col);
  check_features(x_dst_, "x_dst", rows, p, type, col);
  check_per_channel(att_, "att", p, type, col);
  const ScalarType out_type = p.out_acc ? acc : type;
  check_per_channel(bias_, "bias", p, out_type, col);
  const Tensor x = to_contiguous(x_), x_dst = to_contiguous(x_dst_), att = to_contiguous(att_);
  const OptTensor bias = to_contiguous(bias_);
  p.x = x.const_data_ptr();
  p.x_dst = x_dst.const_data_ptr();
  p.att = att.const_data_ptr();
  p.bias = pointer(bias);

  Tensor out = empty_as(x, rows, p, out_type);
  const int64_t saved_rows = training ? rows : 0;
  Tensor y = empty_as(x, saved_rows, p, acc), softmax = empty(x, {saved_rows, 2, p.heads}, acc);
  p.out = out.mutable_data_ptr();
  if (training) {
    p.y = y.mutable_data_ptr();
    p.softmax = softmax.mutable_data_ptr();
  }
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::gatv2_scratch(p));
    launch.check(cuda::gatv2(p, scratch, launch.stream()), "gatv2");
  } else {
    share_edges(p.csr, work_of(p), [&](int64_t begin, int64_t end) { cpu::gatv2(p, begin, end); });
  }
  return {out, y, softmax};
}

template <bool kCuda>
Gatv2Result gatv2_backward(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                           const Tensor& t_rowptr, const Tensor& t_col, const OptTensor& t_perm,
                           const Tensor& x_, const Tensor& x_dst_, const Tensor& att_,
                           const OptTensor& seed, const Tensor& y_, const Tensor& softmax_,
                           const Tensor& grad_, int64_t num_loops, double negative_slope,
                           double dropout) {
  Gatv2Backward p;
  fill(p, csr_of(rowptr, col, perm, x_.size(0)), x_, seed, num_loops, negative_slope, dropout);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const int64_t sources = p.csr.num_cols, destinations = p.csr.num_rows;
  p.t_csr = csr_of(t_rowptr, t_col, t_perm, destinations);
  STD_TORCH_CHECK(p.t_csr.num_rows == sources && p.t_csr.num_edges == p.csr.num_edges &&
                      p.t_csr.index64 == p.csr.index64,
                  "the transpose is of another graph");
  check_device(t_col, "t_col", col);
  check_device(x_, "x", col);
  check_features(x_dst_, "x_dst", destinations, p, type, col);
  check_per_channel(att_, "att", p, type, col);
  check_features(y_, "y", destinations, p, acc, col);
  check_softmax(softmax_, destinations, p, acc, col);
  p.out_acc = grad_.scalar_type() == acc && acc != type;
  check_features(grad_, "grad", destinations, p, p.out_acc ? acc : type, col);
  const Tensor x = to_contiguous(x_), x_dst = to_contiguous(x_dst_), att = to_contiguous(att_),
               y = to_contiguous(y_), softmax = to_contiguous(softmax_),
               grad = to_contiguous(grad_);
  p.x = x.const_data_ptr();
  p.x_dst = x_dst.const_data_ptr();
  p.att = att.const_data_ptr();
  p.y = y.const_data_ptr();
  p.softmax = softmax.const_data_ptr();
  p.grad = grad.const_data_ptr();

  Tensor grad_x = empty_as(x, sources, p, type), grad_x_dst = empty_as(x, destinations, p, type);
  Tensor grad_att = zeros(y, {p.heads, p.channels});
  Tensor stat = empty(x, {destinations, p.stat_size()}, acc);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_x_dst = grad_x_dst.mutable_data_ptr();
  p.grad_att = grad_att.mutable_data_ptr();
  p.stat = stat.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::gatv2_backward_scratch(p));
    launch.check(cuda::gatv2_backward(p, scratch, launch.stream()), "gatv2_backward");
  } else {
    const int64_t shares = fixed_shares(p.csr.num_edges + p.csr.num_rows, p.heads * p.channels);
    SumOfShares sum(y, shares, p.heads * p.channels);
    parallel(shares, work_of(p), [&](int64_t k) {
      cpu::gatv2_backward_dst(p, cpu::row_of_share(p.csr, k, shares),
                              cpu::row_of_share(p.csr, k + 1, shares), sum.share(k));
    });
    sum.write(p.grad_att);
    share_edges(p.t_csr, work_of(p),
                [&](int64_t begin, int64_t end) { cpu::gatv2_backward_src(p, begin, end); });
  }
  return {grad_x, grad_x_dst, grad_att};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Attention over each row's edges and `num_loops` self-loops: the result, and (`training`) the inputs
  // of the backward: y, softmax.
  m.def(
      "gatv2(Tensor rowptr, Tensor col, Tensor? perm, Tensor x, Tensor x_dst, Tensor att, "
      "Tensor? bias, Tensor? seed, SymInt num_loops, float negative_slope, float dropout, "
      "bool training, bool out_acc) -> (Tensor, Tensor, Tensor)");
  // Gradients of x, x_dst and att.
  m.def(
      "gatv2_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor t_rowptr, Tensor t_col, "
      "Tensor? t_perm, Tensor x, Tensor x_dst, Tensor att, Tensor? seed, Tensor y, Tensor softmax, "
      "Tensor grad, SymInt num_loops, float negative_slope, float dropout) "
      "-> (Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(gatv2)
PYG_FAST_IMPL(gatv2_backward)
