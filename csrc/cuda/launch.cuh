// Kernels that may start while the last blocks of the kernel before them still run.
#pragma once
#include <atomic>

#include "common.cuh"

namespace pyg_fast::cuda {

// A kernel that launch_early launches may start early if the kernel before it calls allow_next_kernel. It
// must call wait_for_previous_kernel before it uses memory: the call returns when the kernel before it has
// ended and its writes are visible.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// A kernel compiled for the same architectures as all others.
template <typename T>
__global__ void architecture_probe_kernel() {}

// Whether the current device runs code of 9.0 or newer, whose kernels wait for the one before them: newer
// GPUs also run code of older architectures.
inline bool may_start_early() {
  constexpr int kDevices = 64;
  enum : signed char { unknown, no, yes };
  static std::atomic<signed char> known[kDevices];
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const bool has_place = device < kDevices;
  if (has_place && known[device] != unknown) return known[device] == yes;
  cudaFuncAttributes code = {};
  if (cudaFuncGetAttributes(&code, architecture_probe_kernel<void>) != cudaSuccess) {
    cudaGetLastError();  // Or the caller takes it for an error of its launch.
    return false;
  }
  const bool early = code.ptxVersion >= 90;
  if (has_place) known[device] = early ? yes : no;
  return early;
}

// Launches `kernel` after the one before it, early if it may. The caller checks for errors.
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, size_t shared, cudaStream_t stream,
                  const Args&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = may_start_early() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace pyg_fast::cuda
