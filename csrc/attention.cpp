#include <algorithm>

#include "cpu/cpu.h"
#include "stable.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/cuda.h"
#endif

namespace pyg_fast {
namespace {

void check_features(const Tensor& t, const char* name, int64_t nodes, const Attention& p,
                    ScalarType type, const Tensor& on) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == nodes && t.size(1) == p.heads &&
                      t.size(2) == p.channels,
                  name, " must have shape [", nodes, ", ", p.heads, ", ", p.channels, "]");
  check_type(t, name, type);
  check_device(t, name, on);
}

// A number of type acc per node or edge and head.
void check_scores(const OptTensor& t, const char* name, int64_t rows, const Attention& p,
                  ScalarType acc, const Tensor& on) {
  if (!t) return;
  check_matrix(*t, name, rows, p.heads);
  check_type(t, name, acc);
  check_device(t, name, on);
}

void check_per_channel(const OptTensor& t, const char* name, const Attention& p, ScalarType type,
                       const Tensor& on) {
  STD_TORCH_CHECK(!t || t->numel() == p.heads * p.channels, name, " must have ",
                  p.heads * p.channels, " elements");
  check_type(t, name, type);
  check_device(t, name, on);
}

// What all of them share.
void fill(Attention& p, const Csr& csr, const Tensor& x, const OptTensor& seed, int64_t num_loops,
          double negative_slope, double dropout) {
  STD_TORCH_CHECK(x.dim() == 3, "x must have three dimensions, got ", x.dim());
  p.csr = csr;
  p.dtype = dtype_of(x, "x");
  p.heads = x.size(1);
  p.channels = x.size(2);
  p.num_loops = num_loops;
  p.negative_slope = negative_slope;
  p.dropout = dropout;
  STD_TORCH_CHECK(num_loops >= 0 && num_loops <= std::min(csr.num_rows, csr.num_cols),
                  "num_loops must be at most the nodes of either side");
  STD_TORCH_CHECK(dropout >= 0 && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
  STD_TORCH_CHECK(dropout == 0 || seed, "dropout needs a seed");
  check_vector(seed, "seed", 1);
  check_type(seed, "seed", ScalarType::Long);
  check_device(seed, "seed", x);
  p.seed = static_cast<const int64_t*>(pointer(seed));
}

Tensor empty_as(const Tensor& like, int64_t nodes, const Attention& p, ScalarType type) {
  return empty(like, {nodes, p.heads, p.channels}, type);
}

using GatResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gatv2Result = std::tuple<Tensor, Tensor, Tensor>;

template <typename Run>
GatResult gat(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& x_,
              const Tensor& alpha_src_, const Tensor& alpha_dst_, const OptTensor& alpha_edge_,
              const OptTensor& alpha_loop_, const OptTensor& bias_, const OptTensor& seed,
              int64_t num_loops, double negative_slope, double dropout, bool training,
              bool out_acc, const Run& run) {
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
  const int64_t kept = training ? rows : 0;
  Tensor y = empty_as(x, kept, p, acc), y_plus = empty_as(x, kept, p, acc);
  Tensor lse = empty(x, {kept, p.heads}, acc), mass_plus = empty(x, {kept, p.heads}, acc);
  p.out = out.mutable_data_ptr();
  if (training) {
    p.y = y.mutable_data_ptr();
    p.y_plus = y_plus.mutable_data_ptr();
    p.lse = lse.mutable_data_ptr();
    p.mass_plus = mass_plus.mutable_data_ptr();
  }
  run(p, x);
  return {out, y, y_plus, lse, mass_plus};
}

template <typename Run>
GatResult gat_backward(const Tensor& t_rowptr, const Tensor& t_col, const OptTensor& t_perm,
                       const Tensor& x_, const Tensor& alpha_src_, const Tensor& alpha_dst_,
                       const OptTensor& alpha_edge_, const OptTensor& alpha_loop_,
                       const OptTensor& seed, const Tensor& y_, const Tensor& y_plus_,
                       const Tensor& lse_, const Tensor& mass_plus_, const Tensor& grad_,
                       int64_t num_loops, double negative_slope, double dropout, const Run& run) {
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
  check_scores(lse_, "lse", destinations, p, acc, t_col);
  check_scores(mass_plus_, "mass_plus", destinations, p, acc, t_col);
  p.out_acc = grad_.scalar_type() == acc && acc != type;
  check_features(grad_, "grad", destinations, p, p.out_acc ? acc : type, t_col);
  const Tensor x = to_contiguous(x_), alpha_src = to_contiguous(alpha_src_),
               alpha_dst = to_contiguous(alpha_dst_), y = to_contiguous(y_),
               y_plus = to_contiguous(y_plus_), lse = to_contiguous(lse_),
               mass_plus = to_contiguous(mass_plus_), grad = to_contiguous(grad_);
  const OptTensor alpha_edge = to_contiguous(alpha_edge_), alpha_loop = to_contiguous(alpha_loop_);
  p.x = x.const_data_ptr();
  p.alpha_src = alpha_src.const_data_ptr();
  p.alpha_dst = alpha_dst.const_data_ptr();
  p.alpha_edge = pointer(alpha_edge);
  p.alpha_loop = pointer(alpha_loop);
  p.y = y.const_data_ptr();
  p.y_plus = y_plus.const_data_ptr();
  p.lse = lse.const_data_ptr();
  p.mass_plus = mass_plus.const_data_ptr();
  p.grad = grad.const_data_ptr();

  Tensor grad_x = empty_as(x, sources, p, type);
  Tensor grad_src = empty(x, {sources, p.heads}, acc);
  Tensor grad_dst = empty(x, {destinations, p.heads}, acc);
  // Zeros for the edges that the graph leaves out.
  Tensor grad_edge = zeros(alpha_src, {alpha_edge ? csr.num_edges : 0, p.heads});
  Tensor grad_loop = empty(x, {alpha_loop ? num_loops : 0, p.heads}, acc);
  Tensor stat = empty(x, {destinations, 3, p.heads}, acc);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_alpha_src = grad_src.mutable_data_ptr();
  p.grad_alpha_dst = grad_dst.mutable_data_ptr();
  if (alpha_edge) p.grad_alpha_edge = grad_edge.mutable_data_ptr();
  if (alpha_loop) p.grad_alpha_loop = grad_loop.mutable_data_ptr();
  p.stat = stat.mutable_data_ptr();
  run(p, x);
  return {grad_x, grad_src, grad_dst, grad_edge, grad_loop};
}

template <typename Run>
Gatv2Result gatv2(const Tensor& rowptr, const Tensor& col, const OptTensor& perm, const Tensor& x_,
                  const Tensor& x_dst_, const Tensor& att_, const OptTensor& bias_,
                  const OptTensor& seed, int64_t num_loops, double negative_slope, double dropout,
                  bool training, bool out_acc, const Run& run) {
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
  const int64_t kept = training ? rows : 0;
  Tensor y = empty_as(x, kept, p, acc), lse = empty(x, {kept, p.heads}, acc);
  p.out = out.mutable_data_ptr();
  if (training) {
    p.y = y.mutable_data_ptr();
    p.lse = lse.mutable_data_ptr();
  }
  run(p, x);
  return {out, y, lse};
}

template <typename Run>
Gatv2Result gatv2_backward(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                           const Tensor& t_rowptr, const Tensor& t_col, const OptTensor& t_perm,
                           const Tensor& x_, const Tensor& x_dst_, const Tensor& att_,
                           const OptTensor& seed, const Tensor& y_, const Tensor& lse_,
                           const Tensor& grad_, int64_t num_loops, double negative_slope,
                           double dropout, const Run& run) {
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
  check_scores(lse_, "lse", destinations, p, acc, col);
  p.out_acc = grad_.scalar_type() == acc && acc != type;
  check_features(grad_, "grad", destinations, p, p.out_acc ? acc : type, col);
  const Tensor x = to_contiguous(x_), x_dst = to_contiguous(x_dst_), att = to_contiguous(att_),
               y = to_contiguous(y_), lse = to_contiguous(lse_), grad = to_contiguous(grad_);
  p.x = x.const_data_ptr();
  p.x_dst = x_dst.const_data_ptr();
  p.att = att.const_data_ptr();
  p.y = y.const_data_ptr();
  p.lse = lse.const_data_ptr();
  p.grad = grad.const_data_ptr();

  Tensor grad_x = empty_as(x, sources, p, type), grad_x_dst = empty_as(x, destinations, p, type);
  Tensor grad_att = zeros(lse, {p.heads, p.channels});
  Tensor stat = empty(x, {destinations, 2, p.heads}, acc);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_x_dst = grad_x_dst.mutable_data_ptr();
  p.grad_att = grad_att.mutable_data_ptr();
  p.stat = stat.mutable_data_ptr();
  run(p, x);
  return {grad_x, grad_x_dst, grad_att};
}

// Work of one pass over the edges: an exponential for each head beside the features.
int64_t work_of(const Attention& p) {
  return (p.csr.num_edges + p.csr.num_rows + p.csr.num_cols) * p.heads * (p.channels + 32) / 8;
}

// run(row_begin, row_end, k) of shares of the rows of about equal numbers of edges.
template <typename Run>
void share_rows(const Csr& csr, int64_t work, const Run& run) {
  const int64_t shares = num_threads();
  parallel(shares, work, [&](int64_t k) {
    run(cpu::row_of_share(csr, k, shares), cpu::row_of_share(csr, k + 1, shares), k);
  });
}

GatResult gat_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& x,
                  const Tensor& alpha_src, const Tensor& alpha_dst, OptTensor alpha_edge,
                  OptTensor alpha_loop, OptTensor bias, OptTensor seed, int64_t num_loops,
                  double negative_slope, double dropout, bool training, bool out_acc) {
  return gat(rowptr, col, perm, x, alpha_src, alpha_dst, alpha_edge, alpha_loop, bias, seed,
             num_loops, negative_slope, dropout, training, out_acc, [](const Gat& p, const Tensor&) {
               share_rows(p.csr, work_of(p), [&](int64_t begin, int64_t end, int64_t) {
                 cpu::gat(p, begin, end);
               });
             });
}

