// Graph attention: the score of an edge is the sum of one number for each end.
#include "attention.h"
#include "params/gat.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// The scores of a row's edges.
template <typename Acc>
struct GatScores {
  Slots<Acc> slots;
  const Acc* other;  // one number per head of the other nodes, `stride` apart
  int64_t stride;
  const Acc* alpha_edge;
  const Acc* alpha_loop;
  int64_t num_edges;

  template <typename P>
  GatScores(const P& p, const Slots<Acc>& slots, const void* other, int64_t stride)
      : slots(slots),
        other(static_cast<const Acc*>(other)),
        stride(stride),
        alpha_edge(static_cast<const Acc*>(p.alpha_edge)),
        alpha_loop(static_cast<const Acc*>(p.alpha_loop)),
        num_edges(p.csr.num_edges) {}

  bool need_ids() const { return alpha_edge != nullptr || alpha_loop != nullptr; }

  void fill(const EdgeBlocks& edges, int64_t count, const Acc* own, Acc* score) const {
    const auto of_nodes = [&](auto k, int64_t e, int64_t h) PYG_FAST_ALWAYS {
      constexpr int K = decltype(k)::value;
      return load<K>(other + edges.node[e] * stride + h) + load<K>(own + h);
    };
    const auto of_edges = [&](auto k, int64_t e, int64_t h) PYG_FAST_ALWAYS {
      const int64_t of_loop = edges.id[e] - num_edges;
      const Acc* more = of_loop < 0 ? alpha_edge : alpha_loop;
      const int64_t at = (of_loop < 0 ? edges.id[e] : of_loop) * slots.heads + h;
      const auto s = of_nodes(k, e, h);
      return more != nullptr ? s + load<decltype(k)::value>(more + at) : s;
    };
    need_ids() ? fill_slots<kLanes<Acc>>(slots.heads, slots.stride, count, score, of_edges)
               : fill_slots<kLanes<Acc>>(slots.heads, slots.stride, count, score, of_nodes);
  }
};

template <typename T>
void gat_rows(const Gat& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  const Columns columns(p);
  const Slots<Acc> slots(p.heads);
  const int64_t capacity = block_edges(slots.stride), size = slots.size(capacity + 1);
  const GatScores<Acc> scores(p, slots, p.alpha_src, p.heads);
  EdgeBlocks edges(p.csr, p.num_loops, capacity, scores.need_ids() || p.dropout > 0);
  Dropout<Acc> dropout(p, slots, capacity + 1);
  RowOutput<T> output(p, p.y_plus, columns, slots, static_cast<Acc>(p.negative_slope));
  const auto* alpha_dst = static_cast<const Acc*>(p.alpha_dst);
  auto* mass_plus = static_cast<Acc*>(p.mass_plus);
  Scratch<Acc> scratch;
  Acc* score = zeros(scratch, size + kBeyond<Acc>);
  for (int64_t row = row_begin; row < row_end; ++row) {
    output.start();
    edges.start(row);
    while (const int64_t count = edges.next()) {
      scores.fill(edges, count, alpha_dst + row * p.heads, score);
      output.add(edges.node, count, score, dropout.of(edges.id, count));
    }
    output.write(row);
    for (int64_t h = 0; mass_plus != nullptr && h < p.heads; ++h) {
      mass_plus[row * p.heads + h] = output.mass_plus(h);
    }
  }
}

void gat(const Gat& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    gat_rows<typename decltype(type)::type>(p, row_begin, row_end);
  });
}

template <typename T, typename G>
void gat_backward_destinations(const GatBackward& p, const G* grad, int64_t begin, int64_t end) {
  using Acc = acc_t<T>;
  const Columns columns(p);
  HeadDots<Acc> dots(columns);
  const int64_t heads = p.heads;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * columns.size;
    Acc* stat = static_cast<Acc*>(p.stat) + i * 4 * heads;
    Acc* grad_alpha = static_cast<Acc*>(p.grad_alpha_dst) + i * heads;
    dots.set(grad + at);
    dots.dots_of_row(static_cast<const Acc*>(p.y) + at, stat + 3 * heads);
    dots.dots_of_row(static_cast<const Acc*>(p.y_plus) + at, grad_alpha);
    for (int64_t h = 0; h < heads; ++h) {
      stat[h] = static_cast<const Acc*>(p.alpha_dst)[i * heads + h];
      stat[heads + h] = static_cast<const Acc*>(p.softmax)[i * 2 * heads + h];
      stat[2 * heads + h] = static_cast<const Acc*>(p.softmax)[(i * 2 + 1) * heads + h];
      grad_alpha[h] -= stat[3 * heads + h] * static_cast<const Acc*>(p.mass_plus)[i * heads + h];
      grad_alpha[h] *= static_cast<Acc>(1 - p.negative_slope);
    }
  }
}

