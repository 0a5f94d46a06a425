#include "cpu/fetch.h"
#include "cpu/node_map.h"

#include <vector>

#include "minibatch_binding.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/fetch.h"
#endif

namespace pyg_fast {
namespace {

const int64_t* ids_of(const Tensor& t, const char* name, const Tensor& on) {
  STD_TORCH_CHECK(t.dim() == 1, name, " must have one dimension, got ", t.dim());
  check_type(t, name, ScalarType::Long);
  check_device(t, name, on);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// For lists of so many ids in all.
MapOfNodes map_of(const Tensor& map, int64_t stamp, int64_t num_nodes, int64_t num_ids,
                  const Tensor& on) {
  MapOfNodes m;
  static_cast<NodeMap&>(m) = node_map_of(map, stamp, on);
  m.num_nodes = num_nodes;
  const int64_t most = num_ids < num_nodes ? num_ids : num_nodes;
  // Of a hashed one a slot stays empty, or looking for an id would not end.
  STD_TORCH_CHECK(m.key ? most < m.num_slots : num_nodes <= m.num_slots, "map has ", m.num_slots,
                  " slots, too few for ", m.key ? most : num_nodes, " nodes");
  return m;
}

template <typename Run>
Tensor match(const Tensor& n_id_, const Tensor& previous_, const Tensor& map, int64_t stamp,
             int64_t num_nodes, const Run& run) {
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
  run(p, n_id);
  return out;
}

template <typename Run>
Tensor match_degree(const Tensor& ids_, const Tensor& ptr_, const Tensor& map, int64_t stamp,
                    int64_t num_nodes, const Run& run) {
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
  run(p, ids);
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

// x is where index is, or in host memory that its device reads, which is for the caller to know.
template <typename Run>
Tensor fetch_rows(const Tensor& x, const Tensor& index_, const OptTensor& match_,
                  const OptTensor& previous, const OptTensor& cache_position_,
                  const OptTensor& cache, OptTensor& counter, const Run& run) {
  const Tensor index = to_contiguous(index_);
  const OptTensor match = to_contiguous(match_), cache_position = to_contiguous(cache_position_);
  STD_TORCH_CHECK(x.dim() >= 1, "x must have one dimension at least");
  STD_TORCH_CHECK(index.dim() == 1, "index must have one dimension, got ", index.dim());
  STD_TORCH_CHECK(match.has_value() == previous.has_value(),
                  "match and previous must be given together");
  STD_TORCH_CHECK(cache_position.has_value() == cache.has_value(),
                  "cache_position and cache must be given together");
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  FetchRows p;
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
  Tensor out = allocated(index, size, static_cast<int64_t>(x.element_size()), [&] {
    return torch::stable::new_empty(index, size, x.scalar_type());
  });
  p.out = static_cast<char*>(out.mutable_data_ptr());
  run(p, index);
  return out;
}

constexpr int64_t kLookup = 20;  // nanoseconds that an id takes on a CPU

Tensor match_cpu(const Tensor& n_id, const Tensor& previous, Tensor map, int64_t stamp,
                 int64_t num_nodes) {
  return match(n_id, previous, map, stamp, num_nodes, [](const Match& p, const Tensor&) {
    cpu::start(p.map);
    share_rows(p.num_previous, p.num_previous * kLookup,
               [&](int64_t begin, int64_t end) { cpu::note_previous(p, begin, end); });
    share_rows(p.num_ids, p.num_ids * kLookup,
               [&](int64_t begin, int64_t end) { cpu::match(p, begin, end); });
  });
}

Tensor match_degree_cpu(const Tensor& ids, const Tensor& ptr, Tensor map, int64_t stamp,
                        int64_t num_nodes) {
  return match_degree(ids, ptr, map, stamp, num_nodes, [](const MatchDegree& p, const Tensor&) {
    cpu::start(p.map);
    for (int64_t k = 0; k < p.num_batches * p.num_batches; ++k) p.count[k] = 0;
    const int64_t first = p.begin[0], num_ids = p.begin[p.num_batches] - first;
    share_rows(num_ids, num_ids * kLookup, [&](int64_t begin, int64_t end) {
      cpu::match_degree(p, first + begin, first + end);
    });
  });
}

Tensor fetch_rows_cpu(const Tensor& x, const Tensor& index, OptTensor match, OptTensor previous,
                      OptTensor cache_position, OptTensor cache, OptTensor counter) {
  const auto run = [](const FetchRows& p, const Tensor&) {
    share_rows(p.num_rows, p.num_rows * (kLookup + p.row_bytes / 8),
               [&](int64_t begin, int64_t end) { cpu::fetch_rows(p, begin, end); });
  };
  return fetch_rows(x, index, match, previous, cache_position, cache, counter, run);
}

#ifdef PYG_FAST_WITH_CUDA
Tensor match_cuda(const Tensor& n_id, const Tensor& previous, Tensor map, int64_t stamp,
                  int64_t num_nodes) {
  return match(n_id, previous, map, stamp, num_nodes, [](const Match& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::match(p, launch.stream()), "match");
  });
}

Tensor match_degree_cuda(const Tensor& ids, const Tensor& ptr, Tensor map, int64_t stamp,
                         int64_t num_nodes) {
  return match_degree(ids, ptr, map, stamp, num_nodes, [](const MatchDegree& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::match_degree(p, launch.stream()), "match_degree");
  });
}

Tensor fetch_rows_cuda(const Tensor& x, const Tensor& index, OptTensor match, OptTensor previous,
                       OptTensor cache_position, OptTensor cache, OptTensor counter) {
  STD_TORCH_CHECK(index.is_cuda(), "index must be on a CUDA device");
  const auto run = [](const FetchRows& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::fetch_rows(p, launch.stream()), "fetch_rows");
  };
  return fetch_rows(x, index, match, previous, cache_position, cache, counter, run);
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("match", TORCH_BOX(&pyg_fast::match_cpu));
  m.impl("match_degree", TORCH_BOX(&pyg_fast::match_degree_cpu));
  m.impl("fetch_rows", TORCH_BOX(&pyg_fast::fetch_rows_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("match", TORCH_BOX(&pyg_fast::match_cuda));
  m.impl("match_degree", TORCH_BOX(&pyg_fast::match_degree_cuda));
  m.impl("fetch_rows", TORCH_BOX(&pyg_fast::fetch_rows_cuda));
}
#endif
