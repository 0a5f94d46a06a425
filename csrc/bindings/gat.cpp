#include "bindings/attention.h"
#include "params/gat.h"

namespace pyg_fast {
namespace {

using GatResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <bool kCuda>
GatResult gat(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& x_,
              const Tensor& alpha_src_, const Tensor& alpha_dst_, const OptTensor& alpha_edge_,
              const OptTensor& alpha_loop_, const OptTensor& bias_, const OptTensor& seed,
              int64_t num_loops, double negative_slope, double dropout, bool training,
              bool out_acc) {
  Gat p;
  fill(p, csr_of(rowptr, col, perm, x_.size(0)), x_, seed, num_loops, negative_slope, dropout);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const int64_t rows = p.csr.num_rows;
  p.out_acc = out_acc && acc != type;
  check_device(x_, "x", col);
  check_scores(alpha_src_, "alpha_src", p.csr.num_cols, p, acc, col);
  check_scores(alpha_dst_, "alpha_dst", rows, p, acc, col);
  check_scores(alpha_edge_, "alpha_edge", p.csr.num_edges, p, acc, col);
  check_scores(alpha_loop_, "alpha_loop", num_loops, p, acc, col);
  const ScalarType out_type = p.out_acc ? acc : type;
  check_per_channel(bias_, "bias", p, out_type, col);
  const Tensor x = to_contiguous(x_), alpha_src = to_contiguous(alpha_src_),
               alpha_dst = to_contiguous(alpha_dst_);
  const OptTensor alpha_edge = to_contiguous(alpha_edge_), alpha_loop = to_contiguous(alpha_loop_),
                  bias = to_contiguous(bias_);
  p.x = x.const_data_ptr();
  p.alpha_src = alpha_src.const_data_ptr();
  p.alpha_dst = alpha_dst.const_data_ptr();
  p.alpha_edge = pointer(alpha_edge);
  p.alpha_loop = pointer(alpha_loop);
  p.bias = pointer(bias);

  Tensor out = empty_as(x, rows, p, out_type);
  const int64_t saved_rows = training ? rows : 0;
  Tensor y = empty_as(x, saved_rows, p, acc), y_plus = empty_as(x, saved_rows, p, acc);
  Tensor softmax = empty(x, {saved_rows, 2, p.heads}, acc);
  Tensor mass_plus = empty(x, {saved_rows, p.heads}, acc);
  p.out = out.mutable_data_ptr();
  if (training) {
    p.y = y.mutable_data_ptr();
    p.y_plus = y_plus.mutable_data_ptr();
    p.softmax = softmax.mutable_data_ptr();
    p.mass_plus = mass_plus.mutable_data_ptr();
  }
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::gat_scratch(p));
    launch.check(cuda::gat(p, scratch, launch.stream()), "gat");
  } else {
    share_edges(p.csr, work_of(p), [&](int64_t begin, int64_t end) { cpu::gat(p, begin, end); });
  }
  return {out, y, y_plus, softmax, mass_plus};
}