GatResult gat_backward_cpu(const Tensor& t_rowptr, const Tensor& t_col, OptTensor t_perm,
                           const Tensor& x, const Tensor& alpha_src, const Tensor& alpha_dst,
                           OptTensor alpha_edge, OptTensor alpha_loop, OptTensor seed,
                           const Tensor& y, const Tensor& y_plus, const Tensor& lse,
                           const Tensor& mass_plus, const Tensor& grad, int64_t num_loops,
                           double negative_slope, double dropout) {
  return gat_backward(
      t_rowptr, t_col, t_perm, x, alpha_src, alpha_dst, alpha_edge, alpha_loop, seed, y, y_plus,
      lse, mass_plus, grad, num_loops, negative_slope, dropout,
      [](const GatBackward& p, const Tensor&) {
        const int64_t shares = num_threads(), nodes = p.csr.num_cols;
        parallel(shares, nodes * p.heads * (p.channels + 8) / 8, [&](int64_t k) {
          cpu::gat_backward_dst(p, nodes * k / shares, nodes * (k + 1) / shares);
        });
        share_rows(p.csr, work_of(p), [&](int64_t begin, int64_t end, int64_t) {
          cpu::gat_backward_src(p, begin, end);
        });
      });
}

Gatv2Result gatv2_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& x,
                      const Tensor& x_dst, const Tensor& att, OptTensor bias, OptTensor seed,
                      int64_t num_loops, double negative_slope, double dropout, bool training,
                      bool out_acc) {
  return gatv2(rowptr, col, perm, x, x_dst, att, bias, seed, num_loops, negative_slope, dropout,
               training, out_acc, [](const Gatv2& p, const Tensor&) {
                 share_rows(p.csr, work_of(p), [&](int64_t begin, int64_t end, int64_t) {
                   cpu::gatv2(p, begin, end);
                 });
               });
}

