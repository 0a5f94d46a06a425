"""Captures a user's message as a program: what Dynamo traced, traced again for one edge."""

import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ._einsum import einsum_of_edges
from ._gathers import INDICES
from ._ir import Program, Refused
from ._parse import OVER_SOURCES, Parser
from ._quiet import quiet, without_warnings
from ._rows import ACROSS_EDGES, Reduced, RowPart, split_rows
from ._trace import EDGES, NODES, READS_VALUE, Like, last_place, run_on_fakes, trace

if TYPE_CHECKING:
    from ._passes import Passes

_ops = torch.ops.pyg_fast_message


@dataclass(frozen=True)
class CapturedMessage:
    """A message as a program. Its loads name inputs of nodes and edges, and number parameters by
    their place among the arguments of the captured function. Messages of equal :obj:`key` are
    equal."""

    program: Program = field(compare=False)
    reduced: tuple[Reduced, ...] = field(compare=False)  # of an `aggregate`; else the message
    rows: RowPart | None = field(compare=False)  # of an `aggregate`
    writes: tuple[int, ...] = field(compare=False)  # values of edges that attributes hold after it
    num_dropouts: int = field(compare=False)
    autocast: bool = field(compare=False)
    key: str  # the canonical text
    on_cuda: bool
    numbers: tuple[int, ...] = field(default=(), compare=False)  # parameters that are Python floats
    # Parameters that the message makes of numbers, behind the arguments of the captured function.
    constants: tuple[Tensor, ...] = field(default=(), compare=False)
    most_nodes: int = field(default=sys.maxsize, compare=False)  # of destinations
    # By aggregations: what an entry prepared for the message.
    passes: dict[tuple[str, ...], 'Passes'] = field(default_factory=dict, compare=False)


@dataclass
class CaptureRequest:
    """What an entry asks of the backend beside the graph of a message.

    Args:
        check: Refuses messages, before Dynamo repeats their side effects. It takes also the traced
            code objects, or None if Dynamo does not tell them.
        owner: The layer, whose attributes the message may set; they become :class:`Written`.
        num_writes: How many attributes the message sets that no caller reads; they become None.
    """

    check: Callable[[CapturedMessage, Sequence[CodeType] | None], None]
    owner: object
    num_writes: int = 0


class _Requests(threading.local):
    current: CaptureRequest | None = None


_requests = _Requests()


@contextmanager
def capture_for(request: CaptureRequest) -> Iterator[None]:
    """Makes captures of this thread answer a request. Dynamo keeps the backend with all that it
    holds, so one backend serves all messages and holds no layer."""
    before, _requests.current = _requests.current, request
    try:
        with quiet(), without_warnings():
            yield
    finally:
        _requests.current = before


def backend(graph: GraphModule, examples: list[object]) -> Callable[..., tuple[object, ...]]:
    """The Dynamo backend of messages. The compiled function returns the captured message and its
    arguments, and its caller runs it: inside, every call would go through Dynamo."""
    request = _requests.current
    if request is None:
        raise Refused('captured again by others')
    (output,) = (node for node in graph.graph.nodes if node.op == 'output')
    outs: Any = output.args[0]
    (message,) = (node for node in outs if 'pyg_fast_message.end' in str(node.target))
    place, writes = outs.index(message), [node for node in outs if node is not message]
    kept = [] if request.num_writes else writes
    if request.num_writes and len(writes) != request.num_writes:
        raise Refused(_WRITES)
    if kept:
        _check_attributes(kept, request.owner)
    with graph.graph.inserting_before(output):
        ends = [graph.graph.call_function(_ops.write.default, (node,)) for node in kept]
    output.args = ((message, *ends),)
    captured = _capture_graph(graph)
    request.check(captured, _traced_code())
    given = [Written(outs.index(node)) if node in kept else None for node in outs]

    def return_message(*args: Tensor) -> tuple[object, ...]:
        arguments = (*args, *captured.constants)
        return (*given[:place], (captured, arguments), *given[place + 1 :])

    return return_message


