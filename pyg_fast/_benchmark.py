"""Times a user's model as PyG runs it, and as this package does."""

import copy
import inspect
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from ._accelerate import accelerate, accelerate_report, restore
from ._alike import naming_keywords
from ._batches.step import check_loss, check_requires_grad
from ._capture import capture as capture_step
from ._compile import compile as compile_accelerated
from ._progress import progress
from ._report import AccelerateReport, table_of
from ._scores import check_forward, check_loss_fn
from .graph.prepared_graph import PreparedGraph
from .nn._layer import FusedModule
from .ops._numbers import check_flag
from .papers.maxk import MaxKGNN
from .papers.paths import PathPreparedGNN
from .transforms import ToCSR

GraphT = TypeVar('GraphT', Data, HeteroData)
Forward: TypeAlias = Callable[[Module, Data | HeteroData], object]
Loss: TypeAlias = Callable[[object, Data | HeteroData], Tensor]
Step: TypeAlias = Callable[[], object]

PYG, OURS = 'PyG', 'pyg_fast'
_WARMUP, _MOST_ROUNDS = 3, 50
_BLOCK = 0.02  # seconds: steps that are shorter are timed several at once


class BenchmarkRow(NamedTuple):
    """How long a step takes in one way of running a model."""

    way: str
    seconds: float | None  # the median; None if the way failed
    ratio: float | None  # the time of PyG over this one
    memory: int | None  # bytes that a step needs at most, beside what stays
    compile_seconds: float | None  # of the first step, if the way compiles
    error: str | None  # why the way failed


@dataclass(frozen=True, repr=False)
class Benchmark:
    """The result of :func:`benchmark`, which prints as a table: :obj:`rows`, a
    :class:`BenchmarkRow` for each way of running the model; :obj:`report`, what ran each layer, as
    :func:`accelerate_report` tells; and :obj:`title`, what was measured."""

    title: str
    rows: list[BenchmarkRow]
    report: AccelerateReport = field(default_factory=AccelerateReport)

    def __repr__(self) -> str:
        head = '', 'ms a step', 'times PyG', 'memory, MB', 'compiled in, s', 'failed'
        lines = [
            (
                row.way, _text(row.seconds, 1e3), _text(row.ratio), _text(row.memory, 1e-6),
                _text(row.compile_seconds), row.error or '',
            ) for row in self.rows
        ]  # fmt: skip
        return f'{self.title}\n{table_of(head, lines)}\n\n{self.report}'


@naming_keywords
def benchmark(
    model: Module,
    data: Data | HeteroData,
    *,
    forward: Forward | None = None,
    loss: Loss | None = None,
    compile_pyg: bool = False,
    compile_ours: bool = False,
    capture: bool = True,
    seconds: float = 20.0,
) -> Benchmark:
    r"""Times training steps of a model on your own data: by PyG, and by this package.

    A step is :obj:`loss(forward(model, data), data).backward()` without an optimizer, in the mode
    that the model has. PyG's layers get the plain edges, ours a copy of :obj:`data` that
    :class:`~pyg_fast.transforms.ToCSR` has sorted. All ways take turns, so that a machine that
    gets slower or faster treats them alike; their times are medians.

    Model, gradients, data and the state of random numbers stay as they are: all steps run on
    copies.

    Args:
        model (torch.nn.Module): The model, accelerated or not, on the device of :obj:`data`.
        data (Data or HeteroData): The data.
        forward (Callable, optional): The model's output, from :obj:`(model, data)`.
            (default: :obj:`None`, :obj:`model(data.x, data.edge_index)`, or of
            :obj:`data.x_dict` and :obj:`data.edge_index_dict`)
        loss (Callable, optional): The loss, from :obj:`(output, data)`. (default: :obj:`None`, the
            mean square of the output)
        compile_pyg (bool, optional): Whether to time PyG's layers by :func:`torch.compile` too.
            Compiling takes from seconds to minutes. (default: :obj:`False`)
        compile_ours (bool, optional): Whether to time :func:`pyg_fast.compile` too.
            (default: :obj:`False`)
        capture (bool, optional): Whether to time :func:`pyg_fast.capture` too, on a GPU and for
            :class:`~torch_geometric.data.Data`. (default: :obj:`True`)
        seconds (float, optional): About how long the steps are timed, without the first ones, in
            which kernels are compiled; each way is timed at least once. (default: :obj:`20.`)

    Returns:
        Benchmark: The times and the memory of each way, which print as a table.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If :obj:`seconds` is not positive.
        Exception: What the model or :obj:`loss` raises, if all ways fail.

    Example:
        >>> pyg_fast.benchmark(GCN(64, 64, num_layers=2), data)
        training step on cpu, 3000 nodes, 25174 edges, median of 37
                  ms a step  times PyG  memory, MB
        PyG       ...        1          ...
        pyg_fast  ...        ...        ...
        <BLANKLINE>
        layer    class    runs on
        convs.0  GCNConv  kernel
        convs.1  GCNConv  kernel
    """
    _check(model, data, seconds)
    for name, flag in (
        ('compile_pyg', compile_pyg), ('compile_ours', compile_ours), ('capture', capture),
    ):  # fmt: skip
        check_flag(name, flag)
    check_forward(forward)
    if loss is not None:
        check_loss_fn('loss', loss, 'data')
    steps = _Steps(forward or _forward, loss or _mean_square)
    plain, prepared = _with_plain_edges(data), ToCSR(perm=None)(_detached(data))
    device = _device(data)
    runs = [
        _Run(PYG, partial(steps.of, _by_pyg, model, plain)),
        _Run(OURS, partial(steps.of, accelerate, model, prepared)),
    ]
    if compile_pyg:
        make = partial(steps.of, _compiled_pyg, model, plain)
        runs.append(_Run(f'{PYG}, torch.compile', make, compiles=True))
    if compile_ours:
        make = partial(steps.of, compile_accelerated, model, prepared)
        runs.append(_Run(f'{OURS}, compiled', make, compiles=True))
    if capture and device.type == 'cuda' and isinstance(prepared, Data):
        runs.append(_Run(f'{OURS}, captured', partial(steps.captured, model, prepared)))
    with torch.random.fork_rng([device] if device.type == 'cuda' else []):
        num_rounds = _take_turns(runs, seconds, device)
        if all(run.error is not None for run in runs):
            runs[1].make()[1]()  # Raises it again: ours names the argument.
    sizes = f'{data.num_nodes} nodes, {data.num_edges} edges'
    if isinstance(data, HeteroData):
        types = len(data.node_types), len(data.edge_types)
        sizes = sizes.replace(',', f' of {types[0]} types,') + f' of {types[1]} types'
    how = f'median of {num_rounds}' if num_rounds > 0 else 'every way failed'
    title = f'training step on {device}, {sizes}, {how}'
    return Benchmark(title, [run.row(runs[0].median) for run in runs], _report_of(runs[1]))


