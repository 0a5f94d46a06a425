"""What a layer's own `forward` does with its edges, by its source."""

import ast
import builtins
import inspect
import textwrap
from collections import Counter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    remove_self_loops,
    softmax,
)

from ._explain_code import is_librarys
from ._modules import is_pygs

# Functions that return a list of edges and its attributes, and whether they must be told how many
# nodes there are: an EdgeIndex knows it, a list does not.
_ON_EDGES = {add_self_loops: True, add_remaining_self_loops: True, remove_self_loops: False}
_OF_LAYERS = ('propagate', 'edge_updater')
_PASS_EDGES = {*_OF_LAYERS, '__call__', '__getattr__', '__getattribute__'}
_KINDS = (Tensor, SparseTensor)
_SHOWS_ALL = {'locals', 'vars', 'eval', 'exec', 'globals', 'dir'}


class _Differs(Exception):
    """The code might tell a list from an EdgeIndex."""


def reads_a_list(conv: MessagePassing) -> bool:
    """Whether the list in place of a sorted EdgeIndex is known to give the same in a layer's
    `forward(x, edge_index, ...)`, for as many nodes as both ends have: it takes rows, masks, flips
    and self-loops of the edges, gives them to :meth:`propagate`, and does nothing else with
    them."""
    # One that became ours has the class that the user wrote as a base.
    is_adopted = getattr(conv, '_fused_is_adopted', bool)()
    cls = type(conv)._base if is_adopted else type(conv)
    forward = getattr(cls, 'forward', None)
    changes = any(
        name in vars(base) and not is_librarys(base) and not _is_pygs(vars(base)[name])
        for base in cls.__mro__ for name in _PASS_EDGES
    )  # fmt: skip
    if changes or not isinstance(forward, FunctionType) or 'forward' in vars(conv):
        return False
    try:
        _Reader(forward, cls, {*vars(conv)}, edges={2}, sizes=set()).read()
    except _Differs:
        return False
    return True


def gives_to_softmax(function: object, name: str) -> bool:
    """Whether a function does nothing with an argument but give it to PyG's softmax."""
    if not isinstance(function, FunctionType):
        return False
    try:
        nodes = [node for each in _body_of(function) for node in ast.walk(each)]
    except _Differs:
        return False
    given = {
        argument
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and function.__globals__.get(node.func.id) is softmax
        for argument in (*node.args, *(each.value for each in node.keywords))
    }  # fmt: skip
    return all(node in given for node in nodes if _is_name(node, name))


