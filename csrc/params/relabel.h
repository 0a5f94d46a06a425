// Local ids for arbitrary ids.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// The distinct ids, in the order of their first occurrence, and the index of each id among them.
struct Relabel {
  NodeMap map;
  int64_t num_ids = 0;
  const int64_t* ids = nullptr;  // [num_ids]
  int64_t* unique = nullptr;     // [num_ids], the first `count` are written
  int64_t* place = nullptr;      // [num_ids]
  int32_t* rank = nullptr;       // [num_ids] scratch
  int64_t* count = nullptr;      // [1]
};

namespace cpu {
// Over ids: insert them into the map; count first occurrences; give those the ranks from `rank` on and
// return the rank after the last; write the places.
void insert_ids(const Relabel& p, int64_t begin, int64_t end);
int64_t count_first(const Relabel& p, int64_t begin, int64_t end);
int64_t rank_first(const Relabel& p, int64_t begin, int64_t end, int64_t rank);
void places(const Relabel& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
int64_t relabel_scratch(const Relabel& p);
const char* relabel(const Relabel& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
