// Sampled mini-batches of graphs with several types of nodes and edges, with times, and with a subgraph
// for each seed.
#pragma once
#include "draw.h"

namespace pyg_fast {

// One type of edges. All types of nodes share one numbering, and all types of edges one CSR structure:
// its rows are pairs of an edge type and a node of the type of its destinations.
struct EdgeType {
  int64_t first_row;
  int64_t src;  // types of nodes
  int64_t dst;
  int64_t first_node;  // of `dst`
  int64_t has_time;
  int64_t has_weight;
};

// One hop of a mini-batch that grows outwards from its seeds. In a hop every edge type samples around all
// nodes of its destination type that the hop before found: these pairs are the hop's work, in the order of
// the edge types. Slots of nodes are in order of hop, then type, then first occurrence; edges in order of
// hop, then type, then destination. Positions of keys (see NodeMap) count the seeds first, then all edges.
// A node's key is its number; with a subgraph for each seed, `root` * num_graph_nodes + its number.
struct TypedHop {
  Csr graph;                           // perm: number of each edge in its type
  const double* weight = nullptr;      // see SampleHop
  const int64_t* time = nullptr;       // [num_edges] ascending in each row
  const int64_t* seed_time = nullptr;  // by root: an edge may be drawn if its time is not later
  int64_t max_age = -1;                // nor earlier by more than this, unless negative
  bool last = false;                   // draw only among the latest `fanout` edges
  const EdgeType* types = nullptr;     // [num_types]
  const int64_t* fanout = nullptr;     // [num_types] of this hop; -1: all edges
  int64_t most = 0;                    // the largest fan-out of this hop
  bool has_all = false;                // whether one is -1
  int64_t num_types = 0;
  int64_t num_node_types = 0;
  int64_t num_graph_nodes = 0;
  int64_t hop = 0;
  bool replace = false;
  uint64_t seed = 0;
  NodeMap map;
  int64_t max_work = 0;  // upper bounds for this hop
  int64_t max_edges = 0;
  int64_t num_seeds = 0;
  // Flat over (hop, type): the first of each, and where the last one ends.
  int64_t* nodes = nullptr;   // [(num_hops + 1) * num_node_types + 1] slots
  int64_t* before = nullptr;  // [(num_hops + 1) * num_node_types] nodes of a type in earlier hops
  int64_t* work = nullptr;    // [(num_hops + 1) * num_types + 1]
  int64_t* edges = nullptr;   // [num_hops * num_types + 1]
  int64_t* first_new = nullptr;  // [num_types] the slot of a source found first in this hop, less
                                 // its number among all of those
  int64_t* n_id = nullptr;       // by slot
  int32_t* root = nullptr;       // by slot: the seed around which it was found; nullptr: one graph
  int32_t* rowptr = nullptr;     // by work: its first edge, and where the last one ends
  int64_t* neighbor = nullptr;   // by edge: the key of its source
  int32_t* dst = nullptr;        // by edge: the number of its destination in its type
  int64_t* e_id = nullptr;       // by edge
  int32_t* local = nullptr;  // by position: the number in its type of the node first found there

