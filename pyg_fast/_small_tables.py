"""Gradients of embeddings of few rows, such as kinds of bonds, in code that Inductor compiles.

Inductor adds the gradient of each row of an output to its row of the table, by an atomic. Those of
thousands of edges to a dozen rows wait for each other, and their order changes from run to run.
Here, each row of a table is a sum over all rows of the output, of those that were looked up there:
embeddings whose outputs were added share one kernel, which reads their gradient once. Partial sums
are of blocks of fixed size, so that a kernel keeps a block in registers for all of its sums,
whatever the number of rows, known or not.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OP = torch.ops.aten.embedding_dense_backward.default
# A sum for each row of a table: partial sums write at most an eighth of what was read, and at 16
# rows, atomics begin to spread out.
_MOST_ROWS = 16
# A block: Inductor keeps reductions of up to 64 numbers in registers. With two such halves, partial
# sums of 16,384 rows are added by one kernel, as Inductor splits reductions above 128 numbers.
_HALVES, _HALF = 2, 64
_DEVICES = frozenset({'cuda'})


def small_table_gradient(grad: Tensor, indices: Tensor, num_weights: int, padding: int) -> Tensor:
    r"""The gradient of the table of an embedding.

    Args:
        grad (Tensor): That of the output, of shape :math:`(*, C)`.
        indices (Tensor): The rows looked up, of shape :math:`(*)`.
        num_weights (int): The number :math:`K` of rows of the table.
        padding (int): A row without gradient; negative: none.

    Returns:
        Tensor: The gradient, of shape :math:`(K, C)`.
    """
    channels, block = grad.size(-1), _HALVES * _HALF
    rows, found = grad.reshape(-1, channels), indices.reshape(-1)
    if padding >= 0:
        found = found.masked_fill(found == padding, -1)
    if grad.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    num_rows = found.size(0)
    count = (num_rows + block - 1) // block
    missing = count * block - num_rows
    pad = torch.ops.aten.constant_pad_nd
    rows = pad(rows, [0, 0, 0, missing]).view(count, _HALVES, _HALF, channels)
    found = pad(found, [0, missing], -1).view(count, _HALVES, _HALF, 1)
    # Not a product: NaN of a row would reach all rows of the table.
    sums = [torch.where(found == k, rows, 0).sum(1).sum(1) for k in range(num_weights)]
    return torch.stack(sums, 1).sum(0).to(grad.dtype)


def _gradient(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """As of Inductor's table; sizes may be symbols."""
    is_small = isinstance(num_weights, int) and num_weights <= _MOST_ROWS
    if is_small and grad.device.type in _DEVICES and not scale_grad_by_freq:
        return small_table_gradient(grad, indices, num_weights, padding_idx)
    return _inductors_table()[_OP](grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def _inductors_table() -> Mapping[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


class _Table(dict[Any, Callable[..., Any]]):
    """Inductor's decompositions, and that of this file."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Torch 2.13 pickles the table to make a key of its cache. Not all of its functions can be
        # pickled; its options, which choose them, are in the key too.
        return _Table, ()


@contextmanager
def decompositions() -> Iterator[dict[Any, Callable[..., Any]]]:
    """The decompositions that Inductor is to use. Its caches keep programs compiled within apart
    from others: their keys know the operators, but not what becomes of them."""
    config: Any = torch.compiler.config
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with config.patch(cache_key_tag=f'{config.cache_key_tag}:{own}'):
        yield _Table({**_inductors_table(), _OP: _gradient})
