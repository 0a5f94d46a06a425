"""What a training step will need, by part, before it runs."""

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from .graph._cache import cache_of, tensors_of
from .graph.prepared_graph import PreparedGraph
from .nn import AggregatedInput
from .ops._numbers import acc_dtype, check_flag, check_number
from .ops.path import Rows
from .papers.paths import ExecutionPath, PathPreparedGNN


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
        lines = [f'  {name:<16}{_format_bytes(size):>12}' for name, size in rows]
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

    It runs the step on tensors without data, and counts their bytes: nothing of the size of the
    features is made. What the first step would compute for the graph and its paths, and keep with
    them, is computed and kept. Sizes are those of a GPU's allocator up to rounding; what libraries
    take for themselves, such as cuBLAS' workspace, is not included.

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
        TypeError: If an argument is of the wrong type.
        ValueError: If :obj:`optimizer_states` is negative, :obj:`data` has no features or not one
            path for each layer, or as the model's call.
    """
    if not isinstance(model, PathPreparedGNN):
        raise TypeError(f"'model' must be a PathPreparedGNN, got {type(model).__name__}")
    if not isinstance(data, Data):
        raise TypeError(f"'data' must be a torch_geometric.data.Data, got {type(data).__name__}")
    check_flag('active_only', active_only)
    check_number('optimizer_states', optimizer_states)
    x = data.get('x') if x is None else x
    paths = _check_arguments(model, data, x)
    device, edge_index = paths[0].device, data.get('edge_index')
    step = _FakeStep(model, x, device)
    step.run(edge_index, paths, active_only)  # Makes what graph and paths keep.
    live = step.run(edge_index, paths, active_only)
    seen: set[int] = set()

    def bytes_of(tensors: Iterable[object]) -> int:
        return _count_bytes(tensors, device, seen)

    graph = bytes_of(_of_graph(edge_index))
    of_paths = bytes_of(t for path in paths for t in _of_path(path))
    features = step.bytes_of_rows
    if isinstance(x, AggregatedInput):
        features += bytes_of([x.aggregated, x.root, x.nodes])
    else:
        features += bytes_of([x])
    parameters = bytes_of(model.parameters())
    other = bytes_of(value for store in data.stores for value in store.values())
    other += bytes_of(model.buffers())
    activations = [live.activations(k) for k in range(model.num_layers)]
    return MemoryEstimate(
        graph, of_paths, features, other, parameters, parameters, optimizer_states * parameters,
        tuple(activations), live.peak - sum(activations), live.moment,
    )  # fmt: skip


def _check_arguments(model: PathPreparedGNN, data: Data, x: object) -> list[ExecutionPath]:
    if not isinstance(x, (Tensor, AggregatedInput)):
        raise ValueError(f"'data' must have features 'x', or give 'x', got {type(x).__name__}")
    paths = data.get('execution_paths')
    if not isinstance(paths, (list, tuple)) or len(paths) != model.num_layers:
        count = len(paths) if isinstance(paths, (list, tuple)) else 0
        raise ValueError(
            f"'data.execution_paths' must be those of {model.num_layers} layers, got {count}: "
            'apply Prepare or ExecutionPaths'
        )
    return list(paths)


def _format_bytes(size: int) -> str:
    for unit, name in ((2**30, 'GiB'), (2**20, 'MiB'), (2**10, 'KiB')):
        if size >= unit:
            return f'{size / unit:.2f} {name}'
    return f'{size} B'


def _count_bytes(tensors: Iterable[object], device: torch.device, seen: set[int]) -> int:
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


def _of_graph(edge_index: Tensor | None) -> Sequence[object]:
    if not isinstance(edge_index, EdgeIndex):
        return [edge_index]
    if isinstance(edge_index, PreparedGraph):
        parts = list(edge_index._tensors())
    else:
        parts = [edge_index._data, edge_index._indptr, edge_index._T_perm, edge_index._T_indptr]
        parts += edge_index._T_index
    entries = cache_of(edge_index).entries.values()
    return parts + [t for entry in entries for t in tensors_of(entry.value)]


def _of_path(path: ExecutionPath) -> Sequence[object]:
    return [getattr(path, name) for name in path._TENSORS] + [
        t for entry in path._derived.values() for t in tensors_of(entry.value)
    ]


class _FakeStep:
    """A training step of a copy of the model, with fake tensors in place of features and
    parameters: ops on them compute only shapes. The graph's structure is real, and so is what a
    step computes from it alone."""

    def __init__(
        self, model: PathPreparedGNN, x: Tensor | AggregatedInput, device: torch.device
    ) -> None:
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.device, self.x = device, self._input(x)
        held = (*model.parameters(), *model.buffers())
        self.model = copy.deepcopy(model, {id(t): self.fakes.from_tensor(t) for t in held}).train()
        for conv in self.model.convs:
            vars(conv)['_other_features'] = FakeTensor
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _input(self, x: Tensor | AggregatedInput) -> Tensor | AggregatedInput:
        if isinstance(x, Tensor):
            return self.fakes.from_tensor(x)
        out = copy.copy(x)
        out.aggregated = self.fakes.from_tensor(x.aggregated)
        out.root = None if x.root is None else self.fakes.from_tensor(x.root)
        return out

    @property
    def bytes_of_rows(self) -> int:
        """The bytes of the rows that an aggregated input keeps for a path."""
        rows = None if isinstance(self.x, Tensor) else self.x._rows
        return 0 if rows is None else sum(t.nbytes for t in tensors_of(rows[1].value))

    def run(
        self, edge_index: Tensor | None, paths: list[ExecutionPath], active_only: bool
    ) -> '_Live':
        """Runs the step, and returns what was alive in it."""
        live, last = _Live(self.device), paths[-1]
        with self.fakes:
            target = torch.empty(last.num_dst, dtype=torch.long, device=self.device)
        self.model._hidden = _watch_layers(self.model, live)  # type: ignore[method-assign]
        gpus = [self.device] if self.device.type == 'cuda' else []
        with (
            torch.random.fork_rng(gpus), torch.inference_mode(False), torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False), live,
        ):  # fmt: skip
            out = self.model(self.x, edge_index, paths=paths, active_only=active_only)
            live.end_forward()
            scores = out if active_only else out[(last.dst_position >= 0).nonzero().view(-1)]
            loss = F.cross_entropy(scores, target)
            live.where = 'the backward pass of the loss'
            loss.backward()
        return live


def _watch_layers(model: PathPreparedGNN, live: '_Live') -> Callable[..., tuple[Tensor, Rows]]:
    """The model's hidden layers, telling which one runs, forward or backward."""
    hidden: Callable[..., tuple[Tensor, Rows]] = type(model)._hidden

    def run(k: int, *args: object) -> tuple[Tensor, Rows]:
        if live.forward_ended:  # A checkpoint runs the layer again.
            return hidden(model, k, *args)
        live.layer, live.where = k, f'the forward pass of layer {k}'
        out, rows = hidden(model, k, *args)
        live.layer = None
        if out.requires_grad:
            out.register_hook(lambda _: setattr(live, 'where', f'the backward pass of layer {k}'))
        return out, rows

    return run


