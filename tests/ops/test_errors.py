"""Errors of raw ops: the record of an invalid edge, and running out of memory."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from _captures import captured
from _raw_ops import guarded
from _raw_ops import guarded_ops as ops
from torch import Tensor

import pyg_fast
from pyg_fast.ops import gat, spmm
from pyg_fast.sparse.to_csr import to_csr

# --- the record of an invalid edge ----------------------------------------------------------------


@pytest.fixture
def record() -> Iterator[ctypes.Array]:
    if not (torch.cuda.is_available() and pyg_fast.with_cuda()):
        pytest.skip('no CUDA device, or built without CUDA')
    torch.cuda.init()
    words = (ctypes.c_int64 * 2).from_address(ops.error_record())
    torch.cuda.synchronize()
    words[0] = words[1] = 0
    yield words
    torch.cuda.synchronize()
    words[0] = words[1] = 0


def read(record: ctypes.Array) -> tuple[int, int, int] | None:
    """The end, its index and the number of nodes; clears the record."""
    torch.cuda.synchronize()
    word, limit = record[0], record[1]
    record[0] = 0
    if word == 0:
        return None
    assert word < 0  # bit 63
    index = word & (2**62 - 1)
    return word >> 62 & 1, index - 2**62 if index >= 2**61 else index, limit


def test_address_of_the_record() -> None:
    if pyg_fast.with_cuda() and torch.cuda.is_available():
        assert ops.error_record() == ops.error_record() != 0
    else:
        assert ops.error_record() == 0


RUNS: dict[str, Callable[[Tensor, int, int, bool], object]] = {
    'to_csr': lambda e, src, dst, reverse: ops.to_csr(e, src, dst, reverse, False, False),
    'to_csr_csc': lambda e, src, dst, reverse: ops.to_csr_csc(e, src, dst, True, False),
    **{
        f'spmm_coo{", counted" * count}': lambda e, src, dst, reverse, count=count: ops.spmm_coo(
            e, None, torch.ones(dst if reverse else src, 8, device=e.device), None, None, None,
            src if reverse else dst, reverse, False, count,
        )
        for count in (False, True)
    },
    'spmm_coo of no columns': lambda e, src, dst, reverse: ops.spmm_coo(
        e, None, torch.ones(dst if reverse else src, 0, device=e.device), None, None, None,
        src if reverse else dst, reverse, False, False,
    ),
    'gcn_degree': lambda e, src, dst, reverse: ops.gcn_degree(e, None, src, True, reverse),
    'gcn_degree of weights': lambda e, src, dst, reverse: ops.gcn_degree(
        e, torch.ones(e.size(1), device=e.device), src, True, reverse
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', RUNS)
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('num_edges', [1, 70, 40_000])
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_record_of_an_invalid_edge(
    record: ctypes.Array, name: str, reverse: bool, num_edges: int, index: torch.dtype
) -> None:
    src, dst = (50, 50) if name.startswith('gcn') else (50, 60)
    edge_index = torch.randint(50, (2, num_edges), device='cuda').to(index)
    RUNS[name](edge_index, src, dst, reverse)
    assert read(record) is None
    huge = [2**40, -(2**62), 2**62] if index == torch.int64 else []
    for end, limit in ((0, src), (1, dst)):
        for bad in (-1, limit, 2**31 - 1, -(2**31), *huge):
            at = num_edges * 2 // 3
            wrong = edge_index.clone()
            wrong[end, at] = bad
            RUNS[name](wrong, src, dst, reverse)
            clamped = min(max(bad, -(2**61)), 2**61 - 1)
            assert read(record) == (end, clamped, limit)
    RUNS[name](edge_index, src, dst, reverse)
    assert read(record) is None


def test_record_of_many_invalid_edges_is_of_one_of_them(record: ctypes.Array) -> None:
    edge_index = torch.randint(1000, (2, 2_000_000), device='cuda')
    x = torch.ones(500, 4, device='cuda')
    for _ in range(20):
        ops.spmm_coo(edge_index, None, x, None, None, None, 300, False, False, False)
        end, index, limit = read(record) or (0, 0, 0)
        assert limit == (500, 300)[end]
        assert limit <= index < 1000


def test_first_edge_stays_until_it_is_read(record: ctypes.Array) -> None:
    good = torch.zeros(2, 5, dtype=torch.long, device='cuda')
    for bad in (7, 8, 9):
        RUNS['spmm_coo'](good + torch.tensor([[bad], [0]], device='cuda'), 3, 3, False)
        torch.cuda.synchronize()
    RUNS['spmm_coo'](good, 3, 3, False)
    assert read(record) == (0, 7, 3)


def test_replay_of_a_graph_leaves_a_record(record: ctypes.Array) -> None:
    edge_index = torch.zeros(2, 100, dtype=torch.long, device='cuda')
    x = torch.ones(10, 8, device='cuda')
    replay, _ = captured(
        lambda: ops.spmm_coo(edge_index, None, x, None, None, None, 10, False, False, False)
    )
    replay()
    assert read(record) is None
    edge_index[1, 50] = 10
    replay()
    assert read(record) == (1, 10, 10)


# --- out of memory --------------------------------------------------------------------------------


def out_of_memory(*args: object) -> Tensor:
    raise RuntimeError('out of memory: 5368709120 bytes on cuda:0')


def test_error_of_an_op_has_its_type() -> None:
    run = guarded('spmm', out_of_memory)
    text = r'pyg_fast.spmm .*5368709120 .*5.00 GiB.*cuda:0'
    with pytest.raises(torch.OutOfMemoryError, match=text) as caught:
        run(1, 2)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert 'frame' not in str(caught.value)


@pytest.mark.parametrize(
    'error', [RuntimeError('no memory'), ValueError('out of memory: 3 bytes on cuda:0'),
              RuntimeError('out of memory: 3 bytes on cpu')],
)  # fmt: skip
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        guarded('spmm', raises)()
    assert caught.value is error


def test_ops_by_name() -> None:
    x, position = torch.rand(3, 4), torch.tensor([2, -1, 0])
    expected = torch.ops.pyg_fast.expand_rows(x, position, 0.5)
    assert torch.equal(ops.expand_rows(x, position, 0.5), expected)
    assert torch.equal(ops.expand_rows.default(x, position, 0.5), expected)
    assert torch.equal(ops.expand_rows(x=x, position=position, fill=0.5), expected)
    with pytest.raises(AttributeError, match="no op 'expand_row'"):
        ops.expand_row  # noqa: B018
    with pytest.raises(RuntimeError, match='position'):
        ops.expand_rows(x, x, 0.5)


def test_ops_are_traced() -> None:
    x, position = torch.rand(3, 4), torch.tensor([2, -1, 0])
    for run in (
        lambda x, position: ops.expand_rows(x, position, 0.5) + 1,
        lambda x, position: ops.expand_rows.default(x, position, 0.5) + 1,
    ):
        compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
        assert torch.equal(compiled(x, position), run(x, position))


def test_size_that_no_memory_has_on_a_cpu() -> None:
    x, rowptr = torch.rand(1, 1), torch.zeros(2, dtype=torch.long)
    for run, size in (
        (lambda: ops.expand_rows(x.expand(1, 2**55), torch.zeros(3).long(), 0.0), 2**57),  # a copy
        (lambda: ops.spmm_max_backward_x(
            rowptr, rowptr[:0].int(), None, None, torch.zeros(1, 1).long(), x, 2**55
        ), 2**57),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as caught:
            run()
        assert str(caught.value).startswith(f'out of memory: {size} bytes on cpu')
        assert 'frame #' not in str(caught.value)


@pytest.fixture
def full_gpu() -> Iterator[Callable[[], None]]:
    """Leaves about 64 MiB of the GPU's memory; the function given frees the rest."""
    if not (torch.cuda.is_available() and pyg_fast.with_cuda()):
        pytest.skip('no CUDA device, or built without CUDA')
    torch.cuda.empty_cache()
    held: list[Tensor] = []

    def fill() -> None:
        while (free := torch.cuda.mem_get_info()[0]) > 96 << 20:
            held.append(torch.empty(max(free - (64 << 20), 1 << 20), dtype=torch.uint8,
                                    device='cuda'))  # fmt: skip

    def free() -> None:
        held.clear()
        torch.cuda.empty_cache()

    free.fill = fill  # type: ignore[attr-defined]
    yield free
    free()


