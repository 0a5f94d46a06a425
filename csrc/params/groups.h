// Groups: each row cut into pieces of at most `size` edges, the units of work of sums on a GPU.
#pragma once
#include "common.h"

namespace pyg_fast {

// Row r has max(1, ceil(degree / size)) groups, and is long if it has more than one.
struct CountGroups {
  const void* rowptr = nullptr;  // [num_rows + 1]
  bool index64 = false;
  int64_t num_rows = 0;
  int64_t size = 1;
  int64_t* first = nullptr;  // [num_rows + 1] groups of the rows before r
  int64_t* longs = nullptr;  // [num_rows + 1] long rows before r
};

struct GroupEdges {
  const void* rowptr = nullptr;  // as in CountGroups, whose results are inputs here
  bool index64 = false;
  int64_t num_rows = 0;
  int64_t size = 1;
  const int64_t* first = nullptr;
  const int64_t* longs = nullptr;
  int64_t num_groups = 0;
  int64_t num_long = 0;
  // Of the type of rowptr:
  void* ptr = nullptr;         // [num_groups + 1] first edge
  void* row = nullptr;         // [num_groups] the row, or -1 - k of long row k
  void* long_row = nullptr;    // [num_long]
  void* long_ptr = nullptr;    // [num_long + 1] first partial sum
  void* long_shift = nullptr;  // [num_long] index of the first group minus that of its partial sum
};

// The order in which a GPU processes groups: threads of a warp have groups of the same length, and no long
// one comes last. Full groups go by their place in their row: rows with ascending columns then read the
// same part of x at the same time.
struct OrderGroups {
  const void* ptr = nullptr;  // as in GroupEdges, whose results are inputs here
  const void* row = nullptr;
  const void* long_ptr = nullptr;
  const void* long_shift = nullptr;
  bool index64 = false;
  int64_t num_groups = 0;
  int64_t num_long = 0;
  int64_t size = 1;
  void* order = nullptr;  // [num_groups] of the type of ptr
};

// Groups are sorted by this number, which is the same for all lengths of 32767 or more.
template <typename I>
PYG_FAST_DEVICE inline uint16_t order_key(const OrderGroups& p, int64_t group) {
  constexpr int64_t kMost = 0x7fff;
  const auto at_most = [](int64_t v) { return v < kMost ? v : kMost; };
  const I* ptr = static_cast<const I*>(p.ptr) + group;
  const int64_t length = static_cast<int64_t>(ptr[1]) - ptr[0];
  if (length < p.size) return static_cast<uint16_t>(0xffff - at_most(length));
  const int64_t k = -1 - static_cast<int64_t>(static_cast<const I*>(p.row)[group]);
  if (k < 0 || k >= p.num_long) return 0;
  const int64_t first = static_cast<int64_t>(static_cast<const I*>(p.long_shift)[k]) +
                        static_cast<const I*>(p.long_ptr)[k];
  return static_cast<uint16_t>(at_most(group - first));
}

// Writes group `group` of row `row`; for the first group of a long row, also the row's entries of long_*.
template <typename I>
PYG_FAST_DEVICE inline void write_group(const GroupEdges& p, int64_t group, int64_t row) {
  const int64_t first = p.first[row], k = p.longs[row];
  const bool is_long = p.first[row + 1] - first > 1;
  static_cast<I*>(p.ptr)[group] =
      static_cast<I>(static_cast<const I*>(p.rowptr)[row] + (group - first) * p.size);
  static_cast<I*>(p.row)[group] = static_cast<I>(is_long ? -1 - k : row);
  if (!is_long || group != first || k >= p.num_long) return;
  static_cast<I*>(p.long_row)[k] = static_cast<I>(row);
  static_cast<I*>(p.long_ptr)[k] = static_cast<I>(first - (row - k));  // row - k rows are not long
  static_cast<I*>(p.long_shift)[k] = static_cast<I>(row - k);
}

// Writes the last entries of ptr and long_ptr.
template <typename I>
PYG_FAST_DEVICE inline void write_ends(const GroupEdges& p) {
  static_cast<I*>(p.ptr)[p.num_groups] = static_cast<const I*>(p.rowptr)[p.num_rows];
  static_cast<I*>(p.long_ptr)[p.num_long] =
      static_cast<I>(p.num_groups - (p.num_rows - p.num_long));
}

template <typename I>
PYG_FAST_DEVICE inline int64_t groups_of_row(const CountGroups& p, int64_t row) {
  const I* rowptr = static_cast<const I*>(p.rowptr) + row;
  const int64_t degree = static_cast<int64_t>(rowptr[1]) - rowptr[0];
  return degree <= p.size ? 1 : (degree - 1) / p.size + 1;
}

namespace cpu {
void count_groups(const CountGroups& p);
void group_edges(const GroupEdges& p, int64_t begin, int64_t end);  // rows
void order_groups(const OrderGroups& p);
}  // namespace cpu

namespace cuda {
int64_t count_groups_scratch(const CountGroups& p);
const char* count_groups(const CountGroups& p, void* scratch, void* stream);
const char* group_edges(const GroupEdges& p, void* stream);
int64_t order_groups_scratch(const OrderGroups& p);
const char* order_groups(const OrderGroups& p, void* scratch, void* stream);
}  // namespace cuda

}  // namespace pyg_fast
