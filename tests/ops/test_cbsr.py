"""CBSR: what it takes and refuses, conversions, gradients, edits, compilation."""

import copy

import pytest
import torch
from _profile import ops_of
from _raw_ops import reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.ops import CBSR, cbsr_spmm, maxk

from ._graphs import DTYPES, MAXK_WIDTHS, entries_of, exact, random_columns
from ._samples import Given, sample

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]


@sample('cbsr_to_dense')
def _(given: Given) -> dict[str, object]:
    columns = random_columns(given.num_nodes, 9, 4, given.device)
    return dict(values=given.exact(given.num_nodes, 4), columns=columns, dim=9)


@sample('cbsr_sample')
def _(given: Given) -> dict[str, object]:
    return dict(dense=given.a, columns=random_columns(given.num_nodes, 9, 4, given.device))


def random(
    num_rows: int, width: int, k: int, dtype: torch.dtype, device: torch.device | str
) -> CBSR:
    columns = random_columns(num_rows, width, k, device)
    return CBSR(exact(num_rows, k, dtype=dtype, device=device), columns, width)


@pytest.mark.parametrize('dtype', DTYPES)
def test_to_dense(device: torch.device, dtype: torch.dtype) -> None:
    cases = [(width, k) for width in MAXK_WIDTHS for k in entries_of(width)]
    cases += [(width, k) for width in (65536, 70000) for k in (1, 33, width)]
    for width, k in cases:
        cbsr = random(3, width, k, dtype, device)
        dense = cbsr.to_dense()
        assert dense.dtype == dtype
        expected = reference.cbsr_to_dense(cbsr.values, cbsr.columns, width)
        assert torch.equal(dense, expected.to(dtype))


@pytest.mark.parametrize('dtype', DTYPES)
def test_from_dense(device: torch.device, dtype: torch.dtype) -> None:
    for width in (1, 2, 7, 64, 255, 256, 257, 1000):
        for k in entries_of(width):
            x = random(9, width, k, dtype, device).to_dense()
            fullest = int((x != 0).sum(1).max())
            for entries in {None, fullest or 1, k, width}:
                out = CBSR.from_dense(x, entries)
                assert out.k == (max(fullest, 1) if entries is None else entries)
                assert (out.shape, out.dtype, out.device) == (x.shape, dtype, x.device)
                assert torch.equal(out.to_dense(), x)
                CBSR(out.values, out.columns, width)  # is in order


def test_from_dense_keeps_what_is_not_zero(device: torch.device) -> None:
    nan, inf = float('nan'), float('inf')
    x = torch.tensor([[0, nan, 0, -inf], [0, 0, 0, 0], [1e-45, 0, -1, inf]], device=device)
    out = CBSR.from_dense(x)
    assert out.k == 3
    torch.testing.assert_close(out.to_dense(), x, rtol=0, atol=0, equal_nan=True)


def test_from_dense_of_no_rows(device: torch.device) -> None:
    out = CBSR.from_dense(torch.empty(0, 5, device=device))
    assert (out.shape, out.k) == ((0, 5), 1)
    assert out.to_dense().shape == (0, 5)
    assert CBSR.from_dense(torch.zeros(3, 5, device=device)).k == 1


@given(st.integers(1, 40), st.data(), st.sampled_from(DTYPES), st.sampled_from(INTEGERS))
def test_any_columns(
    device: torch.device, width: int, data: st.DataObject, dtype: torch.dtype, integer: torch.dtype
) -> None:
    k = data.draw(st.integers(1, width))
    rows = data.draw(st.lists(st.permutations(range(width)), max_size=4))
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, width)[:, :k].to(device, integer)
    values = exact(len(rows), k, dtype=dtype, device=device)
    cbsr = CBSR(values, columns, width)
    assert cbsr.columns.dtype == torch.uint8
    dense = torch.zeros(len(rows), width, device=device, dtype=dtype)
    assert torch.equal(cbsr.to_dense(), dense.scatter(1, columns.long(), values))


