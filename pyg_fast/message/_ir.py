"""The program of a message: a list of operations on the values of one edge."""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..ops.head_map import head_map

# Bit flags: a value varies with source, destination or edge; combinations vary per edge.
PARAM, SRC, DST, EDGE = 0, 1, 2, 4
NODES = ('src', 'dst')  # roles of inputs of nodes
ROWS = (SRC, DST, EDGE)  # flags of values with one row per node or edge
# `row` is an input of destinations that an `aggregate` takes.
ROLES = {'param': PARAM, 'src': SRC, 'dst': DST, 'row': DST, 'edge': EDGE}

Load: TypeAlias = tuple[str, int]  # the role and number of an input of a pass
Inputs: TypeAlias = dict[Load, Tensor]


class Refused(Exception):
    """A refusal: no kernel computes the message, on whatever graph. The text is the reason."""


class Value(NamedTuple):
    """The result of one operation.

    :obj:`args` are positions of earlier values. :obj:`shape` leaves the dimension of edges (or
    nodes) out. The arguments of a pointwise operation have as many dimensions as its result, and
    broadcast.
    """

    op: str
    args: tuple[int, ...]
    attrs: tuple
    shape: tuple[int, ...]
    dtype: str


UNARY: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in (
        'neg', 'abs', 'exp', 'exp2', 'expm1', 'log', 'log2', 'log10', 'log1p', 'sqrt', 'rsqrt',
        'reciprocal', 'sin', 'cos', 'tanh', 'sigmoid', 'erf', 'sign', 'floor', 'ceil', 'relu',
        'logical_not', 'asin', 'acos', 'atan',
    )
}  # fmt: skip
BINARY: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in (
        'add', 'sub', 'mul', 'div', 'pow', 'maximum', 'minimum', 'lt', 'le', 'gt', 'ge', 'eq',
        'ne', 'logical_and', 'logical_or', 'atan2',
    )
}  # fmt: skip
POINTWISE: dict[str, Callable[..., Tensor]] = {**UNARY, **BINARY, 'where': torch.where}
BOOLEAN = {'lt', 'le', 'gt', 'ge', 'eq', 'ne', 'logical_and', 'logical_or', 'logical_not'}
_NEUTRAL = {'add': 0, 'sub': 0, 'mul': 1, 'div': 1, 'pow': 1}
# Their derivatives are not finite everywhere: a hoisted one must not see nodes without edges, whose
# zero gradient would become NaN.
RISKY = {
    'log', 'log2', 'log10', 'log1p', 'sqrt', 'rsqrt', 'reciprocal', 'pow', 'div', 'asin', 'acos',
    'atan2',
}  # fmt: skip
# Roles of loads with one row per destination that other passes compute. Of each softmax: the
# largest score, the reciprocal of the sum of exponentials, and the sum of values times gradients.
# Beside these: gradients of results, the edges that maxima chose, the first message of a variance.
SOFTMAX_ROLES = ('most', 'scale', 'dot')
DST_ROLES = {'grad', 'arg', 'first', *SOFTMAX_ROLES}
# Pointwise functions of torch that take Python numbers.
WITH_NUMBERS = {
    'add', 'sub', 'mul', 'div', 'pow', 'lt', 'le', 'gt', 'ge', 'eq', 'ne', 'where',
}  # fmt: skip
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    'sum': torch.sum, 'amax': torch.amax, 'amin': torch.amin,
}  # fmt: skip


def is_float(dtype: str) -> bool:
    """Whether a value of this dtype can take a gradient."""
    return dtype.startswith(('float', 'bfloat'))


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a pointwise result."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise Refused(str(error)) from None


