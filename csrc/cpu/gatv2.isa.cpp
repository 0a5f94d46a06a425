// GATv2: the score applies the non-linearity before the dot product: one dot product per edge and head.
#include <type_traits>

#include "attention.h"
#include "params/gatv2.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Block size: the features, read twice, must stay in L1.
template <typename T>
int64_t gatv2_block_edges(const Columns& columns, int64_t stride) {
  constexpr int64_t kBytes = 16 << 10, kLeastEdges = 8;
  const int64_t bytes = columns.size * static_cast<int64_t>(sizeof(T));
  const int64_t most = block_edges(stride), fit = kBytes / (bytes > 0 ? bytes : 1);
  return fit > most ? most : fit > kLeastEdges ? fit : kLeastEdges;
}

template <typename T>
void gatv2_rows(const Gatv2& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  const Columns columns(p);
  const Slots<Acc> slots(p.heads);
  const int64_t capacity = gatv2_block_edges<T>(columns, slots.stride);
  EdgeBlocks edges(p.csr, p.num_loops, capacity, p.dropout > 0);
  Dropout<Acc> dropout(p, slots, capacity + 1);
  RowOutput<T> output(p, nullptr, columns, slots, 1);  // slope 1: the scores are already logits
  HeadDots<Acc> by_heads(columns);
  by_heads.set(static_cast<const T*>(p.att));
  Scratch<Acc> scratch;
  Acc* score = zeros(scratch, slots.size(capacity + 1) + kBeyond<Acc>);
  const auto* x = static_cast<const T*>(p.x);
  for (int64_t row = row_begin; row < row_end; ++row) {
    output.start();
    by_heads.set_own(static_cast<const T*>(p.x_dst) + row * columns.size);
    edges.start(row);
    while (const int64_t count = edges.next()) {
      by_heads.scores(x, edges.node, count, static_cast<Acc>(p.negative_slope), score,
                      slots.stride);
      output.add(edges.node, count, score, dropout.of(edges.id, count));
    }
    output.write(row);
  }
}

template <typename T, typename Lanes, int V, int N, bool kAtt>
void add_slopes_tile(const Columns& columns, Tile tile, const T* x, const Weighted<acc_t<T>>& edges,
                     const T* own, acc_t<T> slope, acc_t<T>* sum, acc_t<T>* sum_att) {
  using Acc = acc_t<T>;
  const int64_t last = tile.width - V;
  Lanes of_heads[N];
  Vec<Acc, V> slopes[N] = {}, leaks[N] = {}, own_of[N];
  PYG_FAST_UNROLL
  for (int j = 0; j < N; ++j) {
    const int64_t at = tile.column + offset<V, N>(j, last);
    of_heads[j].set(columns.head + at);
    own_of[j] = load<V>(own + at);
  }
  for_rows_of<T, V, N>(
      edges, x + tile.column, columns.size,
      [&](const Acc* weight, const T* from) PYG_FAST_ALWAYS {
        PYG_FAST_UNROLL
        for (int j = 0; j < N; ++j) {
          const auto s = load<V>(from + offset<V, N>(j, last)) + own_of[j];
          const auto w = of_heads[j](weight);
          const auto sloped = s > 0 ? w : w * slope;
          slopes[j] += sloped;
          if (kAtt) leaks[j] += s * sloped;
        }
      },
      [&](bool more) PYG_FAST_ALWAYS {
        add_to_sums<V, N>(slopes, tile, sum, more);
        if (kAtt) add_to_sums<V, N>(leaks, tile, sum_att, more);
      });
}

// With s = x[node] + own: sum += weight * leaky'(s); with kAtt sum_att += weight * leaky(s).
template <typename T, bool kAtt>
void add_slopes(const Columns& columns, const T* x, const Weighted<acc_t<T>>& edges, const T* own,
                acc_t<T> slope, acc_t<T>* sum, acc_t<T>* sum_att) {
  for_head_tiles<T>(columns, [&](Tile tile, auto v, auto n, auto lanes) {
    add_slopes_tile<T, typename decltype(lanes)::type, decltype(v)::value, decltype(n)::value,
                    kAtt>(columns, tile, x, edges, own, slope, sum, sum_att);
  });
}