Gatv2Result gatv2_backward_cpu(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                               const Tensor& t_rowptr, const Tensor& t_col, OptTensor t_perm,
                               const Tensor& x, const Tensor& x_dst, const Tensor& att,
                               OptTensor seed, const Tensor& y, const Tensor& lse,
                               const Tensor& grad, int64_t num_loops, double negative_slope,
                               double dropout) {
  return gatv2_backward(
      rowptr, col, perm, t_rowptr, t_col, t_perm, x, x_dst, att, seed, y, lse, grad, num_loops,
      negative_slope, dropout, [&](const Gatv2Backward& p, const Tensor& on) {
        SumOfShares sum(lse, num_threads(), p.heads * p.channels);
        share_rows(p.csr, work_of(p), [&](int64_t begin, int64_t end, int64_t k) {
          cpu::gatv2_backward_dst(p, begin, end, sum.share(k));
        });
        sum.write(p.grad_att);
        share_rows(p.t_csr, work_of(p), [&](int64_t begin, int64_t end, int64_t) {
          cpu::gatv2_backward_src(p, begin, end);
        });
      });
}

#ifdef PYG_FAST_WITH_CUDA
GatResult gat_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& x,
                   const Tensor& alpha_src, const Tensor& alpha_dst, OptTensor alpha_edge,
                   OptTensor alpha_loop, OptTensor bias, OptTensor seed, int64_t num_loops,
                   double negative_slope, double dropout, bool training, bool out_acc) {
  return gat(rowptr, col, perm, x, alpha_src, alpha_dst, alpha_edge, alpha_loop, bias, seed,
             num_loops, negative_slope, dropout, training, out_acc,
             [](const Gat& p, const Tensor& on) {
               Launch launch(on);
               launch.check(cuda::gat(p, launch.stream()), "gat");
             });
}

