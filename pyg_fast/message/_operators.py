"""Torch's operators: which ones the parser reads, and the decompositions of others."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from . import _elementary
from ._ir import BINARY, UNARY, Refused

aten = torch.ops.aten
_prims = torch.ops.prims


def _table(names: Iterable[str]) -> dict[object, str]:
    """The overloads of torch's operators of these names."""
    table: dict[object, str] = {}
    for name in names:
        for overload in ('default', 'Tensor', 'Scalar', 'Tensor_Tensor', 'Tensor_Scalar'):
            op = getattr(getattr(aten, name, None), overload, None)
            if op is not None:
                table[op] = name
        if hasattr(_prims, name):
            table[getattr(_prims, name).default] = name
    return table


UNARY_OPS: dict[object, str] = {**_table(UNARY), aten.bitwise_not.default: 'logical_not'}
BINARY_OPS: dict[object, str] = {
    **_table(BINARY), aten.bitwise_and.Tensor: 'logical_and', aten.bitwise_or.Tensor: 'logical_or',
    aten.bitwise_xor.Tensor: 'ne',
}  # fmt: skip
WHERE = {aten.where.self, _prims.where.default}
CAST = {aten._to_copy.default, _prims.convert_element_type.default}
SAME = {
    aten.clone.default, aten.alias.default, aten.contiguous.default,
    aten.lift_fresh_copy.default,
}  # fmt: skip
# Reductions by the destination of each edge.
SCATTERS = (aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default)
VIEW = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
NOT_DECOMPOSED = {
    *UNARY_OPS, *BINARY_OPS, *SAME, *VIEW, *SCATTERS, aten.detach.default,
    aten.index_select.default, aten.index.Tensor, aten.embedding.default,
    aten.where.self, aten._to_copy.default, aten.mm.default, aten.addmm.default,
    aten.bmm.default, aten.cat.default, aten.expand.default,
    aten.permute.default, aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.sum.dim_IntList,
    aten.mean.dim, aten.amax.default, aten.amin.default, aten.full.default,
    aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int,
    aten.scalar_tensor.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default, aten.empty_like.default, aten.slice_backward.default,
    aten.select_backward.default,
    # No kernel: their decompositions have other derivatives.
    aten.special_entr.default, aten.huber_loss.default, aten.smooth_l1_loss.default,
    aten.norm.Scalar, aten.norm.ScalarOpt_dim_dtype,
    # Nor have these, whose decompositions would hide what the user wrote.
    aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.tril.default, aten.triu.default,
}  # fmt: skip
# Operators of tensors that may have the edges in another dimension than the first.
ANYWHERE = {
    *UNARY_OPS, *BINARY_OPS, *WHERE, *CAST, *SAME, *VIEW, aten.detach.default,
    aten.permute.default, aten.t.default, aten.transpose.int, aten.cat.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int, aten.sum.dim_IntList,
    aten.mean.dim, aten.amax.default, aten.amin.default,
}  # fmt: skip
DECOMPOSED: dict[OpOverload, Callable[..., object]] = {
    op: fn for op, fn in decomposition_table.items()  # type: ignore[misc]
    if op not in NOT_DECOMPOSED
}  # fmt: skip


# Torch's decompositions have the right values, but not always the right derivatives. Those below
# have: finite where torch's is, and the same at the ends of a range.


def _var_mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    mean = x.mean(dims, True)
    away = x - mean
    count = x.numel() // max(1, mean.numel()) - (1 if correction is None else correction)
    var = (away * away).sum(dims, keepdim) / max(0, count)
    return var, mean if keepdim else mean.view(var.shape)


def _var(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _var_mean(x, *args, **kwargs)[0]


def _std(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    var = _var(x, *args, **kwargs)
    zero = var == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, var).sqrt())


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = _var_mean(x, range(-len(shape), 0), correction=0, keepdim=True)
    scale = (var + eps).rsqrt()
    out = (x - mean) * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, _float(mean), _float(scale)


# No gradient flows through the largest number, which the result does not depend on.


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    score = _float(x)
    power = (score - score.amax(dim, True).detach()).exp()
    out = power * power.sum(dim, True).reciprocal()
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    score = _float(x)
    away = score - score.amax(dim, True).detach()
    out = away - away.exp().sum(dim, True).log()
    return out if half_to_float else out.to(x.dtype)


