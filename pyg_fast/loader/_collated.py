"""A dataset of graphs, collated once, and the batches made of it."""

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.utils import is_sparse

from ..errors import DtypeError, ShapeError
from ..graph.prepared_graph import list_of
from ._attributes import Attribute, Column, Order, Slices, cut_rows
from ._edges import GraphEdges, add_ring
from ._levels import EDGES, GRAPHS, NODES, Ints, Levels, NumReal
from ._place import Place
from ._read_graphs import with_bar
from ._selection import DeviceRows, Draw, RowSources, Selection
from ._send import send

_log = logging.getLogger('pyg_fast')


class Collated:
    """A dataset of graphs, collated.

    Args:
        graphs: The graphs.
        place: Where batches read attributes.
        sort: Whether edges are sorted by destination.
        follow_batch: The attributes of which batches tell the graph of each row.
        exclude_keys: The attributes that batches do not have.

    Raises:
        TypeError, ValueError: If the graphs differ in what they have.
        IndexError: If an edge names a node that its graph does not have.
        NotCollatable: If only PyG's code can collate them.
    """

    def __init__(
        self, graphs: Sequence[Data], place: Place, sort: bool, follow_batch: Collection[str],
        exclude_keys: Collection[str],
    ) -> None:  # fmt: skip
        first = graphs[0]
        self.device, self._follow = place.device, frozenset(follow_batch)
        columns = _read(graphs, exclude_keys)
        self.num_nodes = _count_nodes(graphs)
        self._has_batch = first._store.can_infer_num_nodes
        column, edge_index = columns.get('edge_index'), None
        self.num_edges = np.zeros_like(self.num_nodes)
        # Whether the edges of a batch are those of one graph with all its nodes.
        self.has_edges = column is not None and column.are_edges(self.num_nodes)
        self.can_be_padded = self._has_batch and (column is None or self.has_edges)
        if column is not None and self.has_edges:
            self.num_edges, edge_index = column.num_rows(), column.join()
            _check_nodes(edge_index, self.num_nodes, self.num_edges)
        self.levels = Levels(self.num_nodes, self.num_edges)
        for key, column in columns.items():
            if self.has_edges and column.is_tensor:
                self.levels.check_rows(key, column.num_rows())
        edges, order = None, None
        unsure = [column.why_unsure(self.levels) for column in columns.values()] if sort else []
        reason = next(filter(None, unsure), None)
        if edge_index is not None and reason is not None:
            _log.warning('GraphLoader keeps the edges in the order of the dataset: %s', reason)
        elif edge_index is not None and sort:
            edges = GraphEdges(edge_index, self.levels, place)
            order = Order(self.levels, edges.perm)
        self._sources = RowSources()
        self._attributes: dict[str, Attribute | None] = {
            key: None if key == 'num_nodes' else
            edges if key == 'edge_index' and edges is not None else
            column.collate(self.levels, place, order, self._sources)
            for key, column in columns.items()
        }  # fmt: skip
        self._edges = edges
        #: Whether all attributes are in the memory of the device: none is in pinned memory.
        self.is_on_device = place.is_on_device
        self._template = Batch(_base_cls=type(first)).stores_as(first)

    @property
    def own_masks(self) -> list[str]:
        """The attributes with names of masks of the padding."""
        return [name for name in _MASKS if name in self._attributes]

    def make_batch(self, draw: Draw, masks: bool) -> Batch:
        """The batch of some graphs, filled up by their padding.

        Args:
            draw: The graphs.
            masks: Whether the batch tells which nodes, edges and graphs are not of the padding.
        """
        graphs = Selection(draw)
        sent = draw.send(self.device) or send(graphs.numbers(), self.device)
        out, store = _copy_of(self._template)
        values = store._mapping
        values.update(self.values(DeviceRows(graphs.sizes, sent, graphs.ids), masks))
        if self._edges is not None:
            values['edge_index'] = self._edges.join(values['edge_index'], draw.padding)
        if 'num_nodes' in self._attributes:
            store.__dict__['_num_nodes'] = np.diff(graphs.ptr[NODES]).tolist()
        store.__dict__['_num_graphs'] = graphs.num_graphs
        store.__dict__['_num_real'] = graphs.real
        for name in ('slices', 'incs'):
            store.__dict__[_NAMES[name]] = Lazy(partial(self._tell, name, graphs))
        return out

    def values(self, batch: DeviceRows, masks: bool) -> dict[str, object]:
        """The values of a batch, made by operations on its device; those of an
        :class:`~torch_geometric.EdgeIndex` are tensors, see :class:`~._edges.EdgeTensors`. For the
        same sizes a CUDA graph may hold the operations.

        Args:
            batch: The rows of the batch.
            masks: As of :meth:`make_batch`.
        """
        values: dict[str, object] = {}
        owner = (NODES,) if self._has_batch else ()
        batch.read(self._sources, owner, tuple(_MASKS.values()) if masks else ())
        for key, attribute in self._attributes.items():
            if attribute is None:
                values[key] = batch.num_rows(NODES)
                continue
            value = attribute.take(batch)
            if key == 'edge_index' and isinstance(value, Tensor) and batch.sizes.is_padded:
                value = add_ring(value, batch)
            values[key] = value
            if key in self._follow:
                values[f'{key}_batch'], values[f'{key}_ptr'] = attribute.follow(batch)
        if self._has_batch:
            values['batch'], values['ptr'] = batch.owner(NODES), batch.offsets(NODES)
        if masks:
            for name, level in _MASKS.items():
                if name not in self._attributes:  # A loader that pads refuses others' masks.
                    values[name] = batch.are_real(level)
        return values

    def cut(self, batch: Batch, real: NumReal, levels: Collection[int] = (GRAPHS, NODES, EDGES)
    ) -> Batch:  # fmt: skip
        """A padded batch without the rows of the padding, as views.

        Args:
            batch: The batch, which stays as it is.
            real: Its numbers of rows that are not of the padding.
            levels: The levels that are cut.
        """
        out = copy.copy(batch)
        counts = {level: real[level] for level in levels}
        values = out._store._mapping
        for key, attribute in self._attributes.items():
            if key not in values:
                continue
            if attribute is None:
                if NODES in counts:
                    values[key] = real.nodes
                continue
            values[key] = attribute.cut(values[key], counts)
            if key in self._follow and f'{key}_batch' in values:
                values[f'{key}_batch'] = attribute.cut_follow(values[f'{key}_batch'], counts)
                if GRAPHS in counts:
                    values[f'{key}_ptr'] = tree_map(
                        lambda ptr: ptr[: real.graphs + 1], values[f'{key}_ptr']
                    )
        for key, level in _OF_LEVEL.items():
            if key in values:
                values[key] = cut_rows(values[key], level, counts)
        if GRAPHS in counts:
            out._store.__dict__['_num_graphs'] = real.graphs
            if '_num_nodes' in out._store.__dict__:
                sizes = out._store.__dict__['_num_nodes'][: real.graphs]
                out._store.__dict__['_num_nodes'] = sizes
        if GRAPHS in counts and NODES in counts and 'ptr' in values:
            values['ptr'] = values['ptr'][: real.graphs + 1]
        return out

    def list_own_rows(self) -> list[str]:
        """The attributes with other rows than one for each node, edge or graph."""
        return [
            key
            for key, attribute in self._attributes.items()
            if attribute is not None and attribute.has_own_rows()
        ]

    def _tell(self, name: str, graphs: Selection) -> dict[str, Slices]:
        return {
            key: getattr(attribute, name)(graphs)
            for key, attribute in self._attributes.items()
            if attribute is not None
        }


