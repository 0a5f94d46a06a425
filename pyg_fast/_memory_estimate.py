"""What a training step will need, by part, before it runs."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from .graph._cache import cache_of
from .graph.execution_path import ExecutionPath
from .graph.gcn_norm import NormRequest
from .graph.prepared_graph import PreparedGraph
from .nn._path import TILE, AggregatedInput
from .nn._reduce import InverseDegreeRequest
from .nn.path_prepared_gnn import PathPreparedGNN
from .ops._numbers import acc_dtype
from .ops.linear_product import aggregates_first
from .ops.row_blocks import tile_width
from .ops.streamed_linear import rows_of_block
from .sparse.graph import Graph


class MemoryEstimate(NamedTuple):
    """Bytes on the device of a training step, by part; :obj:`activations` and
    :obj:`temporaries` are those at the moment when the step needs most, which :obj:`moment` names.
    """

    graph: int
    paths: int
    features: int
    other: int
    parameters: int
    gradients: int
    optimizer: int
    activations: tuple[int, ...]  # of each layer
    temporaries: int
    moment: str

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(size for _, size in self._rows())

    def _rows(self) -> list[tuple[str, int]]:
        names = ('graph', 'paths', 'features', 'other', 'parameters', 'gradients', 'optimizer')
        rows = [(name, getattr(self, name)) for name in names]
        rows += [(f'activations[{k}]', size) for k, size in enumerate(self.activations)]
        return [*rows, ('temporaries', self.temporaries)]

    def __repr__(self) -> str:
        rows = [*self._rows(), ('total', self.total)]
        lines = [f'  {name:<16}{_readable(size):>12}' for name, size in rows]
        return '\n'.join([f'{type(self).__name__}(most in {self.moment}', *lines, ')'])


def memory_estimate(
    model: PathPreparedGNN,
    data: Data,
    *,
    x: Tensor | AggregatedInput | None = None,
    active_only: bool = False,
    optimizer_states: int = 2,
) -> MemoryEstimate:
    r"""Estimates the device memory of one training step of a model on execution paths: forward,
    cross entropy on the training nodes, backward and the step of an optimizer.

    It reads sizes, counts and degrees, and makes nothing of the size of the features. Sizes are
    those of a GPU's allocator up to rounding; what libraries take for themselves, such as cuBLAS'
    workspace, is not included.

    Args:
        model (PathPreparedGNN): The model, with the options of the step (:obj:`checkpoint`,
            :obj:`tile`).
        data (Data): The graph on its device, prepared (:class:`~pyg_fast.transforms.Prepare`), with
            :obj:`execution_paths`. All its tensors on the device count.
        x (Tensor or AggregatedInput, optional): The input of the model. Features in host memory are
            staged. (default: :obj:`None`, :obj:`data.x`)
        active_only (bool): As in the model's call. (default: :obj:`False`)
        optimizer_states (int): How many tensors of its size the optimizer keeps for a parameter: 2
            for Adam, 0 for SGD. (default: :obj:`2`)

    Returns:
        MemoryEstimate: Bytes by part, with their :obj:`total`; its :obj:`repr` is a table.

    Raises:
        TypeError: If :obj:`model` is no :class:`~pyg_fast.nn.PathPreparedGNN`.
        ValueError: If :obj:`data` has no features or not one path for each layer.
    """
    if not isinstance(model, PathPreparedGNN):
        raise TypeError(f"'model' must be a PathPreparedGNN, got {type(model).__name__}")
    x = data.get('x') if x is None else x
    if not isinstance(x, (Tensor, AggregatedInput)):
        raise ValueError(f"'data' must have features 'x', or give 'x', got {type(x).__name__}")
    paths = data.get('execution_paths')
    if not isinstance(paths, (list, tuple)) or len(paths) != model.num_layers:
        count = len(paths) if isinstance(paths, (list, tuple)) else 0
        raise ValueError(
            f"'data.execution_paths' must be those of {model.num_layers} layers, got {count}: "
            'apply Prepare or ExecutionPaths'
        )
    device = paths[0].device
    seen: set[int] = set()

    def bytes_of(tensors: Iterable[Any]) -> int:
        return _storages(tensors, device, seen)

    edge_index = data.get('edge_index')
    graph = bytes_of(_of_graph(edge_index)) + _scales(model, edge_index, x, paths, device)
    held = bytes_of(t for path in paths for t in _of_path(path))
    held += sum(_of_first_call(model, path, x, edge_index) for path in paths)
    if isinstance(x, AggregatedInput):
        features = bytes_of([x.aggregated, x.root, x.nodes])
        if x.nodes is None and paths[0].forward and not paths[0].is_whole:
            features += paths[0].num_dst * x.size(1) * x.dtype.itemsize  # the rows of the path
    else:
        features = bytes_of([x])
    parameters = bytes_of(model.parameters())
    other = bytes_of(value for store in data.stores for value in store.values())
    other += bytes_of(model.buffers())
    step = _Step()
    _simulate(step, model, x, paths, active_only, _whole_graph(edge_index))
    activations = [0] * model.num_layers
    temporaries = 0
    for (layer, _), size in step.at_peak.items():
        if layer is None:
            temporaries += size
        else:
            activations[layer] += size
    return MemoryEstimate(
        graph, held, features, other, parameters, parameters, optimizer_states * parameters,
        tuple(activations), temporaries, step.moment,
    )  # fmt: skip


def _readable(size: int) -> str:
    for unit, name in ((2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB')):
        if size >= unit:
            return f'{size / unit:.2f} {name}'
    return f'{size} B'


def _storages(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """The bytes of all storages on a device that were not seen before."""
    total = 0
    for t in tensors:
        if type(t) is not Tensor and not isinstance(t, torch.nn.Parameter):
            continue
        if t.device != device or t.layout != torch.strided:
            continue
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _of_graph(edge_index: Any) -> list[Any]:
    if not isinstance(edge_index, EdgeIndex):
        return [edge_index]
    if isinstance(edge_index, PreparedGraph):
        parts = list(edge_index._tensors())
    else:
        parts = [edge_index._data, edge_index._indptr, edge_index._T_perm, edge_index._T_indptr]
        parts += edge_index._T_index
    entries = cache_of(edge_index).entries.values()
    return parts + [t for entry in entries for t in entry.tensors]


def _of_path(path: ExecutionPath) -> list[Any]:
    return [getattr(path, name) for name in path._TENSORS] + [
        t for entry in path._derived.values() for t in entry.tensors
    ]


def _scales(
    model: PathPreparedGNN, edge_index: Any, x: Any, paths: Any, device: torch.device
) -> int:
    """What the first call computes for the graph and keeps with it."""
    if not isinstance(edge_index, EdgeIndex) or isinstance(x, AggregatedInput):
        return 0
    kind = {'gcn': NormRequest, 'sage': InverseDegreeRequest}.get(model.conv)
    requests = cache_of(edge_index).entries
    if kind is None or any(isinstance(request, kind) for request in requests):
        return 0
    return paths[0].num_nodes * acc_dtype(x.dtype).itemsize * (2 if model.conv == 'gcn' else 1)


def _of_first_call(
    model: PathPreparedGNN, path: ExecutionPath, x: Any, edge_index: Any
) -> int:
    """What the first step computes for a path and keeps with it."""
    total, made = 0, {key[0] for key in path._derived if isinstance(key, tuple)}
    if path.is_whole:
        graph = _whole_graph(edge_index)
        recomputes = model.checkpoint and model.conv != 'gin' and path.forward
        if not recomputes or graph is None or 'blocks' in made:
            return 0
        return graph.rowptr.nbytes + sum(
            t.nbytes for t in graph.groups or () if isinstance(t, Tensor)
        )
    if path.rowptr is not None and path.t_rowptr is not None and 'groups' not in made:
        for rowptr, size in ((path.rowptr, path.group_size), (path.t_rowptr, path.t_group_size)):
            total += 0 if size is None else _groups(rowptr, size)
    recomputes = model.checkpoint and model.conv != 'gin'
    if recomputes and path.rowptr is not None and 'blocks' not in made:
        total += path.rowptr.nbytes
        total += 0 if path.group_size is None else _groups(path.rowptr, path.group_size)
    if not made & {'gcn', 'mean', 'sum'} and not (
        path.layer == 0 and isinstance(x, AggregatedInput)
    ):
        # Scales and diagonals of the path's rows; those of all nodes are the graph's.
        acc = acc_dtype(x.dtype).itemsize
        num_src = path.num_src
        if path.src_nodes is None:
            num_src = path.num_nodes if path.stands_alone else 0
        if model.conv == 'gcn':
            total += 2 * acc * (path.num_dst + num_src)
        elif path.loops is not None:
            total += acc * (path.num_dst + num_src)
        if model.conv == 'sage':
            total += acc * path.num_dst
    return total


def _whole_graph(edge_index: Any) -> Graph | None:
    if not isinstance(edge_index, EdgeIndex):
        return None
    values = (entry.value for entry in cache_of(edge_index).entries.values())
    return next((value for value in values if isinstance(value, Graph)), None)


def _groups(rowptr: Tensor, size: int) -> int:
    counts = (rowptr.diff() + (size - 1)) // size
    num_groups, num_long = int(counts.clamp(min=1).sum()), int((counts > 1).sum())
    return (3 * num_groups + 3 * num_long + 2) * rowptr.element_size()


class _Step:
    """The tensors of a step, as they come and go. A name with a layer is kept from the forward pass
    for the backward pass; others are temporary."""

    def __init__(self) -> None:
        self.live: dict[tuple[int | None, str], int] = {}
        self.at_peak: dict[tuple[int | None, str], int] = {}
        self.peak, self.moment, self.where = -1, '', ''

    def make(self, name: str, size: int, layer: int | None = None) -> None:
        """Allocates a tensor."""
        self.live[layer, name] = size
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak, self.moment = total, dict(self.live), self.where

    def sum(self, name: str, size: int, sums: int, layer: int | None = None) -> None:
        """Allocates a product, for a moment with its partial sums."""
        self.make(name, size, layer)
        self.make('partial sums', sums)
        self.free('partial sums')

    def free(self, *names: str, layer: int | None = None) -> None:
        """Frees tensors, if they exist."""
        for name in names:
            self.live.pop((layer, name), None)


class _Sizes(NamedTuple):
    """A layer's sizes: rows and columns of its input and output, bytes of a number."""

    num_src: int
    num_dst: int
    fin: int
    fout: int
    item: int
    gathers: bool  # whether its sources are picked from the rows of all nodes
    has_root: bool
    first: bool  # whether it aggregates before the linear map
    streams: bool
    block: int  # rows
    tile: int | None
    tiles: int  # on the device at once
    needs_x: bool
    rectifies: bool
    partials: int  # partial sums of a GPU's groups
    t_partials: int

    @property
    def sums(self) -> int:
        """The bytes of the aggregated features."""
        return self.num_dst * self.fin * self.item

    @property
    def out(self) -> int:
        """The bytes of the output."""
        return self.num_dst * self.fout * self.item

    @property
    def acc(self) -> int:
        """The bytes of a number of a sum."""
        return max(4, self.item)

    @property
    def partial_sums(self) -> int:
        """The bytes of the partial sums of the forward pass."""
        return self.partials * (self.fin if self.first else self.fout) * self.acc

    @property
    def t_partial_sums(self) -> int:
        """The bytes of the partial sums of the backward pass."""
        return self.t_partials * (self.fin if self.first else self.fout) * self.acc

    @property
    def grad_x(self) -> int:
        """The bytes of the gradient of the input."""
        return self.num_src * self.fin * self.item