template <bool kCuda>
GatResult gat_backward(const Tensor& t_rowptr, const Tensor& t_col, const OptTensor& t_perm,
                       const Tensor& x_, const Tensor& alpha_src_, const Tensor& alpha_dst_,
                       const OptTensor& alpha_edge_, const OptTensor& alpha_loop_,
                       const OptTensor& seed, const Tensor& y_, const Tensor& y_plus_,
                       const Tensor& softmax_, const Tensor& mass_plus_, const Tensor& grad_,
                       int64_t num_loops, double negative_slope, double dropout) {
  GatBackward p;
  const Csr csr = csr_of(t_rowptr, t_col, t_perm, alpha_dst_.size(0));
  fill(p, csr, x_, seed, num_loops, negative_slope, dropout);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const int64_t sources = csr.num_rows, destinations = csr.num_cols;
  check_features(x_, "x", sources, p, type, t_col);
  check_features(y_, "y", destinations, p, acc, t_col);
  check_features(y_plus_, "y_plus", destinations, p, acc, t_col);
  check_scores(alpha_src_, "alpha_src", sources, p, acc, t_col);
  check_scores(alpha_dst_, "alpha_dst", destinations, p, acc, t_col);
  check_scores(alpha_edge_, "alpha_edge", csr.num_edges, p, acc, t_col);
  check_scores(alpha_loop_, "alpha_loop", num_loops, p, acc, t_col);
  check_softmax(softmax_, destinations, p, acc, t_col);
  check_scores(mass_plus_, "mass_plus", destinations, p, acc, t_col);
  p.out_acc = grad_.scalar_type() == acc && acc != type;
  check_features(grad_, "grad", destinations, p, p.out_acc ? acc : type, t_col);
  const Tensor x = to_contiguous(x_), alpha_src = to_contiguous(alpha_src_),
               alpha_dst = to_contiguous(alpha_dst_), y = to_contiguous(y_),
               y_plus = to_contiguous(y_plus_), softmax = to_contiguous(softmax_),
               mass_plus = to_contiguous(mass_plus_), grad = to_contiguous(grad_);
  const OptTensor alpha_edge = to_contiguous(alpha_edge_), alpha_loop = to_contiguous(alpha_loop_);
  p.x = x.const_data_ptr();
  p.alpha_src = alpha_src.const_data_ptr();
  p.alpha_dst = alpha_dst.const_data_ptr();
  p.alpha_edge = pointer(alpha_edge);
  p.alpha_loop = pointer(alpha_loop);
  p.y = y.const_data_ptr();
  p.y_plus = y_plus.const_data_ptr();
  p.softmax = softmax.const_data_ptr();
  p.mass_plus = mass_plus.const_data_ptr();
  p.grad = grad.const_data_ptr();

  Tensor grad_x = empty_as(x, sources, p, type);
  Tensor grad_src = empty(x, {sources, p.heads}, acc);
  Tensor grad_dst = empty(x, {destinations, p.heads}, acc);
  // Edges that the graph omits have gradient zero.
  Tensor grad_edge = zeros(alpha_src, {alpha_edge ? csr.num_edges : 0, p.heads});
  Tensor grad_loop = empty(x, {alpha_loop ? num_loops : 0, p.heads}, acc);
  Tensor stat = empty(x, {destinations, 4, p.heads}, acc);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_alpha_src = grad_src.mutable_data_ptr();
  p.grad_alpha_dst = grad_dst.mutable_data_ptr();
  if (alpha_edge) p.grad_alpha_edge = grad_edge.mutable_data_ptr();
  if (alpha_loop) p.grad_alpha_loop = grad_loop.mutable_data_ptr();
  p.stat = stat.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::gat_backward_scratch(p));
    launch.check(cuda::gat_backward(p, scratch, launch.stream()), "gat_backward");
  } else {
    share_rows(p.csr.num_cols, p.csr.num_cols * p.heads * (p.channels + 8) / 8,
               [&](int64_t begin, int64_t end) { cpu::gat_backward_dst(p, begin, end); });
    share_edges(p.csr, work_of(p),
                [&](int64_t begin, int64_t end) { cpu::gat_backward_src(p, begin, end); });
  }
  return {grad_x, grad_src, grad_dst, grad_edge, grad_loop};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Attention over each row's edges and `num_loops` self-loops: the result, and (`training`) the inputs
  // of the backward: y, y_plus, softmax, mass_plus.
  m.def(
      "gat(Tensor rowptr, Tensor col, Tensor? perm, Tensor x, Tensor alpha_src, Tensor alpha_dst, "
      "Tensor? alpha_edge, Tensor? alpha_loop, Tensor? bias, Tensor? seed, SymInt num_loops, "
      "float negative_slope, float dropout, bool training, bool out_acc) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Gradients of x, alpha_src, alpha_dst, alpha_edge and alpha_loop (empty for a missing input).
  m.def(
      "gat_backward(Tensor t_rowptr, Tensor t_col, Tensor? t_perm, Tensor x, Tensor alpha_src, "
      "Tensor alpha_dst, Tensor? alpha_edge, Tensor? alpha_loop, Tensor? seed, Tensor y, "
      "Tensor y_plus, Tensor softmax, Tensor mass_plus, Tensor grad, SymInt num_loops, "
      "float negative_slope, float dropout) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(gat)
PYG_FAST_IMPL(gat_backward)
