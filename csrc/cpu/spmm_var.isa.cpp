// Variances over a row's edges, of the differences from its first message.
#include "long_sums.h"
#include "params/spmm_var.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// U edges in flight, each with its own sums, hide the latency of additions.
template <typename T, typename Index, int V, int N, int U>
void spmm_var_tile(const SpmmVar& p, int64_t row_begin, int64_t row_end, Tile tile) {
  using Acc = acc_t<T>;
  constexpr int64_t kLong = U * kSumBlock;
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* x = static_cast<const T*>(p.x) + tile.column;
  const int64_t dim = p.dim, last = tile.width - V;
  Acc sums[2 * N * V], total[2 * N * V];

  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], end = rowptr[row + 1];
    Vec<Acc, V> first[N] = {}, sum[U][N] = {}, square[U][N] = {};
    const auto message = [&](int64_t e, int j) PYG_FAST_ALWAYS {
      return load<V>(x + static_cast<int64_t>(col[e]) * dim + offset<V, N>(j, last));
    };
    const auto add = [&](int u, int64_t e) PYG_FAST_ALWAYS {
      if (e + kPrefetchEdges < end) {
        prefetch_tile<T, V, N>(x + static_cast<int64_t>(col[e + kPrefetchEdges]) * dim);
      }
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        const auto d = message(e, j) - first[j];
        sum[u][j] += d;
        square[u][j] += d * d;
      }
    };
    // The sums of all edges in flight go to those of the first.
    const auto join = [&]() PYG_FAST_ALWAYS {
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        PYG_FAST_UNROLL
        for (int u = U / 2; u > 0; u /= 2) {
          PYG_FAST_UNROLL
          for (int k = 0; k < u; ++k) {
            sum[k][j] += sum[k + u][j];
            square[k][j] += square[k + u][j];
            sum[k + u][j] = square[k + u][j] = Vec<Acc, V>{};
          }
        }
      }
    };
    // Those of the first edge, in memory.
    const auto in_memory = [&](const auto& fn) PYG_FAST_ALWAYS {
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        store<V>(sums + j * V, sum[0][j]);
        store<V>(sums + (N + j) * V, square[0][j]);
      }
      fn();
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        sum[0][j] = load<V>(sums + j * V);
        square[0][j] = load<V>(sums + (N + j) * V);
      }
    };
    if (begin < end) {
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) first[j] = message(begin, j);
    }
    int64_t e = begin;
    for (;;) {
      const int64_t stop = end - e > kLong ? e + kLong : end;
      for (; e + U <= stop; e += U) {
        PYG_FAST_UNROLL
        for (int u = 0; u < U; ++u) add(u, e + u);
      }
      if (stop == end) break;
      join();
      in_memory([&] {
        if (e == begin + kLong) __builtin_memset(total, 0, sizeof(total));
        carry(sums, total, 2 * N * V);
      });
    }
    for (; e < end; ++e) add(0, e);
    join();
    if (end - begin > kLong) in_memory([&] { add_total(sums, total, 2 * N * V); });
    const Acc count = begin < end ? static_cast<Acc>(end - begin) : Acc{1};
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) {
      const int64_t at = row * dim + tile.column + offset<V, N>(j, last);
      const auto away = sum[0][j] / count;
      const auto var = square[0][j] / count - away * away;
      store<V>(static_cast<Acc*>(p.var) + at, var < 0 ? Vec<Acc, V>{} : var);
      store<V>(static_cast<Acc*>(p.mean) + at, first[j] + away);
    }
  }
}

void spmm_var(const SpmmVar& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.dim == 0) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    // A tile needs three registers per vector.
    constexpr int kVectors = kManyRegisters ? kMaxVectors : kMaxVectors / 2;
    for_tiles<T>(p.dim, kVectors, [&](Tile tile) {
      with_tile<T, kVectors>(tile.width, [&](auto v, auto n) {
        constexpr int V = decltype(v)::value, N = decltype(n)::value,
                      U = N == 1   ? 4
                          : N == 2 ? 2
                                   : 1;
        spmm_var_tile<T, Index, V, N, U>(p, row_begin, row_end, tile);
      });
    });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(spmm_var, (const SpmmVar& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
