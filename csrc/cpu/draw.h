// Draws edges of a row on a CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "params/draw.h"

namespace pyg_fast::cpu {

// The set of numbers drawn for a row.
class Taken {
 public:
  // Clears the set for at most `count` numbers.
  void clear(int64_t count) {
    numbers_.clear();
    if (count <= kFew) return;
    size_t slots = 16;
    while (slots < static_cast<size_t>(2 * count)) slots *= 2;
    slots_.assign(slots, -1);
  }

  // Adds a number; returns whether it is new.
  bool add(int64_t number, int64_t count) {
    if (count <= kFew) {
      if (std::find(numbers_.begin(), numbers_.end(), number) != numbers_.end()) return false;
      numbers_.push_back(number);
      return true;
    }
    const size_t last = slots_.size() - 1;
    size_t slot = static_cast<size_t>(mixed64(static_cast<uint64_t>(number))) & last;
    for (; slots_[slot] != -1; slot = (slot + 1) & last) {
      if (slots_[slot] == number) return false;
    }
    slots_[slot] = number;
    return true;
  }

 private:
  static constexpr int64_t kFew = 48;
  std::vector<int64_t> numbers_, slots_;
};

// Memory that the draws of all rows of a thread share.
struct Draws {
  Taken taken;
  std::vector<std::pair<double, int64_t>> keys;
};

// Calls emit(k, position) for the `count` edges to draw of a row.
template <typename Emit>
void draw(const DrawRow& row, int64_t count, Draws& draws, const Emit& emit) {
  if (row.replace && row.fanout >= 0) {
    for (int64_t k = 0; k < count; ++k) emit(k, drawn_again(row, k));
  } else if (count == row.degree) {
    for (int64_t k = 0; k < count; ++k) emit(k, row.begin + k);
  } else if (row.weight) {
    // Takes the smallest keys -log(u) / weight (Efraimidis and Spirakis).
    auto& keys = draws.keys;
    keys.clear();
    for (int64_t e = 0; e < row.degree; ++e) {
      const double weight = row.weight[row.begin + e];
      if (weight > 0) keys.emplace_back(-std::log(random_unit(row.bits(e))) / weight, e);
    }
    std::partial_sort(keys.begin(), keys.begin() + count, keys.end());
    for (int64_t k = 0; k < count; ++k) emit(k, row.begin + keys[static_cast<size_t>(k)].second);
  } else {
    // Floyd's algorithm.
    draws.taken.clear(count);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t last = row.degree - count + k;
      int64_t chosen = random_below(row.bits(k), last + 1);
      if (!draws.taken.add(chosen, count)) draws.taken.add(chosen = last, count);
      emit(k, row.begin + chosen);
    }
  }
}

}  // namespace pyg_fast::cpu
