// Functions that the bindings of sampled mini-batches share.
#pragma once
#include <numeric>
#include <vector>

#include "cpu/node_map.h"
#include "params/minibatch.h"
#include "stable.h"

namespace pyg_fast {

// A map is int64 [1, num_nodes] or, hashed, [2, num_slots]: entries, keys.
inline NodeMap node_map_of(const Tensor& map, int64_t stamp, const Tensor& on) {
  STD_TORCH_CHECK(map.dim() == 2 && (map.size(0) == 1 || map.size(0) == 2),
                  "map must have shape [1, num_nodes] or [2, num_slots]");
  check_type(map, "map", ScalarType::Long);
  check_device(map, "map", on);
  STD_TORCH_CHECK(map.is_contiguous(), "map must be contiguous");
  STD_TORCH_CHECK(stamp >= 0 && stamp < static_cast<int64_t>(kPositionMask),
                  "stamp must be from 0 to 2^32 - 2, got ", stamp);
  NodeMap m;
  m.num_slots = map.size(1);
  m.entry = static_cast<uint64_t*>(const_cast<void*>(map.const_data_ptr()));
  if (map.size(0) == 2) {
    STD_TORCH_CHECK((m.num_slots & (m.num_slots - 1)) == 0 && m.num_slots > 0,
                    "a hashed map must have 2^n slots");
    m.key = reinterpret_cast<int64_t*>(m.entry + m.num_slots);
  }
  m.stamp = static_cast<uint64_t>(stamp) << 32;
  return m;
}

template <typename T>
T* data_of(const Tensor& t, const char* name, ScalarType type, const Tensor& on) {
  check_type(t, name, type);
  check_device(t, name, on);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}

inline int64_t* int64s(const Tensor& t, const char* name, const Tensor& on) {
  return data_of<int64_t>(t, name, ScalarType::Long, on);
}

inline int32_t* int32s(const Tensor& t, const char* name, const Tensor& on) {
  return data_of<int32_t>(t, name, ScalarType::Int, on);
}

// A graph that may be in host memory that a GPU reads.
inline Csr sampled_graph(const Tensor& rowptr, const OptTensor& col, const OptTensor& perm,
                         const OptTensor& weight) {
  Csr graph;
  graph.index64 = is_index64(rowptr, "rowptr");
  graph.col64 = col && is_index64(*col, "col");
  STD_TORCH_CHECK(graph.index64 || !graph.col64,
                  "col must be int32, or int64 where rowptr is, too");
  check_type(perm, "perm", rowptr.scalar_type());
  check_type(weight, "weight", ScalarType::Double);
  STD_TORCH_CHECK(rowptr.is_contiguous() && (!col || col->is_contiguous()) &&
                      (!perm || perm->is_contiguous()) && (!weight || weight->is_contiguous()),
                  "rowptr, col, perm and weight must be contiguous");
  graph.num_rows = graph.num_cols = rowptr.size(0) - 1;
  graph.rowptr = rowptr.const_data_ptr();
  graph.col = pointer(col);
  graph.perm = pointer(perm);
  if (col) graph.num_edges = col->size(0);
  if (col) check_vector(perm, "perm", graph.num_edges);
  if (col) check_vector(weight, "weight", graph.num_edges);
  return graph;
}

constexpr int64_t kLookup = 20;  // nanoseconds per id on a CPU

// Calls run(begin, end) for shares of [first, last).
template <typename Run>
void share(int64_t first, int64_t last, const Run& run) {
  share_rows(last - first, (last - first) * kLookup,
             [&](int64_t begin, int64_t end) { run(first + begin, first + end); });
}

// Calls list(begin, end, number) on shares of [first, last): it assigns numbers from `number` on and
// returns the next one. With several shares, count(...) runs first.
template <typename Count, typename List>
int64_t number_found(int64_t first, int64_t last, int64_t number, const Count& count,
                     const List& list) {
  const int64_t shares = num_threads(), total = last - first;
  if (shares == 1) return list(first, last, number);
  const auto start = [&](int64_t k) { return first + total * k / shares; };
  std::vector<int64_t> numbers(static_cast<size_t>(shares) + 1, number);
  parallel(shares, total * kLookup,
           [&](int64_t k) { numbers[static_cast<size_t>(k) + 1] = count(start(k), start(k + 1)); });
  std::partial_sum(numbers.begin(), numbers.end(), numbers.begin());
  parallel(shares, total * kLookup,
           [&](int64_t k) { list(start(k), start(k + 1), numbers[static_cast<size_t>(k)]); });
  return numbers.back();
}

}  // namespace pyg_fast
