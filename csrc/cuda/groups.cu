// Cuts the rows of a graph into groups.
#include "minibatch.cuh"
#include "params/groups.h"

namespace pyg_fast::cuda {
namespace {

struct Counts {
  int64_t groups, longs;
  __host__ __device__ Counts operator+(const Counts& other) const {
    return {groups + other.groups, longs + other.longs};
  }
};

template <typename I>
struct OfRow {
  CountGroups p;
  __device__ Counts operator()(int64_t row) const {
    const int64_t count = groups_of_row<I>(p, row);
    return {count, count > 1};
  }
};

struct Before {
  int64_t* first;
  int64_t* longs;
  __device__ void operator()(int64_t row, Counts sum) const {
    if (row == 0) first[0] = longs[0] = 0;
    first[row + 1] = sum.groups;
    longs[row + 1] = sum.longs;
  }
};

// Each thread finds the row of its group by binary search: the last row whose first group is <= group.
template <typename I>
__global__ void __launch_bounds__(kThreads) group_kernel(GroupEdges p) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (group == 0) write_ends<I>(p);
  for (; group < p.num_groups; group += threads) {
    int64_t low = 0, high = p.num_rows - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (p.first[middle] <= group) low = middle;
      else high = middle - 1;
    }
    write_group<I>(p, group, low);
  }
}

}  // namespace

int64_t count_groups_scratch(const CountGroups& p) {
  return with_index(p.index64, [&](auto index) {
    return scratch_of(OfRow<decltype(index)>{p}, Before{p.first, p.longs}, p.num_rows);
  });
}

const char* count_groups(const CountGroups& p, void* scratch, void* stream) {
  if (p.num_rows == 0) {
    const auto s = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaMemsetAsync(p.first, 0, sizeof(int64_t), s);
    if (error == cudaSuccess) error = cudaMemsetAsync(p.longs, 0, sizeof(int64_t), s);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }
  const int64_t bytes = count_groups_scratch(p);
  return with_index(p.index64, [&](auto index) {
    return run_sum(scratch, bytes, OfRow<decltype(index)>{p}, Before{p.first, p.longs}, p.num_rows,
                   stream);
  });
}

const char* group_edges(const GroupEdges& p, void* stream) {
  with_index(p.index64, [&](auto index) {
    group_kernel<decltype(index)>
        <<<some_blocks(p.num_groups), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  });
  return last_error();
}

}  // namespace pyg_fast::cuda
