// State that a process shares.
#pragma once
#include <cstdint>

namespace pyg_fast {

namespace cuda {
// The record of a skipped invalid edge, see record.cuh: one per process, in pinned host memory that all
// devices write. The first call allocates it; it is never freed. nullptr: no device.
int64_t* error_record();

// The text of an error that makes the device unusable, nullptr without such an error.
const char* device_error();
}  // namespace cuda

}  // namespace pyg_fast
