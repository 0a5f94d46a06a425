"""Graphs of so few edges that PyG's own code is faster than kernels."""

import os
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .prepared_graph import PreparedGraph

TOO_FEW = ' are too few for a kernel to pay'
_HOWS = ('pyg', 'kernel')


def _checked(how: str, name: str) -> str:
    if how not in _HOWS:
        raise ValueError(f"{name} must be 'pyg' or 'kernel', got {how!r}")
    return how


_how = _checked(os.environ.get('PYG_FAST_SMALL_GRAPHS', 'pyg'), 'PYG_FAST_SMALL_GRAPHS')


class small_graphs:
    r"""Sets what runs a layer on a graph of few edges: PyG's own code, where that is faster than
    our kernels, or the kernels at any size. Also a context manager, which restores what was set
    before.

    What few edges are depends on the layer, the device and the width of the features, by a table
    measured for this package; the manual shows it. Results differ as those of PyG's code and of
    the kernels do: if several edges reach a maximum, PyG divides the gradient among them, and on
    CUDA its sums may have other bits from run to run. Kernels run at any size in a
    :class:`~pyg_fast.nn.FusedMessagePassing` with :obj:`strict=True`, in steps of
    :func:`pyg_fast.capture`, and while :func:`torch.use_deterministic_algorithms` is on. The
    setting holds for all threads of the process; the environment variable
    :obj:`PYG_FAST_SMALL_GRAPHS` sets it at the start.

    Args:
        how (str): :obj:`"pyg"` or :obj:`"kernel"`.

    Raises:
        ValueError: If :obj:`how` is another.

    Example:
        >>> with pyg_fast.small_graphs('kernel'):
        ...     out = conv(x, edge_index)
    """

    def __init__(self, how: str) -> None:
        global _how
        how = _checked(how, "'how'")
        self._before, _how = _how, how

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        global _how
        _how = self._before


def runs_pygs_code() -> bool:
    """Whether PyG's code may run where it is faster."""
    return _how == 'pyg' and not torch.are_deterministic_algorithms_enabled()


class _Limit(NamedTuple):
    """Few edges: their number times that of the features and :obj:`more` is less than that."""

    product: int
    more: int


# By the kind of a layer and whether the device is a GPU. With as many edges PyG's step takes
# about as long as ours: measured on two cores with widths of 1 to 64 (messages: on one core, of 1
# to 128, of kinds from a gate to an attention; `python -m benchmarks few_edges` measures both sides
# of these limits), and with 64 on an H100.
# There the host binds, which on a slow one takes twice as long as on a fast one: the limits are
# of the slow one, on which PyG's step was the faster one for up to 880,000 edges (640,000 of
# plain sums), on the fast one for up to 300,000. Compiled code of PyG launches little: on an H100
# its step took 0.95 times ours with 15,000 edges of width 300, and 1.4 times with 1.5 M of width
# 64. On a CPU it adds to rows of several threads by atomic operations, on one thread without.
_LIMITS = {
    ('message', False): _Limit(500_000, 20),
    ('message', True): _Limit(56_000_000, 0),
    ('narrow message', False): _Limit(560_000, 0),
    ('prepared message', False): _Limit(400_000, 20),
    ('narrow prepared message', False): _Limit(400_000, 0),
    ('prepared message', True): _Limit(56_000_000, 0),
    ('sum', False): _Limit(200_000, 50),
    ('sum', True): _Limit(42_000_000, 0),
    ('prepared sum', False): _Limit(12_000, 0),
    ('prepared sum', True): _Limit(0, 0),
    ('compiled', False): _Limit(56_000, 0),
    ('compiled on one thread', False): _Limit(6_400_000, 0),
    ('compiled', True): _Limit(32_000_000, 0),
    ('compiled sum', False): _Limit(600_000, 8),
    ('compiled sum on one thread', False): _Limit(3_200_000, 0),
    ('compiled sum', True): _Limit(32_000_000, 0),
}


class Work(NamedTuple):
    """What a message does on a CPU: how many numbers of an edge it reads and computes, in how many
    columns, and whether features of edges are among them."""

    numbers: int
    columns: int
    reads_edges: bool


# So many numbers of an edge PyG's code computes in less time than a kernel takes to visit the edge:
# by the kind of a message, and whether it reads features of edges. Measured on one core with 40,000
# to 400,000 edges.
_LIGHT = {
    ('message', False): 20, ('message', True): 40,
    ('prepared message', False): 5, ('prepared message', True): 15,
}  # fmt: skip


# Kernels of a CPU take as long for fewer numbers of an edge as for so many, PyG's code does not: of
# the narrowest messages, and of others but sums, maxima and minima, of which a vector has so many.
_NARROW, _VECTOR = 5, 16
_LEAST = 5  # counts for a message of a few columns that PyG's code computes fast