void gat_backward_dst(const GatBackward& p, int64_t begin, int64_t end) {
  if (begin >= end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    with_grad<T>(p.grad, p.out_acc,
                 [&](const auto* grad) { gat_backward_destinations<T>(p, grad, begin, end); });
  });
}

// Z: sums of factor * p * grad over a source's edges. With Z the gradient of the source's score needs no
// dot product per edge: sum_e factor * p * leaky' * <grad, x> = <x, slope * Z + (1 - slope) * Z of
// positive s>.
template <typename T, typename G>
void gat_backward_rows(const GatBackward& p, const G* grad, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  const bool with_dots = p.grad_alpha_edge != nullptr || p.grad_alpha_loop != nullptr;
  const Acc slope = static_cast<Acc>(p.negative_slope);
  const int64_t heads = p.heads;
  const Columns columns(p);
  const Slots<Acc> slots(heads);
  const int64_t capacity = block_edges(slots.stride), size = slots.size(capacity + 1);
  const auto* stat = static_cast<const Acc*>(p.stat);
  const GatScores<Acc> scores(p, slots, stat, 4 * heads);
  EdgeBlocks edges(p.csr, p.num_loops, capacity, scores.need_ids() || p.dropout > 0);
  Dropout<Acc> dropout(p, slots, capacity + 1);
  HeadDots<Acc> dots(columns);
  Scratch<Acc> scratch;
  const int64_t num_sums = 2 * columns.size + slots.period;
  Acc* score = zeros(scratch, 5 * size + 2 * num_sums + 2 * slots.period);
  Acc *max = score + size, *inverse = max + size, *G_of = inverse + size, *dot = G_of + size;
  Acc *sum = dot + size, *plus = sum + columns.size, *total = plus + columns.size;
  LongSums<Acc> sums(sum, num_sums);
  Acc *of_sum = sum + 2 * num_sums, *of_plus = of_sum + slots.period;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * columns.size;
    sums.start();
    dots.set(x);
    edges.start(row);
    while (const int64_t count = edges.next()) {
      sums.next();
      scores.fill(edges, count, static_cast<const Acc*>(p.alpha_src) + row * heads, score);
      gather_slots<3>(slots, stat + heads, 4 * heads, edges.node, count, max, size);
      const Acc* factor = dropout.of(edges.id, count);
      const EdgeGradients<Acc> gradients{score, max, inverse, G_of, dot, factor};
      const Weighted<Acc> weighted{edges.node, count, score, slots.stride};
      if (!with_dots) {
        weigh_backward<Acc, false>(slots, gradients, slope, count, total);
        add_features<G, true>(columns, grad, weighted, sum, plus);
        continue;
      }
      dots.dots(grad, edges.node, count, dot, slots.stride);
      weigh_backward<Acc, true>(slots, gradients, slope, count, total);
      add_features<G, false>(columns, grad, weighted, sum, plus);
      for (int64_t e = 0; e < count; ++e) {
        const int64_t of_loop = edges.id[e] - p.csr.num_edges;
        void* out = of_loop < 0 ? p.grad_alpha_edge : p.grad_alpha_loop;
        const int64_t at = (of_loop < 0 ? edges.id[e] : of_loop) * heads;
        if (out != nullptr) {
          __builtin_memcpy(static_cast<Acc*>(out) + at, dot + e * slots.stride,
                           static_cast<size_t>(heads) * sizeof(Acc));
        }
      }
    }
    sums.end();
    fold_sums(slots, total);
    auto* grad_alpha_src = static_cast<Acc*>(p.grad_alpha_src) + row * heads;
    if (!with_dots) {
      dots.dots_of_row(sum, of_sum);
      dots.dots_of_row(plus, of_plus);
      for (int64_t h = 0; h < heads; ++h) {
        total[h] += slope * of_sum[h] + (1 - slope) * of_plus[h];
      }
    }
    __builtin_memcpy(grad_alpha_src, total, static_cast<size_t>(heads) * sizeof(Acc));
    T* grad_x = static_cast<T*>(p.grad_x) + row * columns.size;
    for_chunks<kLanes<T>>(0, columns.size, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
      store<decltype(v)::value>(grad_x + f, load<decltype(v)::value>(sum + f));
    });
  }
}

void gat_backward_src(const GatBackward& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.heads == 0) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    with_grad<T>(p.grad, p.out_acc,
                 [&](const auto* grad) { gat_backward_rows<T>(p, grad, row_begin, row_end); });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(gat, (const Gat& p, int64_t row_begin, int64_t row_end), (p, row_begin, row_end))
PYG_FAST_KERNEL(gat_backward_dst, (const GatBackward& p, int64_t begin, int64_t end),
                (p, begin, end))
PYG_FAST_KERNEL(gat_backward_src, (const GatBackward& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
