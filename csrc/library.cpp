// Every op of the library with its schema: the table of contents. The bindings stand in <op>.cpp.
#include "stable.h"

namespace pyg_fast {

bool with_cuda() {
#ifdef PYG_FAST_WITH_CUDA
  return true;
#else
  return false;
#endif
}

int64_t error_record() {
#ifdef PYG_FAST_WITH_CUDA
  return reinterpret_cast<int64_t>(cuda::error_record());
#else
  return 0;
#endif
}

}  // namespace pyg_fast

STABLE_TORCH_LIBRARY(pyg_fast, m) {
  // Edges to CSR by destination, or by source if `reverse`: (rowptr, col, perm, invalid); stable,
  // self-loops left out on demand. Then by both: destination, source, invalid.
  m.def(
      "to_csr(Tensor edge_index, SymInt num_src, SymInt num_dst, bool reverse, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "to_csr_csc(Tensor edge_index, SymInt num_src, SymInt num_dst, bool index64, "
      "bool drop_loops, bool report=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Nodes of a square graph in Rabbit Order, int64; on the CPU alone.
  m.def("rabbit_order(Tensor rowptr, Tensor col) -> Tensor");

  // row_scale * (A * (col_scale * x)) + diag * x[self_row] + bias
  m.def(
      "spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, Tensor? row_scale, "
      "Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "Tensor? self_row=None) -> Tensor");

  // The same, handed out by groups of at most `group_size` edges of a row; `atomic`: groups of one row
  // add up in any order. On a CPU it is the same altogether.
  m.def(
      "spmm_groups(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, "
      "Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "Tensor? self_row, Tensor group_ptr, Tensor group_row, Tensor long_row, Tensor long_ptr, "
      "Tensor long_shift, int num_partials, int group_size, bool atomic) -> Tensor");

  // spmm over at most `num_samples` edges of each row; x may be quantized. Those edges,
  // and their positions in the values; and by source, on a GPU: t_rowptr, t_col, position.
  m.def(
      "sampled_spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, "
      "Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, bool mean, bool out_acc, "
      "int num_samples, int strategy, Tensor? seed) -> Tensor");
  m.def(
      "sample_edges(Tensor rowptr, Tensor col, Tensor? perm, Tensor sampled_rowptr, int num_slots, "
      "int num_samples, int strategy, Tensor? seed) -> (Tensor, Tensor)");
  m.def(
      "sample_transposed(Tensor rowptr, Tensor t_rowptr, Tensor t_col, Tensor position, "
      "int num_slots, int num_samples, int strategy, Tensor? seed) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_rows(Tensor x) -> (Tensor, Tensor)");

  // Maximum (or minimum) over each row's edges, and the edge that reached it.
  m.def(
      "spmm_max(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor x, bool minimum) "
      "-> (Tensor, Tensor)");
  m.def(
      "spmm_max_backward_x(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor arg, "
      "Tensor grad, SymInt num_cols) -> Tensor");
  m.def(
      "spmm_max_backward_x_ordered(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, "
      "Tensor arg, Tensor grad, Tensor t_rowptr, Tensor t_col, Tensor? t_position) -> Tensor");
  m.def(
      "spmm_max_backward_value(Tensor rowptr, Tensor col, Tensor? perm, Tensor arg, Tensor grad, "
      "Tensor x, SymInt num_values) -> Tensor");

  // <a[i], b[j]> for every edge: the gradient of edge weights.
  m.def(
      "sddmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor a, Tensor b, Tensor? row_scale, "
      "Tensor? col_scale, bool mean, SymInt num_values) -> Tensor");

  // Of execution paths: rows put back among all; rows outside of a path that are not zero; dropout
  // keyed by (seed, node, column).
  m.def("expand_rows(Tensor x, Tensor position, float fill) -> Tensor");
  m.def("count_outside(Tensor x, Tensor position, Tensor(a!) counter) -> ()");
  m.def("node_dropout(Tensor x, Tensor? nodes, Tensor seed, float dropout) -> Tensor");

  // The same two over a coordinate list in any order: the first with the number of invalid edges, if
  // `count`; `reverse` sums at sources.
  m.def(
      "scatter(Tensor edge_index, Tensor? value, Tensor x, Tensor? row_scale, Tensor? col_scale, "
      "Tensor? diag, SymInt num_dst, bool reverse, bool drop_loops, bool count, bool report=False) "
      "-> (Tensor, Tensor)");
  m.def(
      "edge_dot(Tensor edge_index, Tensor a, Tensor b, Tensor? row_scale, Tensor? col_scale, "
      "bool drop_loops) -> Tensor");

  // The normalisation of a GCN: (degree, last, counts, chunk_loops), then (edge_index, weight,
  // scale), and the gradient of edge_weight.
  m.def(
      "gcn_degree(Tensor edge_index, Tensor? edge_weight, SymInt num_nodes, bool drop_loops, "
      "bool reverse) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gcn_weight(Tensor edge_index, Tensor? edge_weight, Tensor degree, Tensor? last, "
      "Tensor? before, SymInt num_kept, bool loops, float fill_value, ScalarType dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "gcn_weight_backward(Tensor edge_index, Tensor grad, Tensor scale, Tensor grad_degree, "
      "Tensor? before, bool reverse) -> Tensor");
  // Of a graph in CSR and its values: scale, and the weights of the loops (empty without `loops`).
  m.def(
      "gcn_scale(Tensor rowptr, Tensor? perm, Tensor value, Tensor? last_loop, float fill_value, "
      "bool loops) -> (Tensor, Tensor)");

  // The k largest entries of each row as CBSR: (values, columns).
  m.def("maxk(Tensor x, int k, bool balanced) -> (Tensor, Tensor)");
  m.def("cbsr_to_dense(Tensor values, Tensor columns, int dim) -> Tensor");
  m.def("cbsr_sample(Tensor dense, Tensor columns) -> Tensor");

  // spmm of CBSR features of `dim` columns, and its gradients.
  m.def(
      "cbsr_spmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor values, "
      "Tensor columns, int dim, Tensor? row_scale, Tensor? col_scale, Tensor? diag, Tensor? bias, "
      "bool mean, bool out_acc) -> Tensor");
  m.def(
      "cbsr_spmm_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor? value, Tensor grad, "
      "Tensor columns, Tensor? row_scale, Tensor? col_scale, Tensor? diag, bool mean) -> Tensor");
  m.def(
      "cbsr_spmm_backward_ordered(Tensor t_rowptr, Tensor t_col, Tensor? t_perm, Tensor? value, "
      "Tensor grad, Tensor columns, Tensor? row_scale, Tensor? col_scale, Tensor? diag) -> Tensor");
  m.def(
      "cbsr_sddmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor grad, Tensor values, "
      "Tensor columns, Tensor? row_scale, Tensor? col_scale, bool mean, SymInt num_values) "
      "-> Tensor");

  // <x[i, h], att[h]> for one or two vectors of attention; the gradients of x and of [att_src,
  // att_dst].
  m.def("head_scores(Tensor x, Tensor att_src, Tensor? att_dst) -> (Tensor, Tensor)");
  m.def(
      "head_scores_backward(Tensor x, Tensor att_src, Tensor? att_dst, Tensor grad_alpha_src, "
      "Tensor? grad_alpha_dst) -> (Tensor, Tensor)");

  // Attention over each row's edges, and `num_loops` self-loops: the result, and (`training`) what
  // the backward reads: y, y_plus, lse, mass_plus; y, lse.
  m.def(
      "gat(Tensor rowptr, Tensor col, Tensor? perm, Tensor x, Tensor alpha_src, Tensor alpha_dst, "
      "Tensor? alpha_edge, Tensor? alpha_loop, Tensor? bias, Tensor? seed, SymInt num_loops, "
      "float negative_slope, float dropout, bool training, bool out_acc) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gatv2(Tensor rowptr, Tensor col, Tensor? perm, Tensor x, Tensor x_dst, Tensor att, "
      "Tensor? bias, Tensor? seed, SymInt num_loops, float negative_slope, float dropout, "
      "bool training, bool out_acc) -> (Tensor, Tensor, Tensor)");

  // Their gradients: of x, alpha_src, alpha_dst, alpha_edge and alpha_loop (empty where there is
  // none); of x, x_dst and att.
  m.def(
      "gat_backward(Tensor t_rowptr, Tensor t_col, Tensor? t_perm, Tensor x, Tensor alpha_src, "
      "Tensor alpha_dst, Tensor? alpha_edge, Tensor? alpha_loop, Tensor? seed, Tensor y, "
      "Tensor y_plus, Tensor lse, Tensor mass_plus, Tensor grad, SymInt num_loops, "
      "float negative_slope, float dropout) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gatv2_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor t_rowptr, Tensor t_col, "
      "Tensor? t_perm, Tensor x, Tensor x_dst, Tensor att, Tensor? seed, Tensor y, Tensor lse, "
      "Tensor grad, SymInt num_loops, float negative_slope, float dropout) "
      "-> (Tensor, Tensor, Tensor)");

  // Sampled mini-batches. `map` and `stamp`: NodeMap in minibatch.h; `counts`: nodes and edges known
  // after each hop, and before the first; `local`: local ids by position, those of seeds, then edges.
  m.def(
      "begin_sample(Tensor seeds, Tensor(a!) n_id, Tensor(b!) counts, Tensor(c!) map, "
      "Tensor(d!) local, int stamp) -> ()");
  // One hop: where the edges of each node begin; those edges, their sources into the map; new nodes.
  // `max_nodes`, `max_edges`: in this hop, at most; the graph may lie in pinned host memory.
  m.def(
      "sample_counts(Tensor rowptr, Tensor? weight, Tensor n_id, Tensor(a!) counts, "
      "Tensor(b!) sampled_rowptr, int hop, int fanout, bool replace, int max_nodes) -> ()");
  m.def(
      "sample_neighbors(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor n_id, "
      "Tensor counts, Tensor sampled_rowptr, Tensor(a!) neighbor, Tensor(b!) dst, Tensor(c!) e_id, "
      "Tensor(d!) map, int stamp, int num_seeds, int hop, int fanout, bool replace, int seed, "
      "int max_nodes, int max_edges) -> ()");
  m.def(
      "append_nodes(Tensor neighbor, Tensor(a!) n_id, Tensor(b!) counts, Tensor(c!) map, "
      "Tensor(d!) local, int stamp, int num_seeds, int hop, int max_edges) -> ()");
  // The batch: n_id, rowptr, col, edge_index, e_id. All edges among its nodes: rowptr; col,
  // edge_index, e_id.
  m.def(
      "take_sample(Tensor n_id, Tensor sampled_rowptr, Tensor neighbor, Tensor dst, Tensor e_id, "
      "Tensor map, Tensor local, int stamp, int num_nodes, int num_rows, int num_edges) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "count_induced(Tensor rowptr, Tensor col, Tensor n_id, Tensor map, int stamp) -> Tensor");
  m.def(
      "induced_edges(Tensor rowptr, Tensor col, Tensor? perm, Tensor n_id, Tensor induced_rowptr, "
      "Tensor map, Tensor local, int stamp, int num_edges) -> (Tensor, Tensor, Tensor)");
  // Distinct ids in order of their first occurrence (padded), the place of each, their number.
  m.def("relabel(Tensor ids, Tensor(a!) map, int stamp) -> (Tensor, Tensor, Tensor)");

  // Between mini-batches: the first position in `previous` of each id, -1 for none; how many distinct
  // ids two of the batches share whose ids follow one another, `ptr` in host memory. `map`, `stamp`:
  // of a NodeMap.
  m.def("match(Tensor n_id, Tensor previous, Tensor(a!) map, int stamp, int num_nodes) -> Tensor");
  m.def("match_degree(Tensor ids, Tensor ptr, Tensor(a!) map, int stamp, int num_nodes) -> Tensor");
  // Rows previous[match[i]], cache[cache_position[index[i]]] or x[index[i]], the first there is;
  // x may lie in pinned host memory. Added to counter: the numbers of rows from x, previous, cache.
  m.def(
      "fetch_rows(Tensor x, Tensor index, Tensor? match, Tensor? previous, Tensor? cache_position, "
      "Tensor? cache, Tensor(a!)? counter) -> Tensor");
  // Walks from nodes to sources of their edges, which may lie in pinned host memory: [n, length + 1];
  // the nodes that several walks from each node visit most, and how often.
  m.def(
      "random_walk(Tensor rowptr, Tensor col, Tensor start, int walk_length, float restart, int seed) "
      "-> Tensor");
  m.def(
      "visited_neighbors(Tensor rowptr, Tensor col, Tensor nodes, int num_neighbors, int num_walks, "
      "int walk_length, float restart, int seed) -> (Tensor, Tensor)");

  m.def("with_cuda() -> bool");
  // Where kernels on CUDA put an edge that they had to leave out (cuda/record.cuh): an address in
  // host memory, 0 without CUDA. The first call makes a CUDA context.
  m.def("error_record() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CompositeExplicitAutograd, m) {
  m.impl("with_cuda", TORCH_BOX(&pyg_fast::with_cuda));
  m.impl("error_record", TORCH_BOX(&pyg_fast::error_record));
}
