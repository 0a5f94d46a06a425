// Sums and dot products over a coordinate list.
#include "coo.h"
#include "long_sums.h"
#include "params/spmm_coo.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// weight[k] = row_scale[dst] * value * col_scale[src] of the block's edge k
template <typename T>
void coo_weights(const SpmmCoo& p, const CooBlock& block, acc_t<T>* weight) {
  using Acc = acc_t<T>;
  const auto* row_scale = static_cast<const Acc*>(p.row_scale);
  const auto* col_scale = static_cast<const Acc*>(p.col_scale);
  for (int64_t k = 0; k < block.count; ++k) {
    Acc w = 1;
    if (p.value != nullptr) {
      w = p.value_acc ? static_cast<const Acc*>(p.value)[block.edge[k]]
                      : load_one(static_cast<const T*>(p.value) + block.edge[k]);
    }
    if (col_scale != nullptr) w *= col_scale[block.src[k]];
    if (row_scale != nullptr) w *= row_scale[block.dst[k]];
    weight[k] = w;
  }
}

// Of edges [begin, end) of the block. `x` and `out` point to node 0 at the tile's first column.
template <typename T, bool kWeighted, int V, int N>
void coo_tile(const CooBlock& block, int64_t begin, int64_t end, const acc_t<T>* weight, const T* x,
              int64_t dim, acc_t<T>* out, int64_t width) {
  using Acc = acc_t<T>;
  const int64_t last = width - V;
  for (int64_t k = begin; k < end; ++k) {
    if (k + kPrefetchEdges < block.count) {
      prefetch_tile<T, V, N>(x + block.src[k + kPrefetchEdges] * dim);
      prefetch_tile<Acc, V, N>(out + block.dst[k + kPrefetchEdges] * dim);
    }
    const T* from = x + block.src[k] * dim;
    Acc* to = out + block.dst[k] * dim;
    // Reads all before writing: the last vector overlaps the previous one.
    Vec<Acc, V> sum[N];
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) {
      auto v = load<V>(from + offset<V, N>(j, last));
      if constexpr (kWeighted) v *= weight[k];
      sum[j] = load<V>(to + offset<V, N>(j, last)) + v;
    }
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) store<V>(to + offset<V, N>(j, last), sum[j]);
  }
}

template <typename T>
void coo_edges(const SpmmCoo& p, const CooBlock& block, int64_t begin, int64_t end,
               const acc_t<T>* weight, acc_t<T>* out) {
  for_tiles<T>(p.dim, kMaxVectors, [&](Tile tile) {
    const T* x = static_cast<const T*>(p.x) + tile.column;
    with_tile<T, kMaxVectors>(tile.width, [&](auto v, auto n) {
      constexpr int V = decltype(v)::value, N = decltype(n)::value;
      constexpr auto weighted = coo_tile<T, true, V, N>, plain = coo_tile<T, false, V, N>;
      const auto run = weight != nullptr ? weighted : plain;
      run(block, begin, end, weight, x, p.dim, out + tile.column, tile.width);
    });
  });
}

// Of edges [begin, end) of the list.
template <typename T, typename Index>
void coo_block(const SpmmCoo& p, const CooBlock& block, int64_t begin, int64_t end,
               int64_t dst_begin, int64_t dst_end, const acc_t<T>* weight,
               ScatteredSums<acc_t<T>>& sums, acc_t<T>* out) {
  const auto* dst = static_cast<const Index*>(p.coo.dst);
  int64_t done = 0;
  for (int64_t group = begin; group + kCounted <= end; group += kCounted) {
    const int64_t e = counted_edge(group), d = dst[e];
    if (d < dst_begin || d >= dst_end || !sums.count(d, kCounted)) continue;
    int64_t stop = done;
    while (stop < block.count && block.edge[stop] < e) ++stop;
    coo_edges<T>(p, block, done, stop, weight, out);
    sums.carry(d);
    done = stop;
  }
  coo_edges<T>(p, block, done, block.count, weight, out);
}

