// Divides work among threads.
#pragma once
#include "params/common.h"

namespace pyg_fast::cpu {

// The first row of share `k` of `n`; shares have about equal numbers of edges.
int64_t row_of_share(const Csr& csr, int64_t k, int64_t n);
// The same for sources, the columns of the CSR.
int64_t source_of_share(const Csr& csr, int64_t k, int64_t n);

}  // namespace pyg_fast::cpu
