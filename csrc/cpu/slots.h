// Kernels take a row's edges in blocks. A small buffer, the slots, holds the block's scores, then
// weights, until the features are added up.
#pragma once
#include "params/attention.h"
#include "params/dropout.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <int V, typename Acc>
PYG_FAST_INLINE Vec<Acc, V> splat(Acc a) {
  return bit_cast<Vec<Acc, V>>(Vec<mask_t<Acc>, V>{} + bit_cast<mask_t<Acc>>(a));
}

// The lanes of v where the mask is set; 0 in the others.
template <typename Acc, int V>
PYG_FAST_INLINE Vec<Acc, V> masked(Vec<Acc, V> v, Vec<mask_t<Acc>, V> mask) {
  return bit_cast<Vec<Acc, V>>(bit_cast<Vec<mask_t<Acc>, V>>(v) & mask);
}

template <typename T>
T* zeros(Scratch<T>& scratch, int64_t size) {
  T* data = scratch.of_size(size);
  __builtin_memset(data, 0, static_cast<size_t>(size) * sizeof(T));
  return data;
}

// Slots hold one number per edge and head, `stride` slots per edge: the number of heads, rounded up to
// make a vector hold whole edges or an edge hold whole vectors.
template <typename Acc>
struct Slots {
  static constexpr int V = kLanes<Acc>;

  explicit Slots(int64_t heads) : heads(heads), stride(1) {
    if (heads > V) stride = (heads + V - 1) / V * V;
    while (stride < heads) stride *= 2;
    period = stride > V ? stride : V;
  }

  int64_t size(int64_t count) const { return (count * stride + V - 1) / V * V + V; }

  const int64_t heads;
  int64_t stride;
  int64_t period;  // period, in slots, of the heads in a vector
};

// Calls f(at, within) for the vectors at slots `first`, `first` + period, ... of some edges; `within`:
// the lanes that belong to them.
template <typename Acc, typename F>
PYG_FAST_INLINE void for_slots(const Slots<Acc>& slots, int64_t count, int64_t first, const F& f) {
  constexpr int V = kLanes<Acc>;
  using Mask = Vec<mask_t<Acc>, V>;
  const int64_t size = count * slots.stride;
  int64_t at = first;
  for (; at + V <= size; at += slots.period) f(at, ~Mask{});
  if (at < size) {
    Mask lane = {};
    for (int k = 0; k < V; ++k) lane[k] = k;
    f(at, lane < static_cast<mask_t<Acc>>(size - at));
  }
}

// Calls f(Int<K>, h) for pieces of K heads that cover all heads; the last two may overlap.
template <int K, typename F>
PYG_FAST_INLINE void for_pieces(int64_t heads, const F& f) {
  int64_t h = 0;
  for (; h + K < heads; h += K) f(Int<K>{}, h);
  f(Int<K>{}, heads - K);
}

// slot[e, h] = f(Int<K>, e, h), K of them at a time.
template <int K, typename S, typename F>
PYG_FAST_INLINE void fill_slots(int64_t heads, int64_t stride, int64_t count, S* slot, const F& f) {
  if constexpr (K > 1) {
    if (heads < K) return fill_slots<K / 2>(heads, stride, count, slot, f);
  }
  for (int64_t e = 0; e < count; ++e) {
    for_pieces<K>(heads, [&](auto k, int64_t h) PYG_FAST_ALWAYS {
      const auto v = f(k, e, h);
      __builtin_memcpy(slot + e * stride + h, &v, sizeof(v));
    });
  }
}

// out[n * out_stride + slot of e, h] = from[node[e] * from_stride + n * heads + h] for n < N
template <int N, typename Acc>
void gather_slots(const Slots<Acc>& slots, const Acc* from, int64_t from_stride,
                  const int64_t* node, int64_t count, Acc* out, int64_t out_stride) {
  fill_slots<kLanes<Acc>>(
      slots.heads, slots.stride, count, out, [&](auto k, int64_t e, int64_t h) PYG_FAST_ALWAYS {
        constexpr int K = decltype(k)::value;
        const Acc* of_node = from + node[e] * from_stride + h;
        PYG_FAST_UNROLL
        for (int n = 1; n < N; ++n) {
          store<K>(out + n * out_stride + e * slots.stride + h, load<K>(of_node + n * slots.heads));
        }
        return load<K>(of_node);
      });
}

// out[e, h] = from[h]
template <typename Acc>
void repeat_slots(const Slots<Acc>& slots, const Acc* from, int64_t count, Acc* out) {
  fill_slots<kLanes<Acc>>(slots.heads, slots.stride, count, out,
                          [&](auto k, int64_t, int64_t h)
                              PYG_FAST_ALWAYS { return load<decltype(k)::value>(from + h); });
}

// Reduces all lanes of the same head with op; each of those lanes gets the result.
template <typename Acc, int V, typename Op>
PYG_FAST_INLINE void fold(Vec<Acc, V> v, int64_t stride, Acc* out, const Op& op) {
  if constexpr (V > 1) {
    if (stride < V) {
      struct Halves {
        Vec<Acc, V / 2> low, high;
      };
      const auto halves = bit_cast<Halves>(v);
      fold<Acc, V / 2>(op(halves.low, halves.high), stride, out, op);
      return store<V / 2>(out + V / 2, load<V / 2>(out));
    }
  }
  store<V>(out, v);
}

