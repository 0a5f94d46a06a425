// The CUDA launchers. Free of torch and of CUDA headers: the bindings stay plain C++.
// Each returns nullptr, or the text of a CUDA error. `scratch` is device memory of the size the
// matching *_scratch function names. Nothing here synchronises, and error_record alone allocates.
#pragma once
#include "../kernels.h"

namespace pyg_fast::cuda {

// The record of an edge that a kernel had to leave out, see record.cuh: one a process, in pinned host
// memory that all devices write to, made by the first call, and never freed. nullptr: no device.
int64_t* error_record();

// The text of an error that leaves the device unusable, nullptr if there was none.
const char* device_error();

int64_t spmm_scratch(const Spmm& p);
const char* spmm(const Spmm& p, void* scratch, void* stream);

// The same by groups: rows of several leave partial sums in scratch, added up in order.
int64_t spmm_groups_scratch(const Spmm& p, const Groups& groups);
const char* spmm_groups(const Spmm& p, const Groups& groups, void* scratch, void* stream);

const char* spmm_max(const SpmmMax& p, void* stream);

const char* sddmm(const Sddmm& p, void* stream);

const char* spmm_max_backward_value(const SpmmMaxBackwardValue& p, void* stream);

// Atomic additions: fast, the last bits of a sum vary. f16 and bf16 accumulate in scratch.
int64_t spmm_max_backward_x_scratch(const SpmmMaxBackwardX& p);
const char* spmm_max_backward_x(const SpmmMaxBackwardX& p, void* scratch, void* stream);

// The same gradient, deterministic: gathers over the transposed structure `transposed`, whose
// `perm` gives the position of each of its edges in p.csr (nullptr: the identity).
const char* spmm_max_backward_x_ordered(const SpmmMaxBackwardX& p, const Csr& transposed,
                                        void* stream);

// Atomic additions, as above.
int64_t scatter_scratch(const Scatter& p);
const char* scatter(const Scatter& p, void* scratch, void* stream);

const char* edge_dot(const EdgeDot& p, void* stream);

// Atomic additions, if there are values.
const char* gcn_degree(const GcnDegree& p, void* stream);
const char* gcn_weight(const GcnWeight& p, void* stream);
const char* gcn_weight_backward(const GcnWeightBackward& p, void* stream);

// Of large graphs: sums of rows that several warps share.
int64_t gcn_scale_scratch(const GcnScale& p);
const char* gcn_scale(const GcnScale& p, void* scratch, void* stream);

const char* expand_rows(const ExpandRows& p, void* stream);
const char* count_outside(const CountOutside& p, void* stream);
const char* node_dropout(const NodeDropout& p, void* stream);

const char* maxk(const MaxK& p, void* stream);
const char* cbsr_to_dense(const CbsrDense& p, void* stream);
const char* cbsr_sample(const CbsrDense& p, void* stream);

// Many entries are added in several passes, for which halves need scratch.
int64_t cbsr_spmm_scratch(const CbsrSpmm& p);
const char* cbsr_spmm(const CbsrSpmm& p, void* scratch, void* stream);

// Atomic additions, as above.
int64_t cbsr_spmm_backward_scratch(const CbsrBackward& p);
const char* cbsr_spmm_backward(const CbsrBackward& p, void* scratch, void* stream);

// The same gradient, deterministic, over the transposed structure.
int64_t cbsr_spmm_backward_ordered_scratch(const CbsrBackward& p);
const char* cbsr_spmm_backward_ordered(const CbsrBackward& p, void* scratch, void* stream);

const char* cbsr_sddmm(const CbsrSddmm& p, void* stream);

const char* gat(const Gat& p, void* stream);
// Several sums of a wide head.
int64_t gat_backward_scratch(const GatBackward& p);
const char* gat_backward(const GatBackward& p, void* scratch, void* stream);

const char* head_scores(const HeadScores& p, void* stream);
// Sums of grad_att, block by block.
int64_t head_scores_backward_scratch(const HeadScoresBackward& p);
const char* head_scores_backward(const HeadScoresBackward& p, void* scratch, void* stream);

const char* gatv2(const Gatv2& p, void* stream);
// Sums of grad_att, block by block.
int64_t gatv2_backward_scratch(const Gatv2Backward& p);
const char* gatv2_backward(const Gatv2Backward& p, void* scratch, void* stream);

// A coprime stride for each row.
int64_t sampling_scratch(const Csr& csr, const Sampling& sampling);
int64_t sampled_spmm_scratch(const SampledSpmm& p);
const char* sampled_spmm(const SampledSpmm& p, void* scratch, void* stream);
const char* sample_edges(const SampleEdges& p, void* scratch, void* stream);
int64_t sample_transposed_scratch(const SampleTransposed& p);
const char* sample_transposed(const SampleTransposed& p, void* scratch, void* stream);
const char* quantize_rows(const QuantizeRows& p, void* stream);

// The same edges sorted by one or (`count` is 2) by both of their ends, the sizes swapped: in one
// launch if the graph is small.
int64_t to_csr_scratch(const ToCsr* p, int count);
const char* to_csr(const ToCsr* p, int count, void* scratch, void* stream);

}  // namespace pyg_fast::cuda
