// Sums and dot products over a coordinate list, and the normalisation of a GCN. Edges are taken
// block by block: what is to be skipped goes first, then nothing branches.
#pragma once
#include "sddmm.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

constexpr int64_t kCooBlock = 1024;

// f(e, src, dst, valid) for the edges [begin, end).
template <typename Index, typename F>
PYG_FAST_INLINE void for_coo(const Coo& coo, int64_t begin, int64_t end, const F& f) {
  const auto* src = static_cast<const Index*>(coo.src);
  const auto* dst = static_cast<const Index*>(coo.dst);
  for (int64_t e = begin; e < end; ++e) {
    const int64_t s = src[e], d = dst[e];
    f(e, s, d, (s >= 0) & (s < coo.num_src) & (d >= 0) & (d < coo.num_dst));
  }
}

// The edges of a block that a call has to do with, and how many are invalid or left out.
struct CooBlock {
  int64_t count = 0, invalid = 0, skipped = 0;
  int64_t edge[kCooBlock], src[kCooBlock], dst[kCooBlock];

  template <typename Index>
  void fill(const Coo& coo, int64_t begin, int64_t end, int64_t dst_begin, int64_t dst_end) {
    count = invalid = skipped = 0;
    for_coo<Index>(coo, begin, end, [&](int64_t e, int64_t s, int64_t d, bool valid) {
      edge[count] = e;
      src[count] = s;
      dst[count] = d;
      const bool used = valid & !(coo.drop_loops & (s == d));
      count += used & (d >= dst_begin) & (d < dst_end);
      invalid += !valid;
      skipped += !used;
    });
  }
};

// f(block) for all edges of [begin, end) with a destination in [dst_begin, dst_end).
template <typename Index, typename F>
PYG_FAST_INLINE void for_coo_blocks(const Coo& coo, int64_t begin, int64_t end, int64_t dst_begin,
                                    int64_t dst_end, const F& f) {
  CooBlock block;
  for (; begin < end; begin += kCooBlock) {
    const int64_t stop = begin + kCooBlock < end ? begin + kCooBlock : end;
    block.fill<Index>(coo, begin, stop, dst_begin, dst_end);
    f(block, begin, stop);
  }
}

