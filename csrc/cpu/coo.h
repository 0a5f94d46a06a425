// The edges of a coordinate list, block by block: the kernel first removes skipped edges, then needs no
// branches.
#pragma once
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

constexpr int64_t kCooBlock = 1024;

// Calls f(e, src, dst, valid) for the edges [begin, end).
template <typename Index, typename F>
PYG_FAST_INLINE void for_coo(const Coo& coo, int64_t begin, int64_t end, const F& f) {
  const auto* src = static_cast<const Index*>(coo.src);
  const auto* dst = static_cast<const Index*>(coo.dst);
  for (int64_t e = begin; e < end; ++e) {
    const int64_t s = src[e], d = dst[e];
    f(e, s, d, (s >= 0) & (s < coo.num_src) & (d >= 0) & (d < coo.num_dst));
  }
}

// The edges of a block that a call processes, and the numbers of invalid and of skipped edges.
struct CooBlock {
  int64_t count = 0, invalid = 0, skipped = 0;
  int64_t edge[kCooBlock], src[kCooBlock], dst[kCooBlock];

  template <typename Index>
  void fill(const Coo& coo, int64_t begin, int64_t end, int64_t dst_begin, int64_t dst_end) {
    count = invalid = skipped = 0;
    for_coo<Index>(coo, begin, end, [&](int64_t e, int64_t s, int64_t d, bool valid) {
      edge[count] = e;
      src[count] = s;
      dst[count] = d;
      const bool used = valid & !(coo.drop_loops & (s == d));
      count += used & (d >= dst_begin) & (d < dst_end);
      invalid += !valid;
      skipped += !used;
    });
  }
};

// Calls f(block) for all edges of [begin, end) with a destination in [dst_begin, dst_end).
template <typename Index, typename F>
PYG_FAST_INLINE void for_coo_blocks(const Coo& coo, int64_t begin, int64_t end, int64_t dst_begin,
                                    int64_t dst_end, const F& f) {
  CooBlock block;
  for (; begin < end; begin += kCooBlock) {
    const int64_t stop = begin + kCooBlock < end ? begin + kCooBlock : end;
    block.fill<Index>(coo, begin, stop, dst_begin, dst_end);
    f(block, begin, stop);
  }
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
