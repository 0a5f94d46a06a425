// CBSR to dense rows and back, and aggregation of CBSR features.
#include "cbsr.h"
#include "long_sums.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Calls f(T, C) with integer types of the element sizes: the elements are only moved.
template <typename F>
PYG_FAST_INLINE void with_bits(const CbsrDense& p, const F& f) {
  with_columns(p.column_type, [&](auto column) {
    switch (p.dtype) {
      case DType::f64: return f(uint64_t{}, column);
      case DType::f32: return f(uint32_t{}, column);
      default: return f(uint16_t{}, column);
    }
  });
}

void cbsr_to_dense(const CbsrDense& p, int64_t row_begin, int64_t row_end) {
  with_bits(p, [&](auto bits, auto column) {
    using T = decltype(bits);
    using C = typename decltype(column)::type;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* in = static_cast<const T*>(p.in) + row * p.k;
      const C* columns = static_cast<const C*>(p.columns) + row * p.k;
      T* out = static_cast<T*>(p.out) + row * p.dim;
      __builtin_memset(out, 0, static_cast<size_t>(p.dim) * sizeof(T));
      for (int64_t c = 0; c < p.k; ++c) out[columns[c]] = in[c];
    }
  });
}

void cbsr_sample(const CbsrDense& p, int64_t row_begin, int64_t row_end) {
  with_bits(p, [&](auto bits, auto column) {
    using T = decltype(bits);
    using C = typename decltype(column)::type;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* in = static_cast<const T*>(p.in) + row * p.dim;
      const C* columns = static_cast<const C*>(p.columns) + row * p.k;
      T* out = static_cast<T*>(p.out) + row * p.k;
      for (int64_t c = 0; c < p.k; ++c) out[c] = in[columns[c]];
    }
  });
}

// sum[columns[c]] += weight * values[c] for N entries. A constant N gives straight-line code, a third
// faster than a loop.
template <int N, typename T, typename C>
PYG_FAST_INLINE void scatter(const T* values, const C* columns, acc_t<T> weight, acc_t<T>* sum) {
  constexpr int V = N < kLanes<T> ? N : kLanes<T>;
  acc_t<T> product[N];
  PYG_FAST_UNROLL
  for (int c = 0; c < N; c += V) store<V>(product + c, load<V>(values + c) * weight);
  PYG_FAST_UNROLL
  for (int c = 0; c < N; ++c) sum[columns[c]] += product[c];
}

template <typename T, typename C>
void add_entries(const CbsrSpmm& p, const Block<acc_t<T>>& block) {
  using Acc = acc_t<T>;
  constexpr int V = kLanes<T>;
  const int64_t k = p.k;
  const auto* all_values = static_cast<const T*>(p.values);
  const auto* all_columns = static_cast<const C*>(p.columns);
  Scratch<Acc> scratch;
  Acc* sum = scratch.of_size(2 * p.dim);
  LongSums<Acc> sums(sum, p.dim);
  const auto add = [&](int64_t source, Acc weight) PYG_FAST_ALWAYS {
    const T* values = all_values + source * k;
    const C* columns = all_columns + source * k;
    int64_t c = 0;
    for (; c + 16 <= k; c += 16) scatter<16>(values + c, columns + c, weight, sum);
    for (; c + 4 <= k; c += 4) scatter<4>(values + c, columns + c, weight, sum);
    for (; c < k; ++c) scatter<1>(values + c, columns + c, weight, sum);
  };
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t* first = block.first + (row - block.row_begin);
    sums.start();
    for (int64_t e = first[0]; e < first[1]; ++e) {
      if ((e - first[0]) % kSumBlock == 0) sums.next();
      prefetch_entries(all_values + block.source[e + kAhead] * k, k);
      prefetch_entries(all_columns + block.source[e + kAhead] * k, k);
      add(block.source[e], block.weight[e]);
    }
    sums.end();
    if (p.diag != nullptr) add(row, static_cast<const Acc*>(p.diag)[row]);
    for_chunks<V>(0, p.dim, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
      constexpr int W = decltype(v)::value;
      auto total = load<W>(sum + f);
      if (p.out_acc) {
        if (p.bias) total += load<W>(static_cast<const Acc*>(p.bias) + f);
        store<W>(static_cast<Acc*>(p.out) + row * p.dim + f, total);
      } else {
        if (p.bias) total += load<W>(static_cast<const T*>(p.bias) + f);
        store<W>(static_cast<T*>(p.out) + row * p.dim + f, total);
      }
    });
  }
}

void cbsr_spmm(const CbsrSpmm& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    void (*add)(const CbsrSpmm&, const Block<Acc>&) = nullptr;
    with_columns(p.column_type,
                 [&](auto column) { add = add_entries<T, typename decltype(column)::type>; });
    for_blocks<Acc, Index>(
        p.csr, row_begin, row_end, 0, p.csr.num_cols,
        [&](int64_t row) { return scale_of_row<Acc, Index>(p, row); },
        [&](int64_t edge, int64_t source) {
          return value_of<T, Index>(p, edge) * scale_of<Acc>(p.col_scale, source);
        },
        [&](const Block<Acc>& block) { add(p, block); });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(cbsr_to_dense, (const CbsrDense& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(cbsr_sample, (const CbsrDense& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(cbsr_spmm, (const CbsrSpmm& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
