// Code that the kernels of sampled mini-batches share: launches, and prefix sums with functions as input
// and output.
#pragma once
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_scan.cuh>

#include "node_map.cuh"

namespace pyg_fast::cuda {

constexpr unsigned kBlocksPerLaunch = 132 * 16;

inline unsigned some_blocks(int64_t threads) {
  const unsigned blocks = blocks_for(threads);
  return blocks < kBlocksPerLaunch ? blocks : kBlocksPerLaunch;
}

// Calls fn(I{}) with the graph's index type.
template <typename Fn>
auto with_index(bool index64, const Fn& fn) {
  return index64 ? fn(int64_t{}) : fn(int32_t{});
}

// An output of a scan that passes position and value to a function.
template <typename Fn>
class OutputTo {
 public:
  using iterator_category = std::random_access_iterator_tag;
  using value_type = void;
  using difference_type = int64_t;
  using pointer = void;
  using reference = void;

  struct Place {
    const Fn& fn;
    int64_t at;
    template <typename V>
    __host__ __device__ const Place& operator=(V value) const {
#ifdef __CUDA_ARCH__
      fn(at, value);
#endif
      return *this;
    }
  };

  __host__ __device__ explicit OutputTo(Fn fn, int64_t at = 0) : fn_(fn), at_(at) {}
  __host__ __device__ Place operator[](int64_t k) const { return {fn_, at_ + k}; }
  __host__ __device__ Place operator*() const { return {fn_, at_}; }
  __host__ __device__ OutputTo operator+(int64_t k) const { return OutputTo(fn_, at_ + k); }
  __host__ __device__ OutputTo& operator+=(int64_t k) {
    at_ += k;
    return *this;
  }

 private:
  Fn fn_;
  int64_t at_;
};

// Calls out(k, in(0) + ... + in(k)) for k < `count`; without scratch, returns the bytes it needs.
template <typename In, typename Out>
cudaError_t sum_up(void* scratch, size_t& bytes, const In& in, const Out& out, int64_t count,
                   cudaStream_t stream) {
  const auto input = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), in);
  return cub::DeviceScan::InclusiveSum(scratch, bytes, input, OutputTo<Out>(out), count, stream);
}

template <typename In, typename Out>
int64_t scratch_of(const In& in, const Out& out, int64_t count) {
  size_t bytes = 0;
  sum_up(nullptr, bytes, in, out, count, nullptr);
  return static_cast<int64_t>(bytes);
}

template <typename In, typename Out>
const char* run_sum(void* scratch, int64_t bytes, const In& in, const Out& out, int64_t count,
                    void* stream) {
  size_t size = static_cast<size_t>(bytes);
  const cudaError_t error =
      sum_up(scratch, size, in, out, count, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace pyg_fast::cuda
