"""A linear map and a product with a sparse operator as one autograd function: a layer's body."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sparse.operator import SparseOperator
from ._library import ops
from ._saved import Context, save, saved
from .column_sums import column_sums
from .path import ALL_ROWS, Rectify, Rows, Watch, expanded, no_result_in_place, number_of
from .product import placed_product, product, raw_product
from .row_blocks import RowBlock, column_tiles

_MOST_BLOCKS, _FEWEST_ROWS = 16, 1 << 16


class Parts(NamedTuple):
    """How to compute a product in parts, aggregating first: by :obj:`blocks` of rows, or by column
    tiles of :obj:`width`, converted to :obj:`dtype`, from features that may be in host memory.
    Aggregated features exist only in parts; the backward pass computes them again, and is
    differentiable no further. :obj:`rectify` is applied to the result."""

    blocks: tuple[RowBlock, ...] | None
    width: int | None
    dtype: torch.dtype
    rectify: Rectify | None


class _Part(NamedTuple):
    rows: slice
    columns: slice
    aggregated: Tensor
    root: Tensor | None


def rows_of_block(num_rows: int) -> int:
    """The number of rows of a block for a result with :obj:`num_rows` rows."""
    return max(_FEWEST_ROWS, -(-num_rows // _MOST_BLOCKS))


class Plan(NamedTuple):
    """The edges and rows of a layer.

    :obj:`part` is the operator of the backward pass, between the rows :obj:`src` and :obj:`dst`:
    that of all nodes, or an execution path's part of it; :obj:`None` if the features of all nodes
    are a constant that is aggregated already. :obj:`whole` is the operator of all nodes if the
    forward pass needs it in addition to a part. Inputs and outputs have a row per node unless they
    are :obj:`compact`; rows that are not computed are :func:`number_of` :obj:`fill`, and
    :obj:`watch` checks their gradients. :obj:`out_acc` as in
    :func:`~pyg_fast.ops.product.product`. With :obj:`parts` the operator is that of all nodes, or
    of a path with :obj:`forward` and a compact result.
    """

    part: SparseOperator | None
    src: Rows = ALL_ROWS
    dst: Rows = ALL_ROWS
    whole: SparseOperator | None = None
    compact_in: bool = False
    compact_out: bool = False
    fill: float | None = None
    out_acc: bool = False
    watch: Watch | None = None
    parts: Parts | None = None


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

    and, with :obj:`plan.parts`, a ReLU and dropout if wanted. Both orders are equal up to rounding.
    The choice also counts the backward pass, which needs no aggregation if the forward pass
    aggregates first and :obj:`x` takes no gradient. Only the rows :obj:`plan.dst` of the gradient
    are read; others count as zero. Differentiable in all tensors except those of the plan, any
    number of times (in :obj:`plan.parts` once). Unchecked.

    Args:
        x (Tensor): Features :math:`(N, F_{in})`, or only those of a path's sources; in tiles of
            columns they may be in pinned host memory.
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
    if plan.parts is not None:
        assert weight is not None
        return _forward_in_parts(x, weight, bias, root_weight, plan, plan.parts), None
    if plan.part is None:
        assert weight is not None
        return F.linear(x, weight, bias), x
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
        out = ops.expand_rows.default(out, plan.dst.position, number_of(plan.fill, out.dtype))
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
        is_constant = plan.part is None
        has_whole = is_constant or plan.whole is not None
        ctx.order = aggregated is not None, has_whole, plan.parts is not None
        ctx.compact = plan.compact_in, plan.compact_out
        if plan.parts is not None:
            save(ctx, x, weight, root_weight, out if plan.parts.rectify is not None else None, plan)
            return out
        # Save only what the backward pass reads: the part, and on a path its rows.
        dst = Rows(plan.dst.nodes, None)
        rows = () if plan.dst is ALL_ROWS else (plan.src, dst, plan.watch)
        kept = aggregated if needs_weight else None
        save(ctx, x, None if is_constant else weight, root_weight, kept, plan.part, *rows)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, has_whole, in_parts = ctx.order
        if in_parts:
            return _backward_in_parts(ctx, grad)
        x, weight, root_weight, aggregated, op, *rows = saved(ctx)
        src, dst, watch = rows or (ALL_ROWS, ALL_ROWS, None)
        compact_in, compact_out = ctx.compact
        needs_x, needs_weight, needs_bias, needs_root, _ = ctx.needs_input_grad
        if not compact_out:
            if watch is not None:
                watch.look(grad)
            grad = dst.of(grad)
        # A sum that is the gradient itself writes its rows among those of all nodes.
        is_sum = (first or weight is None) and root_weight is None and grad.dtype == x.dtype
        in_place = is_sum and not compact_in
        to = src if in_place else ALL_ROWS
        grad_x: Any = None
        grad_weight = grad_root = None

        def sent() -> Tensor:
            return x if compact_in else src.of(x)

        if first:
            if needs_weight:
                if needs_x and torch.is_grad_enabled():  # create_graph=True
                    aggregated = product(op, sent())
                elif has_whole:
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


def _forward_in_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor | None,
    plan: Plan,
    parts: Parts,
) -> Tensor:
    """The result, of which a ReLU keeps the sign that the backward pass reads."""
    how, (op, *_) = parts.rectify, plan
    assert op is not None
    size = op.graph.num_dst, weight.size(0)
    out = weight.new_zeros(size) if bias is None else bias.repeat(size[0], 1)
    for rows, columns, aggregated, root in _parts(x, plan, parts, root_weight is not None):
        out[rows].addmm_(aggregated, weight[:, columns].t())
        if root is not None and root_weight is not None:
            out[rows].addmm_(root, root_weight[:, columns].t())
        del aggregated, root  # before the next ones are made
    if how is not None:
        for rows in _slices(out.size(0)):
            out[rows] = how.of(out[rows], _nodes(plan.dst, rows, out))
    return out


def _backward_in_parts(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    # `once_differentiable` would leave gradients of gradients out of torch.autograd.grad.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            'a gradient with create_graph=True needs a model with checkpoint=False, features '
            'on the device and tile=None'
        )
    x, weight, root_weight, out, plan = saved(ctx)
    how = plan.parts.rectify

    def before(rows: slice) -> Tensor:
        """The gradient of some rows before the ReLU."""
        return grad[rows] if how is None else how.grad(grad[rows], out[rows])

    needs_x, *needs = ctx.needs_input_grad[:4]
    grad_x = None
    sums: Sequence[Tensor | None] = (None, None, None)
    with torch.no_grad():
        if any(needs):
            sums = _sums_in_parts(x, weight, plan, before, needs[2])
        if needs_x:
            grad_x = _grad_x_in_parts(weight, root_weight, plan, before)
    return grad_x, *(s if wanted else None for s, wanted in zip(sums, needs, strict=True)), None


def _sums_in_parts(
    x: Tensor, weight: Tensor, plan: Plan, before: Callable[[slice], Tensor], with_root: bool
) -> list[Tensor]:
    """The gradients of the weight, the bias and the root weight."""
    assert plan.parts is not None
    sums = [weight.new_zeros(size, dtype=torch.promote_types(weight.dtype, torch.float32))
            for size in (weight.shape, weight.shape[:1], weight.shape)]  # fmt: skip
    for rows, columns, aggregated, root in _parts(x, plan, plan.parts, with_root):
        for some in [rows] if plan.parts.blocks is not None else _slices(rows.stop):
            part = before(some)
            inner = slice(some.start - rows.start, some.stop - rows.start)
            sums[0][:, columns] += part.t() @ aggregated[inner]
            if columns.start == 0:
                sums[1] += column_sums(part)
            if root is not None:
                sums[2][:, columns] += part.t() @ root[inner]
            del part
        del aggregated, root
    return [s.to(weight.dtype) for s in sums]


def _grad_x_in_parts(
    weight: Tensor, root_weight: Tensor | None, plan: Plan, before: Callable[[slice], Tensor]
) -> Tensor:
    """The gradient of the features."""
    op = plan.part
    assert op is not None
    blocks = _slices(op.graph.num_dst)
    mapped = weight.new_empty(op.graph.num_dst, weight.size(1))
    for rows in blocks:
        mapped[rows] = before(rows) @ weight
    in_place = root_weight is None and not plan.compact_in
    grad_x = placed_product(op.t(), mapped, plan.src if in_place else ALL_ROWS)
    del mapped
    if root_weight is not None:
        for rows in blocks:
            to_root = before(rows) @ root_weight
            if op.self_row is None:
                grad_x[rows] += to_root
            else:
                grad_x.index_add_(0, op.self_row[rows], to_root)
    if not in_place and not plan.compact_in and plan.src.nodes is not None:
        grad_x = expanded(grad_x, plan.src, False)
    return grad_x


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


def aggregated_by_tiles(
    x: Tensor, plan: Plan, width: int, with_root: bool
) -> tuple[Tensor, Tensor | None]:
    """The aggregated features and, if wanted, those of the destinations themselves, from tiles of
    :obj:`width` columns; no gradient."""
    assert plan.part is not None
    graph = plan.part.graph
    out = x.new_empty(graph.num_dst, x.size(1), device=graph.col.device)
    roots = torch.empty_like(out) if with_root else None
    parts = Parts(None, width, x.dtype, None)
    for _, columns, aggregated, root in _parts(x, plan, parts, with_root):
        out[:, columns] = aggregated
        if roots is not None and root is not None:
            roots[:, columns] = root
    return out, roots


def _parts(x: Tensor, plan: Plan, parts: Parts, with_root: bool) -> Iterator[_Part]:
    op = plan.part
    assert op is not None
    every = slice(0, op.graph.num_dst)
    if parts.blocks is not None:
        sent = x if plan.compact_in else plan.src.of(x)
        for block in parts.blocks:
            part = block.of(op)
            rows, columns = slice(block.start, block.stop), slice(0, x.size(1))
            root = _root(sent, part) if with_root else None
            yield _Part(rows, columns, raw_product(part, sent), root)
        return
    assert parts.width is not None
    nodes = None if plan.compact_in else plan.src.nodes
    for start, stop, tile in column_tiles(x, op.graph.col.device, parts.width, nodes):
        tile = tile.to(parts.dtype)
        root = _root(tile, op) if with_root else None
        yield _Part(every, slice(start, stop), raw_product(op, tile), root)


def _slices(num_rows: int) -> list[slice]:
    step = rows_of_block(num_rows)
    return [slice(k, min(k + step, num_rows)) for k in range(0, num_rows, step)]


def _nodes(dst: Rows, rows: slice, on: Tensor) -> Tensor:
    """The nodes of some rows of the result."""
    if dst.nodes is None:
        return torch.arange(rows.start, rows.stop, device=on.device)
    return dst.nodes[rows]
