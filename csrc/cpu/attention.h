// Code that the GAT and GATv2 kernels share.
#pragma once
#include "head_features.h"
#include "slots.h"
#include "softmax.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Calls f(const G*) with grad, stored as T or, with out_acc, as acc.
template <typename T, typename F>
PYG_FAST_INLINE void with_grad(const void* grad, bool out_acc, const F& f) {
  if constexpr (sizeof(T) < sizeof(acc_t<T>)) {
    if (out_acc) return f(static_cast<const acc_t<T>*>(grad));
  }
  f(static_cast<const T*>(grad));
}

// Computes the outputs of a row: the softmax of its edges, the sum of features, and the inputs of the
// backward.
template <typename T>
class RowOutput {
 public:
  using Acc = acc_t<T>;

  template <typename P>
  RowOutput(const P& p, void* y_plus, const Columns& columns, const Slots<Acc>& slots, Acc slope)
      : columns_(columns),
        slots_(slots),
        softmax_(slots, slope),
        sum_(scratch_.of_size(4 * columns.size + slots.period + kBeyond<Acc>)),
        plus_(sum_ + columns.size),
        inverse_(sum_ + 4 * columns.size),
        sums_(sum_, y_plus != nullptr ? 2 * columns.size : columns.size),
        x_(static_cast<const T*>(p.x)),
        bias_(p.bias),
        out_(p.out),
        out_acc_(p.out_acc),
        y_(static_cast<Acc*>(p.y)),
        y_plus_(static_cast<Acc*>(y_plus)),
        softmax_of_(static_cast<Acc*>(p.softmax)) {}

  void start() {
    started_ = false;
    softmax_.start();
    sums_.start();
    __builtin_memset(inverse_, 0, static_cast<size_t>(slots_.period) * sizeof(Acc));
  }

  // Adds a block of edges with their scores.
  void add(const int64_t* node, int64_t count, Acc* score, const Acc* factor) {
    const bool with_plus = y_plus_ != nullptr;
    with_plus ? softmax_.template weigh<true>(score, factor, count)
              : softmax_.template weigh<false>(score, factor, count);
    sums_.next();
    if (started_ && softmax_.decays()) {
      Acc* const end = sum_ + (y_plus_ != nullptr ? 4 : 2) * columns_.size;
      for (Acc* sum = sum_; sum < end; sum += columns_.size) {
        for (int64_t f = 0; f < columns_.size; ++f) sum[f] *= softmax_.decay[columns_.head[f]];
      }
    }
    started_ = true;
    const Weighted<Acc> edges{node, count, score, slots_.stride};
    with_plus ? add_features<T, true>(columns_, x_, edges, sum_, plus_)
              : add_features<T, false>(columns_, x_, edges, sum_, plus_);
  }

  void write(int64_t row) {
    const int64_t heads = columns_.heads;
    if (started_) {
      sums_.end();
      softmax_.finish();
      for (int64_t h = 0; h < heads; ++h) inverse_[h] = 1 / softmax_.sum[h];
    }
    for (int64_t h = 0; softmax_of_ != nullptr && h < heads; ++h) {
      softmax_of_[row * 2 * heads + h] = started_ ? softmax_.max[h] : Acc{0};
      softmax_of_[(row * 2 + 1) * heads + h] = inverse_[h];
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

  // For the row just written: the weight of edges of positive score, before dropout.
  Acc mass_plus(int64_t h) const { return softmax_.plus[h] * inverse_[h]; }

 private:
  const Columns& columns_;
  const Slots<Acc> slots_;
  RowSoftmax<Acc> softmax_;
  Scratch<Acc> scratch_;
  Acc *const sum_, *const plus_, *const inverse_;  // totals are behind the sums
  LongSums<Acc> sums_;
  const T* const x_;
  const void* const bias_;
  void* const out_;
  const bool out_acc_;
  Acc *const y_, *const y_plus_, *const softmax_of_;
  bool started_ = false;
};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
