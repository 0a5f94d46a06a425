#include "bindings/minibatch.h"
#include "params/induced_edges.h"

namespace pyg_fast {
namespace {

InducedEdges induced_of(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                        const Tensor& n_id, const Tensor& map, int64_t stamp) {
  InducedEdges p;
  p.graph = sampled_graph(rowptr, col, perm, std::nullopt);
  p.map = node_map_of(map, stamp, n_id);
  p.num_nodes = n_id.size(0);
  p.n_id = int64s(n_id, "n_id", n_id);
  return p;
}

template <bool kCuda>
Tensor count_induced(const Tensor& rowptr, const Tensor& col, const Tensor& n_id, const Tensor& map,
                     int64_t stamp) {
  InducedEdges p = induced_of(rowptr, col, std::nullopt, n_id, map, stamp);
  Tensor out = empty(n_id, {p.num_nodes + 1}, ScalarType::Long);
  p.rowptr = static_cast<int64_t*>(out.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(n_id);
    void* scratch = launch.scratch(cuda::count_induced_scratch(p));
    launch.check(cuda::count_induced(p, scratch, launch.stream()), "count_induced");
  } else {
    p.rowptr[0] = 0;
    share(0, p.num_nodes, [&](int64_t begin, int64_t end) { cpu::count_induced(p, begin, end); });
    std::partial_sum(p.rowptr, p.rowptr + p.num_nodes + 1, p.rowptr);
  }
  return out;
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor> induced_edges(const Tensor& rowptr, const Tensor& col,
                                                 const OptTensor& perm, const Tensor& n_id,
                                                 const Tensor& induced_rowptr, const Tensor& map,
                                                 const Tensor& local, int64_t stamp,
                                                 int64_t num_edges) {
  InducedEdges p = induced_of(rowptr, col, perm, n_id, map, stamp);
  check_vector(induced_rowptr, "induced_rowptr", p.num_nodes + 1);
  p.rowptr = int64s(induced_rowptr, "induced_rowptr", n_id);
  p.local = int32s(local, "local", n_id);
  Tensor out_col = empty(n_id, {num_edges}, ScalarType::Int);
  Tensor edge_index = empty(n_id, {2, num_edges}, ScalarType::Long);
  Tensor e_id = empty(n_id, {num_edges}, ScalarType::Long);
  p.out_col = static_cast<int32_t*>(out_col.mutable_data_ptr());
  p.out_src = static_cast<int64_t*>(edge_index.mutable_data_ptr());
  p.out_dst = p.out_src + num_edges;
  p.out_e_id = static_cast<int64_t*>(e_id.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(n_id);
    launch.check(cuda::induced_edges(p, launch.stream()), "induced_edges");
  } else {
    share(0, p.num_nodes, [&](int64_t begin, int64_t end) { cpu::induced_edges(p, begin, end); });
  }
  return {out_col, edge_index, e_id};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // All edges among the nodes of a sampled batch: rowptr; col, edge_index, e_id.
  m.def("count_induced(Tensor rowptr, Tensor col, Tensor n_id, Tensor map, int stamp) -> Tensor");
  m.def(
      "induced_edges(Tensor rowptr, Tensor col, Tensor? perm, Tensor n_id, Tensor induced_rowptr, "
      "Tensor map, Tensor local, int stamp, int num_edges) -> (Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(count_induced)
PYG_FAST_IMPL(induced_edges)
