// The k largest entries of each row.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// f(Type<C>) of what columns are stored as.
template <typename F>
PYG_FAST_INLINE void with_columns(ColumnType type, const F& f) {
  switch (type) {
    case ColumnType::u8: return f(Type<uint8_t>{});
    case ColumnType::u16: return f(Type<uint16_t>{});
    case ColumnType::i32: return f(Type<int32_t>{});
  }
}

// f(Type<T>) of what features are stored as.
template <typename F>
PYG_FAST_INLINE void with_dtype(DType dtype, const F& f) {
  with_types(dtype, false, [&](auto type, auto) { f(type); });
}

template <typename T, typename C>
void maxk_rows(const MaxK& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  const auto before = [](Acc a, Acc b) { return a > b || (a != a && b == b); };
  std::vector<int64_t> order(p.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    T* values = static_cast<T*>(p.values) + row * p.k;
    C* columns = static_cast<C*>(p.columns) + row * p.k;
    if (p.balanced) {
      for (int64_t c = 0; c < p.k; ++c) {
        int64_t best = c;
        for (int64_t f = c; f < p.dim; f += p.k)
          if (before(load_one(x + f), load_one(x + best))) best = f;
        values[c] = x[best];
        columns[c] = static_cast<C>(best);
      }
      continue;
    }
    for (int64_t f = 0; f < p.dim; ++f) order[f] = f;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return before(load_one(x + a), load_one(x + b));
    });
    std::sort(order.begin(), order.begin() + p.k);
    for (int64_t c = 0; c < p.k; ++c) {
      values[c] = x[order[c]];
      columns[c] = static_cast<C>(order[c]);
    }
  }
}

static void maxk(const MaxK& p, int64_t row_begin, int64_t row_end) {
  with_dtype(p.dtype, [&](auto type) {
    with_columns(p.column_type, [&](auto column) {
      maxk_rows<typename decltype(type)::type, typename decltype(column)::type>(p, row_begin,
                                                                               row_end);
    });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
