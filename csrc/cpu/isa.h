// The kernels of one instruction set. kernels.cpp is compiled once for each.
#pragma once
#include "../kernels.h"

namespace pyg_fast::cpu {

struct Kernels {
  void (*spmm)(const Spmm&, int64_t, int64_t);
  void (*spmm_max)(const SpmmMax&, int64_t, int64_t);
  void (*sddmm)(const Sddmm&, int64_t, int64_t);
  void (*spmm_max_backward_value)(const SpmmMaxBackwardValue&, int64_t, int64_t);
  void (*spmm_max_backward_x)(const SpmmMaxBackwardX&, int64_t, int64_t);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace pyg_fast::cpu
