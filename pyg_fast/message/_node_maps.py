"""The linear maps of nodes in a prologue, as one function of autograd.

A message that maps both ends of an edge by one layer, `lin(cat([x_i, x_j]))`, maps nodes by slices
of its weight. Derived by torch, each slice costs a gradient of the size of the weight, and each map
a masked gradient of its input. Here a backward pass writes the gradient of a weight once, and adds
those of an input in place.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..ops._saved import Context, save, saved
from ..ops._transforms import is_batched, transforms_active
from ._ir import NODES, PARAM, Program

_MAX_SCHEDULES = 64  # of the maps of a plan

# Other classes may not take the operations of a backward pass.
PLAIN = (Tensor, torch.nn.Parameter)


class _Part(NamedTuple):
    """A part of a weight, by start and size in both of its dimensions; or the transpose of that."""

    weight: int
    ranges: tuple[tuple[int, int], tuple[int, int]]
    transposed: bool


# Parts or values by their numbers, each with whether it is subtracted; those to add come first.
_Signed: TypeAlias = tuple[tuple[int, bool], ...]


class _Found(NamedTuple):
    """A value that is a sum of linear maps and of biases."""

    at: int
    parts: dict[int, list[tuple[_Part, bool]]]  # that map an input
    biases: list[tuple[int, bool]]
    is_read: bool  # whether operations read it, which must not see what unread rows make of it


class _Split(NamedTuple):
    """How a weight divides into parts along a dimension, and perhaps gaps."""

    dim: int
    sizes: list[int]
    parts: list[_Part | None]

    def of(self, x: Tensor) -> Sequence[Tensor]:
        """The pieces of a tensor of the weight's shape."""
        return x.split_with_sizes(self.sizes, self.dim) if len(self.sizes) > 1 else (x,)


class _Term(NamedTuple):
    """An input, mapped by a factor, which is a piece of a weight or a sum of pieces."""

    x: int
    factor: int
    transposed: bool
    minus: bool
    pieces: _Signed


class _Map(NamedTuple):
    """A value: the sum of terms, and of biases."""

    terms: list[_Term]
    biases: _Signed
    is_read: bool


class _Schedule(NamedTuple):
    """How a call runs, by which inputs are one tensor, and which tensors need a gradient.

    Its tensors are those of inputs, `x0` and so on in texts, and then those of
    :obj:`NodeMaps.params`, `p0`. Other names are `m0` of masked inputs, `q0` of factors, `r0` of
    results, and `g0` of gradients.
    """

    num_rows: int
    needs: tuple[bool, ...]
    places: tuple[int, ...]  # of inputs
    masks: dict[tuple[int, int], int]  # numbers of masked inputs, by end of edges and place
    factors: list[int]  # those that the backward pass reads
    constant: list[int]  # results without a gradient
    forward: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    backward: dict[tuple[bool, ...], Callable[..., list[Tensor | None]]]  # by which results get one


