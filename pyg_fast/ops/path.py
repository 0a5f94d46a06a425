"""The rows of an execution path: gather, scatter, and checks of gradients outside of it."""

from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ._attention import dropout_factor
from ._edges import is_capturing
from ._library import fake, ops, reference
from ._saved import Context, save, saved
from ._transforms import transforms_active

_MANY = 1 << 24  # numbers of a result that is mostly filled


class Rows(NamedTuple):
    r"""Some nodes of a graph, as rows of a smaller matrix.

    Shapes:
        - **nodes:** the node of each row :math:`(n)`, int64; :obj:`None`: all nodes
        - **position:** the row of each node, or -1 :math:`(N)`; :obj:`None`: all nodes
    """

    nodes: Tensor | None
    position: Tensor | None

    def of(self, full: Tensor) -> Tensor:
        """The rows of a matrix or vector of all nodes."""
        return full if self.nodes is None else full.index_select(0, self.nodes)


ALL_ROWS = Rows(None, None)


class Watched(Protocol):
    """What a backward pass reports to."""

    def note(self, counter: Tensor) -> None:
        """Takes note of a counter, or raises."""


_watched: 'WeakValueDictionary[int, Watched]' = WeakValueDictionary()
_keys = count()


def watched(by: Watched) -> int:
    """A key by which backward passes find it, also those of compiled code."""
    key = next(_keys)
    _watched[key] = by
    return key


class Watch(NamedTuple):
    r"""Counts non-zero rows of gradients outside of a path.

    Shapes:
        - **position:** negative for nodes outside of the path :math:`(N)`
        - **counter:** :math:`(1)`, int64

    Each backward pass reports to :obj:`by`, a key of :func:`watched`. :obj:`strict` waits for the
    device, to raise an error at once.
    """

    position: Tensor
    counter: Tensor
    by: int
    layer: int
    num_dst: int
    strict: bool

    def look(self, grad: Tensor) -> None:
        """Counts the rows of a gradient."""
        # `.data`: counting must not change the version of a saved tensor.
        counter = self.counter.data
        ops.count_outside.default(grad.detach(), self.position, counter)
        args = counter, self.by, self.layer, self.num_dst, self.strict
        if torch.compiler.is_compiling():
            torch.ops.pyg_fast.note_outside.default(*args)
        else:
            _note_outside(*args)


def check_counter(counter: Tensor, layer: int, num_dst: int) -> None:
    """Raises ValueError if a counter is not zero; waits for the device."""
    lost = int(counter)
    if lost:
        counter.data.zero_()
        raise ValueError(
            f"'path' of layer {layer} has lost gradients of {lost} rows outside of its {num_dst} "
            'active nodes: the loss, or a layer between that mixes nodes, such as BatchNorm, reads '
            'other nodes than those of the mask, or the path is that of another layer. Restrict '
            'the loss to the mask, normalize each node by itself (LayerNorm), or prepare other '
            'paths'
        )


def _note_outside(counter: Tensor, by: int, layer: int, num_dst: int, strict: bool) -> None:
    if is_capturing(counter):
        return
    path = _watched.get(by)
    if path is None or strict:  # Nobody asks a path that is gone later.
        check_counter(counter, layer, num_dst)
    else:
        path.note(counter)


# An op, as code in Python does not run in a compiled backward pass.
_library = torch.library.Library('pyg_fast', 'FRAGMENT')
_library.define(
    'note_outside(Tensor(a!) counter, int by, int layer, SymInt num_dst, bool strict) -> ()'
)
_library.impl('note_outside', _note_outside, 'CPU')
_library.impl('note_outside', _note_outside, 'CUDA')
_library.impl('note_outside', lambda *_: None, 'Meta')


def expanded(x: Tensor, rows: Rows, create_graph: bool) -> Tensor:
    """Adds zeros for all other nodes."""
    return _filled(x, rows, 0.0) if create_graph else _spread(x, rows, 0.0)


def _filled(x: Tensor, rows: Rows, fill: float) -> Tensor:
    assert rows.nodes is not None
    assert rows.position is not None
    shape = rows.position.size(0), x.size(1)
    out, nodes = x.new_full(shape, fill), rows.nodes.long()
    return out.index_copy(0, nodes, x) if no_result_in_place() else out.index_copy_(0, nodes, x)


def no_result_in_place() -> bool:
    """Whether code is compiled: Dynamo of torch 2.11 loses the gradient of a function's result that
    was changed in place."""
    return torch.compiler.is_compiling()


def number_of(fill: float | None, dtype: torch.dtype) -> float:
    """What rows hold that are not computed. None: the smallest positive normal number, a zero
    behind which :func:`relu` lets gradients through, so that the check of a path notices them."""
    return torch.finfo(dtype).tiny if fill is None else fill


def _spread(x: Tensor, rows: Rows, fill: float | None) -> Tensor:
    """The rows of all nodes, those that do not exist filled with a number; no gradient."""
    assert rows.position is not None
    fill = number_of(fill, x.dtype)
    num_nodes = rows.position.size(0)
    # A GPU fills memory faster than with a kernel that looks for each row.
    sparse = x.is_cuda and num_nodes >= 8 * x.size(0) and num_nodes * x.size(1) >= _MANY
    if sparse and not torch.are_deterministic_algorithms_enabled():
        return _filled(x, rows, fill)
    return ops.expand_rows.default(x, rows.position, fill)


