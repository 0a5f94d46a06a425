"""Sorts graphs by destination and stores their CSR and CSC."""

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.edge_index import CatMetadata, SortOrder
from torch_geometric.transforms import BaseTransform
from torch_geometric.transforms.rooted_subgraph import RootedSubgraphData
from torch_geometric.typing import EdgeType, TensorFrame
from torch_geometric.utils import is_torch_sparse_tensor

from .._alike import naming_keywords
from .._progress import LARGE, progress
from ..graph import PreparedGraph, graph_of, prepare_edge_index
from ..graph.csr import E_PERM, EDGE_ATTRS, perm_name, prepare_graph, set_perm_name
from ..ops._checks import check_has_values
from ..ops._edges import check_edge_index
from ..ops._numbers import check_flag

P = ParamSpec('P')
T = TypeVar('T')
Attribute: TypeAlias = Tensor | np.ndarray | list | tuple | TensorFrame

# Not permuted: the edges themselves, other edges, and the counts of a loader (lists that can
# have as many entries as there are edges).
_NO_EDGE_ATTRS = frozenset(
    ('edge_index', 'edge_label', 'edge_label_index', 'num_sampled_nodes', 'num_sampled_edges')
)
_ROOTED_ATTRS = frozenset(('sub_edge_index', 'n_id', 'e_id', 'n_sub_batch', 'e_sub_batch'))


