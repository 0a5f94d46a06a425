// An order of nodes that puts communities together.
#pragma once
#include "common.h"

namespace pyg_fast {

namespace cpu {
// perm[k] = the node, of a square graph, that comes k-th.
void rabbit_order(const Csr& csr, int64_t* perm);
}  // namespace cpu

}  // namespace pyg_fast
