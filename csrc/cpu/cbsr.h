// Aggregation of CBSR features, and its gradients.
#pragma once
#include <vector>

#include "maxk.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

static void cbsr_to_dense(const CbsrDense& p, int64_t row_begin, int64_t row_end) {
  with_dtype(p.dtype, [&](auto type) {
    with_columns(p.column_type, [&](auto column) {
      using T = typename decltype(type)::type;
      using C = typename decltype(column)::type;
      for (int64_t row = row_begin; row < row_end; ++row) {
        T* out = static_cast<T*>(p.out) + row * p.dim;
        for (int64_t f = 0; f < p.dim; ++f) out[f] = T{};
        for (int64_t at = row * p.k; at < (row + 1) * p.k; ++at)
          out[static_cast<const C*>(p.columns)[at]] = static_cast<const T*>(p.in)[at];
      }
    });
  });
}

static void cbsr_sample(const CbsrDense& p, int64_t row_begin, int64_t row_end) {
  with_dtype(p.dtype, [&](auto type) {
    with_columns(p.column_type, [&](auto column) {
      using T = typename decltype(type)::type;
      using C = typename decltype(column)::type;
      for (int64_t row = row_begin; row < row_end; ++row) {
        const T* in = static_cast<const T*>(p.in) + row * p.dim;
        for (int64_t at = row * p.k; at < (row + 1) * p.k; ++at)
          static_cast<T*>(p.out)[at] = in[static_cast<const C*>(p.columns)[at]];
      }
    });
  });
}

template <typename T, typename Index>
PYG_FAST_INLINE acc_t<T> edge_value(const void* value, bool value_acc, const Index* perm,
                                    int64_t e) {
  using Acc = acc_t<T>;
  if (value == nullptr) return Acc{1};
  const int64_t at = perm != nullptr ? int64_t{perm[e]} : e;
  return value_acc ? static_cast<const Acc*>(value)[at] : load_one(static_cast<const T*>(value) + at);
}

// f(Type<T>, Type<Index>, Type<C>)
template <typename P, typename F>
PYG_FAST_INLINE void with_cbsr_types(const P& p, const F& f) {
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    with_columns(p.column_type, [&](auto column) { f(type, index, column); });
  });
}

static void cbsr_spmm(const CbsrSpmm& p, int64_t row_begin, int64_t row_end) {
  with_cbsr_types(p, [&](auto type, auto index, auto column) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using C = typename decltype(column)::type;
    using Acc = acc_t<T>;
    const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
    const auto* col = static_cast<const Index*>(p.csr.col);
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    const auto* values = static_cast<const T*>(p.values);
    const auto* columns = static_cast<const C*>(p.columns);
    std::vector<Acc> sum(p.dim);
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (auto& s : sum) s = 0;
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const int64_t j = col[e];
        Acc weight = edge_value<T>(p.value, p.value_acc, perm, e);
        if (p.col_scale) weight *= static_cast<const Acc*>(p.col_scale)[j];
        for (int64_t c = 0; c < p.k; ++c)
          sum[columns[j * p.k + c]] += weight * load_one(values + j * p.k + c);
      }
      Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc{1};
      const int64_t degree = rowptr[row + 1] - rowptr[row];
      if (p.mean && degree > 1) scale /= static_cast<Acc>(degree);
      for (auto& s : sum) s *= scale;
      if (p.diag) {
        const Acc d = static_cast<const Acc*>(p.diag)[row];
        for (int64_t c = 0; c < p.k; ++c)
          sum[columns[row * p.k + c]] += d * load_one(values + row * p.k + c);
      }
      for (int64_t f = 0; f < p.dim; ++f) {
        if (p.out_acc) {
          static_cast<Acc*>(p.out)[row * p.dim + f] =
              sum[f] + (p.bias ? static_cast<const Acc*>(p.bias)[f] : Acc{0});
        } else {
          const Acc bias = p.bias ? load_one(static_cast<const T*>(p.bias) + f) : Acc{0};
          store_one(static_cast<T*>(p.out) + row * p.dim + f, sum[f] + bias);
        }
      }
    }
  });
}