class NodeMaps:
    """The linear maps of nodes in a prologue, all of one dtype.

    :obj:`loads` and :obj:`params` are the values that they read, of nodes and of parameters,
    weights before biases. :obj:`computed` are the results: maps, and then parts of weights that a
    kernel reads.
    """

    def __init__(self, program: Program, found: Sequence[_Found], wanted: Sequence[int]) -> None:
        self.loads = list(dict.fromkeys(load for each in found for load in each.parts))
        self.ends = [program.dependence(load) for load in self.loads]
        self.dtype: torch.dtype = getattr(torch, program[found[0].at].dtype)
        parts = [part for one in found for pairs in one.parts.values() for part, _ in pairs]
        weights = list(dict.fromkeys(part.weight for part in parts))
        copies = {
            at: part for at in wanted
            if program[at].op == 'slice' and (part := _find_part(program, at)) is not None
            and part.weight in weights
        }  # fmt: skip
        parts += copies.values()
        self.splits = [_split(at, program[at].shape, parts) for at in weights]
        # The pieces of all weights, and the number of the weight of each.
        pieces = [part for split in self.splits for part in split.parts]
        self.weight_of = [k for k, split in enumerate(self.splits) for _ in split.parts]
        self.sums: list[_Signed] = []  # factors after the pieces
        biases = list(dict.fromkeys(at for each in found for at, _ in each.biases))
        self.params = [*weights, *biases]
        self.maps = [self._map(each, pieces) for each in found]
        self.copies = [(pieces.index(part), part.transposed) for part in copies.values()]
        self.computed = [*(each.at for each in found), *copies]
        self.schedules: dict[tuple[tuple[int, ...], tuple[bool, ...]], _Schedule] = {}

    def _map(self, found: _Found, pieces: Sequence[_Part | None]) -> _Map:
        terms = []
        for load, pairs in found.parts.items():
            for transposed in (False, True):
                signed = _plus_first([
                    (pieces.index(part), minus) for part, minus in pairs
                    if part.transposed == transposed
                ])  # fmt: skip
                if not signed:
                    continue
                factor = signed[0][0]
                if len(signed) > 1:
                    self.sums.append(signed)
                    factor = len(pieces) + len(self.sums) - 1
                x = self.loads.index(load)
                terms.append(_Term(x, factor, transposed, signed[0][1], signed))
        terms.sort(key=lambda term: term.minus)
        biases = _plus_first([(self.params.index(at), minus) for at, minus in found.biases])
        return _Map(terms, biases, found.is_read)

    def __call__(
        self, values: Mapping[int, Tensor], masks: Mapping[int, Tensor]
    ) -> Sequence[Tensor]:
        """The results.

        Args:
            values: Inputs of nodes and values of parameters, by position.
            masks: By end of edges, which nodes have some; none if nothing needs a gradient.
        """
        tensors: list[Tensor] = []
        places: list[int] = []
        known: dict[int, int] = {}  # One tensor may be several inputs.
        for load in self.loads:
            x = values[load]
            place = known.get(id(x))
            if place is None:
                place = known[id(x)] = len(tensors)
                x = x if x.dim() == 2 else x.reshape(x.size(0), -1)
                tensors.append(x if x.dtype == self.dtype else x.to(self.dtype))
            places.append(place)
        tensors += [values[at] for at in self.params]
        if masks:
            schedule = self._schedule(tuple(places), tuple([x.requires_grad for x in tensors]))
            return _MapNodes.apply(self, schedule, masks, *tensors)
        schedule = self._schedule(tuple(places), (False,) * len(tensors))
        return schedule.forward(masks, *tensors)[0]

    def in_torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results from a tensor for each input, by operations that torch can derive."""
        forward = self._schedule(tuple(range(len(self.loads))), (False,) * len(tensors)).forward
        return forward({}, *tensors)[0]

    def _schedule(self, places: tuple[int, ...], needs: tuple[bool, ...]) -> _Schedule:
        found = self.schedules.get((places, needs))
        if found is None:
            if len(self.schedules) >= _MAX_SCHEDULES:
                self.schedules.clear()
            found = self.schedules[places, needs] = self._make_schedule(places, needs)
        return found

    def _make_schedule(self, places: tuple[int, ...], needs: tuple[bool, ...]) -> _Schedule:
        count = max(places) + 1
        trained = [needs[count + k] for k in self.weight_of]  # of pieces
        masks: dict[tuple[int, int], int] = {}
        factors: dict[int, None] = {}
        constant = []
        for n, (terms, biases, is_read) in enumerate(self.maps):
            is_constant = not any(needs[count + k] for k, _ in biases)
            for x, factor, _, _, pieces in terms:
                is_trained = any(trained[k] for k, _ in pieces)
                if is_trained or (is_read and True in needs):
                    masks.setdefault((self.ends[x], places[x]), len(masks))
                if needs[places[x]]:
                    factors[factor] = None
                is_constant &= not (is_trained or needs[places[x]])
            constant += [n] * is_constant
        constant += [n for n, (k, _) in enumerate(self.copies, len(self.maps)) if not trained[k]]
        of_masks = enumerate(masks, len(self.computed))
        constant += [n for n, (_, place) in of_masks if not needs[place]]
        forward = self._forward(places, masks, list(factors))
        return _Schedule(count, needs, places, masks, list(factors), constant, forward, {})

    def _forward(
        self, places: tuple[int, ...], masks: dict[tuple[int, int], int], kept: list[int]
    ) -> Callable[..., Any]:
        """The function of the results and masked inputs, and of the factors to keep."""
        text = _Text()
        xs, params = _names('x', max(places) + 1), _names('p', len(self.params))
        for (end, place), k in masks.items():
            text.add(f'm{k} = where(masks[{end}], x{place}, 0)')
        numbers = itertools.count()
        for k, split in enumerate(self.splits):
            text.split(split, f'p{k}', [f'q{next(numbers)}' for _ in split.parts])
        for k, ((first, minus), *others) in enumerate(self.sums, next(numbers)):
            rest = ''.join(f' {"+" if each == minus else "-"} q{n}' for n, each in others)
            text.add(f'q{k} = q{first}{rest}')
        for n, (terms, biases, is_read) in enumerate(self.maps):
            bias = 'None'
            if biases and not biases[0][1]:
                bias, biases = f'p{biases[0][0]}', biases[1:]
            for is_later, (x, factor, transposed, minus, _) in enumerate(terms):
                masked = masks.get((self.ends[x], places[x])) if is_read else None
                rows = f'x{places[x]}' if masked is None else f'm{masked}'
                block = f'q{factor}.t()' if transposed else f'q{factor}'
                alpha = ', alpha=-1' if minus else ''
                if is_later:
                    text.add(f'r{n}.addmm_({rows}, {block}{alpha})')
                elif transposed and not minus:
                    text.add(f'r{n} = linear({rows}, q{factor}, {bias})')
                elif bias != 'None':
                    text.add(f'r{n} = addmm({bias}, {rows}, {block}{alpha})')
                else:
                    text.add(f'r{n} = {rows}.mm({block}){".neg_()" * minus}')
            for k, minus in biases:
                text.add(f'r{n}.{"sub_" if minus else "add_"}(p{k})')
        for n, (k, transposed) in enumerate(self.copies, len(self.maps)):
            text.add(f'r{n} = q{k}{".t()" * transposed}.clone(memory_format=contiguous_format)')
        results = _names('r', len(self.computed)) + _names('m', len(masks))
        return text.function(
            ['masks', *xs, *params], f'{_tuple(results)}, {_tuple([f"q{k}" for k in kept])}'
        )

    def backward(
        self, schedule: _Schedule, given: tuple[bool, ...]
    ) -> Callable[..., list[Tensor | None]]:
        """The function of the gradients, by which results get one; not differentiable. It takes
        masked inputs, parameters, and the factors that are kept, and then gradients of results."""
        text, (count, needs, places, masks) = _Text(), schedule[:4]
        trained = [needs[count + k] for k in self.weight_of]  # of pieces
        numbers = itertools.count()
        for k, split in enumerate(self.splits):
            names = [f't{next(numbers)}' for _ in split.parts]
            if needs[count + k]:
                text.add(f'd{count + k} = empty_like(p{k})')
                text.split(split, f'd{count + k}', names)
        written: set[str] = set()  # gradients

        def add(name: str, product: str, minus: bool) -> None:
            if name in written:
                text.add(f'{name}.addmm_({product}{", alpha=-1" * minus})')
            else:
                text.add(f'{name} = mm({product}){".neg_()" * minus}')
            written.add(name)

        for n, (terms, biases, _) in enumerate(self.maps):
            if not given[n]:
                continue
            if any(trained[k] and term.transposed for term in terms for k, _ in term.pieces):
                text.add(f'h{n} = g{n}.t()')
            for x, factor, transposed, minus, pieces in terms:
                if needs[places[x]]:
                    block = f'q{factor}' if transposed else f'q{factor}.t()'
                    add(f'd{places[x]}', f'g{n}, {block}', minus)
                product = ''  # what a piece of this term holds
                for k, is_minus in pieces:
                    if not trained[k]:
                        continue
                    rows = f'm{masks[self.ends[x], places[x]]}'
                    factors = f'h{n}, {rows}' if transposed else f'{rows}.t(), g{n}'
                    if f't{k}' in written:
                        text.add(f't{k}.addmm_({factors}{", alpha=-1" * is_minus})')
                    elif product:
                        copy = f'neg({product}, out=t{k})' if is_minus else f't{k}.copy_({product})'
                        text.add(copy)
                    else:
                        text.add(f'mm({factors}, out=t{k}){".neg_()" * is_minus}')
                        product = '' if is_minus else f't{k}'
                    written.add(f't{k}')
            for k, minus in biases:
                name = f'd{count + k}'
                if needs[count + k] and name in written:
                    text.add(f'{name}.{"sub_" if minus else "add_"}(g{n}.sum(0))')
                elif needs[count + k]:
                    text.add(f'{name} = g{n}.sum(0){".neg_()" * minus}')
                    written.add(name)
        for n, (k, transposed) in enumerate(self.copies, len(self.maps)):
            if given[n] and trained[k]:
                method = 'add_' if f't{k}' in written else 'copy_'
                text.add(f't{k}.{method}(g{n}{".t()" * transposed})')
                written.add(f't{k}')
        for k, is_trained in enumerate(trained):
            if is_trained and f't{k}' not in written:
                text.add(f't{k}.zero_()')
            if is_trained:
                written.add(f'd{count + self.weight_of[k]}')
        for n, (_, place) in enumerate(masks, len(self.computed)):  # Of a second derivative.
            if given[n]:
                before = f'd{place} + ' if f'd{place}' in written else ''
                text.add(f'd{place} = {before}g{n}')
                written.add(f'd{place}')
        names = _names('m', len(masks)) + _names('p', len(self.params))
        names += [f'q{k}' for k in schedule.factors] + _names('g', len(given))
        results = [name if name in written else 'None' for name in _names('d', len(needs))]
        return text.function(names, _tuple(results))


class _Text:
    """The text of a function of torch's operations. To look up what runs at every call would take
    as long as the operations."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def split(self, split: _Split, of: str, names: list[str]) -> None:
        """Adds the split of a tensor into named pieces."""
        if len(names) > 1:
            self.add(f'{", ".join(names)} = {of}.split_with_sizes({split.sizes}, {split.dim})')
        else:
            self.add(f'{names[0]} = {of}')

    def function(self, names: list[str], results: str) -> Callable[..., Any]:
        body = ''.join(f'    {line}\n' for line in [*self.lines, f'return {results}'])
        scope: dict[str, Any] = dict(_SCOPE)
        exec(f'def function({", ".join(names)}):\n{body}', scope)
        return scope['function']


