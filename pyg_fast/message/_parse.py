"""From torch's operators to a :class:`~pyg_fast.message._ir.Program`."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ._ir import BOOLEAN, DST, EDGE, Program, Refused, is_float, number
from ._operators import (
    ANYWHERE,
    BINARY_OPS,
    CAST,
    COPIES,
    SAME,
    SCATTERS,
    UNARY_OPS,
    VIEW,
    WHERE,
    aten,
)

# Numbers of edges and of their destinations that no other size of a message equals; second ones
# show which constants of a traced message depend on them.
EDGES = (1_000_003, 1_000_033)
NODES = (999_983, 999_979)
# A softmax adds less than this to its sums.
_LITTLE = 1e-12


class Parser:
    """Reads a traced graph whose edges are `num_edges`, and whose destinations `num_nodes`: numbers
    that no other size equals."""

    def __init__(self, program: Program, num_edges: int, num_nodes: int = NODES[0]) -> None:
        self.program = program
        self.num_edges, self.num_nodes = num_edges, num_nodes
        self.at: dict[Node, Any] = {}  # a position, or several
        self.slot: dict[Node, int] = {}
        self.num_dropouts = 0

    def read(self, graph: GraphModule, inputs: Sequence[int] | None = None) -> list[int]:
        """The positions of the graph's results. `inputs` are those of its placeholders; without
        them these are parameters, and inputs of nodes and edges where they are lifted."""
        for node in graph.graph.nodes:
            node.target = COPIES.get(node.target, node.target)
        for slot, node in enumerate(n for n in graph.graph.nodes if n.op == 'placeholder'):
            self.slot[node] = slot
            if inputs is not None:
                self.at[node] = inputs[slot]
        for node in graph.graph.nodes:
            if node.op == 'placeholder':
                meta = node.meta.get('val')
                if inputs is None and isinstance(meta, Tensor):
                    shape = tuple(meta.shape)
                    self.at[node] = self.program.load(
                        'param', self.slot[node], shape, _name(meta.dtype)
                    )
            elif node.target is aten.empty.memory_format and not node.users:
                pass  # What a batch norm would need to be derived.
            elif node.op == 'output':
                return [self._value(each) for each in node.args[0]]
            elif node.op == 'get_attr':
                tensor = getattr(graph, node.target)
                if tensor.numel() != 1:
                    raise Refused('a constant tensor made in message')
                self.at[node] = self._const(tensor.item(), tensor.dim(), _name(tensor.dtype))
            else:
                try:
                    self.at[node] = self._call(node)
                except Refused as error:
                    raise Refused(f'{error}{_place(node)}') from None
        raise AssertionError

    def _value(self, node: Any) -> int:
        at = self.at.get(node)
        if not isinstance(at, int):
            raise Refused('a result that is no tensor of the edges')
        return at

    def _const(self, value: Any, rank: int, dtype: str) -> int:
        return self.program.const(value, rank, dtype)

    def _trailing(self, node: Node) -> tuple[int, ...]:
        """The shape of a value without the dimension of the edges."""
        meta = node.meta['val']
        shape, on_edges = tuple(meta.shape), self._on_edges(node)
        if not on_edges:
            if self.num_edges in shape:
                raise Refused('a parameter of the size of the edges')
            return shape
        if 0 in shape:
            raise Refused('an empty value')
        lead = self._lead(node)
        if self._of_nodes(node):
            return shape[1:]
        if lead:
            rest = (*shape[:lead], *shape[lead + 1 :])
            if shape[lead] != self.num_edges or math.prod(rest) % self.num_edges == 0:
                raise Refused(f'{node.target} mixes edges')
            return rest
        if (
            not shape
            or shape[0] % self.num_edges
            or math.prod(shape[1:]) % self.num_edges == 0
            and (math.prod(shape[1:]) > 0)
        ):
            raise Refused(f'{node.target} mixes edges')
        times = shape[0] // self.num_edges
        return shape[1:] if times == 1 else (times, *shape[1:])

    def _on_edges(self, node: Node) -> bool:
        """Whether a value or one of its arguments has the dimension of the edges."""
        return any(self._lead(each) is not None for each in (node, *node.all_input_nodes))

    def _lead(self, node: Node) -> int | None:
        """Which dimension of a value is that of the edges."""
        meta = node.meta.get('val')
        if not isinstance(meta, Tensor):
            return None
        if self._of_nodes(node):
            return 0
        sizes = enumerate(meta.shape)
        return next((k for k, n in sizes if n and n % self.num_edges == 0), None)

    def _of_nodes(self, node: Node) -> bool:
        """Whether a value has a row for each destination."""
        meta = node.meta.get('val')
        return isinstance(meta, Tensor) and meta.shape[:1] == (self.num_nodes,)

    def _operand(self, arg: Any, node: Node) -> int:
        """An argument of a pointwise operation, with as many dimensions as the result."""
        program, meta = self.program, node.meta['val']
        on_edges = self._on_edges(node)
        rank = meta.dim() - on_edges
        if not isinstance(arg, Node):
            if not isinstance(arg, (int, float, bool)):
                raise Refused(f'{node.target} of a {type(arg).__name__}')
            dtype = _name(meta.dtype)
            return self._const(arg, rank, dtype if dtype != 'bool' else 'float64')
        at = self._value(arg)
        shape = program[at].shape
        if on_edges:
            own, lead = self._lead(arg), self._lead(node)
            if lead is None:
                raise Refused(f'{node.target} mixes edges')
            if own is None:
                shape = (1,) * (rank + 1 - len(shape)) + shape
                if shape[lead] != 1:
                    raise Refused(f'{node.target} mixes edges')
                shape = (*shape[:lead], *shape[lead + 1 :])
            # The dimensions after that of the edges fit together.
            elif (dim := arg.meta['val'].dim()) - own != rank + 1 - lead or dim - 1 != len(shape):
                raise Refused(f'{node.target} mixes edges')
        return program.view(at, (1,) * (rank - len(shape)) + shape)

    def _dim(self, dim: int, node: Node) -> int:
        """A dimension among those of one edge."""
        arg: Any = node.args[0]
        while not isinstance(arg, Node):
            arg = arg[0]
        full = arg.meta['val'].dim()
        dim = dim % max(full, 1)
        if self._on_edges(node):
            if dim == 0:
                raise Refused(f'{node.target} along the edges')
            # One dimension more where that of the edges holds several rows of each.
            dim += len(self.program[self._value(arg)].shape) - full
        return dim

    def _call(self, node: Node) -> Any:
        program, target = self.program, node.target
        args: Any = node.args
        meta: Any = node.meta.get('val')
        if target not in ANYWHERE and any(map(self._lead, (node, *node.all_input_nodes))):
            raise Refused(f'{target} of a tensor whose first dimension is not that of the edges')
        if target is operator.getitem:
            return self.at[args[0]][args[1]]
        if target is torch.ops.pyg_fast_message.lift.default:
            role, name = args[2:]
            return program.load(role, name, tuple(meta.shape)[1:], _name(meta.dtype))
        if target is torch.ops.pyg_fast_message.dropout.default:
            return self._dropout(node)
        if target is torch.ops.pyg_fast_message.end.default:
            if not meta.shape or meta.shape[0] != self.num_edges:
                raise Refused('a message whose first dimension is not that of the edges')
            return self._value(args[0])
        if target is torch.ops.pyg_fast_message.end_of_sum.default:
            last = program[self._value(args[0])]
            if last.op != 'rowsum':
                raise Refused('an aggregation that is no sum')
            return last.args[0]
        if target in UNARY_OPS:
            x = self._float(self._value(args[0]))
            return self._checked(program.point(UNARY_OPS[target], x, dtype=_name(meta.dtype)), node)
        if target in BINARY_OPS:
            return self._binary(BINARY_OPS[target], node)
        if target in WHERE:
            parts = [self._operand(arg, node) for arg in args]
            return self._checked(program.point('where', *parts, dtype=_name(meta.dtype)), node)
        if target in SAME:
            return self._value(args[0])
        if target in CAST:
            dtype = _name(meta.dtype)
            x = self._value(args[0])
            if not is_float(dtype) and dtype != program[x].dtype:
                raise Refused(f'a conversion to {dtype}')
            return program.cast(x, dtype)
        if target in (aten.full.default, aten.scalar_tensor.default):
            return self._filled(node, args[-1])
        if target in (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default):
            return self._filled(
                node, {aten.zeros_like.default: 0, aten.ones_like.default: 1}.get(target, args[-1])
            )
        if target in _MAPS:
            return self._linear(node)
        if target is torch.ops.pyg_fast_message.index.default:
            return program.add('index', (), (), (), 'int64', EDGE)
        if target in SCATTERS:
            return self._summed_by_row(node)
        if target is aten.index_select.default:
            return self._of_own_row(node)
        return self._shaped(node)

    def _summed_by_row(self, node: Node) -> int:
        """A sum or maximum over the edges of each destination."""
        program, target = self.program, node.target
        args: Any = node.args
        zeros, dim, index, x = args[:4]
        start, at = program[self._value(zeros)], self._value(index)
        while program[at].op in ('view', 'expand'):
            (at,) = program[at].args
        if (
            dim != 0 or program[at].op != 'index' or not self._of_nodes(zeros)
            or start.op != 'const' or number(start) != 0 or not self._on_edges(x)
            or index.meta['val'].shape != x.meta['val'].shape
            or zeros.meta['val'].shape[1:] != x.meta['val'].shape[1:]
        ):  # fmt: skip
            raise Refused(f'{target} has no kernel')
        op = 'rowsum'
        if target is aten.scatter_reduce.two:
            if args[4] != 'amax' or node.kwargs.get('include_self', True):
                raise Refused(f'{target} has no kernel')
            op = 'rowmax'
        value = program[self._value(x)]
        return program.add(op, (self._value(x),), (), value.shape, value.dtype, DST)

    def _of_own_row(self, node: Node) -> int:
        """What the destination of each edge has."""
        args: Any = node.args
        x, dim, index = args
        along = dim % x.meta['val'].dim() == 0
        if not along or not self._of_nodes(x) or self.program[self._value(index)].op != 'index':
            raise Refused(f'{node.target} has no kernel')
        return self._value(x)

    def _softmax(self, a: int, b: int) -> int | None:
        """The softmax over the edges of each destination that a quotient is, if it is one: as PyG
        computes it."""
        program = self.program
        b = self._bare(b)
        if program[b].op == 'add':
            b, little = program[b].args
            if program[little].op != 'const' or not 0 <= number(program[little]) < _LITTLE:
                return None
            b = self._bare(b)
        if program[b].op != 'rowsum' or self._bare(program[b].args[0]) != self._bare(a):
            return None
        top = program[self._bare(a)]
        if top.op != 'exp':
            return None
        shifted = program[self._bare(top.args[0])]
        if shifted.op != 'sub':
            return None
        score, most = shifted.args[0], self._bare(shifted.args[1])
        if program[most].op != 'rowmax':
            return None
        if self._bare(program[most].args[0]) != self._bare(score):
            return None
        return program.add('softmax', (score,), (), program[score].shape, top.dtype, EDGE)

    def _bare(self, at: int) -> int:
        while self.program[at].op == 'cast':
            (at,) = self.program[at].args
        return at

    def _filled(self, node: Node, value: Any) -> int:
        """A tensor of one number."""
        if not isinstance(value, (int, float, bool)):
            raise Refused(f'{node.target} of a {type(value).__name__}')
        dtype = _name(node.meta['val'].dtype)
        const = self.program[self._const(value, 0, dtype)]
        return self.program.add('const', (), const.attrs, self._trailing(node), dtype)

    def _dropout(self, node: Node) -> int:
        x, p = self._value(node.args[0]), float(node.args[1])  # type: ignore[arg-type]
        value = self.program[x]
        if self.program.level(x) == 0:
            raise Refused('dropout of a parameter')
        self.num_dropouts += 1
        keep = self.program.keep(self.num_dropouts - 1, p, self._trailing(node), value.dtype)
        return self.program.point('mul', x, keep, dtype=value.dtype)

    def _float(self, x: int) -> int:
        if not is_float(self.program[x].dtype) and self.program[x].dtype != 'bool':
            raise Refused(f'arithmetic of {self.program[x].dtype}')
        return x

    def _checked(self, at: int, node: Node) -> int:
        """The same, if its shape is that of the traced result."""
        trailing = self._trailing(node)
        if self.program[at].shape != trailing:
            at = self.program.expand(at, trailing)
        return at

    def _binary(self, op: str, node: Node) -> int:
        program, meta = self.program, node.meta['val']
        if node.kwargs.get('rounding_mode') is not None:
            raise Refused('a division that rounds')
        a, b = (self._operand(arg, node) for arg in node.args[:2])
        scale = node.kwargs.get('alpha', 1)
        if scale != 1:
            b = program.point('mul', b, self._const(scale, len(program[b].shape), program[b].dtype))
        dtype = _name(meta.dtype)
        if dtype != 'bool':
            for each in (a, b):
                self._float(each)
            if not is_float(dtype):
                raise Refused(f'arithmetic of {dtype}')
        else:
            if op not in BOOLEAN:
                raise Refused('arithmetic of bool')
            a, b = self._exact(a, b), self._exact(b, a)
        softmax = self._softmax(a, b) if op == 'div' else None
        if softmax is not None:
            return self._checked(program.cast(softmax, dtype), node)
        return self._checked(program.point(op, a, b, dtype=dtype), node)

    def _exact(self, x: int, other: int) -> int:
        """An integer, in a dtype in which it compares as an integer."""
        own, against = self.program[x], self.program[other]
        if is_float(own.dtype) or own.dtype == 'bool':
            return x
        limit = abs(number(against)) if against.op == 'const' else math.inf
        if limit < 2**24:  # Rounding does not carry an integer over this number.
            return x
        if own.dtype == 'int64' and limit >= 2**53:
            raise Refused('a comparison of int64')
        return self.program.cast(x, 'float64')

    def _linear(self, node: Node) -> int:
        program = self.program
        args: Any = list(node.args)
        if node.target is aten.bmm.default:
            return self._bmm(node)
        bias = args.pop(0) if node.target is aten.addmm.default else None
        x, weight = (self._value(arg) for arg in args)
        on_edges = self._on_edges(node)
        if on_edges and (program.level(weight) != 0 or program.level(x) == 0):
            raise Refused('a product with a matrix that varies by edge')
        out = program.mm(self._float(x), self._float(weight))
        if not on_edges:
            shape = program[out].shape
        else:
            shape = self._trailing(node)
            if program[out].shape != shape:
                raise Refused('a product of mixed edges')
        if bias is not None:
            if node.kwargs.get('alpha', 1) != 1 or node.kwargs.get('beta', 1) != 1:
                raise Refused('addmm with factors')
            at = self._value(bias)
            own = program[at].shape
            if program.level(at) != 0 or len(own) > len(shape):
                raise Refused('addmm of a matrix')
            at = program.view(at, (1,) * (len(shape) - len(own)) + own)
            out = program.point('add', out, at, dtype=_name(node.meta['val'].dtype))
        return out

    def _bmm(self, node: Node) -> int:
        program = self.program
        a, b = (self._value(arg) for arg in node.args)
        lead, (m, k), n = program[a].shape[:-2], program[a].shape[-2:], program[b].shape[-1]
        if not self._on_edges(node) or program[b].shape[:-2] != lead or program.level(a) == 0:
            raise Refused('a batched product of parameters')
        if program.level(b) == 0:  # A matrix repeated for every edge.
            if lead:
                raise Refused('a batched product of parameters')
            return program.mm(self._float(a), self._float(b))
        a, b = program.view(a, (*lead, m, k, 1)), program.view(b, (*lead, 1, k, n))
        both = program.point('mul', a, b)
        return program.view(program.reduce('sum', both, (len(lead) + 1,)), (*lead, m, n))

    def _shaped(self, node: Node) -> Any:
        """Operations that move, repeat or sum numbers of an edge."""
        program, target = self.program, node.target
        args: Any = node.args
        if target is aten.cat.default:
            dim = self._dim(args[1] if len(args) > 1 else 0, node)
            xs = [self._value(arg) for arg in args[0]]
            on_edges = self._on_edges(node)
            if on_edges and not all(self._on_edges(arg) for arg in args[0]):
                raise Refused('cat of parameters with values of the edges')
            return self._checked(program.cat(xs, dim), node)
        if not isinstance(args[0] if args else None, Node):
            raise Refused(f'{target} has no kernel')
        x = self._value(args[0])
        shape = program[x].shape
        if target in VIEW or target in (
            aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ):  # fmt: skip
            return program.view(x, self._trailing(node))
        if target is aten.expand.default:
            trailing, rank = self._trailing(node), node.meta['val'].dim()
            if self._on_edges(node) and self._lead(args[0]) is None:
                shape = ((1,) * (rank - len(shape)) + shape)[1:]
            shape = (1,) * (len(trailing) - len(shape)) + shape
            return program.expand(program.view(x, shape), trailing)
        if target in (aten.permute.default, aten.t.default, aten.transpose.int):
            return self._permuted(node, x)
        if target in (aten.slice.Tensor, aten.select.int):
            return self._sliced(node, x)
        if target in (aten.slice_backward.default, aten.select_backward.default):
            return self._padded(node, x)
        if target in (aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int):
            return self._split(node, x)
        if target in (
            aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
        ):  # fmt: skip
            return self._reduced(node, x)
        if target in _CHOOSE:
            return [self._chosen(node, x), None]
        raise Refused(f'{target} has no kernel')

    def _permuted(self, node: Node, x: int) -> int:
        program = self.program
        args: Any = node.args
        rank = args[0].meta['val'].dim()
        order = list(range(rank))
        if node.target is aten.permute.default:
            order = [k % rank for k in args[1]]
        else:
            a, b = args[1:3] if node.target is aten.transpose.int else (0, rank - 1)
            order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
        if self._on_edges(node):
            self._trailing(node)
            lead = self._lead(args[0])
            if lead is None or rank - 1 != len(program[x].shape):
                raise Refused(f'{node.target} mixes edges')
            order = [k - (k > lead) for k in order if k != lead]
        return program.permute(x, tuple(order))

    def _sliced(self, node: Node, x: int) -> int:
        program = self.program
        args: Any = node.args
        if node.target is aten.select.int:
            dim = self._dim(args[1], node)
            index = args[2] % program[x].shape[dim]
            return program.view(program.slice(x, dim, index, 1), self._trailing(node))
        if self._is_all(node):
            return x
        dim = self._dim(args[1] if len(args) > 1 else 0, node)
        size = program[x].shape[dim]
        start, stop, step = slice(*args[2:5]).indices(size)
        return program.slice(x, dim, start, max(0, -((start - stop) // step)), step)

    def _padded(self, node: Node, x: int) -> int:
        """The gradient of a slice: zeros around it."""
        program = self.program
        args: Any = node.args
        trailing, rank = self._trailing(node), node.meta['val'].dim()
        dim = args[2] % rank - 1 if self._on_edges(node) else args[2] % rank
        size = trailing[dim]
        if node.target is aten.select_backward.default:
            start, step = args[3] % size, 1
            x = program.view(x, (*trailing[:dim], 1, *trailing[dim + 1 :]))
        else:
            start, _, step = slice(*args[3:6]).indices(size)
        if dim < 0 or step != 1 or rank != len(trailing) + self._on_edges(node):
            raise Refused('the gradient of a slice with steps')
        dtype, own = program[x].dtype, program[x].shape[dim]
        parts = []
        for count, part in ((start, None), (own, x), (size - start - own, None)):
            if part is not None:
                parts.append(part)
            elif count:
                zero = program[self._const(0, 0, dtype)]
                shape = (*trailing[:dim], count, *trailing[dim + 1 :])
                parts.append(program.add('const', (), zero.attrs, shape, dtype))
        return program.cat(parts, dim)

    def _is_all(self, node: Node) -> bool:
        """Whether a slice takes a whole dimension, perhaps that of edges."""
        args: Any = node.args
        same = node.meta['val'].shape == args[0].meta['val'].shape
        return same and (len(args) < 5 or args[4] == 1)

    def _split(self, node: Node, x: int) -> list[int]:
        program = self.program
        args: Any = node.args
        unbind = node.target is aten.unbind.int
        place = 1 if unbind else 2
        dim = self._dim(args[place] if len(args) > place else 0, node)
        size = program[x].shape[dim]
        if unbind:
            sizes = [1] * size
        elif node.target is aten.split.Tensor:
            each = args[1]
            sizes = [min(each, size - k) for k in range(0, size, each)]
        else:
            sizes = list(args[1])
        out, start = [], 0
        for each in sizes:
            part = program.slice(x, dim, start, each)
            if unbind:
                shape = program[part].shape
                part = program.view(part, (*shape[:dim], *shape[dim + 1 :]))
            out.append(part)
            start += each
        return out

    def _reduced(self, node: Node, x: int) -> int:
        program = self.program
        args: Any = node.args
        target: Any = node.target
        counts = program[x].dtype == 'bool' and target is aten.sum.dim_IntList
        self._float(x)
        rank = args[0].meta['val'].dim()
        dims = args[1] if len(args) > 1 and args[1] is not None else []
        if isinstance(dims, int):
            dims = [dims]
        if not dims:
            dims = list(range(rank))
        if self._on_edges(node) and any(k % rank == 0 for k in dims):
            raise Refused('a reduction over edges')
        places = [self._dim(k, node) for k in dims]
        kind = {aten.amax.default: 'amax', aten.amin.default: 'amin'}.get(target, 'sum')
        out = program.reduce(kind, x, places)
        if target is aten.mean.dim:
            count = math.prod(program[x].shape[k] for k in places)
            divisor = self._const(count, len(program[out].shape), program[out].dtype)
            out = program.point('div', out, divisor)
        # A number of flags is small: exact in every dtype.
        dtype = 'float32' if counts else _name(node.meta['val'].dtype)
        return program.cast(program.view(out, self._trailing(node)), dtype)

    def _chosen(self, node: Node, x: int) -> int:
        """A maximum or minimum whose gradient goes to the first of equal values, not to all."""
        program = self.program
        args: Any = node.args
        target: Any = node.target
        dim = self._dim(args[1], node)
        size = program[x].shape[dim]
        if size > _MOST_CHOICES:
            raise Refused(f'{target} of {size} values')
        out = program.slice(self._float(x), dim, 0, 1)
        for k in range(1, size):
            each = program.slice(x, dim, k, 1)
            better = program.point(_CHOOSE[target], each, out)
            nan = program.point('ne', each, each)
            out = program.point('where', program.point('logical_or', better, nan), each, out)
        shape = program[out].shape
        keeps = len(args) > 2 and args[2]
        return out if keeps else program.view(out, (*shape[:dim], *shape[dim + 1 :]))


_CHOOSE = {aten.max.dim: 'gt', aten.min.dim: 'lt'}
# More comparisons than that are no longer a small kernel.
_MOST_CHOICES = 16
_MAPS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[len('torch.') :]


def _place(node: Node) -> str:
    """The line of the user's code that called it, if it is known."""
    lines = [line.strip() for line in (node.meta.get('stack_trace') or '').splitlines()]
    places = [k for k, line in enumerate(lines) if line.startswith('File "')]
    if not places:
        return ''
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ''
    return f' ({lines[places[-1]]}: {code})'
