// What a process shares.
#pragma once
#include <cstdint>

namespace pyg_fast {

namespace cuda {
// The record of an edge that a kernel had to leave out, see record.cuh: one a process, in pinned host
// memory that all devices write to, made by the first call, and never freed. nullptr: no device.
int64_t* error_record();

// The text of an error that leaves the device unusable, nullptr if there was none.
const char* device_error();
}  // namespace cuda

}  // namespace pyg_fast
