// Linear maps of heads, and the gradients of their weight.
#include "long_sums.h"
#include "params/head_map.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

template <typename T>
void head_map_rows(const HeadMap& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  Scratch<Acc> scratch;
  Acc* blocks = scratch.of_size(p.heads * p.in * p.out);  // [heads, in, out]
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t i = 0; i < p.in; ++i) {
      for (int64_t o = 0; o < p.out; ++o) {
        blocks[(h * p.in + i) * p.out + o] =
            load_one(static_cast<const T*>(p.weight) + p.weight_at(h, i, o));
      }
    }
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t head = row * p.heads + h;
      const T* x = static_cast<const T*>(p.x) + head * p.in;
      const T* other = p.other ? static_cast<const T*>(p.other) + head * p.out : nullptr;
      T* y = static_cast<T*>(p.y) + head * p.out;
      const Acc* block = blocks + h * p.in * p.out;
      for_chunks<kLanes<T>>(0, p.out, [&](auto v, int64_t o) PYG_FAST_ALWAYS {
        constexpr int V = decltype(v)::value;
        Vec<Acc, V> sum = {};
        for (int64_t i = 0; i < p.in; ++i) sum += load_one(x + i) * load<V>(block + i * p.out + o);
        if (other) sum += load<V>(other + o);
        store<V>(y + o, sum);
      });
    }
  }
}

void head_map(const HeadMap& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end) return;
  with_types(p.dtype, false, [&](auto type, auto) {
    head_map_rows<typename decltype(type)::type>(p, row_begin, row_end);
  });
}

// ROWS rows are added at once.
template <typename T, int ROWS>
PYG_FAST_INLINE void add_products(const HeadMapWeight& p, int64_t row, acc_t<T>* sum) {
  using Acc = acc_t<T>;
  const int64_t x_step = p.heads * p.features, grad_step = p.heads * p.channels;
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* x = static_cast<const T*>(p.x) + row * x_step + h * p.features;
    const T* grad = static_cast<const T*>(p.grad) + row * grad_step + h * p.channels;
    for_chunks<kLanes<T>>(0, p.channels, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
      constexpr int V = decltype(v)::value;
      Vec<Acc, V> g[ROWS];
      PYG_FAST_UNROLL
      for (int u = 0; u < ROWS; ++u) g[u] = load<V>(grad + u * grad_step + c);
      for (int64_t d = 0; d < p.features; ++d) {
        Acc* to = sum + (d * p.heads + h) * p.channels + c;
        Vec<Acc, V> total = load<V>(to);
        PYG_FAST_UNROLL
        for (int u = 0; u < ROWS; ++u) total += load_one(x + u * x_step + d) * g[u];
        store<V>(to, total);
      }
    });
  }
}

void head_map_weight(const HeadMapWeight& p, int64_t row_begin, int64_t row_end, void* sum) {
  constexpr int kRows = 4;
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    using Acc = acc_t<T>;
    const int64_t count = p.features * p.heads * p.channels;
    Scratch<Acc> scratch;
    Acc* to = scratch.of_size(2 * count);
    LongSums<Acc> sums(to, count);
    sums.start();
    for (int64_t row = row_begin; row < row_end;) {
      // The total of many numbers is read again for each block.
      const int64_t stop = row_end - row > 2 * kSumBlock ? row + 2 * kSumBlock : row_end;
      sums.next();
      for (; row + kRows <= stop; row += kRows) add_products<T, kRows>(p, row, to);
      for (; row < stop; ++row) add_products<T, 1>(p, row, to);
    }
    sums.end();
    __builtin_memcpy(sum, to, static_cast<size_t>(count) * sizeof(Acc));
  });
}

void round_head_map_weight(const HeadMapWeight& p, const void* sum) {
  with_types(p.dtype, false, [&](auto type, auto) {
    using T = typename decltype(type)::type;
    const auto* from = static_cast<const acc_t<T>*>(sum);
    const int64_t count = p.features * p.heads * p.channels;
    for (int64_t k = 0; k < count; ++k) store_one(static_cast<T*>(p.out) + k, from[k]);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(head_map, (const HeadMap& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(head_map_weight,
                (const HeadMapWeight& p, int64_t row_begin, int64_t row_end, void* sum),
                (p, row_begin, row_end, sum))
PYG_FAST_KERNEL(round_head_map_weight, (const HeadMapWeight& p, const void* sum), (p, sum))
