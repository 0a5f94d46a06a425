#include <cstring>

#include "params/join_edges.h"

namespace pyg_fast::cpu {
namespace {

void copy_rows(const TakeTask& t, int64_t graph) {
  const int64_t bytes = t.words * t.word_bytes;
  const int64_t begin = t.ptr[graph], end = t.ptr[graph + 1], first = t.start[graph];
  if (begin == end || bytes == 0) return;
  if (first + end - begin <= t.last + 1) {  // No padding: rows of a graph are side by side.
    std::memcpy(t.out + begin * bytes, t.rows + first * bytes, (end - begin) * bytes);
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    std::memcpy(t.out + row * bytes, t.rows + source_row(t, graph, row) * bytes, bytes);
  }
}

template <typename Word>
void shift_rows(const TakeTask& t, int64_t graph) {
  for (int64_t row = t.ptr[graph]; row < t.ptr[graph + 1]; ++row) {
    for (int64_t word = 0; word < t.words; ++word) write_shifted<Word>(t, graph, row, word);
  }
}

void take(const TakeRows& p, const TakeTask& t, int64_t graph) {
  const int64_t begin = t.ptr[graph], count = t.ptr[graph + 1] - begin;
  switch (t.take) {
    case Take::copy: return copy_rows(t, graph);
    case Take::shift32: return shift_rows<uint32_t>(t, graph);
    case Take::shift64: return shift_rows<uint64_t>(t, graph);
    case Take::owner: {
      auto* out = reinterpret_cast<int64_t*>(t.out) + begin;
      for (int64_t k = 0; k < count; ++k) out[k] = graph;
      return;
    }
    case Take::is_real:
      if (count > 0) std::memset(t.out + begin, graph < p.num_real, count);
  }
}

}  // namespace

void take_rows(const TakeRows& p, int64_t begin, int64_t end) {
  for (int k = 0; k < p.num_tasks; ++k) {
    for (int64_t g = begin; g < end; ++g) take(p, p.task[k], g);
  }
}

void join_edges(const JoinEdges& p, int64_t begin, int64_t end) {
  for (int64_t g = begin; g < end; ++g) {
    for (int64_t e = p.edge_ptr[g]; e < p.edge_ptr[g + 1]; ++e) write_edge(p, g, e);
    for (int64_t i = p.node_ptr[g]; i < p.node_ptr[g + 1]; ++i) write_rowptr(p, g, i);
  }
}

}  // namespace pyg_fast::cpu