template <typename T, typename Index>
void coo_share(const SpmmCoo& p, int64_t dst_begin, int64_t dst_end) {
  using Acc = acc_t<T>;
  constexpr bool kHalf = sizeof(T) != sizeof(Acc);  // sums in float, rounded once
  const int64_t first = dst_begin * p.dim, total = (dst_end - dst_begin) * p.dim;
  Scratch<Acc> scratch, weights;
  Acc* sum;
  if constexpr (kHalf) {
    sum = scratch.of_size(total);
  } else {
    sum = static_cast<Acc*>(p.out) + first;
  }
  if (p.diag == nullptr) {
    for (int64_t k = 0; k < total; ++k) sum[k] = 0;
  } else {
    const T* x = static_cast<const T*>(p.x) + first;
    for (int64_t i = dst_begin, k = 0; i < dst_end; ++i) {
      const Acc diag = static_cast<const Acc*>(p.diag)[i];
      for (const int64_t end = k + p.dim; k < end; ++k) sum[k] = diag * load_one(x + k);
    }
  }
  const bool weighted = p.value != nullptr || p.row_scale != nullptr || p.col_scale != nullptr;
  Acc* weight = weighted ? weights.of_size(kCooBlock) : nullptr;
  ScatteredSums<Acc> sums(sum, dst_begin, dst_end - dst_begin, p.dim);
  int64_t invalid = 0;
  for_coo_blocks<Index>(p.coo, 0, p.coo.num_edges, dst_begin, dst_end,
                        [&](const CooBlock& block, int64_t begin, int64_t end) {
                          invalid += block.invalid;
                          if (weighted) coo_weights<T>(p, block, weight);
                          coo_block<T, Index>(p, block, begin, end, dst_begin, dst_end, weight,
                                              sums, sum - first);
                        });
  sums.finish();
  if constexpr (kHalf) {
    T* out = static_cast<T*>(p.out) + first;
    for (int64_t k = 0; k < total; ++k) store_one(out + k, sum[k]);
  }
  if (p.invalid != nullptr && dst_begin == 0) *p.invalid = invalid;
}

void spmm_coo(const SpmmCoo& p, int64_t dst_begin, int64_t dst_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    coo_share<typename decltype(type)::type, typename decltype(index)::type>(p, dst_begin, dst_end);
  });
}

template <typename T, typename Index, int V>
void sddmm_coos(const SddmmCoo& p, int64_t edge_begin, int64_t edge_end) {
  using Acc = acc_t<T>;
  constexpr int U = 4;  // edges at a time
  const auto* row_scale = static_cast<const Acc*>(p.row_scale);
  const auto* col_scale = static_cast<const Acc*>(p.col_scale);
  const auto* a = static_cast<const T*>(p.a);
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
  const auto dots = [&](auto edges, const CooBlock& block, int64_t first) PYG_FAST_ALWAYS {
    constexpr int K = decltype(edges)::value;
    const T *left[K], *right[K];
    Vec<Acc, V> sum[K] = {};
    PYG_FAST_UNROLL
    for (int k = 0; k < K; ++k) {
      left[k] = a + block.dst[first + k] * dim;
      right[k] = b + block.src[first + k] * dim;
    }
    for (int64_t f = 0; f < full; f += V) {
      PYG_FAST_UNROLL
      for (int k = 0; k < K; ++k) sum[k] += load<V>(left[k] + f) * load<V>(right[k] + f);
    }
    PYG_FAST_UNROLL
    for (int k = 0; k < K; ++k) {
      sum[k] += masked(load<V>(left[k] + last)) * masked(load<V>(right[k] + last));
      Acc dot = sum_of<Acc, V>(sum[k]);
      if (row_scale != nullptr) dot *= row_scale[block.dst[first + k]];
      if (col_scale != nullptr) dot *= col_scale[block.src[first + k]];
      store_one(out + block.edge[first + k], dot);
    }
  };
  for_coo_blocks<Index>(p.coo, edge_begin, edge_end, 0, p.coo.num_dst,
                        [&](const CooBlock& block, int64_t begin, int64_t end) {
                          if (block.skipped > 0) {
                            for (int64_t e = begin; e < end; ++e) store_one(out + e, Acc{0});
                          }
                          int64_t k = 0;
                          for (; k + U <= block.count; k += U) dots(Int<U>{}, block, k);
                          for (; k < block.count; ++k) dots(Int<1>{}, block, k);
                        });
}

template <typename T, typename Index, int V>
void sddmm_coos_of_width(const SddmmCoo& p, int64_t edge_begin, int64_t edge_end) {
  if constexpr (V > 1) {
    if (p.dim < V) return sddmm_coos_of_width<T, Index, V / 2>(p, edge_begin, edge_end);
  }
  sddmm_coos<T, Index, V>(p, edge_begin, edge_end);
}

void sddmm_coo(const SddmmCoo& p, int64_t edge_begin, int64_t edge_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    if (p.dim == 0) {
      for (int64_t e = edge_begin; e < edge_end; ++e) store_one(static_cast<T*>(p.out) + e, 0);
    } else {
      sddmm_coos_of_width<T, typename decltype(index)::type, kLanes<T>>(p, edge_begin, edge_end);
    }
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(spmm_coo, (const SpmmCoo& p, int64_t dst_begin, int64_t dst_end),
                (p, dst_begin, dst_end))
PYG_FAST_KERNEL(sddmm_coo, (const SddmmCoo& p, int64_t edge_begin, int64_t edge_end),
                (p, edge_begin, edge_end))