def _logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    most = x.amax(dims, True).detach()
    most = torch.where(most.abs() == math.inf, 0.0, most)
    out = (x - most).exp().sum(dims, True).log() + most
    return out if keepdim else out.squeeze(dims)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: int, channels: int, size: int,
    groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = x.reshape(rows, groups, channels // groups * size)
    out, mean, scale = _layer_norm(parts, parts.shape[2:], None, None, eps)
    out, each = out.view(x.shape), (channels, *(1,) * (x.dim() - 2))
    out = out if weight is None else out * weight.view(each)
    out = out if bias is None else out + bias.view(each)
    return out, mean.view(rows, groups), scale.view(rows, groups)


def _float(x: Tensor) -> Tensor:
    """Statistics of float16 and bfloat16 are float32."""
    return x.float() if x.element_size() == 2 else x


def _cross(a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    (ax, ay, az), (bx, by, bz) = a.unbind(dim), b.unbind(dim)
    return torch.stack([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx], dim)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    low = torch.where(scaled > threshold, threshold, scaled)
    return torch.where(scaled > threshold, x, low.exp().log1p() / beta)


def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    low = torch.where(x > 0, 0.0, x)
    return torch.where(x > 0, x * scale, (low * input_scale).expm1() * (alpha * scale))


def _hardtanh(x: Tensor, low: float = -1, high: float = 1) -> Tensor:
    return torch.where(x <= low, low, torch.where(x >= high, high, x))


def _hardsigmoid(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 6 + 0.5))


def _clamp(
    x: Tensor, low: float | Tensor | None = None, high: float | Tensor | None = None
) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise Refused('clamp by a tensor')
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


def _slice_scatter(
    x: Tensor, of: Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Tensor:  # fmt: skip
    """The result of `x[:, start:end] = of`."""
    size = x.size(dim)
    first, last, _ = slice(start, end).indices(size)
    if step != 1:
        return _write_columns(x, of, dim % x.dim(), first, step)
    before = [x.narrow(dim, 0, first)] if first > 0 else []
    after = [x.narrow(dim, last, size - last)] if last < size else []
    return torch.cat([*before, of, *after], dim) if before or after else of


def _write_columns(x: Tensor, of: Tensor, dim: int, start: int, step: int) -> Tensor:
    """The result of `x[:, start::step] = of`, if the steps divide the dimension."""
    count = of.size(dim)
    if start >= step or count * step != x.size(dim):
        raise Refused('a write into a slice with steps')
    columns = x.unflatten(dim, (count, step))
    parts = [columns.select(dim + 1, k) if k != start else of for k in range(step)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _select_scatter(x: Tensor, of: Tensor, dim: int, index: int) -> Tensor:
    index %= x.size(dim)
    return _slice_scatter(x, of.unsqueeze(dim), dim, index, index + 1)


def _copy(x: Tensor, of: Tensor, non_blocking: bool = False) -> Tensor:
    """The result of `x[...] = of`. A number is a tensor of the CPU, also beside a GPU's."""
    of = of.to(x.dtype)
    return torch.where(torch.eq(x, x), of, of) if of.dim() == 0 else of.expand(x.shape)


def _index_put(
    x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """The result of `x[mask] = number`, or of `x[index] += values`."""
    mask = indices[0]
    if accumulate and len(indices) == 1 and mask.dim() == 1 and mask.dtype != torch.bool:
        return x.index_add(0, mask, values.expand(mask.size(0), *x.shape[1:]))
    is_mask = len(indices) == 1 and mask.dtype == torch.bool
    if not is_mask or mask.shape != x.shape[: mask.dim()] or values.dim() > 0 or accumulate:
        raise Refused('aten.index_put.default has no kernel')
    mask = mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim()))
    return torch.where(mask, values.to(x.dtype), x)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    x = x.view(*(1,) * (len(repeats) - x.dim()), *x.shape)
    for dim, count in enumerate(repeats):
        if x.size(dim) == 1:
            x = x.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])
        elif count != 1:
            x = torch.cat([x] * count, dim)
    return x


DECOMPOSED |= {
    aten.linalg_vector_norm.default: _elementary.norm, aten.var_mean.correction: _var_mean,
    aten.var.correction: _var, aten.std.correction: _std,
    aten.native_layer_norm.default: _layer_norm, aten.native_group_norm.default: _group_norm,
    aten._softmax.default: _softmax, aten._log_softmax.default: _log_softmax,
    aten.logsumexp.default: _logsumexp, aten.linalg_cross.default: _cross,
    aten.softplus.default: _softplus,
    aten.elu.default: _elu, aten.hardtanh.default: _hardtanh,
    aten.celu.default: lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha),
    aten.hardsigmoid.default: _hardsigmoid, aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, low: _clamp(x, low),
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.slice_scatter.default: _slice_scatter, aten.select_scatter.default: _select_scatter,
    aten.index_put.default: _index_put,
    aten.copy.default: _copy, aten.repeat.default: _repeat,
    aten.mish.default: lambda x: x * _softplus(x).tanh(),
    aten.norm.ScalarOpt_dim: lambda x, p, dim, keepdim=False: _elementary.norm(
        x, 2 if p is None else p, dim, keepdim
    ),
    aten.prod.dim_int: _elementary.prod, aten.rrelu_with_noise.default: _elementary.rrelu,
    aten.remainder.Scalar: _elementary.remainder, aten.fmod.Scalar: _elementary.fmod,
    aten.lerp.Scalar: _elementary.lerp_by_number, aten.round.default: _elementary.round_to_even,
    aten.constant_pad_nd.default: _elementary.pad,
    **{
        getattr(aten, name).default: getattr(_elementary, name)
        for name in (
            'sinh', 'cosh', 'tan', 'asinh', 'acosh', 'atanh', 'hypot', 'logaddexp', 'logit',
            'hardswish', 'softshrink', 'hardshrink', 'trunc', 'frac', 'nan_to_num', 'sinc', 'isinf',
            'isfinite', 'flip', 'roll', 'cumsum', 'cumprod', 'diagonal', 'fmax', 'fmin',
        )
    },
}  # fmt: skip


def _views_of_copies() -> dict[object, object]:
    """The view of each operator that copies it, such as `view_copy`: torch may trace either."""
    copies = {}
    for op in NOT_DECOMPOSED:
        name, _, overload = str(op).removeprefix('aten.').partition('.')
        copy = getattr(getattr(aten, f'{name}_copy', None), overload, None)
        if copy is not None and copy not in NOT_DECOMPOSED:
            copies[copy] = op
    return copies


COPIES = _views_of_copies()
