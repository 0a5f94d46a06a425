#include "params/join_edges.h"

#include <vector>

#include "stable.h"

namespace pyg_fast {
namespace {

// Row k of a matrix of int64 with at least so many columns.
const int64_t* row_of(const Tensor& t, const char* name, int64_t k, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) >= columns && t.is_contiguous(), name, " must have ",
                  columns, " columns and be contiguous");
  STD_TORCH_CHECK(k >= 0 && k < t.size(0), name, " must have a row ", k);
  check_type(t, name, ScalarType::Long);
  return static_cast<const int64_t*>(t.const_data_ptr()) + k * t.size(1);
}

// Raises unless all graphs lie within the rows of the dataset and of the batch, both on the host.
void check_graphs(const char* name, const int64_t* start, const int64_t* ptr, int64_t num_graphs,
                  int64_t rows, int64_t total) {
  for (int64_t g = 0; g < num_graphs; ++g) {
    const int64_t count = ptr[g + 1] - ptr[g];
    STD_TORCH_CHECK(ptr[g] >= 0 && count >= 0 && start[g] >= 0 && start[g] + count <= rows,
                    "graph ", g, " has ", name, " outside of the dataset");
  }
  STD_TORCH_CHECK(ptr[num_graphs] <= total && total <= INT32_MAX, "the batch must have from ",
                  ptr[num_graphs], " to 2^31 - 1 ", name, ", got ", total);
}

// The numbers of the graphs of a batch, as ops take them.
class Graphs {
 public:
  Graphs(const Tensor& start, const Tensor& ptr, const std::vector<int64_t>& num_rows)
      : start_(start), ptr_(ptr), num_rows_(num_rows) {
    STD_TORCH_CHECK(start.dim() == 2, "start must have two dimensions, got ", start.dim());
    check_device(ptr, "ptr", start);
    STD_TORCH_CHECK(static_cast<int64_t>(num_rows.size()) == start.size(0),
                    "num_rows must have a number for each row of start");
  }

  int64_t count() const { return start_.size(1); }

  const int64_t* ptr(int64_t level) const { return row_of(ptr_, "ptr", level, count() + 1); }

  // A task for the rows of a level.
  TakeTask task(int64_t level) const {
    TakeTask t;
    t.start = row_of(start_, "start", level, count());
    t.ptr = ptr(level);
    t.num_rows = num_rows_[level];
    STD_TORCH_CHECK(t.num_rows >= 0, "num_rows must not be negative");
    if (!start_.is_cuda()) check_rows(t);
    return t;
  }

 private:
  void check_rows(const TakeTask& t) const {
    for (int64_t g = 0; g < count(); ++g) {
      STD_TORCH_CHECK(t.start[g] >= 0 && t.ptr[g] <= t.ptr[g + 1], "graph ", g,
                      " has invalid rows");
    }
    STD_TORCH_CHECK(t.ptr[0] == 0 && t.ptr[count()] == t.num_rows, "ptr must end with ",
                    t.num_rows);
  }

  const Tensor& start_;
  const Tensor& ptr_;
  const std::vector<int64_t>& num_rows_;
};

// The widest words that divide rows of so many bytes at this address.
int8_t word_bytes_of(const void* rows, int64_t bytes) {
  int64_t word = 16;
  while (word > 1 && (bytes % word != 0 || reinterpret_cast<uintptr_t>(rows) % word != 0))
    word /= 2;
  return static_cast<int8_t>(word);
}

// A task that takes the rows of an attribute; adds its result to `outs`.
TakeTask take_of(const Graphs& graphs, const Tensor& rows, int64_t level, int64_t shift,
                 const Tensor& on, std::vector<Tensor>& outs) {
  STD_TORCH_CHECK(rows.dim() >= 1 && rows.is_contiguous(),
                  "rows must be contiguous tensors with a first dimension");
  TakeTask t = graphs.task(level);
  const auto element = static_cast<int64_t>(rows.element_size());
  std::vector<int64_t> size{t.num_rows};
  int64_t numbers = 1;
  for (int64_t d = 1; d < rows.dim(); ++d) {
    size.push_back(rows.size(d));
    numbers *= rows.size(d);
  }
  STD_TORCH_CHECK(rows.size(0) > 0 || t.num_rows * numbers == 0, "rows must not be empty");
  t.last = rows.size(0) - 1;
  outs.push_back(allocated(on, Sizes(size.data(), size.size()), element, [&] {
    return torch::stable::new_empty(on, Sizes(size.data(), size.size()), rows.scalar_type());
  }));
  t.rows = static_cast<const char*>(rows.const_data_ptr());
  t.out = static_cast<char*>(outs.back().mutable_data_ptr());
  if (shift < 0) {
    t.word_bytes = word_bytes_of(t.rows, numbers * element);
    t.words = numbers * element / t.word_bytes;
    return t;
  }
  t.take = is_index64(rows, "rows with a shift") ? Take::shift64 : Take::shift32;
  t.shift = graphs.ptr(shift);
  t.word_bytes = static_cast<int8_t>(element);
  t.words = numbers;
  return t;
}

