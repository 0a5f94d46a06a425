// The CPU kernels, one line each. Every one picks the widest instruction set the machine has.
// Calls that take [begin, end) work on those rows (or columns) only: the caller shares them out.
#pragma once
#include "../kernels.h"

namespace pyg_fast::cpu {

void spmm(const Spmm& p, int64_t row_begin, int64_t row_end);
void sampled_spmm(const SampledSpmm& p, int64_t row_begin, int64_t row_end);
// What lies behind the last edge is left alone.
void sample_edges(const SampleEdges& p, int64_t row_begin, int64_t row_end);
void quantize_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end);
void spmm_max(const SpmmMax& p, int64_t row_begin, int64_t row_end);
void sddmm(const Sddmm& p, int64_t row_begin, int64_t row_end);
void spmm_max_backward_value(const SpmmMaxBackwardValue& p, int64_t row_begin, int64_t row_end);
// Feature columns [begin, end): each thread owns its columns of grad_x, so nothing races.
void spmm_max_backward_x(const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end);

// Destinations [begin, end): each call walks all edges. The one that begins at 0 writes p.invalid.
void scatter(const Scatter& p, int64_t dst_begin, int64_t dst_end);
void edge_dot(const EdgeDot& p, int64_t edge_begin, int64_t edge_end);
// As scatter does, with p.counts.
void gcn_degree(const GcnDegree& p, int64_t dst_begin, int64_t dst_end);
// First the scales and loops of nodes [begin, end), then, once all are done, chunks of edges.
void gcn_scale(const GcnWeight& p, int64_t node_begin, int64_t node_end);
void gcn_weight(const GcnWeight& p, int64_t chunk_begin, int64_t chunk_end);
void gcn_weight_backward(const GcnWeightBackward& p, int64_t chunk_begin, int64_t chunk_end);
void gcn_scale_rows(const GcnScale& p, int64_t row_begin, int64_t row_end);

void expand_rows(const ExpandRows& p, int64_t row_begin, int64_t row_end);
void count_outside(const CountOutside& p, int64_t row_begin, int64_t row_end);
void node_dropout(const NodeDropout& p, int64_t row_begin, int64_t row_end);

void maxk(const MaxK& p, int64_t row_begin, int64_t row_end);
void cbsr_to_dense(const CbsrDense& p, int64_t row_begin, int64_t row_end);
void cbsr_sample(const CbsrDense& p, int64_t row_begin, int64_t row_end);
void cbsr_spmm(const CbsrSpmm& p, int64_t row_begin, int64_t row_end);
void cbsr_sddmm(const CbsrSddmm& p, int64_t row_begin, int64_t row_end);
// Sources [begin, end): each thread walks all edges and adds up those of its own sources.
void cbsr_spmm_backward(const CbsrBackward& p, int64_t source_begin, int64_t source_end);
void cbsr_spmm_backward_ordered(const CbsrBackward& p, int64_t row_begin, int64_t row_end);

void gat(const Gat& p, int64_t row_begin, int64_t row_end);
// First destinations [begin, end) (columns of the csr), then, once all of them are done, sources.
void gat_backward_dst(const GatBackward& p, int64_t begin, int64_t end);
void gat_backward_src(const GatBackward& p, int64_t row_begin, int64_t row_end);
void head_scores(const HeadScores& p, int64_t row_begin, int64_t row_end);
// grad_att [num_scores, heads, channels] acc takes the share of these rows alone, on top of what it
// holds; p.grad_att is not touched.
void head_scores_backward(const HeadScoresBackward& p, int64_t row_begin, int64_t row_end,
                          void* grad_att);
void gatv2(const Gatv2& p, int64_t row_begin, int64_t row_end);
// Rows of the csr; grad_att [heads, channels] acc takes the share of these rows alone.
void gatv2_backward_dst(const Gatv2Backward& p, int64_t row_begin, int64_t row_end, void* grad_att);
void gatv2_backward_src(const Gatv2Backward& p, int64_t row_begin, int64_t row_end);

// The first row of share `k` of `n` when rows are split at (about) equal numbers of edges.
int64_t row_of_share(const Csr& csr, int64_t k, int64_t n);
// The same for sources, the columns of the CSR.
int64_t source_of_share(const Csr& csr, int64_t k, int64_t n);

// A function that runs body(ctx, k) for k in [0, n) on the caller's threads.
using ParallelFor = void (*)(int64_t n, void (*body)(void* ctx, int64_t k), void* ctx);
void to_csr(const ToCsr& p, int num_threads, ParallelFor parallel_for);

// perm[k] = the node, of a square graph, that comes k-th.
void rabbit_order(const Csr& csr, int64_t* perm);

}  // namespace pyg_fast::cpu
