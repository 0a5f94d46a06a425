// The gradients of aggregated CBSR features.
#include "cbsr.h"
#include "long_sums.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// A dense row that is read at given columns: calls f(Int<V>, Vec<Acc, V>, c) for entries [c, c + V), V =
// kLanes, smaller at the end. This class reads the row from the cache.
template <typename T, typename C>
class RowInCache {
 public:
  using Acc = acc_t<T>;
  static constexpr int kLanes = kVectorBytes / sizeof(Acc) < 4 ? 2 : 4;

  explicit RowInCache(int64_t dim) : dim_(dim) {}

  PYG_FAST_INLINE void set(const T* row) {
    if constexpr (sizeof(T) == sizeof(Acc)) {
      row_ = row;
    } else {
      Acc* widened = scratch_.of_size(dim_);
      for_chunks<kVectorBytes / sizeof(Acc)>(0, dim_, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
        constexpr int V = decltype(v)::value;
        store<V>(widened + f, load<V>(row + f));
      });
      row_ = widened;
    }
  }

  template <typename F>
  PYG_FAST_INLINE void each(const C* columns, int64_t k, const F& f) const {
    const auto at = [&](int64_t c) PYG_FAST_ALWAYS { return row_[columns[c]]; };
    int64_t c = 0;
    for (; c + kLanes <= k; c += kLanes) {
      if constexpr (kLanes == 4) {
        f(Int<4>{}, Vec<Acc, 4>{at(c), at(c + 1), at(c + 2), at(c + 3)}, c);
      } else {
        f(Int<2>{}, Vec<Acc, 2>{at(c), at(c + 1)}, c);
      }
    }
    for (; c < k; ++c) f(Int<1>{}, Vec<Acc, 1>{at(c)}, c);
  }

 private:
  const int64_t dim_;
  const Acc* row_ = nullptr;
  Scratch<Acc> scratch_;
};

#if defined(__AVX512F__)
// Reads the row from registers: the upper and the lower halves of 64 columns per page are tables of
// 16-bit words. One lookup takes 32 entries. Gathers from the cache take three times as long.
template <typename T, int kPages>
class RowInRegisters {
 public:
  static constexpr int kLanes = 16;

  explicit RowInRegisters(int64_t dim) : dim_(dim) {
    for (int64_t f = 0; f < 64 * kPages; ++f) row_[f] = 0;
  }

  PYG_FAST_INLINE void set(const T* row) {
    const void* from = row;
    if (sizeof(T) != sizeof(float) || dim_ != 64 * kPages) {
      for_chunks<16>(0, dim_, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
        constexpr int V = decltype(v)::value;
        store<V>(row_ + f, load<V>(row + f));
      });
      from = row_;
    }
    Vec<uint16_t, 32> even;
    for (int i = 0; i < 32; ++i) even[i] = static_cast<uint16_t>(2 * i);
    const auto low = bit_cast<__m512i>(even), high = bit_cast<__m512i>(even + 1);
    PYG_FAST_UNROLL
    for (int i = 0; i < 2 * kPages; ++i) {
      const auto* words = static_cast<const __m512i*>(from) + 2 * i;
      const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 1);
      low_[i] = _mm512_permutex2var_epi16(a, low, b);
      high_[i] = _mm512_permutex2var_epi16(a, high, b);
    }
  }

  template <typename F>
  PYG_FAST_INLINE void each(const uint8_t* columns, int64_t k, const F& f) const {
    int64_t c = 0;
    Vec<float, 16> entries[2];
    for (; c + 32 <= k; c += 32) {
      look_up(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + c)), entries);
      f(Int<16>{}, entries[0], c);
      f(Int<16>{}, entries[1], c + 16);
    }
    if (c < k) {
      const __mmask32 rest = (uint32_t{1} << (k - c)) - 1;
      look_up(_mm256_maskz_loadu_epi8(rest, columns + c), entries);
      float buffer[32];
      __builtin_memcpy(buffer, entries, sizeof(buffer));
      for_chunks<16>(c, k, [&](auto v, int64_t at) PYG_FAST_ALWAYS {
        f(v, load<decltype(v)::value>(buffer + (at - c)), at);
      });
    }
  }

 private:
  static PYG_FAST_INLINE __m512i in_table(const __m512i* table, __m512i at) {
    const auto page = [&](int i) PYG_FAST_ALWAYS {
      return _mm512_permutex2var_epi16(table[2 * i], at, table[2 * i + 1]);
    };
    if constexpr (kPages == 1) return page(0);
    const __mmask32 odd = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
    const __m512i front = _mm512_mask_blend_epi16(odd, page(0), page(1));
    if constexpr (kPages == 2) return front;
    const __m512i back = _mm512_mask_blend_epi16(odd, page(2), page(3));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(at, _mm512_set1_epi16(128)), front, back);
  }

  PYG_FAST_INLINE void look_up(__m256i columns, Vec<float, 16>* entries) const {
    // Permutes the columns: the lane-wise unpack below then restores their order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i at = _mm512_maskz_permutexvar_epi64(
        0xff, order, _mm512_maskz_cvtepu8_epi16(~__mmask32{0}, columns));
    const __m512i low = in_table(low_, at), high = in_table(high_, at);
    entries[0] = bit_cast<Vec<float, 16>>(_mm512_unpacklo_epi16(low, high));
    entries[1] = bit_cast<Vec<float, 16>>(_mm512_unpackhi_epi16(low, high));
  }

  const int64_t dim_;
  alignas(kCacheLine) float row_[64 * kPages];
  __m512i low_[2 * kPages], high_[2 * kPages];
};
#endif

