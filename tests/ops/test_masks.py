"""Attention where scores are infinite or NaN, in front of others, between them and behind."""

from collections.abc import Callable

import pytest
import torch
from _pairs import pairs
from torch import Tensor
from torch.nn.functional import leaky_relu

from pyg_fast.ops import gat, gatv2

INF, LOWEST = float('inf'), torch.finfo(torch.float32).min
DEGREES = (1, 32, 33, 40, 64, 100, 700, 5000)
SHAPES = [(1, 16), (4, 8), (8, 8), (3, 5), (1, 300)]
# Which of a row's edges are masked.
MASKS: dict[str, Callable[[int], Tensor]] = {
    'first': lambda n: torch.arange(n) < n - 1,
    'front': lambda n: torch.arange(n) < max(n * 5 // 6, min(n - 1, 33)),
    'middle': lambda n: (torch.arange(n) >= n // 4) & (torch.arange(n) < n * 3 // 4),
    'back': lambda n: torch.arange(n) >= (n + 1) // 2,
    'all': lambda n: torch.ones(n, dtype=torch.bool),
    'blocks': lambda n: torch.arange(n) // 32 % 2 == 0,
}


def by_rows(degrees: tuple[int, ...]) -> Tensor:
    """A row of each degree, whose edges are all from sources of their own, the first ones excepted,
    and one without edges."""
    dst = torch.repeat_interleave(torch.tensor([*degrees, 0]))
    return torch.stack([torch.arange(dst.size(0)) + len(degrees) + 1, dst])


def softmax_of(logit: Tensor, x: Tensor, edge_index: Tensor, num_dst: int) -> Tensor:
    """By torch's softmax, row by row: edges follow one another."""
    counts = torch.bincount(edge_index[1], minlength=num_dst).tolist()
    rows = []
    for part, source in zip(logit.split(counts), edge_index[0].split(counts), strict=True):
        weight = part.softmax(0) if part.size(0) > 0 else part
        rows.append((weight.unsqueeze(-1) * x[source]).sum(0))
    return torch.stack(rows)


def mask_of(mask: str, counts: Tensor) -> Tensor:
    return torch.cat([MASKS[mask](n) for n in counts.tolist()])


def compare(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), e, rtol=2e-4, atol=2e-5, equal_nan=True)


def with_loops(edge_index: Tensor, num_dst: int) -> Tensor:
    """The edge of each node to itself behind the others."""
    node = torch.arange(num_dst).expand(2, -1)
    both = torch.cat([edge_index, node], 1)
    return both[:, both[1].argsort(stable=True)]


@pairs(
    ('mask', 'shape', 'fill', 'loops'),
    list(MASKS), SHAPES, [-INF, INF, float('nan'), LOWEST], [False, True],
)  # fmt: skip
def test_gat(
    device: torch.device, mask: str, shape: tuple[int, int], fill: float, loops: bool
) -> None:
    heads, channels = shape
    edge_index = by_rows(DEGREES)
    num_src, num_dst = int(edge_index[0].max()) + 1, len(DEGREES) + 1
    counts = torch.bincount(edge_index[1], minlength=num_dst)
    masked = mask_of(mask, counts)
    x = torch.randn(num_src, heads, channels)
    src, dst = torch.randn(num_src, heads), torch.randn(num_dst, heads)
    edge = torch.randn(edge_index.size(1), heads)
    edge[masked] = fill
    if heads > 1:
        edge[:, -1].nan_to_num_(nan=0.5, posinf=1.0, neginf=-1.0)  # heads do not touch each other
    grad = torch.randn(num_dst, heads, channels)

    def reference() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, src, dst, edge)]
        xs, a, b, c = leaves
        listed, extra = edge_index, c
        if loops:
            listed = with_loops(edge_index, num_dst)
            extra = torch.cat([c, torch.zeros(num_dst, heads)])
            order = torch.cat([edge_index[1], torch.arange(num_dst)]).argsort(stable=True)
            extra = extra[order]
        # A sum that float32 does not tell from the lowest number is that number.
        logit = leaky_relu(a[listed[0]] + b[listed[1]] + extra, 0.2).double()
        out = softmax_of(logit, xs.double(), listed, num_dst)
        grads = torch.autograd.grad(out, leaves, grad.double())
        return [out.detach(), *(g.double() for g in grads)]

    leaves = [t.to(device).requires_grad_() for t in (x, src, dst, edge)]
    edges = edge_index.to(device)
    out = gat(edges, *leaves, add_self_loops=loops)
    with torch.no_grad():  # whose kernel keeps less
        again = gat(edges, *leaves, add_self_loops=loops)
    torch.testing.assert_close(again, out, equal_nan=True)
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(device))]
    # Where all scores of a row are that low, a float32 log-sum-exp loses the number of edges.
    kept = 1 if fill == LOWEST else len(got)
    compare(got[:kept], reference()[:kept])
    left = torch.bincount(edge_index[1][~masked], minlength=num_dst) > 0
    if fill == -INF:
        assert out[left.to(device)].isfinite().all()


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize(('heads', 'channels'), SHAPES)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float16])
def test_gat_of_other_types(
    device: torch.device, mask: str, heads: int, channels: int, dtype: torch.dtype
) -> None:
    edge_index = by_rows(DEGREES)
    num_src, num_dst = int(edge_index[0].max()) + 1, len(DEGREES) + 1
    counts = torch.bincount(edge_index[1], minlength=num_dst)
    x = torch.randn(num_src, heads, channels).to(dtype)
    rows = num_src, num_dst, edge_index.size(1)
    src, dst, edge = (torch.randn(n, heads).to(dtype) for n in rows)
    edge[mask_of(mask, counts)] = -INF
    a, b, c, xs = (t.double() for t in (src, dst, edge, x))
    logit = leaky_relu(a[edge_index[0]] + b[edge_index[1]] + c, 0.2)
    expected = softmax_of(logit, xs, edge_index, num_dst)
    out = gat(edge_index.to(device), *(t.to(device) for t in (x, src, dst, edge)))
    tolerance = 1e-9 if dtype == torch.float64 else 3e-3
    torch.testing.assert_close(
        out.double().cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize(('heads', 'channels'), SHAPES)
@pytest.mark.parametrize('loops', [False, True])
def test_gatv2(device: torch.device, mask: str, heads: int, channels: int, loops: bool) -> None:
    """Logits are infinite where features are: those get a channel that `att` alone looks at."""
    edge_index = by_rows(DEGREES)
    num_src, num_dst = int(edge_index[0].max()) + 1, len(DEGREES) + 1
    counts = torch.bincount(edge_index[1], minlength=num_dst)
    masked = edge_index[0][mask_of(mask, counts)]
    x, x_dst = torch.randn(num_src, heads, channels), torch.randn(num_dst, heads, channels)
    att = torch.randn(heads, channels)
    # Below float32 once it is multiplied, though not itself.
    x[masked, :, 0] = -3e38
    att[:, 0] = 100.0
    wide = [t.double() for t in (x, x_dst, att)]
    listed = with_loops(edge_index, num_dst) if loops else edge_index
    s = leaky_relu(wide[0][listed[0]] + wide[1][listed[1]], 0.2)
    logit = (s * wide[2]).sum(-1)
    logit = logit.masked_fill(logit < -1e39, -INF)
    expected = softmax_of(logit, wide[0], listed, num_dst)
    out = gatv2(
        edge_index.to(device), x.to(device), x_dst.to(device), att.to(device), add_self_loops=loops
    )
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-4, atol=2e-4, equal_nan=True)
