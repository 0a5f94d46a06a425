"""Says which arguments of a softmax or a `scatter` do not fit."""

import re
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType

import torch
import torch_geometric.utils._softmax as softmax_of_pyg
from torch import Tensor
from torch_geometric.utils import scatter

from .._alike import did_you_mean
from ..errors import DtypeError, IndicesError, OptionError, ShapeError
from ._explain_code import is_library

# As torch says it, which depends on its version.
_OF_TORCH = (
    r"softmax\(\)(?:: argument 'dim' .* must be int, not Tensor"
    r'| received an invalid combination of arguments - got \(Tensor, Tensor\))'
)


def check_softmax(frames: Sequence[FrameType], text: str) -> None:
    """Raises for arguments of PyG's softmax and scatter, and of torch's in its place."""
    if re.match(_OF_TORCH, text):
        raise TypeError(
            "'dim' of torch's softmax must be an integer, got Tensor: a softmax over the "
            'neighbours is torch_geometric.utils.softmax(src, index, num_nodes=size_i)'
        )
    for caller, frame in pairwise(frames):
        function, module = frame.f_code.co_name, frame.f_globals.get('__name__', '')
        if (function, module) not in _BY_INDEX or is_library(caller):
            continue
        src, index, ptr = (frame.f_locals.get(name) for name in ('src', 'index', 'ptr'))
        size = _BY_INDEX[function, module]
        count, dim = frame.f_locals.get(size), frame.f_locals.get('dim', 0)
        takes = f'{function}(src, index, {size}=size_i)'
        if isinstance(ptr, int):
            raise TypeError(
                "'ptr', the third argument of softmax, must be a tensor, got int: the number of "
                f'nodes has a name, {takes}'
            )
        if ptr is not None:
            continue
        cure = f"{takes}, as 'message' may take 'index' and 'size_i'"
        if not isinstance(index, Tensor):
            raise OptionError(
                f"'index' of {function} must be a tensor with the destination of each edge, got "
                f'{type(index).__name__ if index is not None else None}: {cure}'
            )
        of_floats = index.is_floating_point()
        if of_floats and isinstance(src, Tensor) and not src.is_floating_point():
            raise ShapeError(
                f"'src', the first argument of softmax, must hold the scores of edges, got "
                f"{src.dtype} of shape {list(src.shape)}, and 'index' numbers of nodes, got "
                f'{index.dtype} of shape {list(index.shape)}: exchange the two, softmax(src, index)'
            )
        if index.dim() != 1:
            raise ShapeError(
                f"'index' of {function} must have shape [num_edges], got {list(index.shape)}: "
                f'{cure}'
            )
        if index.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"'index' of {function} must hold the destination of each edge, got {index.dtype}: "
                f'{cure}'
            )
        if not isinstance(src, Tensor) or not -src.dim() <= dim < src.dim():
            continue
        if src.size(dim) != index.size(0):
            along = src.size(0) == index.size(0)
            raise ShapeError(
                f"'src' and 'index' of {function} must have as many rows, got shapes "
                f'{list(src.shape)} and {list(index.shape)} with dim={dim}'
                f'{": the edges are along dim=0" * along}'
            )
        reduce = frame.f_locals.get('reduce', 'sum')
        if reduce not in _REDUCES:
            known = _ALIKE.get(reduce)
            meant = f"; did you mean '{known}'?" if known else did_you_mean(str(reduce), _REDUCES)
            raise OptionError(
                f"'reduce' of {function} must be one of {_REDUCES}, got {reduce!r}{meant}"
            )
        if count is not None and not isinstance(count, (int, Tensor)):
            raise TypeError(
                f"'{size}' of {function} must be an integer, got {type(count).__name__}: {cure}"
            )
        most = int(index.max()) if index.numel() > 0 else -1
        if isinstance(count, int) and count <= most:
            raise IndicesError(
                f"'{size}' of {function} must be more than all numbers of 'index', of which the "
                f'largest is {most}, got {count}: {cure}'
            )


_REDUCES = ('sum', 'add', 'mean', 'mul', 'prod', 'min', 'max', 'amin', 'amax', 'any')
_ALIKE = {'average': 'mean', 'avg': 'mean', 'maximum': 'max', 'minimum': 'min'}

# Functions of PyG that take the destinations of edges as `index`, by name and module, and their
# argument for the number of these.
_BY_INDEX = {
    ('softmax', softmax_of_pyg.__name__): 'num_nodes',
    ('scatter', scatter.__module__): 'dim_size',
}
