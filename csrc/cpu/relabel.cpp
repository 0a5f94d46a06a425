#include "params/relabel.h"

#include "ids.h"

namespace pyg_fast::cpu {

void insert_ids(const Relabel& p, int64_t begin, int64_t end) {
  for_ids(
      p.map, begin, end, [&](int64_t k) { return p.ids[k]; },
      [&](int64_t k) { insert(p.map, p.ids[k], k); });
}

int64_t count_first(const Relabel& p, int64_t begin, int64_t end) {
  int64_t count = 0;
  for_ids(
      p.map, begin, end, [&](int64_t k) { return p.ids[k]; },
      [&](int64_t k) { count += find(p.map, p.ids[k]) == k; });
  return count;
}

int64_t rank_first(const Relabel& p, int64_t begin, int64_t end, int64_t rank) {
  for_ids(
      p.map, begin, end, [&](int64_t k) { return p.ids[k]; },
      [&](int64_t k) {
        if (find(p.map, p.ids[k]) != k) return;
        p.rank[k] = static_cast<int32_t>(rank);
        p.unique[rank++] = p.ids[k];
      });
  return rank;
}

void places(const Relabel& p, int64_t begin, int64_t end) {
  for_ids(
      p.map, begin, end, [&](int64_t k) { return p.ids[k]; },
      [&](int64_t k) { p.place[k] = p.rank[find(p.map, p.ids[k])]; });
}

}  // namespace pyg_fast::cpu
