// The graphs of a batch side by side: a thread for each row, which looks for its graph.
#include <algorithm>

#include "common.cuh"
#include "params/join_edges.h"

namespace pyg_fast::cuda {
namespace {

constexpr unsigned kMostBlocks = 1 << 14;  // of a task

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

// The blocks of each task follow those of the one before.
struct TakeBlocks {
  unsigned end[kMostTasks];
};

template <typename Word>
__device__ void copy_words(const TakeTask& t, int64_t num_graphs, int64_t first, int64_t step) {
  for (int64_t k = first; k < t.num_rows * t.words; k += step) {
    const int64_t row = k / t.words, word = k - row * t.words;
    const int64_t source = source_row(t, graph_of(t.ptr, num_graphs, row), row);
    word_of<Word>(t.out, t, row, word) = word_of<Word>(t.rows, t, source, word);
  }
}

template <typename Word>
__device__ void shift_words(const TakeTask& t, int64_t num_graphs, int64_t first, int64_t step) {
  for (int64_t k = first; k < t.num_rows * t.words; k += step) {
    const int64_t row = k / t.words;
    write_shifted<Word>(t, graph_of(t.ptr, num_graphs, row), row, k - row * t.words);
  }
}

__global__ void __launch_bounds__(kThreads)
    take_rows_kernel(const __grid_constant__ TakeRows p,
                     const __grid_constant__ TakeBlocks blocks) {
  int task = 0;
  while (blockIdx.x >= blocks.end[task]) ++task;
  const TakeTask& t = p.task[task];
  const unsigned before = task == 0 ? 0 : blocks.end[task - 1];
  const int64_t first = static_cast<int64_t>(blockIdx.x - before) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(blocks.end[task] - before) * kThreads;
  switch (t.take) {
    case Take::copy:
      switch (t.word_bytes) {
        case 16: return copy_words<uint4>(t, p.num_graphs, first, step);
        case 8: return copy_words<uint64_t>(t, p.num_graphs, first, step);
        case 4: return copy_words<uint32_t>(t, p.num_graphs, first, step);
        case 2: return copy_words<uint16_t>(t, p.num_graphs, first, step);
        default: return copy_words<uint8_t>(t, p.num_graphs, first, step);
      }
    case Take::shift32: return shift_words<uint32_t>(t, p.num_graphs, first, step);
    case Take::shift64: return shift_words<uint64_t>(t, p.num_graphs, first, step);
    case Take::owner:
      for (int64_t k = first; k < t.num_rows; k += step) {
        reinterpret_cast<int64_t*>(t.out)[k] = graph_of(t.ptr, p.num_graphs, k);
      }
      return;
    case Take::is_real:
      for (int64_t k = first; k < t.num_rows; k += step) {
        t.out[k] = static_cast<char>(k < t.ptr[p.num_real]);
      }
  }
}

__global__ void __launch_bounds__(kThreads) join_edges_kernel(JoinEdges p) {
  const int64_t num_nodes = p.node_ptr[p.num_graphs], num_edges = p.edge_ptr[p.num_graphs];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t end = p.num_edges > p.num_nodes ? p.num_edges : p.num_nodes + 1;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < end; k += step) {
    if (k < num_edges) write_edge(p, graph_of(p.edge_ptr, p.num_graphs, k), k);
    else if (p.ring && k < p.num_edges) write_ring(p, k);
    if (k < num_nodes) write_rowptr(p, graph_of(p.node_ptr, p.num_graphs, k), k);
    else if (k <= p.num_nodes) write_end(p, k);
  }
}

}  // namespace

const char* take_rows(const TakeRows& p, void* stream) {
  TakeBlocks blocks{};
  unsigned end = 0;
  for (int k = 0; k < p.num_tasks; ++k) {
    const int64_t work = p.task[k].num_rows * p.task[k].words;
    end += work == 0 ? 0 : std::min(blocks_for(work), kMostBlocks);
    blocks.end[k] = end;
  }
  if (end == 0) return nullptr;
  take_rows_kernel<<<end, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, blocks);
  return last_error();
}

const char* join_edges(const JoinEdges& p, void* stream) {
  const int64_t rows = p.num_edges > p.num_nodes ? p.num_edges : p.num_nodes + 1;
  join_edges_kernel<<<blocks_for(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return last_error();
}

}  // namespace pyg_fast::cuda