def _partials(path: ExecutionPath, graph: Graph | None, transpose: bool) -> int:
    """The number of partial sums that a product makes where it divides rows into groups."""
    if path.rowptr is None or path.t_rowptr is None:
        groups = None if graph is None else graph.t_groups if transpose else graph.groups
        return 0 if groups is None else groups.num_partials
    size = path.t_group_size if transpose else path.group_size
    if size is None:
        return 0
    counts = ((path.t_rowptr if transpose else path.rowptr).diff() + (size - 1)) // size
    return int(counts[counts > 1].sum())


def _sizes(
    model: PathPreparedGNN,
    k: int,
    x: Any,
    paths: Any,
    device: torch.device,
    graph: Graph | None,
) -> _Sizes:
    path: ExecutionPath = paths[k]
    conv: Any = model.convs[k]
    num_nodes = path.num_nodes
    on_path = path.forward and not path.is_whole
    num_dst = path.num_dst if on_path else num_nodes
    below = paths[k - 1].forward and not paths[k - 1].is_whole if k > 0 else False
    num_src = path.num_src if on_path and path.src_nodes is not None else num_nodes
    fin, fout = model._widths[k : k + 2]
    item = x.dtype.itemsize
    staged = k == 0 and isinstance(x, Tensor) and (x.device != device or model.tile is not None)
    needs_x = k > 0 or (isinstance(x, Tensor) and x.requires_grad)
    first = staged or model.conv == 'gin'
    if not first:
        weight = conv.lin.weight if model.conv == 'gcn' else conv.lin_l.weight
        first = aggregates_first(weight, needs_x, True, num_dst < num_src)
    recomputes = model.checkpoint and first and path.forward and model.conv != 'gin'
    tile = tile_width(fin, model.tile or TILE) if staged else None
    return _Sizes(
        num_src, num_dst, fin, fout, item, on_path and path.src_nodes is not None and not below,
        model.conv == 'sage' and conv.root_weight, first, (recomputes or staged)
        and model.conv != 'gin', min(num_dst, rows_of_block(num_dst)), tile,
        2 if x.device != device and tile != fin else 1, needs_x, model._is_relu(),
        _partials(path, graph, False), _partials(path, graph, True),
    )  # fmt: skip


