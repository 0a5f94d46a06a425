#include "bindings/spmm.h"
#include "params/sampled.h"

namespace pyg_fast {
namespace {

Sampling sampling_of(int64_t num_samples, int64_t strategy, const OptTensor& seed,
                     const Tensor& on) {
  STD_TORCH_CHECK(num_samples >= 1 && num_samples <= kMostSamples, "num_samples must be 1 to ",
                  kMostSamples, ", got ", num_samples);
  STD_TORCH_CHECK(strategy >= 0 && strategy <= 4, "there is no strategy ", strategy);
  Sampling s;
  s.num_samples = num_samples;
  s.strategy = static_cast<Strategy>(strategy);
  STD_TORCH_CHECK(s.strategy != Strategy::unbiased || seed, "seed must be given");
  check_vector(seed, "seed", 1);
  check_type(seed, "seed", ScalarType::Long);
  check_device(seed, "seed", on);
  s.seed = static_cast<const int64_t*>(pointer(seed));
  return s;
}

template <bool kCuda>
Tensor sampled_spmm(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                    const OptTensor& value, const Tensor& x, const OptTensor& row_scale,
                    const OptTensor& col_scale, const OptTensor& diag, const OptTensor& bias,
                    bool mean, bool out_acc, int64_t num_samples, int64_t strategy,
                    const OptTensor& seed) {
  SampledSpmm sampled;
  sampled.sampling = sampling_of(num_samples, strategy, seed, col);
  return aggregate(
      sampled, rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc,
      std::nullopt, std::nullopt, 0, [](const SampledSpmm& p, const Tensor& on) {
        if constexpr (kCuda) {
          Launch launch(on);
          void* scratch = launch.scratch(cuda::sampled_spmm_scratch(p));
          launch.check(cuda::sampled_spmm(p, scratch, launch.stream()), "sampled_spmm");
        } else {
          const int64_t edges = most_edges(p.csr, p.sampling) + p.csr.num_rows;
          share_rows(p.csr.num_rows, edges * (p.dim + 32) / 16,
                     [&](int64_t begin, int64_t end) { cpu::sampled_spmm(p, begin, end); });
        }
      });
}

template <typename Index>
void clear_tail(const SampleEdges& p) {
  for (int64_t at = static_cast<const Index*>(p.rowptr)[p.csr.num_rows]; at < p.num_slots; ++at) {
    p.row[at] = -1;
    p.col[at] = 0;
    static_cast<Index*>(p.perm)[at] = 0;
  }
}

template <bool kCuda>
std::tuple<Tensor, Tensor> sample_edges(const Tensor& rowptr, const Tensor& col,
                                        const OptTensor& perm, const Tensor& sampled_rowptr,
                                        int64_t num_slots, int64_t num_samples, int64_t strategy,
                                        const OptTensor& seed) {
  SampleEdges p;
  p.csr = csr_of(rowptr, col, perm, 0);
  p.sampling = sampling_of(num_samples, strategy, seed, col);
  STD_TORCH_CHECK(num_slots >= 0, "num_slots must not be negative, got ", num_slots);
  const ScalarType type = rowptr.scalar_type();
  check_vector(sampled_rowptr, "sampled_rowptr", p.csr.num_rows + 1);
  check_type(sampled_rowptr, "sampled_rowptr", type);
  check_device(sampled_rowptr, "sampled_rowptr", col);
  const Tensor begins = to_contiguous(sampled_rowptr);
  p.rowptr = begins.const_data_ptr();
  p.num_slots = num_slots;
  Tensor edges = empty(col, {2, num_slots}, ScalarType::Int);
  Tensor sampled_perm = empty(col, {num_slots}, type);
  p.col = static_cast<Col*>(edges.mutable_data_ptr());
  p.row = p.col + num_slots;
  p.perm = sampled_perm.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(col);
    void* scratch = launch.scratch(cuda::sampling_scratch(p.csr, p.sampling));
    launch.check(cuda::sample_edges(p, scratch, launch.stream()), "sample_edges");
  } else {
    share_rows(p.csr.num_rows, p.num_slots * 4 + p.csr.num_rows,
               [&](int64_t begin, int64_t end) { cpu::sample_edges(p, begin, end); });
    p.csr.index64 ? clear_tail<int64_t>(p) : clear_tail<int32_t>(p);
  }
  return {edges, sampled_perm};
}

// GPU only: a CPU sorts the sampled edges faster than it reads all edges.
template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor> sample_transposed(const Tensor& rowptr_, const Tensor& t_rowptr,
                                                     const Tensor& t_col, const Tensor& position,
                                                     int64_t num_slots, int64_t num_samples,
                                                     int64_t strategy, const OptTensor& seed) {
  SampleTransposed p;
  const ScalarType type = t_rowptr.scalar_type();
  STD_TORCH_CHECK(rowptr_.dim() == 1 && rowptr_.size(0) >= 1,
                  "rowptr must have shape [num_dst + 1]");
  check_type(rowptr_, "rowptr", type);
  check_device(rowptr_, "rowptr", t_col);
  p.csr = csr_of(t_rowptr, t_col, position, rowptr_.size(0) - 1);
  p.sampling = sampling_of(num_samples, strategy, seed, t_col);
  STD_TORCH_CHECK(p.sampling.strategy != Strategy::paper, "paper takes edges several times");
  STD_TORCH_CHECK(num_slots >= 0, "num_slots must not be negative, got ", num_slots);
  const Tensor rowptr = to_contiguous(rowptr_);
  p.rowptr = rowptr.const_data_ptr();
  p.num_slots = num_slots;
  Tensor out_rowptr = empty(t_col, {p.csr.num_rows + 1}, type);
  Tensor col = empty(t_col, {num_slots}, ScalarType::Int);
  Tensor perm = empty(t_col, {num_slots}, type);
  p.out_rowptr = out_rowptr.mutable_data_ptr();
  p.col = static_cast<Col*>(col.mutable_data_ptr());
  p.perm = perm.mutable_data_ptr();
  Launch launch(t_col);
  void* scratch = launch.scratch(cuda::sample_transposed_scratch(p));
  launch.check(cuda::sample_transposed(p, scratch, launch.stream()), "sample_transposed");
  return {out_rowptr, col, perm};
}

template <bool kCuda>
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x_) {
  STD_TORCH_CHECK(x_.dim() == 2, "x must have two dimensions, got ", x_.dim());
  QuantizeRows p;
  p.dtype = dtype_of(x_, "x");
  p.num_rows = x_.size(0);
  p.dim = x_.size(1);
  const Tensor x = to_contiguous(x_);
  p.x = x.const_data_ptr();
  Tensor out = empty(x, {p.num_rows, p.dim}, ScalarType::Char);
  Tensor scale = empty(x, {p.num_rows}, ScalarType::Float);
  p.out = static_cast<int8_t*>(out.mutable_data_ptr());
  p.scale = static_cast<float*>(scale.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(x);
    launch.check(cuda::quantize_rows(p, launch.stream()), "quantize_rows");
  } else {
    share_rows(p.num_rows, p.num_rows * (p.dim + 8) / 4,
               [&](int64_t begin, int64_t end) { cpu::quantize_rows(p, begin, end); });
  }
  return {out, scale};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // spmm over at most `num_samples` edges of each row; x may be quantized. Then the sampled edges and
  // their positions in the values; on a GPU also by source: t_rowptr, t_col, position.
  m.def(
      "sampled_spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, "
      "Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "int num_samples, int strategy, Tensor? seed) -> Tensor");
  m.def(
      "sample_edges(Tensor rowptr, Tensor col, Tensor? perm, Tensor sampled_rowptr, int num_slots, "
      "int num_samples, int strategy, Tensor? seed) -> (Tensor, Tensor)");
  m.def(
      "sample_transposed(Tensor rowptr, Tensor t_rowptr, Tensor t_col, Tensor position, "
      "int num_slots, int num_samples, int strategy, Tensor? seed) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_rows(Tensor x) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(sampled_spmm)
PYG_FAST_IMPL(sample_edges)
PYG_FAST_IMPL(quantize_rows)
PYG_FAST_CUDA_IMPL(sample_transposed)
