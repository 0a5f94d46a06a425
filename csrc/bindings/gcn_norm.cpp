#include "bindings/coo.h"
#include "params/gcn_norm.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor> gcn_degree(const Tensor& edge_index_,
                                                      const OptTensor& edge_weight_,
                                                      int64_t num_nodes, bool drop_loops,
                                                      bool reverse) {
  GcnDegree p;
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  p.coo = coo_of(edge_index, num_nodes, num_nodes, reverse, drop_loops);
  const OptTensor value = to_contiguous(edge_weight_);
  check_vector(value, "edge_weight", p.coo.num_edges);
  check_device(value, "edge_weight", edge_index);
  if (value) p.dtype = dtype_of(*value, "edge_weight");
  p.weighted = value.has_value();
  p.value = pointer(value);
  const ScalarType type = value ? acc_of(value->scalar_type()) : ScalarType::Int;
  Tensor degree = empty(edge_index, {num_nodes}, type);
  Tensor last = empty(edge_index, {value && drop_loops ? num_nodes : 0}, ScalarType::Long);
  Tensor counts = empty(edge_index, {2}, ScalarType::Long);
  Tensor chunk_loops =
      empty(edge_index, {drop_loops ? loop_chunks(p.coo.num_edges) : 0}, ScalarType::Long);
  p.degree = degree.mutable_data_ptr();
  if (value && drop_loops) p.last = static_cast<int64_t*>(last.mutable_data_ptr());
  p.counts = static_cast<int64_t*>(counts.mutable_data_ptr());
  if (drop_loops) p.chunk_loops = static_cast<int64_t*>(chunk_loops.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(edge_index);
    void* scratch = launch.scratch(cuda::gcn_degree_scratch(p));
    launch.check(cuda::gcn_degree(p, scratch, launch.stream()), "gcn_degree");
  } else {
    shared_out(p.coo.num_dst, p.coo.num_edges,
               [&](int64_t begin, int64_t end) { cpu::gcn_degree(p, begin, end); });
  }
  return {degree, last, counts, chunk_loops};
}

void check_before(const OptTensor& before, const Coo& coo, const Tensor& on) {
  check_vector(before, "before", loop_chunks(coo.num_edges));
  check_type(before, "before", ScalarType::Long);
  check_device(before, "before", on);
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor> gcn_weight(const Tensor& edge_index_,
                                              const OptTensor& edge_weight_, const Tensor& degree_,
                                              const OptTensor& last_, const OptTensor& before_,
                                              int64_t num_kept, bool loops, double fill_value,
                                              ScalarType dtype) {
  STD_TORCH_CHECK(degree_.dim() == 1, "degree must have one dimension, got ", degree_.dim());
  GcnWeight p;
  const int64_t num_nodes = degree_.size(0);
  const Tensor edge_index = with_contiguous_rows(edge_index_), degree = to_contiguous(degree_);
  p.coo = coo_of(edge_index, num_nodes, num_nodes, false, false);
  p.loops = loops;
  p.fill_value = fill_value;
  const OptTensor value = to_contiguous(edge_weight_), last = to_contiguous(last_);
  const OptTensor before = to_contiguous(before_);
  check_vector(value, "edge_weight", p.coo.num_edges);
  check_type(value, "edge_weight", dtype);
  check_type(degree, "degree", value ? acc_of(dtype) : ScalarType::Int);
  STD_TORCH_CHECK(!last || (value && loops), "last needs values and loops");
  check_vector(last, "last", num_nodes);
  check_type(last, "last", ScalarType::Long);
  check_before(before, p.coo, edge_index);
  // Without loops to drop, num_kept is the number of edges or 0.
  STD_TORCH_CHECK(num_kept == 0 || num_kept == p.coo.num_edges ||
                      (before && num_kept > 0 && num_kept < p.coo.num_edges),
                  "num_kept must fit the number of edges, got ", num_kept);
  check_device(value, "edge_weight", edge_index);
  check_device(degree, "degree", edge_index);
  check_device(last, "last", edge_index);
  p.num_kept = num_kept;
  p.weighted = value.has_value();
  p.value = pointer(value);
  p.degree = degree.const_data_ptr();
  p.last = static_cast<const int64_t*>(pointer(last));
  p.before = static_cast<const int64_t*>(pointer(before));
  const int64_t total = p.num_kept + (loops ? num_nodes : 0);
  Tensor weight = empty(edge_index, {total}, dtype);
  p.dtype = dtype_of(weight, "dtype");
  Tensor scale = empty(edge_index, {num_nodes}, acc_of(dtype));
  Tensor with_loops = empty(edge_index, {2, loops ? total : 0}, edge_index.scalar_type());
  p.weight = weight.mutable_data_ptr();
  p.scale = scale.mutable_data_ptr();
  if (loops) p.edge_index = with_loops.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(edge_index);
    launch.check(cuda::gcn_weight(p, launch.stream()), "gcn_weight");
  } else {
    shared_out(p.coo.num_dst, 4 * p.coo.num_dst,
               [&](int64_t begin, int64_t end) { cpu::gcn_scale(p, begin, end); });
    if (p.num_kept > 0) {
      shared_out(loop_chunks(p.coo.num_edges), 2 * p.coo.num_edges,
                 [&](int64_t begin, int64_t end) { cpu::gcn_weight(p, begin, end); });
    }
  }
  return {with_loops, weight, scale};
}