class _Made(NamedTuple):
    size: int
    layer: int | None  # whose forward pass made it


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages on a device that ops have made and that are alive."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.forward_ended = device, False
        self.layer: int | None = None
        self.where = self.moment = ''
        self.known: set[int] = set()  # addresses
        self.alive: dict[int, _Made] = {}  # by number of the storage, since addresses repeat
        self.at_peak: dict[int, _Made] = {}
        self.kept: dict[int, _Made] = {}  # from the forward pass for the backward pass
        self.now = self.peak = self.count = 0

    def end_forward(self) -> None:
        self.kept, self.forward_ended, self.where = dict(self.alive), True, 'the loss'

    def activations(self, layer: int) -> int:
        """The bytes at the peak that a layer's forward pass has made for the backward pass."""
        return sum(
            made.size for number, made in self.at_peak.items()
            if made.layer == layer and number in self.kept
        )  # fmt: skip

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        for leaf in tree_leaves((args, kwargs)):  # made before
            if isinstance(leaf, Tensor):
                self.known.add(leaf.untyped_storage()._cdata)
        if args and isinstance(args[0], FakeTensor):  # Features in host memory:
            if func is torch.ops.aten.is_pinned.default:
                return True  # as the step needs them
            if func is torch.ops.aten.record_stream.default:
                return None
            if func is torch.ops.pyg_fast.gather_rows.default:  # Fakes must be on one device.
                args = (args[0].new_empty(args[0].shape, device=args[1].device), *args[1:])
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device == self.device:
                self._note(leaf.untyped_storage())
        self._look(_scratch(func, args))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.count += 1
        self.alive[self.count] = _Made(storage.nbytes(), self.layer)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._freed, storage._cdata, self.count)

    def _look(self, scratch: int) -> None:
        if self.now + scratch > self.peak:
            self.peak, self.moment = self.now + scratch, self.where
            self.at_peak = dict(self.alive)

    def _freed(self, address: int, number: int) -> None:
        self.known.discard(address)
        self.now -= self.alive.pop(number).size


def _scratch(func: OpOverload, args: tuple) -> int:
    """The memory that a sum on a GPU takes for itself, the only formula here: no op tells it. See
    `spmm_scratch` and `spmm_groups_scratch` in csrc/cuda."""
    grouped = func is torch.ops.pyg_fast.spmm_groups.default
    if not (grouped or func is torch.ops.pyg_fast.spmm.default) or not args[4].is_cuda:
        return 0
    _, col, perm, value, x, _, col_scale, *_ = args
    num_edges, (num_src, width), item = col.size(0), x.shape, acc_dtype(x.dtype).itemsize
    if grouped:
        long_row, num_partials, atomic = args[14], args[17], args[20]
        size = (long_row.size(0) if atomic else num_partials) * width * item  # partial sums
    else:
        block = max(256, -(-num_edges // 2**14))
        size = 2 * -(-num_edges // block) * (width * item + 8) if num_edges > block else 0
    if value is not None:
        return size + (num_edges * item if perm is not None and num_edges >= 2**20 else 0)
    scales = col_scale is not None and x.dtype.itemsize >= 4
    if scales and num_edges >= max(32 * num_src, 2**20):  # a scaled copy of the features
        size += num_src * width * item
    return size
