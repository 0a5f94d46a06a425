"""Attention within graphs beside torch's of each graph alone."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.attention import _composed, _op
from pyg_fast.ops import segment_attention

op = torch.ops.pyg_fast.segment_attention.default
SIZES = [3, 1, 0, 40, 1, 26, 26]


def rows_of(
    sizes: list[int], heads: int, channels: int, dtype: torch.dtype, device: Any = 'cpu'
) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, columns of one matrix as in a layer, and the graph of each row."""
    x = torch.randn(sum(sizes), 3, heads, channels, dtype=torch.float64, device=device)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
    return list(x.to(dtype).unbind(1)), batch.to(device)


def of_each_graph(q: Tensor, k: Tensor, v: Tensor, batch: Tensor, **kwargs: Any) -> Tensor:
    out = [(q + k + v)[:0]]
    for graph in batch.unique():
        parts = (x[batch == graph].transpose(0, 1) for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(*parts, **kwargs).transpose(0, 1))
    return torch.cat(out)


def with_gradients(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device)
    grads = torch.autograd.grad(out, inputs, weight.view(out.shape).to(out.dtype))
    return [out.detach(), *grads]


@given(
    st.lists(st.one_of(st.integers(0, 9), st.just(300)), max_size=6), st.integers(1, 3),
    st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_like_torch(sizes: list[int], heads: int, channels: int, is_one: bool) -> None:
    inputs, batch = rows_of(sizes, heads, channels, torch.float64)
    given = None if is_one else batch
    batch = batch * 0 if is_one else batch
    expected = with_gradients(lambda *x: of_each_graph(*x, batch), inputs)
    got = with_gradients(lambda *x: segment_attention(*x, given), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize('channels', [8, 16, 40, 64, 128, 256])
def test_dtypes_and_widths(
    dtype: torch.dtype, tolerance: float, channels: int, device: torch.device
) -> None:
    """Graphs of the sizes of tiles, and others, beside float64."""
    if device.type == 'cuda' and dtype == torch.float64 and channels > 128:
        pytest.skip('too wide')
    inputs, batch = rows_of([*SIZES, 64, 128, 33], 2, channels, dtype, device)
    run = lambda *x: segment_attention(*x, batch)  # noqa: E731
    exact = [x.double().cpu() for x in inputs]
    expected = with_gradients(lambda *x: of_each_graph(*x, batch.cpu()), exact)
    for a, b in zip(with_gradients(run, inputs), expected, strict=True):
        assert a.dtype == dtype
        assert (a.cpu().double() - b).abs().max() <= tolerance * b.abs().max()


def test_many_rows(device: torch.device) -> None:
    """More tiles than processors; on a CPU the queries of a graph in parts."""
    dtype = torch.float32 if device.type == 'cuda' else torch.float64
    inputs, batch = rows_of([700, 26, 900] + [26] * 40, 4, 16, dtype, device)
    got = with_gradients(lambda *x: segment_attention(*x, batch), inputs)
    exact = [x.double() for x in inputs]
    expected = with_gradients(lambda *x: of_each_graph(*x, batch), exact)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_forms_of_batches(device: torch.device) -> None:
    """Numbers of graphs with gaps, of int32, and the first rows of graphs."""
    inputs, batch = rows_of(SIZES, 2, 8, torch.float64, device)
    expected = of_each_graph(*inputs, batch)
    ptr = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()], device=device)
    for out in (
        segment_attention(*inputs, batch * 5 + 2), segment_attention(*inputs, batch.int()),
        segment_attention(*inputs, ptr=ptr), segment_attention(*inputs, ptr=ptr.int()),
        segment_attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs), batch),
        segment_attention(inputs[0] * 2, inputs[1], inputs[2], batch, scale=0.5 / 8**0.5),
    ):  # fmt: skip
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_without_rows(device: torch.device) -> None:
    inputs, batch = rows_of([0, 0], 2, 8, torch.float32, device)
    for ids in (batch, None):
        got = with_gradients(lambda *x: segment_attention(*x, ids), inputs)  # noqa: B023
        assert [x.shape for x in got] == [(0, 2, 8)] * 4