class _Reader:
    """Reads a function that gets edges.

    Args:
        function: The function.
        cls: The class of the layer, if it is a method of that.
        own: The names of the layer's own attributes, which hide those of the class.
        edges: The positions of the arguments that are edges.
        sizes: The positions of those that are numbers of nodes.
        depth: How many functions call it.
    """

    def __init__(
        self, function: FunctionType, cls: type | None, own: set[str], edges: set[int],
        sizes: set[int], depth: int = 0,
    ) -> None:  # fmt: skip
        self._function, self._cls, self._own, self._depth = function, cls, own, depth
        self._body = _body_of(function)
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        if max(edges) >= len(names) or depth > 4:
            raise _Differs
        self._edges = {names[k] for k in edges}
        self._sizes = {names[k] for k in sizes if k < len(names)}
        self._local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}

    def read(self) -> None:
        """Raises :class:`_Differs` unless all that it does with the edges is known."""
        self._find_sizes()
        known = -1
        while known < len(self._edges):  # A loop may read what stands behind it.
            known = len(self._edges)
            for statement in self._body:
                self._none(statement)

    def _find_sizes(self) -> None:
        """Finds the variables that are nothing but numbers of rows of a tensor."""
        nodes = [node for statement in self._body for node in ast.walk(statement)]
        written = Counter(
            node.id for node in nodes
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        )  # fmt: skip
        values: dict[str, list[ast.expr]] = {name: [] for name in written}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id].append(node.value)
        for name, found in values.items():
            if len(found) == written[name] and all(map(self._is_size, found)):
                self._sizes.add(name)
            else:
                self._sizes.discard(name)

    def _is_size(self, node: ast.expr) -> bool:
        """Whether an expression is the number of rows of a tensor."""
        if isinstance(node, ast.Name):
            return node.id in self._sizes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr == 'size' and self._is_other(node.func.value) and (
                _constants(node.args) == [0]
            )  # fmt: skip
        if isinstance(node, ast.Call):
            is_len = isinstance(node.func, ast.Name) and self._resolved(node.func) is len
            return is_len and len(node.args) == 1 and self._is_other(node.args[0])
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            is_shape = node.value.attr == 'shape' and self._is_other(node.value.value)
            return is_shape and _constants([node.slice]) == [0]
        return False

    def _is_other(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in self._edges

    def _none(self, *nodes: ast.AST) -> None:
        """Raises if one of the nodes is a list of edges, which what takes it could tell apart."""
        if any(self._is_edges(node) for node in nodes):
            raise _Differs

    def _is_edges(self, node: ast.AST) -> bool:
        """Whether an expression is a list of edges; raises if something else is done with one."""
        if isinstance(node, ast.Name):
            return node.id in self._edges
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.NamedExpr, ast.Global)):
            inside = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if inside & self._edges or not isinstance(node, ast.Lambda):
                raise _Differs
            return False
        if isinstance(node, ast.Assign):
            self._read_assignment(node)
            return False
        if isinstance(node, ast.If) and (kinds := self._kinds(node.test)) is not None:
            # A list is a tensor, and no sparse matrix.
            self._none(*(node.body if Tensor in kinds else node.orelse))
            return False
        if isinstance(node, ast.Compare) and self._is_edges(node.left):
            if [*map(type, node.ops)] not in ([ast.Is], [ast.IsNot]) or (
                _constants(node.comparators) != [None]
            ):  # fmt: skip
                raise _Differs
            return False
        if isinstance(node, ast.Attribute) and self._is_edges(node.value):
            if node.attr not in ('shape', 'device'):
                raise _Differs
            return False
        if isinstance(node, ast.Subscript):
            return self._is_edges_of_subscript(node)
        if isinstance(node, ast.Call):
            return self._is_edges_of_call(node)
        self._none(*ast.iter_child_nodes(node))
        return False

    def _read_assignment(self, node: ast.Assign) -> None:
        (target, *more), value = node.targets, node.value
        pair = target.elts if isinstance(target, ast.Tuple) and len(target.elts) == 2 else []
        if isinstance(value, ast.Call) and self._makes_edges(value):
            if more or not pair or not isinstance(pair[0], ast.Name):
                raise _Differs
            self._edges.add(pair[0].id)
        elif self._is_edges(value):
            if isinstance(target, ast.Name) and not more:
                self._edges.add(target.id)
            elif more or not pair:
                raise _Differs  # Else its rows, which are plain tensors.
        for each in node.targets:
            if not isinstance(each, (ast.Name, ast.Tuple)):
                self._none(each)

    def _makes_edges(self, node: ast.Call) -> bool:
        """Whether a call is of a function that returns edges and their attributes."""
        function = self._resolved(node.func)
        needs = [needs for each, needs in _ON_EDGES.items() if each is function]
        if not needs or not node.args or not self._is_edges(node.args[0]):
            return False
        self._none(*node.args[1:], *node.keywords)
        sizes = [each.value for each in node.keywords if each.arg == 'num_nodes']
        if needs[0] and not (sizes and self._is_size(sizes[0])):
            raise _Differs
        return True

    def _is_edges_of_subscript(self, node: ast.Subscript) -> bool:
        which = node.slice
        if isinstance(node.value, ast.Call) and self._makes_edges(node.value):
            if _constants([which]) not in ([0], [1]):
                raise _Differs
            return _constants([which]) == [0]
        if not self._is_edges(node.value):
            self._none(which)
            return False
        if isinstance(which, ast.Tuple) and len(which.elts) == 2:  # Some of its columns.
            rows, columns = which.elts
            if not isinstance(rows, ast.Slice) or rows.lower or rows.upper or rows.step:
                raise _Differs
            self._none(columns)
            return True
        if _constants([which]) not in ([0], [1]):
            raise _Differs
        return False

    def _is_edges_of_call(self, node: ast.Call) -> bool:
        func, given = node.func, [*node.args, *[each.value for each in node.keywords]]
        if isinstance(func, ast.Attribute) and self._is_edges(func.value):
            self._none(*given)
            if func.attr == 'flip' and _constants(given) == [0]:
                return True
            if func.attr not in ('size', 'numel', 'dim'):
                raise _Differs
            return False
        if isinstance(func, ast.Name) and func.id in _SHOWS_ALL:
            raise _Differs
        method = (
            func.attr if isinstance(func, ast.Attribute) and _is_name(func.value, 'self') else ''
        )
        if method in _OF_LAYERS and self._cls is not None:
            # Of other edges nobody knows how many nodes they have.
            if not given or not self._is_edges(given[0]):
                raise _Differs
            self._none(*given[1:])
            return False
        function: Any = self._resolved(func)
        if function is torch.cat and given and isinstance(given[0], (ast.List, ast.Tuple)):
            parts = [self._is_edges(each) for each in given[0].elts]
            self._none(*given[1:])
            if any(parts) and not (all(parts) and _constants(given[1:]) in ([1], [-1])):
                raise _Differs
            return any(parts)
        takes = {k for k, each in enumerate(node.args) if self._is_edges(each)}
        self._none(func, *node.keywords)
        if not takes:
            return False
        if self._kinds(node) is not None:
            return False
        if any(isinstance(each, ast.Starred) for each in node.args):
            raise _Differs
        if isinstance(function, FunctionType) and not is_librarys(function):
            sizes = {k for k, each in enumerate(node.args) if self._is_size(each)}
            shift = int(method != '' and not isinstance(self._static(func), staticmethod))
            cls = self._cls if shift else None
            takes, sizes = ({k + shift for k in each} for each in (takes, sizes))
            _Reader(function, cls, self._own, takes, sizes, self._depth + 1).read()
            return False
        raise _Differs

    def _kinds(self, node: ast.expr) -> list[object] | None:
        """The classes of which a call asks whether edges are, if they tell no list from an
        EdgeIndex."""
        if not isinstance(node, ast.Call) or self._resolved(node.func) is not isinstance:
            return None
        if len(node.args) != 2:
            raise _Differs
        value, kind = node.args
        kinds = [*map(self._resolved, kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        return kinds if self._is_edges(value) and all(each in _KINDS for each in kinds) else None

    def _static(self, func: ast.expr) -> object:
        if not isinstance(func, ast.Attribute) or func.attr in self._own:
            return None
        return inspect.getattr_static(self._cls, func.attr, None)

    def _resolved(self, node: ast.expr) -> object:
        """A global, an attribute of a module, or a method of the layer's class; else None."""
        if isinstance(node, ast.Name) and node.id not in self._local:
            return self._function.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            if _is_name(node.value, 'self') and self._cls is not None:
                found = self._static(node)
                return found.__func__ if isinstance(found, staticmethod) else found
            base = self._resolved(node.value)
            return getattr(base, node.attr, None) if isinstance(base, ModuleType) else None
        return None


def _is_pygs(function: object) -> bool:
    """Whether it is a method that PyG gives to a class of the user."""
    return getattr(function, '__name__', '') in _OF_LAYERS and is_pygs(function)  # type: ignore[arg-type]


def _body_of(function: FunctionType) -> list[ast.stmt]:
    """The statements of a function that is written as it runs."""
    if hasattr(function, '__wrapped__') or function.__closure__:
        raise _Differs
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        raise _Differs from None
    found = tree.body[0]
    code = function.__code__
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        raise _Differs
    names = [each.arg for each in (*found.args.posonlyargs, *found.args.args)]
    if found.name != code.co_name or names != [*code.co_varnames[: code.co_argcount]]:
        raise _Differs
    return found.body


def _constants(nodes: list[ast.expr]) -> list[object]:
    """The values of constants; those of other expressions are equal to nothing."""
    out: list[object] = []
    for node in nodes:
        try:
            out.append(ast.literal_eval(node))
        except ValueError:
            out.append(node)
    return out


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
