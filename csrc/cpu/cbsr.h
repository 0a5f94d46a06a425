// Code that the aggregation of CBSR features and its gradients share. They process one dense row at a
// time: it stays in L1 or in registers while the kernel reads the entries of its sources.
#pragma once
#include "params/cbsr.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

constexpr int64_t kAhead = 8;  // edges between a prefetch and its use

// The edges of some rows, only those from certain sources.
template <typename Acc>
struct Block {
  int64_t row_begin, row_end;
  const int64_t* first;   // [row_end - row_begin + 1] where each row begins in the lists below
  const int64_t* source;  // readable up to kAhead entries past the end
  const int64_t* edge;
  const Acc* weight;
};

// Calls f(Block) for all rows, in blocks that fit the cache. The weight of an edge is scale(row) *
// weight(edge, source).
template <typename Acc, typename Index, typename Scale, typename Weight, typename F>
PYG_FAST_INLINE void for_blocks(const Csr& csr, int64_t row_begin, int64_t row_end,
                                int64_t source_begin, int64_t source_end, const Scale& scale,
                                const Weight& weight, const F& f) {
  constexpr int64_t kRows = 512, kEdges = 2048;
  const auto* rowptr = static_cast<const Index*>(csr.rowptr);
  const auto* col = static_cast<const Col*>(csr.col);
  const auto sources_wanted = static_cast<uint64_t>(source_end - source_begin);
  const bool all = source_end - source_begin == csr.num_cols;
  Scratch<int64_t> firsts, sources, edges;
  Scratch<Acc> weights;
  int64_t* first = firsts.of_size(kRows + 1);
  while (row_begin < row_end) {
    const int64_t begin = rowptr[row_begin];
    int64_t stop = row_begin + 1;
    while (stop < row_end && stop - row_begin < kRows && rowptr[stop + 1] - begin <= kEdges) ++stop;
    const int64_t size = rowptr[stop] - begin > kEdges ? rowptr[stop] - begin : kEdges;
    int64_t* source = sources.of_size(size + kAhead);
    int64_t* edge = edges.of_size(size);
    Acc* weight_of = weights.of_size(size);
    int64_t count = 0;
    for (int64_t row = row_begin; row < stop; ++row) {
      const int64_t start = first[row - row_begin] = count;
      const int64_t row_edge = rowptr[row], row_edges = rowptr[row + 1] - row_edge;
      if (all) {
        for (int64_t e = 0; e < row_edges; ++e) source[start + e] = col[row_edge + e];
        for (int64_t e = 0; e < row_edges; ++e) edge[start + e] = row_edge + e;
        count += row_edges;
      } else {
        for (int64_t e = row_edge; e < row_edge + row_edges; ++e) {
          const int64_t j = col[e];
          source[count] = j;
          edge[count] = e;
          count += static_cast<uint64_t>(j - source_begin) < sources_wanted;
        }
      }
      const Acc row_scale = scale(row);
      for (int64_t e = start; e < count; ++e) {
        weight_of[e] = row_scale * weight(edge[e], source[e]);
      }
    }
    first[stop - row_begin] = count;
    for (int64_t e = count; e < count + kAhead; ++e) source[e] = source_begin;
    f(Block<Acc>{row_begin, stop, first, source, edge, weight_of});
    row_begin = stop;
  }
}

// Prefetches the first lines of a source's entries; the hardware prefetches the rest.
template <typename T>
PYG_FAST_INLINE void prefetch_entries(const T* entries, int64_t k) {
  const int64_t bytes = k * static_cast<int64_t>(sizeof(T));
  for (int64_t byte = 0; byte < bytes && byte < 4 * kCacheLine; byte += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(entries) + byte);
  }
}

template <typename T, typename Index, typename P>
PYG_FAST_INLINE acc_t<T> value_of(const P& p, int64_t edge) {
  if (p.value == nullptr) return 1;
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const int64_t at = perm != nullptr ? int64_t{perm[edge]} : edge;
  return p.value_acc ? static_cast<const acc_t<T>*>(p.value)[at]
                     : load_one(static_cast<const T*>(p.value) + at);
}

template <typename Acc>
PYG_FAST_INLINE Acc scale_of(const void* scale, int64_t row) {
  return scale != nullptr ? static_cast<const Acc*>(scale)[row] : Acc{1};
}

// The factor of a row's sum.
template <typename Acc, typename Index, typename P>
PYG_FAST_INLINE Acc scale_of_row(const P& p, int64_t row) {
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const int64_t degree = rowptr[row + 1] - rowptr[row];
  const Acc scale = scale_of<Acc>(p.row_scale, row);
  return p.mean && degree > 1 ? scale / static_cast<Acc>(degree) : scale;
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
