"""Says which numbers of nodes do not fit: of `size`, of features, and of the ends of edges."""

import re
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from ..errors import IndicesError, OptionError, ShapeError
from ..graph.prepared_graph import list_of
from ..ops._edges import is_capturing, is_list, raise_index_error
from ..ops._transforms import transforms_traced
from ..ops.cbsr import CBSR
from ..sparse.graph import check_node_counts
from ._explain_call import features_of_nodes, is_own, of_propagate, propagated, read_by
from ._explain_code import frames_of

# What PyG's code says of nodes that do not exist.
_BEYOND = (' must hold ', 'larger than', 'expected size', "invalid 'dim_size'")
# And of edges to or from such nodes.
_NO_NODES = (
    r"^Found (negative )?indices in 'edge_index'|^Encountered invalid 'dim_size'|"
    r'^index -?\d+ is out of bounds for dimension'
)


def check_sizes(
    conv: Any, given: Mapping[str, object], frames: Sequence[FrameType], text: str
) -> None:
    """Raises for a `size` that `forward` gives to `propagate`."""
    size = of_propagate(frames, 'size')
    if size is not None and given.get('size') is size and not is_own(conv):
        return
    error = _error_of_shape(conv, size, propagated(frames))
    parts = size if isinstance(size, (tuple, list)) else ()
    is_known = all(part is None or isinstance(part, (int, torch.SymInt, Tensor)) for part in parts)
    if error is None and size is not None and (len(parts) != 2 or not is_known):
        got = tuple(parts) if parts else type(size).__name__
        cure = (
            ': features go by name, propagate(edge_index, x=x)' if isinstance(size, Tensor) else ''
        )
        raise ValueError(
            f"'size' of propagate must be a pair of the numbers of sources and destinations, got "
            f'{got}{cure}'
        )
    is_beyond = any(words in text for words in _BEYOND)
    if error is not None and is_beyond:
        raise error
    if is_beyond:
        _check_exchanged(conv, frames, size)


def _check_exchanged(conv: Any, frames: Sequence[FrameType], size: object) -> None:
    """Raises where the sources are in the place of the destinations: in `size`, in a pair of
    features, or in the edges."""
    edges = of_propagate(frames, 'edge_index')
    if not isinstance(edges, Tensor) or not is_list(edges) or edges.numel() == 0:
        return
    if conv.flow != 'source_to_target':
        return
    needed = [int(end.max()) + 1 for end in list_of(edges)]
    given = _counts(conv, frames)
    counts: list[int | None] = [None, None]
    for pair, _ in given.values():
        counts = [
            other if count is None else count for count, other in zip(counts, pair, strict=True)
        ]
    is_pair = isinstance(size, (tuple, list)) and [type(each) for each in size] == [int, int]
    if is_pair and isinstance(size, (tuple, list)):
        fits = _fit(size, counts, needed)
        if not fits and size[0] != size[1] and _fit(size[::-1], counts, needed):
            raise ValueError(
                f"'size' of propagate must be (num_sources, num_destinations), {tuple(size[::-1])} "
                f'by the edges and the features, got {tuple(size)}: exchange the two'
            )
        return
    for name, (pair, is_of_both) in given.items():
        fits = not is_of_both or None in pair or _fit(pair, pair, needed)
        if not fits and _fit(pair[::-1], pair[::-1], needed):
            raise IndicesError(
                f"'{name}' must be a pair of the features of sources and destinations, for "
                f'edges of at least {needed[0]} and {needed[1]} nodes, got {pair[0]} and '
                f"{pair[1]} rows: exchange the two, or the edges' rows by edge_index.flip(0)"
            )


def _fit(size: Sequence[int | None], counts: Sequence[int | None], needed: Sequence[int]) -> bool:
    """Whether numbers of sources and destinations are those of features, and enough for edges."""
    return all(
        each is None or (count in (None, each) and each >= least)
        for each, count, least in zip(size, counts, needed, strict=True)
    )


def _counts(conv: Any, frames: Sequence[FrameType]) -> dict[str, tuple[list[int | None], bool]]:
    """The numbers of sources and destinations by the features of nodes that `propagate` got, and
    whether these are a pair."""
    found = {}
    for name, value in propagated(frames).items():
        pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else None
        ends = pair or [
            value if f'{name}{suffix}' in read_by(conv) else None for suffix in ('_j', '_i')
        ]  # fmt: skip
        rows = [
            x.size(conv.node_dim)
            if isinstance(x, Tensor) and -x.dim() <= conv.node_dim < x.dim() else None
            for x in ends
        ]  # fmt: skip
        if rows != [None, None]:
            found[name] = rows, pair is not None
    return found


def _error_of_shape(conv: Any, size: object, kwargs: Mapping[str, object]) -> ValueError | None:
    """The error for a `size` that is the shape of features."""
    for name, value in kwargs.items() if type(size) is torch.Size else ():
        if isinstance(value, Tensor) and value.shape == size and conv.node_dim in (0, -2):
            return ValueError(
                f"'size' of propagate must be a pair of the numbers of sources and destinations, "
                f"got {tuple(size)}, which is the shape of '{name}'"
            )
    return None