_WRITES = 'message sets an attribute or a global'


class Written(NamedTuple):
    """What an attribute holds until it gets its tensor."""

    place: int  # among the results of the traced graph


def _check_attributes(writes: Sequence[Node], owner: object) -> None:
    """Refuses a message that changes other objects than attributes of its layer.

    Raises:
        Refused: If it does, or Dynamo does not tell what it changes.
    """
    try:
        effects = InstructionTranslator.current_tx().output.side_effects
        changed = [each for each in effects.id_to_variable.values() if effects.is_modified(each)]
        mutations = {
            getattr(each, 'value', None): effects.store_attr_mutations.get(each, {})
            for each in changed
            if not isinstance(each, TensorVariable)
        }
    except Exception as error:  # Dynamo's own, of what it cannot tell.
        raise Refused(_why_writes(owner)) from error
    if mutations.keys() != {owner} or not isinstance(owner, torch.nn.Module):
        raise Refused(_WRITES if owner in mutations else _why_writes(owner))
    own = [value for value in mutations[owner].values() if isinstance(value, TensorVariable)]
    if {value.as_proxy().node for value in own} != set(writes):
        raise Refused(_WRITES)
    registered = owner._parameters.keys() | owner._buffers.keys() | owner._modules.keys()
    if not registered.isdisjoint(mutations[owner]):
        raise Refused(_WRITES)


def _why_writes(owner: object) -> str:
    """The reason for a message that changes other objects, by a module of its layer that does so
    whenever it is called."""
    for name, module in owner.named_modules() if isinstance(owner, torch.nn.Module) else ():
        if type(module).__name__ == '_SpectralNorm':  # of torch.nn.utils.parametrizations
            return f"'{name.partition('.parametrizations')[0]}' has spectral_norm, {_CHANGES_STATE}"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if name and type(hook) in _NORMS:
                return f"'{name}' has {_NORMS[type(hook)]}, {_CHANGES_STATE}"
            if name:
                return f"message sets an attribute or a global, perhaps by a hook of '{name}'"
    return _WRITES


_CHANGES_STATE = 'which changes the module at each call'
# By the hooks of torch's older functions that compute a weight.
_NORMS: dict[type, str] = {SpectralNorm: 'spectral_norm', WeightNorm: 'weight_norm'}


def _traced_code() -> Sequence[CodeType] | None:
    get = getattr(torch._guards.TracingContext, 'get_traced_code', None)
    return None if get is None else get()


def _capture_graph(graph: GraphModule) -> CapturedMessage:
    mark_dropouts(graph)
    for node in reversed(list(graph.graph.nodes)):
        # Dynamo asserts facts about symbolic sizes, which hold for sentinel sizes.
        compares = isinstance(node.meta.get('example_value'), torch.SymBool) and not node.users
        if compares or node.target in (torch._check, torch.ops.aten._assert_scalar.default):
            graph.graph.erase_node(node)
        elif node.users and _is_lossy(node):
            if any(each.target == 'item' for each in node.all_input_nodes):
                raise Refused(READS_VALUE + last_place(node.stack_trace or ''))
            raise Refused('the number of edges or nodes is used as a number')
    check_functions(graph)
    return capture_twice(partial(_trace_program, graph))


def capture_twice(capture: Callable[[int, int], CapturedMessage]) -> CapturedMessage:
    """Captures for both sentinel numbers of edges and nodes.

    Raises:
        Refused: If a constant of the message depends on them.
    """
    first, second = (capture(*sizes) for sizes in zip(EDGES, NODES, strict=True))
    if first.key != second.key:
        raise Refused('the number of edges or nodes is used as a number')
    return first


