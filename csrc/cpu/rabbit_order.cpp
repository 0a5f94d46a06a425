// Rabbit Order (Arai et al., IPDPS 2016): merges nodes into communities by modularity, and numbers them
// along the merge tree.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "params/rabbit_order.h"

namespace pyg_fast::cpu {
namespace {

template <typename Index>
class CommunityMerge {
 public:
  explicit CommunityMerge(const Csr& csr)
      : num_nodes_(csr.num_rows),
        first_(num_nodes_ + 1),
        root_(num_nodes_),
        child_(num_nodes_, kNone),
        sibling_(num_nodes_, kNone),
        done_(num_nodes_),
        weight_(num_nodes_),
        merged_(num_nodes_) {
    list_neighbours(static_cast<const Index*>(csr.rowptr), static_cast<const Col*>(csr.col));
    std::iota(root_.begin(), root_.end(), Index{0});
    strength_.resize(num_nodes_);
    for (int64_t v = 0; v < num_nodes_; ++v) strength_[v] = first_[v + 1] - first_[v];
  }

  void run(int64_t* perm) {
    // Nodes of equal strength come in scattered order. In the order of a breadth-first search one
    // community would absorb node after node and move all of its edges each time.
    const auto scattered = [](Index node) {
      return static_cast<int64_t>(static_cast<uint64_t>(node) * 0x9e3779b97f4a7c15);
    };
    for (const Index node : sorted([&](Index a, Index b) {
           return strength_[a] != strength_[b] ? strength_[a] < strength_[b]
                                               : scattered(a) < scattered(b);
         })) {
      merge(node);
    }
    // Communities of large strength first; nodes without neighbours last.
    std::vector<Index> open;
    for (const Index top : sorted([&](Index a, Index b) { return strength_[a] > strength_[b]; })) {
      if (root_[top] != top) continue;
      open.push_back(top);
      while (!open.empty()) {
        const Index node = open.back();
        open.pop_back();
        *perm++ = node;
        // The list begins with the latest merge; the stack visits it last.
        for (Index c = child_[node]; c != kNone; c = sibling_[c]) open.push_back(c);
      }
    }
  }

 private:
  static constexpr Index kNone = -1;
  using Weight = std::make_unsigned_t<Index>;  // counts both directions of all edges
  struct Edge {
    Index node;
    Weight weight;
  };

  // Lists both directions of every edge except loops.
  void list_neighbours(const Index* rowptr, const Col* col) {
    const auto each = [&](const auto& visit) {
      for (int64_t row = 0; row < num_nodes_; ++row) {
        for (Index e = rowptr[row]; e < rowptr[row + 1]; ++e) {
          if (col[e] != row) visit(static_cast<Index>(row), static_cast<Index>(col[e]));
        }
      }
    };
    each([&](Index a, Index b) { ++first_[a], ++first_[b]; });
    // first_ holds the ends of the lists; filling them backwards turns the ends into begins.
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    total_ = first_[num_nodes_];
    neighbour_.resize(total_);
    each([&](Index a, Index b) {
      neighbour_[--first_[a]] = b;
      neighbour_[--first_[b]] = a;
    });
  }

  template <typename Before>
  std::vector<Index> sorted(const Before& before) const {
    std::vector<Index> order(num_nodes_);
    std::iota(order.begin(), order.end(), Index{0});
    std::stable_sort(order.begin(), order.end(), before);
    return order;
  }

  Index find_root(Index node) {
    while (root_[node] != node) node = root_[node] = root_[root_[node]];
    return node;
  }

  // Merges a community into the neighbour with the largest modularity gain, if the gain is positive.
  void merge(Index node) {
    gather(node);
    Index best = kNone;
    __int128 most = 0;
    for (const Index other : found_) {
      const __int128 gain = static_cast<__int128>(weight_[other]) * total_ -
                            static_cast<__int128>(strength_[node]) * strength_[other];
      if (gain > most || (gain == most && other < best)) best = other, most = gain;
    }
    done_[node] = true;
    if (best != kNone) {
      root_[node] = best;
      strength_[best] += strength_[node];
      sibling_[node] = child_[best];
      child_[best] = node;
      if (!done_[best]) {
        merged_[node].reserve(found_.size() - 1);
        for (const Index other : found_) {
          if (other != best) merged_[node].push_back({other, weight_[other]});
        }
      }
    }
    for (const Index other : found_) weight_[other] = 0;
    found_.clear();
  }

  // Collects in found_ the neighbouring communities of `node`, and the weights of edges to them: from its
  // own edges and from the lists of its children, without reading all members again.
  void gather(Index node) {
    const auto add = [&](Index end, Weight weight) {
      const Index other = find_root(end);
      if (other == node) return;
      if (weight_[other] == 0) found_.push_back(other);
      weight_[other] += weight;
    };
    for (int64_t e = first_[node]; e < first_[node + 1]; ++e) add(neighbour_[e], 1);
    for (Index c = child_[node]; c != kNone; c = sibling_[c]) {
      for (const Edge& edge : merged_[c]) add(edge.node, edge.weight);
      std::vector<Edge>().swap(merged_[c]);
    }
  }

  const int64_t num_nodes_;
  int64_t total_ = 0;  // sum of all strengths: twice the weight of all edges
  std::vector<int64_t> first_, strength_;
  std::vector<Index> neighbour_, root_, child_, sibling_, found_;
  std::vector<char> done_;
  std::vector<Weight> weight_;  // zero except for the nodes in found_
  std::vector<std::vector<Edge>> merged_;
};

}  // namespace

void rabbit_order(const Csr& csr, int64_t* perm) {
  csr.index64 ? CommunityMerge<int64_t>(csr).run(perm) : CommunityMerge<int32_t>(csr).run(perm);
}

}  // namespace pyg_fast::cpu
