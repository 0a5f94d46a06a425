// Quantizes features to 8 bits.
#include "common.cuh"
#include "params/sampled.h"

namespace pyg_fast::cuda {
namespace {

// One warp per row: finds the largest entry, then reads the row again, from a cache, and divides by it.
template <typename T, int VEC, bool STRIDED>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(QuantizeRows p) {
  using OfThread = Columns<VEC, 32, STRIDED>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = threadIdx.x & 31;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (; row < p.num_rows; row += step) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    const auto larger = [](float a, float b) { return b > a || b != b ? b : a; };
    float largest = 0;
    for (int64_t c = OfThread::first(lane); c < p.dim; c += 32 * VEC) {
      const auto pack = OfThread(c, p.dim).load(x + c);
#pragma unroll
      for (int k = 0; k < VEC; ++k)
        largest = larger(largest, fabsf(static_cast<float>(element(pack, k))));
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1)
      largest = larger(largest, __shfl_xor_sync(kWarpMask, largest, offset));
    const float inverse = quantization_of(largest);
    for (int64_t c = OfThread::first(lane); c < p.dim; c += 32 * VEC) {
      const auto pack = OfThread(c, p.dim).load(x + c);
      Pack<int8_t, VEC, STRIDED> out;
#pragma unroll
      for (int k = 0; k < VEC; ++k) {
        const float v = inverse > 0 ? static_cast<float>(element(pack, k)) * inverse : 0.0f;
        out.data[k] = static_cast<int8_t>(rintf(v));
      }
      OfThread(c, p.dim).store(p.out + row * p.dim + c, out);
    }
    if (lane == 0) p.scale[row] = largest / 127;
  }
}

}  // namespace

const char* quantize_rows(const QuantizeRows& p, void* stream_) {
  if (p.num_rows == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, false, [&](auto element, auto) {
    using T = decltype(element);
    const unsigned blocks = blocks_for(p.num_rows * 32);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    if (vectors) quantize_rows_kernel<T, kVec<T>, false><<<blocks, kThreads, 0, stream>>>(p);
    else quantize_rows_kernel<T, kStridedVec<T>, true><<<blocks, kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
