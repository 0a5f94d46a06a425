"""Linear maps with a bias."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._saved import Context, save, saved
from ._transforms import is_batched, transforms_active
from .column_sums import column_sums

# Numbers of a result from which on a faster sum saves more than a function in Python costs.
_MANY = 1 << 22


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.linear` for a matrix, unchecked; on CUDA the gradient of a
    bias of many rows is a sum of our own."""
    return linears(x, (weight,), (bias,))[0]


def linears(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], joined: bool = False
) -> tuple[Tensor, ...]:
    """Several maps :func:`linear` of the same features. On CUDA results that may be
    :obj:`joined` are columns of one matrix, by one product; otherwise one function adds up the
    gradients of :obj:`x`."""
    if joined and x.is_cuda and not torch.compiler.is_compiling():
        sizes = [weight.size(0) for weight in weights]
        return linear(x, torch.cat(weights), torch.cat(biases)).split(sizes, 1)
    if (
        not x.is_cuda or x.size(0) * weights[0].size(0) < _MANY
        or not any(bias.requires_grad for bias in biases)
        or not torch.is_grad_enabled() or torch.compiler.is_compiling()
        or torch.is_autocast_enabled('cuda') or transforms_active()
    ):  # fmt: skip
        return tuple(F.linear(x, *each) for each in zip(weights, biases, strict=True))
    return Linears.apply(x, *weights, *biases)


class Linears(torch.autograd.Function):
    """Its backward consists of products and sums that torch can differentiate."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        count = len(params) // 2
        weights, needs = params[:count], ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        save(
            ctx, x if True in needs[1 : count + 1] else None, weights if needs[0] else None
        )  # fmt: skip
        return tuple(F.linear(x, *each) for each in zip(weights, params[count:], strict=True))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weights = saved(ctx)
        needs, count = ctx.needs_input_grad, len(grads)
        alone = torch.is_grad_enabled() or is_batched(*[g for g in grads if g is not None])
        of_x: Tensor | None = None
        of_params: list[Tensor | None] = [None] * (2 * count)
        for k, grad in enumerate(grads):
            if grad is None:
                continue
            if weights is None:
                pass
            elif of_x is None:
                of_x = grad @ weights[k]
            elif alone:  # not in place
                of_x = of_x + grad @ weights[k]
            else:
                of_x.addmm_(grad, weights[k])
            if needs[1 + k]:
                of_params[k] = grad.t() @ x
            if needs[1 + count + k]:
                of_params[count + k] = column_sums(grad)
        return of_x, *of_params
