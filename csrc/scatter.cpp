#include "cpu/cpu.h"
#include "stable.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

Coo coo_of(const Tensor& edge_index, int64_t num_src, int64_t num_dst, bool reverse,
           bool drop_loops) {
  STD_TORCH_CHECK(num_src >= 0 && num_dst >= 0, "numbers of nodes must not be negative");
  Coo coo;
  coo.index64 = is_index64(edge_index, "edge_index");
  const int64_t second = edge_index.stride(0) * (coo.index64 ? 8 : 4);
  const auto* data = static_cast<const char*>(edge_index.const_data_ptr());
  coo.src = reverse ? data + second : data;
  coo.dst = reverse ? data : data + second;
  coo.drop_loops = drop_loops;
  coo.reversed = reverse;
  coo.num_src = num_src;
  coo.num_dst = num_dst;
  coo.num_edges = edge_index.size(1);
  return coo;
}

// fn(begin, end) for [0, n) in one share a thread that `work` pays for: some kernels walk all edges
// for each share, which is lost where shares do not run at once.
template <typename Fn>
void shared_out(int64_t n, int64_t work, const Fn& fn) {
  const int64_t threads = paid_threads(work), shares = n < 2 ? 1 : n < threads ? n : threads;
  parallel(shares, work, [&](int64_t k) { fn(n * k / shares, n * (k + 1) / shares); });
}

template <typename Run>
std::tuple<Tensor, Tensor> scatter(const Tensor& edge_index_, const OptTensor& value_,
                                   const Tensor& x_, const OptTensor& row_scale_,
                                   const OptTensor& col_scale_, const OptTensor& diag_,
                                   int64_t num_dst, bool reverse, bool drop_loops, bool count,
                                   bool report, const Run& run) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  Scatter p;
  p.dtype = dtype_of(x_, "x");
  p.dim = x_.size(1);
  const ScalarType type = x_.scalar_type(), acc = acc_of(type);
  const Tensor edge_index = with_contiguous_rows(edge_index_), x = to_contiguous(x_);
  p.coo = coo_of(edge_index, x.size(0), num_dst, reverse, drop_loops);
  check_device(x, "x", edge_index);
  p.x = x.const_data_ptr();
  const OptTensor value = to_contiguous(value_);
  check_vector(value, "value", p.coo.num_edges);
  check_device(value, "value", edge_index);
  p.value_acc = value && value->scalar_type() == acc;
  if (!p.value_acc) check_type(value, "value", type);
  p.value = pointer(value);
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const OptTensor diag = to_contiguous(diag_);
  p.row_scale = checked_scale(row_scale, "row_scale", num_dst, type, edge_index);
  p.col_scale = checked_scale(col_scale, "col_scale", p.coo.num_src, type, edge_index);
  p.diag = checked_scale(diag, "diag", num_dst, type, edge_index);
  STD_TORCH_CHECK(!diag || num_dst == p.coo.num_src, "diag needs a square graph");
  Tensor out = empty(x, {num_dst, p.dim}, type);
  Tensor invalid = empty(x, {count ? 1 : 0}, ScalarType::Long);
  p.out = out.mutable_data_ptr();
  p.report = report;
  if (count) p.invalid = static_cast<int64_t*>(invalid.mutable_data_ptr());
  run(p, x);
  return {out, invalid};
}

std::tuple<Tensor, Tensor> scatter_cpu(const Tensor& edge_index, OptTensor value, const Tensor& x,
                                       OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                                       int64_t num_dst, bool reverse, bool drop_loops,
                                       bool count, bool report) {
  return scatter(edge_index, value, x, row_scale, col_scale, diag, num_dst, reverse, drop_loops,
                 count, report, [](const Scatter& p, const Tensor&) {
                   const int64_t work = (p.coo.num_edges + p.coo.num_dst) * (p.dim + 8) / 8;
                   shared_out(p.coo.num_dst, work, [&](int64_t begin, int64_t end) {
                     cpu::scatter(p, begin, end);
                   });
                 });
}

