// The graphs of a batch side by side: a thread for each row, which looks for its graph.
#include "common.cuh"
#include "params/join_edges.h"

namespace pyg_fast::cuda {
namespace {

// The graph whose rows begin last at `row` or before it, which must be one of the batch.
__device__ inline int64_t graph_of(const int64_t* ptr, int64_t num_graphs, int64_t row) {
  int64_t low = 0, high = num_graphs;  // ptr[low] <= row < ptr[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (ptr[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) graph_rows_kernel(GraphRows p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < p.num_rows;
       k += step) {
    write_row(p, graph_of(p.ptr, p.num_graphs, k), k);
  }
}

__global__ void __launch_bounds__(kThreads) join_edges_kernel(JoinEdges p) {
  const int64_t num_nodes = p.node_ptr[p.num_graphs], num_edges = p.edge_ptr[p.num_graphs];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t end = p.num_edges > p.num_nodes ? p.num_edges : p.num_nodes + 1;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < end; k += step) {
    if (k < num_edges) write_edge(p, graph_of(p.edge_ptr, p.num_graphs, k), k);
    if (k < num_nodes) write_rowptr(p, graph_of(p.node_ptr, p.num_graphs, k), k);
    else if (k <= p.num_nodes) write_end(p, k);
  }
}

}  // namespace

const char* graph_rows(const GraphRows& p, void* stream) {
  if (p.num_rows == 0) return nullptr;
  graph_rows_kernel<<<blocks_for(p.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return last_error();
}

const char* join_edges(const JoinEdges& p, void* stream) {
  const int64_t rows = p.num_edges > p.num_nodes ? p.num_edges : p.num_nodes + 1;
  join_edges_kernel<<<blocks_for(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return last_error();
}

}  // namespace pyg_fast::cuda