static void cbsr_spmm_backward(const CbsrBackward& p, int64_t source_begin, int64_t source_end) {
  with_cbsr_types(p, [&](auto type, auto index, auto column) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using C = typename decltype(column)::type;
    using Acc = acc_t<T>;
    const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
    const auto* col = static_cast<const Index*>(p.csr.col);
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    const auto* columns = static_cast<const C*>(p.columns);
    const auto* grad = static_cast<const T*>(p.grad);
    std::vector<Acc> sum((source_end - source_begin) * p.k, Acc{0});
    for (int64_t row = 0; row < p.csr.num_rows; ++row) {
      const int64_t degree = rowptr[row + 1] - rowptr[row];
      Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc{1};
      if (p.mean && degree > 1) scale /= static_cast<Acc>(degree);
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const int64_t j = col[e];
        if (j < source_begin || j >= source_end) continue;
        const Acc weight = scale * edge_value<T>(p.value, p.value_acc, perm, e);
        for (int64_t c = 0; c < p.k; ++c)
          sum[(j - source_begin) * p.k + c] +=
              weight * load_one(grad + row * p.dim + columns[j * p.k + c]);
      }
    }
    for (int64_t j = source_begin; j < source_end; ++j) {
      const Acc scale = p.col_scale ? static_cast<const Acc*>(p.col_scale)[j] : Acc{1};
      for (int64_t c = 0; c < p.k; ++c) {
        Acc total = sum[(j - source_begin) * p.k + c] * scale;
        if (p.diag)
          total += static_cast<const Acc*>(p.diag)[j] *
                   load_one(grad + j * p.dim + columns[j * p.k + c]);
        store_one(static_cast<T*>(p.grad_values) + j * p.k + c, total);
      }
    }
  });
}

static void cbsr_spmm_backward_ordered(const CbsrBackward& p, int64_t row_begin, int64_t row_end) {
  with_cbsr_types(p, [&](auto type, auto index, auto column) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using C = typename decltype(column)::type;
    using Acc = acc_t<T>;
    const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
    const auto* col = static_cast<const Index*>(p.csr.col);
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    const auto* grad = static_cast<const T*>(p.grad);
    std::vector<Acc> sum(p.k);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const C* columns = static_cast<const C*>(p.columns) + row * p.k;
      for (auto& s : sum) s = 0;
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const int64_t i = col[e];
        Acc weight = edge_value<T>(p.value, p.value_acc, perm, e);
        if (p.col_scale) weight *= static_cast<const Acc*>(p.col_scale)[i];
        for (int64_t c = 0; c < p.k; ++c) sum[c] += weight * load_one(grad + i * p.dim + columns[c]);
      }
      const Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc{1};
      for (int64_t c = 0; c < p.k; ++c) {
        Acc total = sum[c] * scale;
        if (p.diag)
          total += static_cast<const Acc*>(p.diag)[row] * load_one(grad + row * p.dim + columns[c]);
        store_one(static_cast<T*>(p.grad_values) + row * p.k + c, total);
      }
    }
  });
}

static void cbsr_sddmm(const CbsrSddmm& p, int64_t row_begin, int64_t row_end) {
  with_cbsr_types(p, [&](auto type, auto index, auto column) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using C = typename decltype(column)::type;
    using Acc = acc_t<T>;
    const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
    const auto* col = static_cast<const Index*>(p.csr.col);
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    const auto* values = static_cast<const T*>(p.values);
    const auto* columns = static_cast<const C*>(p.columns);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* grad = static_cast<const T*>(p.grad) + row * p.dim;
      const int64_t degree = rowptr[row + 1] - rowptr[row];
      Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[row] : Acc{1};
      if (p.mean && degree > 1) scale /= static_cast<Acc>(degree);
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const int64_t j = col[e];
        Acc dot = 0;
        for (int64_t at = j * p.k; at < (j + 1) * p.k; ++at)
          dot += load_one(values + at) * load_one(grad + columns[at]);
        dot *= scale;
        if (p.col_scale) dot *= static_cast<const Acc*>(p.col_scale)[j];
        store_one(static_cast<T*>(p.out) + (perm != nullptr ? int64_t{perm[e]} : e), dot);
      }
    }
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
