// What the kernels of both kinds of attention are made of: a row's edges are taken in blocks, whose
// scores, then weights, wait in a small buffer for the features to be added up.
#pragma once
#include <type_traits>

#include "../dropout.h"
#include "maxk.h"
#include "sddmm.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <int V, typename Acc>
PYG_FAST_INLINE Vec<Acc, V> splat(Acc a) {
  return bit_cast<Vec<Acc, V>>(Vec<mask_t<Acc>, V>{} + bit_cast<mask_t<Acc>>(a));
}

// The lanes of v that the mask has; 0 in the others.
template <typename Acc, int V>
PYG_FAST_INLINE Vec<Acc, V> masked(Vec<Acc, V> v, Vec<mask_t<Acc>, V> mask) {
  return bit_cast<Vec<Acc, V>>(bit_cast<Vec<mask_t<Acc>, V>>(v) & mask);
}

template <typename V, typename Acc>
PYG_FAST_INLINE V leaky(V s, Acc slope) {
  return s > 0 ? s : s * slope;
}

template <typename Acc>
struct ExpOf;
template <>
struct ExpOf<float> {
  static constexpr int kTerms = 7, kMantissa = 23, kBias = 127;
  static constexpr float kLog2e = 0x1.715476p0f, kRound = 0x1.8p23f;
  static constexpr float kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;  // exact times integers
  static constexpr float kLeast = -0x1.5d58ap6f, kMost = 89;
};
template <>
struct ExpOf<double> {
  static constexpr int kTerms = 13, kMantissa = 52, kBias = 1023;
  static constexpr double kLog2e = 0x1.71547652b82fep0, kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kLeast = -0x1.6232bdd7abcd2p9, kMost = 710;
};

// exp(x) within two units in the last place; 0 where it would be subnormal.
template <typename Acc, int V>
PYG_FAST_INLINE Vec<Acc, V> exp_of(Vec<Acc, V> x) {
  using E = ExpOf<Acc>;
  using Bits = Vec<mask_t<Acc>, V>;
  const Bits normal = ~(x < E::kLeast);  // NaN is
  x = x < E::kLeast ? splat<V>(E::kLeast) : x;
  x = x > E::kMost ? splat<V>(E::kMost) : x;
  const auto rounded = x * E::kLog2e + E::kRound;  // the integer is in its last bits
  const auto n = rounded - E::kRound;
  const auto r = x - n * E::kLn2High - n * E::kLn2Low;
  Acc factorial = 1;
  for (int k = 2; k <= E::kTerms; ++k) factorial *= static_cast<Acc>(k);
  auto sum = splat<V>(1 / factorial);
  PYG_FAST_UNROLL
  for (int k = E::kTerms; k > 0; --k) {
    factorial /= static_cast<Acc>(k);
    sum = sum * r + 1 / factorial;
  }
  const auto power = (bit_cast<Bits>(rounded) << E::kMantissa) +
                     (mask_t<Acc>{E::kBias} << E::kMantissa);
  return masked<Acc, V>(sum * bit_cast<Vec<Acc, V>>(power), normal);
}

template <typename T>
T* zeros(Scratch<T>& scratch, int64_t size) {
  T* data = scratch.of_size(size);
  __builtin_memset(data, 0, static_cast<size_t>(size) * sizeof(T));
  return data;
}

PYG_FAST_INLINE float log_of(float x) { return __builtin_logf(x); }
PYG_FAST_INLINE double log_of(double x) { return __builtin_log(x); }

// A number per edge and head waits in slots, `stride` of them an edge: as many as there are heads,
// rounded up so that a vector holds whole edges or an edge whole vectors.
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
  int64_t period;  // slots after which vectors meet the same heads again
};

// f(at, within) of the vectors that begin at slots `first`, `first` + period, ... of some edges;
// `within`: the lanes that belong to them.
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

// f(Int<K>, h) for pieces of K heads that cover all of them; the last two may overlap.
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

// out[e, h] = from[node[e] * from_stride + h]
template <typename Acc>
void gather_slots(const Slots<Acc>& slots, const Acc* from, int64_t from_stride,
                  const int64_t* node, int64_t count, Acc* out) {
  fill_slots<kLanes<Acc>>(slots.heads, slots.stride, count, out,
                          [&](auto k, int64_t e, int64_t h) PYG_FAST_ALWAYS {
                            return load<decltype(k)::value>(from + node[e] * from_stride + h);
                          });
}

