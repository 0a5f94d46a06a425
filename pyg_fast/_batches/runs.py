"""What captured steps of training and of inference have in common."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import Module, UninitializedParameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch

from .._compile import backend
from ..graph.prepared_graph import list_of
from ..graph.small_graphs import small_graphs
from ..loader import GraphLoader
from ..loader._collated import Collated
from ..loader._levels import GRAPHS, NumReal
from ..loader._selection import Draw, Selection
from ..nn._layer import FusedModule
from .check import Result, check_padding
from .filling import Filling
from .inputs import SizedIds, StaticBatch, num_real_of
from .norms import Masks, list_norms, masked
from .record import Recorder, recorder_of
from .state import Copy, State

_log = logging.getLogger('pyg_fast')

Forward = Callable[[Module, Batch], Any]

_MANY_TIMES = 5

# Whether one compile takes all sizes of batches.
_DYNAMIC = True
# Of Dynamo. There may be a compile for each size of batches, in several modes: above its own limit,
# 8, code would run uncompiled. Masks are attributes of batch norms, of a size that changes.
# Gradients that a model takes itself stay outside of compiled code, where the masked norms are
# differentiated once.
_OPTIONS: dict[str, Any] = {
    'recompile_limit': 64, 'fail_on_recompile_limit_hit': True,
    'force_nn_module_property_static_shapes': False, 'trace_autograd_ops': False,
}  # fmt: skip


# A check of newer releases of torch, at the first call, takes no subclass of a tensor: behind a
# graph break code has one among its inputs.
_CHECK = 'check_custom_op_aliasing'


class Rows(NamedTuple):
    """The rows of a padded batch."""

    graphs: int
    nodes: int
    edges: int


class Slot:
    """A size of padded batches, with the memory from which its step reads them."""

    def __init__(self, batch: Batch) -> None:
        self.inputs = StaticBatch(batch)
        self.replay: Callable[[], Any] | None = None
        self.filling: Filling | None = None


class Runs:
    """A step on batches of a loader, recorded once for each size of these.

    Args:
        model: The model.
        loader: The loader.
        forward: The output, from the model and a batch.
        compile: Whether Inductor compiles `forward`.
        check: Whether to compare padded with plain batches.
        state: What a step changes.
    """

    def __init__(
        self, model: Module, loader: GraphLoader, forward: Forward | None, compile: bool,
        check: bool, state: State,
    ) -> None:  # fmt: skip
        _check_arguments(model, loader, forward, compile, check)
        self.model, self.loader, self._state = model, loader, state
        self._joined, self._device = loader._collated, _device_of(loader)
        self._recorder: Recorder = recorder_of(self._device)
        self._forward, self._checks = forward or _call, check
        self._compiled = _compile(self._forward) if compile else None
        if self._pads:
            _check_pads(loader)
        self._check_device()
        #: The number of batches that ran without padding.
        self.num_eager = 0
        self._num_renewed = 0  # times without a replay between them
        self.reset()

    def reset(self) -> None:
        """Drops what is recorded; the next batches record it anew."""
        self._norms = list_norms(*self._state.roots)
        self._norm_levels = {0, 1, 2}  # those that they normalize
        self._slots: dict[Rows, Slot] = {}
        self._fingerprint: tuple[object, ...] = ()

    def _renew(self) -> None:
        """Drops what is recorded if tensors, modes or options were replaced."""
        fingerprint = self._state.fingerprint()
        if fingerprint == self._fingerprint:
            self._num_renewed = 0
        else:
            self._num_renewed += 1
            if self._num_renewed == _MANY_TIMES:
                _log.warning(
                    'capture: a step is recorded anew for every batch, since tensors or modes of '
                    'the model, or options of the optimizer beside its learning rate, change with '
                    'each; a schedule of momentum does so (cycle_momentum=False)'
                )
            self.reset()
            self._note_state()

    def _given(self) -> Iterator[Batch | Draw]:
        """What the loader gives in an epoch: only the graphs of each batch, if it can be made in
        the memory of its size."""
        loader = self.loader
        joined, is_its_own = self._joined, type(loader).__iter__ is GraphLoader.__iter__
        if is_its_own and joined is not None and loader._collated is joined and joined.is_on_device:
            return loader._draw()
        return iter(loader)

    @property
    def _collated(self) -> Collated:
        """The graphs of a loader that pads."""
        assert self._joined is not None
        return self._joined

    def _load(self, given: Batch | Draw) -> tuple[Batch | None, Slot | None]:
        """The size of a batch, whose inputs hold it then; None: the batch must run as it is.
        Without a batch, it was made in the inputs, and the step of its size is recorded."""
        if isinstance(given, Draw):
            slot = self._fill(given)
            if slot is not None:
                return None, slot
            given = self.loader._make_batch(given)
        return given, self._find(given, real_rows_of(given))

    @property
    def _pads(self) -> bool:
        """Whether steps run on padded batches: their sizes are recorded, or compiled."""
        return self._recorder.pads or self._compiled is not None

    def _without_padding(self, given: Batch | Draw) -> Batch:
        """The batch with its own sizes. It has masks, which losses of nodes and edges read."""
        if isinstance(given, Draw):
            return self._collated.make_batch(given._replace(padding=None), masks=True)
        real = num_real_of(given)
        if real is None:
            return given
        if 'node_mask' not in given._store:
            return _with_masks(given, real)
        return given if real.graphs == given.num_graphs else self._collated.cut(given, real)

    def _fill(self, draw: Draw) -> Slot | None:
        """The size of the batch of some graphs, which was made in its inputs; None: it must be made
        by the loader. Those are batches without padding, and the first ones of a size."""
        if draw.padding is None:
            return None
        graphs = Selection(draw)
        slot = self._slots.get(Rows(*graphs.num_rows))
        if slot is None or slot.replay is None or self._is_too_small(graphs.real):
            return None
        if slot.filling is None:
            slot.filling = Filling(self._collated, slot.inputs, self._recorder, graphs)
        slot.filling(graphs)
        return slot

    def _find(self, batch: Batch, real: NumReal) -> Slot | None:
        """The size of a batch, whose inputs hold it then; None: the batch must run as it is."""
        if real.graphs == batch.num_graphs:
            return None
        rows = Rows(*(getattr(batch, f'{k}_mask').size(0) for k in ('graph', 'node', 'edge')))
        slot = self._slots.get(rows)
        if slot is None:
            slot = Slot(batch)
            if self._checks:
                self._check(slot, batch, real, rows)
            self._slots[rows] = slot
        if self._is_too_small(real):
            return None
        slot.inputs.write(batch)
        return slot

    def _is_too_small(self, real: NumReal) -> bool:
        """Whether the batch has a single row that a batch norm refuses."""
        return bool(self._norms) and any(real[level] < 2 for level in self._norm_levels)

    def _note_state(self) -> None:
        """Takes the present tensors, modes and options as given."""
        self._state.note()
        self._fingerprint = self._state.fingerprint()

    def _describe(self, what: str) -> str:
        if not self._pads:
            return f'{type(self).__name__}({what}; runs as usual on a CPU)'
        state, count = 'runs padded batches on a CPU', len(self.loader.buckets)
        if self._device.type == 'cuda':
            done = sum(slot.replay is not None for slot in self._slots.values())
            state = f'captured {done} of {count} sizes'
        return f'{type(self).__name__}({what}; {state}, {self.num_eager} batches without padding)'

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"'{type(self).__name__}' has no items: iterate over .epoch(), or call it with each "
            'batch of the loader'
        )

    # One run -------------------------------------------------------------------------------------
    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._device.type != 'cuda':
            yield
            return
        with torch.cuda.device(self._device):
            if self._compiled is not None:  # Compiled code of PyG launches little.
                yield
                return
            with small_graphs('kernel'):  # A graph has no host time to save.
                yield

    @contextmanager
    def _masked(self, batch: Batch, is_padded: bool) -> Iterator[None]:
        with masked(self._norms, Masks.of(batch)) if self._norms and is_padded else nullcontext():
            yield

    def _output(self, batch: Batch, is_padded: bool, may_compile: bool = True) -> Any:
        """The output of the model, without the graph of the padding."""
        if self._compiled is None or not (is_padded and may_compile):
            out = self._forward(self.model, batch)
        else:
            out = self._compiled(self.model, batch)
        if not is_padded:
            return out
        num_graphs = batch.graph_mask.size(0)
        return tree_map(lambda x: x[:-1] if _has_rows(x, num_graphs) else x, out)

    def _cut_graphs(self, batch: Batch, is_padded: bool) -> Batch:
        """The batch as a loss reads it."""
        if not is_padded:
            return batch
        return self._collated.cut(batch, NumReal(batch.graph_mask.size(0) - 1, 0, 0), [GRAPHS])

    # The check -----------------------------------------------------------------------------------
    def _result(self, batch: Batch, is_padded: bool) -> Result:
        raise NotImplementedError

    def _check(self, slot: Slot, batch: Batch, real: NumReal, rows: Rows) -> None:
        before = Copy(self._state, self._device)
        levels: set[int] = set()

        def run(is_padded: bool, is_exact: bool) -> Result:
            if not is_padded:
                plain = self._collated.cut(batch, real).clone()
                return self._result(_doubled(plain) if is_exact else plain, False)
            slot.inputs.write(batch)
            view = slot.inputs.view()
            with self._masked(view, True):
                view = _doubled(view) if is_exact else view
                result = self._result(view, True)
                levels.update(*(norm.__dict__['_seen'] for norm in self._norms))
            return result

        try:
            check_padding(
                run, self._state.roots, dict(zip(rows, real, strict=True)), before.restore
            )
        finally:
            before.restore()
        self._norm_levels = levels

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [
            (name, buffer.detach().clone())
            for root in self._state.roots for name, buffer in root.named_buffers()
        ]  # fmt: skip

    def _check_device(self) -> None:
        device = next((p.device for p in self.model.parameters()), self._device)
        if device != self._device and device.type != self._device.type:
            raise ValueError(
                f"'model' must be on the device of the batches, {self._device}, got {device}"
            )


def _with_masks(batch: Batch, real: NumReal) -> Batch:
    """A batch without padding, as the loader would make it if it padded others."""
    out = copy.copy(batch)
    for name, count in (('graph', real.graphs), ('node', real.nodes), ('edge', real.edges)):
        mask = torch.ones(count, dtype=torch.bool, device=batch.batch.device)
        out._store._mapping.setdefault(f'{name}_mask', mask)
    return out


def _call(model: Module, batch: Batch) -> Any:
    return model(batch)


def _doubled(batch: Batch) -> Batch:
    return batch.apply(lambda x: x.double() if x.is_floating_point() else x)


def _has_rows(value: object, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == count


def real_rows_of(batch: object) -> NumReal:
    """The numbers of rows of a batch that are not of a padding.

    Raises:
        TypeError: If no loader that pads has made the batch.
    """
    real = num_real_of(batch)
    if real is None:
        raise TypeError(
            "'batch' must be a batch of a GraphLoader with pad='buckets', got "
            f'{type(batch).__name__}'
        )
    return real


def _compile(forward: Forward) -> Forward:
    """The forward, compiled. Code knows the number of graphs as a constant, which layers without a
    size ask for."""
    known: dict[int, tuple[Forward, bool]] = {}

    def call(model: Module, batch: Batch) -> Any:
        last = batch.graph_mask.size(0) - 1
        if last not in known:
            run = _with_sizes(forward, last)
            has_kernels = any(isinstance(each, FusedModule) for each in model.modules())
            known[last] = torch.compile(run, backend=backend, dynamic=_DYNAMIC), has_kernels
        compiled, has_kernels = known[last]
        plain = copy.copy(batch)
        for name in ('batch', 'ptr'):
            plain[name] = batch[name].as_subclass(Tensor)
        if not has_kernels:  # Compiled code of PyG takes no graphs.
            for name, value in batch._store.items():
                if isinstance(value, EdgeIndex):
                    plain[name] = list_of(value)
        with torch._dynamo.config.patch(_OPTIONS), _without_check():
            return compiled(model, plain)

    return call


def _without_check() -> AbstractContextManager[object]:
    config = torch._functorch.config
    return config.patch({_CHECK: False}) if hasattr(config, _CHECK) else nullcontext()


def _with_sizes(forward: Forward, last: int) -> Forward:
    """The forward of a batch with plain tensors, as Dynamo takes them."""
    text = str(last)  # A number might become a symbol.

    def run(model: Module, batch: Batch) -> Any:
        values = batch._store._mapping  # Dynamo does not trace the setter of a batch.
        ids = values['batch']
        values['batch'] = SizedIds.of(ids, int(text))
        out = forward(model, batch)
        values['batch'] = ids
        return out

    # Dynamo counts compiles of a code object: each step has one of its own.
    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def _check_takes_batch(model: Module) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # Python knows none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"'model' must take a batch alone, got a {type(model).__name__}, {error}: pass "
            'forward=, such as forward=lambda model, batch: model(batch.x, batch.edge_index)'
        ) from error


def check_one_device(model: Module) -> None:
    """Raises if a model divides its input among several GPUs, which it copies itself to."""
    if any(isinstance(each, DataParallel) for each in model.modules()):
        raise ValueError(
            "'model' must not be a DataParallel, which copies the model to several GPUs in every "
            'call: capture its module'
        )


def how_to_load(model: object, given: object) -> str:
    """What makes the batches of a captured step, in the place of something else."""
    parameters = model.parameters() if isinstance(model, Module) else iter(())
    pads = " with pad='buckets'" * any(one.is_cuda for one in parameters)
    graphs = 'its dataset' if isinstance(given, DataLoader) else 'the graphs'
    return f'make a GraphLoader{pads} of {graphs}'


def _device_of(loader: GraphLoader) -> torch.device:
    """The device of the batches."""
    if loader._collated is not None:
        return loader._collated.device
    return loader.device or torch.device('cpu')


def _check_pads(loader: GraphLoader) -> None:
    """Raises unless the batches of a loader have few sizes."""
    if loader.pad is None or loader._collated is None:
        raise ValueError("'loader' must pad its batches: make it with pad='buckets'")
    others = loader._collated.list_own_rows()
    if others:
        raise ValueError(
            f"'loader' must give attributes with a row for each node, edge or graph, but "
            f'{others[0]!r} has others, whose number is never the same: pass '
            f'exclude_keys={others} to the loader'
        )


def _check_arguments(
    model: object, loader: object, forward: object, compile: object, check: object
) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"'model' must be a Module, got {type(model).__name__}")
    check_one_device(model)
    if any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        raise ValueError(
            "'model' must not be a DistributedDataParallel, whose processes would wait for each "
            'other at different batches: capture its module with optimizer=None, and all-reduce '
            'the gradients yourself'
        )
    if any(isinstance(each, UninitializedParameter) for each in model.parameters()):
        raise ValueError("'model' must not have lazy layers without parameters: call it once")
    if not isinstance(loader, GraphLoader):
        raise TypeError(
            f"'loader' must be a GraphLoader, got {type(loader).__name__}: "
            f'{how_to_load(model, loader)}'
        )
    if forward is None:
        _check_takes_batch(model)
    if forward is not None and not callable(forward):
        raise TypeError(f"'forward' must be callable, got {type(forward).__name__}")
    for name, value in (('compile', compile), ('check', check)):
        if not isinstance(value, bool):
            raise TypeError(f"'{name}' must be a bool, got {type(value).__name__}")
