"""The k largest of a row: which ones, in what form, gradients, bad input, compilation."""

import pytest
import torch
from _captures import captured
from _raw_ops import reference
from hypothesis import given
from hypothesis import strategies as st
from ops._graphs import DTYPES, MAXK_WIDTHS, entries_of, exact
from ops._samples import Given, sample
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.ops import CBSR, maxk

NAN, INF = float('nan'), float('inf')


@sample('maxk')
def _(given: Given) -> dict[str, object]:
    return dict(x=given.a, k=4, balanced=given.full)


def ascending(cbsr: CBSR) -> tuple[Tensor, Tensor]:
    """Values and columns in ascending order of the columns."""
    columns, order = cbsr.columns.long().sort(1)
    return cbsr.values.gather(1, order), columns


def check(x: Tensor, k: int, balanced: bool = False) -> None:
    """Compares columns, values to their signs, and the gradient with the reference's."""
    x = x.detach().requires_grad_()
    out = maxk(x, k, balanced)
    assert out.shape == x.shape
    assert (out.dtype, out.device) == (x.dtype, x.device)
    assert out.values.shape == out.columns.shape == (x.size(0), k)
    assert out.values.is_contiguous()
    assert out.columns.is_contiguous()
    narrowest = next(
        dtype
        for dtype in (torch.uint8, torch.uint16, torch.int32)
        if x.size(1) - 1 <= torch.iinfo(dtype).max
    )
    assert out.columns.dtype == narrowest
    values, columns = ascending(out)
    expected_values, expected_columns = reference.maxk(x, k, balanced)
    assert torch.equal(columns, expected_columns.long())
    assert_same(values, expected_values.to(x.dtype))
    grad = torch.randn(x.size(0), k, device=x.device).to(x.dtype)
    (grad_x,) = torch.autograd.grad(out.values, x, grad)
    assert torch.equal(grad_x, torch.zeros_like(x).scatter(1, out.columns.long(), grad))


def assert_same(a: Tensor, b: Tensor) -> None:
    """Equal, NaN to NaN and -0 to -0."""
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    assert torch.equal(a, b)
    assert torch.equal(a.signbit(), b.signbit())