// out[e, h] = from[h]
template <typename Acc>
void repeat_slots(const Slots<Acc>& slots, const Acc* from, int64_t count, Acc* out) {
  fill_slots<kLanes<Acc>>(slots.heads, slots.stride, count, out,
                          [&](auto k, int64_t, int64_t h) PYG_FAST_ALWAYS {
                            return load<decltype(k)::value>(from + h);
                          });
}

// Makes one number of all lanes of the same head: op of them, in each of those lanes.
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

// The edges of a row, block by block: each has its other node and, where asked for, its id.
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

  // Edges of the next block, 0 if there is none. The edge from the row's own node is in the last.
  // kPrefetchEdges more nodes may be read, those of the edges that follow.
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
    const auto* col = static_cast<const Index*>(csr_.col) + begin_;
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

// kept[e, h] of some edges.
template <typename Acc>
class Dropout {
 public:
  Dropout(const Attention& p, const Slots<Acc>& slots, int64_t capacity)
      : active_(p.dropout > 0), slots_(slots), threshold_(dropout_threshold(p.dropout)),
        scale_(static_cast<Acc>(dropout_scale(p.dropout))) {
    if (!active_) return;
    seed_ = static_cast<uint64_t>(*p.seed);
    const int64_t size = slots.size(capacity);
    of_edge_ = of_edges_.of_size(capacity);
    bits_ = all_bits_.of_size(size);
    head_ = heads_.of_size(size);
    kept_ = all_kept_.of_size(size);
    for (int64_t k = 0; k < size; ++k) {
      bits_[k] = 0;
      head_[k] = static_cast<uint32_t>(k % slots.stride);
    }
  }

  // nullptr: 1 everywhere.
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
      kept_[k] = keeps(bits_[k], head_[k], threshold_) ? scale_ : Acc{0};
    }
    return kept_;
  }

 private:
  const bool active_;
  const Slots<Acc> slots_;
  const uint32_t threshold_;
  const Acc scale_;
  uint64_t seed_ = 0;
  Scratch<uint32_t> of_edges_, all_bits_, heads_;
  Scratch<Acc> all_kept_;
  uint32_t *of_edge_ = nullptr, *bits_ = nullptr, *head_ = nullptr;
  Acc* kept_ = nullptr;
};

// The softmax of a row, block after block, relative to the largest logit so far.
template <typename Acc>
class RowSoftmax {
  static constexpr int V = kLanes<Acc>;

 public:
  RowSoftmax(const Slots<Acc>& slots, Acc slope)
      : slots_(slots), slope_(slope), max(scratch_.of_size(4 * slots.period)),
        sum(max + slots.period), plus(sum + slots.period), decay(plus + slots.period) {}

  void start() {
    for (int64_t k = 0; k < slots_.period; ++k) {
      max[k] = -__builtin_inff();
      sum[k] = plus[k] = 0;
    }
  }

  // Makes weights of the scores s of a block: kept * exp(leaky(s) - max), with kSigned negative
  // where s is not positive. What was added up before has to be multiplied by `decay`.
  template <bool kSigned>
  void weigh(Acc* s, const Acc* kept, int64_t count) {
    for (int64_t v = 0; v < slots_.period; v += V) {
      const auto before = load<V>(max + v);
      auto most = before;
      for_slots(slots_, count, v, [&](int64_t at, auto within) PYG_FAST_ALWAYS {
        const auto logit = leaky(load<V>(s + at), slope_);
        most = ((logit > most) & within) != 0 ? logit : most;
      });
      fold<Acc, V>(most, slots_.stride, max + v, [](auto a, auto b) { return a > b ? a : b; });
      most = load<V>(max + v);
      const auto base = most > -__builtin_inff() ? most : Vec<Acc, V>{};
      const auto decayed = exp_of<Acc, V>(before - base);
      Vec<Acc, V> total = {}, positive = {};
      for_slots(slots_, count, v, [&](int64_t at, auto within) PYG_FAST_ALWAYS {
        const auto score = load<V>(s + at);
        auto w = masked<Acc, V>(exp_of<Acc, V>(leaky(score, slope_) - base), within);
        total += w;
        if (kSigned) {
          positive += masked<Acc, V>(w, score > 0);
          w = score > 0 ? w : -w;
        }
        if (kept != nullptr) w *= load<V>(kept + at);
        store<V>(s + at, w);
      });
      store<V>(decay + v, decayed);
      store<V>(sum + v, load<V>(sum + v) * decayed + total);
      store<V>(plus + v, load<V>(plus + v) * decayed + positive);
    }
  }

