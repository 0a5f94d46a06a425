"""Exchanges linear maps of edge features with the sums that read them, so that no kernel maps the
features of an edge: a score `q . (k + W a)` is `q . k + (W^T q) . a`, and a sum over edges
`sum alpha (v + W a)` is `sum alpha v + W sum alpha a`, by heads.
"""

from typing import NamedTuple

from ._ir import DST, EDGE, SRC, Program, promoted

# Features of an edge for each channel of a head: with more, the maps of nodes would be wide.
_MOST_FEATURES = 2
_LEAST_CHANNELS = 4


class Folded(NamedTuple):
    """A message whose sum is that of `first`, plus the map by `weight` of that of `second`."""

    first: int
    second: int
    weight: int  # (D, H * C)
    heads: int  # of both sums


class _Map(NamedTuple):
    """A linear map of an edge's features, and what is added to it."""

    features: int  # (D)
    weight: int  # (D, H * C)
    rest: int | None


def folded_score(p: Program, x: int, dims: tuple[int, ...]) -> int | None:
    """A sum over the last dimension of products of nodes' values with a map of edge features."""
    value = p[x]
    shape = value.shape
    if value.op != 'mul' or dims != (len(shape) - 1,) or len(shape) > 2:
        return None
    for q, y in (value.args, value.args[::-1]):
        found = _map_in(p, y) if p.level(q) in (SRC, DST) else None
        if found is None or p[q].shape != shape or p[y].shape != shape:
            continue
        heads, channels, count = *((1,) + shape)[-2:], p[found.features].shape[0]
        wide = promoted([value.dtype, 'float32'])
        row, weight = p.view(q, (heads * channels,)), p.cast(found.weight, wide)
        if heads > 1:
            mapped = p.head_map(row, weight, heads)
        else:
            mapped = p.mm(row, p.permute(weight, (1, 0)))
        new = (*shape[:-1], count)
        product = p.point('mul', p.view(mapped, new), _row(p, found.features, new))
        out = p.reduce('sum', product, dims)
        if found.rest is not None:
            rest = p.reduce('sum', p.point('mul', q, found.rest), dims)
            out = p.point('add', rest, out)
        return p.cast(out, value.dtype)
    return None


def folded_message(p: Program, output: int) -> Folded | None:
    """A sum with a map of edge features, times at most one factor of each head."""
    while p[output].op == 'view':
        (output,) = p[output].args
    value = p[output]
    shape = value.shape
    sides: list[tuple[int, int | None]] = [(output, None)]
    if value.op == 'mul':
        sides = [(a, s) for a, s in (value.args, value.args[::-1]) if p[s].shape[-1:] == (1,)]
    for x, factor in sides:
        found = _map_in(p, x)
        if found is None or found.rest is None or p[x].shape != shape or len(shape) > 2:
            continue
        count = p[found.features].shape[0]
        heads = 1 if factor is None or len(shape) == 1 else p[factor].shape[0]
        new = (heads, count) if heads > 1 else (count,)
        first, second = p.expand(found.rest, shape), _row(p, found.features, new)
        if factor is not None:
            first = p.point('mul', first, factor, dtype=value.dtype)
            factor = p.view(factor, (*new[:-1], 1))
            second = p.point('mul', second, factor, dtype=value.dtype)
        return Folded(first, second, found.weight, heads)
    return None


def has_maps(p: Program, outputs: list[int]) -> bool:
    """Whether a kernel would map features of edges."""
    return any(p[at].op == 'mm' and p.level(at) & EDGE for at in p.reachable(outputs))


def _row(p: Program, features: int, shape: tuple[int, ...]) -> int:
    return p.view(features, (*(1,) * (len(shape) - 1), shape[-1]))


def _map_in(p: Program, at: int) -> _Map | None:
    """The only term of a sum that is a linear map of an edge's features."""
    shape = p[at].shape
    stack = [at]
    found: tuple[int, int] | None = None
    rest: int | None = None
    while stack:
        each = stack.pop()
        value = p[each]
        if value.op == 'add' and value.shape == shape:
            stack += value.args[::-1]
            continue
        inner = value.args[0] if value.op == 'view' else each
        if _is_map(p, inner, shape[-1]):
            if found is not None or value.shape != shape:
                return None
            features, weight = p[inner].args
            found = features, weight
        else:
            rest = each if rest is None else p.point('add', rest, each)
    return None if found is None else _Map(*found, rest)


def _is_map(p: Program, at: int, channels: int) -> bool:
    """Whether a value is a map of edge features, narrow enough for heads of so many channels."""
    if p[at].op != 'mm' or p.level(at) != EDGE or channels < _LEAST_CHANNELS:
        return False
    features = p[p[at].args[0]].shape
    return len(features) == 1 and features[0] <= _MOST_FEATURES * channels
