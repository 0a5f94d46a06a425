"""Convolutions whose backward pass, or both passes, touch an execution path alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention import dropout_factor
from ._edges import is_capturing
from ._library import fake, ops, reference
from ._saved import save, saved
from ._transforms import transforms_active
from .graph import Graph
from .linear_spmm import aggregates_first
from .spmm import acc_dtype, reduce_sum, sum_rows


class Rows(NamedTuple):
    r"""Some nodes of a graph, as rows of a smaller matrix.

    Shapes:
        - **nodes:** which node a row is :math:`(n)`, int64; :obj:`None`: all of them
        - **position:** the row of each node, -1 for none :math:`(N)`; :obj:`None` likewise
    """

    nodes: Tensor | None
    position: Tensor | None

    def of(self, full: Tensor) -> Tensor:
        """The rows of a matrix or vector of all nodes."""
        return full if self.nodes is None else full.index_select(0, self.nodes)


class Operator(NamedTuple):
    r"""A sparse matrix :math:`\mathbf{D}_r \mathbf{A} \mathbf{D}_c + \mathbf{E}` between the rows
    of sources and destinations, where :math:`\mathbf{E}` joins the rows of the same node.

    Shapes:
        - **value:** entries of :math:`\mathbf{A}` :math:`(|\mathcal{E}|)`, :obj:`None` for ones
        - **row_scale**, **col_scale:** :math:`\mathbf{D}_r` :math:`(n_{dst})` and
          :math:`\mathbf{D}_c` :math:`(n_{src})`, :obj:`None` for ones
        - **diag:** :math:`\mathbf{E}` by destination :math:`(n_{dst})`, :obj:`None` for zeros
        - **t_diag:** the same by source :math:`(n_{src})`
        - **self_row:** the source row of each destination :math:`(n_{dst})`, **t_self_row:** the
          destination row of each source :math:`(n_{src})`; -1 for none, :obj:`None`: the same
    """

    graph: Graph
    value: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    diag: Tensor | None = None
    t_diag: Tensor | None = None
    self_row: Tensor | None = None
    t_self_row: Tensor | None = None

    def t(self) -> 'Operator':
        """The transposed matrix."""
        return Operator(
            self.graph.t(), self.value, self.col_scale, self.row_scale, self.t_diag, self.diag,
            self.t_self_row, self.self_row,
        )  # fmt: skip

    def plus_diag(self, entry: Tensor) -> 'Operator':
        """With one more number on the diagonal of each node that both sides have."""

        def added(diag: Tensor | None, count: int) -> Tensor:
            return entry.expand(count).contiguous() if diag is None else diag + entry

        return self._replace(
            diag=added(self.diag, self.graph.num_dst), t_diag=added(self.t_diag, self.graph.num_src)
        )

    def times(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        out_acc: bool = False,
        again: bool = False,
    ) -> Tensor:
        """Its product with features; :obj:`again`: in ops that torch can differentiate."""
        value = self.value
        if value is not None and value.dtype != acc_dtype(x.dtype):
            value = value.to(x.dtype)
        if not again:
            return sum_rows(
                self.graph[:3], self.graph.groups, value, x, self.row_scale, self.col_scale,
                self.diag, bias, False, out_acc, self.self_row,
            )  # fmt: skip
        out = reduce_sum(
            self.graph, x, value, bias, self.row_scale, self.col_scale, out_acc=out_acc
        )
        if self.diag is None:
            return out
        diag, own = self.diag, x
        if self.self_row is not None:
            diag = diag.masked_fill(self.self_row < 0, 0.0)
            own = x.index_select(0, self.self_row.long().clamp(min=0))
        return out + (diag.view(-1, 1) * own).to(out.dtype)


class Watch(NamedTuple):
    r"""Counts the rows of gradients that miss a path.

    Shapes:
        - **position:** below zero for nodes that are not on it :math:`(N)`
        - **counter:** :math:`(1)`, int64

    :obj:`noted` refers weakly to what is called after each backward pass; :obj:`None` in compiled
    code. :obj:`strict` waits for the device, to raise an error at once.
    """

    position: Tensor
    counter: Tensor
    noted: Callable[[], Callable[[], None] | None] | None
    layer: int
    num_dst: int
    strict: bool

    def look(self, grad: Tensor) -> None:
        """Counts the rows of a gradient."""
        # An alias with a version of its own: counting must not look like an edit of what was saved.
        ops.count_outside.default(grad.detach(), self.position, self.counter.data)
        if self.noted is None:
            return
        if self.strict and not is_capturing(self.counter):
            self.check()
        elif (noted := self.noted()) is not None:
            noted()

    def check(self) -> None:
        """Raises ValueError if the counter is not zero; waits for the device."""
        count = int(self.counter)
        if count:
            self.counter.data.zero_()
            raise ValueError(
                f"'path' of layer {self.layer} has lost gradients of {count} rows outside of its "
                f'{self.num_dst} active nodes: the loss has to read nodes of the mask alone, or '
                'the paths have to be prepared again'
            )


class Plan(NamedTuple):
    """How a convolution runs: over all edges or some of them, on all rows or some of them.

    :obj:`whole` is the matrix of all nodes, where the forward pass takes it, and :obj:`part` that
    of the path between the rows :obj:`src` and :obj:`dst`. What comes in and goes out has a row
    for each node unless it is :obj:`compact`; rows that are not computed are :obj:`fill`, and
    :obj:`watch` looks at their gradients.
    """

    part: Operator
    src: Rows
    dst: Rows
    whole: Operator | None = None
    compact_in: bool = False
    compact_out: bool = False
    fill: float = 0.0
    out_acc: bool = False
    watch: Watch | None = None


def path_conv(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
    plan: Plan,
) -> Tensor:
    r"""A linear map and an aggregation as one node of autograd, backward over an execution path.

    .. math::
        \mathbf{Y} = \mathbf{M} \mathbf{X} \mathbf{W}^{\top} + \mathbf{X} \mathbf{W}_r^{\top} +
        \mathbf{b}

    Of the gradient only the rows of the path's destinations are read; others count as zero.
    Differentiable in all of them, any number of times. Unchecked.

    Args:
        x (Tensor): Features :math:`(N, F_{in})`, or of the path's sources alone.
        weight (Tensor, optional): :math:`\mathbf{W}` of shape :math:`(F_{out}, F_{in})`;
            :obj:`None` for the identity.
        bias (Tensor, optional): :math:`\mathbf{b}` of shape :math:`(F_{out})`.
        root_weight (Tensor, optional): :math:`\mathbf{W}_r` of the shape of :math:`\mathbf{W}`;
            :obj:`None` for zero.
        plan (Plan): The matrices :math:`\mathbf{M}` and the rows.

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(N, F_{out})`, or the rows of the path's
        destinations alone.
    """
    return PathConv.apply(x, weight, bias, root_weight, plan)


class PathConv(torch.autograd.Function):
    """Its backward is made of its own products, and so can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        root_weight: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.first = False
        if weight is not None and not plan.out_acc:
            ctx.first = aggregates_first(weight, needs_x, needs_weight)
        aggregated = None
        sent = _sent(x, plan)
        matrix = plan.part if plan.whole is None else plan.whole
        if ctx.first and weight is not None:
            aggregated = matrix.times(sent)
            out = F.linear(aggregated, weight, bias)
        else:
            mapped = sent if weight is None else F.linear(sent, weight)
            out = matrix.times(mapped, bias, plan.out_acc)
        if root_weight is not None:
            root = sent if plan.whole is not None else _root(x, sent, plan)
            out = torch.addmm(out, root, root_weight.t())
        save(ctx, x, weight, root_weight, aggregated if needs_weight else None, plan)
        if plan.whole is None and not plan.compact_out and plan.dst.position is not None:
            out = ops.expand_rows.default(out, plan.dst.position, plan.fill)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, root_weight, aggregated, plan = saved(ctx)
        part = plan.part
        needs_x, needs_weight, needs_bias, needs_root, _ = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # The gradient will be differentiated itself.
        if not plan.compact_out:
            if plan.watch is not None:
                plan.watch.look(grad)
            grad = plan.dst.of(grad)
        grad_x: Any = None
        grad_weight = grad_root = None

        def sent() -> Tensor:
            return x if plan.compact_in else plan.src.of(x)

        if ctx.first:
            if needs_weight:
                if again:
                    aggregated = part.times(sent(), again=True)
                elif plan.whole is not None:
                    aggregated = plan.dst.of(aggregated)
                grad_weight = grad.t() @ aggregated
            if needs_x:
                grad_x = part.t().times(grad @ weight, again=again)
        elif needs_x or needs_weight:
            mapped = part.t().times(grad, again=again)
            if mapped.dtype != x.dtype:
                mapped = mapped.to(x.dtype)
            if needs_weight:
                grad_weight = mapped.t() @ sent()
            if needs_x:
                grad_x = mapped if weight is None else mapped @ weight
        if root_weight is not None:
            if needs_root:
                root = _root(x, sent(), plan) if plan.compact_in else plan.dst.of(x)
                grad_root = grad.t() @ root
            if needs_x:
                to_root = grad @ root_weight
                if plan.part.self_row is None:
                    grad_x = grad_x + to_root
                else:
                    grad_x = grad_x.index_add(0, plan.part.self_row, to_root)
        if needs_x and not plan.compact_in and plan.src.nodes is not None:
            grad_x = _expanded(grad_x, plan.src, again)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, grad_root, None


def _sent(x: Tensor, plan: Plan) -> Tensor:
    """The rows that the forward pass reads."""
    return x if plan.compact_in or plan.whole is not None else plan.src.of(x)


def _root(x: Tensor, sent: Tensor, plan: Plan) -> Tensor:
    """The rows of the path's destinations."""
    if plan.part.self_row is None:
        return sent
    return sent.index_select(0, plan.part.self_row)


def _expanded(x: Tensor, rows: Rows, again: bool) -> Tensor:
    """With zeros for all other nodes."""
    assert rows.nodes is not None
    assert rows.position is not None
    if not again:
        return ops.expand_rows.default(x, rows.position, 0.0)
    return x.new_zeros(rows.position.size(0), x.size(1)).index_copy(0, rows.nodes.long(), x)


def expand(
    x: Tensor, rows: Rows, fill: float = 0.0, watch: Watch | None = None
) -> Tensor:
    """Rows put back among all nodes, of which others are :obj:`fill`; differentiable."""
    return x if rows.nodes is None else Expand.apply(x, rows, fill, watch)


class Expand(torch.autograd.Function):
    """Its backward takes the rows out again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Rows, fill: float, watch: Watch | None
    ) -> Tensor:
        save(ctx, rows, watch)
        return ops.expand_rows.default(x, rows.position, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, watch = saved(ctx)
        if watch is not None:
            watch.look(grad)
        return rows.of(grad), None, None, None


def take(x: Tensor, rows: Rows) -> Tensor:
    """The rows of some nodes; differentiable."""
    return x if rows.nodes is None else Take.apply(x, rows)


class Take(torch.autograd.Function):
    """Its backward puts them back: without the additions that index_select has to make."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        save(ctx, rows)
        return rows.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = saved(ctx)
        return _expanded(grad, rows, torch.is_grad_enabled()), None


def node_dropout(
    x: Tensor, p: float, seed: Tensor, nodes: Tensor | None = None
) -> Tensor:
    r"""Dropout keyed by seed, node and column, the same for a node wherever its row stands.

    .. math::
        \mathbf{y}_{r,c} = \frac{\mathbf{x}_{r,c}}{1 - p} \cdot
        [ u(\mathrm{seed}, \mathrm{nodes}_r, c) \geq p ]

    Args:
        x (Tensor): Features :math:`(n, F)`.
        p (float): Probability that an entry is dropped.
        seed (Tensor): int64 of shape :math:`(1)`, on the device of :obj:`x`.
        nodes (Tensor, optional): Which node a row is :math:`(n)`, int64. (default: :obj:`None`,
            the row itself)

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
    def forward(ctx: Any, x: Tensor, nodes: Tensor | None, seed: Tensor, p: float) -> Tensor:
        save(ctx, nodes, seed, p)
        return ops.node_dropout.default(x, nodes, seed, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nodes, seed, p = saved(ctx)
        return NodeDropout.apply(grad, nodes, seed, p), None, None, None


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
