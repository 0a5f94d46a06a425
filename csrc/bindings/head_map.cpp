#include "params/head_map.h"
#include "stable.h"

namespace pyg_fast {
namespace {

// The numbers of a head in a row.
int64_t per_head(const Tensor& t, const char* name, int64_t heads) {
  STD_TORCH_CHECK(t.dim() == 2, name, " must have two dimensions, got ", t.dim());
  STD_TORCH_CHECK(heads > 0 && t.size(1) % heads == 0, name, " must have columns for ", heads,
                  " heads, got ", t.size(1));
  return t.size(1) / heads;
}

template <bool kCuda>
Tensor head_map(const Tensor& x_, const Tensor& weight_, const OptTensor& other_, int64_t heads,
                bool transposed) {
  HeadMap p;
  p.dtype = dtype_of(x_, "x");
  p.transposed = transposed;
  p.num_rows = x_.size(0);
  p.heads = heads;
  p.in = per_head(x_, "x", heads);
  const int64_t channels = per_head(weight_, "weight", heads);
  p.out = transposed ? weight_.size(0) : channels;
  const int64_t in = transposed ? channels : weight_.size(0);
  STD_TORCH_CHECK(p.in == in, "weight must map ", p.in, " numbers of each head, got ", in);
  check_type(weight_, "weight", x_.scalar_type());
  check_device(weight_, "weight", x_);
  if (other_) {
    check_matrix(*other_, "other", p.num_rows, heads * p.out);
    check_type(other_, "other", x_.scalar_type());
    check_device(other_, "other", x_);
  }
  const Tensor x = to_contiguous(x_), weight = to_contiguous(weight_);
  const OptTensor other = to_contiguous(other_);
  p.x = x.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.other = pointer(other);
  Tensor y = empty(x, {p.num_rows, heads * p.out}, x.scalar_type());
  p.y = y.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::head_map(p, launch.stream()), "head_map");
  } else {
    share_rows(p.num_rows, p.num_rows * heads * p.in * p.out / 8,
               [&](int64_t begin, int64_t end) { cpu::head_map(p, begin, end); });
  }
  return y;
}

template <bool kCuda>
Tensor head_map_weight(const Tensor& x_, const Tensor& grad_, int64_t heads) {
  HeadMapWeight p;
  p.dtype = dtype_of(x_, "x");
  p.num_rows = x_.size(0);
  p.heads = heads;
  p.features = per_head(x_, "x", heads);
  p.channels = per_head(grad_, "grad", heads);
  check_matrix(grad_, "grad", p.num_rows, grad_.size(1));
  check_type(grad_, "grad", x_.scalar_type());
  check_device(grad_, "grad", x_);
  const Tensor x = to_contiguous(x_), grad = to_contiguous(grad_);
  p.x = x.const_data_ptr();
  p.grad = grad.const_data_ptr();
  Tensor out = empty(x, {p.features, heads * p.channels}, x.scalar_type());
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    void* scratch = launch.scratch(cuda::head_map_weight_scratch(p));
    launch.check(cuda::head_map_weight(p, scratch, launch.stream()), "head_map_weight");
  } else {
    const int64_t count = p.features * heads * p.channels, shares = fixed_shares(p.num_rows, count);
    Tensor sums = empty(x, {count}, acc_of(x.scalar_type()));
    SumOfShares sum(sums, shares, count);
    parallel(shares, p.num_rows * count / 8, [&](int64_t k) {
      cpu::head_map_weight(p, p.num_rows * k / shares, p.num_rows * (k + 1) / shares, sum.share(k));
    });
    sum.write(sums.mutable_data_ptr());
    cpu::round_head_map_weight(p, sums.const_data_ptr());
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The product of each head's part of x with its block of a weight (features, heads * channels), or with
  // the transposed block, plus `other`; and the gradient of the weight.
  m.def("head_map(Tensor x, Tensor weight, Tensor? other, int heads, bool transposed) -> Tensor");
  m.def("head_map_weight(Tensor x, Tensor grad, int heads) -> Tensor");
}

PYG_FAST_IMPL(head_map)
PYG_FAST_IMPL(head_map_weight)
