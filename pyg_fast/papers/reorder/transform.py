"""Renumbers nodes, so that neighbours are close to each other in memory."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.data.storage import N_KEYS
from torch_geometric.transforms import BaseTransform
from torch_geometric.transforms.rooted_subgraph import RootedSubgraphData
from torch_geometric.typing import SparseTensor

from ..._alike import naming_keywords
from ...graph.csr import E_PERM, perm_name
from ...ops._edges import check_edge_index
from ...sparse.to_csr import to_csr
from ...transforms.to_csr import ToCSR, check_no_data, is_edge_attr, permute
from .op import rabbit_order

_OURS = ('perm_index', 'inverse_index')
# Attributes of a batch for which the node order matters.
_OF_BATCHES = ('batch', 'ptr', 'batch_size', 'input_id')


@functional_transform('reorder')
class Reorder(BaseTransform):
    r"""Renumbers the nodes of a graph, so that aggregation has better cache locality (functional
    name: :obj:`reorder`).

    .. math::
        \mathbf{x}^{\prime}_k = \mathbf{x}_{\pi(k)}, \quad
        \mathbf{e}^{\prime} = \pi^{-1}(\mathbf{e})

    - :obj:`"rabbit"`: `Rabbit Order <https://doi.org/10.1109/IPDPS.2016.110>`_ nests communities
      within communities, so that neighbourhoods fit each cache level. The default, since most
      graphs in learning have communities, and it brings their neighbours closest. It costs a few
      times as much as sorting the edges on the CPU and needs no other package.
    - :obj:`"rcm"`: `reverse Cuthill-McKee <https://doi.org/10.1145/800195.805928>`_, by SciPy,
      makes a narrow band of the adjacency matrix: best for meshes and other graphs of a large
      diameter.
    - :obj:`"degree"`: descending in-degree plus out-degree keeps hubs in the cache. The cheapest,
      and the only one that runs on the device of the graph; the others run on the CPU.

    All three are deterministic. A graph that already has a good order gains nothing.

    All node-level attributes (:meth:`~torch_geometric.data.Data.is_node_attr`) are permuted. Node
    ids are renumbered, in :obj:`edge_index` and in attributes that PyG increments by the number of
    nodes when it batches: integers whose names contain :obj:`"index"`, and :obj:`"face"`.
    Node-level attributes of node ids are permuted and renumbered. Edges and their attributes keep
    their order, except that an :class:`~torch_geometric.EdgeIndex` is sorted again, with its
    attributes, as :class:`~pyg_fast.transforms.ToCSR` does. A model trained on the result learns
    the same up to summation order and random numbers.

    The data get two more attributes, :math:`\pi` and its inverse:

    .. code-block:: python

        data = Reorder()(data)
        x_original = data.x[data.inverse_index]
        out = model(data.x, data.edge_index)[data.inverse_index]  # in the original order
        original_id = data.perm_index[k]  # of the node that is k now

    :obj:`perm_index` is kept in subgraphs and mini-batches of
    :class:`~torch_geometric.loader.NeighborLoader`; :obj:`inverse_index` is useful only for the
    whole graph, or for a :class:`~torch_geometric.data.Batch` of whole graphs. After a second
    reordering both still refer to the first order.

    Args:
        method (str): :obj:`"rabbit"`, :obj:`"rcm"` or :obj:`"degree"`.
            (default: :obj:`"rabbit"`)

    Shapes:
        - **input:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)` of any integer dtype
        - **output:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)`, of that dtype if the
          ids fit, otherwise int64; :obj:`perm_index`, :obj:`inverse_index`
          :math:`(|\mathcal{V}|)`, int64

    Raises:
        ImportError: If :obj:`"rcm"` is used without SciPy.
        IndexError: If a node id is negative or too large.
        TypeError: If the data are not one homogeneous
            :class:`~torch_geometric.data.Data` with an integer :obj:`edge_index`, or hold an
            :obj:`adj_t` or :class:`torch_sparse.SparseTensor`: reorder before converting.
        ValueError: If :obj:`method` is unknown, :obj:`edge_index` is missing or has another
            shape, or the data have attributes prepared for the present order
            (:obj:`execution_paths`), attributes of a loader, or a :obj:`perm_index` or
            :obj:`inverse_index` from elsewhere.
    """

    @naming_keywords
    def __init__(self, method: str = 'rabbit') -> None:
        check_no_data('Reorder()', method)
        if method not in _METHODS:
            raise ValueError(f"'method' must be one of {tuple(_METHODS)}, got {method!r}")
        if method == 'rcm':
            _scipy()
        self.method = method

    def forward(self, data: Data) -> Data:
        _check(data)
        num_nodes = data.num_nodes
        if not N_KEYS.intersection(data.keys()):
            data.num_nodes = num_nodes  # It was inferred from the largest id, which may change.
        edge_index = data.edge_index
        plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
        rowptr, col, _ = to_csr(plain, num_nodes, num_nodes)
        perm = _METHODS[self.method](rowptr, col)
        inverse = _inverse(perm)

        # Classify all attributes before any of them changes.
        before, dims, ids = _perm_before(data), _node_dims(data), _id_keys(data)
        for key, dim in dims.items():
            data[key] = permute(data[key], perm, dim)
        for key in ids:
            data[key] = _renumber(key, data[key], inverse)
        if isinstance(edge_index, EdgeIndex):
            data = ToCSR(perm=perm_name(data._store) or E_PERM)(data)
        data.perm_index = perm if before is None else before.to(perm.device)[perm]
        data.inverse_index = _inverse(data.perm_index)
        return data

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}(method={self.method!r})'


def _check(data: Data) -> None:
    if not isinstance(data, Data) or isinstance(data, (Batch, RootedSubgraphData)):
        raise TypeError(
            f'Reorder takes one homogeneous Data object, got {type(data).__name__}: apply it '
            'before graphs are batched or converted'
        )
    for key, value in data.items():
        if isinstance(value, SparseTensor) or not isinstance(data.__cat_dim__(key, value), int):
            raise TypeError(f"'{key}' is a sparse matrix: apply Reorder before converting to it")
        if key in _OF_BATCHES:
            raise ValueError(f"'{key}' belongs to a batch: apply Reorder to the whole graph first")
        if _is_prepared(value):
            raise ValueError(
                f"'{key}' was prepared for the present order of nodes: apply Reorder first, and "
                'prepare after'
            )
    if 'edge_index' not in data:
        raise ValueError("Reorder needs an 'edge_index'")
    check_edge_index(data.edge_index)


def _is_prepared(value: object) -> bool:
    """Whether an attribute is an object of this package, or a list of them."""
    package = __name__.split('.')[0]
    parts = value if isinstance(value, (list, tuple)) else ()
    return any(type(part).__module__.split('.')[0] == package for part in (value, *parts))


def _inverse(perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), device=perm.device)
    return inverse


def _perm_before(data: Data) -> Tensor | None:
    """The permutation of an earlier reordering."""
    pair = [data.get(key) for key in _OURS]
    if all(index is None for index in pair):
        return None
    nodes = torch.arange(data.num_nodes)
    if all(isinstance(index, Tensor) for index in pair):
        perm, inverse = (index.cpu() for index in pair)
        if perm.sort()[0].equal(nodes) and inverse.equal(_inverse(perm)):
            return perm
    raise ValueError(
        f'{_OURS[0]!r} and {_OURS[1]!r} were not made by Reorder for this graph: delete them first'
    )


def _node_dims(data: Data) -> dict[str, int]:
    """Node-level attributes and their node dimension."""
    (store,) = data.node_stores
    return {
        key: data.__cat_dim__(key, value)
        for key, value in data.items()
        if key not in (*_OURS, 'num_nodes', 'face')
        # Edge lists and their attributes can have as many entries as there are nodes.
        and not any(name in key for name in ('edge_index', 'edge_label'))
        and store.is_node_attr(key)
        and not is_edge_attr(store, key)
    }


def _id_keys(data: Data) -> list[str]:
    """Attributes that batching increments by the number of nodes."""
    if data.num_nodes == 0:  # It increments none of the others by more.
        return []
    return [
        key
        for key, value in data.items()
        if key not in _OURS
        and 'batch' not in key  # incremented by its own values
        and isinstance(inc := data.__inc__(key, value), int)
        and inc == data.num_nodes
    ]


def _renumber(key: str, value: object, inverse: Tensor) -> object:
    """An attribute of node ids, or of anything else despite its name."""
    if isinstance(value, (list, tuple)):
        return type(value)([_renumber(key, part, inverse) for part in value])
    if isinstance(value, (int, np.integer, np.ndarray)) and np.asarray(value).dtype.kind in 'iu':
        ids = _renumber_ids(key, torch.from_numpy(np.asarray(value, dtype=np.int64)), inverse)
        return ids.numpy() if isinstance(value, np.ndarray) else int(ids)
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.dtype.is_floating_point:
        return value
    return _renumber_ids(key, value, inverse)


def _renumber_ids(key: str, value: Tensor, inverse: Tensor) -> Tensor:
    num_nodes = inverse.numel()
    ids = (value.as_tensor() if isinstance(value, (EdgeIndex, Index)) else value).long()
    if ids.numel() > 0 and (ids.min() < 0 or ids.max() >= num_nodes):
        raise IndexError(
            f"'{key}' must hold nodes in [0, {num_nodes}), got values from {int(ids.min())} to "
            f'{int(ids.max())}'
        )
    ids = inverse.to(ids.device)[ids]
    if num_nodes <= torch.iinfo(value.dtype).max:
        ids = ids.to(value.dtype)
    if isinstance(value, EdgeIndex):
        size = (num_nodes, num_nodes)
        return EdgeIndex(ids, sparse_size=size, is_undirected=value.is_undirected)
    return Index(ids, dim_size=num_nodes) if isinstance(value, Index) else ids


def _by_degree(rowptr: Tensor, col: Tensor) -> Tensor:
    degree = rowptr.diff() + col.bincount(minlength=rowptr.numel() - 1)
    return degree.argsort(descending=True, stable=True)


def _by_rcm(rowptr: Tensor, col: Tensor) -> Tensor:
    sparse, reverse_cuthill_mckee = _scipy()
    num_nodes = rowptr.numel() - 1
    if num_nodes == 0:  # not supported by SciPy
        return col.new_empty(0, dtype=torch.int64)
    # Booleans: no sum of duplicates is zero.
    parts = np.ones(col.numel(), dtype=bool), col.cpu().numpy(), rowptr.cpu().numpy()
    matrix = sparse.csr_matrix(parts, (num_nodes, num_nodes))
    perm = reverse_cuthill_mckee(matrix).astype(np.int64)  # A copy: the result is a reversed view.
    return torch.from_numpy(perm).to(col.device)


def _scipy() -> tuple[ModuleType, Callable[..., np.ndarray]]:
    try:
        from scipy import sparse
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as error:
        raise ImportError(
            "Reorder(method='rcm') needs SciPy: pip install 'pyg_fast[reorder]'"
        ) from error
    return sparse, reverse_cuthill_mckee


_METHODS = {'rabbit': rabbit_order, 'rcm': _by_rcm, 'degree': _by_degree}
