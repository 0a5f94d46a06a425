#include "params/runtime.h"

#include "stable.h"

namespace pyg_fast {
namespace {

bool with_cuda() {
#ifdef PYG_FAST_WITH_CUDA
  return true;
#else
  return false;
#endif
}

int64_t error_record() {
#ifdef PYG_FAST_WITH_CUDA
  return reinterpret_cast<int64_t>(cuda::error_record());
#else
  return 0;
#endif
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  m.def("with_cuda() -> bool");
  // Address of the host memory where CUDA kernels record a skipped edge (cuda/record.cuh), 0 without
  // CUDA. The first call creates a CUDA context.
  m.def("error_record() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CompositeExplicitAutograd, m) {
  m.impl("with_cuda", TORCH_BOX(&pyg_fast::with_cuda));
  m.impl("error_record", TORCH_BOX(&pyg_fast::error_record));
}
