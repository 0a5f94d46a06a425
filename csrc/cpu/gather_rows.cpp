#include "params/gather_rows.h"

#include <cstddef>

#include "node_map.h"

namespace pyg_fast::cpu {
namespace {

constexpr int64_t kAhead = 16;  // prefetch distance in ids

// Prefetches the map's entry or, in a hashed map, the slot where probing starts.
void prefetch_entry(const MapOfNodes& map, int64_t id) {
  if (map.key) __builtin_prefetch(map.key + first_slot(map, id));
  else if (map.may_hold(id)) __builtin_prefetch(map.entry + id);
}

// Records that an id is in a batch; returns the bits of the batches recorded before.
uint32_t note_batch(const NodeMap& map, int64_t id, uint32_t bit) {
  uint64_t* entry = map.entry + slot_of<true>(map, id);
  uint64_t held = __atomic_load_n(entry, __ATOMIC_RELAXED);
  for (;;) {
    const uint32_t batches =
        (held & ~kPositionMask) == map.stamp ? static_cast<uint32_t>(held & kPositionMask) : 0;
    if (batches & bit) return batches;
    if (__atomic_compare_exchange_n(entry, &held, map.stamp | batches | bit, true, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return batches;
    }
  }
}

void add_counts(const GatherRows& p, const int64_t (&found)[4]) {
  if (!p.counter) return;
  for (int k = 0; k < 3; ++k) __atomic_fetch_add(p.counter + k, found[k], __ATOMIC_RELAXED);
}

// Copies rows of `bytes` bytes, which fit one or two registers, all from x.
template <int64_t bytes, typename I>
void copy_short_rows(const GatherRows& p, int64_t begin, int64_t end) {
  const auto* index = static_cast<const I*>(p.index);
  int64_t found[4] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto id = static_cast<int64_t>(index[i]);
    char* out = p.out + i * bytes;
    const bool there = static_cast<uint64_t>(id) < static_cast<uint64_t>(p.num_x);
    if (there) __builtin_memcpy(out, p.x + id * bytes, bytes);
    else __builtin_memset(out, 0, bytes);
    found[0] += there;
  }
  add_counts(p, found);
}

template <int64_t bytes>
void copy_short_rows(const GatherRows& p, int64_t begin, int64_t end) {
  if (p.index64) copy_short_rows<bytes, int64_t>(p, begin, end);
  else copy_short_rows<bytes, int32_t>(p, begin, end);
}

void copy_rows(const GatherRows& p, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64, kMostLines = 8, kRowsAhead = 6;
  const auto size = static_cast<size_t>(p.row_bytes);
  const int64_t prefetched = p.row_bytes < kMostLines * kLine ? p.row_bytes : kMostLines * kLine;
  int64_t found[4] = {};
  for (int64_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < end) {
      const char* next = source_of(p, i + kRowsAhead).data;
      for (int64_t c = 0; c < prefetched; c += kLine) __builtin_prefetch(next + c);
    }
    const FetchedRow row = source_of(p, i);
    char* out = p.out + i * p.row_bytes;
    if (row.data) __builtin_memcpy(out, row.data, size);
    else __builtin_memset(out, 0, size);
    ++found[static_cast<int>(row.from)];
  }
  add_counts(p, found);
}

}  // namespace

void note_previous(const Match& p, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (k + kAhead < end) prefetch_entry(p.map, p.previous[k + kAhead]);
    if (p.map.may_hold(p.previous[k])) insert(p.map, p.previous[k], k);
  }
}

void match(const Match& p, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (k + kAhead < end) prefetch_entry(p.map, p.n_id[k + kAhead]);
    p.out[k] = p.map.may_hold(p.n_id[k]) ? find(p.map, p.n_id[k]) : kNotFound;
  }
}

void match_degree(const MatchDegree& p, int64_t begin, int64_t end) {
  for (int64_t batch = 0; batch < p.num_batches; ++batch) {
    const int64_t first = begin > p.begin[batch] ? begin : p.begin[batch];
    const int64_t last = end < p.begin[batch + 1] ? end : p.begin[batch + 1];
    int64_t count[kMostBatches] = {};
    for (int64_t k = first; k < last; ++k) {
      if (k + kAhead < last) prefetch_entry(p.map, p.ids[k + kAhead]);
      if (!p.map.may_hold(p.ids[k])) continue;
      const uint32_t bit = 1u << batch;
      uint32_t others = note_batch(p.map, p.ids[k], bit);
      if (others & bit) continue;  // a repeated seed
      ++count[batch];
      for (; others; others &= others - 1) ++count[__builtin_ctz(others)];
    }
    for (int64_t other = 0; other < p.num_batches; ++other) {
      if (count[other] == 0) continue;
      __atomic_fetch_add(p.count + batch * p.num_batches + other, count[other], __ATOMIC_RELAXED);
      if (other != batch) {
        __atomic_fetch_add(p.count + other * p.num_batches + batch, count[other], __ATOMIC_RELAXED);
      }
    }
  }
}

void gather_rows(const GatherRows& p, int64_t begin, int64_t end) {
  if (p.match || p.cache_position) return copy_rows(p, begin, end);
  switch (p.row_bytes) {
    case 1: return copy_short_rows<1>(p, begin, end);
    case 2: return copy_short_rows<2>(p, begin, end);
    case 4: return copy_short_rows<4>(p, begin, end);
    case 8: return copy_short_rows<8>(p, begin, end);
    case 16: return copy_short_rows<16>(p, begin, end);
    default: return copy_rows(p, begin, end);
  }
}

}  // namespace pyg_fast::cpu