// Both directions: a row is the destination (kSource: the source) of its edges.
template <typename T, typename G, bool kSource>
void gatv2_backward_rows(const Gatv2Backward& p, const G* grad, int64_t row_begin, int64_t row_end,
                         acc_t<T>* grad_att) {
  using Acc = acc_t<T>;
  const Acc slope = static_cast<Acc>(p.negative_slope);
  const int64_t heads = p.heads, of_node = p.stat_size();
  const Columns columns(p);
  const Slots<Acc> slots(heads);
  const int64_t capacity = gatv2_block_edges<T>(columns, slots.stride);
  const int64_t size = slots.size(capacity + 1);
  EdgeBlocks edges(kSource ? p.t_csr : p.csr, p.num_loops, capacity, p.dropout > 0);
  Dropout<Acc> dropout(p, slots, capacity + 1);
  HeadDots<Acc> scores(columns), dots(columns);
  const auto *att = static_cast<const T*>(p.att), *x = static_cast<const T*>(p.x),
             *x_dst = static_cast<const T*>(p.x_dst);
  scores.set(att);
  Scratch<Acc> scratch;
  const int64_t num_sums = 2 * columns.size + slots.period;
  Acc* score = zeros(scratch, 5 * size + 2 * num_sums + 2 * columns.size + kBeyond<Acc>);
  Acc *max = score + size, *inverse = max + size, *G_of = inverse + size, *dot = G_of + size;
  Acc *sum = dot + size, *sum_grad = sum + columns.size, *total = sum_grad + columns.size;
  Acc* sum_att = sum + 2 * num_sums;  // over rows
  LongSums<Acc> sums(sum, num_sums), sums_att(sum_att, columns.size);
  sums_att.start();
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t at = row * columns.size;
    const T* own = (kSource ? x : x_dst) + at;
    sums.start();
    if (!kSource && (row - row_begin) % kSumBlock == 0) sums_att.next();
    scores.set_own(own);
    if constexpr (kSource) {
      dots.set(own);
    } else {
      dots.set(grad + at);
      auto* stat = static_cast<Acc*>(p.stat) + row * of_node;
      __builtin_memcpy(stat, static_cast<const Acc*>(p.softmax) + row * 2 * heads,
                       static_cast<size_t>(2 * heads) * sizeof(Acc));
      dots.dots_of_row(static_cast<const Acc*>(p.y) + at, stat + 2 * heads);
    }
    edges.start(row);
    while (const int64_t count = edges.next()) {
      sums.next();
      const int64_t* node = edges.node;
      const auto* stat = static_cast<const Acc*>(p.stat);
      if constexpr (kSource) {
        scores.scores(x_dst, node, count, slope, score, slots.stride);
        dots.dots(grad, node, count, dot, slots.stride);
        gather_slots<3>(slots, stat, of_node, node, count, max, size);
      } else {
        scores.scores(x, node, count, slope, score, slots.stride);
        dots.dots(x, node, count, dot, slots.stride);
        repeat_slots(slots, stat + row * of_node, count, max);
        repeat_slots(slots, stat + row * of_node + heads, count, inverse);
        repeat_slots(slots, stat + row * of_node + 2 * heads, count, G_of);
      }
      const Acc* factor = dropout.of(edges.id, count);
      weigh_backward<Acc, true>(slots, {score, max, inverse, G_of, dot, factor}, 1, count, total);
      const Weighted<Acc> by_dots{node, count, dot, slots.stride};
      if constexpr (kSource) {
        const Weighted<Acc> by_weights{node, count, score, slots.stride};
        add_features<G, false>(columns, grad, by_weights, sum_grad, nullptr);
        add_slopes<T, false>(columns, x_dst, by_dots, own, slope, sum, nullptr);
      } else {
        add_slopes<T, true>(columns, x, by_dots, own, slope, sum, sum_grad);
      }
    }
    sums.end();
    T* out = static_cast<T*>(kSource ? p.grad_x : p.grad_x_dst) + at;
    for_chunks<kLanes<T>>(0, columns.size, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
      constexpr int V = decltype(v)::value;
      auto result = load<V>(att + f) * load<V>(sum + f);
      if constexpr (kSource) {
        result += load<V>(sum_grad + f);
      } else {
        store<V>(sum_att + f, load<V>(sum_att + f) + load<V>(sum_grad + f));
      }
      store<V>(out + f, result);
    });
  }
  if (kSource) return;
  sums_att.end();
  __builtin_memcpy(grad_att, sum_att, static_cast<size_t>(columns.size) * sizeof(Acc));
}

template <bool kSource>
void gatv2_backward(const Gatv2Backward& p, int64_t row_begin, int64_t row_end, void* grad_att) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    with_grad<T>(p.grad, p.out_acc, [&](const auto* grad) {
      gatv2_backward_rows<T, std::decay_t<decltype(*grad)>, kSource>(
          p, grad, row_begin, row_end, static_cast<acc_t<T>*>(grad_att));
    });
  });
}

void gatv2(const Gatv2& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    gatv2_rows<typename decltype(type)::type>(p, row_begin, row_end);
  });
}

void gatv2_backward_dst(const Gatv2Backward& p, int64_t row_begin, int64_t row_end,
                        void* grad_att) {
  gatv2_backward<false>(p, row_begin, row_end, grad_att);
}

void gatv2_backward_src(const Gatv2Backward& p, int64_t row_begin, int64_t row_end) {
  gatv2_backward<true>(p, row_begin, row_end, nullptr);
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(gatv2, (const Gatv2& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(gatv2_backward_dst,
                (const Gatv2Backward& p, int64_t row_begin, int64_t row_end, void* grad_att),
                (p, row_begin, row_end, grad_att))
PYG_FAST_KERNEL(gatv2_backward_src, (const Gatv2Backward& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
