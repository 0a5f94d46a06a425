"""CSR and CSC of a graph, as PyG's EdgeIndex."""

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data.storage import BaseStorage

from ..sparse.graph import Graph
from ..sparse.to_csr import to_csr, to_csr_unweighted, transpose_csr
from ._cache import store
from .graph import GraphRequest

E_PERM = 'e_perm'  # the attribute in which ToCSR keeps the positions of edges before the sort
_PERM_NAME = '_pyg_fast_perm'
# Attributes of edges by their names alone.
EDGE_ATTRS = ('edge_attr', 'edge_weight', 'edge_type')


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
    _check_pair(size)
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
    graph = graph.with_one_structure().with_full().with_default_groups()
    store(out, GraphRequest(num_src, num_dst, False), graph, wait=True)
    return out, perm


@torch.inference_mode(False)
def prepare_graph(held: list[Tensor], size: tuple[int, int]) -> Graph:
    r"""Sorts edges both ways into a graph without values, in little memory.

    Args:
        held ([Tensor]): The sources and destinations :math:`(2, |\mathcal{E}|)`, as the only entry,
            which is taken out once they are sorted: then nothing here keeps them alive.
        size ((int, int)): The numbers of source and of destination nodes.

    Returns:
        Graph: The edges by destination, in this order (the sort is stable), and their transpose. A
        symmetric graph has a single structure, whose rows ascend.

    Raises:
        TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`.
    """
    data = held[0].as_tensor().detach() if isinstance(held[0], EdgeIndex) else held[0]
    num_src, num_dst = size
    csr = to_csr_unweighted(data, num_src, num_dst, wait=True)
    del data, held[0]
    transpose = transpose_csr(*csr, num_src)
    # Where degrees suggest a symmetric graph, its rows may be in another order than those of the
    # transpose, which ascend.
    if (
        num_src == num_dst
        and torch.equal(csr[0], transpose[0])
        and torch.equal(transpose_csr(*transpose, num_src)[1], transpose[1])
    ):
        csr = transpose
    graph = Graph(*csr, None, *transpose, None, num_src, num_dst, missing='t_perm')
    return graph.with_full().with_default_groups()


def perm_name(store: BaseStorage) -> str | None:
    """The attribute in which :class:`~pyg_fast.transforms.ToCSR` keeps the permutation of the edges
    of a store. The store's copies and pickles know it, but no batch."""
    return vars(store).get(_PERM_NAME)


def set_perm_name(store: BaseStorage, name: str) -> None:
    """Sets the result of :func:`perm_name`."""
    vars(store)[_PERM_NAME] = name


def _check_pair(size: object) -> None:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        got = f'{len(size)} numbers' if isinstance(size, (tuple, list)) else type(size).__name__
        raise TypeError(
            f"'size' must be a pair of the numbers of sources and destinations, got {got}"
        )
