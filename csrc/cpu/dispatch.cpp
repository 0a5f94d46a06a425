#include <cstdlib>
#include <cstring>

#include "cpu.h"
#include "isa.h"
#include "rabbit_order.h"
#include "to_csr.h"

namespace pyg_fast::cpu {
namespace {

// PYG_FAST_CPU_ISA caps the choice.
const Kernels& choose() {
#if defined(PYG_FAST_X86)
  const char* cap = std::getenv("PYG_FAST_CPU_ISA");
  const auto allowed = [cap](const char* below) {
    return cap == nullptr || (std::strcmp(cap, "baseline") != 0 && std::strcmp(cap, below) != 0);
  };
  __builtin_cpu_init();
  // Every machine with AVX2 also converts half precision (F16C).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && allowed("avx2") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return avx512::kernels;
  }
  if (avx2 && allowed("baseline")) return avx2::kernels;
#endif
  return baseline::kernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

template <typename Index>
int64_t row_of_share(const Csr& csr, int64_t k, int64_t n) {
  constexpr int64_t kEdgesOfRow = 2;  // what a row costs by itself
  const auto* rowptr = static_cast<const Index*>(csr.rowptr);
  const auto cost = [&](int64_t row) { return rowptr[row] + kEdgesOfRow * row; };
  const int64_t total = cost(csr.num_rows);
  const int64_t wanted = total / n * k + total % n * k / n;
  int64_t low = 0, high = csr.num_rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Judged by a sample of the edges.
template <typename Index>
int64_t source_of_share(const Csr& csr, int64_t k, int64_t n) {
  constexpr int64_t kSamples = 4096, kParts = 256;  // parts: of all sources, in their order
  const auto* col = static_cast<const Index*>(csr.col);
  const int64_t edges = static_cast<const Index*>(csr.rowptr)[csr.num_rows];
  int64_t cost[kParts], total = kParts;
  for (int64_t& part : cost) part = 1;
  for (int64_t e = 0; e < edges; e += edges / kSamples + 1, ++total) {
    ++cost[static_cast<int64_t>(col[e]) * kParts / csr.num_cols];
  }
  int64_t wanted = total * k / n, part = 0;
  for (; wanted >= cost[part]; ++part) wanted -= cost[part];
  return (part * cost[part] + wanted) * csr.num_cols / (kParts * cost[part]);
}

}  // namespace

void spmm(const Spmm& p, int64_t row_begin, int64_t row_end) {
  kernels().spmm(p, row_begin, row_end);
}

void sampled_spmm(const SampledSpmm& p, int64_t row_begin, int64_t row_end) {
  kernels().sampled_spmm(p, row_begin, row_end);
}

void sample_edges(const SampleEdges& p, int64_t row_begin, int64_t row_end) {
  kernels().sample_edges(p, row_begin, row_end);
}

void quantize_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  kernels().quantize_rows(p, row_begin, row_end);
}

void spmm_max(const SpmmMax& p, int64_t row_begin, int64_t row_end) {
  kernels().spmm_max(p, row_begin, row_end);
}

void sddmm(const Sddmm& p, int64_t row_begin, int64_t row_end) {
  kernels().sddmm(p, row_begin, row_end);
}

void spmm_max_backward_value(const SpmmMaxBackwardValue& p, int64_t row_begin, int64_t row_end) {
  kernels().spmm_max_backward_value(p, row_begin, row_end);
}

void spmm_max_backward_x(const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end) {
  kernels().spmm_max_backward_x(p, dim_begin, dim_end);
}

void scatter(const Scatter& p, int64_t begin, int64_t end) { kernels().scatter(p, begin, end); }

void edge_dot(const EdgeDot& p, int64_t begin, int64_t end) { kernels().edge_dot(p, begin, end); }

void gcn_degree(const GcnDegree& p, int64_t begin, int64_t end) {
  kernels().gcn_degree(p, begin, end);
}

void gcn_scale(const GcnWeight& p, int64_t begin, int64_t end) {
  kernels().gcn_scale(p, begin, end);
}

void gcn_weight(const GcnWeight& p, int64_t begin, int64_t end) {
  kernels().gcn_weight(p, begin, end);
}

void gcn_weight_backward(const GcnWeightBackward& p, int64_t begin, int64_t end) {
  kernels().gcn_weight_backward(p, begin, end);
}

void gcn_scale_rows(const GcnScale& p, int64_t begin, int64_t end) {
  kernels().gcn_scale_rows(p, begin, end);
}

void expand_rows(const ExpandRows& p, int64_t begin, int64_t end) {
  kernels().expand_rows(p, begin, end);
}

void count_outside(const CountOutside& p, int64_t begin, int64_t end) {
  kernels().count_outside(p, begin, end);
}

void node_dropout(const NodeDropout& p, int64_t begin, int64_t end) {
  kernels().node_dropout(p, begin, end);
}

void maxk(const MaxK& p, int64_t begin, int64_t end) {
  kernels().maxk(p, begin, end);
}

void cbsr_to_dense(const CbsrDense& p, int64_t begin, int64_t end) {
  kernels().cbsr_to_dense(p, begin, end);
}

void cbsr_sample(const CbsrDense& p, int64_t begin, int64_t end) {
  kernels().cbsr_sample(p, begin, end);
}

void cbsr_spmm(const CbsrSpmm& p, int64_t begin, int64_t end) {
  kernels().cbsr_spmm(p, begin, end);
}

void cbsr_sddmm(const CbsrSddmm& p, int64_t begin, int64_t end) {
  kernels().cbsr_sddmm(p, begin, end);
}

void cbsr_spmm_backward(const CbsrBackward& p, int64_t begin, int64_t end) {
  kernels().cbsr_spmm_backward(p, begin, end);
}

void cbsr_spmm_backward_ordered(const CbsrBackward& p, int64_t begin, int64_t end) {
  kernels().cbsr_spmm_backward_ordered(p, begin, end);
}

void gat(const Gat& p, int64_t begin, int64_t end) { kernels().gat(p, begin, end); }

void gat_backward_dst(const GatBackward& p, int64_t begin, int64_t end) {
  kernels().gat_backward_dst(p, begin, end);
}

void gat_backward_src(const GatBackward& p, int64_t begin, int64_t end) {
  kernels().gat_backward_src(p, begin, end);
}

void head_scores(const HeadScores& p, int64_t begin, int64_t end) {
  kernels().head_scores(p, begin, end);
}

void head_scores_backward(const HeadScoresBackward& p, int64_t begin, int64_t end,
                          void* grad_att) {
  kernels().head_scores_backward(p, begin, end, grad_att);
}

void gatv2(const Gatv2& p, int64_t begin, int64_t end) { kernels().gatv2(p, begin, end); }

void gatv2_backward_dst(const Gatv2Backward& p, int64_t begin, int64_t end, void* grad_att) {
  kernels().gatv2_backward_dst(p, begin, end, grad_att);
}

void gatv2_backward_src(const Gatv2Backward& p, int64_t begin, int64_t end) {
  kernels().gatv2_backward_src(p, begin, end);
}

int64_t row_of_share(const Csr& csr, int64_t k, int64_t n) {
  if (k <= 0) return 0;
  if (k >= n) return csr.num_rows;
  return csr.index64 ? row_of_share<int64_t>(csr, k, n) : row_of_share<int32_t>(csr, k, n);
}

int64_t source_of_share(const Csr& csr, int64_t k, int64_t n) {
  if (k <= 0 || csr.num_cols == 0) return 0;
  if (k >= n) return csr.num_cols;
  return csr.index64 ? source_of_share<int64_t>(csr, k, n) : source_of_share<int32_t>(csr, k, n);
}

void to_csr(const ToCsr& p, int num_threads, ParallelFor parallel_for) {
  if (p.in64) {
    p.out64 ? CsrSort<int64_t, int64_t>(p, num_threads, parallel_for).run()
            : CsrSort<int64_t, int32_t>(p, num_threads, parallel_for).run();
  } else {
    p.out64 ? CsrSort<int32_t, int64_t>(p, num_threads, parallel_for).run()
            : CsrSort<int32_t, int32_t>(p, num_threads, parallel_for).run();
  }
}

void rabbit_order(const Csr& csr, int64_t* perm) {
  csr.index64 ? CommunityMerge<int64_t>(csr).run(perm) : CommunityMerge<int32_t>(csr).run(perm);
}

}  // namespace pyg_fast::cpu
