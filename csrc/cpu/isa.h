// The kernels of one instruction set. kernels.cpp is compiled once for each.
#pragma once
#include "../kernels.h"

namespace pyg_fast::cpu {

struct Kernels {
  void (*spmm)(const Spmm&, int64_t, int64_t);
  void (*sampled_spmm)(const SampledSpmm&, int64_t, int64_t);
  void (*sample_edges)(const SampleEdges&, int64_t, int64_t);
  void (*quantize_rows)(const QuantizeRows&, int64_t, int64_t);
  void (*spmm_max)(const SpmmMax&, int64_t, int64_t);
  void (*sddmm)(const Sddmm&, int64_t, int64_t);
  void (*spmm_max_backward_value)(const SpmmMaxBackwardValue&, int64_t, int64_t);
  void (*spmm_max_backward_x)(const SpmmMaxBackwardX&, int64_t, int64_t);
  void (*scatter)(const Scatter&, int64_t, int64_t);
  void (*edge_dot)(const EdgeDot&, int64_t, int64_t);
  void (*gcn_degree)(const GcnDegree&, int64_t, int64_t);
  void (*gcn_scale)(const GcnWeight&, int64_t, int64_t);
  void (*gcn_weight)(const GcnWeight&, int64_t, int64_t);
  void (*gcn_weight_backward)(const GcnWeightBackward&, int64_t, int64_t);
  void (*gcn_scale_rows)(const GcnScale&, int64_t, int64_t);
  void (*expand_rows)(const ExpandRows&, int64_t, int64_t);
  void (*count_outside)(const CountOutside&, int64_t, int64_t);
  void (*node_dropout)(const NodeDropout&, int64_t, int64_t);
  void (*maxk)(const MaxK&, int64_t, int64_t);
  void (*cbsr_to_dense)(const CbsrDense&, int64_t, int64_t);
  void (*cbsr_sample)(const CbsrDense&, int64_t, int64_t);
  void (*cbsr_spmm)(const CbsrSpmm&, int64_t, int64_t);
  void (*cbsr_sddmm)(const CbsrSddmm&, int64_t, int64_t);
  void (*cbsr_spmm_backward)(const CbsrBackward&, int64_t, int64_t);
  void (*cbsr_spmm_backward_ordered)(const CbsrBackward&, int64_t, int64_t);
  void (*gat)(const Gat&, int64_t, int64_t);
  void (*gat_backward_dst)(const GatBackward&, int64_t, int64_t);
  void (*gat_backward_src)(const GatBackward&, int64_t, int64_t);
  void (*head_scores)(const HeadScores&, int64_t, int64_t);
  void (*head_scores_backward)(const HeadScoresBackward&, int64_t, int64_t, void*);
  void (*gatv2)(const Gatv2&, int64_t, int64_t);
  void (*gatv2_backward_dst)(const Gatv2Backward&, int64_t, int64_t, void*);
  void (*gatv2_backward_src)(const Gatv2Backward&, int64_t, int64_t);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace pyg_fast::cpu