@pytest.mark.parametrize('dtype', DTYPES)
def test_layouts(device: torch.device, dtype: torch.dtype) -> None:
    for width in (20, 300):
        columns = random_columns(6, width, 6, device)
        wide = random_columns(6, width, 13, device)
        padded = torch.cat([columns.new_zeros(1), columns.flatten()])
        many_columns = (
            padded[1:].view(6, 6),
            columns.t().contiguous().t(),
            wide[:, 1::2],
            columns[:1].expand(6, 6),
        )
        many_values = (
            exact(37, dtype=dtype, device=device)[1:].view(6, 6),
            exact(6, 6, dtype=dtype, device=device).t(),
            exact(1, 1, dtype=dtype, device=device).expand(6, 6),
        )
        for c in many_columns:
            for v in many_values:
                expected = reference.cbsr_to_dense(v, c, width)
                assert torch.equal(CBSR(v, c, width).to_dense(), expected.to(dtype))


@pytest.mark.parametrize('width', [1, 9, 20])
def test_gradcheck(device: torch.device, width: int) -> None:
    for k in {1, (width + 1) // 2, width}:
        cbsr = random(2, width, k, torch.float64, device)
        values = cbsr.values.requires_grad_()

        def run(values: Tensor, columns: Tensor = cbsr.columns, width: int = width) -> Tensor:
            return CBSR(values, columns, width).to_dense()

        assert gradcheck(run, (values,))
        assert gradgradcheck(lambda values, run=run: run(values).pow(3), (values,))
        x = cbsr.detach().to_dense().requires_grad_()
        (grad,) = torch.autograd.grad(CBSR.from_dense(x, k).values.sum(), x)
        assert grad.sum() == 2 * k
        assert (grad[x != 0] == 1).all()


def test_saves_columns_only(device: torch.device) -> None:
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    cbsr = random(30, 256, 8, torch.float32, device)
    cbsr.values.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        cbsr.to_dense()
    assert [t.dtype for t in saved] == [torch.uint8]


def test_properties(device: torch.device) -> None:
    cbsr = random(5, 300, 7, torch.float16, device)
    assert cbsr.k == 7
    assert isinstance(cbsr.shape, torch.Size)
    assert cbsr.shape == cbsr.size() == (5, 300)
    assert (cbsr.size(0), cbsr.size(1), cbsr.size(-1)) == (5, 300, 300)
    assert (cbsr.dtype, cbsr.device) == (torch.float16, cbsr.values.device)
    assert not cbsr.requires_grad
    cbsr.values.requires_grad_()
    assert cbsr.requires_grad
    assert not cbsr.detach().requires_grad
    assert cbsr.clone().requires_grad
    expected = f'CBSR(shape=[5, 300], k=7, dtype=torch.float16, device={cbsr.device})'
    assert repr(cbsr) == expected


def test_columns_are_stored_narrow(device: torch.device) -> None:
    for width, dtype in (
        (256, torch.uint8),
        (257, torch.uint16),
        (65536, torch.uint16),
        (65537, torch.int32),
    ):
        columns = torch.tensor([[0, width - 1], [width - 1, width // 2]], device=device)
        values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
        cbsr = CBSR(values, columns, width)
        assert cbsr.columns.dtype == dtype
        assert torch.equal(cbsr.columns.long(), columns)
        assert cbsr.values is values
        assert cbsr.to_dense()[:, -1].tolist() == [2, 3]


def test_to(device: torch.device) -> None:
    cbsr = random(5, 300, 7, torch.float32, device)
    for moved in (
        cbsr.to(torch.float64),
        cbsr.to(dtype=torch.float64),
        cbsr.to(device, torch.float64),
        cbsr.to(device=device, dtype=torch.float64, non_blocking=True),
    ):
        assert (moved.dtype, moved.device) == (torch.float64, cbsr.device)
        assert moved.columns.dtype == torch.uint16
        assert torch.equal(moved.to_dense(), cbsr.to_dense().double())
    on_cpu = cbsr.cpu()
    assert (on_cpu.device.type, on_cpu.columns.device.type) == ('cpu', 'cpu')
    assert torch.equal(on_cpu.to_dense(), cbsr.to_dense().cpu())
    back = on_cpu.to(device)
    assert back.device == back.columns.device == cbsr.device
    assert torch.equal(back.to_dense(), cbsr.to_dense())
    values = cbsr.values.requires_grad_()
    (grad,) = torch.autograd.grad(cbsr.to(torch.bfloat16).to_dense().sum(), values)
    assert (grad == 1).all()
    for wrong in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="'dtype' must be one of"):
            cbsr.to(wrong)


def test_cuda(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    cbsr = random(5, 300, 7, torch.float32, 'cpu')
    expected = cbsr.to_dense()
    pinned = cbsr.pin_memory()
    assert pinned.values.is_pinned()
    assert pinned.columns.is_pinned()
    for moved in (cbsr.cuda(), cbsr.cuda(device), cbsr.cuda(0), pinned.cuda(non_blocking=True)):
        assert moved.columns.is_cuda
        assert torch.equal(moved.to_dense().cpu(), expected)


def test_clone_shares_nothing(device: torch.device) -> None:
    cbsr = random(5, 30, 7, torch.float32, device)
    before = cbsr.to_dense()
    clone = cbsr.clone()
    clone.values.zero_()
    clone.columns.zero_()
    assert torch.equal(cbsr.to_dense(), before)


# --- edits ---------------------------------------------------------------------------------------


def small(device: torch.device | str) -> CBSR:
    columns = torch.tensor([[0, 2], [3, 1], [0, 1]], device=device)
    return CBSR(torch.ones(3, 2, device=device), columns, 4)


@pytest.mark.parametrize(
    ('edit', 'error', 'message'),
    [
        (lambda c: c.columns.fill_(9), IndexError, r'\[0, 4\), got values from 9 to 9'),
        (lambda c: c.columns[1].fill_(1), ValueError, 'row 1 has column 1 twice'),
        (lambda c: c.columns.view(-1)[5:].zero_(), ValueError, 'row 2 has column 0 twice'),
        (lambda c: setattr(c, 'num_columns', 3), IndexError, r'\[0, 3\), got values from 0 to 3'),
        (lambda c: setattr(c, 'columns', c.columns + 2), IndexError, 'from 2 to 5'),
        (lambda c: setattr(c, 'columns', c.columns * 0), ValueError, 'row 0 has column 0 twice'),
    ],
)
def test_edits_are_checked(device: torch.device, edit, error: type, message: str) -> None:
    graph = torch.tensor([[0, 1], [1, 2]], device=device)
    for make in (lambda c: c, CBSR.clone, CBSR.detach, copy.deepcopy, copy.copy):
        cbsr = make(small(device))
        edit(cbsr)
        for run in (
            lambda c: c.to_dense(),
            lambda c: cbsr_spmm(graph, c),
            lambda c: c.clone(),
            lambda c: c.to(torch.float64),
            lambda c: copy.deepcopy(c).to_dense(),
            lambda c: copy.copy(c).to_dense(),
        ):
            with pytest.raises(error, match=f"'columns' must be.*{message}"):
                run(cbsr)


def test_right_edits_are_taken(device: torch.device) -> None:
    cbsr = small(device)
    cbsr.columns[0, 0] = 3
    cbsr.values.mul_(2)
    expected = [[0, 0, 2, 2], [0, 2, 0, 2], [2, 2, 0, 0]]
    assert cbsr.to_dense().tolist() == expected
    cbsr.values = cbsr.values / 2
    cbsr.columns = cbsr.columns.flip(1)
    assert cbsr.to_dense().tolist() == [[v / 2 for v in row] for row in expected]
    cbsr.num_columns = 5
    assert cbsr.to_dense().shape == (3, 5)


def test_of_maxk_can_be_edited(device: torch.device) -> None:
    cbsr = maxk(torch.randn(3, 9, device=device), 2)
    cbsr.columns.fill_(9)
    with pytest.raises(IndexError, match="'columns'"):
        cbsr.to_dense()


def test_columns_are_checked_once(device: torch.device) -> None:
    assert 'aten::sort' in ops_of(lambda: small(device))  # A check sorts.
    cbsr = small(device)

    def move() -> None:
        moved = [cbsr, cbsr.clone(), cbsr.to(torch.float64), cbsr.detach(), cbsr.cpu()]
        for other in moved:
            other.to_dense()

    assert 'aten::sort' not in ops_of(move)


def test_inference_mode(device: torch.device) -> None:
    expected = small(device).to_dense()
    with torch.inference_mode():
        cbsr = small(device)
        assert torch.equal(cbsr.to_dense(), expected)
        with pytest.raises(IndexError, match="'columns'"):
            CBSR(cbsr.values, cbsr.columns + 3, 4)
        other = copy.deepcopy(cbsr)
        other.columns = other.columns + 3
        with pytest.raises(IndexError, match="'columns'"):
            other.to_dense()
    assert torch.equal(cbsr.to_dense(), expected)
    assert torch.equal(cbsr.clone().to_dense(), expected)


# --- compilation ---------------------------------------------------------------------------------


def test_compiles_without_graph_break(device: torch.device) -> None:
    torch._dynamo.reset()

    def run(values: Tensor, columns: Tensor) -> Tensor:
        cbsr = CBSR(values, columns, 40).to(torch.float64)
        return (cbsr.to_dense() + cbsr.size(1)) / cbsr.k

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    for dtype in (torch.uint8, torch.int64):
        values = torch.randn(6, 7, device=device, requires_grad=True)
        columns = random_columns(6, 40, 7, device).to(dtype)
        results = []
        for out in (run(values, columns), compiled(values, columns)):
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), values)))
        torch.testing.assert_close(*results)