@functional_transform('to_csr')
class ToCSR(BaseTransform):
    r"""Sorts edges by destination and stores their CSR and CSC forms (functional name:
    :obj:`to_csr`).

    Every :obj:`edge_index` of a :class:`~torch_geometric.data.Data` or
    :class:`~torch_geometric.data.HeteroData` object becomes an int64
    :class:`~torch_geometric.EdgeIndex` with the size of its graph and filled caches:

    .. math::
        \mathbf{e}^{\prime}_k = \mathbf{e}_{\pi(k)}, \quad
        \pi = \textrm{argsort}_{\textrm{stable}}(\textrm{destinations})

    All edge-level attributes are permuted too, except :obj:`edge_label` and
    :obj:`edge_label_index`. Attributes whose values are positions of edges keep their values. A
    warning tells if :obj:`edge_attr`, :obj:`edge_weight` or :obj:`edge_type` has not a row for each
    edge, and is thus left as it is.

    .. warning::
        Edge attributes that are not in :obj:`data` keep the old order, and no layer can tell.
        :obj:`data.e_perm` is the permutation :math:`\pi`, int64 :math:`(|\mathcal{E}|)`: pass
        :obj:`edge_attr[data.e_perm]`, or put :obj:`edge_attr` into :obj:`data` before, which is the
        only way with :obj:`keep_edge_index=False`.

    :obj:`e_perm` is an edge-level attribute itself: batches and subgraphs of prepared data have
    that of their edges. If the transform is applied again, it permutes :obj:`e_perm` along, but
    makes a new one for an :obj:`edge_index` that is a plain tensor, also that of
    :meth:`Data.subgraph`. Batches of a :class:`~pyg_fast.loader.FastNeighborLoader` leave it out:
    theirs is :obj:`data.e_perm[batch.e_id]`. Where there are as many edges as nodes, PyG takes an
    attribute for one of nodes, unless its name has :obj:`"edge"` in it: choose such a name.

    An :class:`~torch_geometric.EdgeIndex` that already has all of this stays the same object;
    missing or wrong caches are made again. Stores without :obj:`edge_index`
    (:obj:`adj_t`) are not changed.

    The caches survive :obj:`to`, :obj:`clone`, copies, pickling, :func:`torch.save` and
    :func:`torch.load` (with :obj:`weights_only=True` that of tensors and of
    :obj:`data.to_dict()`: PyG does not register :class:`~torch_geometric.data.Data` as safe).
    Batching and selecting edges drop them: apply the transform again to fill them; otherwise layers
    fill them when needed.

    With :obj:`keep_edge_index=False` :obj:`edge_index` becomes a
    :class:`~pyg_fast.graph.PreparedGraph`, which takes its place in layers and keeps only the int32
    structure; of a symmetric graph one side, whose rows ascend. The list is freed as soon as nobody
    else holds it: write :obj:`data = transform(data)`. On a GPU, preparing an unweighted graph of
    :math:`E` edges and :math:`N` nodes takes :math:`16 E` bytes on top of the list for the first
    sort, then :math:`20 E` bytes for the second (:math:`24 E` if degrees are symmetric), and
    :math:`4 N` bytes for each sorted side; :math:`8 E + 8 N` bytes stay, and about :math:`16 N` of
    groups of edges. Graphs with edge-level attributes are sorted as usual first, and also keep the
    positions in the transpose, :math:`4 E` bytes. From :math:`2^{31}` edges on, row pointers,
    groups and positions have 8 bytes instead of 4.

    If :obj:`num_nodes` is unknown, it is inferred from the edges, for a node type from all its
    edge types.

    .. warning::
        Put this transform last. Transforms after it that add, merge or drop edges, such as
        :obj:`AddSelfLoops`, :obj:`GCNNorm` and :obj:`ToUndirected`, leave a permutation
        :obj:`e_perm` of other edges, or merge its positions as if they were features; a sampling
        loader then warns.
        These of PyG 2.8 raise an error after it, some of them for some
        inputs only: :class:`~torch_geometric.transforms.FeaturePropagation`,
        :class:`~torch_geometric.transforms.GDC`,
        :class:`~torch_geometric.transforms.LineGraph`,
        :class:`~torch_geometric.transforms.RandomLinkSplit` (of edges between two node
        types), :class:`~torch_geometric.transforms.RemoveDuplicatedEdges`,
        :class:`~torch_geometric.transforms.RootedEgoNets`,
        :class:`~torch_geometric.transforms.RootedRWSubgraph`,
        :class:`~torch_geometric.transforms.SIGN` and
        :class:`~torch_geometric.transforms.ToSparseTensor`. These give wrong results or crash the
        interpreter, since :meth:`EdgeIndex.sort_by` mixes up the caches:
        :class:`~torch_geometric.transforms.AddMetaPaths`,
        :class:`~torch_geometric.transforms.AddRandomMetaPaths` and
        :class:`~torch_geometric.transforms.TwoHop`. Errors also come from :obj:`data.sort()`,
        :obj:`data.coalesce()` and, without :obj:`pyg-lib`, samplers such as
        :class:`~torch_geometric.loader.NeighborLoader`: give samplers the plain graph, and this
        transform as their :obj:`transform`.

    Args:
        keep_edge_index (bool): Whether :obj:`edge_index` keeps the list of the edges.
            (default: :obj:`True`)
        perm (str, optional): The attribute that keeps the permutation of the edges; :obj:`None`
            saves its :math:`8 E` bytes. Without :obj:`keep_edge_index` there is none.
            (default: :obj:`"e_perm"`)

    Shapes:
        - **input:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)` of any integer dtype
        - **output:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)`, :obj:`e_perm`
          :math:`(|\mathcal{E}|)`

    Raises:
        IndexError: If an index is negative or too large; like all errors, it names the store.
        TypeError: If an :obj:`edge_index` is not an integer tensor, or the input no data object.
        ValueError: If its shape is not :math:`(2, |\mathcal{E}|)`.
    """

    perm: str | None = E_PERM  # of a transform that an earlier version has saved

    @naming_keywords
    def __init__(self, keep_edge_index: bool = True, perm: str | None = E_PERM) -> None:
        check_no_data('ToCSR()', keep_edge_index)
        check_flag('keep_edge_index', keep_edge_index)
        if perm is not None and (not isinstance(perm, str) or not perm or perm[0] == '_'):
            raise ValueError(f"'perm' must be the name of an attribute or None, got {perm!r}")
        self.keep_edge_index = keep_edge_index
        self.perm = perm

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        check_data(data)
        stores = [store for store in data.edge_stores if 'edge_index' in store]
        for store in stores:
            _call_on(store, check_edge_index, store['edge_index'])
            _call_on(store, check_has_values, 'edge_index', store['edge_index'])
            _warn_of_rows(data, store)
        num_nodes = _node_counts(data, stores)
        shown = len(stores) > 1 and sum(store.num_edges for store in stores) >= LARGE
        for store in progress(stores, 'ToCSR', shown=shown):
            key = store._key or (None, None)
            size = num_nodes[key[0]], num_nodes[key[-1]]
            keep = self.keep_edge_index
            if isinstance(store['edge_index'], PreparedGraph):
                graph = store['edge_index'].graph
                if (graph.num_src, graph.num_dst) == size:
                    continue
                store['edge_index'], keep = store['edge_index'].to_edge_index(), False
                del graph
            has_perm = _find_perm(store, self.perm, keep)
            perm = _sort(data, store, size, keep, self.perm if has_perm else None)
            if perm is not None and self.perm is not None and keep:
                _keep_perm(store, self.perm, None if has_perm else perm)
        return data

    def __repr__(self) -> str:
        options = [] if self.keep_edge_index else ['keep_edge_index=False']
        options += [] if self.perm == E_PERM else [f'perm={self.perm!r}']
        return f'{type(self).__name__}({", ".join(options)})'


def check_data(data: object) -> None:
    """Raises unless a transform can be applied."""
    if not isinstance(data, BaseData):
        raise TypeError(f"'data' must be a Data or HeteroData, got {type(data).__name__}")


