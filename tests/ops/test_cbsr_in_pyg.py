"""What PyG's Data, files and processes do with a CBSR."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from pyg_fast import ops
from pyg_fast.ops import CBSR


def make(device: torch.device | str, width: int = 300) -> CBSR:
    return ops.maxk(torch.randn(6, width, device=device), 7)


def assert_equal(a: CBSR, b: CBSR) -> None:
    assert type(a) is type(b) is CBSR
    assert (a.shape, a.dtype, a.columns.dtype) == (b.shape, b.dtype, b.columns.dtype)
    assert torch.equal(a.to_dense().cpu(), b.to_dense().cpu())


def data_of(cbsr: CBSR) -> Data:
    edge_index = torch.tensor([[0, 1, 5], [1, 2, 0]], device=cbsr.device)
    return Data(h=cbsr, edge_index=edge_index, num_nodes=6)


def test_is_that_of_ops() -> None:
    assert CBSR is ops.CBSR


def test_data_moves_it(device: torch.device) -> None:
    cbsr = make('cpu')
    for move in (
        lambda data: data.to(device),
        lambda data: data.to(device, non_blocking=True),
        lambda data: data.cuda() if device.type == 'cuda' else data.cpu(),
    ):
        moved = move(data_of(cbsr))
        assert moved.h.device.type == moved.h.columns.device.type == device.type
        assert_equal(moved.h, cbsr)
        back = moved.cpu()
        assert back.h.device.type == 'cpu'
        assert_equal(back.h, cbsr)
        out = ops.cbsr_spmm(moved.edge_index, moved.h)
        assert torch.equal(out.cpu(), ops.cbsr_spmm(back.edge_index, cbsr))


def test_data_pins_it(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    cbsr = make('cpu')
    pinned = data_of(cbsr).pin_memory()
    assert pinned.h.values.is_pinned()
    assert pinned.h.columns.is_pinned()
    assert_equal(pinned.h, cbsr)


def test_data_copies_it(device: torch.device) -> None:
    cbsr = make(device)
    expected = cbsr.clone()
    for clone in (data_of(cbsr).clone(), copy.deepcopy(data_of(cbsr))):
        assert_equal(clone.h, expected)
        clone.h.values.zero_()
        clone.h.columns.zero_()
    assert_equal(cbsr, expected)


def test_data_detaches_it(device: torch.device) -> None:
    cbsr = ops.maxk(torch.randn(6, 20, device=device, requires_grad=True), 7)
    detached = data_of(cbsr).detach()
    assert cbsr.requires_grad
    assert not detached.h.requires_grad
    assert_equal(detached.h, cbsr.detach())


def test_data_shares_it() -> None:
    cbsr = make('cpu')
    data = data_of(cbsr).share_memory_()
    assert data.h.values.is_shared()
    assert data.h.columns.is_shared()
    assert_equal(data.h, cbsr)


def _double(cbsr: CBSR, done) -> None:
    cbsr.values.mul_(2)
    done.put(cbsr.to_dense().sum().item())


def test_another_process_reads_and_writes_it() -> None:
    cbsr = make('cpu').share_memory_()
    expected = cbsr.to_dense() * 2
    context = get_context('fork')
    done = context.SimpleQueue()
    process = context.Process(target=_double, args=(cbsr, done))
    process.start()
    total = done.get()
    process.join()
    assert process.exitcode == 0
    assert total == pytest.approx(expected.sum().item(), rel=1e-4)
    assert torch.equal(cbsr.to_dense(), expected)


def test_batches_keep_each(device: torch.device) -> None:
    several = [make(device) for _ in range(3)]
    batch = Batch.from_data_list([data_of(cbsr) for cbsr in several])
    for a, b in zip(batch.h, several, strict=True):
        assert_equal(a, b)
    moved = batch.to('cpu')
    for a, b in zip(moved.h, several, strict=True):
        assert a.device.type == 'cpu'
        assert_equal(a, b)


def test_loader_hands_it_over() -> None:
    several = [make('cpu') for _ in range(2)]
    loader = DataLoader([data_of(cbsr) for cbsr in several], batch_size=1, num_workers=1)
    for batch, cbsr in zip(loader, several, strict=True):
        assert_equal(batch.h[0], cbsr)


@pytest.mark.parametrize('width', [9, 300, 70000])
def test_files(device: torch.device, width: int) -> None:
    cbsr = make(device, width)
    file = io.BytesIO()
    torch.save({'h': cbsr}, file)
    for options in (dict(weights_only=True), dict(weights_only=False), dict(map_location='cpu')):
        file.seek(0)
        loaded = torch.load(file, **options)['h']
        assert loaded.device.type == ('cpu' if 'map_location' in options else device.type)
        assert_equal(loaded, cbsr)


def test_pickles_and_copies(device: torch.device) -> None:
    cbsr = make(device)
    for other in (pickle.loads(pickle.dumps(cbsr)), copy.deepcopy(cbsr), copy.copy(cbsr)):
        assert_equal(other, cbsr)
        assert other.device == cbsr.device


def test_copies_of_what_takes_gradients(device: torch.device) -> None:
    values = torch.randn(2, 2, device=device, requires_grad=True)
    cbsr = CBSR(values, torch.tensor([[0, 1], [2, 0]], device=device), 3)
    for other in (pickle.loads(pickle.dumps(cbsr)), copy.deepcopy(cbsr)):
        other.to_dense().pow(2).sum().backward()
        assert torch.equal(other.values.grad, 2 * values)
    assert values.grad is None


def test_files_are_not_trusted(device: torch.device) -> None:
    # As a file that claims its columns were checked.
    cbsr = make(device, 9)
    wrong = torch.full_like(cbsr.columns, 200)
    state = dict(cbsr.__dict__, columns=wrong, _checked=(wrong, wrong._version, 9))
    loaded = CBSR.__new__(CBSR)
    loaded.__setstate__(state)
    file = io.BytesIO()
    torch.save(loaded, file)
    file.seek(0)
    for other in (loaded, torch.load(file), pickle.loads(pickle.dumps(loaded))):
        for use in (CBSR.to_dense, CBSR.clone, CBSR.cpu, lambda c: ops.cbsr_spmm(graph(c), c)):
            with pytest.raises(IndexError, match="'columns'.*200"):
                use(other)


def graph(cbsr: CBSR) -> Tensor:
    return torch.zeros(2, 1, dtype=torch.long, device=cbsr.device)