def special(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows full of what is not ordered as usual."""
    info = torch.finfo(dtype)
    numbers = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, info.max, info.min, info.tiny, -info.tiny]
    choice = torch.tensor([*numbers, info.smallest_normal / 2], dtype=torch.float64).to(dtype)
    x = choice[torch.randint(choice.size(0), size)]
    return torch.where(torch.rand(size) < 0.5, x, x.neg()).to(device)  # NaN of both signs


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('balanced', [False, True])
def test_widths(device: torch.device, dtype: torch.dtype, balanced: bool) -> None:
    for width in MAXK_WIDTHS:
        ks = entries_of(width)
        for make in (exact, special):
            x = make(3, width, dtype=dtype, device=device)
            for k in ks:
                check(x, k, balanced)
        check(torch.randn(40, width, device=device).to(dtype), ks[len(ks) // 2], balanced)


@pytest.mark.parametrize('width', [5, 17, 64, 130])
def test_every_k(device: torch.device, width: int) -> None:
    x = exact(5, width, dtype=torch.float32, device=device)
    for k in range(1, width + 1):
        for balanced in (False, True):
            check(x, k, balanced)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [65535, 65536, 65537, 70001])
def test_wide_rows(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2, width, device=device).to(dtype)
    x[0, -1] = x[1, -3] = 100
    for k in (1, 33, 5000, width):
        check(x, k)
    check(x, 77, balanced=True)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('balanced', [False, True])
def test_many_rows(device: torch.device, dtype: torch.dtype, balanced: bool) -> None:
    for rows, width, k in ((3001, 64, 16), (1025, 256, 32), (257, 384, 40)):
        check(torch.randn(rows, width, device=device).to(dtype), k, balanced)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [50, 64, 128, 256, 300, 512, 1024])
def test_rows_of_hardly_any_spread(device: torch.device, dtype: torch.dtype, width: int) -> None:
    mean = torch.randn(70, 1, dtype=torch.float64)
    noise = torch.randn(70, width, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    for x in (
        mean.expand(-1, width),
        torch.where(noise > 1, mean * (1 + eps), mean),
        torch.where(noise > 0, mean, -mean),
        1000 + noise * 1e-4,
        mean + noise * eps,
        (noise - 2).relu(),
        noise * 10.0 ** torch.randint(-30, 30, (70, 1)),
    ):
        for k in (1, 8, width // 8, width // 3, width - 1):
            check(x.to(device, dtype), k)


few = st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, 0.5, NAN, -NAN, INF, -INF])


@given(st.integers(1, 70), st.data(), st.sampled_from(DTYPES), st.booleans())
def test_any_row(
    device: torch.device, width: int, data: st.DataObject, dtype: torch.dtype, balanced: bool
) -> None:
    rows = data.draw(st.lists(st.lists(few, min_size=width, max_size=width), max_size=3))
    x = torch.tensor(rows, device=device).view(-1, width).to(dtype)
    check(x, data.draw(st.integers(1, width)), balanced)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    ('row', 'k', 'columns'),
    [
        ([5, 5, 5, 5, 5], 3, {0, 1, 2}),
        ([1, 2, 3, 2, 2], 3, {1, 2, 3}),
        ([-0.0, 0.0, -0.0, 0.0], 2, {0, 1}),
        ([-1, -0.0, 0.0], 1, {1}),
        ([INF, 1, NAN, INF], 2, {0, 2}),
        ([INF, -NAN, 1, NAN], 1, {1}),
        ([-NAN, 7, NAN, -NAN], 2, {0, 2}),
        ([-INF, -INF, -INF], 2, {0, 1}),
        ([-3, -1, -2], 2, {1, 2}),
    ],
)
def test_order(
    device: torch.device, dtype: torch.dtype, row: list[float], k: int, columns: set[int]
) -> None:
    # In a wide row too, which another kernel may take.
    for padding in (0, 60, 700):
        x = torch.tensor([[*row, *[-INF] * padding]], device=device).to(dtype)
        out = maxk(x, k)
        assert set(out.columns[0].tolist()) == columns
        assert_same(out.values[0], x[0, out.columns[0].long()])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [7, 12, 130, 300])
def test_balanced_keeps_the_best_of_each_group(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    x = exact(2, width, dtype=dtype, device=device)
    for k in entries_of(width):
        columns = maxk(x, k, balanced=True).columns.long()
        assert torch.equal((columns % k).sort(1)[0], torch.arange(k, device=device).expand(2, k))
        for row in range(2):
            for column in columns[row].tolist():
                group = x[row, column % k :: k]
                assert x[row, column] == group.max()
                assert (x[row, column % k : column : k] < group.max()).all()  # the lowest of ties


@pytest.mark.parametrize('dtype', DTYPES)
def test_all_entries_are_the_matrix_itself(device: torch.device, dtype: torch.dtype) -> None:
    for width in MAXK_WIDTHS:
        x = special(3, width, dtype=dtype, device=device)
        for balanced in (False, True):
            assert_same(maxk(x, width, balanced).to_dense(), x)


@pytest.mark.parametrize('balanced', [False, True])
def test_again_changes_nothing(device: torch.device, balanced: bool) -> None:
    x = torch.rand(20, 50, device=device) + 1
    for k in (1, 7, 49):
        once = maxk(x, k, balanced).to_dense()
        assert (once != 0).sum(1).eq(k).all()
        assert torch.equal(maxk(once, k, balanced).to_dense(), once)


def test_moves_with_its_columns(device: torch.device) -> None:
    x = torch.randn(20, 300, device=device)
    order = torch.randperm(300, device=device)
    for k in (1, 40, 299):
        dense = maxk(x, k).to_dense()
        assert torch.equal(maxk(x[:, order], k).to_dense(), dense[:, order])
        assert torch.equal(dense.sort(1)[0], maxk(x.sort(1)[0], k).to_dense().sort(1)[0])


def test_is_relu_of_as_many_positive_ones(device: torch.device) -> None:
    x = torch.randn(30, 24, device=device).abs()
    x[:, ::3] *= -1
    assert torch.equal(maxk(x, 16).to_dense(), x.relu())


@pytest.mark.parametrize('dtype', DTYPES)
def test_layouts(device: torch.device, dtype: torch.dtype) -> None:
    n = 6
    for width in (3, 16, 33, 64, 256, 300):
        padded = exact(n * width + 1, dtype=dtype, device=device)
        layouts = {
            'unaligned': padded[1:].view(n, width),
            'transposed': exact(width, n, dtype=dtype, device=device).t(),
            'strided': exact(n, 2 * width + 1, dtype=dtype, device=device)[:, 1::2],
            'expanded rows': exact(1, width, dtype=dtype, device=device).expand(n, width),
            'expanded columns': exact(n, 1, dtype=dtype, device=device).expand(n, width),
        }
        for x in layouts.values():
            for k in (1, width // 2, width):
                check(x, max(k, 1))
                check(x, max(k, 1), balanced=True)


def test_no_rows(device: torch.device) -> None:
    for width in (1, 300, 70000):
        x = torch.empty(0, width, device=device)
        check(x, 1)
        check(x, width, balanced=True)
        assert maxk(x, 1).to_dense().shape == (0, width)


def test_threads() -> None:
    before = torch.get_num_threads()
    x = torch.randn(3000, 100)
    try:
        for dtype in DTYPES:
            for balanced in (False, True):
                results = []
                for threads in (1, 2, 3, 7):
                    torch.set_num_threads(threads)
                    out = maxk(x.to(dtype), 13, balanced)
                    results.append((out.values, out.columns, out.to_dense()))
                for other in results[1:]:
                    assert all(map(torch.equal, results[0], other))
    finally:
        torch.set_num_threads(before)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize('balanced', [False, True])
@pytest.mark.parametrize('k', [1, 3, 7])
def test_gradcheck(device: torch.device, k: int, balanced: bool) -> None:
    x = torch.randperm(28, device=device).view(4, 7).double().requires_grad_()  # no ties nearby
    for run in (
        lambda x: maxk(x, k, balanced).values,
        lambda x: maxk(x, k, balanced).to_dense(),
        lambda x: maxk(x.sin() * 5, k, balanced).to_dense().pow(2),
    ):
        assert gradcheck(run, (x,))
        assert gradgradcheck(run, (x,))


def test_gradient_goes_to_what_was_kept(device: torch.device) -> None:
    x = torch.tensor([[2.0, 2.0, NAN, -INF], [0.0, -0.0, 0.0, 0.0]], device=device)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(maxk(x, 2).to_dense().sum(), x)
    assert grad.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


def test_gradient_with_strange_strides(device: torch.device) -> None:
    x = torch.randn(5, 9, device=device, requires_grad=True)
    kept = (maxk(x, 4).to_dense() != 0).float()
    grad = torch.ones(1, 1, device=device).expand(5, 4)
    assert torch.equal(torch.autograd.grad(maxk(x, 4).values, x, grad)[0], kept)
    for grad in (
        torch.randn(18, 5, device=device).t()[:, 1::2],
        torch.randn(46, device=device)[1:].view(5, 9),
        torch.randn(1, 9, device=device).expand(5, 9),
    ):
        assert torch.equal(torch.autograd.grad(maxk(x, 4).to_dense(), x, grad)[0], kept * grad)


def test_saves_columns_only(device: torch.device) -> None:
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = torch.randn(50, 256, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = maxk(x, 8)
    assert [(t.shape, t.dtype) for t in saved] == [((50, 8), torch.uint8)]
    assert saved[0].data_ptr() == out.columns.data_ptr()


def test_columns_take_no_gradient(device: torch.device) -> None:
    out = maxk(torch.randn(4, 9, device=device, requires_grad=True), 3)
    assert out.values.requires_grad
    assert out.requires_grad
    assert not out.columns.requires_grad


def test_input_is_left_alone(device: torch.device) -> None:
    x = special(9, 70, dtype=torch.float32, device=device)
    before = x.clone()
    for k in (1, 9, 70):
        maxk(x, k)
        maxk(x, k, balanced=True)
    assert_same(x, before)


def test_inference_mode(device: torch.device) -> None:
    x = torch.randn(9, 20, device=device)
    expected = maxk(x, 5).to_dense()
    with torch.inference_mode():
        assert torch.equal(maxk(x, 5).to_dense(), expected)


@pytest.mark.parametrize('balanced', [False, True])
def test_same_bits_every_time(device: torch.device, balanced: bool) -> None:
    x = exact(3000, 100, dtype=torch.float32, device=device)
    first = maxk(x, 20, balanced)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            again = maxk(x, 20, balanced)
            assert torch.equal(again.values, first.values)
            assert torch.equal(again.columns, first.columns)
    finally:
        torch.use_deterministic_algorithms(False)


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize('balanced', [False, True])
def test_compiles_without_graph_break(device: torch.device, balanced: bool) -> None:
    torch._dynamo.reset()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out = maxk(x * 2, 7, balanced)
        return out.to_dense().sigmoid(), out.values + 1

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    for width in (20, 300):
        x = torch.randn(9, width, device=device, requires_grad=True)
        results = []
        for out in (run(x), compiled(x)):
            (grad,) = torch.autograd.grad(out[0].pow(2).sum() + out[1].sin().sum(), x)
            results.append((*out, grad))
        torch.testing.assert_close(*results)


def test_compiled_code_gives_a_cbsr(device: torch.device) -> None:
    torch._dynamo.reset()
    x = torch.randn(9, 20, device=device)
    out = torch.compile(maxk, fullgraph=True, backend='aot_eager')(x, 4)
    assert isinstance(out, CBSR)
    assert out.shape == (9, 20)
    assert torch.equal(out.to_dense(), maxk(x, 4).to_dense())


def test_compiled_once_for_any_number_of_rows(device: torch.device) -> None:
    torch._dynamo.reset()
    compilations = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        compilations.append(module)
        return module

    compiled = torch.compile(
        lambda x: maxk(x, 5).to_dense(), fullgraph=True, dynamic=True, backend=backend
    )
    for rows in (9, 30, 17, 200):
        x = torch.randn(rows, 40, device=device)
        assert torch.equal(compiled(x), maxk(x, 5).to_dense())
    assert len(compilations) == 1


def test_cuda_graph(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    for width, k in ((64, 16), (300, 40), (3000, 7)):
        x = torch.randn(30, width, device=device, requires_grad=True)

        def step(x: Tensor = x, k: int = k) -> tuple[Tensor, ...]:
            out = maxk(x, k).to_dense()
            return out, *torch.autograd.grad(out.pow(2).sum(), x)

        replay, results = captured(step)
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
            replay()
            assert all(map(torch.equal, results, step()))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('error', 'message', 'k'),
    [
        (ValueError, "'k' must be 1 to 4.*got 0", 0),
        (ValueError, "'k' must be 1 to 4.*got -1", -1),
        (ValueError, "'k' must be 1 to 4.*got 5", 5),
        (TypeError, "'k' must be an integer, got bool", True),
        (TypeError, "'k' must be an integer, got float", 2.0),
        (TypeError, "'k' must be an integer, got str", '2'),
        (TypeError, "'k' must be an integer, got NoneType", None),
        (TypeError, "'k' must be an integer, got Tensor", torch.tensor(2)),
    ],
)
def test_bad_k(device: torch.device, error: type, message: str, k: object) -> None:
    for rows in (0, 3):
        with pytest.raises(error, match=message):
            maxk(torch.randn(rows, 4, device=device), k)


@pytest.mark.parametrize(
    ('error', 'message', 'x'),
    [
        (TypeError, "'x' must be a tensor, got list", [[1.0]]),
        (TypeError, "'x' must be one of.*int64", torch.ones(3, 4).long()),
        (TypeError, "'x' must be one of.*bool", torch.ones(3, 4).bool()),
        (TypeError, "'x' must be one of.*complex64", torch.ones(3, 4).to(torch.complex64)),
        (TypeError, "'x' must be a strided tensor", torch.ones(3, 4).to_sparse()),
        (ValueError, r"'x'.*got \[4\]", torch.ones(4)),
        (ValueError, r"'x'.*got \[\]", torch.tensor(1.0)),
        (ValueError, r"'x'.*got \[1, 3, 4\]", torch.ones(1, 3, 4)),
        (ValueError, "'k' must be 1 to 0", torch.ones(3, 0)),
    ],
)
def test_bad_features(device: torch.device, error: type, message: str, x: object) -> None:
    x = x.to(device) if isinstance(x, Tensor) else x
    with pytest.raises(error, match=message):
        maxk(x, 1)