def check_no_data(transform: str, option: object) -> None:
    """Raises if the first option of a transform is data, which belong into its call."""
    if isinstance(option, BaseData):
        name = transform.partition('(')[0]
        raise TypeError(
            f'{name} takes options, and what it makes takes the data: write {transform}(data)'
        )


def _find_perm(store: EdgeStorage, name: str | None, keep: bool) -> bool:
    """Whether a store has the permutation of its edges from an earlier :class:`ToCSR`. Drops one
    that they do not have any more, and warns of an attribute from elsewhere."""
    if name is None or name not in store:
        return False
    value, edge_index = store[name], store['edge_index']
    # Batches and selections of prepared data are an EdgeIndex.
    derived = (
        isinstance(edge_index, EdgeIndex) and isinstance(value, Tensor)
        and value.dtype == torch.int64 and value.shape == (edge_index.size(1),)
    )  # fmt: skip
    if not derived and perm_name(store) != name:
        warnings.warn(
            f"ToCSR keeps no permutation of the edges, since the data have an attribute '{name}' "
            "already: give it another name by ToCSR(perm='...'), or none by perm=None",
            stacklevel=4,  # beside the call of the transform
        )
    elif not (derived and keep):
        del store[name]
    return derived and keep


def _keep_perm(store: EdgeStorage, name: str, perm: Tensor | None) -> None:
    """Keeps a permutation; None: that which the store has."""
    if perm is None or name not in store:
        set_perm_name(store, name)
        store[name] = store[name] if perm is None else perm


