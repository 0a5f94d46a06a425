// Maxima and minima over a row's edges, the edges that hold them, and the gradients.
#include "long_sums.h"
#include "params/spmm_max.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename T, typename Index, bool kWeighted, int V, int N>
void spmm_max_tile(const SpmmMax& p, const acc_t<T>* weight, int64_t row_begin, int64_t row_end,
                   Tile tile) {
  using Acc = acc_t<T>;
  using Position = mask_t<Acc>;  // of an edge in its row
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* x = static_cast<const T*>(p.x) + tile.column;
  const int64_t dim = p.dim;
  const int64_t last = tile.width - V;
  // A minimum is the maximum of the negated numbers.
  const auto sign = bit_cast<Position>(p.minimum ? -Acc{0} : Acc{0});
  const auto flip = [&](Vec<Acc, V> v) PYG_FAST_ALWAYS {
    return bit_cast<Vec<Acc, V>>(bit_cast<Vec<Position, V>>(v) ^ sign);
  };

  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], end = rowptr[row + 1];
    Vec<Acc, V> best[N] = {};
    Vec<Position, V> arg[N] = {};
    const auto term = [&](int64_t e, int j) PYG_FAST_ALWAYS {
      const T* from = x + static_cast<int64_t>(col[e]) * dim;
      const auto v = load<V>(from + offset<V, N>(j, last));
      if constexpr (kWeighted) {
        return flip(v * weight[e]);
      } else {
        return flip(v);
      }
    };
    if (begin < end) {
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) best[j] = term(begin, j);
    }
    for (int64_t e = begin + 1; e < end; ++e) {
      if (e + kPrefetchEdges < end) {
        prefetch_tile<T, V, N>(x + static_cast<int64_t>(col[e + kPrefetchEdges]) * dim);
      }
      const auto position = Vec<Position, V>{} + static_cast<Position>(e - begin);
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        const auto v = term(e, j);
        // Larger or NaN, unless the best is already NaN.
        const auto better = ~(v <= best[j]) & (best[j] == best[j]);
        best[j] = better ? v : best[j];
        arg[j] = better ? position : arg[j];
      }
    }
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) {
      const int64_t at = row * dim + tile.column + offset<V, N>(j, last);
      const auto from = begin < end ? begin : -1;
      store<V>(static_cast<T*>(p.out) + at, begin < end ? flip(best[j]) : best[j]);
      const auto edge = __builtin_convertvector(arg[j], Vec<Index, V>) + static_cast<Index>(from);
      __builtin_memcpy(static_cast<Index*>(p.arg) + at, &edge, sizeof(edge));
    }
  }
}

template <typename T, typename Index>
void spmm_max_rows(const SpmmMax& p, int64_t row_begin, int64_t row_end) {
  // A tile needs two registers per vector: the best and its position.
  constexpr int kVectors = kManyRegisters ? kMaxVectors : kMaxVectors / 2;
  for_tiles<T>(p.dim, kVectors, [&](Tile tile) {
    with_tile<T, kVectors>(tile.width, [&](auto v, auto n) {
      constexpr int V = decltype(v)::value, N = decltype(n)::value;
      if (p.value == nullptr) {
        spmm_max_tile<T, Index, false, V, N>(p, nullptr, row_begin, row_end, tile);
        return;
      }
      for_weighted_blocks<acc_t<T>>(
          static_cast<const Index*>(p.csr.rowptr), row_begin, row_end,
          [&](int64_t begin, int64_t end, acc_t<T>* weight) {
            gather_values(static_cast<const T*>(p.value), static_cast<const Index*>(p.csr.perm),
                          begin, end, weight);
          },
          [&](int64_t begin, int64_t end, const acc_t<T>* weight) {
            spmm_max_tile<T, Index, true, V, N>(p, weight, begin, end, tile);
          });
    });
  });
}

void spmm_max(const SpmmMax& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.dim == 0) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    spmm_max_rows<typename decltype(type)::type, typename decltype(index)::type>(p, row_begin,
                                                                                 row_end);
  });
}

// Sums in float64 of the sources that seem to have so many edges that they may get far more than kSumBlock
// terms.
class LongSources {
 public:
  template <typename Index>
  LongSources(const Csr& csr, Index) {
    if (csr.num_rows <= kSumBlock) return;
    const auto* col = static_cast<const Col*>(csr.col);
    const int64_t edges = static_cast<const Index*>(csr.rowptr)[csr.num_rows];
    constexpr int32_t kMost = 2 * kSumBlock / kCounted;
    int32_t* degree = degrees_.of_size(csr.num_cols);
    __builtin_memset(degree, 0, static_cast<size_t>(csr.num_cols) * sizeof(int32_t));
    bool is_any = false;
    for (int64_t group = 0; group + kCounted <= edges; group += kCounted) {
      is_any |= ++degree[col[counted_edge(group)]] > kMost;
    }
    if (!is_any) return;
    for (int64_t j = 0; j < csr.num_cols; ++j) {
      degree[j] = degree[j] > kMost ? static_cast<int32_t>(count_++) : -1;
    }
    place_ = degree;
  }

  // For `width` numbers of each.
  void start(int64_t width) {
    width_ = width;
    if (count_ == 0) return;
    sums_ = numbers_.of_size(count_ * width);
    __builtin_memset(sums_, 0, static_cast<size_t>(count_ * width) * sizeof(double));
  }