template <bool kCuda>
void run(const TakeRows& p, const Tensor& on) {
  if constexpr (kCuda) {
    Launch launch(on);
    launch.check(cuda::take_rows(p, launch.stream()), "take_rows");
  } else {
    int64_t bytes = 0;
    for (int k = 0; k < p.num_tasks; ++k) {
      bytes += p.task[k].num_rows * p.task[k].words * p.task[k].word_bytes;
    }
    share_rows(p.num_graphs, bytes / 8,
               [&](int64_t begin, int64_t end) { cpu::take_rows(p, begin, end); });
  }
}

// Tensors of `rows` may be in host memory that the device of `start` reads; the caller ensures this.
template <bool kCuda>
std::vector<Tensor> take_rows(const Tensor& start, const Tensor& ptr, std::vector<Tensor> rows,
                              std::vector<int64_t> level, std::vector<int64_t> shift,
                              std::vector<int64_t> owner, std::vector<int64_t> is_real,
                              std::vector<int64_t> num_rows, int64_t num_real) {
  STD_TORCH_CHECK(level.size() == rows.size() && shift.size() == rows.size(),
                  "level and shift must have a number for each tensor of rows");
  const Graphs graphs(start, ptr, num_rows);
  STD_TORCH_CHECK(num_real >= 0 && num_real <= graphs.count(), "num_real must be from 0 to ",
                  graphs.count());
  std::vector<Tensor> outs;
  TakeRows p;
  p.num_graphs = graphs.count();
  p.num_real = num_real;
  const auto add = [&](const TakeTask& task) {
    if (p.num_tasks == kMostTasks) {
      run<kCuda>(p, start);
      p.num_tasks = 0;
    }
    p.task[p.num_tasks++] = task;
  };
  for (size_t k = 0; k < rows.size(); ++k) {
    add(take_of(graphs, rows[k], level[k], shift[k], start, outs));
  }
  const auto add_of_level = [&](int64_t at, Take take, ScalarType type) {
    TakeTask t = graphs.task(at);
    t.take = take;
    outs.push_back(empty(start, {t.num_rows}, type));
    t.out = static_cast<char*>(outs.back().mutable_data_ptr());
    t.word_bytes = static_cast<int8_t>(bytes_of(type));
    add(t);
  };
  for (const int64_t at : owner) add_of_level(at, Take::owner, ScalarType::Long);
  for (const int64_t at : is_real) add_of_level(at, Take::is_real, ScalarType::Bool);
  if (p.num_tasks > 0) run<kCuda>(p, start);
  return outs;
}

