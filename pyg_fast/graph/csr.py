"""CSR and CSC of a graph, as PyG's EdgeIndex."""

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops.to_csr import to_csr
from ._cache import store
from .graph import Graph


@torch.inference_mode(False)  # The graph may be used in training.
def prepare_edge_index(edge_index: Tensor, size: tuple[int, int]) -> tuple[EdgeIndex, Tensor]:
    r"""Sorts edges by destination into an :class:`~torch_geometric.EdgeIndex` with filled caches.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        size ((int, int)): The numbers of source and of destination nodes.

    Returns:
        The sorted :class:`~torch_geometric.EdgeIndex` (the sort is stable; its CSR and CSC caches
        and the data of our kernels are filled), and the int64 positions
        :math:`(|\mathcal{E}|)` of its edges in :obj:`edge_index`, with which to permute edge
        attributes.

    Raises:
        TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`.
    """
    data = edge_index.as_tensor().detach() if isinstance(edge_index, EdgeIndex) else edge_index
    num_src, num_dst = size
    colptr, row, perm = to_csr(data, num_src, num_dst, wait=True)
    perm = perm.long()
    data = data.long()[:, perm].contiguous()
    out = EdgeIndex(data, sparse_size=size, sort_order='col')
    rowptr, col, t_perm = to_csr(data, num_src, num_dst, by='src')
    out._indptr = colptr.long()
    out._T_perm = t_perm.long()
    out._T_indptr = rowptr.long()
    out._T_index = (data[0][out._T_perm], col.long())
    graph = Graph(colptr, row, None, rowptr, col, t_perm, num_src, num_dst)
    graph = graph.with_one_structure().scheduled()
    store(out, ('graph', num_src, num_dst, False), graph, wait=True)
    return out, perm
