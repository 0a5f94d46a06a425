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

namespace {

// Calls fn(type, work) for work in [begin, end), and prefetches what it reads of the graph.
template <typename I, typename Fn>
void for_work(const TypedHop& p, int64_t begin, int64_t end, bool draws, const Fn& fn) {
  const char* col = static_cast<const char*>(p.graph.col);
  const int64_t width = p.graph.col64 ? 8 : 4;
  for (int64_t type = 0; type < p.num_types; ++type) {
    const int64_t* of_type = p.work + p.hop * p.num_types + type;
    const int64_t first = std::max(begin, of_type[0]), last = std::min(end, of_type[1]);
    const EdgeType& edge = p.types[type];
    // The node of a piece of work, and where its row begins.
    const int64_t* node = p.n_id + p.nodes[p.hop * p.num_node_types + edge.dst] - of_type[0];
    const I* rowptr = static_cast<const I*>(p.graph.rowptr) + edge.first_row - edge.first_node;
    for (int64_t work = first; work < last; ++work) {
      if (work + kAhead < last) __builtin_prefetch(rowptr + node[work + kAhead]);
      if (draws && work + kAhead / 4 < last) {
        __builtin_prefetch(col + width * rowptr[node[work + kAhead / 4]]);
      }
      fn(type, work);
    }
  }
}

}  // namespace

void typed_counts(const TypedHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    for_work<I>(p, begin, end, false, [&](int64_t type, int64_t work) {
      p.rowptr[work + 1] = static_cast<int32_t>(edges_to_draw(typed_row<I>(p, type, work).row));
    });
  });
}

void typed_neighbors(const TypedHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    Draws draws;
    for_work<I>(p, begin, end, true, [&](int64_t type, int64_t work) {
      const int64_t start = p.rowptr[work], count = p.rowptr[work + 1] - start;
      if (count == 0) return;
      const TypedRow from = typed_row<I>(p, type, work);
      draw(from.row, count, draws, [&](int64_t k, int64_t position) {
        const int64_t e = start + k;
        p.neighbor[e] = key_of(p, from.slot, column(p.graph, position));
        p.dst[e] = from.dst;
        p.e_id[e] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[position] : position;
      });
    });
  });
}

void insert_typed(const TypedHop& p, int64_t begin, int64_t end) {
  for_ids(
      p.map, begin, end, [&](int64_t e) { return p.neighbor[e]; },
      [&](int64_t e) { insert(p.map, p.neighbor[e], p.num_seeds + e); });
}

int64_t mark_new(const TypedHop& p, int64_t begin, int64_t end) {
  int64_t count = 0;
  for_ids(
      p.map, begin, end, [&](int64_t e) { return p.neighbor[e]; },
      [&](int64_t e) {
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

namespace {

// Calls fn(segment, first, last) for the parts of [begin, end) in each of `count` segments.
template <typename Fn>
void for_segments(const int64_t* start, int64_t count, int64_t begin, int64_t end, const Fn& fn) {
  if (begin >= end) return;
  for (int64_t segment = segment_of(start, count, begin); segment < count && start[segment] < end;
       ++segment) {
    fn(segment, std::max(begin, start[segment]), std::min(end, start[segment + 1]));
  }
}

}  // namespace

void take_nodes(const TakeTyped& t, int64_t begin, int64_t end) {
  const TypedHop& p = t.p;
  for_segments(p.nodes, (p.hop + 1) * p.num_node_types, begin, end,
               [&](int64_t segment, int64_t first, int64_t last) {
                 for (int64_t slot = first; slot < last; ++slot) take_node(t, segment, slot);
               });
}

void take_edges(const TakeTyped& t, int64_t begin, int64_t end) {
  const TypedHop& p = t.p;
  for_segments(
      p.edges, p.hop * p.num_types, begin, end, [&](int64_t segment, int64_t first, int64_t last) {
        for_ids(
            p.map, first, last, [&](int64_t e) { return p.neighbor[e]; },
            [&](int64_t e) { take_edge(t, segment, e, p.local[find(p.map, p.neighbor[e])]); });
      });
}

void take_rows(const TakeTyped& t, int64_t begin, int64_t end) {
  const TypedHop& p = t.p;
  for (int64_t type = 0; type < p.num_types; ++type) {
    // Hop by hop the rows of the nodes that it found; after those of the last hop but one, of no edges.
    const int64_t dst = p.types[type].dst, row = t.out_rows[type];
    for (int64_t hop = 0; hop < p.hop; ++hop) {
      const int64_t found = row + p.before[hop * p.num_node_types + dst];
      const int64_t next = row + p.before[(hop + 1) * p.num_node_types + dst];
      const int64_t segment = hop * p.num_types + type;
      const int32_t* rowptr = p.rowptr + p.work[segment] - found;
      const int64_t shift = t.edge_shift[segment] - t.out_edges[type];
      for (int64_t k = std::max(begin, found); k < std::min(end, next); ++k) {
        t.out_rowptr[k] = static_cast<int32_t>(rowptr[k] + shift);
      }
    }
    const int64_t rest = row + p.before[p.hop * p.num_node_types + dst];
    const int64_t last = type + 1 < p.num_types ? t.out_rows[type + 1] : t.num_rows;
    for (int64_t k = std::max(begin, rest); k < std::min(end, last); ++k) {
      t.out_rowptr[k] = static_cast<int32_t>(t.count[type]);
    }
  }
}

}  // namespace pyg_fast::cpu