def _simulate(
    step: _Step,
    model: PathPreparedGNN,
    x: Any,
    paths: Any,
    active_only: bool,
    graph: Graph | None,
) -> None:
    device = paths[0].device
    layers = [_sizes(model, k, x, paths, device, graph) for k in range(model.num_layers)]
    constant = isinstance(x, AggregatedInput)
    picks = constant and x.nodes is None and paths[0].forward and not paths[0].is_whole
    again = model.checkpoint and model.conv == 'gin'
    for k, s in enumerate(layers):
        step.where = f'the forward pass of layer {k}'
        last = k == model.num_layers - 1
        _forward(step, k, s, model, constant and k == 0, picks and k == 0)
        if not last:
            _follow(step, k, s, model)
        if again and not last:  # Only its input and its result are kept.
            step.free('sums', 'normed', 'before', 'hidden', layer=k)
    top, num_nodes = layers[-1], paths[-1].num_nodes
    step.where = 'the loss'
    some = paths[-1].num_dst
    rows = some * top.fout * top.item
    compact = paths[-1].forward and not paths[-1].is_whole
    if compact and not active_only:
        step.make('all', num_nodes * top.fout * top.item)
        step.free('out')
    if not (compact and active_only):
        step.make('active', rows)
    step.make('log_softmax', rows)
    step.where = 'the backward pass of the loss'
    step.make('grad of log_softmax', rows)
    step.make('grad', rows)
    step.free('log_softmax', 'grad of log_softmax')
    if not (compact and active_only):
        step.make('grad of all', num_nodes * top.fout * top.item)
        step.free('grad')
        if compact:
            step.make('grad', rows)
            step.free('grad of all')
        else:
            step.live[None, 'grad'] = step.live.pop((None, 'grad of all'))
    for k in reversed(range(model.num_layers)):
        s = layers[k]
        step.where = f'the backward pass of layer {k}'
        if again and k < model.num_layers - 1:
            step.free('result', layer=k)
            _forward(step, k, s, model, constant and k == 0, picks and k == 0)
            _follow(step, k, s, model)
        if k < model.num_layers - 1 and not (s.streams and s.rectifies and not len(model.norms)):
            _backward_of_what_follows(step, k, s, model)
        _backward(step, k, s, model, constant and k == 0, paths[k])


