#include <mutex>

#include "common.cuh"
#include "params/runtime.h"
#include "record.cuh"

namespace pyg_fast::cuda {
namespace {

int64_t* make_record() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    return nullptr;
  }
  // Permits the allocation while any thread captures a graph: the capture does not include it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  void* memory = nullptr;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = cudaHostAlloc(&memory, kRecordWords * sizeof(int64_t),
                                          cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  auto* record = static_cast<int64_t*>(memory);
  for (int k = 0; k < kRecordWords; ++k) record[k] = 0;
  return record;
}

}  // namespace

int64_t* error_record() {
  // Retries after a failure: a process may start to use its device later.
  static std::mutex mutex;
  static int64_t* record = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (record == nullptr) record = make_record();
  return record;
}

const char* device_error() {
  size_t free = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  cudaGetLastError();
  return error == cudaSuccess || error == cudaErrorMemoryAllocation ? nullptr
                                                                    : cudaGetErrorString(error);
}

}  // namespace pyg_fast::cuda