  void finish() {
    fold_sums(slots_, sum);
    fold_sums(slots_, plus);
  }

 private:
  const Slots<Acc> slots_;
  const Acc slope_;
  Scratch<Acc> scratch_;

 public:
  Acc* const max;
  Acc* const sum;
  Acc* const plus;   // the part of `sum` from positive scores
  Acc* const decay;  // by how much the largest logit's growth made the sums before it shrink
};

// What the backward knows of some edges, by slots. Scores become what their nodes' features are
// weighted with, `dot` (may be nullptr) becomes the score's gradient.
template <typename Acc>
struct EdgeGradients {
  Acc* score;
  const Acc* lse;
  const Acc* G;
  Acc* dot;  // <grad, x>
  const Acc* kept;
};

// With dots: score = kept * p; total += the gradients. Without: the same, negative where the score
// is not positive; total -= p * leaky' * G, the part of the gradients that needs no dot.
template <typename Acc, bool kDots>
void weigh_backward(const Slots<Acc>& slots, const EdgeGradients<Acc>& of, Acc slope, int64_t count,
                    Acc* total) {
  constexpr int V = kLanes<Acc>;
  for (int64_t v = 0; v < slots.period; v += V) {
    Vec<Acc, V> sum = {};
    for_slots(slots, count, v, [&](int64_t at, auto within) PYG_FAST_ALWAYS {
      const auto score = load<V>(of.score + at);
      const auto p = masked<Acc, V>(
          exp_of<Acc, V>(leaky(score, slope) - load<V>(of.lse + at)), within);
      const auto reach = p * load<V>(of.G + at);
      auto w = p;
      if (of.kept != nullptr) w *= load<V>(of.kept + at);
      if constexpr (kDots) {
        auto gradient = w * load<V>(of.dot + at) - reach;
        gradient = score > 0 ? gradient : gradient * slope;
        sum += masked<Acc, V>(gradient, within);
        store<V>(of.dot + at, gradient);
      } else {
        sum -= masked<Acc, V>(score > 0 ? reach : reach * slope, within);
        w = score > 0 ? w : -w;
      }
      store<V>(of.score + at, w);
    });
    store<V>(total + v, load<V>(total + v) + sum);
  }
}

// Features: heads x channels columns a node.
struct Columns {
  explicit Columns(const Attention& p) : Columns(p.heads, p.channels) {}

  Columns(int64_t heads, int64_t channels)
      : heads(heads), channels(channels), size(heads * channels), head(scratch_.of_size(size)) {
    for (int64_t f = 0; f < size; ++f) head[f] = static_cast<int32_t>(f / channels);
  }

 private:
  Scratch<int32_t> scratch_;

 public:
  const int64_t heads, channels, size;
  int32_t* const head;  // of each column
};

// The slots of an edge, spread over V columns of features.
template <typename Acc, int V>
class HeadLanes {
 public:
  PYG_FAST_INLINE void set(const int32_t* head) {
    base_ = head[0];
    Vec<int32_t, V> heads;
    __builtin_memcpy(&heads, head, sizeof(heads));
    lane_ = __builtin_convertvector(heads - head[0], Vec<mask_t<Acc>, V>);
  }

  // Reads up to V slots behind the first.
  PYG_FAST_INLINE Vec<Acc, V> operator()(const Acc* slot) const {
    slot += base_;
#if defined(__AVX512F__)
    if constexpr (sizeof(Acc) * V == 64) {
      if constexpr (V == 16) {
        return bit_cast<Vec<Acc, V>>(_mm512_maskz_permutexvar_ps(
            0xffff, bit_cast<__m512i>(lane_), bit_cast<__m512>(load<V>(slot))));
      } else {
        return bit_cast<Vec<Acc, V>>(_mm512_maskz_permutexvar_pd(
            0xff, bit_cast<__m512i>(lane_), bit_cast<__m512d>(load<V>(slot))));
      }
    }
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(Acc) == 4 && V == 8) {
      return bit_cast<Vec<Acc, V>>(
          _mm256_permutevar8x32_ps(bit_cast<__m256>(load<V>(slot)), bit_cast<__m256i>(lane_)));
    }
#endif
    Vec<Acc, V> v;
    for (int k = 0; k < V; ++k) v[k] = slot[lane_[k]];
    return v;
  }

 private:
  Vec<mask_t<Acc>, V> lane_;
  int64_t base_;
};