@pytest.mark.parametrize('name', ['spmm', 'gat', 'backward of gat', 'to_csr', 'spmm_coo'])
def test_memory_of_a_gpu_that_runs_out(full_gpu: Callable[[], None], name: str) -> None:
    n = 1 << 16
    edge_index = torch.arange(n, device='cuda').expand(2, -1).contiguous()
    graph = pyg_fast.graph.graph_of(edge_index, n, n)
    x = torch.ones(n, 1024, device='cuda')  # 256 MiB
    heads = x.view(n, 8, 128).requires_grad_(name == 'backward of gat')
    alpha = torch.zeros(n, 8, device='cuda')
    out = gat(graph, heads, alpha, alpha) if name == 'backward of gat' else None
    grad = None if out is None else torch.ones_like(out)
    many = torch.zeros(2, 1 << 26, dtype=torch.int32, device='cuda')
    runs = {
        'spmm': lambda: spmm(graph, x),
        'gat': lambda: gat(graph, heads, alpha, alpha),
        'backward of gat': lambda: torch.autograd.grad(out, heads, grad, retain_graph=True),
        'to_csr': lambda: ops.to_csr(many, 10, 10, False, False, False),
        'spmm_coo': lambda: ops.spmm_coo(
            edge_index, None, x.detach(), None, None, None, n, False, False, False
        ),
    }
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    full_gpu.fill()  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r'pyg_fast\.\w+ tried .* on cuda:0') as e:
            runs[name]()
        assert 'frame #' not in str(e.value)
    full_gpu()
    runs[name]()
    torch.cuda.synchronize()
    assert to_csr(edge_index, n, n)[0].size(0) == n + 1
