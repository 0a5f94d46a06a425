// Sums over a row's edges: the accumulators of a column tile stay in registers.
#pragma once
#include <type_traits>

#include "long_sums.h"
#include "params/spmm.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Post-processes the sum of one row, vector by vector.
template <typename T>
struct Epilogue {
  using Acc = acc_t<T>;
  const Spmm& p;

  PYG_FAST_INLINE Acc scale(int64_t row, int64_t count) const {
    Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc{1};
    if (p.mean && count > 1) scale /= static_cast<Acc>(count);
    return scale;
  }

  // The row of x that `diag` multiplies; negative: none.
  PYG_FAST_INLINE int64_t self_row(int64_t row) const {
    if (p.diag == nullptr) return -1;
    if (p.self_row == nullptr) return row;
    const int64_t self = static_cast<const Col*>(p.self_row)[row];
    return self < p.csr.num_cols ? self : -1;
  }

  // The row of out; negative: none.
  PYG_FAST_INLINE int64_t out_row(int64_t row) const {
    if (p.out_row == nullptr) return row;
    return p.out_row[row] < p.num_out ? p.out_row[row] : -1;
  }

  template <int V>
  PYG_FAST_INLINE void write(Vec<Acc, V> sum, Acc scale, int64_t row, int64_t to, int64_t self,
                             int64_t column) const {
    const int64_t at = to * p.dim + column;
    sum *= scale;
    if (self >= 0) {
      sum += load<V>(static_cast<const T*>(p.x) + self * p.dim + column) *
             static_cast<const Acc*>(p.diag)[row];
    }
    if (p.out_acc) {
      if (p.bias) sum += load<V>(static_cast<const Acc*>(p.bias) + column);
      store<V>(static_cast<Acc*>(p.out) + at, sum);
    } else if constexpr (!std::is_same_v<
                             T, int8_t>) {  // quantized features always take the branch above
      if (p.bias) sum += load<V>(static_cast<const T*>(p.bias) + column);
      store<V>(static_cast<T*>(p.out) + at, sum);
    }
  }
};

// Edges in flight, each with its own sums, to hide the latency of additions. They determine the order of
// the sum. For wide features (`wide`) it must not depend on N: packing of the tiles, and with it the
// number of vectors, depends on the rows of the call.
constexpr int edges_in_flight(bool wide, int n) {
  if (wide) return kManyRegisters ? 2 : 1;
  return n == 1 ? 4 : kManyRegisters || n <= 4 ? 2 : 1;
}

// Columns of 128 bytes: the narrowest tile worth packing. Wide features have four or more of them.
template <typename T>
constexpr int64_t kNarrow = 128 / sizeof(T);

template <typename T>
bool is_wide(const Spmm& p) {
  return p.dim >= 4 * kNarrow<T>;
}

template <typename T, typename Index, bool kWeighted, int V, int N, int U>
void spmm_tile(const Spmm& p, const T* x, int64_t stride, const acc_t<T>* weight, int64_t row_begin,
               int64_t row_end, int64_t prefetch_end, Tile tile) {
  using Acc = acc_t<T>;
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  constexpr int64_t kLong = U * kSumBlock;
  const int64_t last = tile.width - V;
  const Epilogue<T> epilogue{p};
  Acc row_sum[N * V], total[N * V];

  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], end = rowptr[row + 1];
    Vec<Acc, V> sum[U][N] = {};
    const auto add = [&](int u, int64_t e) PYG_FAST_ALWAYS {
      const T* from = x + static_cast<int64_t>(col[e]) * stride;
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        const auto v = load<V>(from + offset<V, N>(j, last));
        if constexpr (kWeighted) {
          sum[u][j] += v * weight[e];
        } else {
          sum[u][j] += v;
        }
      }
    };
    const auto store_sum = [&]() PYG_FAST_ALWAYS {
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        PYG_FAST_UNROLL
        for (int u = U / 2; u > 0; u /= 2) {
          PYG_FAST_UNROLL
          for (int k = 0; k < u; ++k) sum[k][j] += sum[k + u][j];
        }
        store<V>(row_sum + j * V, sum[0][j]);
      }
    };
    int64_t e = begin;
    for (;;) {
      const int64_t stop = end - e > kLong ? e + kLong : end;
      for (; e + U <= stop; e += U) {
        if (e + kPrefetchEdges + U <= prefetch_end) {
          PYG_FAST_UNROLL
          for (int u = 0; u < U; ++u) {
            prefetch_tile<T, V, N>(x + static_cast<int64_t>(col[e + kPrefetchEdges + u]) * stride);
          }
        }
        PYG_FAST_UNROLL
        for (int u = 0; u < U; ++u) add(u, e + u);
      }
      if (stop == end) break;
      store_sum();
      if (e == begin + kLong) __builtin_memset(total, 0, sizeof(total));
      carry(row_sum, total, N * V);
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        PYG_FAST_UNROLL
        for (int u = 0; u < U; ++u) sum[u][j] = Vec<Acc, V>{};
        sum[0][j] = load<V>(row_sum + j * V);
      }
    }
    for (; e < end; ++e) add(0, e);

    const Acc scale = epilogue.scale(row, end - begin);
    const int64_t self = epilogue.self_row(row), to = epilogue.out_row(row);
    if (to < 0) continue;
    store_sum();
    if (end - begin > kLong) add_total(row_sum, total, N * V);
    PYG_FAST_NO_UNROLL  // keeps the many kernels small
        for (int j = 0; j < N; ++j) {
      epilogue.template write<V>(load<V>(row_sum + j * V), scale, row, to, self,
                                 tile.column + offset<V, N>(j, last));
    }
  }
}

