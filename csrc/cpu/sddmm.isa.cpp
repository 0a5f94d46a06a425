// One dot product per edge: widens the row of `a` once, then processes several edges at a time.
#include "params/sddmm.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename T, typename Index, int V>
void sddmm_rows(const Sddmm& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  constexpr int U = 4;  // edges at a time
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const auto* row_scale = static_cast<const Acc*>(p.row_scale);
  const auto* col_scale = static_cast<const Acc*>(p.col_scale);
  const auto* b = static_cast<const T*>(p.b);
  auto* out = static_cast<T*>(p.out);
  const int64_t dim = p.dim;
  const int64_t last = dim - V;            // the last vector ends at dim: its first lanes overlap
  const int64_t full = (dim - 1) / V * V;  // columns of the vectors before it
  Vec<mask_t<Acc>, V> fresh;               // its lanes that no earlier vector covers
  for (int k = 0; k < V; ++k) fresh[k] = last + k >= full ? -1 : 0;
  const auto masked = [&](Vec<Acc, V> v) PYG_FAST_ALWAYS {
    return bit_cast<Vec<Acc, V>>(bit_cast<Vec<mask_t<Acc>, V>>(v) & fresh);
  };
  Scratch<Acc> scratch;
  Acc* a = scratch.of_size(full + V);

  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], end = rowptr[row + 1];
    if (begin == end) continue;
    const T* a_row = static_cast<const T*>(p.a) + row * dim;
    for (int64_t f = 0; f < full; f += V) store<V>(a + f, load<V>(a_row + f));
    store<V>(a + full, masked(load<V>(a_row + last)));
    Acc scale = row_scale != nullptr ? row_scale[row] : Acc{1};
    if (p.mean) scale /= static_cast<Acc>(end - begin);

    const auto dots = [&](auto edges, int64_t e) PYG_FAST_ALWAYS {
      constexpr int K = decltype(edges)::value;
      const T* from[K];
      Vec<Acc, V> sum[K] = {};
      PYG_FAST_UNROLL
      for (int k = 0; k < K; ++k) from[k] = b + static_cast<int64_t>(col[e + k]) * dim;
      for (int64_t f = 0; f < full; f += V) {
        const auto v = load<V>(a + f);
        PYG_FAST_UNROLL
        for (int k = 0; k < K; ++k) sum[k] += v * load<V>(from[k] + f);
      }
      const auto v = load<V>(a + full);
      PYG_FAST_UNROLL
      for (int k = 0; k < K; ++k) sum[k] += v * masked(load<V>(from[k] + last));
      PYG_FAST_UNROLL
      for (int k = 0; k < K; ++k) {
        Acc dot = sum_of<Acc, V>(sum[k]) * scale;
        if (col_scale != nullptr) dot *= col_scale[col[e + k]];
        store_one(out + (perm != nullptr ? int64_t{perm[e + k]} : e + k), dot);
      }
    };
    int64_t e = begin;
    for (; e + U <= end; e += U) dots(Int<U>{}, e);
    for (; e < end; ++e) dots(Int<1>{}, e);
  }
}

template <typename T, typename Index, int V>
void sddmm_of_width(const Sddmm& p, int64_t row_begin, int64_t row_end) {
  if constexpr (V > 1) {
    if (p.dim < V) return sddmm_of_width<T, Index, V / 2>(p, row_begin, row_end);
  }
  sddmm_rows<T, Index, V>(p, row_begin, row_end);
}

// Without columns every dot product is 0.
template <typename T, typename Index>
void sddmm_of_nothing(const Sddmm& p, int64_t row_begin, int64_t row_end) {
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  for (int64_t e = rowptr[row_begin]; e < rowptr[row_end]; ++e) {
    store_one(static_cast<T*>(p.out) + (perm != nullptr ? int64_t{perm[e]} : e), acc_t<T>{0});
  }
}

void sddmm(const Sddmm& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end) return;
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    if (p.dim == 0) {
      sddmm_of_nothing<T, Index>(p, row_begin, row_end);
    } else {
      sddmm_of_width<T, Index, kLanes<T>>(p, row_begin, row_end);
    }
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(sddmm, (const Sddmm& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