template <bool kCuda>
Tensor gcn_weight_backward(const Tensor& edge_index_, const Tensor& grad_, const Tensor& scale_,
                           const Tensor& grad_degree_, const OptTensor& before_, bool reverse) {
  STD_TORCH_CHECK(grad_.dim() == 1, "grad must have one dimension, got ", grad_.dim());
  STD_TORCH_CHECK(scale_.dim() == 1, "scale must have one dimension, got ", scale_.dim());
  GcnWeightBackward p;
  const Tensor edge_index = with_contiguous_rows(edge_index_), grad = to_contiguous(grad_);
  const int64_t num_nodes = scale_.size(0);
  p.coo = coo_of(edge_index, num_nodes, num_nodes, reverse, false);
  p.dtype = dtype_of(grad, "grad");
  check_device(grad, "grad", edge_index);
  const OptTensor before = to_contiguous(before_);
  check_before(before, p.coo, edge_index);
  const int64_t num_edges = p.coo.num_edges, num_others = grad.size(0) - num_nodes;
  STD_TORCH_CHECK(before ? num_others >= 0 && num_others <= num_edges
                         : num_others == num_edges || grad.size(0) == num_edges,
                  "grad must fit the numbers of edges and nodes, got ", grad.size(0));
  p.num_kept = before ? num_others : num_edges;
  const ScalarType type = grad.scalar_type();
  const Tensor scale = to_contiguous(scale_), grad_degree = to_contiguous(grad_degree_);
  p.scale = checked_scale(scale, "scale", num_nodes, type, edge_index);
  p.grad_degree = checked_scale(grad_degree, "grad_degree", num_nodes, type, edge_index);
  Tensor out = empty(grad, {num_edges}, type);
  p.before = static_cast<const int64_t*>(pointer(before));
  p.grad = grad.const_data_ptr();
  p.out = out.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(edge_index);
    launch.check(cuda::gcn_weight_backward(p, launch.stream()), "gcn_weight_backward");
  } else {
    shared_out(loop_chunks(p.coo.num_edges), 2 * p.coo.num_edges,
               [&](int64_t begin, int64_t end) { cpu::gcn_weight_backward(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // The normalisation of a GCN: (degree, last, counts, chunk_loops), then (edge_index, weight,
  // scale), and the gradient of edge_weight.
  m.def(
      "gcn_degree(Tensor edge_index, Tensor? edge_weight, SymInt num_nodes, bool drop_loops, "
      "bool reverse) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gcn_weight(Tensor edge_index, Tensor? edge_weight, Tensor degree, Tensor? last, "
      "Tensor? before, SymInt num_kept, bool loops, float fill_value, ScalarType dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "gcn_weight_backward(Tensor edge_index, Tensor grad, Tensor scale, Tensor grad_degree, "
      "Tensor? before, bool reverse) -> Tensor");
}

PYG_FAST_IMPL(gcn_degree)
PYG_FAST_IMPL(gcn_weight)
PYG_FAST_IMPL(gcn_weight_backward)