# Other functions of a size may have equal results for both sentinel sizes.
_OF_SIZES = (
    operator.add, operator.sub, operator.mul, operator.neg, operator.truediv, operator.floordiv,
    operator.pow, operator.getitem, torch.sym_sum, torch.sym_float, torch.ops.aten.sym_size.int,
    'size', 'item',
)  # fmt: skip


def _is_lossy(node: Node) -> bool:
    """Whether a number may hide that it depends on a size."""
    value = node.meta.get('example_value')
    is_number = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_number and node.op != 'placeholder' and node.target not in _OF_SIZES


def check_functions(graph: GraphModule) -> None:
    """Refuses functions that change gradients, which are derived from the values alone, batch
    normalization in training, and complex numbers."""
    for node in graph.graph.nodes:
        target = node.target
        name = target if isinstance(target, str) else getattr(target, '__name__', str(target))
        if target in _BATCH_NORMS and True in (node.kwargs.get('training'), *node.args[5:6]):
            raise Refused(
                'batch normalization in training mixes edges: LayerNorm does not'
                + last_place(node.stack_trace or '')
            )
        if _slices_by_a_size(node):
            raise Refused('the number of edges or nodes is used as a number')
        if target is F.one_hot and not all(map(_converts, node.users)):
            raise Refused('one_hot without a conversion' + last_place(node.stack_trace or ''))
        value = node.meta.get('example_value')
        if isinstance(value, Tensor) and value.is_complex():
            raise Refused(_of_complex(node, name))
        if name == 'detach' or _method(node) == 'detach' or target in _MODES:
            continue  # The program has these.
        changes = any(part in name for part in _CHANGES_AUTOGRAD)
        if changes or isinstance(target, HigherOrderOperator):
            name = _IN_USERS_TERMS.get(name, name)
            raise Refused(f'{name} in message{last_place(node.stack_trace or "")}')
        if _hides_a_size(node):
            place = last_place(node.stack_trace or '')
            raise Refused(f'the number of edges or nodes is used as a number{place}')


def _of_complex(node: Node, name: str) -> str:
    """The reason to refuse complex numbers, by the argument of the message that holds them, or the
    function that makes them, if the user's line has it."""
    place = last_place(node.stack_trace or '')
    found = re.search(r'_inputs_(?:src|dst|edge|row)_(\w+?)_?$', name)
    if found is not None:
        return f"'{found[1]}' holds complex numbers"
    is_written = re.search(rf'(?<!\w){name}\(', place) is not None
    return (f'{name} makes' if is_written else 'message computes with') + f' complex numbers{place}'


def _slices_by_a_size(node: Node) -> bool:
    """Whether a slice ends at a number of edges or nodes: one beyond the end takes all there is,
    whichever it is."""
    if node.target is torch.ops.aten.slice.Tensor:
        return any(isinstance(each, Node) for each in node.args[2:])
    index = node.args[1] if node.target is operator.getitem else ()
    parts = index if isinstance(index, (tuple, list)) else (index,)
    slices = [each for each in parts if isinstance(each, slice)]
    return any(isinstance(n, Node) for each in slices for n in (each.start, each.stop, each.step))


def _hides_a_size(node: Node) -> bool:
    """Whether a function gets a number of edges or nodes, and its result may not show which: parts
    of channels by `split` are all of them for any number that is large."""
    if node.op not in ('call_function', 'call_method') or not node.users:
        return False
    name = str(getattr(node.target, '__name__', node.target)).partition('.')[0]
    shows = name in _SHOW_SIZES or node.target in _OF_SIZES
    return not shows and any(map(_is_size, node.all_input_nodes))


def _is_size(node: Node) -> bool:
    """Whether a node is an integer; a graph of static sizes has no symbols for them."""
    value = node.meta.get('example_value', node.meta.get('val'))
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _converts(node: Node) -> bool:
    """Whether a node converts to a type of floats."""
    value = node.meta.get('example_value')
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and node.target in ('to', 'type_as', 'float', 'double', 'half', 'bfloat16')


