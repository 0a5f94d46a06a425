"""Numbering nodes anew, so that neighbours lie close to each other in memory."""

from typing import Any

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

from ..ops._edges import check_edge_index
from ..ops.rabbit_order import rabbit_order
from ..ops.to_csr import to_csr
from .to_csr import ToCSR, is_edge_attr, permuted

_OURS = ('perm_index', 'inverse_index')
# In a batch the places of nodes mean something: whose they are, or that they are seeds.
_OF_BATCHES = ('batch', 'ptr', 'batch_size', 'input_id')


@functional_transform('reorder')
class Reorder(BaseTransform):
    r"""Numbers the nodes of a graph anew, so that aggregation reads memory that lies close
    together (functional name: :obj:`reorder`).

    .. math::
        \mathbf{x}^{\prime}_k = \mathbf{x}_{\pi(k)}, \quad
        \mathbf{e}^{\prime} = \pi^{-1}(\mathbf{e})

    - :obj:`"rabbit"`: `Rabbit Order <https://doi.org/10.1109/IPDPS.2016.110>`_ puts communities
      within communities, so that each size of cache has its neighbourhoods. The default, since
      most graphs that one learns on have communities, and among them it brings neighbours
      closest; it costs a few times what sorting the edges on the CPU does, and needs nothing but
      this package.
    - :obj:`"rcm"`: `reverse Cuthill-McKee <https://doi.org/10.1145/800195.805928>`_, by SciPy,
      makes a narrow band of the adjacency matrix: best for meshes and other graphs of a large
      diameter.
    - :obj:`"degree"`: descending in-degree plus out-degree keeps hubs in the cache. The cheapest,
      and the only one that is computed where the graph is; the others run on the CPU.

    All three are deterministic. Nodes that come in a good order already gain nothing.

    Everything PyG takes for node-level (:meth:`~torch_geometric.data.Data.is_node_attr`) is
    permuted. Node ids are renumbered, in :obj:`edge_index` and in what PyG counts up by the number
    of nodes when it batches: integers whose names contain :obj:`"index"`, and :obj:`"face"`. Both
    is done to a node-level attribute of node ids. Edges keep their order, and their attributes
    theirs; but an :class:`~torch_geometric.EdgeIndex` is sorted again, along with them, as
    :class:`~pyg_fast.transforms.ToCSR` does. A model trained on the result learns the same up to
    the order of its sums and of random numbers.

    The data get two more attributes, :math:`\pi` and its inverse:

    .. code-block:: python

        data = Reorder()(data)
        x_original = data.x[data.inverse_index]
        out = model(data.x, data.edge_index)[data.inverse_index]  # in the original order
        original_id = data.perm_index[k]  # of what is node k now

    :obj:`perm_index` follows its nodes into subgraphs and mini-batches of
    :class:`~torch_geometric.loader.NeighborLoader`; :obj:`inverse_index` is of use for the whole
    graph only, or for a :class:`~torch_geometric.data.Batch` of whole graphs. Reordering again
    relates both to the first order still.

    Args:
        method (str): :obj:`"rabbit"`, :obj:`"rcm"` or :obj:`"degree"`.
            (default: :obj:`"rabbit"`)

    Shapes:
        - **input:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)` of any integer type
        - **output:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)`, of that type where the
          numbers fit, else int64; :obj:`perm_index`, :obj:`inverse_index`
          :math:`(|\mathcal{V}|)`, int64

    Raises:
        ImportError: If :obj:`"rcm"` is asked for without SciPy.
        IndexError: If a node id is negative or too large.
        TypeError: If the data are not one homogeneous
            :class:`~torch_geometric.data.Data` with an integer :obj:`edge_index`, or hold an
            :obj:`adj_t` or :class:`torch_sparse.SparseTensor`: reorder before converting.
        ValueError: If :obj:`method` is unknown, :obj:`edge_index` is missing or has another
            shape, or the data hold what was prepared for the present order
            (:obj:`execution_paths`), what a loader made of the graph, or a :obj:`perm_index` or
            :obj:`inverse_index` of another origin.
    """

    def __init__(self, method: str = 'rabbit') -> None:
        if method not in _METHODS:
            raise ValueError(f"'method' must be one of {tuple(_METHODS)}, got {method!r}")
        if method == 'rcm':
            _scipy()
        self.method = method

    def forward(self, data: Data) -> Data:
        _check(data)
        num_nodes = data.num_nodes
        if not N_KEYS.intersection(data.keys()):
            data.num_nodes = num_nodes  # It was told by the largest id, which may change.
        edge_index = data.edge_index
        plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
        rowptr, col, _ = to_csr(plain, num_nodes, num_nodes)
        perm = _METHODS[self.method](rowptr, col)
        inverse = _inverse(perm)

        # What attributes are is asked before any of them changes.
        before, dims, ids = _perm_before(data), _node_dims(data), _id_keys(data)
        for key, dim in dims.items():
            data[key] = permuted(data[key], perm, dim)
        for key in ids:
            data[key] = _renumbered(key, data[key], inverse)
        if isinstance(edge_index, EdgeIndex):
            data = ToCSR()(data)
        data.perm_index = perm if before is None else before.to(perm.device)[perm]
        data.inverse_index = _inverse(data.perm_index)
        return data

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}(method={self.method!r})'