_MASKS = {'node_mask': NODES, 'edge_mask': EDGES, 'graph_mask': GRAPHS}
_OF_LEVEL = {'batch': NODES, **_MASKS}
_NAMES = {'slices': '_slice_dict', 'incs': '_inc_dict'}


class Lazy(Mapping[str, Slices]):
    """A dictionary of a batch that is made when somebody reads it."""

    def __init__(self, make: Callable[[], dict[str, Slices]]) -> None:
        self._make = make
        self._values: dict[str, Slices] | None = None

    def _read(self) -> dict[str, Slices]:
        if self._values is None:
            self._values = self._make()
            del self._make  # and what it holds
        return self._values

    def __getitem__(self, key: str) -> Slices:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __reduce__(self) -> tuple:
        return dict, (self._read(),)


def _copy_of(template: Batch) -> tuple[Batch, GlobalStorage]:
    """A copy of an empty batch, in a tenth of the time that its constructor takes."""
    out, store = Data.__new__(type(template)), GlobalStorage.__new__(type(template._store))
    out.__dict__.update(template.__dict__)
    store.__dict__.update(template._store.__dict__)
    store.__dict__['_mapping'] = dict(template._store._mapping)
    store.__dict__['_parent'] = weakref.ref(out)
    out.__dict__['_store'] = store
    return out, store


