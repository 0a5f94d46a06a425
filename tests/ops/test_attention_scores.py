"""Scores of nodes against their reference: widths, types, gradients, determinism."""

import pytest
import torch
from _raw_ops import ops, reference

from pyg_fast.ops.attention_scores import attention_scores

from ._attention import SHAPES, acc_of
from ._graphs import DTYPES, assert_near, exact
from ._samples import Given, sample

ROWS = [0, 1, 30, 129, 1000]


@sample('attention_scores')
def scores_sample(given: Given) -> dict[str, object]:
    att_src, att_dst = (given.exact(3, 5, dtype=given.acc) for _ in range(2))
    x = given.exact(given.num_nodes, 3, 5)
    return dict(x=x, att_src=att_src, att_dst=given.optional(att_dst))


@sample('attention_scores_backward')
def _(given: Given) -> dict[str, object]:
    src, dst = (given.exact(given.num_nodes, 3, dtype=given.acc) for _ in range(2))
    return dict(
        **scores_sample(given), grad_alpha_src=src, grad_alpha_dst=given.optional(dst),
        more_grad_x=given.optional(given.exact(given.num_nodes, 3, 5)),
    )  # fmt: skip


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('count', [1, 2])
def test_widths(device: torch.device, dtype: torch.dtype, count: int) -> None:
    acc = acc_of(dtype)
    for k, (heads, channels) in enumerate(SHAPES + [(0, 3), (3, 0)]):
        rows = ROWS[k % len(ROWS)]
        x = exact(rows, heads, channels, dtype=dtype, device=device)
        att = [exact(heads, channels, dtype=acc, device=device) for _ in range(count)]
        grads = [exact(rows, heads, dtype=acc, device=device) for _ in range(count)]
        both, gs = ([*given, None][:2] for given in (att, grads))
        more = exact(rows, heads, channels, dtype=dtype, device=device) if k % 2 else None
        gs.append(more)
        given = x, *both
        sizes = x.abs(), *(None if t is None else t.abs() for t in both)
        named = (
            (ops.attention_scores(*given), reference.attention_scores(*given),
             reference.attention_scores(*sizes), channels),
            (ops.attention_scores_backward(*given, *gs),
             reference.attention_scores_backward(*given, *gs),
             reference.attention_scores_backward(
                 *sizes, *(None if g is None else g.abs() for g in gs)
             ),
             rows),
        )  # fmt: skip
        for actual, expected, magnitude, terms in named:
            for a, e, m in zip(actual, expected, magnitude, strict=True):
                assert_near(a, e, m, terms)


@pytest.mark.parametrize('heads', [1, 3, 8])
@pytest.mark.parametrize('channels', [1, 7, 8, 12, 1030])
def test_more_pairs_than_threads(device: torch.device, heads: int, channels: int) -> None:
    # A thread of the CUDA kernels processes several nodes.
    rows = 60_000 // (heads * min(channels, 32))
    for dtype in (torch.float32, torch.bfloat16):
        x = exact(rows, heads, channels, dtype=dtype, device=device)
        att = [exact(heads, channels, dtype=torch.float32, device=device) for _ in range(2)]
        expected = reference.attention_scores(x, *att)
        sizes = reference.attention_scores(x.abs(), *(a.abs() for a in att))
        actual = ops.attention_scores(x, *att)
        for a, e, m in zip(actual, expected, sizes, strict=True):
            assert_near(a, e, m, channels)


@pytest.mark.parametrize('dtype', DTYPES)
def test_vectors_that_are_not_aligned(device: torch.device, dtype: torch.dtype) -> None:
    x = exact(1 + 20 * 4 * 8, dtype=dtype, device=device)[1:].view(20, 4, 8)
    att = [exact(1 + 4 * 8, dtype=acc_of(dtype), device=device)[1:].view(4, 8) for _ in range(2)]
    grads = [exact(20, 4, dtype=acc_of(dtype), device=device) for _ in range(2)]
    for run, given, terms in (
        ('attention_scores', (x, *att), 8),
        ('attention_scores_backward', (x, *att, *grads, x), 20),
    ):
        actual, expected = (getattr(kind, run)(*given) for kind in (ops, reference))
        sizes = getattr(reference, run)(*(t.abs() for t in given))
        for a, e, m in zip(actual, expected, sizes, strict=True):
            assert_near(a, e, m, terms)


@pytest.mark.parametrize('dtype', DTYPES)
def test_layouts_and_types_of_vectors(device: torch.device, dtype: torch.dtype) -> None:
    wide = exact(20, 8, 6, dtype=dtype, device=device)
    x = wide[:, ::2, 1:].requires_grad_()
    att = [exact(1, 4, 5, dtype=dtype, device=device).requires_grad_() for _ in range(2)]
    out = attention_scores(x, *att)
    assert [t.dtype for t in out] == [acc_of(dtype)] * 2
    grads = torch.autograd.grad(out[0].sum() + 2 * out[1].sum(), [x, *att])
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (x, *att)]
    expected = (att[0] + 2 * att[1]).double().expand(20, 4, 5)
    assert_near(grads[0], expected, expected.abs(), 2)
    total = x.double().sum(0)
    assert_near(grads[2], 2 * total[None], 2 * x.double().abs().sum(0)[None], 20)


@pytest.mark.parametrize('count', [1, 2])
def test_gradients(device: torch.device, count: int) -> None:
    x = exact(5, 3, 4, dtype=torch.double, device=device).requires_grad_()
    att = [exact(1, 3, 4, dtype=torch.double, device=device).requires_grad_() for _ in range(count)]
    assert torch.autograd.gradcheck(attention_scores, (x, *att))
    assert torch.autograd.gradgradcheck(attention_scores, (x, *att))


def test_unused_score_has_no_gradient(device: torch.device) -> None:
    x = exact(5, 3, 4, dtype=torch.float, device=device).requires_grad_()
    att = [exact(1, 3, 4, dtype=torch.float, device=device).requires_grad_() for _ in range(2)]
    grads = torch.autograd.grad(attention_scores(x, *att)[1].sum(), [x, *att])
    assert torch.equal(grads[0], att[1].expand(5, 3, 4))
    assert not grads[1].any()


def test_same_bits_every_time(device: torch.device) -> None:
    x = torch.randn(3000, 8, 8, device=device)
    att, grads = torch.randn(2, 8, 8, device=device), torch.randn(2, 3000, 8, device=device)
    first, second = (ops.attention_scores_backward(x, *att, *grads, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compile(device: torch.device) -> None:
    x = exact(9, 3, 4, dtype=torch.float, device=device).requires_grad_()
    att = [exact(1, 3, 4, dtype=torch.float, device=device).requires_grad_() for _ in range(2)]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        src, dst = attention_scores(*inputs)
        return (src * dst).sum()

    found = [torch.autograd.grad(f(x, *att), [x, *att])
             for f in (run, torch.compile(run, fullgraph=True, backend='aot_eager'))]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    x, att = (exact(*size, dtype=torch.float, device=device) for size in ((7, 3, 5), (3, 5)))
    grad = exact(7, 3, dtype=torch.float, device=device)
    for bad in ((ops.attention_scores, x[0], att, None),
                (ops.attention_scores_backward, x, att, att, grad, None, None),
                (ops.attention_scores_backward, x, att, None, grad, grad, None),
                (ops.attention_scores_backward, x, att, None, grad, None, x[:, 1:])):  # fmt: skip
        with pytest.raises(RuntimeError):
            bad[0](*bad[1:])