// The same where all of the columns are of one head.
template <typename Acc, int V>
class OneHead {
 public:
  PYG_FAST_INLINE void set(const int32_t* head) { head_ = head[0]; }
  PYG_FAST_INLINE Vec<Acc, V> operator()(const Acc* slot) const { return splat<V>(slot[head_]); }

 private:
  int64_t head_;
};

// Slots that a vector of lanes may read beyond those it uses.
template <typename Acc>
constexpr int64_t kBeyond = kLanes<Acc>;

constexpr int kTileVectors = 4;

// f(Tile, Int<V>, Int<N>, Type<HeadLanes or OneHead>) of tiles that cover all columns.
template <typename T, typename F>
PYG_FAST_INLINE void for_head_tiles(const Columns& columns, const F& f) {
  for_tiles<T>(columns.size, kTileVectors, [&](Tile tile) {
    with_tile<T, kTileVectors>(tile.width, [&](auto v, auto n) {
      constexpr int V = decltype(v)::value;
      if constexpr (V == kLanes<T> && V > 1) {
        if (columns.channels % V == 0) return f(tile, v, n, Type<OneHead<acc_t<T>, V>>{});
      }
      f(tile, v, n, Type<HeadLanes<acc_t<T>, V>>{});
    });
  });
}

// Some edges and their weights, by slots.
template <typename Acc>
struct Weighted {
  const int64_t* node;
  int64_t count;
  const Acc* weight;
  int64_t stride;
};

// f(e, row of x from the tile's column on) of every edge.
template <typename T, int V, int N, typename Acc, typename F>
PYG_FAST_INLINE void for_rows_of(const Weighted<Acc>& edges, const T* x, int64_t size,
                                 const F& f) {
  for (int64_t e = 0; e < edges.count; ++e) {
    prefetch_tile<T, V, N>(x + edges.node[e + kPrefetchEdges] * size);
    f(edges.weight + e * edges.stride, x + edges.node[e] * size);
  }
}

// Adds the sums of a block, which keeps long sums accurate.
template <int V, int N, typename Acc>
PYG_FAST_INLINE void add_to_sums(Vec<Acc, V> (&of_block)[N], Tile tile, Acc* sum) {
  Acc* const to = sum + tile.column;
  const int64_t last = tile.width - V;
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) of_block[j] += load<V>(to + offset<V, N>(j, last));
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) store<V>(to + offset<V, N>(j, last), of_block[j]);
}

template <typename T, typename Lanes, int V, int N, bool kSigned>
void add_tile(const Columns& columns, Tile tile, const T* x, const Weighted<acc_t<T>>& edges,
              acc_t<T>* sum, acc_t<T>* plus) {
  using Acc = acc_t<T>;
  const int64_t last = tile.width - V;
  Lanes of_heads[N];
  Vec<Acc, V> all[N] = {}, positive[N] = {};
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) {
    const int64_t at = tile.column + offset<V, N>(j, last);
    of_heads[j].set(columns.head + at);
  }
  for_rows_of<T, V, N>(
      edges, x + tile.column, columns.size, [&](const Acc* weight, const T* from) PYG_FAST_ALWAYS {
        PYG_FAST_UNROLL
        for (int j = 0; j < N; ++j) {
          const auto v = load<V>(from + offset<V, N>(j, last));
          const auto w = of_heads[j](weight);
          if constexpr (kSigned) {
            all[j] += v * masked<Acc, V>(w, Vec<mask_t<Acc>, V>{} + ~kLeast<mask_t<Acc>>);
            positive[j] += v * (w > 0 ? w : Vec<Acc, V>{});
          } else {
            all[j] += v * w;
          }
        }
      });
  add_to_sums<V, N>(all, tile, sum);
  if (kSigned) add_to_sums<V, N>(positive, tile, plus);
}

// sum[f] += |weight| * x[node, f]; with kSigned plus[f] += the part from positive weights.
template <typename T, bool kSigned>
void add_features(const Columns& columns, const T* x, const Weighted<acc_t<T>>& edges,
                  acc_t<T>* sum, acc_t<T>* plus) {
  for_head_tiles<T>(columns, [&](Tile tile, auto v, auto n, auto lanes) {
    add_tile<T, typename decltype(lanes)::type, decltype(v)::value, decltype(n)::value, kSigned>(
        columns, tile, x, edges, sum, plus);
  });
}