_BATCH_NORMS = (F.batch_norm, torch.batch_norm)  # The sixth argument of both is the mode.
# Sets whether gradients are on.
_MODES = (torch._C._set_grad_enabled,)


def _method(node: Node) -> str:
    """The method that a node calls; an exported graph has operators of torch in their place."""
    if node.op == 'call_method':
        return str(node.target)
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ''


_IN_USERS_TERMS = {
    '_get_data_attr': 'data', 'autograd_function_apply': 'a custom autograd.Function',
    'tag_activation_checkpoint': 'torch.utils.checkpoint',
}  # fmt: skip
_CHANGES_AUTOGRAD = (
    'detach', '_get_data_attr', 'grad_enabled', 'inference_mode', 'requires_grad', 'register_hook',
    'retain_grad', 'checkpoint', 'saved_tensors_hooks',
)  # fmt: skip


class _Writes(TorchDispatchMode):
    """Refuses writes into parameters and inputs of the edges, which are the user's own tensors; of
    inputs of nodes PyG gathers copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, Tensor] = {}  # by storage; kept alive

    def watch(self, *inputs: object) -> None:
        self.inputs |= {storage: x for x in inputs for storage in storages_of(x)}  # type: ignore

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if not self.inputs.keys().isdisjoint(storages_written(func, args, kwargs or {})):
            raise Refused('message writes into its input')
        if func is _ops.end_of_rows.default:
            self._check_results(args[0])
        out = func(*args, **(kwargs or {}))
        if func is _ops.row.default or (func is _ops.lift.default and args[2] == 'edge'):
            self.watch(out)
        return out

    def _check_results(self, results: Sequence[Tensor]) -> None:
        """Refuses results of an `aggregate` that share memory: a caller may write into one."""
        storages = [each for x in results for each in storages_of(x)]
        if len({*storages}) < len(storages) or not self.inputs.keys().isdisjoint(storages):
            raise Refused('aggregate returns its input, or one tensor twice')


def storages_written(func: OpOverload, args: Sequence[object], kwargs: dict) -> set[int]:
    """The storages that a call of an operator writes into."""
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return set().union(*(
        storages_of(given.get(each.name)) for each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ))  # fmt: skip


def storages_of(value: object) -> set[int]:
    """The storages of a tensor, or of several."""
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, (list, tuple)):
        return set().union(*map(storages_of, value))
    return set()


class DropoutCall(NamedTuple):
    """A call of dropout."""

    x: Node
    p: float | Node
    is_on: bool
    inplace: bool


def dropout_of(node: Node) -> DropoutCall | None:
    """The dropout that a node calls, if it does."""
    functions = F.dropout, torch.dropout, torch.ops.aten.dropout.default
    if node.op != 'call_function' or node.target not in functions:
        return None
    names = ('input', 'p', 'training' if node.target is F.dropout else 'train', 'inplace')
    given: dict[str, Any] = {'p': 0.5, names[2]: True, 'inplace': False}
    given.update(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    is_on = given[names[2]] and given['p'] != 0
    return DropoutCall(given['input'], given['p'], is_on, given['inplace'])


def mark_dropouts(graph: GraphModule) -> None:
    """Replaces dropouts by markers, or by their input where they are off."""
    marker = torch.ops.pyg_fast_message.dropout.default
    for node in list(graph.graph.nodes):
        call = dropout_of(node)
        if call is None:
            continue
        if call.inplace:
            raise Refused('dropout in place')
        if isinstance(call.p, Node):
            raise Refused('dropout by a number that changes')
        if not call.is_on:
            node.replace_all_uses_with(call.x)
        else:
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(marker, (call.x, call.p))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()


class SizedInterpreter(torch.fx.Interpreter):
    """Runs a graph in which `index.max()`, from which a softmax without `num_nodes` takes the
    number of nodes, becomes the last node: nodes without edges after it change no message.

    A linear map of a batch `[B, E, F]` reads it with the edges first: torch would merge both."""

    def __init__(self, graph: GraphModule, num_edges: int, num_nodes: int) -> None:
        super().__init__(graph)
        self.num_edges, self.num_nodes = num_edges, num_nodes
        self.most_nodes = sys.maxsize  # for which a number of rows that the message has suffices

    def run_node(self, node: Node) -> object:
        if _is_last_node(node):
            if _sizes_a_result(node):
                raise Refused('an aggregation without dim_size')
            _check_is_size(node)
            return self.num_nodes - 1
        if _is_maximum_of_index(node) and all(map(_is_last_node, node.users)):
            return None
        if _is_maximum_of_index(node, 'source'):
            raise Refused(OVER_SOURCES + last_place(node.stack_trace or ''))
        if _starts_sums(node):  # However many rows there are: edges read those of their nodes.
            x, *size = self.fetch_args_kwargs_from_env(node)[0]
            rows, *rest = size[0] if isinstance(size[0], (tuple, list)) else size
            self.most_nodes = min(rows, self.most_nodes)
            return x.new_zeros((self.num_nodes, *rest))
        return super().run_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _LINEAR and len(args) > 1 and _is_matrix(args[1]):
            sizes = args[0].shape[1:-1]
            if self.num_edges in sizes:
                dim = sizes.index(self.num_edges) + 1
                x = args[0].movedim(dim, 0).contiguous()
                return super().call_function(target, (x, *args[1:]), kwargs).movedim(0, dim)
        if target is F.one_hot:
            index, num_classes = (*args, *kwargs.values())
            return F.embedding(index, torch.eye(num_classes, device=index.device))
        if target is torch.einsum and isinstance(args[0], str):
            out = einsum_of_edges(args[0], args[1:], self.num_edges)
            if out is not None:
                return out
        return super().call_function(target, args, kwargs)


class _Interpreter(SizedInterpreter):
    """Runs a graph of which floats that change are arguments: tensors of one number, which
    operations take in the dtype in which they compute, as PyTorch does with Python's floats."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # A graph need not turn gradients on again before it ends.
        self.records = True  # whether gradients are on
        self.own: set[object] = set()  # tensors that the message made without them
        return super().run(*args, **kwargs)

    def run_node(self, node: Node) -> object:
        if node.target in _MODES:
            self.records = bool(node.args[0])
            return None
        out = self._run(node)
        if self.records or node.op not in ('call_function', 'call_method', 'call_module'):
            return out
        name = str(getattr(node.target, '__name__', node.target))
        writes = name.endswith('_') or name in _IN_PLACE or node.kwargs.get('inplace')
        if writes and node.args[0] not in self.own:
            raise Refused('a write under torch.no_grad')
        if writes or name.startswith('new_') or node.target in FACTORIES:
            self.own.add(node)
        return torch.utils._pytree.tree_map_only(Tensor, torch.detach, out)

    def _run(self, node: Node) -> object:
        if _is_number(node) and node.target == 'item':
            return self.env[node.args[0]]  # type: ignore[index]
        out = super().run_node(node)
        expected = node.meta.get('example_value')
        if any(map(_is_number, node.all_input_nodes)) and not _is_number(node):
            if not isinstance(out, Tensor) or not isinstance(expected, Tensor):
                raise Refused(f'{node.target} of a number that changes')
            if out.dtype == torch.float32 and expected.dtype in (torch.half, torch.bfloat16):
                out = out.to(expected.dtype)
            if out.dtype != expected.dtype or out.dim() != expected.dim():
                raise Refused(f'{node.target} of a number that changes')
        return out

    def fetch_args_kwargs_from_env(self, node: Node) -> tuple[tuple, dict]:
        expected, values = node.meta.get('example_value'), self.env
        if not isinstance(expected, Tensor) or not any(map(_is_number, node.all_input_nodes)):
            return super().fetch_args_kwargs_from_env(node)
        dtype = torch.float64 if expected.dtype == torch.float64 else torch.float32
        own = {
            each: values[each].to(dtype) if _is_number(each) else values[each]
            for each in node.all_input_nodes
        }
        return (
            torch.fx.node.map_arg(node.args, own.__getitem__),
            torch.fx.node.map_arg(node.kwargs, own.__getitem__),
        )


