#include "params/induced_edges.h"

#include "ids.h"

namespace pyg_fast::cpu {

void count_induced(const InducedEdges& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    for (int64_t node = begin; node < end; ++node) {
      const I* rowptr = static_cast<const I*>(p.graph.rowptr) + p.n_id[node];
      int64_t count = 0;
      for_ids(
          p.map, rowptr[0], rowptr[1], [&](int64_t e) { return column(p.graph, e); },
          [&](int64_t e) { count += find(p.map, column(p.graph, e)) != kNotFound; });
      p.rowptr[node + 1] = count;
    }
  });
}

void induced_edges(const InducedEdges& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    const I* perm = static_cast<const I*>(p.graph.perm);
    for (int64_t node = begin; node < end; ++node) {
      const I* rowptr = static_cast<const I*>(p.graph.rowptr) + p.n_id[node];
      int64_t out = p.rowptr[node];
      for_ids(
          p.map, rowptr[0], rowptr[1], [&](int64_t e) { return column(p.graph, e); },
          [&](int64_t e) {
            const int64_t position = find(p.map, column(p.graph, e));
            if (position == kNotFound) return;
            p.out_col[out] = p.local[position];
            p.out_src[out] = p.local[position];
            p.out_dst[out] = node;
            p.out_e_id[out] = perm ? perm[e] : e;
            ++out;
          });
    }
  });
}

}  // namespace pyg_fast::cpu
