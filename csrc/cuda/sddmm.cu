// Dot products along edges: the gradients of their weights.
#include "edges.cuh"
#include "params/sddmm.h"

namespace pyg_fast::cuda {
namespace {

template <typename T, typename I, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads) sddmm_kernel(Sddmm p, LongRows l) {
  using Acc = acc_t<T>;
  using OfThread = Columns<VEC, LANES, STRIDED>;
  const I* rowptr = static_cast<const I*>(p.csr.rowptr);
  const Col* col = static_cast<const Col*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const Acc* row_scale = static_cast<const Acc*>(p.row_scale);
  const Acc* col_scale = static_cast<const Acc*>(p.col_scale);
  const int lane = threadIdx.x % LANES;
  for_each_edge<I, LANES>(p.csr, l, [&](int64_t row, I edge) {
    const Col j = edge < 0 ? 0 : col[edge];
    Acc dot = 0;
    if (edge >= 0) {
      const T* a = static_cast<const T*>(p.a) + row * p.dim;
      const T* b = static_cast<const T*>(p.b) + static_cast<int64_t>(j) * p.dim;
#pragma unroll STRIDED ? 2 : 4
      for (int64_t c = OfThread::first(lane); c < p.dim; c += LANES * VEC) {
        const OfThread columns(c, p.dim);
        const T* from = a + c;
        // Otherwise nvcc loads a row's first column before the loop over its edges, for threads without one
        // too: past the end of the last row.
        if constexpr (STRIDED) asm volatile("" : "+l"(from));
        const auto u = columns.load(from), v = columns.load(b + c);
#pragma unroll
        for (int k = 0; k < VEC; ++k) dot += to_acc(u.data[k]) * to_acc(v.data[k]);
      }
    }
    dot = sum_lanes<LANES>(dot);
    if (edge < 0 || lane != 0) return;
    if (row_scale) dot *= row_scale[row];
    if (col_scale) dot *= col_scale[j];
    if (p.mean) dot /= static_cast<Acc>(rowptr[row + 1] - rowptr[row]);
    static_cast<T*>(p.out)[perm ? perm[edge] : edge] = from_acc<T>(dot);
  });
}

}  // namespace

const char* sddmm(const Sddmm& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.csr.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const LongRows l(p.csr);
    const unsigned grid = grid_for(p.csr, l);
    if (p.dim % kVec<T> == 0 && aligned16(p.a) && aligned16(p.b))
      sddmm_kernel<T, I, kVec<T>, 8, false><<<grid, kThreads, 0, stream>>>(p, l);
    else sddmm_kernel<T, I, kStridedVec<T>, 8, true><<<grid, kThreads, 0, stream>>>(p, l);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