_LINEAR = (F.linear, torch.matmul, operator.matmul)


def _is_matrix(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty)
# Functions that take a shape, by name.
SIZE_FUNCTIONS = (
    'new_zeros', 'new_ones', 'new_full', 'new_empty', 'view', 'reshape', 'expand',
)  # fmt: skip
# Results of these have the sizes that they get; so do the markers of inputs.
_SHOW_SIZES = {
    *SIZE_FUNCTIONS, *(each.__name__ for each in FACTORIES), 'Size', 'broadcast_to', 'unflatten',
    'repeat', 'row', 'lift',
}  # fmt: skip
_IN_PLACE = (
    'iadd', 'isub', 'imul', 'itruediv', 'ifloordiv', 'ipow', 'imod', 'iand', 'ior', 'ixor',
    'setitem',
)  # fmt: skip


def _is_last_node(node: Node) -> bool:
    """Whether it is `index.max().item()`, as :func:`torch_geometric.utils.softmax` asks for."""
    most = node.args[0] if node.target == 'item' else None
    return isinstance(most, Node) and _is_maximum_of_index(most)


def _is_maximum_of_index(node: Node, end: str = 'index') -> bool:
    if node.target not in ('max', torch.max) or len(node.args) != 1 or node.kwargs:
        return False
    (index,) = node.args
    return isinstance(index, Node) and _end_of(index) == end


