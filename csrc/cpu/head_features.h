// Features of several heads: sums weighted by one number per edge and head, and dot products that give
// such numbers.
#pragma once
#include "long_sums.h"
#include "slots.h"
#include "softmax.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// The features of a node: heads x channels columns.
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
  int32_t* const head;  // the head of each column
};

// The slots of an edge, expanded to V columns of features.
template <typename Acc, int V>
class HeadLanes {
 public:
  PYG_FAST_INLINE void set(const int32_t* head) {
    base_ = head[0];
    Vec<int32_t, V> heads;
    __builtin_memcpy(&heads, head, sizeof(heads));
    lane_ = __builtin_convertvector(heads - head[0], Vec<mask_t<Acc>, V>);
  }

  // Reads up to V slots from the first.
  PYG_FAST_INLINE Vec<Acc, V> operator()(const Acc* slot) const {
    slot += base_;
#if defined(__AVX512F__)
    if constexpr (sizeof(Acc) * V == 64) {
      if constexpr (V == 16) {
        return bit_cast<Vec<Acc, V>>(_mm512_maskz_permutexvar_ps(0xffff, bit_cast<__m512i>(lane_),
                                                                 bit_cast<__m512>(load<V>(slot))));
      } else {
        return bit_cast<Vec<Acc, V>>(_mm512_maskz_permutexvar_pd(0xff, bit_cast<__m512i>(lane_),
                                                                 bit_cast<__m512d>(load<V>(slot))));
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

// The same if all columns belong to one head.
template <typename Acc, int V>
class OneHead {
 public:
  PYG_FAST_INLINE void set(const int32_t* head) { head_ = head[0]; }
  PYG_FAST_INLINE Vec<Acc, V> operator()(const Acc* slot) const { return splat<V>(slot[head_]); }

 private:
  int64_t head_;
};

// The number of slots that a vector load may read past the end.
template <typename Acc>
constexpr int64_t kBeyond = kLanes<Acc>;

constexpr int kTileVectors = 4;

// Calls f(Tile, Int<V>, Int<N>, Type<HeadLanes or OneHead>) for tiles that cover all columns.
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

// Some edges and their weights, in slots.
template <typename Acc>
struct Weighted {
  const int64_t* node;
  int64_t count;
  const Acc* weight;
  int64_t stride;
};

// Calls f(weights of e, row of x from the tile's column on) for every edge e; add_sums() after every
// kSumBlock of them and after the last, with `true` if more come.
template <typename T, int V, int N, typename Acc, typename F, typename Add>
PYG_FAST_INLINE void for_rows_of(const Weighted<Acc>& edges, const T* x, int64_t size, const F& f,
                                 const Add& add_sums) {
  for (int64_t e = 0;;) {
    const int64_t stop = edges.count - e > kSumBlock ? e + kSumBlock : edges.count;
    for (; e < stop; ++e) {
      prefetch_tile<T, V, N>(x + edges.node[e + kPrefetchEdges] * size);
      f(edges.weight + e * edges.stride, x + edges.node[e] * size);
    }
    if (stop == edges.count) return add_sums(false);
    add_sums(true);
  }
}

// Adds the sums of a block, and clears them if more come: block-wise summation keeps long sums accurate.
template <int V, int N, typename Acc>
PYG_FAST_INLINE void add_to_sums(Vec<Acc, V> (&of_block)[N], Tile tile, Acc* sum, bool more) {
  Acc* const to = sum + tile.column;
  const int64_t last = tile.width - V;
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) of_block[j] += load<V>(to + offset<V, N>(j, last));
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) {
    store<V>(to + offset<V, N>(j, last), of_block[j]);
    if (more) of_block[j] = Vec<Acc, V>{};
  }
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
      edges, x + tile.column, columns.size,
      [&](const Acc* weight, const T* from) PYG_FAST_ALWAYS {
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
      },
      [&](bool more) PYG_FAST_ALWAYS {
        add_to_sums<V, N>(all, tile, sum, more);
        if (kSigned) add_to_sums<V, N>(positive, tile, plus, more);
      });
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

// Splits one node's channels, head by head, into chunks of W lanes. The last chunk may overlap the
// previous one: with `once`, the overlapping lanes are 0.
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

// Calls f(Int<W>) with the chunk width W.
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

// Per edge and head, the dot product of one node's features with those of the other node. As a score: of
// `a` with leaky(features of both).
template <typename Acc>
class HeadDots {
 public:
  explicit HeadDots(const Columns& columns)
      : columns_(columns),
        width_(columns.heads * (columns.channels + kLanes<Acc>)),
        a_(scratch_.of_size(2 * width_)),
        own_(a_ + width_) {}

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

  // out[h] = <a[h], x[h]>, rounded like the dots of edges: equal values cancel.
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

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
