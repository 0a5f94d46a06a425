"""The attention within graphs in torch's operators, graphs of one size at once: on a CPU, and where
gradients are differentiated again. It reads the sizes of graphs on the host."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops._attention import mixed
from ..ops._numbers import acc_dtype

# Pairs of rows, of all heads, whose scores are in memory at once.
_MOST_PAIRS = 2**20
_WORD = 0xFFFFFFFF
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def threshold_of(dropout_p: float) -> int:
    """Dropout drops pairs whose words, of 31 bits, are below it."""
    return min(int(dropout_p * 2**31), 2**31 - 1)


class _Block(NamedTuple):
    """Rows :obj:`first` to :obj:`stop`, of graphs of :obj:`size` rows each."""

    first: int
    stop: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        """Its rows of each head :math:`(B, H, n, C)`, as a view."""
        rows = x[self.first : self.stop]
        return rows.unflatten(0, (-1, self.size)).transpose(1, 2)

    def at_once(self, x: Tensor) -> Tensor:
        """:meth:`of`, by one operation without a gradient."""
        (_, heads, channels), (step, of_head, of_channel) = x.shape, x.stride()
        return x.as_strided(
            ((self.stop - self.first) // self.size, heads, self.size, channels),
            (self.size * step, of_head, step, of_channel),
            x.storage_offset() + self.first * step,
        )


class Sizes:
    """The rows of a batch by the size of their graphs, in blocks of one size.

    Args:
        batch: The graph of each row, ascending; one graph if it is None.
        num_rows: The number of rows.
    """

    def __init__(self, batch: Tensor | None, num_rows: int) -> None:
        self.order: Tensor | None = None  # the rows, unless they lie in this order
        self._back: Tensor | None = None
        if batch is None or num_rows == 0:
            self.blocks = [_Block(0, num_rows, num_rows)] if num_rows else []
            return
        counts = torch.unique_consecutive(batch, return_counts=True)[1]
        sizes, of_graphs = torch.unique(counts.cpu(), return_counts=True)
        ends = [0, *(sizes * of_graphs).cumsum(0).tolist()]
        self.blocks = [
            _Block(*pair, size) for pair, size in zip(pairwise(ends), sizes.tolist(), strict=True)
        ]
        if len(self.blocks) > 1:
            of_rows = counts.repeat_interleave(counts, output_size=num_rows)
            self.order = of_rows.argsort(stable=True)
            self._back = torch.empty_like(self.order)
            self._back[self.order] = torch.arange(num_rows, device=batch.device)

    def sort(self, x: Tensor) -> Tensor:
        """Rows in the order of blocks, with the numbers of each side by side."""
        x = x if self.order is None else x[self.order]
        return x if x.stride(-1) == 1 else x.contiguous()

    def unsort(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The rows of blocks :math:`(B, H, n, *)` in the order of the batch."""
        if not parts:
            return like.new_empty(0, *like.shape[1:])
        rows = [x.transpose(1, 2).flatten(0, 1) for x in parts]
        out = rows[0] if len(rows) == 1 else torch.cat(rows)
        return (out if self._back is None else out[self._back]).to(like.dtype)


