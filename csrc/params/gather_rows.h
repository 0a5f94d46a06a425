// Parameters of the kernels that collect a mini-batch's features.
#pragma once
#include "minibatch.h"

namespace pyg_fast {

// A map with room for all of its nodes. Other ids are in no batch.
struct MapOfNodes : NodeMap {
  int64_t num_nodes = 0;

  PYG_FAST_DEVICE bool may_hold(int64_t id) const { return id >= 0 && id < num_nodes; }
};

// out[i] = the first position of n_id[i] in `previous`, or -1.
struct Match {
  MapOfNodes map;
  int64_t num_ids = 0;
  int64_t num_previous = 0;
  const int64_t* n_id = nullptr;
  const int64_t* previous = nullptr;
  int64_t* out = nullptr;
};

// A map entry holds one bit for each batch that contains its node: fewer bits than a position has.
constexpr int64_t kMostBatches = 32;

// The number of distinct ids that two batches share: count[a, b]; within one batch: count[a, a].
struct MatchDegree {
  MapOfNodes map;
  int64_t num_batches = 0;
  int64_t begin[kMostBatches + 1] = {};  // batch b is ids[begin[b]:begin[b + 1]]
  const int64_t* ids = nullptr;
  int64_t* count = nullptr;  // [num_batches, num_batches], initially zero
};

// out[i] = previous[match[i]], else cache[cache_position[index[i]]], else x[index[i]]: the first source
// that exists; zeros if none does. Rows are bytes; x may be in host memory that a GPU reads.
struct GatherRows {
  bool index64 = false;
  bool position64 = false;
  bool x_on_host = false;
  int64_t num_rows = 0;
  int64_t num_x = 0;
  int64_t num_previous = 0;
  int64_t num_cache = 0;
  int64_t row_bytes = 0;
  const void* index = nullptr;           // [num_rows]
  const int64_t* match = nullptr;        // [num_rows], or nullptr
  const void* cache_position = nullptr;  // [num_x], or nullptr
  const char* x = nullptr;
  const char* previous = nullptr;
  const char* cache = nullptr;
  char* out = nullptr;
  int64_t* counter =
      nullptr;  // [3] kernels add the numbers of rows from x, previous and cache; or nullptr
};

enum class RowOf : int8_t { x, previous, cache, none };

struct FetchedRow {
  const char* data;
  RowOf from;
};

PYG_FAST_DEVICE inline int64_t index_at(const void* index, bool index64, int64_t k) {
  return index64 ? static_cast<const int64_t*>(index)[k] : static_cast<const int32_t*>(index)[k];
}

// The source of row i.
PYG_FAST_DEVICE inline FetchedRow source_of(const GatherRows& p, int64_t i) {
  if (p.match) {
    const int64_t m = p.match[i];
    if (m >= 0 && m < p.num_previous) return {p.previous + m * p.row_bytes, RowOf::previous};
  }
  const int64_t id = index_at(p.index, p.index64, i);
  if (id < 0 || id >= p.num_x) return {nullptr, RowOf::none};
  if (p.cache_position) {
    const int64_t c = index_at(p.cache_position, p.position64, id);
    if (c >= 0 && c < p.num_cache) return {p.cache + c * p.row_bytes, RowOf::cache};
  }
  return {p.x + id * p.row_bytes, RowOf::x};
}

namespace cpu {
// First note the positions of `previous`; after all of them, match rows of the result.
void note_previous(const Match& p, int64_t begin, int64_t end);
void match(const Match& p, int64_t begin, int64_t end);

// Positions of p.ids.
void match_degree(const MatchDegree& p, int64_t begin, int64_t end);

void gather_rows(const GatherRows& p, int64_t begin, int64_t end);
}  // namespace cpu

namespace cuda {
const char* match(const Match& p, void* stream);
const char* match_degree(const MatchDegree& p, void* stream);
const char* gather_rows(const GatherRows& p, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