def _call_on(store: EdgeStorage, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function; adds the name of the store to its errors."""
    try:
        return func(*args, **kwargs)
    except (IndexError, TypeError, ValueError) as error:
        name = 'data' if store._key is None else f'data{list(store._key)}'
        raise type(error)(f'{name}: {error}') from error


def _warn_of_rows(data: Data | HeteroData, store: EdgeStorage) -> None:
    """Warns of an attribute whose name says that it is one of edges, but which has not a row for
    each, so that it is not sorted with them. It is no error: a model may do without."""
    num_edges = store['edge_index'].size(1)
    for key in EDGE_ATTRS:
        value = store.get(key)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) == num_edges:
            continue
        if data.__cat_dim__(key, value, store) == 0:
            # Without numbers, so that a transform of many batches warns once.
            warnings.warn(
                f"'{key}' has not a row for each edge, so ToCSR does not sort it with them, and no "
                f'layer can use it: give it as many rows, or delete it, del data.{key}',
                stacklevel=4,  # beside the call of the transform
            )


def _node_counts(data: Data | HeteroData, stores: list[EdgeStorage]) -> dict[str | None, int]:
    """The number of nodes by type; inferred from the edges if the data do not have it."""
    if not isinstance(data, HeteroData):
        if not stores:
            return {}
        count = data.num_nodes
        if count is None:  # PyG knows none where it is no number.
            got = type(data.get('num_nodes')).__name__
            raise TypeError(f"'data.num_nodes' must be an integer, got {got}")
        return {None: count}
    counts = {}
    for node_type in dict.fromkeys(t for store in stores for t in (store._key[0], store._key[-1])):
        # Indexing with a type that does not exist would create it.
        known = data[node_type].num_nodes if node_type in data.node_types else None
        counts[node_type] = _count_ends(stores, node_type) if known is None else known
    return counts


def _count_ends(stores: list[EdgeStorage], node_type: str) -> int:
    count = 0
    for store in stores:
        edge_index = store['edge_index']
        for end, dim in ((store._key[0], 0), (store._key[-1], 1)):
            if end != node_type:
                continue
            if isinstance(edge_index, EdgeIndex):
                count = max(count, edge_index.sparse_size(dim) or 0)
            if edge_index.size(1) > 0:
                count = max(count, int(edge_index[dim].max()) + 1)
    return count


def _sort(
    data: Data | HeteroData, store: EdgeStorage, size: tuple[int, int], keep_edge_index: bool,
    old_perm: str | None,
) -> Tensor | None:  # fmt: skip
    """Sorts edges and their attributes; returns their permutation, or None if they were sorted, or
    it is not known."""
    dims = _edge_attrs(data, store)
    if not keep_edge_index and not dims and not isinstance(data, RootedSubgraphData):
        _sort_structure(data, store, size)
        return None
    if old_perm is not None:  # Also with as many nodes as edges.
        dims[old_perm] = 0
    perm = _sort_all(data, store, size, dims)
    if not keep_edge_index:
        out = store['edge_index']
        store['edge_index'] = PreparedGraph(graph_of(out, *size))
        store['edge_index']._cat_metadata = out._cat_metadata
    return perm


def _sort_structure(data: Data | HeteroData, store: EdgeStorage, size: tuple[int, int]) -> None:
    held = [store['edge_index']]
    metadata = None
    if isinstance(data, Batch):
        metadata = _cat_metadata(data, store._key, held[0], size)
    store['edge_index'] = held[0].new_empty(2, 0)  # So that its memory can be freed.
    try:
        graph = _call_on(store, prepare_graph, held, size)
    except Exception:
        del store['edge_index']
        if held:
            store['edge_index'] = held[0]
        raise
    store['edge_index'] = PreparedGraph(graph)
    store['edge_index']._cat_metadata = metadata


def _edge_attrs(data: Data | HeteroData, store: EdgeStorage) -> dict[str, int]:
    """The edge-level attributes to permute, with the dimension of their edges."""
    skipped = _NO_EDGE_ATTRS
    if isinstance(data, RootedSubgraphData):
        skipped |= _ROOTED_ATTRS
    dims = {
        key: data.__cat_dim__(key, value, store)
        for key, value in store.items()
        if key not in skipped
    }
    # An additional `adj_t` has two such dimensions.
    return {k: d for k, d in dims.items() if isinstance(d, int) and is_edge_attr(store, k)}


def _sort_all(
    data: Data | HeteroData, store: EdgeStorage, size: tuple[int, int], dims: dict[str, int]
) -> Tensor | None:
    edge_index = store['edge_index']
    out, perm = _call_on(store, prepare_edge_index, edge_index, size)
    if isinstance(edge_index, EdgeIndex):
        # Caches are compared: `EdgeIndex.sort_by` and edits in place leave wrong ones.
        if _equal(edge_index, out):
            graph_of(edge_index, *size)
            return None
        out._is_undirected = edge_index.is_undirected and size[0] == size[1]
    if isinstance(data, Batch):
        out._cat_metadata = _cat_metadata(data, store._key, out, size)
    store['edge_index'] = out
    for key, dim in dims.items():
        store[key] = permute(store[key], perm, dim)
    if isinstance(data, RootedSubgraphData):
        position = torch.empty_like(perm)
        position[perm] = torch.arange(perm.numel(), device=perm.device)
        store['e_id'] = position[store['e_id']]
    return perm


def is_edge_attr(store: EdgeStorage, key: str) -> bool:
    """PyG's decision, also for lists and tuples if there are as many nodes as edges."""
    value = store[key]
    if (
        isinstance(value, (list, tuple))
        and isinstance(store, NodeStorage)
        and len(value) == store.num_nodes == store.num_edges
    ):
        return 'edge' in key
    return store.is_edge_attr(key)


def permute(value: Attribute, perm: Tensor, dim: int) -> Attribute:
    """An attribute with its entries along a dimension in another order."""
    if isinstance(value, Tensor):
        perm = perm.to(value.device)
        if is_torch_sparse_tensor(value):
            chosen = value.to_sparse_coo().index_select(dim, perm)
            return chosen.to_sparse(layout=value.layout)
        return value.index_select(dim, perm)
    if isinstance(value, np.ndarray):
        return np.take(value, perm.cpu().numpy(), axis=dim)
    if isinstance(value, (list, tuple)):
        return type(value)([value[i] for i in perm.tolist()])
    return value[perm]  # a TensorFrame


def _equal(edge_index: EdgeIndex, other: EdgeIndex) -> bool:
    """Whether edges, sizes, order and caches are equal."""

    def parts(index: EdgeIndex) -> tuple[Tensor | None, ...]:
        return index._data, index._indptr, index._T_perm, *index._T_index, index._T_indptr

    return (
        # The caches of an empty EdgeIndex stay behind when it moves.
        edge_index.device == other.device
        and tuple(edge_index.sparse_size()) == tuple(other.sparse_size())
        and edge_index.sort_order == other.sort_order
        and all(
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
            and torch.equal(a, b)
            for a, b in zip(parts(edge_index), parts(other), strict=True)
        )
    )


def _cat_metadata(
    batch: Batch, key: EdgeType | None, edge_index: Tensor, size: tuple[int, int]
) -> CatMetadata | None:
    """The metadata with which `Batch.get_example` restores the size of each graph."""
    slices, incs = (
        (attrs if key is None else attrs[key]).get('edge_index')
        for attrs in (batch._slice_dict, batch._inc_dict)
    )
    if slices is None or incs is None or int(slices[-1]) != edge_index.size(1):
        return None  # Edges changed after batching; PyG cannot undo that either.
    num_graphs = slices.numel() - 1
    starts = incs.view(num_graphs, -1).expand(-1, 2)
    # PyG subtracts a graph's start from its size.
    sizes = [*map(tuple, starts[1:].tolist()), size]
    return CatMetadata(
        nnz=slices.diff().tolist(),
        sparse_size=sizes,
        sort_order=[SortOrder.COL] * num_graphs,
        is_undirected=[getattr(edge_index, 'is_undirected', False)] * num_graphs,
    )
