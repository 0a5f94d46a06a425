#include "params/join_edges.h"

namespace pyg_fast::cpu {

void graph_rows(const GraphRows& p, int64_t begin, int64_t end) {
  for (int64_t g = begin; g < end; ++g) {
    for (int64_t k = p.ptr[g]; k < p.ptr[g + 1]; ++k) write_row(p, g, k);
  }
}

void join_edges(const JoinEdges& p, int64_t begin, int64_t end) {
  for (int64_t g = begin; g < end; ++g) {
    for (int64_t e = p.edge_ptr[g]; e < p.edge_ptr[g + 1]; ++e) write_edge(p, g, e);
    for (int64_t i = p.node_ptr[g]; i < p.node_ptr[g + 1]; ++i) write_rowptr(p, g, i);
  }
}

}  // namespace pyg_fast::cpu
