#include <vector>

#include "bindings/minibatch.h"
#include "params/gather_rows.h"

namespace pyg_fast {
namespace {

const int64_t* ids_of(const Tensor& t, const char* name, const Tensor& on) {
  STD_TORCH_CHECK(t.dim() == 1, name, " must have one dimension, got ", t.dim());
  check_type(t, name, ScalarType::Long);
  check_device(t, name, on);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// `num_ids`: the total number of ids that the map must hold.
MapOfNodes map_of(const Tensor& map, int64_t stamp, int64_t num_nodes, int64_t num_ids,
                  const Tensor& on) {
  MapOfNodes m;
  static_cast<NodeMap&>(m) = node_map_of(map, stamp, on);
  m.num_nodes = num_nodes;
  const int64_t most = num_ids < num_nodes ? num_ids : num_nodes;
  // A hashed map needs an empty slot: otherwise probing would not end.
  STD_TORCH_CHECK(m.key ? most < m.num_slots : num_nodes <= m.num_slots, "map has ", m.num_slots,
                  " slots, too few for ", m.key ? most : num_nodes, " nodes");
  return m;
}

template <bool kCuda>
Tensor match(const Tensor& n_id_, const Tensor& previous_, const Tensor& map, int64_t stamp,
             int64_t num_nodes) {
  const Tensor n_id = to_contiguous(n_id_), previous = to_contiguous(previous_);
  Match p;
  p.n_id = ids_of(n_id, "n_id", n_id);
  p.previous = ids_of(previous, "previous", n_id);
  p.num_ids = n_id.size(0);
  p.num_previous = previous.size(0);
  STD_TORCH_CHECK(p.num_previous <= static_cast<int64_t>(kPositionMask),
                  "previous must have fewer than 2^32 ids");
  p.map = map_of(map, stamp, num_nodes, p.num_previous, n_id);
  Tensor out = empty(n_id, {p.num_ids}, ScalarType::Long);
  p.out = static_cast<int64_t*>(out.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::match(p, launch.stream()), "match");
  } else {
    cpu::start(p.map);
    share_rows(p.num_previous, p.num_previous * kLookup,
               [&](int64_t begin, int64_t end) { cpu::note_previous(p, begin, end); });
    share_rows(p.num_ids, p.num_ids * kLookup,
               [&](int64_t begin, int64_t end) { cpu::match(p, begin, end); });
  }
  return out;
}

template <bool kCuda>
Tensor match_degree(const Tensor& ids_, const Tensor& ptr_, const Tensor& map, int64_t stamp,
                    int64_t num_nodes) {
  const Tensor ids = to_contiguous(ids_), ptr = to_contiguous(ptr_);
  MatchDegree p;
  p.ids = ids_of(ids, "ids", ids);
  STD_TORCH_CHECK(!ptr.is_cuda() && ptr.dim() == 1, "ptr must be a vector in host memory");
  check_type(ptr, "ptr", ScalarType::Long);
  p.num_batches = ptr.size(0) - 1;
  STD_TORCH_CHECK(p.num_batches >= 0 && p.num_batches <= kMostBatches, "ptr must have 1 to ",
                  kMostBatches + 1, " entries, got ", ptr.size(0));
  const auto* begin = static_cast<const int64_t*>(ptr.const_data_ptr());
  for (int64_t b = 0; b <= p.num_batches; ++b) {
    p.begin[b] = begin[b];
    STD_TORCH_CHECK(begin[b] >= (b == 0 ? 0 : begin[b - 1]) && begin[b] <= ids.size(0),
                    "ptr must ascend from 0 to the number of ids");
  }
  p.map = map_of(map, stamp, num_nodes, ids.size(0), ids);
  Tensor count = empty(ids, {p.num_batches, p.num_batches}, ScalarType::Long);
  p.count = static_cast<int64_t*>(count.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(ids);
    launch.check(cuda::match_degree(p, launch.stream()), "match_degree");
  } else {
    cpu::start(p.map);
    for (int64_t k = 0; k < p.num_batches * p.num_batches; ++k) p.count[k] = 0;
    share(p.begin[0], p.begin[p.num_batches],
          [&](int64_t begin, int64_t end) { cpu::match_degree(p, begin, end); });
  }
  return count;
}

const char* rows_of(const OptTensor& rows, const char* name, const Tensor& x, const Tensor& on,
                    int64_t& num_rows) {
  if (!rows) return nullptr;
  STD_TORCH_CHECK(rows->dim() == x.dim(), name, " must have as many dimensions as x");
  for (int64_t d = 1; d < x.dim(); ++d) {
    STD_TORCH_CHECK(rows->size(d) == x.size(d), name, " must have rows of the shape of those of x");
  }
  check_type(rows, name, x.scalar_type());
  check_device(rows, name, on);
  STD_TORCH_CHECK(rows->is_contiguous(), name, " must be contiguous");
  num_rows = rows->size(0);
  return static_cast<const char*>(rows->const_data_ptr());
}

// x must be on the device of index, or in host memory that this device reads; the caller ensures this.
template <bool kCuda>
Tensor gather_rows(const Tensor& x, const Tensor& index_, const OptTensor& match_,
                   const OptTensor& previous, const OptTensor& cache_position_,
                   const OptTensor& cache, OptTensor counter) {
  if constexpr (kCuda) STD_TORCH_CHECK(index_.is_cuda(), "index must be on a CUDA device");
  const Tensor index = to_contiguous(index_);
  const OptTensor match = to_contiguous(match_), cache_position = to_contiguous(cache_position_);
  STD_TORCH_CHECK(x.dim() >= 1, "x must have one dimension at least");
  STD_TORCH_CHECK(index.dim() == 1, "index must have one dimension, got ", index.dim());
  STD_TORCH_CHECK(match.has_value() == previous.has_value(),
                  "match and previous must be given together");
  STD_TORCH_CHECK(cache_position.has_value() == cache.has_value(),
                  "cache_position and cache must be given together");
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  GatherRows p;
  p.x_on_host = index.is_cuda() && !x.is_cuda();
  if (!p.x_on_host) check_device(x, "x", index);
  p.index64 = is_index64(index, "index");
  p.num_rows = index.size(0);
  p.num_x = x.size(0);
  p.row_bytes = static_cast<int64_t>(x.element_size());
  std::vector<int64_t> size{p.num_rows};
  for (int64_t d = 1; d < x.dim(); ++d) {
    size.push_back(x.size(d));
    p.row_bytes *= x.size(d);
  }
  p.index = index.const_data_ptr();
  p.x = static_cast<const char*>(x.const_data_ptr());
  if (match) {
    check_vector(match, "match", p.num_rows);
    p.match = ids_of(*match, "match", index);
    p.previous = rows_of(previous, "previous", x, index, p.num_previous);
  }
  if (cache_position) {
    check_vector(cache_position, "cache_position", p.num_x);
    check_device(cache_position, "cache_position", index);
    p.position64 = is_index64(*cache_position, "cache_position");
    p.cache_position = pointer(cache_position);
    p.cache = rows_of(cache, "cache", x, index, p.num_cache);
  }
  if (counter) {
    check_vector(counter, "counter", 3);
    check_type(counter, "counter", ScalarType::Long);
    check_device(counter, "counter", index);
    STD_TORCH_CHECK(counter->is_contiguous(), "counter must be contiguous");
    p.counter = static_cast<int64_t*>(counter->mutable_data_ptr());
  }
  Tensor out = allocated(index, size, static_cast<int64_t>(x.element_size()),
                         [&] { return torch::stable::new_empty(index, size, x.scalar_type()); });
  p.out = static_cast<char*>(out.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(index);
    launch.check(cuda::gather_rows(p, launch.stream()), "gather_rows");
  } else {
    share_rows(p.num_rows, p.num_rows * (kLookup + p.row_bytes / 8),
               [&](int64_t begin, int64_t end) { cpu::gather_rows(p, begin, end); });
  }
  return out;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Between mini-batches: the first position of each id in `previous`, or -1; the number of distinct ids
  // that each two batches share (ids concatenated, `ptr` in host memory). `map`, `stamp`: of a NodeMap.
  m.def("match(Tensor n_id, Tensor previous, Tensor(a!) map, int stamp, int num_nodes) -> Tensor");
  m.def("match_degree(Tensor ids, Tensor ptr, Tensor(a!) map, int stamp, int num_nodes) -> Tensor");
  // Rows previous[match[i]], cache[cache_position[index[i]]] or x[index[i]], the first that exists; x may
  // be in pinned host memory. Adds the numbers of rows from x, previous and cache to counter.
  m.def(
      "gather_rows(Tensor x, Tensor index, Tensor? match, Tensor? previous, Tensor? cache_position, "
      "Tensor? cache, Tensor(a!)? counter) -> Tensor");
}

PYG_FAST_IMPL(match)
PYG_FAST_IMPL(match_degree)
PYG_FAST_IMPL(gather_rows)
