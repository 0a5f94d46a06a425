// Compiled once per instruction set, named by PYG_FAST_ISA: baseline, avx2 or avx512.
#include "cbsr.h"
#include "gat.h"
#include "gatv2.h"
#include "gcn_scale.h"
#include "head_scores.h"
#include "isa.h"
#include "maxk.h"
#include "path.h"
#include "sampled.h"
#include "scatter.h"
#include "sddmm.h"
#include "spmm.h"
#include "spmm_max.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

const Kernels kernels = {
    spmm,          sampled_spmm, sample_edges, quantize_rows,
    spmm_max,      sddmm,     spmm_max_backward_value, spmm_max_backward_x,
    scatter,       edge_dot,    gcn_degree, gcn_scale,              gcn_weight,
    gcn_weight_backward, gcn_scale_rows,
    expand_rows,   count_outside, node_dropout,
    maxk,          cbsr_to_dense, cbsr_sample, cbsr_spmm,           cbsr_sddmm,
    cbsr_spmm_backward, cbsr_spmm_backward_ordered,
    gat,           gat_backward_dst, gat_backward_src,
    head_scores,   head_scores_backward, gatv2, gatv2_backward_dst, gatv2_backward_src,
};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