def test_numbers_that_are_not_finite_stay_in_their_graph(device: torch.device) -> None:
    dtype = torch.float32
    inputs, batch = rows_of(SIZES, 2, 8, dtype, device)
    expected = with_gradients(lambda *x: segment_attention(*x, batch), inputs)
    for wrong in (float('nan'), float('inf')):
        for k in range(3):
            changed = [x.clone() for x in inputs]
            changed[k][5] = wrong  # of graph 3
            got = with_gradients(lambda *x: segment_attention(*x, batch), changed)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a[batch != 3], b[batch != 3])
            assert not got[0][batch == 3].isfinite().all()


def test_rows_out_of_order(device: torch.device) -> None:
    inputs, batch = rows_of([2, 2], 1, 8, torch.float32, device)
    if device.type == 'cpu':
        with pytest.raises(ValueError, match='ascending order'):
            segment_attention(*inputs, batch.flip(0))
        with pytest.raises(IndexError, match="'batch' must hold numbers of graphs from 0 on"):
            segment_attention(*inputs, batch - 1)
    else:
        assert segment_attention(*inputs, batch.flip(0)).isnan().all()


# Dropout ----------------------------------------------------------------------------------------
def test_dropout_keeps_the_mean(device: torch.device) -> None:
    inputs, batch = rows_of([3, 1, 20], 2, 8, torch.float64, device)
    seeds = torch.randint(2**62, (400,), device=device)
    outs = torch.stack([
        segment_attention(*inputs, batch, dropout_p=0.3, seed=seed) for seed in seeds.split(1)
    ])  # fmt: skip
    error = (outs.mean(0) - segment_attention(*inputs, batch)).abs()
    assert (error <= 5 * outs.std(0) / 20 + 1e-12).all()
    assert outs.std(0).min() > 0


def test_shares_of_dropout() -> None:
    """Of pairs, over rows, keys, heads and seeds; neighbours are independent."""
    rows, block, p = torch.arange(300), _composed._Block(0, 300, 300), torch.zeros(1, 4, 1, 1)
    kept = torch.stack([
        _composed._factors(torch.tensor([seed]), rows, block, slice(None), p, 0.25)[0] > 0
        for seed in (0, 1, -5, 2**62)
    ]).double()  # fmt: skip
    assert abs(kept.mean() - 0.75) < 2e-3
    for dim in range(4):
        others = [d for d in range(4) if d != dim]
        assert (kept.mean(others) - 0.75).abs().max() < 5 * (0.1875 * 300 / kept.numel()) ** 0.5
        a, b = kept.narrow(dim, 1, kept.size(dim) - 1), kept.narrow(dim, 0, kept.size(dim) - 1)
        assert abs((a * b).mean() - 0.75**2) < 5e-3


def test_dropout_is_determined_by_its_seed(device: torch.device) -> None:
    inputs, batch = rows_of(SIZES, 2, 8, torch.float32, device)

    def run(*x: Tensor) -> Tensor:
        return segment_attention(*x, batch, dropout_p=0.5)

    results = []
    for number in (3, 3, 4):
        torch.manual_seed(number)
        results.append(with_gradients(run, inputs))
    for same, again, other in zip(*results, strict=True):
        assert torch.equal(same, again)
        assert not torch.equal(same, other)
    assert not segment_attention(*inputs, batch, dropout_p=1.0).any()


def test_gradients_of_dropout(device: torch.device) -> None:
    """Those of the pairs that the forward pass kept; twice differentiable."""
    inputs, batch = rows_of([3, 1], 2, 2, torch.float64, device)
    seed = torch.tensor([7], device=device)
    inputs = [x.detach().requires_grad_() for x in inputs]

    def run(*x: Tensor) -> Tensor:
        return segment_attention(*x, batch, dropout_p=0.4, seed=seed)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


# The op -----------------------------------------------------------------------------------------
def test_opcheck(device: torch.device) -> None:
    inputs, batch = rows_of(SIZES, 2, 8, torch.float64, device)
    seed = torch.tensor([3], device=device)
    inputs = [x.detach().requires_grad_() for x in inputs]
    torch.library.opcheck(op, (*inputs, batch, seed, 0.3, 0.5))
    torch.library.opcheck(op, (*inputs, None, None, 0.0, 0.5))
    out, lse = op(*(x.detach() for x in inputs), batch, seed, 0.3, 0.5)
    torch.library.opcheck(
        torch.ops.pyg_fast.segment_attention_backward.default,
        (out, *(x.detach() for x in inputs), batch, seed, out, lse, 0.3, 0.5),
    )


