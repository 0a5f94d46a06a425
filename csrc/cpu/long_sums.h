// Long sums: a kernel adds at most kSumBlock terms one after another, then moves their sum to a total.
// What rounds off then is the first term of the next block: errors do not grow with the number of blocks.
#pragma once
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

constexpr int64_t kSumBlock = 128;

// What is lost of `part` in `after`, the rounded sum of `before` and `part`; 0 beyond finite numbers.
template <typename V>
PYG_FAST_INLINE V lost_of(V part, V before, V after) {
  const V lost = part - (after - before);
  return lost - lost == 0 ? lost : V{};
}

// total += sum. Returns the first term of the next block.
template <int V, typename Acc>
PYG_FAST_INLINE Vec<Acc, V> carry(Vec<Acc, V> sum, Acc* total) {
  const auto before = load<V>(total), after = before + sum;
  store<V>(total, after);
  return lost_of(sum, before, after);
}

// The same for n sums in memory.
template <typename Acc>
PYG_FAST_INLINE void carry(Acc* sum, Acc* total, int64_t n) {
  for_chunks<kVectorBytes / sizeof(Acc)>(0, n, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int V = decltype(v)::value;
    store<V>(sum + c, carry<V>(load<V>(sum + c), total + c));
  });
}

// sum += total, at the end.
template <typename Acc>
PYG_FAST_INLINE void add_total(Acc* sum, const Acc* total, int64_t n) {
  for_chunks<kVectorBytes / sizeof(Acc)>(0, n, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int V = decltype(v)::value;
    store<V>(sum + c, load<V>(sum + c) + load<V>(total + c));
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