// weight[e - begin] = value[e] * col_scale[col[e]]
template <typename T, typename Index>
void spmm_weights(const Spmm& p, int64_t begin, int64_t end, acc_t<T>* weight) {
  using Acc = acc_t<T>;
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const auto* scale = static_cast<const Acc*>(p.col_scale);
  if (p.value == nullptr) {
    for (int64_t e = begin; e < end; ++e) weight[e - begin] = scale[col[e]];
    return;
  }
  if (p.value_acc) {
    gather_values(static_cast<const Acc*>(p.value), perm, begin, end, weight);
  } else {
    gather_values(static_cast<const T*>(p.value), perm, begin, end, weight);
  }
  if (scale != nullptr) {
    for (int64_t e = begin; e < end; ++e) weight[e - begin] *= scale[col[e]];
  }
}

// The number of columns to copy together before the gather, or 0. Packing pays for wide features if the
// tile then fits the cache (a power-of-two stride would use only a fraction of the cache's sets) and the
// copy is read often enough.
template <typename T>
int64_t packed_columns(const Spmm& p, int64_t edges) {
  constexpr int64_t kReads = 8, kDoubleBytes = 3 << 19, kMostBytes = 4 << 20;
  if (!is_wide<T>(p) || edges < kReads * p.csr.num_cols) return 0;
  const int64_t bytes = p.csr.num_cols * kNarrow<T> * static_cast<int64_t>(sizeof(T));
  return 2 * bytes <= kDoubleBytes ? 2 * kNarrow<T> : bytes <= kMostBytes ? kNarrow<T> : 0;
}

template <typename T>
void pack(const Spmm& p, Tile tile, T* copy) {
  const T* from = static_cast<const T*>(p.x) + tile.column;
  for (int64_t c = 0; c < p.csr.num_cols; ++c) {
    __builtin_memcpy(copy + c * tile.width, from + c * p.dim,
                     static_cast<size_t>(tile.width) * sizeof(T));
  }
}

template <typename T, typename Index>
void spmm_rows(const Spmm& p, int64_t row_begin, int64_t row_end) {
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const int64_t edge_end = rowptr[row_end];
  const int64_t packed = packed_columns<T>(p, edge_end - rowptr[row_begin]);
  const int64_t vectors = packed / kLanes<T>;
  Scratch<T> scratch;
  for_tiles<T>(p.dim, packed > 0 && vectors < kMaxVectors ? vectors : kMaxVectors, [&](Tile tile) {
    const T* x = static_cast<const T*>(p.x) + tile.column;
    int64_t stride = p.dim;
    if (packed > 0) {
      T* copy = scratch.of_size(p.csr.num_cols * packed);
      pack(p, tile, copy);
      x = copy;
      stride = tile.width;
    }
    const auto run = [&](auto v, auto n, auto u) {
      constexpr int V = decltype(v)::value, N = decltype(n)::value, U = decltype(u)::value;
      if (p.value == nullptr && p.col_scale == nullptr) {
        spmm_tile<T, Index, false, V, N, U>(p, x, stride, nullptr, row_begin, row_end, edge_end,
                                            tile);
        return;
      }
      const bool as_stored = p.value_acc || p.dtype == DType::f32 || p.dtype == DType::f64;
      if (as_stored && p.csr.perm == nullptr && p.col_scale == nullptr) {
        spmm_tile<T, Index, true, V, N, U>(p, x, stride, static_cast<const acc_t<T>*>(p.value),
                                           row_begin, row_end, edge_end, tile);
        return;
      }
      for_weighted_blocks<acc_t<T>>(
          rowptr, row_begin, row_end,
          [&](int64_t begin, int64_t end, acc_t<T>* weight) {
            spmm_weights<T, Index>(p, begin, end, weight);
          },
          [&](int64_t begin, int64_t end, const acc_t<T>* weight) {
            spmm_tile<T, Index, true, V, N, U>(p, x, stride, weight, begin, end, edge_end, tile);
          });
    };
    with_tile<T, kMaxVectors>(tile.width, [&](auto v, auto n) {
      constexpr int N = decltype(n)::value;
      if constexpr (decltype(v)::value == kLanes<T>) {
        if (is_wide<T>(p)) return run(v, n, Int<edges_in_flight(true, N)>{});
      }
      run(v, n, Int<edges_in_flight(false, N)>{});
    });
  });
}

// In spmm.isa.cpp.
void spmm(const Spmm& p, int64_t row_begin, int64_t row_end);

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