def test_compiled(device: torch.device) -> None:
    """One graph for all sizes, without a break; dropout draws from torch's generator."""
    torch.compiler.reset()
    run = torch.compile(
        lambda *x: segment_attention(*x) * 2, fullgraph=True, dynamic=True, backend='aot_eager'
    )
    for sizes in (SIZES, [9, 4]):
        inputs, batch = rows_of(sizes, 2, 8, torch.float64, device)
        got = with_gradients(lambda *x: run(*x, batch), inputs)  # noqa: B023
        expected = with_gradients(lambda *x: of_each_graph(*x, batch) * 2, inputs)  # noqa: B023
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    drops = torch.compile(
        lambda *x: segment_attention(*x, dropout_p=0.5), fullgraph=True, backend='aot_eager'
    )
    assert not torch.equal(drops(*inputs, batch), drops(*inputs, batch))


def test_function_transforms(device: torch.device) -> None:
    inputs, batch = rows_of([3, 2], 1, 4, torch.float64, device)
    run = lambda x: segment_attention(x, *inputs[1:], batch)  # noqa: E731
    _, got = torch.func.jvp(run, (inputs[0],), (inputs[2],))
    _, expected = torch.func.jvp(
        lambda x: of_each_graph(x, *inputs[1:], batch), (inputs[0],), (inputs[2],)
    )
    torch.testing.assert_close(got, expected)


def test_in_a_cuda_graph(cuda: torch.device) -> None:
    """A replay reads what the inputs hold then, of another division into graphs, too."""
    inputs, batch = rows_of([30, 40, 30], 2, 16, torch.float32, cuda)
    inputs = [x.contiguous().requires_grad_() for x in inputs]

    def run() -> list[Tensor]:
        out = segment_attention(*inputs, batch)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    batch.copy_((torch.arange(100, device=cuda) >= 77).long())
    with torch.no_grad():
        for x in inputs:
            x.normal_()
    graph.replay()
    torch.testing.assert_close(got, run())


def test_no_wait(cuda: torch.device) -> None:
    inputs, batch = rows_of(SIZES, 2, 16, torch.float32, cuda)
    run = lambda *x: segment_attention(*x, batch, dropout_p=0.5)  # noqa: E731
    with_gradients(run, inputs)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode('error')
        with_gradients(run, inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


# Errors -----------------------------------------------------------------------------------------
Q = torch.zeros(4, 2, 8)
BATCH = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ('args', 'kwargs', 'error', 'text'),
    [
        ((None, Q, Q), {}, TypeError, "'query' must be a tensor"),
        ((Q.int(), Q, Q), {}, TypeError, "'query' must be one of"),
        ((Q, Q.double(), Q), {}, TypeError, "'key' must be torch.float32 as 'query' is"),
        ((Q[0], Q, Q), {}, ValueError, "'query' must have shape [num_nodes, heads, channels]"),
        ((Q, Q, Q[:3]), {}, ValueError, "'value' must have shape [4, 2, 8], got [3, 2, 8]"),
        ((Q, Q, Q, BATCH.float()), {}, TypeError, "'batch' must hold integers"),
        ((Q, Q, Q, BATCH.short()), {}, TypeError, "'batch' must be int32 or int64"),
        ((Q, Q, Q, BATCH[:3]), {}, ValueError, "'batch' must have 4 entries, got 3"),
        ((Q, Q, Q, BATCH), {'ptr': BATCH}, ValueError, 'give one of them'),
        ((Q, Q, Q), {'ptr': BATCH.short()}, TypeError, "'ptr' must be int32 or int64"),
        ((Q, Q, Q), {'ptr': BATCH[:0]}, ValueError, "'ptr' must have an entry more"),
        ((Q, Q, Q), {'dropout_p': 1.5}, ValueError, "'dropout_p' must be from 0 to 1"),
        ((Q, Q, Q), {'scale': 'one'}, TypeError, "'scale' must be a number, got str"),
        ((Q, Q, Q), {'dropout_p': 0.5, 'seed': BATCH}, TypeError, "'seed' must be one int64"),
    ],
)  # fmt: skip
def test_errors(args: Any, kwargs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        segment_attention(*args, **kwargs)


def test_wide_heads_on_a_gpu(cuda: torch.device) -> None:
    x = torch.zeros(3, 1, 257, device=cuda)
    with pytest.raises(ValueError, match='at most 256 channels'):
        segment_attention(x, x, x)
    assert _op.why_not(x, 257) == 'heads of 257 channels'
