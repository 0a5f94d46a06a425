#include "params/neighbor_sample.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ids.h"

namespace pyg_fast::cpu {
namespace {

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

template <typename I>
class Row {
 public:
  Row(const SampleHop& p, int64_t node) : p_(p), node_(node), id_(p.n_id[node]) {
    const I* rowptr = static_cast<const I*>(p.graph.rowptr) + id_;
    begin_ = rowptr[0];
    degree_ = rowptr[1] - begin_;
  }

  // The number of edges to take.
  int64_t wanted() const {
    if (p_.fanout < 0 || degree_ == 0) return degree_;
    if (p_.replace) {
      if (!p_.weight) return p_.fanout;
      const double before = begin_ == 0 ? 0 : p_.weight[begin_ - 1];
      return p_.weight[begin_ + degree_ - 1] > before ? p_.fanout : 0;
    }
    if (!p_.weight) return std::min(degree_, p_.fanout);
    int64_t count = 0;  // edges that may be drawn
    for (int64_t e = begin_; e < begin_ + degree_ && count < p_.fanout; ++e) {
      count += p_.weight[e] > 0;
    }
    return count;
  }

  void draw(Taken& taken, std::vector<std::pair<double, int64_t>>& keys) const {
    const int64_t start = p_.rowptr[node_], count = p_.rowptr[node_ + 1] - start;
    const auto bits = [&](int64_t k) {
      return random_bits(p_.seed, static_cast<uint64_t>(id_), static_cast<uint64_t>(k));
    };
    if (p_.replace && p_.fanout >= 0) {
      for (int64_t k = 0; k < count; ++k) {
        emit(start + k, p_.weight ? drawn_edge(p_.weight, begin_, begin_ + degree_, bits(k))
                                  : begin_ + random_below(bits(k), degree_));
      }
    } else if (count == degree_) {
      for (int64_t k = 0; k < count; ++k) emit(start + k, begin_ + k);
    } else if (p_.weight) {
      // Takes the smallest keys -log(u) / weight (Efraimidis and Spirakis).
      keys.clear();
      for (int64_t e = 0; e < degree_; ++e) {
        const double weight = p_.weight[begin_ + e];
        if (weight > 0) keys.emplace_back(-std::log(random_unit(bits(e))) / weight, e);
      }
      std::partial_sort(keys.begin(), keys.begin() + count, keys.end());
      for (int64_t k = 0; k < count; ++k) {
        emit(start + k, begin_ + keys[static_cast<size_t>(k)].second);
      }
    } else {
      // Floyd's algorithm.
      taken.clear(count);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t last = degree_ - count + k;
        int64_t chosen = random_below(bits(k), last + 1);
        if (!taken.add(chosen, count)) taken.add(chosen = last, count);
        emit(start + k, begin_ + chosen);
      }
    }
  }

 private:
  void emit(int64_t e, int64_t position) const {
    static_cast<I*>(p_.neighbor)[e] = static_cast<I>(column(p_.graph, position));
    p_.dst[e] = static_cast<int32_t>(node_);
    p_.e_id[e] = p_.graph.perm ? static_cast<const I*>(p_.graph.perm)[position] : position;
  }

  const SampleHop& p_;
  int64_t node_, id_, begin_, degree_;
};

}  // namespace

void begin_sample(const SampleHop& p, const int64_t* seeds, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    p.n_id[k] = seeds[k];
    p.local[k] = static_cast<int32_t>(k);
    insert(p.map, seeds[k], k);
  }
}

void sample_counts(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    const I* rowptr = static_cast<const I*>(p.graph.rowptr);
    for (int64_t node = begin; node < end; ++node) {
      if (node + kAhead < end) __builtin_prefetch(rowptr + p.n_id[node + kAhead]);
      p.rowptr[node + 1] = static_cast<int32_t>(Row<I>(p, node).wanted());
    }
  });
}

void sample_neighbors(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    using I = decltype(index);
    const I* rowptr = static_cast<const I*>(p.graph.rowptr);
    const char* col = static_cast<const char*>(p.graph.col);
    const int64_t width = p.graph.col64 ? 8 : 4;
    Taken taken;
    std::vector<std::pair<double, int64_t>> keys;
    for (int64_t node = begin; node < end; ++node) {
      if (node + kAhead < end) __builtin_prefetch(rowptr + p.n_id[node + kAhead]);
      if (node + kAhead / 4 < end) __builtin_prefetch(col + width * rowptr[p.n_id[node + kAhead / 4]]);
      Row<I>(p, node).draw(taken, keys);
    }
  });
}

void insert_sources(const SampleHop& p, int64_t begin, int64_t end) {
  with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
            [&](int64_t e) { insert(p.map, neighbor[e], p.num_seeds + e); });
  });
}

int64_t count_new(const SampleHop& p, int64_t begin, int64_t end) {
  return with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    int64_t count = 0;
    for_ids(p.map, begin, end, [&](int64_t e) { return neighbor[e]; },
            [&](int64_t e) { count += find(p.map, neighbor[e]) == p.num_seeds + e; });
    return count;
  });
}

int64_t append_nodes(const SampleHop& p, int64_t begin, int64_t end, int64_t node) {
  with_index(p.graph.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(p.map, begin, end, [&](int64_t e) { return neighbor[e]; }, [&](int64_t e) {
      if (find(p.map, neighbor[e]) != p.num_seeds + e) return;
      p.local[p.num_seeds + e] = static_cast<int32_t>(node);
      p.n_id[node++] = neighbor[e];
    });
  });
  return node;
}

void take_edges(const TakeSample& p, int64_t begin, int64_t end) {
  with_index(p.index64, [&](auto index) {
    const auto* neighbor = static_cast<const decltype(index)*>(p.neighbor);
    for_ids(p.map, begin, end, [&](int64_t e) { return neighbor[e]; }, [&](int64_t e) {
      const int32_t source = p.local[find(p.map, neighbor[e])];
      p.out_col[e] = source;
      p.out_src[e] = source;
      p.out_dst[e] = p.dst[e];
      p.out_e_id[e] = p.e_id[e];
    });
  });
}

void take_nodes(const TakeSample& p, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    p.out_n_id[k] = p.n_id[k];
    p.out_rowptr[k] = k < p.num_rows ? p.rowptr[k] : static_cast<int32_t>(p.num_edges);
  }
  if (end == p.num_nodes) p.out_rowptr[end] = static_cast<int32_t>(p.num_edges);
}

}  // namespace pyg_fast::cpu