  // The sums of a source, or nullptr.
  PYG_FAST_INLINE double* of(int64_t source) const {
    return place_ == nullptr || place_[source] < 0 ? nullptr : sums_ + place_[source] * width_;
  }
  bool has_any() const { return count_ > 0; }

 private:
  Scratch<int32_t> degrees_;
  Scratch<double> numbers_;
  int64_t count_ = 0, width_ = 0;
  const int32_t* place_ = nullptr;
  double* sums_ = nullptr;
};

// sum[col[arg[i, f]] * stride + f] += value * grad[i, f] for the columns [begin, end)
template <typename T, typename Index, typename Acc>
void spmm_max_scatter(const SpmmMaxBackwardX& p, int64_t begin, int64_t end, LongSources& longs,
                      Acc* sum, int64_t stride) {
  longs.start(end - begin);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const auto* value = static_cast<const T*>(p.value);
  for (int64_t row = 0; row < p.csr.num_rows; ++row) {
    const auto* arg = static_cast<const Index*>(p.arg) + row * p.dim;
    const auto* grad = static_cast<const T*>(p.grad) + row * p.dim;
    for (int64_t f = begin; f < end; ++f) {
      const int64_t e = arg[f];
      if (e < 0) continue;
      Acc term = load_one(grad + f);
      if (value != nullptr) term *= load_one(value + (perm != nullptr ? int64_t{perm[e]} : e));
      const int64_t source = col[e];
      double* const of_long = longs.of(source);
      if (of_long != nullptr) {
        of_long[f - begin] += term;
      } else {
        sum[source * stride + f] += term;
      }
    }
  }
  for (int64_t j = 0; longs.has_any() && j < p.csr.num_cols; ++j) {
    const double* of_long = longs.of(j);
    for (int64_t f = begin; of_long != nullptr && f < end; ++f) {
      sum[j * stride + f] = static_cast<Acc>(of_long[f - begin]);
    }
  }
}

template <typename T, typename Index>
void spmm_max_backward_x_columns(const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end) {
  using Acc = acc_t<T>;
  auto* grad_x = static_cast<T*>(p.grad_x);
  LongSources longs(p.csr, Index{});
  if constexpr (sizeof(T) == sizeof(Acc)) {
    const auto bytes = static_cast<size_t>(dim_end - dim_begin) * sizeof(T);
    for (int64_t c = 0; c < p.csr.num_cols; ++c) {
      __builtin_memset(grad_x + c * p.dim + dim_begin, 0, bytes);
    }
    spmm_max_scatter<T, Index>(p, dim_begin, dim_end, longs, grad_x, p.dim);
  } else {  // half precision: sums of a block of columns in float, rounded once
    constexpr int64_t kBlock = kCacheLine / sizeof(Acc);
    Scratch<Acc> scratch;
    Acc* sum = scratch.of_size(p.csr.num_cols * kBlock);
    for (int64_t begin = dim_begin; begin < dim_end; begin += kBlock) {
      const int64_t end = begin + kBlock < dim_end ? begin + kBlock : dim_end;
      __builtin_memset(sum, 0, static_cast<size_t>(p.csr.num_cols * kBlock) * sizeof(Acc));
      spmm_max_scatter<T, Index>(p, begin, end, longs, sum - begin, kBlock);
      for (int64_t c = 0; c < p.csr.num_cols; ++c) {
        for (int64_t f = begin; f < end; ++f) {
          store_one(grad_x + c * p.dim + f, sum[c * kBlock + f - begin]);
        }
      }
    }
  }
}

void spmm_max_backward_x(const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end) {
  if (dim_begin >= dim_end || p.csr.num_cols == 0) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    spmm_max_backward_x_columns<typename decltype(type)::type, typename decltype(index)::type>(
        p, dim_begin, dim_end);
  });
}

template <typename T, typename Index>
void spmm_max_backward_value_rows(const SpmmMaxBackwardValue& p, int64_t row_begin,
                                  int64_t row_end) {
  using Acc = acc_t<T>;
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const auto* x = static_cast<const T*>(p.x);
  auto* grad_value = static_cast<T*>(p.grad_value);
  Scratch<Acc> scratch;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], count = rowptr[row + 1] - begin;
    const auto* arg = static_cast<const Index*>(p.arg) + row * p.dim;
    const auto* grad = static_cast<const T*>(p.grad) + row * p.dim;
    Acc* sum = scratch.of_size(count);
    for (int64_t k = 0; k < count; ++k) sum[k] = 0;
    for (int64_t f = 0; count > 0 && f < p.dim; ++f) {
      const int64_t e = arg[f];
      sum[e - begin] += load_one(grad + f) * load_one(x + static_cast<int64_t>(col[e]) * p.dim + f);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t e = begin + k;
      store_one(grad_value + (perm != nullptr ? int64_t{perm[e]} : e), sum[k]);
    }
  }
}

void spmm_max_backward_value(const SpmmMaxBackwardValue& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    spmm_max_backward_value_rows<typename decltype(type)::type, typename decltype(index)::type>(
        p, row_begin, row_end);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(spmm_max, (const SpmmMax& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(spmm_max_backward_x,
                (const SpmmMaxBackwardX& p, int64_t dim_begin, int64_t dim_end),
                (p, dim_begin, dim_end))
PYG_FAST_KERNEL(spmm_max_backward_value,
                (const SpmmMaxBackwardValue& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
