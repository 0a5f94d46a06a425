#include "params/walk.h"

#include <algorithm>

namespace pyg_fast::cpu {
namespace {

template <typename I>
void walk(const RandomWalk& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    int64_t* out = p.out + i * (p.length + 1);
    int64_t node = out[0] = p.start[i];
    for (int64_t step = 0; step < p.length; ++step) {
      const int64_t next =
          next_node<I>(p, p.start[i], node, static_cast<uint64_t>(i), static_cast<uint64_t>(step));
      if (next >= 0) node = next;
      out[step + 1] = node;
    }
  }
}

// The nodes that walks from one node visit, in order of first visit, with counts; a hash table.
class Visits {
 public:
  struct Visit {
    int64_t node;
    int32_t count;
    int32_t rank;
  };

  explicit Visits(int64_t most) {
    while (num_slots_ < 2 * most) num_slots_ *= 2;
  }

  void clear() {
    std::fill_n(slot_, num_slots_, int16_t(-1));
    size_ = 0;
  }

  void add(int64_t node) {
    auto at = static_cast<int64_t>(mixed64(static_cast<uint64_t>(node))) & (num_slots_ - 1);
    while (slot_[at] >= 0 && visit_[slot_[at]].node != node) at = (at + 1) & (num_slots_ - 1);
    if (slot_[at] < 0) {
      slot_[at] = static_cast<int16_t>(size_);
      visit_[size_] = {node, 0, size_};
      ++size_;
    }
    ++visit_[slot_[at]].count;
  }

  // Moves the `count` largest to the front; returns their number.
  int64_t select(int64_t count) {
    if (count > size_) count = size_;
    std::partial_sort(visit_, visit_ + count, visit_ + size_, [](const Visit& a, const Visit& b) {
      return a.count != b.count ? a.count > b.count : a.rank < b.rank;
    });
    return count;
  }

  const Visit& operator[](int64_t k) const { return visit_[k]; }

 private:
  int64_t num_slots_ = 16;
  int32_t size_ = 0;
  int16_t slot_[2 * kMostVisits];
  Visit visit_[kMostVisits];
};

template <typename I>
void visit(const PinsageNeighbors& p, int64_t begin, int64_t end) {
  Visits visits(p.num_walks * p.length);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t start = p.nodes[i];
    visits.clear();
    for (int64_t walk = 0; walk < p.num_walks; ++walk) {
      int64_t node = start;
      for (int64_t step = 0; step < p.length; ++step) {
        const int64_t next = next_node<I>(p, start, node, static_cast<uint64_t>(start),
                                          static_cast<uint64_t>(walk * p.length + step));
        if (next < 0) continue;
        node = next;
        if (node != start) visits.add(node);
      }
    }
    const int64_t found = visits.select(p.num_neighbors);
    for (int64_t k = 0; k < p.num_neighbors; ++k) {
      p.neighbor[i * p.num_neighbors + k] = k < found ? visits[k].node : -1;
      p.visits[i * p.num_neighbors + k] = k < found ? visits[k].count : 0;
    }
  }
}

}  // namespace

void random_walk(const RandomWalk& p, int64_t begin, int64_t end) {
  p.graph.index64 ? walk<int64_t>(p, begin, end) : walk<int32_t>(p, begin, end);
}

void pinsage_neighbors(const PinsageNeighbors& p, int64_t begin, int64_t end) {
  p.graph.index64 ? visit<int64_t>(p, begin, end) : visit<int32_t>(p, begin, end);
}

}  // namespace pyg_fast::cpu