# PyG's code for an MLP of each edge takes so many times that of a message as wide as its inputs on
# a GPU. On a CPU it takes that of one with so many columns: the square by so much, and so many.
_OF_MLP = 2.25
_SQUARE_OF_MLP, _MORE_OF_MLP = 16, 20
# On a CPU PyG's code takes so many times what it takes for others, compared with a kernel: for
# maxima and minima; sums by weights of edges, and plain ones; matrix products of edges; variances;
# angles; values of edges that an attribute keeps; features of edges as wide as the message, or
# normalizations; linear maps of edges that save none of nodes.
_TIMES = {
    'extremes': 3.5, 'weights': 2.0, 'sums': 1.5, 'products': 1.7, 'variances': 0.6, 'angles': 0.6,
    'kept': 0.35, 'rows of edges': 0.22, 'maps of edges': 0.42,
}  # fmt: skip
_PAY_EARLY = frozenset({'extremes', 'weights'})


def is_narrow(width: int) -> bool:
    """Whether kernels of a CPU take as long for a wider message."""
    return 0 < width < _NARROW


def width_for_limits(width: int, kinds: Collection[str]) -> int:
    """The width of a message on a CPU, for the limits of edges, by what it does; perhaps negative.

    Args:
        width: That of its values.
        kinds: Which of :obj:`extremes`, :obj:`weights`, :obj:`sums`, :obj:`products`,
            :obj:`variances`, :obj:`angles`, :obj:`kept`, :obj:`rows of edges` and
            :obj:`maps of edges` it has.
    """
    if is_narrow(width) and 'extremes' not in kinds:
        return width
    _, more = _LIMITS['message', False]
    times = [1.0, *(_TIMES[kind] for kind in kinds)]
    most, least, counted = max(times), min(times), float(width + more)
    if width < _VECTOR and _PAY_EARLY.isdisjoint(kinds):
        most = 1.0
        if 'sums' not in kinds:
            counted = (_VECTOR + more) * max(width - _NARROW, 1) / (_VECTOR - _NARROW)
    out = max(int(most * least * counted), _LEAST) - more
    return 0 if is_narrow(out) else out


def width_of_mlp(width: int, on_gpu: bool) -> int:
    """The width of a message, for the limits of edges, that has linear maps of values computed for
    each edge; `width` is that of its inputs."""
    if on_gpu:
        return int(_OF_MLP * width)
    if width < _VECTOR:  # Then it pays no earlier than others.
        return width
    return width * width // _SQUARE_OF_MLP + _MORE_OF_MLP


def has_few_edges(edge_index: object, width: int, kind: str = 'message') -> bool:
    """Whether PyG's code is faster for a list of edges.

    Args:
        edge_index: What a layer got.
        width: The numbers of a node's or an edge's features.
        kind: :obj:`message` or :obj:`sum` of a plain list, which is sorted at each call, the same
            after :obj:`prepared`; or :obj:`compiled`.
    """
    if not isinstance(edge_index, Tensor):
        return False
    limit = _LIMITS[kind, edge_index.is_cuda]
    if is_narrow(width):
        limit = _LIMITS.get((f'narrow {kind}', edge_index.is_cuda), limit)
    product, more = limit
    shape = edge_index.shape
    is_list = len(shape) == 2 and shape[0] == 2  # Else an error says what it must be.
    return is_list and shape[1] * (width + more) < product and _may_run_pygs(edge_index)


def has_few_columns(edge_index: object, kind: str, work: Work | None) -> bool:
    """Whether PyG's code is faster for a message on a CPU, with any number of edges."""
    if work is None or work.numbers > _LIGHT[kind, work.reads_edges]:
        return False
    if not isinstance(edge_index, Tensor) or not edge_index.is_cpu:  # The layer may have moved.
        return False
    return edge_index.dim() == 2 and _may_run_pygs(edge_index)


def _may_run_pygs(edge_index: Tensor) -> bool:
    # A prepared graph has no list for PyG's code.
    is_list = edge_index.layout == torch.strided and not isinstance(edge_index, PreparedGraph)
    return is_list and runs_pygs_code()


def are_few(num_edges: int, width: int, on_gpu: bool, kind: str) -> bool:
    """The same for a number of edges, which may be symbolic: then a guard holds for the answer.
    Those whose number nobody knows are not few."""
    product, more = _LIMITS[kind, on_gpu]
    return runs_pygs_code() and guard_or_false(num_edges * (width + more) < product)


def reason_of(num_edges: int) -> str:
    """Why PyG's code runs."""
    return f'{num_edges} edges{TOO_FEW}'