def _check(data: Data) -> None:
    if not isinstance(data, Data) or isinstance(data, (Batch, RootedSubgraphData)):
        raise TypeError(
            f'Reorder takes one homogeneous Data object, got {type(data).__name__}: apply it '
            'before graphs are batched or made into another kind'
        )
    for key, value in data.items():
        if isinstance(value, SparseTensor) or not isinstance(data.__cat_dim__(key, value), int):
            raise TypeError(f"'{key}' is a sparse matrix: apply Reorder before converting to it")
        if key in _OF_BATCHES:
            raise ValueError(f"'{key}' tells of a batch: apply Reorder to the whole graph first")
        if _is_prepared(value):
            raise ValueError(
                f"'{key}' was prepared for the present order of nodes: apply Reorder first, and "
                'prepare after'
            )
    if 'edge_index' not in data:
        raise ValueError("Reorder needs an 'edge_index'")
    check_edge_index(data.edge_index)


def _is_prepared(value: Any) -> bool:
    """Whether an attribute is an object of this package, or several."""
    package = __name__.split('.')[0]
    parts = value if isinstance(value, (list, tuple)) else ()
    return any(type(part).__module__.split('.')[0] == package for part in (value, *parts))


def _inverse(perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), device=perm.device)
    return inverse


def _perm_before(data: Data) -> Tensor | None:
    """By what the data were reordered before."""
    pair = [data.get(key) for key in _OURS]
    if all(index is None for index in pair):
        return None
    nodes = torch.arange(data.num_nodes)
    if all(isinstance(index, Tensor) for index in pair):
        perm, inverse = (index.cpu() for index in pair)
        if perm.sort()[0].equal(nodes) and inverse.equal(_inverse(perm)):
            return perm
    raise ValueError(
        f'{_OURS[0]!r} and {_OURS[1]!r} are not what Reorder gave this graph: delete them first'
    )


def _node_dims(data: Data) -> dict[str, int]:
    """Node-level attributes, and which of their dimensions is that of nodes."""
    (store,) = data.node_stores
    return {
        key: data.__cat_dim__(key, value)
        for key, value in data.items()
        if key not in (*_OURS, 'num_nodes', 'face')
        # Lists of edges, and what belongs to them, can by chance be as long as there are nodes.
        and not any(name in key for name in ('edge_index', 'edge_label'))
        and store.is_node_attr(key)
        and not is_edge_attr(store, key)
    }


def _id_keys(data: Data) -> list[str]:
    """Attributes that batching counts up by the number of nodes."""
    return [
        key
        for key, value in data.items()
        if key not in _OURS
        and 'batch' not in key  # Counted up by its own values.
        and isinstance(inc := data.__inc__(key, value), int)
        and inc == data.num_nodes
    ]


def _renumbered(key: str, value: Any, inverse: Tensor) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_renumbered(key, part, inverse) for part in value])
    if isinstance(value, (int, np.integer, np.ndarray)) and np.asarray(value).dtype.kind in 'iu':
        ids = _renumbered(key, torch.from_numpy(np.asarray(value, dtype=np.int64)), inverse)
        return ids.numpy() if isinstance(value, np.ndarray) else int(ids)
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.dtype.is_floating_point:
        return value  # No ids, whatever its name.
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
    if num_nodes == 0:  # which SciPy refuses
        return col.new_empty(0, dtype=torch.int64)
    # Booleans, of which no sum is zero.
    parts = np.ones(col.numel(), dtype=bool), col.cpu().numpy(), rowptr.cpu().numpy()
    matrix = sparse.csr_matrix(parts, (num_nodes, num_nodes))
    perm = reverse_cuthill_mckee(matrix).astype(np.int64)  # A copy: it comes as a reversed view.
    return torch.from_numpy(perm).to(col.device)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as error:
        raise ImportError(
            "Reorder(method='rcm') needs SciPy: pip install 'pyg_fast[reorder]'"
        ) from error
    return sparse, reverse_cuthill_mckee


_METHODS = {'rabbit': rabbit_order, 'rcm': _by_rcm, 'degree': _by_degree}
