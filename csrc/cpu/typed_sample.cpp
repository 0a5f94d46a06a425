#include "params/typed_sample.h"

#include "draw.h"
#include "ids.h"

namespace pyg_fast::cpu {

void begin_typed(const TypedHop& p, int64_t begin, int64_t end) {
  for (int64_t type = 0; type < p.num_node_types; ++type) {
    const int64_t first = p.nodes[type], last = std::min(end, p.nodes[type + 1]);
    for (int64_t slot = std::max(begin, first); slot < last; ++slot) {
      p.local[slot] = static_cast<int32_t>(slot - first);
      insert(p.map, key_of(p, slot, p.n_id[slot]), slot);
    }
  }
}

void typed_counts(const TypedHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    for (int64_t work = begin; work < end; ++work) {
      const DrawRow row = typed_row<decltype(index)>(p, work).row;
      p.rowptr[work + 1] = static_cast<int32_t>(edges_to_draw(row));
    }
  });
}

void typed_neighbors(const TypedHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    Draws draws;
    for (int64_t work = begin; work < end; ++work) {
      const int64_t start = p.rowptr[work], count = p.rowptr[work + 1] - start;
      if (count == 0) continue;
      const TypedRow from = typed_row<I>(p, work);
      draw(from.row, count, draws, [&](int64_t k, int64_t position) {
        const int64_t e = start + k;
        p.neighbor[e] = key_of(p, from.slot, column(p.graph, position));
        p.dst[e] = from.dst;
        p.e_id[e] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[position] : position;
      });
    }
  });
}

void insert_typed(const TypedHop& p, int64_t begin, int64_t end) {
  for_ids(p.map, begin, end, [&](int64_t e) { return p.neighbor[e]; },
          [&](int64_t e) { insert(p.map, p.neighbor[e], p.num_seeds + e); });
}

int64_t mark_new(const TypedHop& p, int64_t begin, int64_t end) {
  int64_t count = 0;
  for_ids(p.map, begin, end, [&](int64_t e) { return p.neighbor[e]; }, [&](int64_t e) {
    const bool is_new = find(p.map, p.neighbor[e]) == p.num_seeds + e;
    p.local[p.num_seeds + e] = is_new ? -1 : 0;
    count += is_new;
  });
  return count;
}

void append_typed(const TypedHop& p, int64_t begin, int64_t end, int64_t slot, int64_t number) {
  int32_t* local = p.local + p.num_seeds;
  for (int64_t e = begin; e < end; ++e) {
    if (local[e] >= 0) continue;
    local[e] = static_cast<int32_t>(number++);
    const int64_t key = p.neighbor[e];
    p.n_id[slot] = p.root ? key % p.num_graph_nodes : key;
    if (p.root) p.root[slot] = static_cast<int32_t>(key / p.num_graph_nodes);
    ++slot;
  }
}

void take_nodes(const TakeTyped& t, int64_t begin, int64_t end) {
  for (int64_t slot = begin; slot < end; ++slot) take_node(t, slot);
}

void take_edges(const TakeTyped& t, int64_t begin, int64_t end) {
  for_ids(t.p.map, begin, end, [&](int64_t e) { return t.p.neighbor[e]; },
          [&](int64_t e) { take_edge(t, e, t.p.local[find(t.p.map, t.p.neighbor[e])]); });
}

void take_rows(const TakeTyped& t, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) take_row(t, k);
}

}  // namespace pyg_fast::cpu
