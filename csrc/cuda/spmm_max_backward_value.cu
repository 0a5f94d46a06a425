#include "edges.cuh"
#include "params/spmm_max.h"

namespace pyg_fast::cuda {
namespace {

template <typename T, typename I, int LANES>
__global__ void __launch_bounds__(kThreads)
    max_backward_value_kernel(SpmmMaxBackwardValue p, LongRows l) {
  using Acc = acc_t<T>;
  const Col* col = static_cast<const Col*>(p.csr.col);
  const I* perm = static_cast<const I*>(p.csr.perm);
  const int lane = threadIdx.x % LANES;
  for_each_edge<I, LANES>(p.csr, l, [&](int64_t row, I edge) {
    Acc sum = 0;
    if (edge >= 0) {
      const I* arg = static_cast<const I*>(p.arg) + row * p.dim;
      const T* grad = static_cast<const T*>(p.grad) + row * p.dim;
      const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(col[edge]) * p.dim;
      for (int64_t c = lane; c < p.dim; c += LANES) {
        if (arg[c] == edge) sum += to_acc(grad[c]) * to_acc(x[c]);
      }
    }
    sum = sum_lanes<LANES>(sum);
    if (edge >= 0 && lane == 0)
      static_cast<T*>(p.grad_value)[perm ? perm[edge] : edge] = from_acc<T>(sum);
  });
}

}  // namespace

const char* spmm_max_backward_value(const SpmmMaxBackwardValue& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.csr.num_edges == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const LongRows l(p.csr);
    max_backward_value_kernel<T, I, 16><<<grid_for(p.csr, l), kThreads, 0, stream>>>(p, l);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