// One node's channels, head by head in chunks of W lanes, the last of which may overlap the one
// before it: lanes met already are 0 there, if `once`.
template <int W, typename T>
void to_chunks(const Columns& columns, const T* x, bool once, acc_t<T>* chunks) {
  const int64_t channels = columns.channels;
  for (int64_t h = 0; h < columns.heads; ++h, x += channels) {
    int64_t c = 0;
    for (; c + W < channels; c += W, chunks += W) store<W>(chunks, load<W>(x + c));
    store<W>(chunks, load<W>(x + channels - W));
    for (int64_t k = 0; once && k < c - (channels - W); ++k) chunks[k] = 0;
    chunks += W;
  }
}

// f(Int<W>) of the lanes of a chunk.
template <int W, typename F>
PYG_FAST_INLINE void with_chunk(int64_t channels, const F& f) {
  if constexpr (W > 1) {
    if (channels < W) return with_chunk<W / 2>(channels, f);
  }
  f(Int<W>{});
}

template <typename T, int W, bool kScore>
void dot_chunks(const Columns& columns, const T* x, const int64_t* node, int64_t count,
                const acc_t<T>* a, const acc_t<T>* own, acc_t<T> slope, acc_t<T>* out,
                int64_t stride) {
  using Acc = acc_t<T>;
  const int64_t channels = columns.channels, last = channels - W;
  for (int64_t e = 0; e < count; ++e) {
    const T* from = x + node[e] * columns.size;
    const T* next = x + node[e + kPrefetchEdges] * columns.size;
    const int64_t bytes = columns.size * static_cast<int64_t>(sizeof(T));
    for (int64_t byte = 0; byte < bytes; byte += kCacheLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(next) + byte);
    }
    int64_t at = 0;
    for (int64_t h = 0; h < columns.heads; ++h, from += channels) {
      Vec<Acc, W> sum = {};
      const auto add = [&](int64_t c) PYG_FAST_ALWAYS {
        auto v = load<W>(from + c);
        if (kScore) v = leaky(v + load<W>(own + at), slope);
        sum += v * load<W>(a + at);
        at += W;
      };
      for (int64_t c = 0; c < last; c += W) add(c);
      add(last);
      out[e * stride + h] = sum_of<Acc, W>(sum);
    }
  }
}

// Per edge and head the dot product of one node's features with those of the other. As a score:
// of `a` with leaky(features of both).
template <typename Acc>
class HeadDots {
 public:
  explicit HeadDots(const Columns& columns)
      : columns_(columns), width_(columns.heads * (columns.channels + kLanes<Acc>)),
        a_(scratch_.of_size(2 * width_)), own_(a_ + width_) {}

  template <typename T>
  void set(const T* a) {
    with_width([&](auto w) { to_chunks<decltype(w)::value>(columns_, a, true, a_); });
  }

  template <typename T>
  void set_own(const T* own) {
    with_width([&](auto w) { to_chunks<decltype(w)::value>(columns_, own, false, own_); });
  }

  // out[e, h] = <a[h], x[node[e], h]>
  template <typename T>
  void dots(const T* x, const int64_t* node, int64_t count, Acc* out, int64_t stride) const {
    run<T, false>(x, node, count, 0, out, stride);
  }

  // out[h] = <a[h], x[h]>, rounded as in the dots of edges: what is equal cancels.
  template <typename T>
  void dots_of_row(const T* x, Acc* out) const {
    constexpr int64_t kFirst[1 + kPrefetchEdges] = {};
    run<T, false>(x, kFirst, 1, 0, out, columns_.heads);
  }

  // out[e, h] = <a[h], leaky(x[node[e], h] + own[h])>
  template <typename T>
  void scores(const T* x, const int64_t* node, int64_t count, Acc slope, Acc* out,
              int64_t stride) const {
    run<T, true>(x, node, count, slope, out, stride);
  }

 private:
  template <typename F>
  void with_width(const F& f) const {
    if (columns_.channels > 0) with_chunk<kLanes<Acc>>(columns_.channels, f);
  }

  template <typename T, bool kScore>
  void run(const T* x, const int64_t* node, int64_t count, Acc slope, Acc* out,
           int64_t stride) const {
    if (columns_.channels == 0) {
      for (int64_t k = 0; k < count * stride; ++k) out[k] = 0;
    }
    with_width([&](auto w) {
      dot_chunks<T, decltype(w)::value, kScore>(columns_, x, node, count, a_, own_, slope, out,
                                                stride);
    });
  }

  const Columns& columns_;
  Scratch<Acc> scratch_;
  const int64_t width_;
  Acc *const a_, *const own_;
};