def test_compiled_code_takes_a_cbsr(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda cbsr: cbsr.to_dense() * 2, fullgraph=True, backend='aot_eager')
    for k in (3, 5):
        cbsr = random(6, 40, k, torch.float32, device)
        assert torch.equal(compiled(cbsr), cbsr.to_dense() * 2)


@pytest.mark.parametrize('wrong', [[0, 4], [-1, 2], [3, 3]])
def test_compiled_code_refuses_wrong_columns(wrong: list[int]) -> None:
    # On CUDA this is an assertion on the device, after which the process has to end.
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda values, columns: CBSR(values, columns, 4).to_dense(),
        fullgraph=True,
        backend='aot_eager',
    )
    values, columns = torch.ones(2, 2), torch.tensor([[0, 1], [3, 0]])
    compiled(values, columns)
    columns[1] = torch.tensor(wrong)
    with pytest.raises(RuntimeError, match="'columns' are out of range or occur twice"):
        compiled(values, columns)


# --- bad input -----------------------------------------------------------------------------------

VALUES, COLUMNS = torch.ones(2, 2), torch.tensor([[0, 1], [3, 0]])


@pytest.mark.parametrize(
    ('error', 'message', 'values', 'columns', 'num_columns'),
    [
        (TypeError, "'values' must be a tensor, got list", [[1.0]], COLUMNS, 4),
        (TypeError, "'values' must be one of.*int64", COLUMNS, COLUMNS, 4),
        (TypeError, "'values' must be one of.*bool", VALUES.bool(), COLUMNS, 4),
        (TypeError, "'values' must be a strided", VALUES.to_sparse(), COLUMNS, 4),
        (ValueError, r"'values'.*got \[2\]", VALUES[0], COLUMNS[0], 4),
        (ValueError, r"'values'.*got \[1, 2, 2\]", VALUES[None], COLUMNS[None], 4),
        (TypeError, "'columns' must be a tensor, got list", VALUES, [[0, 1], [3, 0]], 4),
        (TypeError, "'columns' must hold integers, got torch.float32", VALUES, VALUES, 4),
        (TypeError, "'columns' must hold integers, got torch.bool", VALUES, VALUES.bool(), 4),
        (TypeError, "'columns' must be a strided", VALUES, COLUMNS.to_sparse(), 4),
        (ValueError, r"'columns'.*\[2, 2\] as 'values', got \[2\]", VALUES, COLUMNS[0], 4),
        (ValueError, r"'columns'.*got \[2, 1\]", VALUES, COLUMNS[:, :1], 4),
        (ValueError, r"'columns'.*got \[1, 2\]", VALUES, COLUMNS[:1], 4),
        (IndexError, r"'columns'.*\[0, 3\), got values from 0 to 3", VALUES, COLUMNS, 3),
        (IndexError, r"'columns'.*got values from -1 to 2", VALUES, COLUMNS - 1, 4),
        (IndexError, r"'columns'.*got values from -1 to 2", VALUES, (COLUMNS - 1).char(), 4),
        (IndexError, r"'columns'.*to 259", VALUES, COLUMNS + 256, 4),  # 0 to 3 as uint8
        (ValueError, "'columns' must be distinct.*row 1 has column 3 twice",
         VALUES, COLUMNS.clamp(min=torch.tensor([[0], [3]])), 4),
        (TypeError, "'num_columns' must be an integer, got float", VALUES, COLUMNS, 4.0),
        (TypeError, "'num_columns' must be an integer, got bool", VALUES, COLUMNS, True),
        (TypeError, "'num_columns' must be an integer, got NoneType", VALUES, COLUMNS, None),
        (ValueError, "'values' must have 1 to 1 columns", VALUES, COLUMNS, 1),
        (ValueError, "'num_columns' must be at least 1, got 0", VALUES, COLUMNS, 0),
        (ValueError, "'num_columns' must be at least 1, got -1", VALUES, COLUMNS, -1),
        (ValueError, "'values' must have 1 to 4 columns", VALUES[:, :0], COLUMNS[:, :0], 4),
    ],
)  # fmt: skip
def test_bad_input(
    device: torch.device, error: type, message: str, values, columns, num_columns
) -> None:
    values, columns = (t.to(device) if isinstance(t, Tensor) else t for t in (values, columns))
    with pytest.raises(error, match=message):
        CBSR(values, columns, num_columns)


