"""A linear map and a product with a sparse operator as one autograd function: a layer's body."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sparse.operator import SparseOperator
from ._library import ops
from ._saved import Context, save, saved
from .column_sums import column_sums
from .path import ALL_ROWS, Rows, Watch, expanded, no_result_in_place
from .product import placed_product, product, raw_product


class Plan(NamedTuple):
    """The edges and rows of a layer.

    :obj:`part` is the operator of the backward pass, between the rows :obj:`src` and :obj:`dst`:
    that of all nodes, or an execution path's part of it. :obj:`whole` is the operator of all nodes
    if the forward pass needs it in addition to a part. Inputs and outputs have a row per node
    unless they are :obj:`compact`; :obj:`fill` is the value of rows that are not computed, and
    :obj:`watch` checks their gradients. :obj:`out_acc` as in :func:`~pyg_fast.ops.product.product`.
    """

    part: SparseOperator
    src: Rows = ALL_ROWS
    dst: Rows = ALL_ROWS
    whole: SparseOperator | None = None
    compact_in: bool = False
    compact_out: bool = False
    fill: float = 0.0
    out_acc: bool = False
    watch: Watch | None = None


class LinearAggregation(NamedTuple):
    """What a layer is: a linear map around an aggregation. :func:`linear_product` computes it."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    plan: Plan
    root_weight: Tensor | None = None


def linear_product(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plan: Plan,
    root_weight: Tensor | None = None,
) -> Tensor:
    r"""Maps features linearly and aggregates them, in the order that moves fewer features.

    .. math::
        \mathbf{Y} = \mathbf{M} \mathbf{X} \mathbf{W}^{\top} + \mathbf{X} \mathbf{W}_r^{\top} +
        \mathbf{b}

    Both orders are equal up to rounding. The choice also counts the backward pass, which needs no
    aggregation if the forward pass aggregates first and :obj:`x` takes no gradient. Only the rows
    :obj:`plan.dst` of the gradient are read; others count as zero. Differentiable in all tensors
    except those of the plan, any number of times. Unchecked.

    Args:
        x (Tensor): Features :math:`(N, F_{in})`, or only those of a path's sources.
        weight (Tensor, optional): :math:`\mathbf{W}` of shape :math:`(F_{out}, F_{in})`;
            :obj:`None` for the identity.
        bias (Tensor, optional): :math:`\mathbf{b}` of shape :math:`(F_{out})`.
        plan (Plan): The operator :math:`\mathbf{M}` and the rows.
        root_weight (Tensor, optional): :math:`\mathbf{W}_r` of the shape of :math:`\mathbf{W}`.
            (default: :obj:`None`, zero)

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(N, F_{out})`, or only the rows of the path's
        destinations.
    """
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, root_weight, plan, (False, False))[0]
    return LinearProduct.apply(x, weight, bias, root_weight, plan)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
    plan: Plan,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None]:
    """The result, and the aggregated features if aggregation came first."""
    op = plan.part if plan.whole is None else plan.whole
    sent = x if plan.compact_in or plan.whole is not None else plan.src.of(x)
    aggregated = None
    # Under autocast the linear map runs in float16 or bfloat16.
    fewer = plan.whole is None and op.graph.num_dst < op.graph.num_src
    if weight is not None and not plan.out_acc and aggregates_first(weight, *needs, fewer):
        aggregated = raw_product(op, sent)
        out = F.linear(aggregated, weight, bias)
    else:
        mapped = sent if weight is None else F.linear(sent, weight)
        out = raw_product(op, mapped, bias, plan.out_acc)
    if root_weight is not None:
        root = sent if plan.whole is not None else _root(sent, plan.part)
        if not no_result_in_place() and _adds_in_place(out, root, root_weight):
            out.addmm_(root, root_weight.t())
        else:
            out = torch.addmm(out, root, root_weight.t())
    if plan.whole is None and not plan.compact_out and plan.dst.position is not None:
        out = ops.expand_rows.default(out, plan.dst.position, plan.fill)
    return out, aggregated