_SCOPE = {
    'linear': linear, 'contiguous_format': torch.contiguous_format, 'where': torch.where,
    'addmm': torch.addmm, 'mm': torch.mm, 'neg': torch.neg, 'empty_like': torch.empty_like,
}  # fmt: skip


def _names(letter: str, count: int) -> list[str]:
    return [f'{letter}{k}' for k in range(count)]


def _tuple(names: list[str]) -> str:
    return f'({", ".join(names)},)' if names else '()'


def _plus_first(pairs: Sequence[tuple[int, bool]]) -> _Signed:
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


class _MapContext(Context):
    """What the backward pass gets beside the saved tensors."""

    maps: NodeMaps
    schedule: _Schedule
    shapes: list[torch.Size]  # of the tensors of inputs


class _MapNodes(torch.autograd.Function):
    """Returns the results of :class:`NodeMaps`, and then masked inputs, of which the backward pass
    makes the gradients of weights: a caller may write into the inputs themselves, as PyG gathers
    copies of their rows."""

    @staticmethod
    def forward(
        ctx: _MapContext, maps: NodeMaps, schedule: _Schedule, masks: Mapping[int, Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.maps, ctx.schedule = maps, schedule
        ctx.shapes = [x.shape for x in tensors[: schedule.num_rows]]
        ctx.set_materialize_grads(False)
        results, factors = schedule.forward(masks, *tensors)
        if schedule.constant:
            ctx.mark_non_differentiable(*[results[k] for k in schedule.constant])
        masked = results[len(maps.computed) :]
        save(ctx, *masked, *tensors[schedule.num_rows :], *factors)
        return results

    @staticmethod
    def backward(ctx: _MapContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = saved(ctx)
        given = tuple([grad is not None for grad in grads])
        device = kept[0].device.type
        # create_graph=True, or several gradients at once.
        differentiable = torch.is_grad_enabled() or transforms_active()
        if differentiable or any(is_batched(x) for x in grads if x is not None):
            with torch.autocast(device, enabled=False):
                return None, None, None, *_differentiate(ctx, kept, grads)
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return _MapNodes.backward(ctx, *grads)
        backward = ctx.schedule.backward.get(given)
        if backward is None:
            backward = ctx.schedule.backward[given] = ctx.maps.backward(ctx.schedule, given)
        return None, None, None, *backward(*kept, *grads)


def _differentiate(
    ctx: _MapContext, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients in torch operations, for another derivative, or several at once."""
    maps, schedule, create_graph = ctx.maps, ctx.schedule, torch.is_grad_enabled()
    size, count = len(schedule.masks), schedule.num_rows
    with torch.enable_grad():
        params = [x.view_as(x) for x in kept[size : size + len(maps.params)]]  # One may be several.
        leaves = list(enumerate(params, count))
        masked = {key: x.view_as(x) for key, x in zip(schedule.masks, kept, strict=False)}
        leaves += [(place, x) for (_, place), x in masked.items()]
        xs = []
        for end, place in zip(maps.ends, schedule.places, strict=True):
            x = masked.get((end, place))
            if x is None:  # Of weights without a gradient: any numbers will do.
                x = kept[0].new_zeros(ctx.shapes[place], requires_grad=True)
                leaves.append((place, x))
            xs.append(x)
        results = maps.in_torch(*xs, *params)
    leaves = [(k, x) for k, x in leaves if schedule.needs[k]]
    pairs = [(x, grad) for x, grad in zip(results, grads) if grad is not None]  # noqa: B905
    out: list[Tensor | None] = [None] * len(schedule.needs)
    found: list[tuple[int, Tensor | None]] = []
    if pairs:
        outs, given = zip(*pairs, strict=True)
        own = torch.autograd.grad(
            outs, [x for _, x in leaves], given, create_graph=create_graph, allow_unused=True
        )
        found += [(k, grad) for (k, _), grad in zip(leaves, own, strict=True)]
    of_masked = zip(schedule.masks, grads[len(maps.computed) :], strict=True)
    found += [(place, grad) for (_, place), grad in of_masked]
    for k, grad in found:
        if grad is not None:
            total = out[k]
            out[k] = grad if total is None else total + grad
    return out


def find_maps(program: Program, wanted: Sequence[int], order: Sequence[int]) -> NodeMaps | None:
    """The linear maps of nodes among values, given in the order of their evaluation; None if there
    is not more than one, or if parts of a weight do not lie side by side."""
    users = [arg for at in order for arg in program[at].args] + list(wanted)
    found: list[_Found] = []
    inside: set[int] = set()
    for at in reversed(order):
        terms: list[tuple[int, bool]] = []
        own: list[int] = []
        if at in inside or not _collect(program, users, at, (at, False), terms, own):
            continue
        if found and program[at].dtype != program[found[0].at].dtype:
            continue
        inside.update(own)
        parts: dict[int, list[tuple[_Part, bool]]] = {}
        biases = []
        for each, minus in terms:
            if program.dependence(each) == PARAM:
                biases.append((each, minus))
                continue
            x, weight = program[each].args
            load, part = _find_load(program, x), _find_part(program, weight)
            assert load is not None
            assert part is not None
            parts.setdefault(load, []).append((part, minus))
        found.append(_Found(at, parts, biases, users.count(at) > wanted.count(at)))
    if sum(len(pairs) for each in found for pairs in each.parts.values()) < 2:
        return None  # Torch takes less time than a function in Python.
    try:
        return NodeMaps(program, found[::-1], wanted)
    except _NotSideBySide:
        return None


class _NotSideBySide(Exception):
    """Parts of a weight do not lie side by side in one dimension."""


def _split(at: int, shape: tuple[int, ...], parts: Sequence[_Part]) -> _Split:
    own = list(dict.fromkeys(part for part in parts if part.weight == at))
    full = [(0, size) for size in shape]
    dims = [dim for dim in (0, 1) if all(each.ranges[1 - dim] == full[1 - dim] for each in own)]
    if not dims:
        raise _NotSideBySide
    dim, end = dims[0], 0
    sizes: list[int] = []
    pieces: list[_Part | None] = []
    for part in sorted(own, key=lambda part: part.ranges[dim]):
        start, size = part.ranges[dim]
        if start < end:
            raise _NotSideBySide
        if start > end:
            sizes.append(start - end)
            pieces.append(None)
        sizes.append(size)
        pieces.append(part)
        end = start + size
    if end < shape[dim]:
        sizes.append(shape[dim] - end)
        pieces.append(None)
    return _Split(dim, sizes, pieces)


def _collect(
    p: Program, users: list[int], top: int, signed: tuple[int, bool],
    terms: list[tuple[int, bool]], own: list[int],
) -> bool:  # fmt: skip
    """Adds the maps and biases of which the value `top` is the sum, and its operations; False if it
    is no such sum. What other values read is no part of it."""
    at, minus = signed
    value = p[at]
    if (value.shape, value.dtype) != (p[top].shape, p[top].dtype) or len(value.shape) != 1:
        return False
    if p.dependence(at) == PARAM:
        terms.append(signed)
        return value.op != 'const' and at != top
    if at != top and users.count(at) > 1:
        return False
    own.append(at)
    if value.op in ('add', 'sub', 'neg'):
        signs = minus != (value.op == 'neg'), minus != (value.op == 'sub')
        pairs = zip(value.args, signs, strict=False)
        return all(_collect(p, users, top, pair, terms, own) for pair in pairs)
    terms.append(signed)
    return (
        p.operation(at) is torch.mm and _find_load(p, value.args[0]) is not None
        and _find_part(p, value.args[1]) is not None
    )  # fmt: skip


def _find_load(p: Program, at: int) -> int | None:
    """The input of nodes that a value is, in one dimension and perhaps another dtype."""
    casts = 0
    while p[at].op in ('view', 'cast'):
        casts += p[at].op == 'cast'
        (at,) = p[at].args
    is_input = p[at].op == 'load' and p[at].attrs[0] in NODES
    return at if is_input and casts < 2 else None


def _find_part(p: Program, at: int) -> _Part | None:
    """The part of a weight that a value is."""
    sizes, starts, transposed = list(p[at].shape), [0, 0], False
    if p.dependence(at) != PARAM or len(sizes) != 2:
        return None
    while p[at].op == 'permute' or (p[at].op == 'slice' and p[at].attrs[3] == 1):
        if p[at].op == 'permute':
            sizes, starts, transposed = sizes[::-1], starts[::-1], not transposed
        else:
            starts[p[at].attrs[0]] += p[at].attrs[1]
        (at,) = p[at].args
    rows, columns = zip(starts, sizes, strict=True)
    return None if p[at].op == 'const' else _Part(at, (rows, columns), transposed)
