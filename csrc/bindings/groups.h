// A check that the bindings of groups and of their sums share.
#pragma once
#include "stable.h"

namespace pyg_fast {

// The data of a contiguous vector of `count` entries, of the type and on the device of `like`.
inline const void* entries_of(const Tensor& t, const char* name, int64_t count,
                              const Tensor& like) {
  check_vector(t, name, count);
  check_type(t, name, like.scalar_type());
  check_device(t, name, like);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  return t.const_data_ptr();
}

}  // namespace pyg_fast