def _read(graphs: Sequence[Data], exclude_keys: Collection[str]) -> dict[str, Column]:
    """The attributes of all graphs."""
    keys = [key for key in graphs[0]._store if key not in exclude_keys]
    columns = {key: Column(key) for key in keys if key != 'ptr'}
    wanted = set(keys)
    cls = type(graphs[0])
    joins_as_pyg = cls.__cat_dim__ is Data.__cat_dim__ and cls.__inc__ is Data.__inc__
    for number, data in enumerate(with_bar(graphs, 'collating graphs')):
        if type(data) is not type(graphs[0]):
            raise TypeError(
                f"'dataset' must hold graphs of one class, got {type(graphs[0]).__name__} as graph "
                f'0 and {type(data).__name__} as graph {number}'
            )
        found = {key for key in data._store if key not in exclude_keys}
        for key in found ^ wanted:
            has, lacks = (0, number) if key in wanted else (number, 0)
            raise ValueError(
                f"'{key}' is in graph {has} of the dataset but not in graph {lacks}: give it to "
                f"all graphs, or pass exclude_keys=['{key}']"
            )
        for key, column in columns.items():
            value = data._store[key]
            if key == 'num_nodes':
                continue
            if key == 'edge_index' and isinstance(value, EdgeIndex):
                value = list_of(value)
            if key == 'edge_index' and joins_as_pyg:
                _check_edges(number, value)
            column.add(number, data, value)
    return columns


def _check_edges(graph: int, edge_index: object) -> None:
    """Raises for a tensor that cannot be a list of edges."""
    if not isinstance(edge_index, Tensor) or is_sparse(edge_index):
        return
    if edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool:
        raise DtypeError(
            f"'edge_index' of graph {graph} of the dataset must hold integers, got "
            f'{edge_index.dtype}'
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        cure = ': edge_index.t().contiguous()' if edge_index.shape[1:] == (2,) else ''
        raise ShapeError(
            f"'edge_index' of graph {graph} of the dataset must have shape [2, num_edges], got "
            f'{list(edge_index.shape)}{cure}'
        )


def _count_nodes(graphs: Sequence[Data]) -> Ints:
    return np.array([data._store.num_nodes or 0 for data in graphs], dtype=np.int64)


def _check_nodes(edge_index: Tensor, num_nodes: Ints, num_edges: Ints) -> None:
    """Raises an error that names the first graph with an edge of a node that it does not have."""
    if edge_index.size(1) == 0:
        return
    limit = np.repeat(num_nodes, num_edges)
    ends = edge_index.cpu().numpy()
    wrong = ((ends < 0) | (ends >= limit)).any(0)
    if wrong.any():
        edge = int(wrong.argmax())
        graph = int(np.searchsorted(np.cumsum(num_edges), edge, side='right'))
        raise IndexError(
            f"'edge_index' of graph {graph} of the dataset must hold nodes in "
            f'[0, {num_nodes[graph]}), got the edge {ends[:, edge].tolist()}'
        )