class Program:
    """Operations in the order of their evaluation; equal ones are stored once.

    Args:
        by_parts: Whether slices of joined values are the parts: then other parts get no gradient,
            where torch gives them zeros.
    """

    def __init__(self, by_parts: bool = False) -> None:
        self.by_parts = by_parts
        self.values: list[Value] = []
        self._positions: dict[Value, int] = {}
        self._dependences: list[int] = []

    def add(
        self, op: str, args: Sequence[int] = (), attrs: tuple = (), shape: tuple[int, ...] = (),
        dtype: str = 'float32', dependence: int | None = None,
    ) -> int:  # fmt: skip
        """Appends an operation, and returns its position."""
        value = Value(op, tuple(args), attrs, tuple(shape), dtype)
        at = self._positions.get(value)
        if at is None:
            at = self._positions[value] = len(self.values)
            self.values.append(value)
            if dependence is None:
                dependence = 0
                for arg in args:
                    dependence |= self._dependences[arg]
            self._dependences.append(dependence)
        return at

    def dependence(self, at: int) -> int:
        """The bit flags of what a value varies with."""
        return self._dependences[at]

    def __getitem__(self, at: int) -> Value:
        return self.values[at]

    # Constructors, with the shapes of their results.

    def load(self, role: str, slot: int | str, shape: tuple[int, ...], dtype: str) -> int:
        """An input: `src` and `dst` by the ends of the edge."""
        return self.add('load', (), (role, slot), shape, dtype, ROLES[role])

    def gather(
        self, role: str, of: str, name: int | str, shape: tuple[int, ...], dtype: str
    ) -> int:
        """A row, of one end of the edge, of an input `of` another role: of a parameter, or of an
        input of all nodes."""
        return self.add('load', (), (role, name, of), shape, dtype, ROLES[role])

    def const(self, number: float | bool, rank: int, dtype: str) -> int:
        """A number."""
        text = float(number).hex() if math.isfinite(number) else str(float(number))
        return self.add('const', (), (text,), (1,) * rank, dtype)

    def keep(self, number: int, p: float, shape: tuple[int, ...], dtype: str) -> int:
        """The factors of a dropout: 0 with probability `p`, else `1 / (1 - p)`."""
        return self.add('keep', (), (number, float(p).hex()), shape, dtype, EDGE)

    def load_statistic(self, role: str, number: int, shape: tuple[int, ...]) -> int:
        """A value of each destination that another pass computes."""
        return self.add('load', (), (role, number), shape, 'float32', DST)

    def pointwise(self, op: str, *args: int, dtype: str | None = None) -> int:
        """A pointwise operation."""
        shape = broadcast(*(self[arg].shape for arg in args))
        if dtype is None:
            both = (self[arg].dtype for arg in args[-2:])
            dtype = 'bool' if op in BOOLEAN else promote_dtypes(both)
        if op in _NEUTRAL and len(args) == 2:
            for x, other in (args, args[::-1]) if op in ('add', 'mul') else (args,):
                value = self[other]
                if value.op == 'expand':
                    value = self[value.args[0]]
                if value.op == 'const' and self[x].shape == shape and number(value) == _NEUTRAL[op]:
                    return self.cast(x, dtype)
        if op == 'add' and self[args[0]].op == 'neg' and self[args[0]].dtype == dtype:
            return self.pointwise('sub', args[1], self[args[0]].args[0], dtype=dtype)
        if op == 'add':
            joined = self._add_joined(args[0], args[1], dtype)
            if joined is not None:
                return joined
            for first, again in (args, args[::-1]):
                pair = self[first].args
                if self[first].op == 'add' and again in pair:
                    twice = self._double(again, dtype)
                    if twice is not None:
                        other = pair[0] if pair[1] == again else pair[1]
                        return self.pointwise('add', other, twice, dtype=dtype)
        inner = [self[arg].args[0] if self[arg].op == 'expand' else arg for arg in args]
        if broadcast(*(self[arg].shape for arg in inner)) != shape:  # Compute it before repeats.
            return self.expand(self.pointwise(op, *inner, dtype=dtype), shape)
        if op == 'where' and self[args[0]].op == 'const':
            chosen = args[1] if number(self[args[0]]) else args[2]
            return self.expand(self.cast(chosen, dtype), shape)
        if all(self[arg].op == 'const' for arg in args):
            return self._fold_constants(op, args, shape, dtype)
        return self.add(op, args, (), shape, dtype)

    def _add_joined(self, one: int, other: int, dtype: str) -> int | None:
        """The sum of two joins of which one has zeros where the other has none, as gradients of
        slices are: the join of the sums of their parts. None for other values."""
        a, b = self[one], self[other]
        if not (a.op == b.op == 'cat' and a.attrs == b.attrs and a.shape == b.shape):
            return None
        dim, parts = a.attrs[0], []
        ones, others = list(a.args), list(b.args)
        while ones:
            x, y = ones.pop(0), others.pop(0)
            size = min(self[x].shape[dim], self[y].shape[dim])
            for rest, each in ((ones, x), (others, y)):
                if self[each].shape[dim] > size:
                    if not self._is_zero(each):
                        return None
                    rest.insert(0, self._resized(each, dim, self[each].shape[dim] - size))
            if self._is_zero(x) and self._is_zero(y):
                parts.append(self._resized(x, dim, size))
            elif self._is_zero(x) or self._is_zero(y):
                parts.append(self.cast(y if self._is_zero(x) else x, dtype))
            else:
                parts.append(self.pointwise('add', x, y, dtype=dtype))
        return self.cat(parts, dim)

    def _is_zero(self, at: int) -> bool:
        return self[at].op == 'const' and number(self[at]) == 0

    def _resized(self, const: int, dim: int, size: int) -> int:
        _, _, attrs, shape, dtype = self[const]
        return self.add('const', (), attrs, (*shape[:dim], size, *shape[dim + 1 :]), dtype)

    def _double(self, at: int, dtype: str) -> int | None:
        """Twice a product with a smaller value, as autograd adds up gradients of a square: that
        value is doubled."""
        value = self[at]
        if value.op != 'mul' or value.dtype != dtype or not is_float(dtype):
            return None
        rank = len(value.shape)
        for small, wide in (value.args, value.args[::-1]):
            if self[small].op == 'expand':
                (small,) = self[small].args
            shape = self[small].shape
            if len(shape) == rank and shape != value.shape == self[wide].shape:
                two = self.const(2.0, rank, self[small].dtype)
                return self.pointwise('mul', self.pointwise('mul', small, two), wide, dtype=dtype)
        return None

    def _fold_constants(
        self, op: str, args: Sequence[int], shape: tuple[int, ...], dtype: str
    ) -> int:
        """The constant that an operation on constants gives."""

        # Derivatives are float32 here, and run in float64, too: no number is rounded.
        def exact(dtype: str) -> torch.dtype:
            return getattr(torch, 'float64' if dtype == 'float32' else dtype)

        numbers = [torch.tensor(number(self[arg]), dtype=exact(self[arg].dtype)) for arg in args]
        out = POINTWISE[op](*numbers).to(exact(dtype)).item()
        return self.add('const', (), self[self.const(out, 0, dtype)].attrs, shape, dtype)

    def view(self, x: int, shape: tuple[int, ...]) -> int:
        """Another shape of the same numbers."""
        value = self[x]
        if value.shape == shape:
            return x
        if math.prod(value.shape) != math.prod(shape):
            raise Refused(f'a view of shape {value.shape} as {shape}')
        if value.op == 'view':
            return self.view(value.args[0], shape)
        if value.op == 'const':
            return self.add('const', (), value.attrs, shape, value.dtype)
        return self.add('view', (x,), (), shape, value.dtype)

    def expand(self, x: int, shape: tuple[int, ...]) -> int:
        """Repeats dimensions of size 1."""
        value = self[x]
        if value.shape == shape:
            return x
        return self.add('expand', (x,), (), shape, value.dtype)

    def permute(self, x: int, order: tuple[int, ...]) -> int:
        """Exchanges dimensions."""
        value = self[x]
        if order == tuple(range(len(order))):
            return x
        return self.add('permute', (x,), order, tuple(value.shape[k] for k in order), value.dtype)

    def slice(self, x: int, dim: int, start: int, size: int, step: int = 1) -> int:
        """A part of one dimension."""
        value = self[x]
        if (start, size, step) == (0, value.shape[dim], 1):
            return x
        if self.by_parts and step == 1:
            part = self._slice_of_parts(x, dim, start, size)
            if part is not None:
                return part
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        return self.add('slice', (x,), (dim, start, size, step), shape, value.dtype)

    def _slice_of_parts(self, x: int, dim: int, start: int, size: int) -> int | None:
        """The part of joined values that a slice takes, if it is of one of them; also where they
        are operands."""
        value = self[x]
        if value.op == 'cat' and value.attrs == (dim,):
            for part in value.args:
                own = self[part].shape[dim]
                if start >= 0 and start + size <= own:
                    return self.cast(self.slice(part, dim, start, size), value.dtype)
                start -= own
        elif value.op in POINTWISE:
            args: list[int | None] = []
            for arg in value.args:
                shape = self[arg].shape
                same = len(shape) == len(value.shape) and shape[dim] == 1
                args.append(arg if same else self._slice_of_parts(arg, dim, start, size))
            if None not in args:
                return self.pointwise(value.op, *cast(list[int], args), dtype=value.dtype)
        return None

    def cat(self, xs: Sequence[int], dim: int) -> int:
        """Joins values along a dimension."""
        if len(xs) == 1:
            return xs[0]
        shapes = [self[x].shape for x in xs]
        size = sum(shape[dim] for shape in shapes)
        shape = (*shapes[0][:dim], size, *shapes[0][dim + 1 :])
        return self.add('cat', xs, (dim,), shape, promote_dtypes(self[x].dtype for x in xs))

    def reduce(self, op: str, x: int, dims: Iterable[int]) -> int:
        """`sum`, `amax` or `amin` over dimensions, which stay with size 1."""
        value, dims = self[x], tuple(sorted(dims))
        if not dims:
            return x
        shape = tuple(1 if k in dims else n for k, n in enumerate(value.shape))
        if op == 'sum' and value.op == 'neg':
            return self.pointwise('neg', self.reduce(op, value.args[0], dims))
        if (
            op == 'sum'
            and value.op == 'cat'
            and value.attrs == dims
            and value.shape == (*shape[: dims[0]], len(value.args), *shape[dims[0] + 1 :])
        ):  # A sum of values that were stacked.
            return reduce(partial(self.pointwise, 'add', dtype=value.dtype), value.args)
        return self.add(op, (x,), dims, shape, value.dtype)

    def lookup(self, table: int, index: int, wraps: bool) -> int:
        """The rows of a parameter by integers of the edge; where it wraps, negative ones count from
        the end."""
        value = self[table]
        shape = (*self[index].shape, *value.shape[1:])
        return self.add('lookup', (table, index), (wraps,), shape, value.dtype)

    def products(self, at: int) -> int:
        """How many numbers a linear map multiplies for a row."""
        return math.prod(self[self[at].args[0]].shape) * self[at].shape[-1]

    def mm(self, x: int, weight: int) -> int:
        """A linear map of the last dimension by a parameter of shape (in, out)."""
        a, w = self[x], self[weight]
        dtype = promote_dtypes((a.dtype, w.dtype))
        return self.add('mm', (x, weight), (), (*a.shape[:-1], w.shape[-1]), dtype)

    def head_map(self, x: int, weight: int, heads: int) -> int:
        """The features (H * C) of heads, each mapped to (D) by its columns of a parameter
        (D, H * C), transposed."""
        a, w = self[x], self[weight]
        dtype = promote_dtypes((a.dtype, w.dtype))
        return self.add('head_map', (x, weight), (heads,), (heads * w.shape[0],), dtype)

    def cast(self, x: int, dtype: str) -> int:
        """Conversion to another dtype. Kernels compute in float32 or float64 all the same."""
        value = self[x]
        return x if value.dtype == dtype else self.add('cast', (x,), (), value.shape, dtype)

    def detach(self, x: int) -> int:
        """The same number, through which no gradient flows."""
        value = self[x]
        if value.op in ('const', 'detach') or not is_float(value.dtype):
            return x
        return self.add('detach', (x,), (), value.shape, value.dtype)

    def graft(self, other: 'Program', at: int, places: dict[int, int], joint: bool = False) -> int:
        """Copies a value of another program into that of a pass; `places` maps copied positions.
        A `joint` pass computes the softmax, too: there its values are exponentials relative to the
        running maximum, which the pass loads as `powers`."""
        for each in other.reachable([at]):
            if each not in places:
                value = other[each]
                if value.op == 'softmax' and joint:
                    places[each] = self.add(
                        'load', (), ('powers', 0), value.shape, 'float32', EDGE
                    )  # fmt: skip
                    continue
                if value.op == 'softmax':
                    score, most, scale = (places[arg] for arg in value.args)
                    power = self.pointwise('exp', self.pointwise('sub', score, most))
                    places[each] = self.pointwise('mul', power, scale, dtype=value.dtype)
                    continue
                places[each] = self.add(
                    value.op, [places[arg] for arg in value.args], value.attrs, value.shape,
                    value.dtype, other.dependence(each),
                )  # fmt: skip
        return places[at]

    def reachable(self, outputs: Iterable[int], computed: Container[int] = ()) -> list[int]:
        """The positions that outputs need beside computed ones, in order."""
        needed, stack = set(), list(outputs)
        while stack:
            at = stack.pop()
            if at not in needed and at not in computed:
                needed.add(at)
                stack.extend(self[at].args)
        return sorted(needed)

    def text(self, outputs: Sequence[int]) -> str:
        """The canonical text of the values that outputs need: equal texts, equal programs."""
        order = self.reachable(outputs)
        number = {at: k for k, at in enumerate(order)}
        lines = []
        for at in order:
            op, args, attrs, shape, dtype = self[at]
            inner = ' '.join([*(f'%{number[arg]}' for arg in args), *map(str, attrs)])
            lines.append(f'%{number[at]} = {op}({inner}) {list(shape)} {dtype}')
        lines.append('return ' + ' '.join(f'%{number[at]}' for at in outputs))
        return '\n'.join(lines)

    def with_parts(self, outputs: Sequence[int]) -> tuple['Program', list[int]]:
        """The values by parts of joined ones, if the same inputs get gradients; else themselves."""
        order = self.reachable(outputs)
        if not {'cat', 'slice'} <= {self[at].op for at in order}:
            return self, list(outputs)
        new = Program(by_parts=True)
        places: dict[int, int] = {}
        for at in order:
            op, old_args, attrs, shape, dtype = self[at]
            args = [places[arg] for arg in old_args]
            if op == 'slice':
                places[at] = new.slice(args[0], *attrs)
            elif op in POINTWISE:
                places[at] = new.pointwise(op, *args, dtype=dtype)
            elif op == 'view':
                places[at] = new.view(args[0], shape)
            else:
                places[at] = new.add(op, args, attrs, shape, dtype, self.dependence(at))
        found = [places[at] for at in outputs]
        before, after = (
            [{program[leaf] for leaf in program.leaves(at)} for at in ats]
            for program, ats in ((self, outputs), (new, found))
        )
        if set().union(*before) != set().union(*after) or any(
            bool(a) != bool(b) for a, b in zip(before, after, strict=True)
        ):
            return self, list(outputs)
        return new, found

    def leaves(self, at: int) -> set[int]:
        """The loads through which a value is differentiable."""
        leaves: dict[int, set[int]] = {}
        for each in self.reachable([at]):
            value = self[each]
            leaves[each] = set()
            if is_float(value.dtype) and value.op != 'detach':
                # In a kernel a lookup reads its table itself.
                reads = value.op == 'load' or (value.op == 'lookup' and len(value.args) == 1)
                own = {each} if reads else set()
                leaves[each] = own.union(*(leaves[arg] for arg in value.args))
        return leaves[at]

    def operation(self, at: int) -> Callable[..., Tensor]:
        """The function of torch that computes a value from its arguments, over all rows of nodes or
        of edges, or of parameters."""
        value, inner = self[at], [self[arg] for arg in self[at].args]
        alike = all(
            each.dtype == value.dtype or each.op == 'const' or (value.op == 'where' and k == 0)
            for k, each in enumerate(inner)
        )
        if value.op in POINTWISE and (alike or value.op in BOOLEAN):
            return POINTWISE[value.op]
        if value.op == 'mm' and alike and len(value.shape) == 1 and self.dependence(at) in ROWS:
            return torch.mm
        if value.op == 'head_map' and alike:
            return partial(head_map, heads=value.attrs[0], transposed=True)
        if value.op == 'permute' and value.attrs == (1, 0) and self.dependence(at) == PARAM:
            return torch.t
        if value.op == 'view' and self.dependence(at) == PARAM:
            return lambda x: x.reshape(value.shape)
        if value.op == 'view' and self.dependence(at) in ROWS:
            return lambda x: x.reshape(x.size(0), *value.shape)
        own, shapes = getattr(torch, value.dtype), [each.shape for each in inner]
        return lambda *args: _evaluate(value, list(args), shapes, own)

    def takes_numbers(self, at: int) -> bool:
        """Whether an operation takes constants as Python numbers: they must not give it a shape."""
        value = self[at]
        shapes = [self[arg].shape for arg in value.args if self[arg].op != 'const']
        return value.op in WITH_NUMBERS and broadcast(*shapes) == value.shape

    def evaluate(
        self, outputs: Sequence[int], computed: dict[int, Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Values in torch's operators. `computed` holds those of loads and, perhaps, of others; all
        but parameters have a leading dimension of nodes or edges. With `dtype` every float is
        computed in it."""
        results: dict[int, Any] = dict(computed)
        device = next(iter(computed.values())).device
        for at in self.reachable(outputs, results):
            value = self[at]
            own = getattr(torch, value.dtype)
            if dtype is not None and is_float(value.dtype):
                own = dtype
            if value.op == 'const':
                results[at] = number(value)
                continue
            args = []
            for arg in value.args:
                got = results[arg]
                if not isinstance(got, Tensor) and not self.takes_numbers(at):
                    others = (results[each] for each in value.args)
                    fill = next((t.dtype for t in others if isinstance(t, Tensor)), own)
                    fill = fill if value.op in BOOLEAN else own
                    got = torch.full(self[arg].shape, got, dtype=fill, device=device)
                elif value.op == 'where' and _overflows(got, own):
                    # A derivative is traced in float32, in which torch refuses such a number.
                    got = torch.ones((), dtype=own, device=device) * got
                args.append(got)
            results[at] = _evaluate(value, args, [self[arg].shape for arg in value.args], own)
        return [results[at] for at in outputs]


def promote_dtypes(dtypes: Iterable[str]) -> str:
    """The dtype of a result."""
    out: torch.dtype | None = None
    for dtype in dtypes:
        each = getattr(torch, dtype)
        out = each if out is None else torch.promote_types(out, each)
    return str(out)[len('torch.') :]


def _overflows(x: object, dtype: torch.dtype) -> bool:
    """Whether a number, not a tensor, is larger than the numbers of a float dtype."""
    is_number = isinstance(x, float) and math.isfinite(x) and dtype.is_floating_point
    return is_number and abs(x) > torch.finfo(dtype).max  # type: ignore[arg-type]


def number(value: Value) -> float:
    """The number of a constant."""
    text = value.attrs[0]
    return float.fromhex(text) if 'x' in text else float(text)


def wrap_rows(index: Tensor, count: int) -> Tensor:
    """The numbers of rows, of which negative ones count from the end."""
    return torch.where(index < 0, index + count, index)


def look_up_rows(table: Tensor, index: Tensor, wraps: bool) -> Tensor:
    """The rows of a table. Its gradient has a fixed order, also on a GPU."""
    numbers = wrap_rows(index, table.size(0)) if wraps else index  # Errors name `index`.
    rows = torch.embedding(table.flatten(1) if table.dim() > 1 else table.view(-1, 1), numbers)
    return rows.view(*index.shape, *table.shape[1:])


class _Softmax(torch.autograd.Function):
    """A softmax whose largest score and sum are given. Where an edge has all the weight of its row,
    the gradient of its score is exactly zero: what rounding leaves of it would be multiplied by
    scores that may be as large as numbers are."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, most: Tensor, scale: Tensor) -> Tensor:
        out = (score - most).exp() * scale
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return torch.where(out == 1, 0.0, out) * grad, None, None


def _softmax(score: Tensor, most: Tensor, scale: Tensor) -> Tensor:
    if most.requires_grad or scale.requires_grad or not score.requires_grad:
        return (score - most).exp() * scale
    return cast(Tensor, _Softmax.apply(score, most, scale))


def _evaluate(
    value: Value, args: list[Tensor], inner: list[tuple[int, ...]], own: torch.dtype
) -> Tensor:
    op, _, attrs, shape, _ = value
    if op in POINTWISE:
        if op not in BOOLEAN:
            args = [
                a.to(own) if isinstance(a, Tensor) and a.dtype != torch.bool else a for a in args
            ]
        return POINTWISE[op](*args)
    x = args[0]
    lead = tuple(x.shape[: x.dim() - len(inner[0])])
    if op == 'view':
        return x.reshape((*lead, *shape))
    if op == 'expand':
        return x.expand((*lead, *shape))
    if op == 'permute':
        return x.permute(*range(len(lead)), *(k + len(lead) for k in attrs))
    if op == 'slice':
        dim, start, size, step = attrs
        place = dim + len(lead)
        part = x.narrow(place, start, (size - 1) * step + 1)
        return part if step == 1 else part[(slice(None),) * place + (slice(None, None, step),)]
    if op == 'cat':
        leads = [tuple(a.shape[: a.dim() - len(s)]) for a, s in zip(args, inner, strict=True)]
        lead = max(leads, key=len)
        full = [a.expand(*lead, *s) for a, s in zip(args, inner, strict=True)]
        return torch.cat([a.to(own) for a in full], attrs[0] + len(lead))
    if op in REDUCTIONS:
        return REDUCTIONS[op](x, [k + len(lead) for k in attrs], True)
    if op == 'mm':
        return x.to(own) @ args[1].to(own)
    if op == 'head_map':
        return head_map(x.to(own), args[1].to(own), attrs[0], transposed=True)
    if op == 'softmax':
        return _softmax(x.to(own), args[1], args[2])
    if op == 'cast':
        return x.to(own)
    if op == 'detach':
        return x.detach()
    if op == 'lookup':
        return look_up_rows(x, args[1], attrs[-1]).to(own)
    raise Refused(f'no reference for {op}')