@pytest.mark.parametrize(
    ('error', 'message', 'x', 'k'),
    [
        (TypeError, "'x' must be a tensor", [[1.0]], None),
        (TypeError, "'x' must be one of.*int64", COLUMNS, None),
        (TypeError, "'x' must be a strided", VALUES.to_sparse(), None),
        (ValueError, r"'x'.*got \[2\]", VALUES[0], None),
        (ValueError, "'k' must be at least 2, the most non-zeros of a row, got 1", VALUES, 1),
        (ValueError, "'k' must be 1 to 2.*got 3", VALUES, 3),
        (ValueError, "'k' must be 1 to 2.*got 0", VALUES, 0),
        (ValueError, "'k' must be 1 to 0", VALUES[:, :0], None),
        (TypeError, "'k' must be an integer, got bool", VALUES, True),
        (TypeError, "'k' must be an integer, got float", VALUES, 2.0),
    ],
)
def test_bad_dense(device: torch.device, error: type, message: str, x, k) -> None:
    x = x.to(device) if isinstance(x, Tensor) else x
    with pytest.raises(error, match=message):
        CBSR.from_dense(x, k)


def test_mixed_devices(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    with pytest.raises(ValueError, match="'columns' is on cpu, but 'values' is on cuda"):
        CBSR(VALUES.to(device), COLUMNS, 4)
    with pytest.raises(ValueError, match="'columns' is on cuda.*, but 'values' is on cpu"):
        CBSR(VALUES, COLUMNS.to(device), 4)
