// Sums and copies of groups of neighbouring lanes.
#pragma once
#include <utility>

#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Lane I is lane F::of(I) of a, or, from V on, of b.
template <typename F, typename Acc, int V, int... I>
PYG_FAST_INLINE Vec<Acc, V> shuffled(Vec<Acc, V> a, Vec<Acc, V> b,
                                     std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, F::of(I)...);
#else
  return __builtin_shuffle(a, b, Vec<mask_t<Acc>, V>{F::of(I)...});
#endif
}

template <int G, int kFirst>
struct HalfOfGroup {
  static constexpr int of(int lane) { return lane / (G / 2) * G + lane % (G / 2) + kFirst; }
};
template <int C>
struct GroupOf {
  static constexpr int of(int lane) { return lane / C; }
};

// The groups of G lanes of a, then b, each with its halves combined by f.
template <typename Acc, int V, int G, typename F>
PYG_FAST_INLINE Vec<Acc, V> halved(Vec<Acc, V> a, Vec<Acc, V> b, const F& f) {
  using Lanes = std::make_integer_sequence<int, V>;
  return f(shuffled<HalfOfGroup<G, 0>, Acc, V>(a, b, Lanes{}),
           shuffled<HalfOfGroup<G, G / 2>, Acc, V>(a, b, Lanes{}));
}

// Groups of C lanes of the C vectors that `next` returns one after another, each combined into one
// number: V numbers.
template <typename Acc, int V, int C, int G = 1, typename Next, typename F>
PYG_FAST_INLINE Vec<Acc, V> group_folds(const Next& next, const F& f) {
  if constexpr (G == C) {
    return next();
  } else {
    const auto a = group_folds<Acc, V, C, 2 * G>(next, f);
    const auto b = group_folds<Acc, V, C, 2 * G>(next, f);
    return halved<Acc, V, 2 * G>(a, b, f);
  }
}

template <typename Acc, int V, int C, typename Next>
PYG_FAST_INLINE Vec<Acc, V> group_sums(const Next& next) {
  return group_folds<Acc, V, C>(next, [](auto a, auto b) PYG_FAST_ALWAYS { return a + b; });
}

// The first V / C lanes, each C times.
template <typename Acc, int V, int C>
PYG_FAST_INLINE Vec<Acc, V> repeated(Vec<Acc, V> v) {
  return shuffled<GroupOf<C>, Acc, V>(v, v, std::make_integer_sequence<int, V>{});
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
