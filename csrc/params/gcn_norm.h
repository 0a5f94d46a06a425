// The symmetric normalisation of a GCN for a coordinate list, in two steps.
#pragma once
#include "common.h"

namespace pyg_fast {

// First step:
//   degree[i] = sum_{e: dst[e] == i} value[e], in acc; without values a count, in int32_t;
//   last[i] = 1 + the highest position of a loop of i, 0: none;
//   counts = (invalid edges, loops); chunk_loops = the loops of each kLoopChunk edges. From these
//   the second step computes the position of each kept edge. (num_src == num_dst in both.)
constexpr int64_t kLoopChunk = 128;

inline int64_t loop_chunks(int64_t num_edges) { return (num_edges + kLoopChunk - 1) / kLoopChunk; }

struct GcnDegree {
  Coo coo;
  DType dtype = DType::f32;  // of value
  bool weighted = false;  // whether there are values: `value` is nullptr also if there are no edges
  const void* value = nullptr;     // [num_edges] or nullptr
  void* degree = nullptr;          // [num_dst]
  int64_t* last = nullptr;         // [num_dst] or nullptr
  int64_t* counts = nullptr;       // [2]
  int64_t* chunk_loops = nullptr;  // [loop_chunks(num_edges)] or nullptr
};

// Second step, with loop[i] = value[last[i] - 1], or fill_value if last[i] == 0 or there is no `last`:
//   scale[i] = (degree[i] + loop[i])^(-1/2), 0 for a sum of 0;
//   weight[k] = scale[src[e]] * value[e] * scale[dst[e]], 0 for invalid edges; k is e minus the
//   number of loops before e, which are dropped; without `before`, k is e.
// If `loops` (else loop[i] = 0), it also appends a loop for each node, of weight scale[i] * loop[i] *
// scale[i], and writes the list of all edges. before[c] counts the loops of the chunks up to c.
struct GcnWeight {
  Coo coo;
  DType dtype = DType::f32;  // of value and weight
  bool loops = false;
  bool weighted = false;  // as above
  double fill_value = 1;
  int64_t num_kept = 0;             // 0: reads no edge
  const void* value = nullptr;      // [num_edges] or nullptr
  const void* degree = nullptr;     // [num_dst], from GcnDegree
  const int64_t* last = nullptr;    // [num_dst] or nullptr
  const int64_t* before = nullptr;  // [loop_chunks(num_edges)] or nullptr
  void* edge_index = nullptr;       // [2, num_kept + num_dst], type of src and dst; if `loops`
  void* weight = nullptr;           // [num_kept (+ num_dst)]
  void* scale = nullptr;            // [num_dst] acc
};

// Backward: out[e] = grad[k] * scale[src[e]] * scale[dst[e]] + grad_degree[dst[e]], 0 for invalid edges;
// with `before`, k of a loop is num_kept + dst[e].
struct GcnWeightBackward {
  Coo coo;
  DType dtype = DType::f32;  // of grad and out
  int64_t num_kept = 0;
  const int64_t* before = nullptr;    // as above
  const void* grad = nullptr;         // [num_kept (+ num_dst)]
  const void* scale = nullptr;        // [num_dst] acc
  const void* grad_degree = nullptr;  // [num_dst] acc
  void* out = nullptr;                // [num_edges]
};

namespace cpu {
// Destinations [begin, end): each call walks all edges. The call that begins at 0 writes p.counts.
void gcn_degree(const GcnDegree& p, int64_t dst_begin, int64_t dst_end);
// First the scales and loops of nodes [begin, end); after all of them, chunks of edges.
void gcn_scale(const GcnWeight& p, int64_t node_begin, int64_t node_end);
void gcn_weight(const GcnWeight& p, int64_t chunk_begin, int64_t chunk_end);
void gcn_weight_backward(const GcnWeightBackward& p, int64_t chunk_begin, int64_t chunk_end);
}  // namespace cpu

namespace cuda {
// Uses atomic additions if there are values, in float64.
int64_t gcn_degree_scratch(const GcnDegree& p);
const char* gcn_degree(const GcnDegree& p, void* scratch, void* stream);
const char* gcn_weight(const GcnWeight& p, void* stream);
const char* gcn_weight_backward(const GcnWeightBackward& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