// Calls f(Type<C>, Type<Row>) with the class that reads a dense row at given columns.
template <typename T, typename P, typename F>
PYG_FAST_INLINE void with_row(const P& p, const F& f) {
  with_columns(p.column_type, [&](auto column) {
    using C = typename decltype(column)::type;
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 1 && sizeof(acc_t<T>) == 4) {
      if (p.dim <= 64) return f(column, Type<RowInRegisters<T, 1>>{});
      if (p.dim <= 128) return f(column, Type<RowInRegisters<T, 2>>{});
      return f(column, Type<RowInRegisters<T, 4>>{});
    } else
#endif
    {
      f(column, Type<RowInCache<T, C>>{});
    }
  });
}

// sums[j, c] += weight * grad[i, columns[j, c]]
template <typename T, typename C, typename Row>
void add_samples(const CbsrBackward& p, const Block<acc_t<T>>& block,
                 ScatteredSums<acc_t<T>>& scattered, acc_t<T>* sums) {
  using Acc = acc_t<T>;
  const int64_t k = p.k;
  const auto* columns = static_cast<const C*>(p.columns);
  Row grad(p.dim);
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t* first = block.first + (row - block.row_begin);
    if (first[0] == first[1]) continue;
    grad.set(static_cast<const T*>(p.grad) + row * p.dim);
    for (int64_t e = first[0]; e < first[1]; ++e) {
      prefetch_entries(sums + block.source[e + kAhead] * k, k);
      prefetch_entries(columns + block.source[e + kAhead] * k, k);
      if (scattered.count(block.source[e])) scattered.carry(block.source[e]);
      Acc* sum = sums + block.source[e] * k;
      const Acc weight = block.weight[e];
      grad.each(columns + block.source[e] * k, k,
                [&](auto v, auto entries, int64_t c) PYG_FAST_ALWAYS {
                  constexpr int V = decltype(v)::value;
                  store<V>(sum + c, load<V>(sum + c) + entries * weight);
                });
    }
  }
}

// Converts the sums over a source's edges to its gradient.
template <typename T, typename C>
PYG_FAST_INLINE void finish_source(const CbsrBackward& p, const void* scales, int64_t source,
                                   acc_t<T>* sum) {
  using Acc = acc_t<T>;
  const C* columns = static_cast<const C*>(p.columns) + source * p.k;
  const Acc scale = scale_of<Acc>(scales, source);
  const Acc diag = p.diag != nullptr ? static_cast<const Acc*>(p.diag)[source] : Acc{0};
  const T* grad = static_cast<const T*>(p.grad) + source * p.dim;
  T* out = static_cast<T*>(p.grad_values) + source * p.k;
  for (int64_t c = 0; c < p.k; ++c) sum[c] *= scale;
  if (p.diag != nullptr) {
    for (int64_t c = 0; c < p.k; ++c) sum[c] += diag * load_one(grad + columns[c]);
  }
  for_chunks<kLanes<T>>(0, p.k, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int V = decltype(v)::value;
    store<V>(out + c, load<V>(sum + c));
  });
}

void cbsr_spmm_backward(const CbsrBackward& p, int64_t source_begin, int64_t source_end) {
  if (source_begin >= source_end) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    // If the result has the type of the sums, accumulate in place.
    Scratch<Acc> scratch;
    Acc* sums = nullptr;
    const int64_t offset = source_begin * p.k, size = source_end * p.k - offset;
    if constexpr (sizeof(T) == sizeof(Acc)) {
      sums = static_cast<Acc*>(p.grad_values);
    } else {
      sums = scratch.of_size(size) - offset;
    }
    __builtin_memset(sums + offset, 0, static_cast<size_t>(size) * sizeof(Acc));
    ScatteredSums<Acc> scattered(sums + offset, source_begin, source_end - source_begin, p.k);
    void (*add)(const CbsrBackward&, const Block<Acc>&, ScatteredSums<Acc>&, Acc*) = nullptr;
    void (*finish)(const CbsrBackward&, const void*, int64_t, Acc*) = nullptr;
    with_row<T>(p, [&](auto column, auto row) {
      using C = typename decltype(column)::type;
      add = add_samples<T, C, typename decltype(row)::type>;
      finish = finish_source<T, C>;
    });
    for_blocks<Acc, Index>(
        p.csr, 0, p.csr.num_rows, source_begin, source_end,
        [&](int64_t row) { return scale_of_row<Acc, Index>(p, row); },
        [&](int64_t edge, int64_t) { return value_of<T, Index>(p, edge); },
        [&](const Block<Acc>& block) { add(p, block, scattered, sums); });
    scattered.finish();
    for (int64_t j = source_begin; j < source_end; ++j) finish(p, p.col_scale, j, sums + j * p.k);
  });
}

