// Cuts the rows of a graph into groups.
#include <cub/device/device_radix_sort.cuh>

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

template <typename I>
__global__ void __launch_bounds__(kThreads) keys_kernel(OrderGroups p, uint16_t* keys, I* numbers) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       group < p.num_groups; group += threads) {
    keys[group] = order_key<I>(p, group);
    numbers[group] = static_cast<I>(group);
  }
}

// Keys, sorted keys, and numbers of groups, in scratch memory before that of the sort.
template <typename I>
struct Unordered {
  int64_t of_keys, of_numbers, of_sort = 0;
  cudaError_t error;

  explicit Unordered(const OrderGroups& p)
      : of_keys(aligned(p.num_groups * sizeof(uint16_t))),
        of_numbers(aligned(p.num_groups * sizeof(I))) {
    size_t bytes = 0;
    error = sort(p, nullptr, bytes, nullptr);
    of_sort = static_cast<int64_t>(bytes);
  }

  int64_t bytes() const { return 2 * of_keys + of_numbers + of_sort; }
  uint16_t* keys(char* scratch) const { return reinterpret_cast<uint16_t*>(scratch); }
  I* numbers(char* scratch) const { return reinterpret_cast<I*>(scratch + 2 * of_keys); }

  cudaError_t sort(const OrderGroups& p, char* scratch, size_t& bytes, cudaStream_t stream) const {
    void* memory = scratch ? scratch + 2 * of_keys + of_numbers : nullptr;
    return cub::DeviceRadixSort::SortPairs(memory, bytes, keys(scratch), keys(scratch + of_keys),
                                           numbers(scratch), static_cast<I*>(p.order), p.num_groups,
                                           0, 16, stream);
  }
};

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

int64_t order_groups_scratch(const OrderGroups& p) {
  return with_index(p.index64, [&](auto index) { return Unordered<decltype(index)>(p).bytes(); });
}

const char* order_groups(const OrderGroups& p, void* scratch_, void* stream_) {
  if (p.num_groups == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  char* scratch = static_cast<char*>(scratch_);
  return with_index(p.index64, [&](auto index) {
    using I = decltype(index);
    const Unordered<I> made(p);
    if (made.error != cudaSuccess) return cudaGetErrorString(made.error);
    keys_kernel<I><<<some_blocks(p.num_groups), kThreads, 0, stream>>>(p, made.keys(scratch),
                                                                       made.numbers(scratch));
    size_t bytes = made.of_sort;
    const cudaError_t error = made.sort(p, scratch, bytes, stream);
    return error == cudaSuccess ? last_error() : cudaGetErrorString(error);
  });
}

}  // namespace pyg_fast::cuda