def _forward(
    step: _Step, k: int, s: _Sizes, model: PathPreparedGNN, constant: bool, picks: bool
) -> None:
    """A layer up to its output, named 'out'. A :obj:`constant` input is aggregated already; the
    layer may have to pick its own rows."""
    if model.conv == 'gin':
        learned = model.convs[k].eps.requires_grad
        if picks:
            step.make('picked', s.sums)
        step.sum('sums', s.sums, s.partial_sums if not constant else 0, k)
        if learned and not constant:
            step.make('own', s.sums, k)
            step.make('plus own', s.sums, k)
            step.free('sums', layer=k)
            step.live[k, 'sums'] = step.live.pop((k, 'plus own'))
        elif learned and picks:
            step.live[k, 'own'] = step.live.pop((None, 'picked'))
        step.free('picked')
        step.make('linear', s.out)
        step.make('hidden', s.out, k)
        step.free('linear')
        step.make('out', s.out)
        return
    if constant:
        step.make('out', s.out)
        if s.has_root:
            if picks:
                step.make('own', s.sums, k)
            step.make('out of own', s.out)
        step.make('sum', s.out)
        step.free('sum', 'out of own')
        return
    if s.gathers and s.tile is None:
        step.make('sources', s.grad_x)
    if s.streams:
        _streamed(step, s)
        step.make('out', s.out)
        _block_forward(step, s)
        step.free('tiles', 'sources')
        return
    if s.first:
        step.sum('sums', s.sums, s.partial_sums, k)
        step.make('out', s.out)
    else:
        step.make('mapped', s.num_src * s.fout * s.item)
        step.sum('out', s.out, s.partial_sums)
    if s.has_root and s.num_dst != s.num_src:
        step.make('own', s.sums)
        step.free('own')
    step.free('mapped', 'sources')


