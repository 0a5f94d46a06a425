#include "params/path.h"
#include "stable.h"

namespace pyg_fast {
namespace {

template <typename P>
void fill(P& p, const Tensor& x, int64_t num_rows) {
  STD_TORCH_CHECK(x.dim() == 2, "x must have two dimensions, got ", x.dim());
  p.dtype = dtype_of(x, "x");
  p.num_rows = num_rows;
  p.dim = x.size(1);
}

template <typename P>
int64_t work_of(const P& p) {
  return p.num_rows * (p.dim + 8) / 8;
}

template <bool kCuda>
Tensor expand_rows(const Tensor& x_, const Tensor& position_, double fill_value) {
  STD_TORCH_CHECK(position_.dim() == 1, "position must have one dimension");
  ExpandRows p;
  fill(p, x_, position_.size(0));
  p.index64 = is_index64(position_, "position");
  check_device(position_, "position", x_);
  p.num_x = x_.size(0);
  p.fill = fill_value;
  const Tensor x = to_contiguous(x_), position = to_contiguous(position_);
  p.x = x.const_data_ptr();
  p.position = position.const_data_ptr();
  Tensor out = empty(x, {p.num_rows, p.dim}, x.scalar_type());
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::expand_rows(p, launch.stream()), "expand_rows");
  } else {
    share_rows(p.num_rows, work_of(p),
               [&](int64_t begin, int64_t end) { cpu::expand_rows(p, begin, end); });
  }
  return out;
}

template <bool kCuda>
void count_outside(const Tensor& x_, const Tensor& position_, Tensor counter) {
  CountOutside p;
  fill(p, x_, x_.dim() == 2 ? x_.size(0) : 0);
  check_vector(position_, "position", p.num_rows);
  p.index64 = is_index64(position_, "position");
  check_device(position_, "position", x_);
  check_vector(counter, "counter", 1);
  check_type(counter, "counter", ScalarType::Long);
  check_device(counter, "counter", x_);
  const Tensor x = to_contiguous(x_), position = to_contiguous(position_);
  p.x = x.const_data_ptr();
  p.position = position.const_data_ptr();
  p.counter = static_cast<int64_t*>(counter.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::count_outside(p, launch.stream()), "count_outside");
  } else {
    share_rows(p.num_rows, work_of(p),
               [&](int64_t begin, int64_t end) { cpu::count_outside(p, begin, end); });
  }
}

template <bool kCuda>
Tensor node_dropout(const Tensor& x_, const OptTensor& nodes_, const Tensor& seed, double dropout) {
  STD_TORCH_CHECK(dropout >= 0 && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
  NodeDropout p;
  fill(p, x_, x_.dim() == 2 ? x_.size(0) : 0);
  p.dropout = dropout;
  check_vector(nodes_, "nodes", p.num_rows);
  check_type(nodes_, "nodes", ScalarType::Long);
  check_device(nodes_, "nodes", x_);
  check_vector(seed, "seed", 1);
  check_type(seed, "seed", ScalarType::Long);
  check_device(seed, "seed", x_);
  const Tensor x = to_contiguous(x_);
  const OptTensor nodes = to_contiguous(nodes_);
  p.x = x.const_data_ptr();
  p.nodes = static_cast<const int64_t*>(pointer(nodes));
  p.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  Tensor out = empty(x, {p.num_rows, p.dim}, x.scalar_type());
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::node_dropout(p, launch.stream()), "node_dropout");
  } else {
    share_rows(p.num_rows, work_of(p),
               [&](int64_t begin, int64_t end) { cpu::node_dropout(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Execution paths: expand rows to all positions; count nonzero rows outside of a path; dropout keyed by
  // (seed, node, column).
  m.def("expand_rows(Tensor x, Tensor position, float fill) -> Tensor");
  m.def("count_outside(Tensor x, Tensor position, Tensor(a!) counter) -> ()");
  m.def("node_dropout(Tensor x, Tensor? nodes, Tensor seed, float dropout) -> Tensor");
}

PYG_FAST_IMPL(expand_rows)
PYG_FAST_IMPL(count_outside)
PYG_FAST_IMPL(node_dropout)