  PYG_FAST_DEVICE int64_t first_work() const { return work[hop * num_types]; }
  PYG_FAST_DEVICE int64_t last_work() const { return work[(hop + 1) * num_types]; }
  PYG_FAST_DEVICE int64_t first_edge() const { return rowptr[first_work()]; }
  PYG_FAST_DEVICE int64_t last_edge() const { return rowptr[last_work()]; }
};

// The last k < count with start[k] <= value. start[0] <= value.
template <typename T>
PYG_FAST_DEVICE inline int64_t segment_of(const T* start, int64_t count, int64_t value) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (start[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

// The first k in [begin, end) with time[k] > value, or `end`.
PYG_FAST_DEVICE inline int64_t first_later(const int64_t* time, int64_t begin, int64_t end,
                                           int64_t value) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (time[middle] <= value) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

// What a pair of an edge type and a node may draw.
struct TypedRow {
  DrawRow row;
  int64_t slot = 0;
  int32_t dst = 0;  // the number of the node in its type
};

// Of work that is known to be of a type.
template <typename I>
PYG_FAST_DEVICE inline TypedRow typed_row(const TypedHop& p, int64_t type, int64_t work) {
  const EdgeType& edge = p.types[type];
  const int64_t of_nodes = p.hop * p.num_node_types + edge.dst;
  const int64_t k = work - p.work[p.hop * p.num_types + type];
  TypedRow out;
  out.slot = p.nodes[of_nodes] + k;
  out.dst = static_cast<int32_t>(p.before[of_nodes] + k);
  const int64_t id = edge.first_row + p.n_id[out.slot] - edge.first_node;
  const I* rowptr = static_cast<const I*>(p.graph.rowptr) + id;
  int64_t begin = rowptr[0], end = rowptr[1];
  const int64_t fanout = p.fanout[type];
  uint64_t seed = p.seed;
  if (p.root) {
    const int64_t root = p.root[out.slot];
    seed += (static_cast<uint64_t>(root) + 1) * 0xa0761d6478bd642fu;
    if (p.seed_time && edge.has_time) {
      const int64_t latest = p.seed_time[root];
      end = first_later(p.time, begin, end, latest);
      // Of times before the smallest number there are none.
      if (p.max_age >= 0 && latest > INT64_MIN + p.max_age) {
        begin = first_later(p.time, begin, end, latest - p.max_age - 1);
      }
      if (p.last && fanout >= 0 && end - begin > fanout) begin = end - fanout;
    }
  }
  out.row = {seed, id, begin, end - begin, fanout, p.replace, edge.has_weight ? p.weight : nullptr};
  return out;
}

// More edges than a batch may have count as the first number above: the caller refuses the batch.
PYG_FAST_DEVICE inline int32_t end_of_edges(int64_t sum) {
  return static_cast<int32_t>(sum < INT32_MAX ? sum : INT32_MAX);
}

template <typename I>
PYG_FAST_DEVICE inline TypedRow typed_row(const TypedHop& p, int64_t work) {
  const int64_t type = segment_of(p.work + p.hop * p.num_types, p.num_types, work);
  return typed_row<I>(p, type, work);
}

PYG_FAST_DEVICE inline int64_t key_of(const TypedHop& p, int64_t slot, int64_t node) {
  return p.root ? p.root[slot] * p.num_graph_nodes + node : node;
}

// Copies the finished batch from the buffers that its hops filled, the nodes by type and the edges by
// type. `hop` is the number of hops.
struct TakeTyped {
  TypedHop p;
  int64_t num_nodes = 0;
  int64_t num_rows = 0;                 // of the output, with gaps
  int64_t num_edges = 0;                // of the batch
  const int64_t* first_node = nullptr;  // [num_node_types]
  const int64_t* node_shift =
      nullptr;  // [(num_hops + 1) * num_node_types] from slots to the output
  const int64_t* edge_shift = nullptr;  // [num_hops * num_types]
  const int64_t* out_edges = nullptr;   // [num_types] where the edges of each type begin, aligned
  const int64_t* count = nullptr;       // [num_types] of edges
  const int64_t* out_rows = nullptr;    // [num_types] where the row pointers of each type begin
  int64_t* out_n_id = nullptr;
  int64_t* out_root = nullptr;  // nullptr: one graph
  int32_t* out_rowptr = nullptr;
  int32_t* out_col = nullptr;
  int64_t* out_ends = nullptr;  // of each type its sources, then its destinations
  int64_t* out_e_id = nullptr;
};

// `segment`: of slots, or of edges, the one of this hop and type.
PYG_FAST_DEVICE inline void take_node(const TakeTyped& t, int64_t segment, int64_t slot) {
  const int64_t out = slot + t.node_shift[segment];
  t.out_n_id[out] = t.p.n_id[slot] - t.first_node[segment % t.p.num_node_types];
  if (t.out_root) t.out_root[out] = t.p.root[slot];
}

// `source`: the number of its source in its type.
PYG_FAST_DEVICE inline void take_edge(const TakeTyped& t, int64_t segment, int64_t e,
                                      int32_t source) {
  const int64_t type = segment % t.p.num_types;
  const int64_t out = e + t.edge_shift[segment];
  const int64_t first = t.out_edges[type], count = t.count[type];
  t.out_col[out] = source;
  t.out_e_id[out] = t.p.e_id[e];
  t.out_ends[first + out] = source;
  t.out_ends[first + count + out] = t.p.dst[e];
}

PYG_FAST_DEVICE inline void take_row(const TakeTyped& t, int64_t k) {
  const TypedHop& p = t.p;
  const int64_t type = segment_of(t.out_rows, p.num_types, k), node = k - t.out_rows[type];
  const int64_t dst = p.types[type].dst, first = t.out_edges[type];
  int64_t out = first + t.count[type];  // nodes of the last hop have no edges
  if (node < p.before[p.hop * p.num_node_types + dst]) {
    int64_t hop = 0, end = p.hop;
    while (end - hop > 1) {
      const int64_t middle = (hop + end) / 2;
      if (p.before[middle * p.num_node_types + dst] <= node) hop = middle;
      else end = middle;
    }
    const int64_t segment = hop * p.num_types + type;
    const int64_t work = p.work[segment] + node - p.before[hop * p.num_node_types + dst];
    out = p.rowptr[work] + t.edge_shift[segment];
  }
  t.out_rowptr[k] = static_cast<int32_t>(out - first);
}

namespace cpu {
// Seeds, whose roots are in p.root.
void begin_typed(const TypedHop& p, int64_t begin, int64_t end);
// Work of this hop: writes the number of edges taken to p.rowptr[work + 1].
void typed_counts(const TypedHop& p, int64_t begin, int64_t end);
// Work of this hop.
void typed_neighbors(const TypedHop& p, int64_t begin, int64_t end);
// Edges of this hop: insert sources into the map; mark those that are new by p.local = -1, and count
// them; make them nodes from `slot` on.
void insert_typed(const TypedHop& p, int64_t begin, int64_t end);
int64_t mark_new(const TypedHop& p, int64_t begin, int64_t end);
void append_typed(const TypedHop& p, int64_t begin, int64_t end, int64_t slot, int64_t number);
// Slots; edges; rows of the output.
void take_nodes(const TakeTyped& t, int64_t begin, int64_t end);
void take_edges(const TakeTyped& t, int64_t begin, int64_t end);
void take_rows(const TakeTyped& t, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
// Makes the seeds the first nodes of a batch.
const char* begin_typed(const TypedHop& p, const int64_t* seeds, const int32_t* roots,
                        void* stream);

// Counts the edges to take and computes where those of each node and edge type begin.
int64_t typed_counts_scratch(const TypedHop& p);
const char* typed_counts(const TypedHop& p, void* scratch, void* stream);

// Samples these edges and inserts their sources into the map.
const char* typed_neighbors(const TypedHop& p, void* stream);

// Makes new sources nodes, and the work of the next hop of them.
int64_t append_typed_scratch(const TypedHop& p);
const char* append_typed(const TypedHop& p, void* scratch, void* stream);

const char* take_typed(const TakeTyped& t, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
