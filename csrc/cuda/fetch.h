// The CUDA kernels that bring a mini-batch's features together. All pointers are on the device but
// those of FetchRows::x_on_host; each returns what went wrong, or nullptr.
#pragma once
#include "../fetch.h"

namespace pyg_fast::cuda {

const char* match(const Match& p, void* stream);
const char* match_degree(const MatchDegree& p, void* stream);
const char* fetch_rows(const FetchRows& p, void* stream);

}  // namespace pyg_fast::cuda
