"""A linear map of aggregated features that are computed in parts and not kept."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..sparse.operator import SparseOperator
from ._saved import Context, save, saved
from .column_sums import column_sums
from .linear_product import Plan
from .path import ALL_ROWS, Rectify, Rows, expanded
from .product import placed_product, raw_product
from .row_blocks import RowBlock, column_tiles

_MOST_BLOCKS, _FEWEST_ROWS = 16, 1 << 16


class Parts(NamedTuple):
    """How to compute a product in parts: by :obj:`blocks` of rows, or by column tiles of
    :obj:`width`, converted to :obj:`dtype`, from features that may be in host memory.
    :obj:`rectify` is applied to the result."""

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


def streamed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    root_weight: Tensor | None,
    parts: Parts,
) -> Tensor:
    r"""As :func:`~pyg_fast.ops.linear_product.linear_product`, aggregating first, but aggregated
    features exist only in parts: the backward pass computes them again.

    .. math::
        \mathbf{Y} = \sigma \left( \mathbf{M} \mathbf{X} \mathbf{W}^{\top} + \mathbf{X}
        \mathbf{W}_r^{\top} + \mathbf{b} \right)

    Differentiable once, in :obj:`x` (unless in host memory) and the weights. Unchecked.

    Args:
        x (Tensor): Features :math:`(N, F_{in})`, or only those of a path's sources; with
            :obj:`parts.width` they may be in pinned host memory.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(F_{out}, F_{in})`.
        bias (Tensor, optional): :math:`\mathbf{b}` of shape :math:`(F_{out})`.
        plan (Plan): The operator and the rows: of a path with :obj:`forward`, with a compact
            result, or of all nodes.
        root_weight (Tensor, optional): :math:`\mathbf{W}_r` of the shape of :math:`\mathbf{W}`.
        parts (Parts): How to divide the work.

    Returns:
        Tensor: :math:`\mathbf{Y}`, with a row for each destination of the plan.
    """
    return StreamedLinear.apply(x, weight, bias, root_weight, plan, parts)


class StreamedLinear(torch.autograd.Function):
    """Saves the input and, after a ReLU, the result."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root_weight: Tensor | None,
        plan: Plan,
        parts: Parts,
    ) -> Tensor:
        how = parts.rectify
        size = plan.part.graph.num_dst, weight.size(0)
        out = weight.new_zeros(size) if bias is None else bias.repeat(size[0], 1)
        for rows, columns, aggregated, root in _parts(x, plan, parts, root_weight is not None):
            out[rows].addmm_(aggregated, weight[:, columns].t())
            if root is not None and root_weight is not None:
                out[rows].addmm_(root, root_weight[:, columns].t())
            del aggregated, root  # before the next ones are made
        if how is not None:
            for rows in _slices(out.size(0)):
                out[rows] = how.of(out[rows], _nodes(plan.dst, rows, out))
        save(ctx, x, weight, root_weight, out if how is not None else None, plan, parts)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        # `once_differentiable` would leave gradients of gradients out of torch.autograd.grad.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                'a gradient with create_graph=True needs a model with checkpoint=False, features '
                'on the device and tile=None'
            )
        with torch.no_grad():
            return StreamedLinear._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, root_weight, out, plan, parts = saved(ctx)
        needs_x, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:4]
        op, how, grad_x = plan.part, parts.rectify, None

        def before(rows: slice) -> Tensor:
            """The gradient of some rows before the ReLU."""
            return grad[rows] if how is None else how.grad(grad[rows], out[rows])

        sums = [weight.new_zeros(size, dtype=torch.promote_types(weight.dtype, torch.float32))
                for size in (weight.shape, weight.shape[:1], weight.shape)]  # fmt: skip
        if needs_weight or needs_bias or needs_root:
            for rows, columns, aggregated, root in _parts(x, plan, parts, needs_root):
                for some in [rows] if parts.blocks is not None else _slices(grad.size(0)):
                    part = before(some)
                    inner = slice(some.start - rows.start, some.stop - rows.start)
                    sums[0][:, columns] += part.t() @ aggregated[inner]
                    if columns.start == 0:
                        sums[1] += column_sums(part)
                    if root is not None:
                        sums[2][:, columns] += part.t() @ root[inner]
                    del part
                del aggregated, root
        if needs_x:
            mapped = weight.new_empty(grad.size(0), weight.size(1))
            for rows in _slices(grad.size(0)):
                mapped[rows] = before(rows) @ weight
            in_place = root_weight is None and not plan.compact_in
            grad_x = placed_product(op.t(), mapped, plan.src if in_place else ALL_ROWS)
            del mapped
            if root_weight is not None:
                for rows in _slices(grad.size(0)):
                    to_root = before(rows) @ root_weight
                    if op.self_row is None:
                        grad_x[rows] += to_root
                    else:
                        grad_x.index_add_(0, op.self_row[rows], to_root)
            if not in_place and not plan.compact_in and plan.src.nodes is not None:
                grad_x = expanded(grad_x, plan.src, False)
        grads = [s.to(weight.dtype) if needs else None for s, needs in
                 zip(sums, (needs_weight, needs_bias, needs_root), strict=True)]  # fmt: skip
        return grad_x, *grads, None, None


def aggregated_by_tiles(
    x: Tensor, plan: Plan, width: int, with_root: bool
) -> tuple[Tensor, Tensor | None]:
    """The aggregated features and, if wanted, those of the destinations themselves, from tiles of
    :obj:`width` columns; no gradient."""
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
    every = slice(0, op.graph.num_dst)
    if parts.blocks is not None:
        sent = x if plan.compact_in else plan.src.of(x)
        for block in parts.blocks:
            part = block.of(op)
            rows, columns = slice(block.start, block.stop), slice(0, x.size(1))
            yield _Part(rows, columns, raw_product(part, sent), _root(sent, part, with_root))
        return
    assert parts.width is not None
    nodes = None if plan.compact_in else plan.src.nodes
    for start, stop, tile in column_tiles(x, op.graph.col.device, parts.width, nodes):
        tile = tile.to(parts.dtype)
        yield _Part(every, slice(start, stop), raw_product(op, tile), _root(tile, op, with_root))


def _root(x: Tensor, op: SparseOperator, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    return x if op.self_row is None else x.index_select(0, op.self_row)


def _slices(num_rows: int) -> list[slice]:
    step = rows_of_block(num_rows)
    return [slice(k, min(k + step, num_rows)) for k in range(0, num_rows, step)]


def _nodes(dst: Rows, rows: slice, on: Tensor) -> Tensor:
    """The nodes of some rows of the result."""
    if dst.nodes is None:
        return torch.arange(rows.start, rows.stop, device=on.device)
    return dst.nodes[rows]
