#include "params/neighbor_sample.h"

#include "draw.h"
#include "ids.h"

namespace pyg_fast::cpu {
namespace {

template <typename I>
DrawRow row_of(const SampleHop& p, int64_t node) {
  const int64_t id = p.n_id[node];
  const I* rowptr = static_cast<const I*>(p.graph.rowptr) + id;
  return {p.seed, id, rowptr[0], rowptr[1] - rowptr[0], p.fanout, p.replace, p.weight};
}

}  // namespace

void begin_sample(const SampleHop& p, const int64_t* seeds, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    p.n_id[k] = seeds[k];
    p.local[k] = static_cast<int32_t>(k);
    insert(p.map, seeds[k], k);
  }
}

void sample_counts(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    const I* rowptr = static_cast<const I*>(p.graph.rowptr);
    for (int64_t node = begin; node < end; ++node) {
      if (node + kAhead < end) __builtin_prefetch(rowptr + p.n_id[node + kAhead]);
      p.rowptr[node + 1] = static_cast<int32_t>(edges_to_draw(row_of<I>(p, node)));
    }
  });
}

void sample_neighbors(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    const I* rowptr = static_cast<const I*>(p.graph.rowptr);
    const char* col = static_cast<const char*>(p.graph.col);
    const int64_t width = p.graph.col64 ? 8 : 4;
    Draws draws;
    for (int64_t node = begin; node < end; ++node) {
      if (node + kAhead < end) __builtin_prefetch(rowptr + p.n_id[node + kAhead]);
      if (node + kAhead / 4 < end)
        __builtin_prefetch(col + width * rowptr[p.n_id[node + kAhead / 4]]);
      const int64_t start = p.rowptr[node], count = p.rowptr[node + 1] - start;
      draw(row_of<I>(p, node), count, draws, [&](int64_t k, int64_t position) {
        const int64_t e = start + k;
        static_cast<I*>(p.neighbor)[e] = static_cast<I>(column(p.graph, position));
        p.dst[e] = static_cast<int32_t>(node);
        p.e_id[e] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[position] : position;
      });
    }
  });
}

void insert_sources(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(
        p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
        [&](int64_t e) { insert(p.map, neighbor[e], p.num_seeds + e); });
  });
}

int64_t count_new(const SampleHop& p, int64_t begin, int64_t end) {
  return with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    int64_t count = 0;
    for_ids(
        p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
        [&](int64_t e) { count += find(p.map, neighbor[e]) == p.num_seeds + e; });
    return count;
  });
}

int64_t append_nodes(const SampleHop& p, int64_t begin, int64_t end, int64_t node) {
  with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(
        p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
        [&](int64_t e) {
          if (find(p.map, neighbor[e]) != p.num_seeds + e) return;
          p.local[p.num_seeds + e] = static_cast<int32_t>(node);
          p.n_id[node++] = neighbor[e];
        });
  });
  return node;
}

void take_edges(const TakeSample& p, int64_t begin, int64_t end) {
  with_index(p.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(
        p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
        [&](int64_t e) {
          const int32_t source = p.local[find(p.map, neighbor[e])];
          p.out_col[e] = source;
          p.out_src[e] = source;
          p.out_dst[e] = p.dst[e];
          p.out_e_id[e] = p.e_id[e];
        });
  });
}

void take_nodes(const TakeSample& p, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    p.out_n_id[k] = p.n_id[k];
    p.out_rowptr[k] = k < p.num_rows ? p.rowptr[k] : static_cast<int32_t>(p.num_edges);
  }
  if (end == p.num_nodes) p.out_rowptr[end] = static_cast<int32_t>(p.num_edges);
}

}  // namespace pyg_fast::cpu
