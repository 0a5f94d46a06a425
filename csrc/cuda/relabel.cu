// Local ids for arbitrary ids.
#include "minibatch.cuh"
#include "params/relabel.h"

namespace pyg_fast::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) insert_ids_kernel(Relabel p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < p.num_ids;
       k += step) {
    insert(p.map, p.ids[k], k);
  }
}

struct IsFirst {
  Relabel p;
  __device__ int32_t operator()(int64_t k) const { return find(p.map, p.ids[k]) == k; }
};

struct AddId {
  Relabel p;
  __device__ void operator()(int64_t k, int32_t sum) const {
    if (IsFirst{p}(k)) {
      p.rank[k] = sum - 1;
      p.unique[sum - 1] = p.ids[k];
    }
    if (k == p.num_ids - 1) *p.count = sum;
  }
};

__global__ void __launch_bounds__(kThreads) places_kernel(Relabel p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < p.num_ids;
       k += step) {
    p.place[k] = p.rank[find(p.map, p.ids[k])];
  }
}

}  // namespace

int64_t relabel_scratch(const Relabel& p) { return scratch_of(IsFirst{p}, AddId{p}, p.num_ids); }

const char* relabel(const Relabel& p, void* scratch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.num_ids == 0) {
    const cudaError_t error = cudaMemsetAsync(p.count, 0, 8, s);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }
  if (const char* error = start(p.map, s)) return error;
  insert_ids_kernel<<<some_blocks(p.num_ids), kThreads, 0, s>>>(p);
  if (const char* error =
          run_sum(scratch, relabel_scratch(p), IsFirst{p}, AddId{p}, p.num_ids, stream)) {
    return error;
  }
  places_kernel<<<some_blocks(p.num_ids), kThreads, 0, s>>>(p);
  return last_error();
}

}  // namespace pyg_fast::cuda
