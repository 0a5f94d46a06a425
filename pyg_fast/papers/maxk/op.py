"""The k largest entries of each row."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops._checks import check_features
from ...ops._library import fake, ops, reference
from ...ops._numbers import check_flag
from ...ops._saved import Context, save, saved
from ...ops._transforms import transforms_active
from ...ops.cbsr import CBSR, ToDense, check_k, column_dtype


def maxk(x: Tensor, k: int, balanced: bool = False) -> CBSR:
    r"""Keeps the :math:`k` largest entries of each row: the nonlinearity of the `"MaxK-GNN"
    <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        h(\mathbf{x})_f = \begin{cases} x_f & \text{if } f \in \mathrm{top}_k(\mathbf{x}) \\
        0 & \text{otherwise} \end{cases}

    Exactly :math:`k` entries of a row are kept: of equal entries that of the lowest column; NaN
    counts as larger than any number. Deterministic, and differentiable any number of times: only
    the kept entries get a gradient.

    Args:
        x (Tensor): Features :math:`(N, F)`, float32, float64, float16 or bfloat16.
        k (int): Entries to keep of each row, :math:`1 \leq k \leq F`.
        balanced (bool): A different nonlinearity: keeps the largest entry of each of the :math:`k`
            groups of columns that are equal modulo :math:`k` (about :math:`F / k` columns each).
            This spreads the entries evenly over the columns. (default: :obj:`False`)

    Returns:
        CBSR: The kept entries and their columns, :math:`(N, k)` each.

    Raises:
        TypeError: If :obj:`x` is not a tensor of a supported dtype, or :obj:`k` not an integer.
        ValueError: If :obj:`x` is not a matrix, or :obj:`k` not within :math:`1, \ldots, F`.
    """
    check_features(x, 'x')
    check_k(k, x.size(1))
    check_flag('balanced', balanced)
    if transforms_active():
        values, columns = _maxk_reference(x, k, balanced)
        return CBSR._of(values.to(x.dtype), columns, x.size(1))
    values, columns = _MaxK.apply(x, k, bool(balanced))
    return CBSR._of(values, columns, x.size(1))


class _MaxK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, k: int, balanced: bool) -> tuple[Tensor, Tensor]:
        values, columns = ops.maxk(x, k, balanced)
        save(ctx, columns, x.size(1))
        ctx.mark_non_differentiable(columns)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # Allocate no zeros for the gradient of columns.
        return values, columns

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        columns, num_columns = saved(ctx)
        return ToDense.apply(grad, columns, num_columns), None, None


@fake('maxk')
def _maxk_fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.size(0), k),
        x.new_empty(x.size(0), k, dtype=column_dtype(x.size(1))),
    )


@reference('maxk')
def _maxk_reference(x: Tensor, k: int, balanced: bool) -> tuple[Tensor, Tensor]:
    """Entries in ascending order of columns; the order of the kernels differs."""
    x = x.double()
    # Map to one zero and one NaN: a sort on CUDA orders those of different sign.
    alike = torch.where(x.isnan(), float('nan'), x + 0.0)
    # A stable sort in descending order puts NaN first, and the lowest column first among equals.
    order = alike.sort(dim=1, descending=True, stable=True)[1]
    if balanced:
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(x.size(1), device=x.device).expand_as(order)
        )
        groups = pad(rank, (0, -x.size(1) % k), value=x.size(1)).unflatten(1, (-1, k))
        columns = groups.argmin(1) * k + torch.arange(k, device=x.device)
    else:
        columns = order[:, :k]
    columns = columns.sort(1)[0]
    return x.gather(1, columns), columns.to(column_dtype(x.size(1)))