GatResult gat_backward_cuda(const Tensor& t_rowptr, const Tensor& t_col, OptTensor t_perm,
                            const Tensor& x, const Tensor& alpha_src, const Tensor& alpha_dst,
                            OptTensor alpha_edge, OptTensor alpha_loop, OptTensor seed,
                            const Tensor& y, const Tensor& y_plus, const Tensor& lse,
                            const Tensor& mass_plus, const Tensor& grad, int64_t num_loops,
                            double negative_slope, double dropout) {
  return gat_backward(t_rowptr, t_col, t_perm, x, alpha_src, alpha_dst, alpha_edge, alpha_loop,
                      seed, y, y_plus, lse, mass_plus, grad, num_loops, negative_slope, dropout,
                      [](const GatBackward& p, const Tensor& on) {
                        Launch launch(on);
                        void* scratch = launch.scratch(cuda::gat_backward_scratch(p));
                        launch.check(cuda::gat_backward(p, scratch, launch.stream()),
                                     "gat_backward");
                      });
}

Gatv2Result gatv2_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm, const Tensor& x,
                       const Tensor& x_dst, const Tensor& att, OptTensor bias, OptTensor seed,
                       int64_t num_loops, double negative_slope, double dropout, bool training,
                       bool out_acc) {
  return gatv2(rowptr, col, perm, x, x_dst, att, bias, seed, num_loops, negative_slope, dropout,
               training, out_acc, [](const Gatv2& p, const Tensor& on) {
                 Launch launch(on);
                 launch.check(cuda::gatv2(p, launch.stream()), "gatv2");
               });
}

Gatv2Result gatv2_backward_cuda(const Tensor& rowptr, const Tensor& col, OptTensor perm,
                                const Tensor& t_rowptr, const Tensor& t_col, OptTensor t_perm,
                                const Tensor& x, const Tensor& x_dst, const Tensor& att,
                                OptTensor seed, const Tensor& y, const Tensor& lse,
                                const Tensor& grad, int64_t num_loops, double negative_slope,
                                double dropout) {
  return gatv2_backward(
      rowptr, col, perm, t_rowptr, t_col, t_perm, x, x_dst, att, seed, y, lse, grad, num_loops,
      negative_slope, dropout, [](const Gatv2Backward& p, const Tensor& on) {
        Launch launch(on);
        void* scratch = launch.scratch(cuda::gatv2_backward_scratch(p));
        launch.check(cuda::gatv2_backward(p, scratch, launch.stream()), "gatv2_backward");
      });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("gat", TORCH_BOX(&pyg_fast::gat_cpu));
  m.impl("gat_backward", TORCH_BOX(&pyg_fast::gat_backward_cpu));
  m.impl("gatv2", TORCH_BOX(&pyg_fast::gatv2_cpu));
  m.impl("gatv2_backward", TORCH_BOX(&pyg_fast::gatv2_backward_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("gat", TORCH_BOX(&pyg_fast::gat_cuda));
  m.impl("gat_backward", TORCH_BOX(&pyg_fast::gat_backward_cuda));
  m.impl("gatv2", TORCH_BOX(&pyg_fast::gatv2_cuda));
  m.impl("gatv2_backward", TORCH_BOX(&pyg_fast::gatv2_backward_cuda));
}
#endif
