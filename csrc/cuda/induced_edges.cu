// All graph edges between nodes of a batch.
#include "minibatch.cuh"
#include "params/induced_edges.h"

namespace pyg_fast::cuda {
namespace {

// A warp counts or lists the edges of a row whose sources are in the batch.
template <typename I, bool lists>
__global__ void __launch_bounds__(kThreads) induced_kernel(InducedEdges p) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t node = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       node < p.num_nodes; node += warps) {
    const I* rowptr = static_cast<const I*>(p.graph.rowptr) + p.n_id[node];
    const int64_t begin = rowptr[0], end = rowptr[1];
    int64_t at = lists ? p.rowptr[node] : 0;
    for (int64_t e0 = begin; e0 < end; e0 += 32) {
      const int64_t e = e0 + lane;
      const int64_t position = e < end ? find(p.map, column(p.graph, e)) : kNotFound;
      const unsigned found = __ballot_sync(kWarpMask, position != kNotFound);
      if (lists && position != kNotFound) {
        const int64_t out = at + __popc(found & ((1u << lane) - 1));
        const int32_t source = p.local[position];
        p.out_col[out] = source;
        p.out_src[out] = source;
        p.out_dst[out] = node;
        p.out_e_id[out] = p.graph.perm ? static_cast<const I*>(p.graph.perm)[e] : e;
      }
      at += __popc(found);
    }
    if (!lists && lane == 0) p.rowptr[node + 1] = at;
  }
}

struct Counted {
  const int64_t* count;
  __device__ int64_t operator()(int64_t k) const { return count[k]; }
};

struct Summed {
  int64_t* sum;
  __device__ void operator()(int64_t k, int64_t value) const { sum[k] = value; }
};

}  // namespace

int64_t count_induced_scratch(const InducedEdges& p) {
  return scratch_of(Counted{p.rowptr}, Summed{p.rowptr}, p.num_nodes + 1);
}

const char* count_induced(const InducedEdges& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaMemsetAsync(p.rowptr, 0, 8, s);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (p.num_nodes == 0) return nullptr;
  with_index(p.graph.index64, [&](auto index) {
    induced_kernel<decltype(index), false><<<some_blocks(p.num_nodes * 32), kThreads, 0, s>>>(p);
  });
  return run_sum(scratch, count_induced_scratch(p), Counted{p.rowptr}, Summed{p.rowptr},
                 p.num_nodes + 1, stream);
}

const char* induced_edges(const InducedEdges& p, void* stream) {
  if (p.num_nodes == 0) return nullptr;
  with_index(p.graph.index64, [&](auto index) {
    induced_kernel<decltype(index), true>
        <<<some_blocks(p.num_nodes * 32), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  });
  return last_error();
}

}  // namespace pyg_fast::cuda
