// Sum and mean aggregation.
#include "cuda.h"
#include "spmm.cuh"

namespace pyg_fast::cuda {
namespace {

template <typename T, typename I, int VEC, int LANES, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, kBlocks)
    spmm_kernel(Spmm p, const void* x_self, Shape s) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    SpmmRow<T, I, VEC, LANES, WEIGHTED> row(p, x_self, tile);
    for_each_row<I, LANES>(p.csr, s, row);
  }
}

}  // namespace

int64_t spmm_scratch(const Spmm& p) { return prologue_scratch(p); }

const char* spmm(const Spmm& p_in, void* scratch, void* stream_) {
  if (p_in.csr.num_rows == 0 || p_in.dim == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p_in.dtype, p_in.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    Spmm p = p_in;
    prologue<T, I>(p, scratch, stream);
    const bool vectors = p.dim % kVec<T> == 0 && aligned16(p.x) && aligned16(p.out);
    const Shape s = shape_of(p.csr, p.dim, vectors ? kVec<T> : 1);
    const dim3 grid = s.grid(p.csr.num_rows);
    dispatch_shape<kVec<T>>(s, [&](auto vec, auto lanes) {
      if constexpr (sizeof(I) == 4) {
        if (!is_weighted(p)) {
          spmm_kernel<T, I, vec, lanes, false><<<grid, kThreads, 0, stream>>>(p, p_in.x, s);
          return;
        }
      }
      spmm_kernel<T, I, vec, lanes, true><<<grid, kThreads, 0, stream>>>(p, p_in.x, s);
    });
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
