// Functions that the bindings of coordinate list ops share.
#pragma once
#include "stable.h"

namespace pyg_fast {

inline Coo coo_of(const Tensor& edge_index, int64_t num_src, int64_t num_dst, bool reverse,
                  bool drop_loops) {
  STD_TORCH_CHECK(num_src >= 0 && num_dst >= 0, "numbers of nodes must not be negative");
  Coo coo;
  coo.index64 = is_index64(edge_index, "edge_index");
  const int64_t second = edge_index.stride(0) * (coo.index64 ? 8 : 4);
  const auto* data = static_cast<const char*>(edge_index.const_data_ptr());
  coo.src = reverse ? data + second : data;
  coo.dst = reverse ? data : data + second;
  coo.drop_loops = drop_loops;
  coo.reversed = reverse;
  coo.num_src = num_src;
  coo.num_dst = num_dst;
  coo.num_edges = edge_index.size(1);
  return coo;
}

// Calls fn(begin, end) for shares of [0, n), one per thread that `work` justifies: some kernels walk all
// edges for each share, which only pays if the shares run in parallel.
template <typename Fn>
void shared_out(int64_t n, int64_t work, const Fn& fn) {
  const int64_t threads = paid_threads(work), shares = n < 2 ? 1 : n < threads ? n : threads;
  parallel(shares, work, [&](int64_t k) { fn(n * k / shares, n * (k + 1) / shares); });
}

}  // namespace pyg_fast
