#include "cpu/walk.h"

#include "minibatch_binding.h"
#ifdef PYG_FAST_WITH_CUDA
#include "cuda/walk.h"
#endif

namespace pyg_fast {
namespace {

// The graph is where the nodes are, or in host memory that their device reads, which is for the
// caller to know.
void fill(Walk& p, const Tensor& rowptr, const Tensor& col, const Tensor& nodes, int64_t length,
          double restart, int64_t seed) {
  STD_TORCH_CHECK(nodes.dim() == 1, "nodes must have one dimension, got ", nodes.dim());
  check_type(nodes, "nodes", ScalarType::Long);
  p.graph = csr_of(rowptr, col, std::nullopt, rowptr.size(0) - 1);
  if (rowptr.is_cuda() || !nodes.is_cuda()) check_device(nodes, "nodes", rowptr);
  STD_TORCH_CHECK(length >= 0, "walk_length must not be negative, got ", length);
  STD_TORCH_CHECK(restart >= 0 && restart <= 1, "restart must be from 0 to 1, got ", restart);
  p.length = length;
  p.restart = restart;
  p.seed = static_cast<uint64_t>(seed);
}

template <typename Run>
Tensor random_walk(const Tensor& rowptr, const Tensor& col, const Tensor& start_,
                   int64_t walk_length, double restart, int64_t seed, const Run& run) {
  const Tensor start = to_contiguous(start_);
  RandomWalk p;
  fill(p, rowptr, col, start, walk_length, restart, seed);
  p.num_walks = start.size(0);
  p.start = static_cast<const int64_t*>(start.const_data_ptr());
  Tensor out = empty(start, {p.num_walks, walk_length + 1}, ScalarType::Long);
  p.out = static_cast<int64_t*>(out.mutable_data_ptr());
  run(p, start);
  return out;
}

template <typename Run>
std::tuple<Tensor, Tensor> visited_neighbors(const Tensor& rowptr, const Tensor& col,
                                             const Tensor& nodes_, int64_t num_neighbors,
                                             int64_t num_walks, int64_t walk_length, double restart,
                                             int64_t seed, const Run& run) {
  const Tensor nodes = to_contiguous(nodes_);
  VisitedNeighbors p;
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
  run(p, nodes);
  return {neighbor, visits};
}

constexpr int64_t kStep = 50;  // nanoseconds on a CPU

Tensor random_walk_cpu(const Tensor& rowptr, const Tensor& col, const Tensor& start,
                       int64_t walk_length, double restart, int64_t seed) {
  return random_walk(rowptr, col, start, walk_length, restart, seed,
                     [](const RandomWalk& p, const Tensor&) {
    share_rows(p.num_walks, p.num_walks * (p.length + 1) * kStep,
               [&](int64_t begin, int64_t end) { cpu::random_walk(p, begin, end); });
  });
}

std::tuple<Tensor, Tensor> visited_neighbors_cpu(const Tensor& rowptr, const Tensor& col,
                                                 const Tensor& nodes, int64_t num_neighbors,
                                                 int64_t num_walks, int64_t walk_length,
                                                 double restart, int64_t seed) {
  return visited_neighbors(rowptr, col, nodes, num_neighbors, num_walks, walk_length, restart, seed,
                           [](const VisitedNeighbors& p, const Tensor&) {
    share_rows(p.num_nodes, p.num_nodes * (p.num_walks * p.length + 1) * kStep,
               [&](int64_t begin, int64_t end) { cpu::visited_neighbors(p, begin, end); });
  });
}

#ifdef PYG_FAST_WITH_CUDA
Tensor random_walk_cuda(const Tensor& rowptr, const Tensor& col, const Tensor& start,
                        int64_t walk_length, double restart, int64_t seed) {
  STD_TORCH_CHECK(start.is_cuda(), "start must be on a CUDA device");
  return random_walk(rowptr, col, start, walk_length, restart, seed,
                     [](const RandomWalk& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::random_walk(p, launch.stream()), "random_walk");
  });
}

std::tuple<Tensor, Tensor> visited_neighbors_cuda(const Tensor& rowptr, const Tensor& col,
                                                  const Tensor& nodes, int64_t num_neighbors,
                                                  int64_t num_walks, int64_t walk_length,
                                                  double restart, int64_t seed) {
  STD_TORCH_CHECK(nodes.is_cuda(), "nodes must be on a CUDA device");
  return visited_neighbors(rowptr, col, nodes, num_neighbors, num_walks, walk_length, restart, seed,
                           [](const VisitedNeighbors& p, const Tensor& on) {
    Launch launch(on);
    launch.check(cuda::visited_neighbors(p, launch.stream()), "visited_neighbors");
  });
}
#endif

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) {
  m.impl("random_walk", TORCH_BOX(&pyg_fast::random_walk_cpu));
  m.impl("visited_neighbors", TORCH_BOX(&pyg_fast::visited_neighbors_cpu));
}

#ifdef PYG_FAST_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) {
  m.impl("random_walk", TORCH_BOX(&pyg_fast::random_walk_cuda));
  m.impl("visited_neighbors", TORCH_BOX(&pyg_fast::visited_neighbors_cuda));
}
#endif
