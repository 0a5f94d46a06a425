// Long sums: a kernel adds at most kSumBlock terms one after another, then moves their sum to a total.
// What rounds off then is the first term of the next block: errors do not grow with the number of blocks.
#pragma once
#include <cstdlib>

#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

constexpr int64_t kSumBlock = 64;

// To count terms takes time: one of kCounted edges stands for all of them. It is another one in each group,
// lest a list with a period hides a node.
constexpr int64_t kCounted = 8;
inline int64_t counted_edge(int64_t group) {
  return group + static_cast<int64_t>(static_cast<uint64_t>(group) * 0x9e3779b97f4a7c15u >> 61);
}

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

// The same for n sums in memory. Apart from their callers: few rows are long.
template <typename Acc>
__attribute__((noinline)) void carry(Acc* sum, Acc* total, int64_t n) {
  for_chunks<kVectorBytes / sizeof(Acc)>(0, n, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int V = decltype(v)::value;
    store<V>(sum + c, carry<V>(load<V>(sum + c), total + c));
  });
}

// sum += total, at the end.
template <typename Acc>
__attribute__((noinline)) void add_total(Acc* sum, const Acc* total, int64_t n) {
  for_chunks<kVectorBytes / sizeof(Acc)>(0, n, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int V = decltype(v)::value;
    store<V>(sum + c, load<V>(sum + c) + load<V>(total + c));
  });
}

// n sums in memory, and room for n totals behind them. Calls: start, next before each block of terms, end.
template <typename Acc>
class LongSums {
 public:
  LongSums() = default;
  LongSums(Acc* sums, int64_t n) : sums_(sums), n_(n) {}

  PYG_FAST_INLINE void start() {
    blocks_ = 0;
    for_chunks<kVectorBytes / sizeof(Acc)>(0, n_, [&](auto v, int64_t k) PYG_FAST_ALWAYS {
      store<decltype(v)::value>(sums_ + k, Vec<Acc, decltype(v)::value>{});
    });
  }

  PYG_FAST_INLINE void next() {
    if (blocks_++ > 0) flush(sums_, n_, blocks_ == 2);
  }

  PYG_FAST_INLINE void end() {
    if (blocks_ > 1) add_total(sums_, sums_ + n_, n_);
  }

 private:
  __attribute__((noinline)) static void flush(Acc* sums, int64_t n, bool first) {
    if (first) __builtin_memset(sums + n, 0, static_cast<size_t>(n) * sizeof(Acc));
    carry(sums, sums + n, n);
  }

  Acc* sums_ = nullptr;
  int64_t n_ = 0, blocks_ = 0;
};

// Sums of rows [first, first + rows), of `width` numbers each, to which terms come in any order. A row
// that has many gets a total: the system gives memory for those alone.
template <typename Acc>
class ScatteredSums {
 public:
  ScatteredSums(Acc* sums, int64_t first, int64_t rows, int64_t width)
      : sums_(sums), first_(first), rows_(rows), width_(width), counts_(counts_of_.of_size(rows)) {
    __builtin_memset(counts_, 0, static_cast<size_t>(rows));
  }
  ScatteredSums(const ScatteredSums&) = delete;
  ScatteredSums& operator=(const ScatteredSums&) = delete;
  ~ScatteredSums() { std::free(totals_); }

  // Counts terms of a row. If true, `carry` must run before they are added.
  PYG_FAST_INLINE bool count(int64_t row, uint8_t terms = 1) {
    return ((counts_[row - first_] += terms) & (kHasTotal - 1)) == 0;
  }

  __attribute__((noinline)) void carry(int64_t row) {
    const int64_t at = row - first_;
    if (totals_ == nullptr) {
      totals_ = static_cast<Acc*>(std::calloc(static_cast<size_t>(rows_ * width_), sizeof(Acc)));
      if (totals_ == nullptr) throw std::bad_alloc();
    }
    counts_[at] = kHasTotal;
    PYG_FAST_ISA::carry(sums_ + at * width_, totals_ + at * width_, width_);
  }

  // Adds the totals at the end.
  void finish() {
    if (totals_ == nullptr) return;
    for (int64_t at = 0; at < rows_; ++at) {
      if (counts_[at] >= kHasTotal) add_total(sums_ + at * width_, totals_ + at * width_, width_);
    }
  }

 private:
  static constexpr uint8_t kHasTotal = kSumBlock;
  static_assert((kSumBlock & (kSumBlock - 1)) == 0 && kSumBlock <= 128,
                "the bits below are the terms of a block");

  Acc* const sums_;  // of row `first`
  const int64_t first_, rows_, width_;
  Scratch<uint8_t> counts_of_;
  uint8_t* const counts_;
  Acc* totals_ = nullptr;
};

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