class _Steps(NamedTuple):
    """Makes steps of a model."""

    forward: Forward
    loss: Loss

    def of(
        self, change: Callable[[Module], Module], model: Module, data: Data | HeteroData
    ) -> tuple[Module, Step]:
        """A changed copy of the model, and its step."""
        net = change(_copy(model))

        def step() -> None:
            net.zero_grad(set_to_none=True)
            loss = self.loss(self.forward(net, data), data)
            check_loss(loss, 'loss')
            if self.loss is _mean_square and not loss.requires_grad:
                raise ValueError(
                    "'model' must return an output of parameters, got one without gradient: pass "
                    'forward=lambda model, data: model(data.x.detach().requires_grad_(), ...)'
                )
            check_requires_grad(loss, 'loss')
            loss.backward()

        return net, step

    def captured(self, model: Module, data: Data) -> tuple[Module, Step]:
        """The same as one CUDA graph, with an optimizer that changes nothing."""
        net = accelerate(_copy(model))
        with torch.no_grad():
            self.forward(net, data)  # Lazy layers get their parameters.
        optimizer = torch.optim.SGD(
            net.parameters(), torch.zeros((), device=_device(data)), fused=True
        )
        step = capture_step(
            net, data, optimizer, lambda out, _: self.loss(out, data), mask=None,
            forward=cast('Callable[[Module, Data], Tensor]', self.forward),
        )  # fmt: skip
        return net, step


