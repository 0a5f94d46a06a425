"""Gathers the features of a mini-batch from device and host memory."""

import torch
from torch import Tensor

from ._checks import check_strided
from ._ids import check_ids, check_range, is_readable
from ._library import fake, ops, reference
from ._lifetime import keep_until_read


def gather_rows(
    x: Tensor,
    index: Tensor,
    *,
    match: Tensor | None = None,
    previous: Tensor | None = None,
    cache_position: Tensor | None = None,
    cache: Tensor | None = None,
    counter: Tensor | None = None,
) -> Tensor:
    r"""Gathers rows that are already on the device from there, and only the others from :obj:`x`,
    as in the `"FastGL: A GPU-Efficient Framework for Accelerating Sampling-Based GNN Training at
    Large Scale" <https://arxiv.org/abs/2409.14939>`_ paper.

    .. math::
        \textrm{out}_i = \begin{cases}
            \textrm{previous}_{\textrm{match}_i} & \textrm{if } \textrm{match}_i \textrm{ is a row
            of it, else} \\
            \textrm{cache}_{\textrm{cache\_position}_{\textrm{index}_i}} & \textrm{if that is a row
            of it, else} \\
            \mathbf{x}_{\textrm{index}_i} &
        \end{cases}

    If :obj:`x` is in pinned host memory and :obj:`index` on a GPU, one kernel reads the rows over
    the bus, without a copy on the host. Rows are copied unchanged; there is no gradient.

    The caller may drop an :obj:`x` in host memory after the call: it is kept alive until the GPU
    has read it, and that of the last call until the next. A write to it before the GPU has read it
    may show up in the result. During a CUDA graph capture and in compiled code nothing is kept:
    there the caller must keep :obj:`x`, for a CUDA graph as long as it is replayed.

    Args:
        x (Tensor): Features :math:`(N, *)`, of any dtype: on the device of :obj:`index`, or for a
            GPU in pinned host memory, contiguous.
        index (Tensor): The rows to gather :math:`(n)`, of any integer dtype.
        match (Tensor, optional): Rows of :obj:`previous`, as returned by :func:`match`
            :math:`(n)`, int64. (default: :obj:`None`)
        previous (Tensor, optional): Rows gathered before :math:`(m, *)`.
            (default: :obj:`None`)
        cache_position (Tensor, optional): The row of :obj:`cache` with each row of :obj:`x`, or -1
            :math:`(N)`, int32 or int64. (default: :obj:`None`)
        cache (Tensor, optional): Cached rows :math:`(c, *)`. (default: :obj:`None`)
        counter (Tensor, optional): Three int64 entries, to which the numbers of rows from :obj:`x`,
            :obj:`previous` and :obj:`cache` are added. (default: :obj:`None`)

    Returns:
        Tensor: :math:`(n, *)`, of the dtype of :obj:`x`, on the device of :obj:`index`.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape or a device does not fit, :obj:`x` is in host memory that is not
            pinned, or only one of two tensors that belong together is given.
        IndexError: On a CPU, if an index is negative or too large. On CUDA the check would
            synchronise and is skipped; such a row is zero.
    """
    check_ids('index', index)
    x = _check_features(x, index.device)
    if (match is None) != (previous is None):
        raise ValueError("'match' and 'previous' must be given together, got one of them")
    if (cache_position is None) != (cache is None):
        raise ValueError("'cache_position' and 'cache' must be given together, got one of them")
    if match is not None and previous is not None:
        _check_match(match, index)
        previous = _check_rows('previous', previous, x, index.device)
    if cache_position is not None and cache is not None:
        _check_cache_position(cache_position, x.size(0), index.device)
        cache = _check_rows('cache', cache, x, index.device)
    if counter is not None:
        _check_counter(counter, index.device)
    if not index.is_cuda:
        check_range('index', index, x.size(0))
    if index.dtype not in (torch.int32, torch.int64):
        index = index.long()
    out = ops.gather_rows.default(x, index, match, previous, cache_position, cache, counter)
    if x.device != index.device:
        keep_until_read(index.device, x)
    return out


def _check_features(x: Tensor, device: torch.device) -> Tensor:
    check_strided(x, 'x')
    if x.dim() == 0:
        raise ValueError("'x' must have at least one dimension, got none")
    x = x.detach()
    if x.device == device:
        return x.contiguous()
    if not is_readable(x, device):
        raise ValueError(
            f"'x' must be on {device}, or for a GPU in pinned host memory, got {x.device}"
        )
    if not x.is_contiguous():
        raise ValueError(
            f"'x' must be contiguous in host memory, got shape {list(x.shape)} with stride "
            f'{list(x.stride())}'
        )
    return x


def _check_match(match: Tensor, index: Tensor) -> None:
    check_ids('match', match, index.device)
    if match.dtype != torch.int64:
        raise TypeError(f"'match' must be int64, got {match.dtype}")
    if match.shape != index.shape:
        raise ValueError(f"'match' must have shape {list(index.shape)}, got {list(match.shape)}")


def _check_cache_position(position: Tensor, num_rows: int, device: torch.device) -> None:
    check_ids('cache_position', position, device)
    if position.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"'cache_position' must be int32 or int64, got {position.dtype}")
    if position.numel() != num_rows:
        raise ValueError(f"'cache_position' must have {num_rows} entries, got {position.numel()}")


def _check_counter(counter: Tensor, device: torch.device) -> None:
    check_ids('counter', counter, device)
    if counter.dtype != torch.int64:
        raise TypeError(f"'counter' must be int64, got {counter.dtype}")
    if counter.shape != (3,) or not counter.is_contiguous():
        raise ValueError(
            f"'counter' must have shape [3] and be contiguous, got {list(counter.shape)} with "
            f'stride {list(counter.stride())}'
        )


def _check_rows(name: str, rows: Tensor, x: Tensor, device: torch.device) -> Tensor:
    """Checks rows on the device that are like those of x."""
    if not isinstance(rows, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(rows).__name__}")
    if rows.dtype != x.dtype or rows.layout != torch.strided:
        raise TypeError(f"'{name}' must be {x.dtype} as 'x', got {rows.dtype}, {rows.layout}")
    if rows.dim() == 0 or rows.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"'{name}' must have rows of shape {list(x.shape[1:])} as 'x', got {list(rows.shape)}"
        )
    if rows.device != device:
        raise ValueError(f"'{name}' must be on {device}, got {rows.device}")
    return rows.detach().contiguous()


@fake('gather_rows')
def _gather_rows_fake(x: Tensor, index: Tensor) -> Tensor:
    return index.new_empty(index.size(0), *x.shape[1:], dtype=x.dtype)


@reference('gather_rows')
def _gather_rows_reference(
    x: Tensor,
    index: Tensor,
    match: Tensor | None,
    previous: Tensor | None,
    cache_position: Tensor | None,
    cache: Tensor | None,
    counter: Tensor | None,
) -> Tensor:
    rows, index = [], index.long()
    for i, node in enumerate(index.tolist()):
        k = -1 if match is None else int(match[i])
        c = -1 if cache_position is None else int(cache_position[node])
        if previous is not None and 0 <= k < previous.size(0):
            rows.append((previous[k], 1))
        elif cache is not None and 0 <= c < cache.size(0):
            rows.append((cache[c], 2))
        else:
            rows.append((x[node].to(index.device), 0))
    if counter is not None:
        counter += index.new_tensor([sum(b == a for _, b in rows) for a in range(3)])
    out = x.new_empty(index.size(0), *x.shape[1:], device=index.device)
    return torch.stack([row for row, _ in rows]) if rows else out
