// The softmax of the scores of a row, and its gradient.
#pragma once
#include "long_sums.h"
#include "slots.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

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
  const Bits normal = ~(x < E::kLeast);  // also true for NaN
  x = x < E::kLeast ? splat<V>(E::kLeast) : x;
  x = x > E::kMost ? splat<V>(E::kMost) : x;
  const auto rounded = x * E::kLog2e + E::kRound;  // the low bits hold the integer
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
  const auto power =
      (bit_cast<Bits>(rounded) << E::kMantissa) + (mask_t<Acc>{E::kBias} << E::kMantissa);
  return masked<Acc, V>(sum * bit_cast<Vec<Acc, V>>(power), normal);
}

// The score to which exponentials of a row are relative, after `before` for earlier ones: the largest score
// so far or, lest sums are scaled again and again, one that is less by at most 4.
template <typename Acc, int V>
PYG_FAST_INLINE Vec<Acc, V> new_base(Vec<Acc, V> before, Vec<Acc, V> most) {
  return most <= before + 4 ? before : most;
}

// The softmax of a row, block by block, relative to the largest logit so far.
template <typename Acc>
class RowSoftmax {
  static constexpr int V = kLanes<Acc>;

 public:
  RowSoftmax(const Slots<Acc>& slots, Acc slope)
      : slots_(slots),
        slope_(slope),
        max(scratch_.of_size(6 * slots.period)),
        sum(max + slots.period),
        plus(sum + slots.period),
        decay(plus + slots.period),
        totals_(decay + slots.period) {}

  void start() {
    blocks_ = 0;
    for (int64_t k = 0; k < slots_.period; ++k) {
      max[k] = -__builtin_inff();
      plus[k] = 0;  // also of a row without edges
    }
  }

  // Turns the scores s of a block into weights: factor * exp(leaky(s) - max), with kSigned negative if s
  // is not positive. If `decays`, the caller must multiply earlier sums by `decay`.
  template <bool kSigned>
  void weigh(Acc* s, const Acc* factor, int64_t count) {
    for (int64_t v = 0; v < slots_.period; v += V) {
      const auto before = load<V>(max + v);
      auto most = before;
      for_slots(slots_, count, v, [&](int64_t at, auto within) PYG_FAST_ALWAYS {
        const auto logit = leaky(load<V>(s + at), slope_);
        most = ((logit > most) & within) != 0 ? logit : most;
      });
      fold<Acc, V>(most, slots_.stride, max + v, [](auto a, auto b) { return a > b ? a : b; });
      most = load<V>(max + v);
      if (blocks_ > 0) store<V>(max + v, most = new_base<Acc, V>(before, most));
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
        if (factor != nullptr) w *= load<V>(factor + at);
        store<V>(s + at, w);
      });
      store<V>(decay + v, decayed);
      add(total, decayed, sum + v, totals_ + v);
      add(positive, decayed, plus + v, totals_ + slots_.period + v);
    }
    ++blocks_;
  }

  // Whether a score is so much above those of earlier blocks that sums of these are scaled.
  bool decays() const {
    for (int64_t h = 0; h < slots_.heads; ++h) {
      if (decay[h] != 1) return true;
    }
    return false;
  }

  void finish() {
    if (blocks_ > 1) {
      add_total(sum, totals_, slots_.period);
      add_total(plus, totals_ + slots_.period, slots_.period);
    }
    fold_sums(slots_, sum);
    fold_sums(slots_, plus);
  }

 private:
  // The sums of a block, and (long_sums.h) those of earlier ones.
  PYG_FAST_INLINE void add(Vec<Acc, V> part, Vec<Acc, V> decayed, Acc* sum, Acc* total) const {
    if (blocks_ == 0) return store<V>(sum, part);
    if (blocks_ == 1) store<V>(total, Vec<Acc, V>{});
    part += load<V>(sum) * decayed;
    const auto before = load<V>(total) * decayed, after = before + part;
    store<V>(total, after);
    store<V>(sum, lost_of(part, before, after));
  }

  const Slots<Acc> slots_;
  const Acc slope_;
  Scratch<Acc> scratch_;
  int64_t blocks_ = 0;

 public:
  Acc* const max;
  Acc* const sum;
  Acc* const plus;   // the part of `sum` from positive scores
  Acc* const decay;  // factor for earlier sums after the largest logit grew

 private:
  Acc* const totals_;  // of `sum` and of `plus`
};

// Inputs of the backward for some edges, by slots. It replaces scores by the weights of their nodes'
// features, and `dot` (may be nullptr) by the score's gradient.
template <typename Acc>
struct EdgeGradients {
  Acc* score;
  const Acc* max;
  const Acc* inverse;  // of the sum of exp(logit - max)
  const Acc* G;
  Acc* dot;  // <grad, x>
  const Acc* factor;
};

// With dots: score = factor * p; total += the gradients. Without: the same, but negative if the score is
// not positive; total -= p * leaky' * G, the part of the gradients without a dot product.
template <typename Acc, bool kDots>
void weigh_backward(const Slots<Acc>& slots, const EdgeGradients<Acc>& of, Acc slope, int64_t count,
                    Acc* total) {
  constexpr int V = kLanes<Acc>;
  for (int64_t v = 0; v < slots.period; v += V) {
    Vec<Acc, V> sum = {};
    for_slots(slots, count, v, [&](int64_t at, auto within) PYG_FAST_ALWAYS {
      const auto score = load<V>(of.score + at);
      const auto p = masked<Acc, V>(
          exp_of<Acc, V>(leaky(score, slope) - load<V>(of.max + at)) * load<V>(of.inverse + at),
          within);
      const auto reach = p * load<V>(of.G + at);
      auto w = p;
      if (of.factor != nullptr) w *= load<V>(of.factor + at);
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

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