def _streamed(step: _Step, s: _Sizes) -> None:
    if s.tile is not None:
        step.make('tiles', s.tiles * s.num_src * s.tile * s.item)


def _block_forward(step: _Step, s: _Sizes) -> None:
    rows, columns = (s.block, s.fin) if s.tile is None else (s.num_dst, s.tile)
    of_block = s.partials * rows // max(1, s.num_dst)
    step.sum('block', rows * columns * s.item, of_block * columns * s.acc)
    if s.has_root:
        step.make('own', rows * columns * s.item)
    step.free('block', 'own')
    if s.rectifies:
        step.make('block', s.block * s.fout * s.item)
        step.free('block')


def _follow(step: _Step, k: int, s: _Sizes, model: PathPreparedGNN) -> None:
    """What follows a hidden layer: its last result is kept."""
    if s.streams and s.rectifies and len(model.norms) == 0 and not getattr(
        model.convs[k], 'normalize', False
    ):  # fmt: skip
        step.live[k, 'result'] = step.live.pop((None, 'out'))
        return
    if len(model.norms) > 0:
        step.make('normed', s.out, k)
        step.live[k, 'before'] = step.live.pop((None, 'out'))
        step.live[None, 'out'] = step.live.pop((k, 'normed'))
    if not s.rectifies and model.act is not None:
        step.make('act', s.out)
        if model.dropout > 0:
            step.live[k, 'activated'] = step.live.pop((None, 'out'))
            step.live[None, 'out'] = step.live.pop((None, 'act'))
        else:
            step.free('out')
            step.live[None, 'out'] = step.live.pop((None, 'act'))
    if s.rectifies or model.dropout > 0:
        step.make('result', s.out, k)
        step.free('out')
    else:
        step.live[k, 'result'] = step.live.pop((None, 'out'))


