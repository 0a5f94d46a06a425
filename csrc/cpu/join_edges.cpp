#include "params/join_edges.h"

namespace pyg_fast::cpu {

void join_edges(const JoinEdges& p, int64_t begin, int64_t end) {
  for (int64_t g = begin; g < end; ++g) {
    const auto node = static_cast<int32_t>(p.node_ptr[g]), edge = static_cast<int32_t>(p.edge_ptr[g]);
    const int32_t* ends = p.ends + 4 * p.edge_start[g];
    int32_t* out = p.edges + edge;
    const int64_t num_edges = p.edge_ptr[g + 1] - edge;
    for (int64_t e = 0; e < num_edges; ++e) {
      out[e] = ends[4 * e] + node;
      out[e + p.num_edges] = ends[4 * e + 1] + node;
      out[e + 2 * p.num_edges] = ends[4 * e + 2] + node;
      out[e + 3 * p.num_edges] = ends[4 * e + 3] + edge;
    }
    const int32_t* rowptr = p.rowptr + 2 * p.node_start[g];
    int32_t* out_rowptr = p.out_rowptr + node;
    const int64_t num_nodes = p.node_ptr[g + 1] - node;
    for (int64_t i = 0; i < num_nodes; ++i) {
      out_rowptr[i] = rowptr[2 * i] + edge;
      out_rowptr[i + p.num_nodes + 1] = rowptr[2 * i + 1] + edge;
    }
  }
}

}  // namespace pyg_fast::cpu
