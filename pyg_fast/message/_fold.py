"""Folds linear maps of edge features into maps of nodes, so that no kernel maps the features of an
edge: a score `q . (k + W a)` is `q . k + (W^T q) . a`, and a sum over edges
`sum alpha (v + W a)` is `sum alpha v + W sum alpha a`, by heads.
"""

from typing import NamedTuple

from ._ir import DST, EDGE, SRC, Program, promote_dtypes

# Features of an edge per channel of a head, at most: with more, the maps of nodes would be wide.
_MAX_FEATURES = 2
_MAX_TERMS = 64  # of a sum, with its parts
_MIN_CHANNELS = 4
# A CPU takes long for rows of other numbers of features, unless heads have so many channels.
_VECTOR, _WIDE = 4, 16


class FoldedMessage(NamedTuple):
    """A message whose sum is that of `first` plus the map by `weight` of the sum of `second`."""

    first: int
    second: int
    weight: int  # (D, H * C)
    heads: int  # of both sums


class _Map(NamedTuple):
    """A linear map of edge features, and the other terms of the sum."""

    features: int  # (D)
    weight: int  # (D, H * C)
    rest: int | None


def fold_score(p: Program, x: int, dims: tuple[int, ...], on_cuda: bool) -> int | None:
    """The score `q . (k + W a)` as `q . k + (W^T q) . a`; None if the value is none."""
    value = p[x]
    shape = value.shape
    if value.op != 'mul' or dims != (len(shape) - 1,) or len(shape) > 2:
        return None
    for q, y in (value.args, value.args[::-1]):
        map_ = _find_map(p, y, on_cuda) if p.dependence(q) in (SRC, DST) else None
        if map_ is None or p[q].shape != shape or p[y].shape != shape:
            continue
        heads, channels, count = *((1,) + shape)[-2:], p[map_.features].shape[0]
        wide = promote_dtypes([value.dtype, 'float32'])
        row, weight = p.view(q, (heads * channels,)), p.cast(map_.weight, wide)
        if heads > 1:
            mapped = p.head_map(row, weight, heads)
        else:
            mapped = p.mm(row, p.permute(weight, (1, 0)))
        new = (*shape[:-1], count)
        product = p.pointwise('mul', p.view(mapped, new), _row(p, map_.features, new))
        out = p.reduce('sum', product, dims)
        if map_.rest is not None:
            rest = p.reduce('sum', p.pointwise('mul', q, map_.rest), dims)
            out = p.pointwise('add', rest, out)
        return p.cast(out, value.dtype)
    return None


def fold_message(p: Program, output: int, on_cuda: bool) -> FoldedMessage | None:
    """The parts of a message `alpha (v + W a)`, with or without `alpha`; None if it is none."""
    while p[output].op == 'view':
        (output,) = p[output].args
    value = p[output]
    shape = value.shape
    if not shape:
        return None
    sides: list[tuple[int, int | None]] = [(output, None)]
    if value.op == 'mul':
        sides = [(a, s) for a, s in (value.args, value.args[::-1]) if p[s].shape[-1:] == (1,)]
    for x, factor in sides:
        map_ = _find_map(p, x, on_cuda)
        if map_ is None or map_.rest is None or p[x].shape != shape or len(shape) > 2:
            continue
        count = p[map_.features].shape[0]
        heads = 1 if factor is None or len(shape) == 1 else p[factor].shape[0]
        new = (heads, count) if heads > 1 else (count,)
        first, second = p.expand(map_.rest, shape), _row(p, map_.features, new)
        if factor is not None:
            first = p.pointwise('mul', first, factor, dtype=value.dtype)
            factor = p.view(factor, (*new[:-1], 1))
            second = p.pointwise('mul', second, factor, dtype=value.dtype)
        return FoldedMessage(first, second, map_.weight, heads)
    return None


def maps_edge_features(p: Program, outputs: list[int]) -> bool:
    """Whether a kernel would map features of edges."""
    return any(p[at].op == 'mm' and p.dependence(at) & EDGE for at in p.reachable(outputs))


def _row(p: Program, features: int, shape: tuple[int, ...]) -> int:
    return p.view(features, (*(1,) * (len(shape) - 1), shape[-1]))


def _find_map(p: Program, at: int, on_cuda: bool) -> _Map | None:
    """The only term of a sum that is a linear map of edge features, if there is one."""
    shape = p[at].shape
    stack = [at]
    map_: tuple[int, int] | None = None
    rest: int | None = None
    seen = 0
    while stack:
        each = stack.pop()
        value = p[each]
        seen += 1
        if seen > _MAX_TERMS:
            return None
        if value.op == 'add' and value.shape == shape:
            stack += value.args[::-1]
            continue
        inner = value.args[0] if value.op == 'view' else each
        if _is_map(p, inner, shape[-1], on_cuda):
            if map_ is not None or value.shape != shape:
                return None
            features, weight = p[inner].args
            map_ = features, weight
        else:
            rest = each if rest is None else p.pointwise('add', rest, each)
    return None if map_ is None else _Map(*map_, rest)


def _is_map(p: Program, at: int, channels: int, on_cuda: bool) -> bool:
    """Whether a value is a map of edge features, narrow enough for heads of so many channels."""
    if p[at].op != 'mm' or p.dependence(at) != EDGE or channels < _MIN_CHANNELS:
        return False
    features = p[p[at].args[0]].shape
    if len(features) != 1 or features[0] > _MAX_FEATURES * channels:
        return False
    return on_cuda or channels >= _WIDE or features[0] % _VECTOR == 0