def _sizes_a_result(node: Node) -> bool:
    """Whether the rows of an `aggregate` are as many as a number says: of those of a softmax each
    edge gathers one."""
    return _reaches(node, 'end_of_rows')


def _reaches(node: Node, *ends: str) -> bool:
    """Whether something made of a node gets to an operator with such a name, without that edges
    gather its rows."""
    stack, seen = [node], set[Node]()
    while stack:
        for user in stack.pop().users:
            if user.target in _GATHERS and any(map(_is_index, user.all_input_nodes)):
                continue
            if any(end in str(user.target) for end in ends):
                return True
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return False


_GATHERS = ('index_select', torch.index_select, operator.getitem)


def _is_index(node: Node) -> bool:
    """Whether a node is the destinations of the edges."""
    return _end_of(node) == 'index'


def _end_of(node: Node) -> str | None:
    """The end of the edges that a node is, `index` or `source`, also as a row of `edge_index`."""
    for end, op in (('index', _ops.index), ('source', _ops.source)):
        if node.target in (op, op.default):
            return end
    if node.target is not operator.getitem:
        return None
    both, row = node.args
    if isinstance(both, Node) and both.target in ('unbind', torch.unbind) and len(both.args) == 1:
        both = both.args[0]
    is_edges = isinstance(both, Node) and both.target in (_ops.edge_index, _ops.edge_index.default)
    if not is_edges or row not in (0, 1, -1, -2):
        return None
    return 'index' if both.args[1] == (row in (0, -2)) else 'source'  # type: ignore[union-attr]


def _starts_sums(node: Node) -> bool:
    """Whether it is the zeros, as many as a number says, to which :func:`scatter` adds what each
    edge then gathers."""
    if node.target != 'new_zeros' or node.kwargs or len(node.args) < 2:
        return False
    size: Any = node.args[1]
    rows = size[0] if isinstance(size, (tuple, list)) and size else size
    return (
        isinstance(rows, int) and len(node.users) == 1
        and all(user.target in _SCATTERS and user.args[1] == 0 for user in node.users)
        and not _reaches(node, 'message.end', 'message.write', 'output')
    )  # fmt: skip


_SCATTERS = ('scatter_add_', 'scatter_reduce_')