template <typename Run>
Tensor edge_dot(const Tensor& edge_index_, const Tensor& a_, const Tensor& b_,
                const OptTensor& row_scale_, const OptTensor& col_scale_, bool drop_loops,
                const Run& run) {
  STD_TORCH_CHECK(a_.dim() == 2, "a must have two dimensions, got ", a_.dim());
  STD_TORCH_CHECK(b_.dim() == 2, "b must have two dimensions, got ", b_.dim());
  EdgeDot p;
  p.dtype = dtype_of(a_, "a");
  p.dim = a_.size(1);
  check_matrix(b_, "b", b_.size(0), p.dim);
  check_type(b_, "b", a_.scalar_type());
  const Tensor edge_index = with_contiguous_rows(edge_index_);
  check_device(a_, "a", edge_index);
  check_device(b_, "b", edge_index);
  const Tensor a = to_contiguous(a_), b = to_contiguous(b_);
  p.coo = coo_of(edge_index, b.size(0), a.size(0), false, drop_loops);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  const OptTensor row_scale = to_contiguous(row_scale_), col_scale = to_contiguous(col_scale_);
  const ScalarType type = a.scalar_type();
  p.row_scale = checked_scale(row_scale, "row_scale", p.coo.num_dst, type, edge_index);
  p.col_scale = checked_scale(col_scale, "col_scale", p.coo.num_src, type, edge_index);
  Tensor out = empty(a, {p.coo.num_edges}, type);
  p.out = out.mutable_data_ptr();
  run(p, a);
  return out;
}

