// Rows of execution paths: expand to all rows, count nonzero rows outside, dropout by node.
#include "params/dropout.h"
#include "params/path.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

void expand_rows(const ExpandRows& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    const auto* position = static_cast<const typename decltype(index)::type*>(p.position);
    for (int64_t row = row_begin; row < row_end; ++row) {
      T* out = static_cast<T*>(p.out) + row * p.dim;
      const int64_t from = position[row];
      if (from >= 0 && from < p.num_x) {
        const T* x = static_cast<const T*>(p.x) + from * p.dim;
        __builtin_memcpy(out, x, static_cast<size_t>(p.dim) * sizeof(T));
      } else {
        for (int64_t c = 0; c < p.dim; ++c) store_one(out + c, static_cast<acc_t<T>>(p.fill));
      }
    }
  });
}

void count_outside(const CountOutside& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    const auto* position = static_cast<const typename decltype(index)::type*>(p.position);
    int64_t count = 0;
    for (int64_t row = row_begin; row < row_end; ++row) {
      if (position[row] >= 0) continue;
      const T* x = static_cast<const T*>(p.x) + row * p.dim;
      // Nearly all rows are zero: leaving the loop early would only keep it from vector registers.
      int any = 0;
      for (int64_t c = 0; c < p.dim; ++c) any |= load_one(x + c) != 0;
      count += any;
    }
    if (count > 0) __atomic_fetch_add(p.counter, count, __ATOMIC_RELAXED);
  });
}

void node_dropout(const NodeDropout& p, int64_t row_begin, int64_t row_end) {
  const auto seed = static_cast<uint64_t>(*p.seed);
  const uint32_t threshold = dropout_threshold(p.dropout);
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    const auto scale = static_cast<acc_t<T>>(dropout_scale(p.dropout));
    for (int64_t row = row_begin; row < row_end; ++row) {
      const auto node = static_cast<uint64_t>(p.nodes != nullptr ? p.nodes[row] : row);
      const uint32_t bits = edge_bits(seed, node);
      for (int64_t c = 0; c < p.dim; ++c) {
        const int64_t at = row * p.dim + c;
        const bool kept = keeps(bits, static_cast<uint32_t>(c), threshold);
        const auto v = load_one(static_cast<const T*>(p.x) + at) * scale;
        store_one(static_cast<T*>(p.out) + at, kept ? v : 0);
      }
    }
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(expand_rows, (const ExpandRows& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(count_outside, (const CountOutside& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(node_dropout, (const NodeDropout& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