class LinearProduct(torch.autograd.Function):
    """Its backward consists of products, so it is differentiable."""

    # One argument for the plan: torch.compile rejects a tensor that is passed twice.
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        root_weight: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        out, aggregated = _forward(x, weight, bias, root_weight, plan, (needs_x, needs_weight))
        ctx.first, ctx.has_whole = aggregated is not None, plan.whole is not None
        ctx.compact = plan.compact_in, plan.compact_out
        # Save only what the backward pass reads: the part, and on a path its rows.
        rows = () if plan.dst is ALL_ROWS else (plan.src, plan.dst, plan.watch)
        kept = aggregated if needs_weight else None
        save(ctx, x, weight, root_weight, kept, plan.part, *rows)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, root_weight, aggregated, op, *rows = saved(ctx)
        src, dst, watch = rows or (ALL_ROWS, ALL_ROWS, None)
        compact_in, compact_out = ctx.compact
        needs_x, needs_weight, needs_bias, needs_root, _ = ctx.needs_input_grad
        if not compact_out:
            if watch is not None:
                watch.look(grad)
            grad = dst.of(grad)
        # A sum that is the gradient itself writes its rows among those of all nodes.
        is_sum = (ctx.first or weight is None) and root_weight is None and grad.dtype == x.dtype
        in_place = is_sum and not compact_in
        to = src if in_place else ALL_ROWS
        grad_x: Any = None
        grad_weight = grad_root = None

        def sent() -> Tensor:
            return x if compact_in else src.of(x)

        if ctx.first:
            if needs_weight:
                if torch.is_grad_enabled():  # create_graph=True
                    aggregated = product(op, sent())
                elif ctx.has_whole:
                    aggregated = dst.of(aggregated)
                grad_weight = grad.t() @ aggregated
            if needs_x:
                grad_x = placed_product(op.t(), grad @ weight, to)
        elif needs_x or needs_weight:
            mapped = placed_product(op.t(), grad, to)
            if mapped.dtype != x.dtype:
                mapped = mapped.to(x.dtype)
            if needs_weight:
                grad_weight = mapped.t() @ sent()
            if needs_x:
                grad_x = mapped if weight is None else mapped @ weight
        if root_weight is not None:
            if needs_root:
                grad_root = grad.t() @ (_root(x, op) if compact_in else dst.of(x))
            if needs_x and (
                op.self_row is None and not torch.is_grad_enabled()
                and _adds_in_place(grad_x, grad, root_weight)
            ):  # fmt: skip
                grad_x.addmm_(grad, root_weight)
            elif needs_x:
                to_root = grad @ root_weight
                if torch.is_grad_enabled():  # create_graph=True
                    row = op.self_row
                    grad_x = grad_x + to_root if row is None else grad_x.index_add(0, row, to_root)
                elif op.self_row is None:
                    grad_x.add_(to_root)
                else:
                    grad_x.index_add_(0, op.self_row, to_root)
        if needs_x and not in_place and not compact_in and src.nodes is not None:
            grad_x = expanded(grad_x, src, torch.is_grad_enabled())
        grad_bias = column_sums(grad) if needs_bias else None
        return grad_x, grad_weight, grad_bias, grad_root, None


def _adds_in_place(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether torch adds a product to a result in place as it would to a new one."""
    same = out.dtype == a.dtype == b.dtype
    return same and not torch.is_autocast_enabled(out.device.type)


def _root(sent: Tensor, op: SparseOperator) -> Tensor:
    """The rows of the destinations, taken from those of the sources."""
    return sent if op.self_row is None else sent.index_select(0, op.self_row)


def takes_gradient(t: Tensor) -> bool:
    """Whether the backward pass computes the gradient of a tensor."""
    return torch.is_grad_enabled() and t.requires_grad


def reads_transpose(x: Tensor, weight: Tensor) -> bool:
    """Whether the backward pass of the whole operator reads its transpose."""
    needs_x, needs_weight = takes_gradient(x), takes_gradient(weight)
    return needs_x or (needs_weight and not aggregates_first(weight, False, needs_weight))


def aggregates_first(
    weight: Tensor, needs_x: bool, needs_weight: bool, fewer_rows: bool = False
) -> bool:
    """Whether aggregating before the linear map moves fewer features, given the required gradients;
    with :obj:`fewer_rows` also if it moves as many, as it then maps and keeps fewer rows. If so,
    and :obj:`x` needs no gradient, the backward pass reads no transpose."""
    first = weight.size(1) * (1 + needs_x)
    last = weight.size(0) * (1 + (needs_x or needs_weight))
    return first < last or (fewer_rows and first == last)
