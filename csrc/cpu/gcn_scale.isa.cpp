// The symmetric normalisation of sorted weighted edges: sums over rows; does not write any edge.
#include "long_sums.h"
#include "params/gcn_scale.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename T>
acc_t<T> sum_of_values(const T* value, int64_t count) {
  using Acc = acc_t<T>;
  constexpr int V = kLanes<T>, U = 4;  // U vectors at a time hide the latency of additions
  int64_t k = 0;
  double sum = 0;
  while (k + V * U <= count) {
    const int64_t stop = count - k > kSumBlock * V * U ? k + kSumBlock * V * U : count;
    Vec<Acc, V> parts[U] = {};
    for (; k + V * U <= stop; k += V * U) {
      PYG_FAST_UNROLL
      for (int u = 0; u < U; ++u) parts[u] += load<V>(value + k + u * V);
    }
    sum += sum_of<Acc, V>((parts[0] + parts[1]) + (parts[2] + parts[3]));
  }
  for (; k < count; ++k) sum += load_one(value + k);
  return static_cast<Acc>(sum);
}

template <typename T, typename Index>
void gcn_scales(const GcnScale& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const auto* value = static_cast<const T*>(p.value);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t begin = rowptr[row], end = rowptr[row + 1];
    Acc degree = 0;
    if (perm == nullptr) {
      degree = sum_of_values(value + begin, end - begin);
    } else {
      double sum = 0;
      for (int64_t e = begin; e < end; ++e) sum += load_one(value + perm[e]);
      degree = static_cast<Acc>(sum);
    }
    Acc loop = 0;
    if (p.loops) {
      const int64_t last = p.last_loop != nullptr ? p.last_loop[row] : -1;
      const bool found = last >= 0 && last < p.num_values;
      loop = found ? load_one(value + last) : static_cast<Acc>(p.fill_value);
      degree += loop;
    }
    const Acc scale = degree == 0 ? Acc{0} : Acc{1} / __builtin_sqrt(degree);
    static_cast<Acc*>(p.scale)[row] = scale;
    if (p.loops) static_cast<Acc*>(p.diag)[row] = scale * loop * scale;
  }
}

void gcn_scale_rows(const GcnScale& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    gcn_scales<typename decltype(type)::type, typename decltype(index)::type>(p, row_begin,
                                                                              row_end);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(gcn_scale_rows, (const GcnScale& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
