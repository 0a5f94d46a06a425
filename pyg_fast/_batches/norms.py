"""Batch norms that leave out the rows of a padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn.norm import HeteroBatchNorm

# The rows whose mean takes the place of the padding.
_FIRST = 1024


class Level(NamedTuple):
    """The rows of a padded batch: nodes, edges or graphs."""

    is_padding: Tensor
    num_real: Tensor


class Masks(NamedTuple):
    """The levels of a padded batch. Their numbers of rows differ, and tell which level a tensor
    is of."""

    graphs: Level
    nodes: Level
    edges: Level

    @staticmethod
    def of(batch: object) -> 'Masks':
        """Those of a batch, whose rows are counted on the device."""
        masks = [getattr(batch, f'{level}_mask') for level in ('graph', 'node', 'edge')]
        return Masks(*(Level(~mask, mask.sum()) for mask in masks))


class _Masked(_BatchNorm):
    """A batch norm of a padded batch: means and variances are of its real rows."""

    _masks: Masks
    _path: str
    _seen: set[int]  # the levels that it has normalized

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        # The rows that share a channel: all but the second dimension.
        is_padding, num_real = self._find(input)
        is_padding = is_padding.view(-1, *[1] * (input.dim() - 1))
        count = num_real * (input[0, 0].numel() if input.dim() > 2 else 1)
        inputs = input, self.weight, self.bias, is_padding, count, self.eps
        if input.is_cuda and not torch.compiler.is_compiling():
            out, mean, var = _OnGpu.apply(*inputs)
        else:
            out, mean, var = _by_operations(*inputs)
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), var.detach(), count.to(var.dtype))
        return out

    def _track(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        """Updates the running statistics as torch's, on the device."""
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            unbiased = var * (total / (total - 1))
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                assert running is not None
                share: float | Tensor | None = self.momentum
                if share is None:
                    share = self.num_batches_tracked.to(running.dtype).reciprocal()
                running.mul_(1 - share).add_(new.to(running.dtype) * share)

    def _find(self, input: Tensor) -> Level:
        rows = input.size(0)
        for number, level in enumerate(self._masks):
            if rows == level.is_padding.size(0):
                if not torch.compiler.is_compiling():
                    self._seen.add(number)
                return level
        counts = [int(level.is_padding.size(0)) for level in self._masks]
        raise ValueError(
            f'batch norm {self._path!r} got {int(rows)} rows, but a captured step knows padding '
            f'only among the {counts[1]} nodes, {counts[2]} edges and {counts[0]} graphs of a '
            'batch: use a norm that does not mix rows there, such as LayerNorm, or train with '
            'plain batches'
        )


def _by_operations(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, is_padding: Tensor, count: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The normalized rows, the mean and the variance, which autograd differentiates."""
    x = input.to(_dtype_of_sums(input))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    total = count.to(x.dtype)
    # A row of the padding may hold no numbers, which gradients would spread.
    x = x.masked_fill(is_padding, 0)
    mean = x.sum(dims) / total
    # Compiled code is differentiated once. A variance does not change with the mean that it is
    # about; without that gradient, one pass over the rows makes all sums of the backward pass:
    # of gradients, and of gradients times centered rows.
    once = torch.compiler.is_compiling()
    center = mean.detach() if once else mean
    centered = x - center.view(shape)
    var = centered.masked_fill(is_padding, 0).square().sum(dims) / total
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    out = centered * scale.view(shape)
    shift = (center - mean) * scale.detach() if once else None  # 0, with the mean's gradient
    if bias is not None:
        shift = bias if shift is None else shift + bias
    if shift is not None:
        out = out + shift.view(shape)
    return out.to(input.dtype), mean, var


class _OnGpu(Function):
    """The same by the kernels of :class:`torch.nn.SyncBatchNorm`, which pass over the rows fewer
    times, and take the number of rows from the GPU."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, is_padding: Tensor,
        count: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        shape = [1, -1, *[1] * (input.dim() - 2)]
        dims = [dim for dim in range(input.dim()) if dim != 1]
        # Rows of the padding become the mean of the first rows, which sums then leave out without a
        # loss of digits: its squared distance from the mean is at most the sum of those of all real
        # rows, divided by the number of first rows.
        first = input[:_FIRST].masked_fill(is_padding[:_FIRST], 0)
        num_first = count.clamp(max=first.numel() // first.size(1))
        fill = first.sum(dims, dtype=_dtype_of_sums(input)) / num_first
        x = torch.where(is_padding, fill.to(input.dtype).view(shape), input).contiguous()
        mean, scale = torch.batch_norm_stats(x, eps)
        total = count.to(mean.dtype)
        share = (x.numel() // x.size(1) - total) / total  # of rows of the padding to others
        offset = fill.to(input.dtype) - mean
        var = (1 + share) * (scale.pow(-2) - eps - share * offset.square()).clamp(min=0)
        mean = mean - share * offset
        scale = (var + eps).rsqrt()
        ctx.eps = eps
        ctx.save_for_backward(input, x, weight, bias, is_padding, count, mean, scale)
        ctx.mark_non_differentiable(mean, var)
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        input, x, weight, bias, is_padding, count, mean, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # The gradient is differentiated, too.
            out, _, _ = _by_operations(input, weight, bias, is_padding, count, ctx.eps)
            wanted = [t for t, n in zip((input, weight, bias), needs, strict=True) if n]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(found) if n else None for n in needs), None, None, None
        grad = grad.contiguous()
        of_input: Tensor | None = None
        total, product, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, scale, weight, True, needs[1], needs[2]
        )
        if needs[0]:
            of_input = torch.batch_norm_backward_elemt(
                grad, x, mean, scale, weight, total, product, count.view(1).int()
            ).masked_fill_(is_padding, 0)
        return (
            of_input, of_weight if needs[1] else None, of_bias if needs[2] else None, None, None,
            None,
        )  # fmt: skip


def _dtype_of_sums(input: Tensor) -> torch.dtype:
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


@cache
def _masked(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    """The twin of a class. It stands behind subclasses that call their base's forward."""
    return type(cls.__name__, (cls, _Masked), {'__module__': cls.__module__})


def list_norms(*modules: object) -> dict[_BatchNorm, str]:
    """The batch norms in modules, with their paths.

    Raises:
        ValueError: If there are norms without a twin.
    """
    found: dict[_BatchNorm, str] = {}
    for module in modules:
        if not isinstance(module, Module):
            continue
        for path, each in module.named_modules():
            if isinstance(each, (SyncBatchNorm, HeteroBatchNorm)):
                raise ValueError(
                    f"'model' must not have a {type(each).__name__}, got one as {path!r}: a "
                    'captured step cannot leave the padding out of its statistics; use BatchNorm, '
                    'or train with plain batches'
                )
            if isinstance(each, _BatchNorm):
                found.setdefault(each, path)
    return found


@contextmanager
def masked(norms: dict[_BatchNorm, str], masks: Masks) -> Iterator[None]:
    """Batch norms are those of a padded batch, while the context lasts."""
    classes = {norm: type(norm) for norm in norms}
    try:
        for norm, path in norms.items():
            norm.__dict__.update(_masks=masks, _path=path, _seen=set())
            norm.__class__ = _masked(classes[norm])  # type: ignore[arg-type]
        yield
    finally:
        for norm, cls in classes.items():
            norm.__class__ = cls
            for name in ('_masks', '_path', '_seen'):
                norm.__dict__.pop(name, None)