// weight[k] = row_scale[dst] * value * col_scale[src] of the block's edge k
template <typename T>
void scatter_weights(const Scatter& p, const CooBlock& block, acc_t<T>* weight) {
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

// `x` and `out` are those of node 0, at the tile's first column.
template <typename T, bool kWeighted, int V, int N>
void scatter_tile(const CooBlock& block, const acc_t<T>* weight, const T* x, int64_t dim,
                  acc_t<T>* out, int64_t width) {
  using Acc = acc_t<T>;
  const int64_t last = width - V;
  for (int64_t k = 0; k < block.count; ++k) {
    if (k + kPrefetchEdges < block.count) {
      prefetch_tile<T, V, N>(x + block.src[k + kPrefetchEdges] * dim);
      prefetch_tile<Acc, V, N>(out + block.dst[k + kPrefetchEdges] * dim);
    }
    const T* from = x + block.src[k] * dim;
    Acc* to = out + block.dst[k] * dim;
    // All is read before any is written: the last vector overlaps the one before it.
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
void scatter_block(const Scatter& p, const CooBlock& block, const acc_t<T>* weight,
                   acc_t<T>* out) {
  for_tiles<T>(p.dim, kMaxVectors, [&](Tile tile) {
    const T* x = static_cast<const T*>(p.x) + tile.column;
    with_tile<T, kMaxVectors>(tile.width, [&](auto v, auto n) {
      constexpr int V = decltype(v)::value, N = decltype(n)::value;
      constexpr auto weighted = scatter_tile<T, true, V, N>, plain = scatter_tile<T, false, V, N>;
      const auto run = weight != nullptr ? weighted : plain;
      run(block, weight, x, p.dim, out + tile.column, tile.width);
    });
  });
}

template <typename T, typename Index>
void scatter_share(const Scatter& p, int64_t dst_begin, int64_t dst_end) {
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
  int64_t invalid = 0;
  for_coo_blocks<Index>(p.coo, 0, p.coo.num_edges, dst_begin, dst_end,
                        [&](const CooBlock& block, int64_t, int64_t) {
                          invalid += block.invalid;
                          if (weighted) scatter_weights<T>(p, block, weight);
                          scatter_block<T>(p, block, weight, sum - first);
                        });
  if constexpr (kHalf) {
    T* out = static_cast<T*>(p.out) + first;
    for (int64_t k = 0; k < total; ++k) store_one(out + k, sum[k]);
  }
  if (p.invalid != nullptr && dst_begin == 0) *p.invalid = invalid;
}

static void scatter(const Scatter& p, int64_t dst_begin, int64_t dst_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    scatter_share<typename decltype(type)::type, typename decltype(index)::type>(p, dst_begin,
                                                                                dst_end);
  });
}

template <typename T, typename Index, int V>
void edge_dots(const EdgeDot& p, int64_t edge_begin, int64_t edge_end) {
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
  Vec<mask_t<Acc>, V> fresh;               // lanes of it that were not met before
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
void edge_dots_of_width(const EdgeDot& p, int64_t edge_begin, int64_t edge_end) {
  if constexpr (V > 1) {
    if (p.dim < V) return edge_dots_of_width<T, Index, V / 2>(p, edge_begin, edge_end);
  }
  edge_dots<T, Index, V>(p, edge_begin, edge_end);
}

static void edge_dot(const EdgeDot& p, int64_t edge_begin, int64_t edge_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    if (p.dim == 0) {
      for (int64_t e = edge_begin; e < edge_end; ++e) store_one(static_cast<T*>(p.out) + e, 0);
    } else {
      edge_dots_of_width<T, typename decltype(index)::type, kLanes<T>>(p, edge_begin, edge_end);
    }
  });
}

template <typename Degree, typename Index, typename Value>
void gcn_degrees(const GcnDegree& p, int64_t dst_begin, int64_t dst_end, const Value& value) {
  auto* degree = static_cast<Degree*>(p.degree);
  for (int64_t i = dst_begin; i < dst_end; ++i) {
    degree[i] = 0;
    if (p.last != nullptr) p.last[i] = 0;
  }
  // The first share counts for all.
  int64_t* chunk_loops = dst_begin == 0 ? p.chunk_loops : nullptr;
  if (chunk_loops != nullptr) {
    for (int64_t c = 0; c < loop_chunks(p.coo.num_edges); ++c) chunk_loops[c] = 0;
  }
  int64_t invalid = 0, loops = 0;
  for_coo<Index>(p.coo, 0, p.coo.num_edges, [&](int64_t e, int64_t s, int64_t d, bool valid) {
    const bool loop = valid & (s == d), mine = valid & (d >= dst_begin) & (d < dst_end);
    invalid += !valid;
    loops += loop;
    if (loop && chunk_loops != nullptr) ++chunk_loops[e / kLoopChunk];
    if (!mine) return;
    if (loop && p.last != nullptr) p.last[d] = e + 1;
    if (!loop || !p.coo.drop_loops) degree[d] += value(e);
  });
  if (dst_begin == 0) {
    p.counts[0] = invalid;
    p.counts[1] = loops;
  }
}

static void gcn_degree(const GcnDegree& p, int64_t dst_begin, int64_t dst_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    if (!p.weighted) {
      gcn_degrees<int32_t, Index>(p, dst_begin, dst_end, [](int64_t) { return 1; });
    } else {
      gcn_degrees<acc_t<T>, Index>(p, dst_begin, dst_end, [&](int64_t e) {
        return load_one(static_cast<const T*>(p.value) + e);
      });
    }
  });
}

