"""Divides a traced message into what runs on nodes before, in the kernel, and on nodes after."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._capture import Captured
from ._fold import folded_message, folded_score, has_maps
from ._ir import (
    DST,
    EDGE,
    PARAM,
    POINTWISE,
    SRC,
    Program,
    Refused,
    Value,
    is_float,
    promoted,
)

# The most features of an edge that kernels map edge by edge, and the most products of such maps on
# CUDA: of more, BLAS makes a tensor before.
_MOST_EDGE_INPUTS, _MOST_PRODUCTS = 128, 2048
# A longer sum keeps its order.
_MOST_TERMS = 64
_ROLE = {PARAM: 'param', SRC: 'src', DST: 'dst'}


class Output(NamedTuple):
    """A value summed (or otherwise reduced) over the edges of each destination. That of a variance
    is the square of the message; the output before it is the mean of the message."""

    at: int
    reduce: str
    dtype: str


class Input(NamedTuple):
    """An input of the kernel: a value of the prologue."""

    role: str
    at: int  # in the program of the prologue
    shape: tuple[int, ...]
    dtype: str


class Tail(NamedTuple):
    """A linear map of the last aggregated value, by values of the prologue. If there is another
    aggregated value, it is added."""

    weight: int
    bias: int | None
    shape: tuple[int, ...]
    heads: int = 1  # that the weight maps apart


class Plan(NamedTuple):
    """How a message runs.

    :obj:`before` computes the :obj:`inputs` of the kernel, on rows of nodes and on parameters.
    :obj:`kernel` is the program of one edge, whose loads count the inputs. :obj:`softmaxes` are
    operations in it, of a score and what other passes sum of all scores of a destination. With
    :obj:`in_blocks` the kernel is one of torch's operators, over blocks of edges.
    """

    before: Program
    inputs: tuple[Input, ...]
    kernel: Program
    reduces: tuple[str, ...]
    acc: str  # dtype of the arithmetic
    outputs: tuple[Output, ...]
    tail: Tail | None
    dtype: str
    num_dropouts: int
    softmaxes: tuple[int, ...] = ()
    in_blocks: bool = False

    def __repr__(self) -> str:
        return describe(self)


def plan(captured: Captured, reduces: Sequence[str]) -> Plan:
    """Makes the plan of a message.

    Raises:
        Refused: If no kernel can compute it.
    """
    program, summed, tail, value = _prepared(captured, reduces)
    acc = _check_dtypes(program, summed, captured.autocast)
    in_blocks = _has_computed_maps(program, summed)
    heavy = _heavy(program, summed)
    if not in_blocks:
        heavy |= _wide_maps(program, summed, _MOST_PRODUCTS if captured.on_cuda else math.inf)
    kernel = Program()
    inputs: list[Input] = []
    places: dict[int, int] = {}
    softmaxes: list[int] = []

    def mapped(at: int) -> int:
        if at in places:
            return places[at]
        value, level = program[at], program.level(at)
        if value.op == 'const' and level == PARAM:
            out = kernel.add(*value, PARAM)
        elif level == PARAM and value.op in ('view', 'permute', 'expand'):
            args = [mapped(value.args[0])]
            out = kernel.add(value.op, args, value.attrs, value.shape, value.dtype)
        elif level == PARAM or value.op == 'load' or at in heavy:
            role = _ROLE.get(level, 'edge')
            out = kernel.load(role, len(inputs), value.shape, value.dtype)
            inputs.append(Input(role, at, value.shape, value.dtype))
        elif value.op == 'mm' and not in_blocks:
            out = _lowered(kernel, mapped(value.args[0]), mapped(value.args[1]), value.shape)
        elif value.op == 'cast' and not in_blocks:
            out = mapped(value.args[0])
            if program[value.args[0]].dtype == 'bool':
                one, zero = (kernel.const(n, len(value.shape), value.dtype) for n in (1, 0))
                out = kernel.point('where', out, one, zero, dtype=value.dtype)
        elif value.op == 'softmax':
            score = mapped(value.args[0])
            if any(kernel[each].op == 'softmax' for each in kernel.reachable([score])):
                raise Refused('a softmax of another softmax')
            loads = [
                kernel.of_dst(role, len(softmaxes), value.shape) for role in ('most', 'scale')
            ]
            out = kernel.add('softmax', [score, *loads], (), value.shape, value.dtype, EDGE)
            softmaxes.append(out)
        else:
            args = [mapped(arg) for arg in value.args]
            out = kernel.add(value.op, args, value.attrs, value.shape, value.dtype)
        places[at] = out
        return out

    bodies = [mapped(at) for at in summed]
    # The mean is not rounded that the gradient of a variance reads.
    wide = promoted([value.dtype, 'float32'])
    outputs = []
    for body, reduce in itertools.product(bodies, sums_of(reduces)):
        if reduce == 'var':
            outputs.append(Output(kernel.point('mul', body, body, dtype=wide), 'var', wide))
        else:
            exact = reduce == 'mean' and 'var' in reduces
            exact |= tail is not None
            outputs.append(Output(body, reduce, wide if exact else value.dtype))
    return Plan(
        program, tuple(inputs), kernel, tuple(reduces), acc, tuple(outputs), tail, value.dtype,
        captured.num_dropouts, tuple(softmaxes), in_blocks,
    )  # fmt: skip


def _prepared(
    captured: Captured, reduces: Sequence[str]
) -> tuple[Program, list[int], Tail | None, Value]:
    """The program as kernels compute it, what they aggregate, and the map after that; and the
    message."""
    linear = set(reduces) <= {'sum', 'mean'} and len(reduces) == 1
    for fold in (True, False) if linear else (False,):
        program, output = _with_maps_pushed(captured.program, captured.output, fold)
        value = program[output]
        if not is_float(value.dtype):
            raise Refused(f'a message of {value.dtype}')
        if program.level(output) == PARAM:
            raise Refused('the message does not depend on an edge')
        summed: list[int] = [output]
        tail = None
        if linear:
            summed[0], tail = _sunk(program, output)
        folded = folded_message(program, output) if fold and tail is None else None
        if folded is not None:
            summed = [folded.first, folded.second]
            tail = Tail(folded.weight, None, value.shape, folded.heads)
        if not (fold and has_maps(program, summed)):  # Features to be mapped are mapped once.
            break
    return program, summed, tail, value


_WIDTHS = {'bfloat16': 1, 'float16': 1, 'float32': 2, 'float64': 3}


def _check_dtypes(p: Program, outputs: list[int], autocast: bool) -> str:
    """The dtype of the arithmetic, which is the widest of all values. A conversion of the user to a
    narrower dtype than that of any input rounds or overflows on purpose: it is refused."""
    reachable = [at for at in p.reachable(outputs) if p[at].op != 'const']
    for at in reachable:
        if p[at].op == 'load' and p[at].dtype not in (*_WIDTHS, 'int32', 'int64', 'bool'):
            raise Refused(f'an input of {p[at].dtype}')
    least = min(
        (_WIDTHS[p[at].dtype] for at in reachable if p[at].op == 'load' and is_float(p[at].dtype)),
        default=1,
    )
    for at in reachable:
        if p[at].op == 'cast' and not autocast and is_float(p[at].dtype):
            before = _WIDTHS.get(p[p[at].args[0]].dtype, 0)
            if _WIDTHS[p[at].dtype] < min(before, least):
                raise Refused(f'a conversion to {p[at].dtype}')
    wide = any(p[at].dtype == 'float64' and (p.level(at) or p[at].op != 'load') for at in reachable)
    return 'float64' if wide else 'float32'


def sums_of(reduces: Iterable[str]) -> list[str]:
    """What the kernel reduces for these aggregations: a variance last, after its mean."""
    found = list(dict.fromkeys(reduces))
    if 'var' not in found:
        return found
    return [*(reduce for reduce in found if reduce not in ('mean', 'var')), 'mean', 'var']


def _with_maps_pushed(old: Program, output: int, fold: bool) -> tuple[Program, int]:
    """The program with each linear map applied to the ends of the edge where that is the same.
    With `fold`, scores do not map features of edges."""
    new = Program()
    places: dict[int, int] = {}

    def mapped(at: int) -> int:
        if at not in places:
            value = old[at]
            args = [mapped(arg) for arg in value.args]
            if value.op == 'mm':
                places[at] = _pushed(new, args[0], args[1])
            elif value.op in ('add', 'sub'):
                places[at] = _combined(new, new.point(value.op, *args, dtype=value.dtype))
            elif value.op in POINTWISE:
                places[at] = new.point(value.op, *args, dtype=value.dtype)
            elif value.op == 'view':
                places[at] = new.view(args[0], value.shape)
            else:
                score = None
                if fold and value.op == 'sum':
                    score = folded_score(new, args[0], value.attrs)
                places[at] = score if score is not None else new.add(
                    value.op, args, value.attrs, value.shape, value.dtype, old.level(at)
                )
        return places[at]

    return new, mapped(output)


def _combined(p: Program, at: int) -> int:
    """A sum with linear maps of nodes, its terms in another order: those of each end first, so
    that they are added once per node; a bias goes to one of them."""
    terms: list[tuple[int, bool]] = []
    shape, dtype = p[at].shape, p[at].dtype
    stack = [(at, False)]
    while stack:
        each, minus = stack.pop()
        value = p[each]
        if value.op in ('add', 'sub') and value.shape == shape:
            stack += [(value.args[1], minus != (value.op == 'sub')), (value.args[0], minus)]
        else:
            terms.append((each, minus))
        if len(terms) > _MOST_TERMS:
            return at
    count = len(terms)
    terms = _joined_maps(p, terms)
    mapped = [each for each, _ in terms if p[each].op == 'mm' and p.level(each) in (SRC, DST)]
    if len(terms) == count and (count < 3 or not mapped):
        return at
    if not mapped:
        out, negative = _summed(p, terms, dtype)
        out = p.point('neg', out, dtype=dtype) if negative else out
        return p.expand(out, shape)
    end = DST if any(p.level(each) == DST for each in mapped) else SRC
    groups: dict[int, list[tuple[int, bool]]] = {end: []}
    for each, minus in terms:
        level = p.level(each)
        groups.setdefault(end if level == PARAM else level, []).append((each, minus))
    out, negative = _summed(p, groups.pop(end), dtype)
    for group in groups.values():
        part, minus = _summed(p, group, dtype)
        if negative and not minus:
            out, negative = p.point('sub', part, out, dtype=dtype), False
        else:
            out = p.point('sub' if minus != negative else 'add', out, part, dtype=dtype)
    out = p.point('neg', out, dtype=dtype) if negative else out
    return p.expand(out, shape)


def _joined_maps(p: Program, terms: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """The terms of a sum; linear maps of the same values of an edge become one map by the sum of
    their weights."""
    maps: dict[tuple[int, str, str], list[tuple[int, bool]]] = {}
    for each, minus in terms:
        op, args, attrs, _, dtype = p[each]
        if op == 'mm' and not attrs and p.level(each) == EDGE:
            maps.setdefault((args[0], dtype, p[args[1]].dtype), []).append((each, minus))
    out = list(terms)
    for (x, _, _), several in maps.items():
        if len(several) > 1:
            weights = [(p[each].args[1], minus) for each, minus in several]
            weight, negative = _summed(p, weights, p[weights[0][0]].dtype)
            out = [term for term in out if term not in several]
            out.append((p.mm(x, weight), negative))
    return out


def _summed(p: Program, terms: list[tuple[int, bool]], dtype: str) -> tuple[int, bool]:
    """A sum of signed terms, and whether its sign is to be changed."""
    terms = sorted(terms, key=lambda term: term[1])  # A positive one first.
    out, negative = terms[0]
    for each, minus in terms[1:]:
        out = p.point('add' if minus == negative else 'sub', out, each, dtype=dtype)
    return out, negative


def _pushed(p: Program, x: int, weight: int) -> int:
    """`mm(x, weight)` as a sum of maps of parts that depend on one end each."""
    value, level = p[x], p.level(x)
    if level in (PARAM, SRC, DST):
        return p.mm(x, weight)
    args = value.args
    if value.op == 'cat' and value.attrs[0] == len(value.shape) - 1:
        start, out = 0, None
        for arg in args:
            size = p[arg].shape[-1]
            part = _pushed(p, arg, p.slice(weight, 0, start, size))
            out = part if out is None else p.point('add', out, part)
            start += size
        return out  # type: ignore[return-value]
    if value.op in ('add', 'sub'):
        parts = [_pushed(p, p.expand(arg, value.shape), weight) for arg in args]
        return p.point(value.op, *parts)
    if value.op == 'neg':
        return p.point('neg', _pushed(p, args[0], weight))
    if value.op == 'cast' and p[args[0]].op in ('cat', 'add', 'sub', 'neg'):
        # Convert the parts instead of the whole.
        inner = p[args[0]]
        parts = [p.cast(arg, value.dtype) for arg in inner.args]
        whole = p.add(inner.op, parts, inner.attrs, inner.shape, value.dtype)
        return _pushed(p, whole, weight)
    if (
        value.op in ('mul', 'div')
        and p[args[1]].op == 'const'
        and p[args[1]].shape[-1:] in ((), (1,))
    ):
        return p.point(value.op, _pushed(p, args[0], weight), args[1])
    if value.op in ('view', 'slice') and _same_last(p, x):
        # A part of the nodes' values: take the part first.
        return _pushed_part(p, x, weight)
    return _inside(p, x, weight)


def _same_last(p: Program, x: int) -> bool:
    value = p[x]
    inner = p[value.args[0]]
    if not value.shape or not inner.shape or value.shape[-1] != inner.shape[-1]:
        return False
    return value.op == 'view' or value.attrs[0] != len(inner.shape) - 1


def _pushed_part(p: Program, x: int, weight: int) -> int:
    """A view or slice of other dimensions than the last, of a sum or cat: exchanged with it."""
    value = p[x]
    inner = p[value.args[0]]

    def part(arg: int) -> int:
        shape = p[arg].shape
        if value.op == 'slice':
            dim, start, size, step = value.attrs
            if shape[dim] == 1 and inner.shape[dim] != 1:
                return arg
            return p.slice(arg, dim, start, size, step)
        lead = value.shape[:-1]
        return p.view(p.expand(arg, (*inner.shape[:-1], shape[-1])), (*lead, shape[-1]))

    if inner.op == 'cat' and inner.attrs[0] == len(inner.shape) - 1:
        return _pushed(p, p.cat([part(arg) for arg in inner.args], len(value.shape) - 1), weight)
    if inner.op in ('add', 'sub', 'neg'):
        full = [p.expand(arg, inner.shape) for arg in inner.args]
        return _pushed(p, p.point(inner.op, *(part(arg) for arg in full)), weight)
    if inner.op in ('slice', 'view') and _same_last(p, value.args[0]):
        below = p[inner.args[0]]
        if below.op == 'cat' and below.attrs[0] == len(below.shape) - 1:
            # slice(slice(cat)): move the inner one below the cat first.
            moved = _moved_below_cat(p, value.args[0])
            return _pushed(p, _again(p, x, moved), weight)
    return _inside(p, x, weight)


def _moved_below_cat(p: Program, x: int) -> int:
    value = p[x]
    cat = p[value.args[0]]
    parts = []
    for arg in cat.args:
        if value.op == 'slice':
            parts.append(p.slice(arg, *value.attrs))
        else:
            parts.append(p.view(arg, (*value.shape[:-1], p[arg].shape[-1])))
    return p.cat(parts, len(value.shape) - 1)


def _again(p: Program, x: int, inner: int) -> int:
    value = p[x]
    return p.slice(inner, *value.attrs) if value.op == 'slice' else p.view(inner, value.shape)


def _inside(p: Program, x: int, weight: int) -> int:
    """A linear map of values of the edge: by the kernel, or over blocks of edges."""
    inner = x
    while p[inner].op in ('cast', 'view', 'slice'):
        inner = p[inner].args[0]
    if p[inner].op != 'load':
        shape = *p[x].shape[:-1], p[weight].shape[-1]
        return p.add('mm', (x, weight), ('computed',), shape, p[x].dtype)
    return p.mm(x, weight)


def _sunk(p: Program, output: int) -> tuple[int, Tail | None]:
    """The input of a last linear map, and the map."""
    at, bias = output, None
    while p[at].op == 'cast':
        at = p[at].args[0]
    if p[at].op == 'add':
        a, b = p[at].args
        if p[a].op == 'mm' and p.level(b) == PARAM:
            at, bias = a, b
        elif p[b].op == 'mm' and p.level(a) == PARAM:
            at, bias = b, a
    if p[at].op != 'mm' or p.level(at) in (SRC, DST) or len(p[at].shape) != 1:
        return output, None
    x, weight = p[at].args
    return x, Tail(weight, bias, p[output].shape)


def _heavy(p: Program, outputs: list[int]) -> set[int]:
    """Values of one end that are worth a tensor of their own: they use a parameter or a sum over
    a dimension."""
    heavy: set[int] = set()
    for at in p.reachable(outputs):
        value, level = p[at], p.level(at)
        if level not in (SRC, DST):
            continue
        own = value.op in ('mm', 'sum', 'amax', 'amin')
        for arg in value.args:
            own |= arg in heavy or (p.level(arg) == PARAM and p[arg].op != 'const')
        if own:
            heavy.add(at)
    return heavy


def _wide_maps(p: Program, outputs: list[int], most_products: float) -> set[int]:
    """Linear maps of features of an edge that are many, and their sums with a bias."""
    order = p.reachable(outputs)
    maps = [at for at in order if p[at].op == 'mm' and not p[at].attrs and p.level(at) == EDGE]
    products = sum(math.prod(p[p[at].args[0]].shape) * p[at].shape[-1] for at in maps)
    most = _MOST_EDGE_INPUTS if products <= most_products else 0
    wide = {at for at in maps if p[p[at].args[0]].shape[-1] > most}
    for at in order:
        if p[at].op == 'add' and any(
            one in wide and p[one].shape == p[at].shape
            and p.level(bias) == PARAM and p[bias].op != 'const'
            for one, bias in (p[at].args, p[at].args[::-1])
        ):
            wide.add(at)
    return wide


def _has_computed_maps(p: Program, outputs: list[int]) -> bool:
    """Whether values of an edge are mapped that no kernel maps."""
    return any(
        p[at].op == 'mm' and p[at].attrs and p.level(at) not in (SRC, DST)
        for at in p.reachable(outputs)
    )


def _lowered(p: Program, x: int, weight: int, shape: tuple[int, ...]) -> int:
    """A linear map as products and a sum."""
    lead, size = p[x].shape[:-1], p[x].shape[-1]
    a = p.view(x, (*lead, size, 1))
    w = p.view(weight, (*(1,) * len(lead), *p[weight].shape))
    dim = len(lead)
    return p.view(p.reduce('sum', p.point('mul', a, w), (dim,)), shape)


class WeightedSum(NamedTuple):
    """A sum or mean of the rows of sources, times a number of each edge: inputs of the kernel."""

    x: int
    weight: int | None
    mean: bool


def weighted_sum(p: Plan) -> WeightedSum | None:
    """The product of a sparse matrix with features that a plan is, if it is one."""
    output = p.outputs[0]
    if len(p.outputs) > 1 or output.reduce not in ('sum', 'mean'):
        return None
    value = p.kernel[output.at]
    found: dict[str, int] = {}
    for at in value.args if value.op == 'mul' else (output.at,):
        shape = p.kernel[at].shape
        while p.kernel[at].op == 'view' and math.prod(shape) == 1:
            (at,) = p.kernel[at].args
        op, _, attrs, shape, dtype = p.kernel[at]
        if op != 'load' or dtype != value.dtype or attrs[0] in found:
            return None
        if shape != value.shape if attrs[0] == 'src' else math.prod(shape) != 1:
            return None
        found[attrs[0]] = attrs[1]
    if found.keys() - {'edge'} != {'src'} or value.dtype not in _WIDTHS:
        return None
    return WeightedSum(found['src'], found.get('edge'), output.reduce == 'mean')


def describe(p: Plan) -> str:
    """What the plan made of a message, as text."""
    lines = []
    for k, each in enumerate(p.inputs):
        if each.role != 'param' and p.before[each.at].op != 'load':
            end = {'src': 'source node', 'dst': 'destination node'}.get(each.role, each.role)
            lines.append(f'hoisted: input {k}, computed once per {end}, {list(each.shape)}')
    fused = [
        p.kernel[at].op for at in p.kernel.reachable([o.at for o in p.outputs])
        if p.kernel[at].op not in ('load', 'const', 'view', 'expand')
    ]  # fmt: skip
    gathered = ', '.join(f'{each.role} {list(each.shape)}' for each in p.inputs)
    lines.append(f'fused: {" ".join(fused) or "nothing"}; reads {gathered}')
    lines.append('reduced: ' + ', '.join(output.reduce for output in p.outputs))
    if p.in_blocks:
        lines.append('run: over blocks of edges, again in the backward pass')
    elif weighted_sum(p) is not None:
        lines.append('run: as the product of a sparse matrix, as by spmm')
    if p.tail is not None and len(p.outputs) > 1:
        lines.append('folded: the map of edge features, into values of nodes and after the sum')
    elif p.tail is not None:
        lines.append(f'sunk: a linear map to {list(p.tail.shape)} after the aggregation')
    return '\n'.join(lines)
