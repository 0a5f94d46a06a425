"""Attention of the nodes of a batch to the nodes of their own graphs."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..ops._attention import drawn_seed
from ..ops._checks import DTYPES, check_device, check_strided
from ..ops._ids import check_ids
from ..ops._numbers import acc_dtype, check_share
from ..ops._transforms import transforms_active
from . import _composed, _cuda


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: Tensor | None = None, *,
    ptr: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Scaled dot-product attention of each node to the nodes of its own graph, as in the
    `"Attention Is All You Need" <https://arxiv.org/abs/1706.03762>`_ paper.

    .. math::
        \mathbf{o}_i = \sum_{j \in \mathcal{G}(i)} \textrm{softmax}_j \left( s \cdot
        \mathbf{q}_i^{\top} \mathbf{k}_j \right) \mathbf{v}_j

    where :math:`\mathcal{G}(i)` are the nodes of the graph of :math:`i`, for each head. Graphs are
    not padded to a common size, scores are not stored, and a GPU is not waited for. Sums run in
    float32 (float64 for float64); products of float32 follow
    :func:`torch.set_float32_matmul_precision`. The gradients of a run are equal to the last bit.
    A number that is not finite changes results of its own graph alone; on a GPU those become NaN,
    also where a sum would be infinite.

    Args:
        query (Tensor): Queries :math:`(N, H, C)`, of float32, float64, float16 or bfloat16; on a
            GPU with :math:`C` up to 256 (float64: 128).
        key (Tensor): Keys :math:`(N, H, C)`.
        value (Tensor): Values :math:`(N, H, C)`.
        batch (Tensor, optional): The graph of each node :math:`(N)`, int32 or int64, in ascending
            order. Without it and :obj:`ptr` all nodes are of one graph. (default: :obj:`None`)
        ptr (Tensor, optional): In place of :obj:`batch` the first node of each graph, and
            :math:`N` behind :math:`(B + 1)`. Only by name. (default: :obj:`None`)
        dropout_p (float, optional): The probability with which dropout drops a pair of nodes and
            head, also outside of training. Only by name. (default: :obj:`0.`)
        scale (float, optional): The factor :math:`s`, if it is not :math:`1 / \sqrt{C}`.
            Only by name. (default: :obj:`None`)
        seed (Tensor, optional): One int64 number that determines the dropout, if it is not drawn
            from torch's generator. Only by name. (default: :obj:`None`)

    Returns:
        Tensor: :math:`(N, H, C)`.

    Raises:
        TypeError: If an argument is of another type or dtype.
        ValueError: If a shape or device does not fit, both :obj:`batch` and :obj:`ptr` are given,
            heads are too wide, or on a CPU :obj:`batch` is not in ascending order or :obj:`ptr`
            does not ascend from 0 to :math:`N`. On a GPU rows of such a :obj:`batch` are NaN.
        IndexError: If on a CPU :obj:`batch` holds a negative number.
    """
    _check_rows(query, key, value)
    if batch is not None and ptr is not None:
        raise ValueError("'batch' and 'ptr' say the same: give one of them")
    if ptr is not None:
        batch = _batch_of(ptr, query)
    if batch is not None:
        _check_batch(batch, query)
    check_share('dropout_p', dropout_p)
    if seed is not None:
        _check_seed(seed, query)
    if scale is None:
        scale = 1 / math.sqrt(query.size(2)) if query.size(2) else 1.0
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"'scale' must be a number, got {type(scale).__name__}")
    return attend(query, key, value, batch, float(dropout_p), float(scale), seed)


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, dropout_p: float, scale: float,
    seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`segment_attention`, unchecked."""
    if dropout_p == 1:
        return v * 0
    seed = drawn_seed(seed, dropout_p, q)
    if transforms_active() or (q.is_cuda and not _cuda.has_products()):
        return _composed.attend(q, k, v, batch, seed, dropout_p, scale)
    out: Tensor = _op(q, k, v, batch, seed, dropout_p, scale)[0]
    return out


def why_not(q: Tensor, channels: int) -> str | None:
    """Why the kernels cannot take rows of this dtype and on this device, in heads of a width."""
    if q.dtype not in DTYPES:
        return f'features are {q.dtype}'
    if not (q.is_cuda or q.is_cpu):
        return f'features are on {q.device}'
    if q.is_cuda and channels > _cuda.max_channels(q.dtype):
        return f'heads of {channels} channels'
    if q.is_cuda and not _cuda.has_products():
        return 'compute capability below 8.0'
    return None


# Checks ------------------------------------------------------------------------------------------
def _check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (('query', query), ('key', key), ('value', value)):
        check_strided(x, name)
        if x.dtype not in DTYPES or x.dtype != query.dtype:
            wanted = f'one of {DTYPES}' if name == 'query' else f"{query.dtype} as 'query' is"
            raise TypeError(f"'{name}' must be {wanted}, got {x.dtype}")
        if x.dim() != 3 or x.shape != query.shape:
            shape = '[num_nodes, heads, channels]' if name == 'query' else list(query.shape)
            raise ValueError(f"'{name}' must have shape {shape}, got {list(x.shape)}")
        check_device(x, query, name, 'query')
    most = _cuda.max_channels(query.dtype)
    if query.is_cuda and query.size(2) > most:
        raise ValueError(
            f"'query' must have at most {most} channels a head on a GPU, got {query.size(2)}: use "
            'more heads'
        )


def _check_batch(batch: Tensor, query: Tensor) -> None:
    check_ids('batch', batch, query.device)
    if batch.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"'batch' must be int32 or int64, got {batch.dtype}")
    if batch.size(0) != query.size(0):
        raise ValueError(f"'batch' must have {query.size(0)} entries, got {batch.size(0)}")


def _batch_of(ptr: Tensor, query: Tensor) -> Tensor:
    check_ids('ptr', ptr, query.device)
    if ptr.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"'ptr' must be int32 or int64, got {ptr.dtype}")
    if ptr.size(0) == 0:
        raise ValueError("'ptr' must have an entry more than there are graphs, got none")
    # A GPU would be waited for; fake tensors have no numbers.
    if ptr.is_cpu and type(ptr) is Tensor and not torch.compiler.is_compiling():
        ends = [0, *ptr.tolist(), query.size(0)]
        if ends != sorted(ends) or ends[1] != 0 or ends[-2] != ends[-1]:
            raise ValueError(
                f"'ptr' must ascend from 0 to {query.size(0)}, the number of rows of 'query'"
            )
    rows = torch.arange(query.size(0), device=ptr.device, dtype=ptr.dtype)
    return torch.searchsorted(ptr, rows, right=True)


def _check_seed(seed: Tensor, query: Tensor) -> None:
    check_ids('seed', seed, query.device)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"'seed' must be one int64 number, got {seed.numel()} of {seed.dtype}")


# The op ------------------------------------------------------------------------------------------
_library = torch.library.Library('pyg_fast', 'FRAGMENT')
_ROWS = 'Tensor query, Tensor key, Tensor value, Tensor? batch, Tensor? seed'
_NUMBERS = 'float dropout_p, float scale'
_library.define(f'segment_attention({_ROWS}, {_NUMBERS}) -> (Tensor, Tensor)')
_library.define(
    f'segment_attention_backward(Tensor grad, {_ROWS}, Tensor out, Tensor lse, {_NUMBERS}) -> '
    '(Tensor, Tensor, Tensor)'
)


def check_order_of_graphs(batch: Tensor) -> None:
    """Raises unless the nodes of each graph stand side by side."""
    if bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            "'batch' must be in ascending order: sort the nodes by their graph, as "
            'torch_geometric.data.Batch does'
        )


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None, dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if batch is not None:
        check_order_of_graphs(batch)
    if batch is not None and batch.size(0) > 0 and int(batch[0]) < 0:
        raise IndexError(f"'batch' must hold numbers of graphs from 0 on, got {int(batch[0])}")
    with torch.no_grad():
        if seed is None and q.numel() > 0:
            return _composed.run_forward(q, k, v, batch, scale)
        out = _composed.attend(q, k, v, batch, seed, dropout_p, scale)
    return out, q.new_zeros(q.shape[:2], dtype=acc_dtype(q.dtype))


def _backward_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, dropout_p: float, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch.no_grad():
        if seed is None and q.numel() > 0:
            return tuple(_composed.run_backward(grad, q, k, v, batch, out, lse, scale))
        return tuple(_composed.gradients(grad, q, k, v, batch, seed, dropout_p, scale))


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None, dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=acc_dtype(q.dtype))


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


for _name, _device, _function in (
    ('segment_attention', 'CPU', _forward_cpu), ('segment_attention', 'CUDA', _cuda.run_forward),
    ('segment_attention', 'Meta', _forward_fake),
    ('segment_attention_backward', 'CPU', _backward_cpu),
    ('segment_attention_backward', 'CUDA', _cuda.run_backward),
    ('segment_attention_backward', 'Meta', _backward_fake),
):  # fmt: skip
    _library.impl(_name, _function, _device)
_op = torch.ops.pyg_fast.segment_attention.default
_backward_op = torch.ops.pyg_fast.segment_attention_backward.default


class _Context(FunctionCtx):
    """What the backward pass gets beside the saved tensors."""

    numbers: tuple[float, float]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


def _setup_context(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout_p, scale = inputs
    ctx.numbers = dropout_p, scale
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: _Context, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, batch, seed, out, lse = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
        found = _differentiable_gradients(grad, (q, k, v), batch, seed, *ctx.numbers)
    else:
        found = _backward_op(grad, q, k, v, batch, seed, out, lse, *ctx.numbers)
    needs = ctx.needs_input_grad
    grads = (each if need else None for each, need in zip(found, needs, strict=False))
    return *grads, None, None, None, None


def _differentiable_gradients(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], batch: Tensor | None,
    seed: Tensor | None, dropout_p: float, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    views = [x.view_as(x).requires_grad_() for x in inputs]
    out = _composed.attend(views[0], views[1], views[2], batch, seed, dropout_p, scale)
    return torch.autograd.grad(out, views, grad, create_graph=True)


torch.library.register_autograd(
    'pyg_fast::segment_attention', _differentiate, setup_context=_setup_context, lib=_library
)
