#include "params/attention_scores.h"
#include "stable.h"

namespace pyg_fast {
namespace {

using Scores = std::tuple<Tensor, Tensor>;

template <typename P>
void fill(P& p, const Tensor& x, const Tensor& att_src, const OptTensor& att_dst) {
  STD_TORCH_CHECK(x.dim() == 3, "x must have three dimensions, got ", x.dim());
  p.dtype = dtype_of(x, "x");
  p.num_scores = att_dst ? 2 : 1;
  p.num_rows = x.size(0);
  p.heads = x.size(1);
  p.channels = x.size(2);
  const auto check = [&](const OptTensor& att, const char* name) {
    if (!att) return;
    check_matrix(*att, name, p.heads, p.channels);
    check_type(att, name, acc_of(x.scalar_type()));
    check_device(att, name, x);
  };
  check(att_src, "att_src");
  check(att_dst, "att_dst");
}

template <typename P>
int64_t work_of(const P& p) {
  return p.num_rows * p.num_scores * p.heads * (p.channels + 8) / 8;
}

template <bool kCuda>
Scores attention_scores(const Tensor& x_, const Tensor& att_src_, const OptTensor& att_dst_) {
  AttentionScores p;
  fill(p, x_, att_src_, att_dst_);
  const Tensor x = to_contiguous(x_), att_src = to_contiguous(att_src_);
  const OptTensor att_dst = to_contiguous(att_dst_);
  p.x = x.const_data_ptr();
  p.att[0] = att_src.const_data_ptr();
  p.att[1] = pointer(att_dst);
  const ScalarType acc = acc_of(x.scalar_type());
  Tensor alpha_src = empty(x, {p.num_rows, p.heads}, acc);
  Tensor alpha_dst = empty(x, {att_dst ? p.num_rows : 0, p.heads}, acc);
  p.alpha[0] = alpha_src.mutable_data_ptr();
  p.alpha[1] = alpha_dst.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::attention_scores(p, launch.stream()), "attention_scores");
  } else {
    share_rows(p.num_rows, work_of(p),
               [&](int64_t begin, int64_t end) { cpu::attention_scores(p, begin, end); });
  }
  return {alpha_src, alpha_dst};
}

template <bool kCuda>
Scores attention_scores_backward(const Tensor& x_, const Tensor& att_src_,
                                 const OptTensor& att_dst_, const Tensor& grad_src_,
                                 const OptTensor& grad_dst_, const OptTensor& more_grad_x_) {
  AttentionScoresBackward p;
  fill(p, x_, att_src_, att_dst_);
  const ScalarType acc = acc_of(x_.scalar_type());
  STD_TORCH_CHECK(att_dst_.has_value() == grad_dst_.has_value(),
                  "grad_alpha_dst must be given where att_dst is");
  const auto check = [&](const OptTensor& grad, const char* name) {
    if (!grad) return;
    check_matrix(*grad, name, p.num_rows, p.heads);
    check_type(grad, name, acc);
    check_device(grad, name, x_);
  };
  check(grad_src_, "grad_alpha_src");
  check(grad_dst_, "grad_alpha_dst");
  if (more_grad_x_) {
    STD_TORCH_CHECK(more_grad_x_->dim() == 3 && more_grad_x_->size(0) == p.num_rows &&
                        more_grad_x_->size(1) == p.heads && more_grad_x_->size(2) == p.channels,
                    "more_grad_x must have the shape of x");
    check_type(more_grad_x_, "more_grad_x", x_.scalar_type());
    check_device(more_grad_x_, "more_grad_x", x_);
  }
  const Tensor x = to_contiguous(x_), att_src = to_contiguous(att_src_),
               grad_src = to_contiguous(grad_src_);
  const OptTensor att_dst = to_contiguous(att_dst_), grad_dst = to_contiguous(grad_dst_),
                  more_grad_x = to_contiguous(more_grad_x_);
  p.x = x.const_data_ptr();
  p.att[0] = att_src.const_data_ptr();
  p.att[1] = pointer(att_dst);
  p.grad_alpha[0] = grad_src.const_data_ptr();
  p.grad_alpha[1] = pointer(grad_dst);
  p.more_grad_x = pointer(more_grad_x);
  Tensor grad_x = empty(x, {p.num_rows, p.heads, p.channels}, x.scalar_type());
  Tensor grad_att = empty(x, {p.num_scores, p.heads, p.channels}, acc);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_att = grad_att.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::attention_scores_backward_scratch(p));
    launch.check(cuda::attention_scores_backward(p, scratch, launch.stream()),
                 "attention_scores_backward");
  } else {
    const int64_t count = p.num_scores * p.heads * p.channels;
    const int64_t shares = fixed_shares(p.num_rows, count);
    SumOfShares sum(att_src, shares, count);
    parallel(shares, work_of(p), [&](int64_t k) {
      cpu::attention_scores_backward(p, p.num_rows * k / shares, p.num_rows * (k + 1) / shares,
                                     sum.share(k));
    });
    sum.write(p.grad_att);
  }
  return {grad_x, grad_att};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // <x[i, h], att[h]> for one or two attention vectors; the gradients of x (plus `more_grad_x`) and of
  // [att_src, att_dst].
  m.def("attention_scores(Tensor x, Tensor att_src, Tensor? att_dst) -> (Tensor, Tensor)");
  m.def(
      "attention_scores_backward(Tensor x, Tensor att_src, Tensor? att_dst, Tensor grad_alpha_src, "
      "Tensor? grad_alpha_dst, Tensor? more_grad_x) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(attention_scores)
PYG_FAST_IMPL(attention_scores_backward)