# By torch's kernels -------------------------------------------------------------------------------
def run_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The results, and for each block the logarithms of the sums of its rows :math:`(B, H, n)`, as
    a matrix :math:`(N, H)`."""
    sizes = Sizes(batch, q.size(0))
    rows = [sizes.sort(x) for x in (q, k, v)]
    outs, sums = [], []
    for block in sizes.blocks:
        out, lse = _flash(*(block.at_once(x) for x in rows), 0.0, False, scale=scale)
        outs.append(out)
        sums.append(lse.reshape(-1))
    return sizes.unsort(outs, q), torch.cat(sums).view(q.shape[:2])


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    sizes, heads = Sizes(batch, q.size(0)), q.size(1)
    rows = [sizes.sort(x) for x in (grad, q, k, v, out)]
    sums = lse.view(-1).split([(stop - first) * heads for first, stop, _ in sizes.blocks])
    found = [
        _flash_backward(
            *(block.at_once(x) for x in rows), lse_of.view(-1, heads, block.size), 0.0, False,
            scale=scale,
        ) for block, lse_of in zip(sizes.blocks, sums, strict=True)
    ]  # fmt: skip
    return [sizes.unsort([each[k] for each in found], q) for k in range(3)]


# By products of matrices --------------------------------------------------------------------------
def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None, dropout_p: float,
    scale: float,
) -> Tensor:  # fmt: skip
    """The results :math:`(N, H, C)`, differentiable any number of times."""
    sizes = Sizes(batch, q.size(0))
    rows = _rows(sizes, q)
    qs, ks, vs = (sizes.sort(x).to(acc_dtype(q.dtype)) for x in (q, k, v))
    outs = []
    for block in _small(sizes.blocks, q.size(1)):
        keys, values, parts = block.of(ks), block.of(vs), []
        for some in _parts(block, q.size(1)):
            p = (block.of(qs)[:, :, some] * scale @ keys.mT).softmax(-1)
            if seed is not None:
                p = p * _factors(seed, rows, block, some, p, dropout_p)
            parts.append(p @ values)
        outs.append(torch.cat(parts, 2))
    return sizes.unsort(outs, q)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None,
    dropout_p: float, scale: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    sizes = Sizes(batch, q.size(0))
    rows = _rows(sizes, q)
    gs, qs, ks, vs = (sizes.sort(x).to(acc_dtype(q.dtype)) for x in (grad, q, k, v))
    found: list[list[Tensor]] = [[], [], []]
    for block in _small(sizes.blocks, q.size(1)):
        keys, values = block.of(ks), block.of(vs)
        of_k, of_v, parts = torch.zeros_like(keys), torch.zeros_like(values), []
        for some in _parts(block, q.size(1)):
            queries, grads = block.of(qs)[:, :, some], block.of(gs)[:, :, some]
            p = (queries * scale @ keys.mT).softmax(-1)
            of_p, kept = grads @ values.mT, p
            if seed is not None:
                factors = _factors(seed, rows, block, some, p, dropout_p)
                of_p, kept = of_p * factors, p * factors
            of_score = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
            parts.append(of_score @ keys)
            of_k += of_score.mT @ queries
            of_v += kept.mT @ grads
        for out, each in zip(found, (torch.cat(parts, 2), of_k, of_v), strict=True):
            out.append(each)
    return [sizes.unsort(each, q) for each in found]


def _small(blocks: list[_Block], heads: int) -> Iterator[_Block]:
    """Blocks with few enough pairs of rows, or with one graph."""
    for first, stop, size in blocks:
        step = size * max(1, _MOST_PAIRS // (heads * size * size))
        for start in range(first, stop, step):
            yield _Block(start, min(start + step, stop), size)


def _parts(block: _Block, heads: int) -> list[slice]:
    """The queries of the graphs of a block in parts with few enough pairs."""
    step = max(1, _MOST_PAIRS // (heads * (block.stop - block.first)))
    return [slice(start, start + step) for start in range(0, block.size, step)]


def _rows(sizes: Sizes, q: Tensor) -> Tensor:
    """The number of each row, in the order of blocks."""
    return sizes.order if sizes.order is not None else torch.arange(q.size(0), device=q.device)


def _factors(
    seed: Tensor, rows: Tensor, block: _Block, some: slice, p: Tensor, dropout_p: float
) -> Tensor:
    """The factors of dropout :math:`(B, H, n, m)` for probabilities, as of the kernels."""
    rows = rows[block.first : block.stop].view(-1, block.size)
    low, high = seed & _WORD, seed >> 32 & _WORD
    salt = mixed(low + torch.arange(p.size(1), device=seed.device) * 0x9E3779B9).view(-1, 1)
    queries = mixed(mixed(rows[:, None, some] ^ salt) + high).unsqueeze(-1)
    keys = mixed(rows + 0x5BD1E995)[:, None, None, :]
    threshold = threshold_of(dropout_p)
    kept = (mixed(queries ^ keys) >> 1 >= threshold).to(p.dtype)
    return kept * (2**31 / (2**31 - threshold))