def expand(x: Tensor, rows: Rows, fill: float | None = 0.0, watch: Watch | None = None) -> Tensor:
    """Scatters rows to all nodes; others are :func:`number_of` :obj:`fill`; differentiable."""
    return x if rows.nodes is None else Expand.apply(x, rows, fill, watch)


class Expand(torch.autograd.Function):
    """Its backward gathers the rows again."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, rows: Rows, fill: float | None, watch: Watch | None
    ) -> Tensor:
        save(ctx, Rows(rows.nodes, None), watch)
        return _spread(x, rows, fill)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, watch = saved(ctx)
        if watch is not None:
            watch.look(grad)
        return rows.of(grad), None, None, None


def take(x: Tensor, rows: Rows) -> Tensor:
    """The rows of some nodes; differentiable."""
    return x if rows.nodes is None else Take.apply(x, rows)


class Take(torch.autograd.Function):
    """Its backward scatters them, without the additions of index_select's backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, rows: Rows) -> Tensor:
        save(ctx, rows)
        return rows.of(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = saved(ctx)
        return expanded(grad, rows, torch.is_grad_enabled()), None


def node_dropout(x: Tensor, p: float, seed: Tensor, nodes: Tensor | None = None) -> Tensor:
    r"""Dropout keyed by seed, node and column: the same for a node in any row.

    .. math::
        \mathbf{y}_{r,c} = \frac{\mathbf{x}_{r,c}}{1 - p} \cdot
        [ u(\mathrm{seed}, \mathrm{nodes}_r, c) \geq p ]

    Args:
        x (Tensor): Features :math:`(n, F)`.
        p (float): Probability that an entry is dropped.
        seed (Tensor): int64 of shape :math:`(1)`, on the device of :obj:`x`.
        nodes (Tensor, optional): The node of each row :math:`(n)`, int64. (default: :obj:`None`,
            the row index)

    Raises:
        ValueError: If :obj:`p` is not from 0 to 1.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"'p' must be from 0 to 1, got {p}")
    if p == 0:
        return x
    if transforms_active():
        return _node_dropout_reference(x, nodes, seed, float(p)).to(x.dtype)
    return NodeDropout.apply(x, nodes, seed, float(p))


class NodeDropout(torch.autograd.Function):
    """Its backward is itself: the same entries are dropped."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, nodes: Tensor | None, seed: Tensor, p: float) -> Tensor:
        save(ctx, nodes, seed, p)
        return ops.node_dropout.default(x, nodes, seed, p)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        nodes, seed, p = saved(ctx)
        return NodeDropout.apply(grad, nodes, seed, p), None, None, None


class Rectify(NamedTuple):
    """A ReLU, then :func:`node_dropout` where there is a :obj:`seed`."""

    dropout: float = 0.0
    seed: Tensor | None = None

    def of(self, x: Tensor, nodes: Tensor | None) -> Tensor:
        """The result, in place of :obj:`x` where there is no dropout; no gradient."""
        if self.seed is not None:
            # Dropout only scales, so it may come first; then nothing is stored in between.
            x = ops.node_dropout.default(x, nodes, self.seed, self.dropout)
        return x.relu() if no_result_in_place() else x.relu_()

    def grad(self, grad: Tensor, out: Tensor) -> Tensor:
        """The gradient of :obj:`x`, from the result alone: it is positive where both keep."""
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
        if self.seed is None or self.dropout == 1:
            return grad
        scale = 1 / (1 - self.dropout)
        return grad * scale if torch.is_grad_enabled() else grad.mul_(scale)


def rectify(x: Tensor, how: Rectify, nodes: Tensor | None = None) -> Tensor:
    """ReLU and dropout as one function, which saves only its result; differentiable."""
    if transforms_active():
        x = x.relu()
        return x if how.seed is None else node_dropout(x, how.dropout, how.seed, nodes)
    return RectifyRows.apply(x, how, nodes)


class RectifyRows(torch.autograd.Function):
    """The sign of the result tells which entries have a gradient."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, how: Rectify, nodes: Tensor | None) -> Tensor:
        out = x.relu() if how.seed is None else how.of(x, nodes)
        save(ctx, out, how)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, how = saved(ctx)
        return how.grad(grad, out), None, None


@fake('expand_rows')
def _expand_rows_fake(x: Tensor, position: Tensor) -> Tensor:
    return x.new_empty(position.size(0), x.size(1))


fake('count_outside')(lambda: None)


@fake('node_dropout')
def _node_dropout_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@reference('expand_rows')
def _expand_rows_reference(x: Tensor, position: Tensor, fill: float) -> Tensor:
    return torch.cat([x.double(), x.new_full((1, x.size(1)), fill).double()])[position.long()]


@reference('node_dropout')
def _node_dropout_reference(
    x: Tensor, nodes: Tensor | None, seed: Tensor, dropout: float
) -> Tensor:
    nodes = torch.arange(x.size(0), device=x.device) if nodes is None else nodes
    return x.double() * dropout_factor(seed if dropout > 0 else None, nodes, x.size(1), dropout)
