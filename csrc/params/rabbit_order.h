// A node order that keeps communities together.
#pragma once
#include "common.h"

namespace pyg_fast {

namespace cpu {
// perm[k] = the k-th node of a square graph.
void rabbit_order(const Csr& csr, int64_t* perm);
}  // namespace cpu

}  // namespace pyg_fast