// Here the rows are the sources: each edge reads another dense row.
template <typename T, typename C>
void gather_samples(const CbsrBackward& p, const Block<acc_t<T>>& block) {
  using Acc = acc_t<T>;
  const auto* grad = static_cast<const T*>(p.grad);
  Scratch<Acc> scratch;
  Acc* __restrict sum = scratch.of_size(2 * p.k);
  LongSums<Acc> sums(sum, p.k);
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t* first = block.first + (row - block.row_begin);
    const C* columns = static_cast<const C*>(p.columns) + row * p.k;
    sums.start();
    for (int64_t e = first[0]; e < first[1]; ++e) {
      if ((e - first[0]) % kSumBlock == 0) sums.next();
      const T* from = grad + block.source[e] * p.dim;
      const Acc weight = block.weight[e];
      for (int64_t c = 0; c < p.k; ++c) sum[c] += weight * load_one(from + columns[c]);
    }
    sums.end();
    finish_source<T, C>(p, p.row_scale, row, sum);
  }
}

void cbsr_spmm_backward_ordered(const CbsrBackward& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    void (*gather)(const CbsrBackward&, const Block<Acc>&) = nullptr;
    with_columns(p.column_type,
                 [&](auto column) { gather = gather_samples<T, typename decltype(column)::type>; });
    for_blocks<Acc, Index>(
        p.csr, row_begin, row_end, 0, p.csr.num_cols, [](int64_t) { return Acc{1}; },
        [&](int64_t edge, int64_t source) {
          return value_of<T, Index>(p, edge) * scale_of<Acc>(p.col_scale, source);
        },
        [&](const Block<Acc>& block) { gather(p, block); });
  });
}

// dots[e] = weight * sum_c values[j, c] * grad[i, columns[j, c]]
template <typename T, typename C, typename Row>
void dots_with_samples(const CbsrSddmm& p, const Block<acc_t<T>>& block, acc_t<T>* dots) {
  using Acc = acc_t<T>;
  const int64_t k = p.k;
  const auto* all_values = static_cast<const T*>(p.values);
  const auto* columns = static_cast<const C*>(p.columns);
  Row grad(p.dim);
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t* first = block.first + (row - block.row_begin);
    if (first[0] == first[1]) continue;
    grad.set(static_cast<const T*>(p.grad) + row * p.dim);
    for (int64_t e = first[0]; e < first[1]; ++e) {
      prefetch_entries(all_values + block.source[e + kAhead] * k, k);
      prefetch_entries(columns + block.source[e + kAhead] * k, k);
      const T* values = all_values + block.source[e] * k;
      Vec<Acc, Row::kLanes> sum = {};
      Acc rest = 0;
      grad.each(columns + block.source[e] * k, k,
                [&](auto v, auto entries, int64_t c) PYG_FAST_ALWAYS {
                  constexpr int V = decltype(v)::value;
                  if constexpr (V == Row::kLanes) {
                    sum += load<V>(values + c) * entries;
                  } else {
                    rest += sum_of<Acc, V>(load<V>(values + c) * entries);
                  }
                });
      dots[e] = block.weight[e] * (sum_of<Acc, Row::kLanes>(sum) + rest);
    }
  }
}

void cbsr_sddmm(const CbsrSddmm& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    void (*dots_of)(const CbsrSddmm&, const Block<Acc>&, Acc*) = nullptr;
    with_row<T>(p, [&](auto column, auto row) {
      dots_of = dots_with_samples<T, typename decltype(column)::type, typename decltype(row)::type>;
    });
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    Scratch<Acc> scratch;
    for_blocks<Acc, Index>(
        p.csr, row_begin, row_end, 0, p.csr.num_cols,
        [&](int64_t row) { return scale_of_row<Acc, Index>(p, row); },
        [&](int64_t, int64_t source) { return scale_of<Acc>(p.col_scale, source); },
        [&](const Block<Acc>& block) {
          const int64_t count = block.first[block.row_end - block.row_begin];
          Acc* dots = scratch.of_size(count);
          dots_of(p, block, dots);
          for (int64_t i = 0; i < count; ++i) {
            const int64_t edge = block.edge[i];
            store_one(static_cast<T*>(p.out) + (perm != nullptr ? int64_t{perm[edge]} : edge),
                      dots[i]);
          }
        });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(cbsr_spmm_backward,
                (const CbsrBackward& p, int64_t source_begin, int64_t source_end),
                (p, source_begin, source_end))
PYG_FAST_KERNEL(cbsr_spmm_backward_ordered,
                (const CbsrBackward& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(cbsr_sddmm, (const CbsrSddmm& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