Tensor edge_dot_cpu(const Tensor& edge_index, const Tensor& a, const Tensor& b,
                    OptTensor row_scale, OptTensor col_scale, bool drop_loops) {
  return edge_dot(edge_index, a, b, row_scale, col_scale, drop_loops,
                  [](const EdgeDot& p, const Tensor&) {
                    const int64_t work = p.coo.num_edges * (p.dim + 8) / 8;
                    shared_out(p.coo.num_edges, work, [&](int64_t begin, int64_t end) {
                      cpu::edge_dot(p, begin, end);
                    });
                  });
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor> gcn_degree(const Tensor& edge_index_,
                                                      const OptTensor& edge_weight_,
                                                      int64_t num_nodes, bool drop_loops,
                                                      bool reverse, const Run& run) {
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
  run(p, edge_index);
  return {degree, last, counts, chunk_loops};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gcn_degree_cpu(const Tensor& edge_index,
                                                          OptTensor edge_weight,
                                                          int64_t num_nodes, bool drop_loops,
                                                          bool reverse) {
  return gcn_degree(edge_index, edge_weight, num_nodes, drop_loops, reverse,
                    [](const GcnDegree& p, const Tensor&) {
                      shared_out(p.coo.num_dst, p.coo.num_edges, [&](int64_t begin, int64_t end) {
                        cpu::gcn_degree(p, begin, end);
                      });
                    });
}

void check_before(const OptTensor& before, const Coo& coo, const Tensor& on) {
  check_vector(before, "before", loop_chunks(coo.num_edges));
  check_type(before, "before", ScalarType::Long);
  check_device(before, "before", on);
}

template <typename Run>
std::tuple<Tensor, Tensor, Tensor> gcn_weight(const Tensor& edge_index_,
                                              const OptTensor& edge_weight_,
                                              const Tensor& degree_, const OptTensor& last_,
                                              const OptTensor& before_, int64_t num_kept,
                                              bool loops, double fill_value, ScalarType dtype,
                                              const Run& run) {
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
  // Without loops to leave out, all edges are asked for or none.
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
  run(p, edge_index);
  return {with_loops, weight, scale};
}

std::tuple<Tensor, Tensor, Tensor> gcn_weight_cpu(const Tensor& edge_index, OptTensor edge_weight,
                                                  const Tensor& degree, OptTensor last,
                                                  OptTensor before, int64_t num_kept, bool loops,
                                                  double fill_value, ScalarType dtype) {
  return gcn_weight(edge_index, edge_weight, degree, last, before, num_kept, loops, fill_value,
                    dtype, [](const GcnWeight& p, const Tensor&) {
                      shared_out(p.coo.num_dst, 4 * p.coo.num_dst, [&](int64_t begin, int64_t end) {
                        cpu::gcn_scale(p, begin, end);
                      });
                      if (p.num_kept == 0) return;
                      const int64_t chunks = loop_chunks(p.coo.num_edges);
                      shared_out(chunks, 2 * p.coo.num_edges, [&](int64_t begin, int64_t end) {
                        cpu::gcn_weight(p, begin, end);
                      });
                    });
}

template <typename Run>
Tensor gcn_weight_backward(const Tensor& edge_index_, const Tensor& grad_, const Tensor& scale_,
                           const Tensor& grad_degree_, const OptTensor& before_, bool reverse,
                           const Run& run) {
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
  run(p, edge_index);
  return out;
}

Tensor gcn_weight_backward_cpu(const Tensor& edge_index, const Tensor& grad, const Tensor& scale,
                               const Tensor& grad_degree, OptTensor before, bool reverse) {
  return gcn_weight_backward(
      edge_index, grad, scale, grad_degree, before, reverse,
      [](const GcnWeightBackward& p, const Tensor&) {
        const int64_t chunks = loop_chunks(p.coo.num_edges);
        shared_out(chunks, 2 * p.coo.num_edges, [&](int64_t begin, int64_t end) {
          cpu::gcn_weight_backward(p, begin, end);
        });
      });
}

#ifdef PYG_FAST_WITH_CUDA
std::tuple<Tensor, Tensor> scatter_cuda(const Tensor& edge_index, OptTensor value, const Tensor& x,
                                        OptTensor row_scale, OptTensor col_scale, OptTensor diag,
                                        int64_t num_dst, bool reverse, bool drop_loops,
                                       bool count, bool report) {
  return scatter(edge_index, value, x, row_scale, col_scale, diag, num_dst, reverse, drop_loops,
                 count, report, [](const Scatter& p, const Tensor& on) {
                   Launch launch(on);
                   void* scratch = launch.scratch(cuda::scatter_scratch(p));
                   launch.check(cuda::scatter(p, scratch, launch.stream()), "scatter");
                 });
}

Tensor edge_dot_cuda(const Tensor& edge_index, const Tensor& a, const Tensor& b,
                     OptTensor row_scale, OptTensor col_scale, bool drop_loops) {
  return edge_dot(edge_index, a, b, row_scale, col_scale, drop_loops,
                  [](const EdgeDot& p, const Tensor& on) {
                    Launch launch(on);
                    launch.check(cuda::edge_dot(p, launch.stream()), "edge_dot");
                  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gcn_degree_cuda(const Tensor& edge_index,
                                                           OptTensor edge_weight,
                                                           int64_t num_nodes, bool drop_loops,
                                                           bool reverse) {
  return gcn_degree(edge_index, edge_weight, num_nodes, drop_loops, reverse,
                    [](const GcnDegree& p, const Tensor& on) {
                      Launch launch(on);
                      launch.check(cuda::gcn_degree(p, launch.stream()), "gcn_degree");
                    });
}

std::tuple<Tensor, Tensor, Tensor> gcn_weight_cuda(const Tensor& edge_index, OptTensor edge_weight,
                                                   const Tensor& degree, OptTensor last,
                                                   OptTensor before, int64_t num_kept, bool loops,
                                                   double fill_value, ScalarType dtype) {
  return gcn_weight(edge_index, edge_weight, degree, last, before, num_kept, loops, fill_value,
                    dtype, [](const GcnWeight& p, const Tensor& on) {
                      Launch launch(on);
                      launch.check(cuda::gcn_weight(p, launch.stream()), "gcn_weight");
                    });
}

Tensor gcn_weight_backward_cuda(const Tensor& edge_index, const Tensor& grad, const Tensor& scale,
                                const Tensor& grad_degree, OptTensor before, bool reverse) {
  return gcn_weight_backward(edge_index, grad, scale, grad_degree, before, reverse,
                             [](const GcnWeightBackward& p, const Tensor& on) {
                               Launch launch(on);
                               launch.check(cuda::gcn_weight_backward(p, launch.stream()),
                                            "gcn_weight_backward");
                             });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("scatter", TORCH_BOX(&pyg_fast::scatter_cpu));
  m.impl("edge_dot", TORCH_BOX(&pyg_fast::edge_dot_cpu));
  m.impl("gcn_degree", TORCH_BOX(&pyg_fast::gcn_degree_cpu));
  m.impl("gcn_weight", TORCH_BOX(&pyg_fast::gcn_weight_cpu));
  m.impl("gcn_weight_backward", TORCH_BOX(&pyg_fast::gcn_weight_backward_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("scatter", TORCH_BOX(&pyg_fast::scatter_cuda));
  m.impl("edge_dot", TORCH_BOX(&pyg_fast::edge_dot_cuda));
  m.impl("gcn_degree", TORCH_BOX(&pyg_fast::gcn_degree_cuda));
  m.impl("gcn_weight", TORCH_BOX(&pyg_fast::gcn_weight_cuda));
  m.impl("gcn_weight_backward", TORCH_BOX(&pyg_fast::gcn_weight_backward_cuda));
}
#endif