template <typename Acc>
void fold_sums(const Slots<Acc>& slots, Acc* sum) {
  constexpr int V = kLanes<Acc>;
  for (int64_t v = 0; v < slots.period; v += V) {
    fold<Acc, V>(load<V>(sum + v), slots.stride, sum + v, [](auto a, auto b) { return a + b; });
  }
}

// The edges of a row, block by block: for each the other node and, with `with_ids`, its id.
class EdgeBlocks {
 public:
  EdgeBlocks(const Csr& csr, int64_t num_loops, int64_t capacity, bool with_ids)
      : node(nodes_.of_size(capacity + 1 + kPrefetchEdges)),
        id(ids_.of_size(capacity + 1)),
        csr_(csr),
        num_loops_(num_loops),
        capacity_(capacity),
        with_ids_(with_ids) {}

  void start(int64_t row) {
    row_ = row;
    begin_ = rowptr(row);
    end_ = rowptr(row + 1);
    loop_ = row < num_loops_;
  }

  // Returns the number of edges of the next block, 0 at the end. The last block includes the self-loop.
  // Callers may read kPrefetchEdges more nodes, those of the following edges.
  int64_t next() {
    if (begin_ == end_ && !loop_) return 0;
    return csr_.index64 ? list<int64_t>() : list<int32_t>();
  }

 private:
  Scratch<int64_t> nodes_, ids_;

 public:
  int64_t* const node;
  int64_t* const id;

 private:
  int64_t rowptr(int64_t row) const {
    return csr_.index64 ? static_cast<const int64_t*>(csr_.rowptr)[row]
                        : static_cast<const int32_t*>(csr_.rowptr)[row];
  }

  template <typename Index>
  int64_t list() {
    const auto* col = static_cast<const Col*>(csr_.col) + begin_;
    const auto* perm = static_cast<const Index*>(csr_.perm);
    int64_t count = end_ - begin_ < capacity_ ? end_ - begin_ : capacity_;
    for (int64_t e = 0; e < count; ++e) node[e] = col[e];
    if (with_ids_ && perm != nullptr) {
      for (int64_t e = 0; e < count; ++e) id[e] = perm[begin_ + e];
    } else if (with_ids_) {
      for (int64_t e = 0; e < count; ++e) id[e] = begin_ + e;
    }
    begin_ += count;
    col += count;
    if (begin_ == end_ && loop_) {
      node[count] = row_;
      id[count++] = csr_.num_edges + row_;
      loop_ = false;
    }
    const int64_t rest = rowptr(csr_.num_rows) - begin_;
    for (int64_t e = 0; e < kPrefetchEdges; ++e) {
      node[count + e] = e < rest ? int64_t{col[e]} : node[0];
    }
    return count;
  }

  const Csr csr_;
  const int64_t num_loops_, capacity_;
  const bool with_ids_;
  int64_t row_ = 0, begin_ = 0, end_ = 0;
  bool loop_ = false;
};

// factor[e, h] of some edges.
template <typename Acc>
class Dropout {
 public:
  Dropout(const Attention& p, const Slots<Acc>& slots, int64_t capacity)
      : active_(p.dropout > 0),
        slots_(slots),
        threshold_(dropout_threshold(p.dropout)),
        scale_(static_cast<Acc>(dropout_scale(p.dropout))) {
    if (!active_) return;
    seed_ = static_cast<uint64_t>(*p.seed);
    const int64_t size = slots.size(capacity);
    of_edge_ = of_edges_.of_size(capacity);
    bits_ = all_bits_.of_size(size);
    head_ = heads_.of_size(size);
    factors_ = all_factors_.of_size(size);
    for (int64_t k = 0; k < size; ++k) {
      bits_[k] = 0;
      head_[k] = static_cast<uint32_t>(k % slots.stride);
    }
  }

  // nullptr: all factors are 1.
  const Acc* of(const int64_t* id, int64_t count) {
    if (!active_) return nullptr;
    for (int64_t e = 0; e < count; ++e) {
      of_edge_[e] = edge_bits(seed_, static_cast<uint64_t>(id[e]));
    }
    fill_slots<kLanes<Acc>>(slots_.heads, slots_.stride, count, bits_,
                            [&](auto k, int64_t e, int64_t) PYG_FAST_ALWAYS {
                              return Vec<uint32_t, decltype(k)::value>{} + of_edge_[e];
                            });
    const int64_t size = slots_.size(count);
    for (int64_t k = 0; k < size; ++k) {
      factors_[k] = keeps(bits_[k], head_[k], threshold_) ? scale_ : Acc{0};
    }
    return factors_;
  }

 private:
  const bool active_;
  const Slots<Acc> slots_;
  const uint32_t threshold_;
  const Acc scale_;
  uint64_t seed_ = 0;
  Scratch<uint32_t> of_edges_, all_bits_, heads_;
  Scratch<Acc> all_factors_;
  uint32_t *of_edge_ = nullptr, *bits_ = nullptr, *head_ = nullptr;
  Acc* factors_ = nullptr;
};

// The number of edges whose slots fill half of L1, at most two blocks of a sum.
inline int64_t block_edges(int64_t stride) {
  constexpr int64_t kSlots = 4096, kLeastEdges = 16, kMostEdges = 128;
  const int64_t fit = kSlots / stride;
  return fit > kMostEdges ? kMostEdges : fit > kLeastEdges ? fit : kLeastEdges;
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
