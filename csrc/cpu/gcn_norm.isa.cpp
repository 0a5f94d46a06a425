// The symmetric normalisation of a GCN.
#include <type_traits>

#include "coo.h"
#include "params/gcn_norm.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Sums are of type Sum: the terms of a node come in any order, each is one number.
template <typename Degree, typename Sum, typename Index, typename Value>
void gcn_degrees(const GcnDegree& p, int64_t dst_begin, int64_t dst_end, const Value& value) {
  Scratch<Sum> sums;
  Sum* degree;
  if constexpr (std::is_same_v<Degree, Sum>) {
    degree = static_cast<Degree*>(p.degree);
  } else {
    degree = sums.of_size(dst_end - dst_begin) - dst_begin;
  }
  for (int64_t i = dst_begin; i < dst_end; ++i) {
    degree[i] = 0;
    if (p.last != nullptr) p.last[i] = 0;
  }
  // The first share counts for all shares.
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
  if constexpr (!std::is_same_v<Degree, Sum>) {
    auto* out = static_cast<Degree*>(p.degree);
    for (int64_t i = dst_begin; i < dst_end; ++i) out[i] = static_cast<Degree>(degree[i]);
  }
  if (dst_begin == 0) {
    p.counts[0] = invalid;
    p.counts[1] = loops;
  }
}

void gcn_degree(const GcnDegree& p, int64_t dst_begin, int64_t dst_end) {
  with_types(p.dtype, p.coo.index64, [&](auto type, auto index) {
    using T = typename decltype(type)::type;
    using Index = typename decltype(index)::type;
    if (!p.weighted) {
      gcn_degrees<int32_t, int32_t, Index>(p, dst_begin, dst_end, [](int64_t) { return 1; });
    } else {
      gcn_degrees<acc_t<T>, double, Index>(p, dst_begin, dst_end, [&](int64_t e) {
        return load_one(static_cast<const T*>(p.value) + e);
      });
    }
  });
}

void gcn_scale(const GcnWeight& p, int64_t node_begin, int64_t node_end) {
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

// Calls f(e, k, src, dst, valid) for the edges of the chunks [begin, end). k is the place of edge e among
// the edges that are no loops, or -1; without `before`, among all edges.
template <typename Index, typename F>
PYG_FAST_INLINE void for_places(const Coo& coo, const int64_t* before, int64_t num_kept,
                                int64_t begin, int64_t end, const F& f) {
  const int64_t first = begin * kLoopChunk, last = end * kLoopChunk;
  int64_t next = first - (before != nullptr && begin > 0 ? before[begin - 1] : 0);
  for_coo<Index>(coo, first, last < coo.num_edges ? last : coo.num_edges,
                 [&](int64_t e, int64_t s, int64_t d, bool valid) {
                   const bool left_out = before != nullptr && valid && s == d;
                   // Prevents writes out of range if `before` belongs to another graph.
                   const bool fits = next >= 0 && next < num_kept;
                   f(e, !left_out && fits ? next : -1, s, d, valid);
                   next += !left_out;
                 });
}

void gcn_weight(const GcnWeight& p, int64_t chunk_begin, int64_t chunk_end) {
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

void gcn_weight_backward(const GcnWeightBackward& p, int64_t chunk_begin, int64_t chunk_end) {
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

PYG_FAST_KERNEL(gcn_degree, (const GcnDegree& p, int64_t dst_begin, int64_t dst_end),
                (p, dst_begin, dst_end))
PYG_FAST_KERNEL(gcn_scale, (const GcnWeight& p, int64_t node_begin, int64_t node_end),
                (p, node_begin, node_end))
PYG_FAST_KERNEL(gcn_weight, (const GcnWeight& p, int64_t chunk_begin, int64_t chunk_end),
                (p, chunk_begin, chunk_end))
PYG_FAST_KERNEL(gcn_weight_backward,
                (const GcnWeightBackward& p, int64_t chunk_begin, int64_t chunk_end),
                (p, chunk_begin, chunk_end))
