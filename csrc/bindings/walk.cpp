#include "bindings/minibatch.h"
#include "params/walk.h"

namespace pyg_fast {
namespace {

constexpr int64_t kStep = 50;  // nanoseconds per step on a CPU

// The graph must be on the device of the nodes, or in host memory that this device reads; the caller
// checks it.
void fill(Walk& p, const Tensor& rowptr, const Tensor& col, const Tensor& nodes, int64_t length,
          double restart, int64_t seed) {
  STD_TORCH_CHECK(nodes.dim() == 1, "nodes must have one dimension, got ", nodes.dim());
  check_type(nodes, "nodes", ScalarType::Long);
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1,
                  "rowptr must have shape [num_nodes + 1]");
  STD_TORCH_CHECK(col.dim() == 1, "col must have one dimension");
  check_device(col, "col", rowptr);
  p.graph = sampled_graph(rowptr, col, std::nullopt, std::nullopt);
  if (rowptr.is_cuda() || !nodes.is_cuda()) check_device(nodes, "nodes", rowptr);
  STD_TORCH_CHECK(length >= 0, "walk_length must not be negative, got ", length);
  STD_TORCH_CHECK(restart >= 0 && restart <= 1, "restart must be from 0 to 1, got ", restart);
  p.length = length;
  p.restart = restart;
  p.seed = static_cast<uint64_t>(seed);
}

template <bool kCuda>
Tensor random_walk(const Tensor& rowptr, const Tensor& col, const Tensor& start_,
                   int64_t walk_length, double restart, int64_t seed) {
  if constexpr (kCuda) STD_TORCH_CHECK(start_.is_cuda(), "start must be on a CUDA device");
  const Tensor start = to_contiguous(start_);
  RandomWalk p;
  fill(p, rowptr, col, start, walk_length, restart, seed);
  p.num_walks = start.size(0);
  p.start = static_cast<const int64_t*>(start.const_data_ptr());
  Tensor out = empty(start, {p.num_walks, walk_length + 1}, ScalarType::Long);
  p.out = static_cast<int64_t*>(out.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(start);
    launch.check(cuda::random_walk(p, launch.stream()), "random_walk");
  } else {
    share_rows(p.num_walks, p.num_walks * (p.length + 1) * kStep,
               [&](int64_t begin, int64_t end) { cpu::random_walk(p, begin, end); });
  }
  return out;
}

template <bool kCuda>
std::tuple<Tensor, Tensor> pinsage_neighbors(const Tensor& rowptr, const Tensor& col,
                                             const Tensor& nodes_, int64_t num_neighbors,
                                             int64_t num_walks, int64_t walk_length, double restart,
                                             int64_t seed) {
  if constexpr (kCuda) STD_TORCH_CHECK(nodes_.is_cuda(), "nodes must be on a CUDA device");
  const Tensor nodes = to_contiguous(nodes_);
  PinsageNeighbors p;
  fill(p, rowptr, col, nodes, walk_length, restart, seed);
  STD_TORCH_CHECK(num_walks >= 0 && num_walks <= kMostVisits && walk_length <= kMostVisits &&
                      num_walks * walk_length <= kMostVisits,
                  "walks from a node may take ", kMostVisits, " steps in all, got ", num_walks,
                  " walks of ", walk_length);
  STD_TORCH_CHECK(num_neighbors >= 0, "num_neighbors must not be negative, got ", num_neighbors);
  p.num_walks = num_walks;
  p.num_nodes = nodes.size(0);
  p.num_neighbors = num_neighbors;
  p.nodes = static_cast<const int64_t*>(nodes.const_data_ptr());
  Tensor neighbor = empty(nodes, {p.num_nodes, num_neighbors}, ScalarType::Long);
  Tensor visits = empty(nodes, {p.num_nodes, num_neighbors}, ScalarType::Long);
  p.neighbor = static_cast<int64_t*>(neighbor.mutable_data_ptr());
  p.visits = static_cast<int64_t*>(visits.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(nodes);
    launch.check(cuda::pinsage_neighbors(p, launch.stream()), "pinsage_neighbors");
  } else {
    share_rows(p.num_nodes, p.num_nodes * (p.num_walks * p.length + 1) * kStep,
               [&](int64_t begin, int64_t end) { cpu::pinsage_neighbors(p, begin, end); });
  }
  return {neighbor, visits};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Walks from nodes to sources of their edges: [n, length + 1]; the graph may be in pinned host memory.
  // Then the nodes that several walks from each node visit most, and how often.
  m.def(
      "random_walk(Tensor rowptr, Tensor col, Tensor start, int walk_length, float restart, int seed) "
      "-> Tensor");
  m.def(
      "pinsage_neighbors(Tensor rowptr, Tensor col, Tensor nodes, int num_neighbors, int num_walks, "
      "int walk_length, float restart, int seed) -> (Tensor, Tensor)");
}

PYG_FAST_IMPL(random_walk)
PYG_FAST_IMPL(pinsage_neighbors)