static void gcn_scale(const GcnWeight& p, int64_t node_begin, int64_t node_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    const int64_t total = p.num_kept + p.coo.num_dst;
    for (int64_t i = node_begin; i < node_end; ++i) {
      Acc degree = p.weighted ? static_cast<const Acc*>(p.degree)[i]
                              : static_cast<Acc>(static_cast<const int32_t*>(p.degree)[i]);
      Acc loop = p.loops ? static_cast<Acc>(p.fill_value) : Acc{0};
      if (p.last != nullptr && p.last[i] > 0) {
        loop = load_one(static_cast<const T*>(p.value) + p.last[i] - 1);
      }
      degree += loop;
      const Acc scale = degree == 0 ? Acc{0} : Acc{1} / __builtin_sqrt(degree);
      static_cast<Acc*>(p.scale)[i] = scale;
      if (!p.loops) continue;
      store_one(static_cast<T*>(p.weight) + p.num_kept + i, scale * loop * scale);
      auto* edge_index = static_cast<Index*>(p.edge_index) + p.num_kept + i;
      edge_index[0] = edge_index[total] = static_cast<Index>(i);
    }
  });
}

// f(e, k, src, dst, valid) for the edges of the chunks [begin, end), where k is the place of edge e
// among those that are no loops, or -1; without `before`, of all.
template <typename Index, typename F>
PYG_FAST_INLINE void for_places(const Coo& coo, const int64_t* before, int64_t num_kept,
                                int64_t begin, int64_t end, const F& f) {
  const int64_t first = begin * kLoopChunk, last = end * kLoopChunk;
  int64_t next = first - (before != nullptr && begin > 0 ? before[begin - 1] : 0);
  for_coo<Index>(coo, first, last < coo.num_edges ? last : coo.num_edges,
                 [&](int64_t e, int64_t s, int64_t d, bool valid) {
                   const bool left_out = before != nullptr && valid && s == d;
                   // Also where sums of another graph are given, nothing else is written to.
                   const bool fits = next >= 0 && next < num_kept;
                   f(e, !left_out && fits ? next : -1, s, d, valid);
                   next += !left_out;
                 });
}

static void gcn_weight(const GcnWeight& p, int64_t chunk_begin, int64_t chunk_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    using Acc = acc_t<T>;
    const auto* scale = static_cast<const Acc*>(p.scale);
    auto* edge_index = static_cast<Index*>(p.edge_index);
    const int64_t total = p.num_kept + p.coo.num_dst;
    for_places<Index>(p.coo, p.before, p.num_kept, chunk_begin, chunk_end,
                      [&](int64_t e, int64_t k, int64_t s, int64_t d, bool valid) {
                        if (k < 0) return;
                        Acc w = valid ? scale[s] * scale[d] : Acc{0};
                        if (p.weighted && valid) w *= load_one(static_cast<const T*>(p.value) + e);
                        store_one(static_cast<T*>(p.weight) + k, w);
                        if (!p.loops) return;
                        edge_index[k] = static_cast<Index>(s);
                        edge_index[total + k] = static_cast<Index>(d);
                      });
  });
}

static void gcn_weight_backward(const GcnWeightBackward& p, int64_t chunk_begin,
                                int64_t chunk_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Acc = acc_t<T>;
    const auto* grad = static_cast<const T*>(p.grad);
    const auto* scale = static_cast<const Acc*>(p.scale);
    const auto* grad_degree = static_cast<const Acc*>(p.grad_degree);
    for_places<typename decltype(index)::type>(
        p.coo, p.before, p.num_kept, chunk_begin, chunk_end,
        [&](int64_t e, int64_t k, int64_t s, int64_t d, bool valid) {
          if (k < 0 && valid && s == d) k = p.num_kept + d;
          Acc g = 0;
          if (valid && k >= 0) g = load_one(grad + k) * scale[s] * scale[d] + grad_degree[d];
          store_one(static_cast<T*>(p.out) + e, g);
        });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