def _check_is_size(node: Node) -> None:
    """Refuses a number of nodes that is used as anything but a size."""
    for user in node.users:
        if user.target in (operator.add, torch.sym_sum):
            _check_is_size(user)
        elif user.target not in (torch.Size, 'new_zeros'):
            raise Refused('the number of edges or nodes is used as a number')


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get('example_value'), torch.SymFloat)


def _trace_program(graph: GraphModule, num_edges: int, num_nodes: int) -> CapturedMessage:
    """The message of Dynamo's graph, traced with these numbers of edges and destinations."""
    placeholders = [node for node in graph.graph.nodes if node.op == 'placeholder']
    examples = [node.meta['example_value'] for node in placeholders]
    # Only the sizes of `edges` and `nodes` are symbolic: the entry fixes all others.
    edges = {str(n) for x in examples if isinstance(x, Tensor) for n in x.shape}

    def size(n: int | torch.SymInt) -> int:
        if not isinstance(n, torch.SymInt):
            return n
        return num_edges if str(n) in edges else num_nodes

    inputs = [
        Like(tuple(map(size, x.shape)), x.dtype, x.device) if isinstance(x, Tensor) else size(x)
        for x in examples
    ]
    numbers = tuple(
        k for k, node in enumerate(placeholders) if any(map(_is_number, node.users))
    )  # fmt: skip
    on_cuda = any(isinstance(x, Like) and x.device.type == 'cuda' for x in inputs)
    interpreter = _Interpreter(graph, num_edges, num_nodes)
    return read_message(interpreter, inputs, num_edges, num_nodes, on_cuda, numbers)


def read_message(
    interpreter: SizedInterpreter, inputs: Sequence[Like | int | float], num_edges: int,
    num_nodes: int, on_cuda: bool, numbers: tuple[int, ...] = (),
) -> CapturedMessage:  # fmt: skip
    """The message of a graph.

    Raises:
        Refused: If the message of an edge depends on others, or writes into its inputs.
    """
    writes = _Writes()

    def watch_and_run(*args: object) -> None:
        writes.watch(*args)
        with writes:
            interpreter.run(*args)

    run_on_fakes(watch_and_run, inputs)

    def function(*args: object) -> Sequence[Tensor]:
        with torch.fx.traceback.preserve_node_meta():
            out = torch.func.functionalize(interpreter.run)(*args)
        return out if isinstance(out, (tuple, list)) else (out,)

    program = Program()
    parser = Parser(program, num_edges, num_nodes)
    with torch.no_grad():
        end, *written = parser.read(trace(function, inputs))
    reduced: tuple[Reduced, ...] = (Reduced(end),)
    rows, key = None, program.text([end, *written])
    if parser.rows:
        reduced, rows = split_rows(program, parser.rows, parser.container)
        key = f'{program.text([*parser.rows, *written])}\n{parser.container}'
    across = []
    for at in program.reachable([*(each.at for each in reduced), *written]):
        if program[at].op in INDICES:
            name = INDICES[program[at].op]
            raise Refused(f"message uses '{name}' other than to gather or for a softmax")
        if program[at].op in ACROSS_EDGES:
            across.append(at)
    if across:
        at = next((at for at in across if program[at].op != 'degree'), across[0])
        reason = 'the message of an edge depends on other edges, and not by softmax'
        if program[at].op == 'degree':
            reason = 'message counts edges of each node'
        raise Refused(f'{reason}{parser.lines.get(at, "")}')
    if any(program[each.at].dtype == 'bool' for each in reduced):
        raise Refused('a message of bool')
    autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda')))
    for each in parser.constants:
        key += f'\n{each.dtype} {each.tolist()}'
    return CapturedMessage(
        program, reduced, rows, tuple(written), parser.num_dropouts, autocast, key, on_cuda,
        numbers, tuple(parser.constants), interpreter.most_nodes,
    )  # fmt: skip