class _Run:
    """The measurements of one way of running a model."""

    def __init__(
        self, way: str, make: Callable[[], tuple[Module, Step]], compiles: bool = False
    ) -> None:
        self.way, self.make, self.compiles = way, make, compiles
        self.model: Module | None = None
        self.step: Step | None = None
        self.times: list[float] = []
        self.memory: int | None = None
        self.first: float | None = None
        self.error: str | None = None
        self.block = 1  # steps that are timed at once

    @property
    def median(self) -> float | None:
        """The median of the times of a step."""
        return statistics.median(self.times) if self.times else None

    def prepare(self, device: torch.device) -> None:
        """Runs the first steps, and measures their memory."""
        try:
            self.model, self.step = self.make()
            self.first = _time(self.step, 1, device)
            for _ in range(_WARMUP - 1):
                last = _time(self.step, 1, device)
            self.memory = _peak_memory(self.step, device)
            self.block = max(1, min(100, int(_BLOCK / last)))
        except Exception as error:  # of the user's model, of a compiler, or of memory
            self.fail(error)

    def measure(self, device: torch.device) -> None:
        """Times a step once more."""
        if self.step is None:
            return
        try:
            self.times.append(_time(self.step, self.block, device))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the run."""
        self.step, self.times = None, []
        lines = str(error).strip().splitlines()
        self.error = f'{type(error).__name__}: {lines[0] if lines else ""}'

    def row(self, pyg: float | None) -> BenchmarkRow:
        """The result; its ratio is to the time of PyG."""
        own = self.median
        ratio = None if own is None or pyg is None else pyg / own
        first = self.first if self.compiles and own is not None else None
        return BenchmarkRow(self.way, own, ratio, self.memory, first, self.error)


def _take_turns(runs: list[_Run], seconds: float, device: torch.device) -> int:
    """Measures all runs; returns how often."""
    for run in progress(runs, 'benchmark: first steps'):
        run.prepare(device)
    end, num_rounds = time.perf_counter() + seconds, 0
    for _ in progress(range(_MOST_ROUNDS), 'benchmark: steps'):
        for run in runs:
            run.measure(device)
        if not any(run.times for run in runs):  # All have failed.
            break
        num_rounds += 1
        if time.perf_counter() > end:
            break
    return num_rounds


def _time(step: Step, count: int, device: torch.device) -> float:
    """Seconds of a step."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _peak_memory(step: Step, device: torch.device) -> int:
    """Bytes that a step has allocated at most at one time."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    with _without_lines_of_profiler(), profiler as profile:
        step()
    events = profile.profiler.kineto_results.events()
    sizes = [each.nbytes() for each in events if each.name() == '[memory]']
    return max(itertools.accumulate(sizes, initial=0))


@contextmanager
def _without_lines_of_profiler() -> Iterator[None]:
    """Leaves out what PyTorch's profiler writes to the standard error of the process about itself,
    which no setting turns off."""
    with tempfile.TemporaryFile() as file:
        try:
            before = os.dup(2)
        except OSError:  # There is none.
            yield
            return
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            for line in file:
                if not any(words in line for words in _OF_PROFILER):
                    os.write(2, line)


_OF_PROFILER = b'SyncActivityProfilerHandler', b'Memory block of unknown size was allocated'


def _report_of(run: _Run) -> AccelerateReport:
    return AccelerateReport() if run.model is None else accelerate_report(run.model)


def _copy(model: Module) -> Module:
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    return model


def _by_pyg(model: Module) -> Module:
    """The model with PyG's layers in place of ours."""
    model = restore(model)
    for module in model.modules():
        if isinstance(module, PathPreparedGNN) or (
            isinstance(module, MaxKGNN) and module.k is not None
        ):
            raise ValueError(f'{type(module).__name__} has no equivalent in PyG')
    for parent in reversed(list(model.modules())):  # Layers in layers first.
        for name, child in parent.named_children():
            if isinstance(child, FusedModule):
                setattr(parent, name, child.__prepare_scriptable__())
    return model.__prepare_scriptable__() if isinstance(model, FusedModule) else model


def _compiled_pyg(model: Module) -> Module:
    compiled = torch.compile(_by_pyg(model))
    assert isinstance(compiled, Module)
    return compiled


def _detached(data: GraphT) -> GraphT:
    """The data, whose tensors collect gradients of their own."""
    data = copy.copy(data)
    for store in data.stores:
        for key, value in store.items():
            if isinstance(value, Tensor) and value.requires_grad:
                store[key] = value.detach().requires_grad_()
    return data


def _with_plain_edges(data: GraphT) -> GraphT:
    """The data with lists of edges as PyG's datasets have them."""
    data = _detached(data)
    for store in data.edge_stores:
        edge_index = store.get('edge_index')
        if isinstance(edge_index, PreparedGraph):
            edge_index = edge_index.to_edge_index()
        if isinstance(edge_index, EdgeIndex):
            store['edge_index'] = edge_index.as_tensor()
    return data


def _forward(model: Module, data: Data | HeteroData) -> object:
    if isinstance(data, HeteroData):
        args = data.x_dict, data.edge_index_dict
    else:
        args = data.x, data.edge_index
    try:
        return model(*args)
    except TypeError as error:
        try:
            inspect.signature(model.forward).bind(*args)
        except TypeError:
            raise TypeError(
                f'{error}: pass forward=, such as forward=lambda model, data: model(data.x, ...)'
            ) from error
        raise


def _mean_square(out: object, data: Data | HeteroData) -> Tensor:
    parts = [part for part in tree_leaves(out) if isinstance(part, Tensor)]
    if not parts:
        raise TypeError(
            f"'forward' must return a tensor, got {type(out).__name__}: pass forward=, or a loss="
        )
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def _device(data: Data | HeteroData) -> torch.device:
    for store in data.edge_stores:
        if isinstance(store.get('edge_index'), Tensor):
            return store['edge_index'].device
    return torch.device('cpu')


def _check(model: object, data: object, seconds: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"'model' must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(data, Data | HeteroData):
        raise TypeError(f"'data' must be a Data or HeteroData, got {type(data).__name__}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"'seconds' must be a number, got {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"'seconds' must be positive, got {seconds}")


def _text(value: float | None, scale: float = 1.0) -> str:
    return '' if value is None else f'{value * scale:.3g}'
