"""Captures the message that a user wrote, with guards on everything that it reads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ._ir import Program, Refused
from ._parse import Like, Parser, trace

# Markers in a captured graph: they never run.
_library = torch.library.Library('pyg_fast_message', 'DEF')
_library.define('lift(Tensor x, Tensor edges, str role, str name) -> Tensor')
_library.define('dropout(Tensor x, float p) -> Tensor')
_library.define('end(Tensor x) -> Tensor')
_library.impl('lift', lambda x, e, role, name: x.new_empty((e.size(0), *x.shape[1:])), 'Meta')
_library.impl('dropout', lambda x, p: torch.empty_like(x), 'Meta')
_library.impl('end', lambda x: torch.empty_like(x), 'Meta')

# Numbers of edges that no other size of a message equals; a second one shows which constants of a
# traced message depend on it.
_EDGES = (1_000_003, 1_000_033)

Runner = Callable[['Captured', tuple], Any]


@dataclass(frozen=True)
class Captured:
    """A message as a program. Loads of nodes and edges count by the name of the input, those of
    parameters by their place among the arguments of the captured function. Those of equal text are
    equal."""

    program: Program = field(compare=False)
    output: int = field(compare=False)
    num_dropouts: int = field(compare=False)
    key: str  # the canonical text


class _Calls(threading.local):
    run: Runner | None = None


_calls = _Calls()


def backend(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """What Dynamo calls for a new message: returns the function for its arguments."""
    captured = _program(graph)

    def call(*args: Any) -> Any:
        run = _calls.run
        assert run is not None
        return (run(captured, args),)

    return call


def with_runner(run: Runner, compiled: Callable[..., Any], *args: Any) -> Any:
    """Calls a captured function; `run` gets the program and its arguments."""
    before, _calls.run = _calls.run, run
    try:
        return compiled(*args)
    finally:
        _calls.run = before


def _program(graph: GraphModule) -> Captured:
    _check_writes(graph)
    _mark_dropouts(graph)
    for node in reversed(list(graph.graph.nodes)):
        # Facts about symbolic sizes, which Dynamo states.
        if node.target is torch.ops.aten._assert_scalar.default:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    captured = [_read(graph, count) for count in _EDGES]
    if captured[0].key != captured[1].key:
        raise Refused('the number of edges is used as a number')
    return captured[0]


# Methods that return a view of their tensor, or the tensor itself.
_VIEWS = {
    'view', 'reshape', 'unsqueeze', 'squeeze', 'transpose', 'permute', 't', 'expand', 'flatten',
    'unflatten', 'narrow', 'select', 'chunk', 'split', 'unbind', 'detach', 'contiguous', 'to',
    'float', 'type_as', 'view_as', 'expand_as', 'reshape_as', 'movedim', 'swapaxes', 'swapdims',
    'T', 'mT', 'data', 'getitem', 'unfold', 'diagonal', 'tensor_split', 'squeeze_', 'unsqueeze_',
}  # fmt: skip


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '')


def _check_writes(graph: GraphModule) -> None:
    """Refuses a message that writes into an input of the edges: it is the user's own tensor."""
    for node in graph.graph.nodes:
        name = _name(node)
        writes = (
            (name.endswith('_') and not name.endswith('__'))
            or name
            in ('setitem', '__setitem__', 'iadd', 'isub', 'imul', 'itruediv', 'ipow', 'iand')
            or name in ('ior', 'ixor', 'ifloordiv', 'imod', 'imatmul')
            or node.kwargs.get('inplace') is True
            or any(each is True for each in node.args[1:])  # perhaps `inplace`, by its place
            or 'out' in node.kwargs
        )
        if not writes or node.op not in ('call_function', 'call_method'):
            continue
        for each in (node.args[0] if node.args else None, node.kwargs.get('out')):
            while isinstance(each, Node) and each.args and _name(each) in _VIEWS:
                each = each.args[0]
            if isinstance(each, Node) and 'edge' in each.args and _name(each).startswith('lift'):
                raise Refused('message writes into its input')


def _mark_dropouts(graph: GraphModule) -> None:
    marker = torch.ops.pyg_fast_message.dropout.default
    for node in list(graph.graph.nodes):
        if node.op != 'call_function' or node.target not in (F.dropout, torch.dropout):
            continue
        names = ('input', 'p', 'training' if node.target is F.dropout else 'train', 'inplace')
        given = {'p': 0.5, names[2]: True, 'inplace': False}
        given.update(zip(names, node.args, strict=False))
        given.update(node.kwargs)
        if given['inplace']:
            raise Refused('dropout in place')
        x, p = given['input'], given['p']
        if not given[names[2]] or p == 0:
            node.replace_all_uses_with(x)
        else:
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(marker, (x, p))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()


def _read(graph: GraphModule, num_edges: int) -> Captured:
    """The program, traced for a number of edges of our own choice."""
    inputs: list[Any] = []
    for node in graph.graph.nodes:
        if node.op != 'placeholder':
            continue
        example = node.meta['example_value']
        if isinstance(example, Tensor):
            # All other sizes are fixed: `entry` passes them so.
            shape = tuple(n if isinstance(n, int) else num_edges for n in example.shape)
            inputs.append(Like(shape, example.dtype, example.device))
        else:
            inputs.append(num_edges if isinstance(example, torch.SymInt) else example)

    interpreter = torch.fx.Interpreter(graph)

    def function(*args: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            out = torch.func.functionalize(interpreter.run)(*args)
        return out if isinstance(out, (tuple, list)) else (out,)

    program = Program()
    parser = Parser(program, num_edges)
    with torch.no_grad():
        outputs = parser.read(trace(function, inputs))
        if len(outputs) > 1:
            raise Refused('message sets an attribute or a global')
        (output,) = outputs
    if program.values[output].dtype == 'bool':
        raise Refused('a message of bool')
    return Captured(program, output, parser.num_dropouts, program.text([output]))