// `ends` and `rowptr` may be in host memory that the device of `start` reads; the caller ensures this.
template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor> join_edges(const Tensor& ends, const Tensor& rowptr,
                                                      const Tensor& start, const Tensor& ptr,
                                                      const OptTensor& ring,
                                                      const OptTensor& ring_rowptr,
                                                      int64_t num_graphs, int64_t num_nodes,
                                                      int64_t num_edges) {
  check_matrix(ends, "ends", ends.size(0), 4);
  check_matrix(rowptr, "rowptr", rowptr.size(0), 2);
  check_type(ends, "ends", ScalarType::Int);
  check_type(rowptr, "rowptr", ScalarType::Int);
  check_device(ptr, "ptr", start);
  STD_TORCH_CHECK(ends.is_contiguous() && rowptr.is_contiguous(),
                  "ends and rowptr must be contiguous");
  STD_TORCH_CHECK(num_graphs >= 0, "num_graphs must not be negative");
  // Rows of `start` and `ptr`: those of graphs come before.
  constexpr int64_t kNodes = 1, kEdges = 2;
  JoinEdges p;
  p.num_graphs = num_graphs;
  p.num_nodes = num_nodes;
  p.num_edges = num_edges;
  p.ends = static_cast<const int32_t*>(ends.const_data_ptr());
  p.rowptr = static_cast<const int32_t*>(rowptr.const_data_ptr());
  p.node_start = row_of(start, "start", kNodes, num_graphs);
  p.edge_start = row_of(start, "start", kEdges, num_graphs);
  p.node_ptr = row_of(ptr, "ptr", kNodes, num_graphs + 1);
  p.edge_ptr = row_of(ptr, "ptr", kEdges, num_graphs + 1);
  STD_TORCH_CHECK(ring.has_value() == ring_rowptr.has_value(),
                  "ring and ring_rowptr must both be given");
  if (ring) {
    check_matrix(*ring, "ring", 4, num_edges);
    check_matrix(*ring_rowptr, "ring_rowptr", 2, num_nodes + 1);
    STD_TORCH_CHECK(ring->is_contiguous() && ring_rowptr->is_contiguous(),
                    "ring and ring_rowptr must be contiguous");
    for (const OptTensor& t : {ring, ring_rowptr}) {
      check_type(t, "ring", ScalarType::Int);
      check_device(t, "ring", start);
    }
    p.ring = static_cast<const int32_t*>(ring->const_data_ptr());
    p.ring_rowptr = static_cast<const int32_t*>(ring_rowptr->const_data_ptr());
  }
  if constexpr (!kCuda) {
    check_graphs("nodes", p.node_start, p.node_ptr, num_graphs, rowptr.size(0), num_nodes);
    check_graphs("edges", p.edge_start, p.edge_ptr, num_graphs, ends.size(0), num_edges);
  }
  Tensor edges = empty(start, {4, num_edges}, ScalarType::Int);
  Tensor out_rowptr = empty(start, {2, num_nodes + 1}, ScalarType::Int);
  Tensor edge_index = empty(start, {2, num_edges}, ScalarType::Long);
  Tensor indptr = empty(start, {num_nodes + 1}, ScalarType::Long);
  p.edges = static_cast<int32_t*>(edges.mutable_data_ptr());
  p.out_rowptr = static_cast<int32_t*>(out_rowptr.mutable_data_ptr());
  p.edge_index = static_cast<int64_t*>(edge_index.mutable_data_ptr());
  p.indptr = static_cast<int64_t*>(indptr.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(start);
    launch.check(cuda::join_edges(p, launch.stream()), "join_edges");
  } else {
    share_rows(num_graphs, 2 * num_edges + num_nodes,
               [&](int64_t begin, int64_t end) { cpu::join_edges(p, begin, end); });
    for (int64_t k = p.node_ptr[num_graphs]; k <= num_nodes; ++k) write_end(p, k);
    for (int64_t k = p.edge_ptr[num_graphs]; p.ring && k < num_edges; ++k) write_ring(p, k);
  }
  return {edges, out_rowptr, edge_index, indptr};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Results of a batch of graphs, level by level, such as nodes; row l of `start` and `ptr` is level l: for
  // each tensor of `rows` the rows of the batch, plus the first rows of the graphs at level `shift` (-1:
  // unchanged); for each level of `owner` the graph of each row, of `is_real` whether it is one of the first
  // `num_real`.
  m.def(
      "take_rows(Tensor start, Tensor ptr, Tensor[] rows, int[] level, int[] shift, int[] owner, "
      "int[] is_real, int[] num_rows, int num_real) -> Tensor[]");
  // The edges of a batch of graphs and the first edge of each of its nodes, both by destination and by
  // source, from those of a dataset; then sources and destinations, and the first edges by destination, as
  // int64. What follows the last graph is that of `ring` and `ring_rowptr`; without them it is not written in
  // lists of edges. Levels 1 and 2 of `start` and `ptr` are those of nodes and edges.
  m.def(
      "join_edges(Tensor ends, Tensor rowptr, Tensor start, Tensor ptr, Tensor? ring, "
      "Tensor? ring_rowptr, int num_graphs, int num_nodes, int num_edges) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(take_rows)
PYG_FAST_IMPL(join_edges)