def _backward_of_what_follows(
    step: _Step, k: int, s: _Sizes, model: PathPreparedGNN
) -> None:
    """Turns 'grad' of a hidden layer's result into that of its output."""
    if not s.rectifies:  # Only the next layer has kept it.
        step.free('result', layer=k)
    for name, happens in (
        ('result', s.rectifies or model.dropout > 0),
        ('activated', not s.rectifies and model.act is not None),
        ('before', len(model.norms) > 0),
    ):
        if happens:
            step.make('grad before', s.out)
            step.free('grad')
            step.live[None, 'grad'] = step.live.pop((None, 'grad before'))
        step.free(name, layer=k)


def _backward(
    step: _Step,
    k: int,
    s: _Sizes,
    model: PathPreparedGNN,
    constant: bool,
    path: ExecutionPath,
) -> None:
    """Turns 'grad' of a layer's output into that of its input."""
    # As in LinearProduct: a sum that is the gradient itself has a row for each node.
    is_sum = (model.conv == 'gin' or s.streams or s.first) and not s.has_root
    every, in_place = path.num_nodes * s.fin * s.item, s.gathers and is_sum
    grad_x = every if in_place else s.grad_x
    if model.conv == 'gin':
        step.make('grad of hidden', s.out)
        step.free('grad')
        step.make('grad of linear', s.out)
        step.free('grad of hidden')
        step.free('hidden', layer=k)
        step.make('grad', s.sums)
        step.free('grad of linear')
        step.free('sums', layer=k)
        if s.needs_x and not constant:
            step.sum('grad of x', grad_x, s.t_partial_sums)
    elif constant:
        pass
    elif s.streams:
        if s.gathers and s.tile is None:
            step.make('sources', s.grad_x)
        _streamed(step, s)
        _block_forward(step, s)
        step.make('block', s.block * (s.fin + s.fout) * s.item)
        step.free('block', 'tiles', 'sources')
        if s.needs_x:
            step.make('mapped', s.sums)
            step.sum('grad of x', grad_x, s.t_partial_sums)
            step.free('mapped')
            if s.has_root:
                step.make('block', s.block * (s.fin + s.fout) * s.item)
                step.free('block')
        step.free('result', layer=k)
    elif s.first:
        if s.needs_x:
            step.make('mapped', s.sums)
            step.sum('grad of x', grad_x, s.t_partial_sums)
            step.free('mapped')
    else:
        step.sum('mapped', s.num_src * s.fout * s.item, s.t_partial_sums)
        if s.gathers:
            step.make('sources', s.grad_x)
        if s.needs_x:
            step.make('grad of x', s.grad_x)
    if s.has_root and not s.streams and not constant and s.num_dst != s.num_src:
        step.make('own', s.sums)
        step.free('own')
        if s.needs_x:
            step.make('of own', s.sums)
            step.free('of own')
    step.free('mapped', 'sources', 'grad')
    step.free('sums', 'own', layer=k)
    if s.gathers and s.needs_x and not in_place:
        step.make('grad of all', every)
        step.free('grad of x')
        step.live[None, 'grad of x'] = step.live.pop((None, 'grad of all'))
    if (None, 'grad of x') in step.live:
        step.live[None, 'grad'] = step.live.pop((None, 'grad of x'))
