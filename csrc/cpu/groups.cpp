#include "params/groups.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "ids.h"

namespace pyg_fast::cpu {

void count_groups(const CountGroups& p) {
  with_index(p.index64, [&](auto index) {
    p.first[0] = p.longs[0] = 0;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const int64_t count = groups_of_row<decltype(index)>(p, row);
      p.first[row + 1] = p.first[row] + count;
      p.longs[row + 1] = p.longs[row] + (count > 1);
    }
  });
}

void group_edges(const GroupEdges& p, int64_t begin, int64_t end) {
  with_index(p.index64, [&](auto index) {
    using I = decltype(index);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t group = p.first[row]; group < p.first[row + 1] && group < p.num_groups;
           ++group) {
        write_group<I>(p, group, row);
      }
    }
    if (end == p.num_rows) write_ends<I>(p);
  });
}

void order_groups(const OrderGroups& p) {
  with_index(p.index64, [&](auto index) {
    using I = decltype(index);
    std::vector<uint16_t> key(p.num_groups);
    for (int64_t group = 0; group < p.num_groups; ++group) key[group] = order_key<I>(p, group);
    I* const order = static_cast<I*>(p.order);
    std::iota(order, order + p.num_groups, I(0));
    std::stable_sort(order, order + p.num_groups, [&](I a, I b) { return key[a] < key[b]; });
  });
}

}  // namespace pyg_fast::cpu