// f(const G*) of a gradient that is stored as T or, with out_acc, as acc.
template <typename T, typename F>
PYG_FAST_INLINE void with_grad(const void* grad, bool out_acc, const F& f) {
  if constexpr (sizeof(T) < sizeof(acc_t<T>)) {
    if (out_acc) return f(static_cast<const acc_t<T>*>(grad));
  }
  f(static_cast<const T*>(grad));
}

// Edges whose slots fill half of the nearest cache.
inline int64_t block_edges(int64_t stride) {
  constexpr int64_t kSlots = 4096, kLeastEdges = 16;
  return kSlots / stride > kLeastEdges ? kSlots / stride : kLeastEdges;
}

// Out of the edges of a row: its softmax, the sum of features and what the backward needs.
template <typename T>
class RowOutput {
 public:
  using Acc = acc_t<T>;

  template <typename P>
  RowOutput(const P& p, void* y_plus, const Columns& columns, const Slots<Acc>& slots, Acc slope)
      : columns_(columns), slots_(slots), softmax_(slots, slope),
        sum_(scratch_.of_size(2 * columns.size + slots.period + kBeyond<Acc>)),
        plus_(sum_ + columns.size), inverse_(plus_ + columns.size),
        x_(static_cast<const T*>(p.x)), bias_(p.bias), out_(p.out), out_acc_(p.out_acc),
        y_(static_cast<Acc*>(p.y)), y_plus_(static_cast<Acc*>(y_plus)),
        lse_(static_cast<Acc*>(p.lse)) {}

  void start() {
    started_ = false;
    softmax_.start();
    __builtin_memset(sum_, 0, static_cast<size_t>(2 * columns_.size) * sizeof(Acc));
    __builtin_memset(inverse_, 0, static_cast<size_t>(slots_.period) * sizeof(Acc));
  }

  // Takes a block of edges, given their scores.
  void add(const int64_t* node, int64_t count, Acc* score, const Acc* kept) {
    const bool with_plus = y_plus_ != nullptr;
    with_plus ? softmax_.template weigh<true>(score, kept, count)
              : softmax_.template weigh<false>(score, kept, count);
    for (int64_t f = 0; started_ && f < columns_.size; ++f) {
      sum_[f] *= softmax_.decay[columns_.head[f]];
      plus_[f] *= softmax_.decay[columns_.head[f]];
    }
    started_ = true;
    const Weighted<Acc> edges{node, count, score, slots_.stride};
    with_plus ? add_features<T, true>(columns_, x_, edges, sum_, plus_)
              : add_features<T, false>(columns_, x_, edges, sum_, plus_);
  }

  void write(int64_t row) {
    const int64_t heads = columns_.heads;
    if (started_) {
      softmax_.finish();
      for (int64_t h = 0; h < heads; ++h) inverse_[h] = 1 / softmax_.sum[h];
    }
    for (int64_t h = 0; lse_ != nullptr && h < heads; ++h) {
      lse_[row * heads + h] = started_ ? softmax_.max[h] + log_of(softmax_.sum[h]) : Acc{0};
    }
    for_chunks<kLanes<Acc>>(0, columns_.size, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
      constexpr int V = decltype(v)::value;
      const int64_t at = row * columns_.size + f;
      HeadLanes<Acc, V> of_heads;
      of_heads.set(columns_.head + f);
      const auto scale = of_heads(inverse_);
      auto y = load<V>(sum_ + f) * scale;
      if (y_ != nullptr) store<V>(y_ + at, y);
      if (y_plus_ != nullptr) store<V>(y_plus_ + at, load<V>(plus_ + f) * scale);
      if (out_acc_) {
        if (bias_ != nullptr) y += load<V>(static_cast<const Acc*>(bias_) + f);
        store<V>(static_cast<Acc*>(out_) + at, y);
      } else {
        if (bias_ != nullptr) y += load<V>(static_cast<const T*>(bias_) + f);
        store<V>(static_cast<T*>(out_) + at, y);
      }
    });
  }

  // Of the row that was written, the weight of edges of positive score, before dropout.
  Acc mass_plus(int64_t h) const { return softmax_.plus[h] * inverse_[h]; }

 private:
  const Columns& columns_;
  const Slots<Acc> slots_;
  RowSoftmax<Acc> softmax_;
  Scratch<Acc> scratch_;
  Acc *const sum_, *const plus_, *const inverse_;
  const T* const x_;
  const void* const bias_;
  void* const out_;
  const bool out_acc_;
  Acc *const y_, *const y_plus_, *const lse_;
  bool started_ = false;
};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