def check_size(
    conv: MessagePassing, edge_index: object, size: torch.Size, kwargs: Mapping[str, object]
) -> None:
    """Raises for a `size` that is the shape of features and has too few destinations, before PyG's
    code would stop a GPU."""
    error = _error_of_shape(conv, size, kwargs)
    own = type(conv).aggregate is not MessagePassing.aggregate
    if error is None or own or conv.flow != 'source_to_target' or transforms_traced():
        return
    if type(edge_index) is not Tensor or not is_list(edge_index) or edge_index.numel() == 0:
        return
    count = size[1] if len(size) > 1 else 0
    if size[0] != count and not is_capturing(edge_index) and int(edge_index[1].max()) >= count:
        raise error


def check_ends(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for edges to or from nodes of which `propagate` got no features."""
    edges, size = (of_propagate(frames, name) for name in ('edge_index', 'size'))
    if re.search(_NO_NODES, text) is None or not isinstance(edges, Tensor) or edges.dim() != 2:
        return
    counts = [*size] if isinstance(size, (tuple, list)) and len(size) == 2 else [None, None]
    of_ends = (1, 0) if conv.flow == 'source_to_target' else (0, 1)
    for name, value in propagated(frames).items():
        pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else None
        for suffix, end in zip(('_i', '_j'), of_ends, strict=True):
            if pair is None and f'{name}{suffix}' not in read_by(conv):
                continue
            part = value if pair is None else pair[end]
            if isinstance(part, Tensor) and -part.dim() <= conv.node_dim < part.dim():
                counts[end] = part.size(conv.node_dim) if counts[end] is None else counts[end]
    first, second = counts
    first, second = second if first is None else first, first if second is None else second
    if type(first) is type(second) is int and edges.numel() > 0:
        raise_index_error(list_of(edges), first, second)


def check_node_dim(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for features of nodes in which `node_dim` is not that of the nodes."""
    dim, values = conv.node_dim, features_of_nodes(conv, frames)
    for name, value in values if text.startswith('Dimension out of range') else ():
        if value.dim() == 1 and dim < -1:
            raise ShapeError(
                f"'{name}' must have shape [num_nodes, channels], as 'node_dim' is {dim}, got "
                f'{list(value.shape)}: {name}.view(-1, 1)'
            )
    edges = of_propagate(frames, 'edge_index')
    is_beyond = any(words in text for words in _BEYOND) and isinstance(edges, Tensor)
    if not is_beyond or dim != -2 or not isinstance(edges, Tensor) or edges.numel() == 0:
        return
    for name, value in values:
        if value.dim() > 2 and value.size(-2) <= int(edges.max()) < value.size(0):
            raise OptionError(
                f"'node_dim' must be 0 for '{name}' of shape {list(value.shape)}, which has the "
                'nodes first: super().__init__(node_dim=0)'
            )


def check_pair(size: object, takes_weights: bool) -> None:
    """Raises unless the `size` of a call is a pair."""
    if size is None or (isinstance(size, (tuple, list)) and len(size) == 2):
        return
    got = f'{len(size)} numbers' if isinstance(size, (tuple, list)) else type(size).__name__
    cure = ': the layer takes no weights of edges' if not takes_weights else ''
    raise ValueError(
        f"'size' must be a pair of the numbers of sources and destinations, got {got}{cure}"
    )


def refuse_weights(size: object) -> None:
    """Raises for weights or features of edges in the place of a `size`, which PyG does not read
    beside a prepared graph."""
    if isinstance(size, Tensor) and size.numel() != 2:
        check_pair(size, takes_weights=False)


def check_nodes(conv: Any, x: object, edge_index: Tensor) -> None:
    """Raises for edges to or from nodes without features."""
    ends = x if isinstance(x, (tuple, list)) else (x, x)
    num_src, num_dst = (_num_rows(end, conv.node_dim) for end in ends)
    if isinstance(edge_index, EdgeIndex):
        check_node_counts(edge_index.sparse_size(), num_src, num_dst)
    if edge_index.size(1) > 0 and num_src is not None and num_dst is not None:
        raise_index_error(list_of(edge_index), num_src, num_dst)


def _num_rows(x: object, node_dim: int) -> int | None:
    """The number of nodes; None where it is not known what features of more dimensions mean."""
    if isinstance(x, CBSR):
        return x.size(0)
    if not isinstance(x, Tensor) or x.dim() < 2 or (x.dim() > 2 and node_dim >= 0):
        return None
    return x.size(node_dim)


def check_rows_of_nodes(tensors: Mapping[str, Tensor], error: Exception) -> None:
    """Raises for an argument that has rows of other nodes than PyG knows of."""
    said = r'Encountered tensor with size (\d+) in .*, but expected size (\d+)'
    found = re.search(said, str(error))
    if found is None:
        return
    rows, wanted = map(int, found.groups())
    for name, value in {**tensors, **propagated(frames_of(error))}.items():
        for end in value if isinstance(value, tuple) else (value,):
            if isinstance(end, Tensor) and end.size(0) == rows:
                raise ShapeError(
                    f"'{name}' must have a row for each of {wanted} nodes, as other features, "
                    f"'size' or a prepared graph say, got {list(end.shape)}"
                )
