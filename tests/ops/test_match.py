"""Matches between mini-batches: against the reference, for every kind of map, and on bad input."""

from collections.abc import Callable

import pytest
import torch
from _raw_ops import ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pyg_fast.ops import match, match_degree
from pyg_fast.ops.node_map import NodeMap

pytestmark = pytest.mark.usefixtures('several_threads')

INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]
NODES = 20

batches = st.lists(st.integers(0, NODES - 1), max_size=30)


def tensor(ids: list[int], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)


def degree_by_sets(n_ids: list[Tensor]) -> Tensor:
    sets = [set(n_id.tolist()) for n_id in n_ids]
    return torch.tensor(
        [[len(a & b) / max(1, min(len(a), len(b))) for b in sets] for a in sets],
        dtype=torch.float64,
    )


@given(st.lists(st.tuples(batches, batches), min_size=1, max_size=3), st.booleans())
def test_any_batches(
    device: torch.device, pairs: list[tuple[list[int], list[int]]], hashed: bool
) -> None:
    node_map = NodeMap(NODES, device, hashed)
    for ids, others in pairs:
        n_id, previous = tensor(ids, device), tensor(others, device)
        expected = reference.match(n_id, previous, n_id, 0, NODES)
        for given_map in (node_map, None):
            assert match(n_id, previous, NODES, node_map=given_map).equal(expected)


@given(st.lists(batches, min_size=1, max_size=6), st.booleans())
def test_any_degrees(device: torch.device, lists: list[list[int]], hashed: bool) -> None:
    node_map = NodeMap(NODES, device, hashed)
    n_ids = [tensor(ids, device) for ids in lists]
    for given_map in (node_map, node_map, None):
        out = match_degree(n_ids, NODES, node_map=given_map)
        assert out.device == n_ids[0].device
        assert out.cpu().equal(degree_by_sets(n_ids))


@pytest.mark.parametrize('hashed', [False, True])
def test_large_batches(device: torch.device, hashed: bool) -> None:
    num_nodes, size = 200_000, 60_000
    node_map = NodeMap(num_nodes, device, hashed)
    n_ids = [torch.randperm(num_nodes)[:size] for _ in range(4)]
    n_ids[1][:5000] = n_ids[0][-5000:]
    for n_id, previous in zip(n_ids[1:], n_ids, strict=False):
        row = torch.full((num_nodes,), -1)
        row[previous] = torch.arange(size)
        if previous is n_ids[1]:  # which has ids twice
            row = reference.match(torch.arange(num_nodes), previous, previous, 0, num_nodes)
        for _ in range(2):
            out = match(n_id.to(device), previous.to(device), num_nodes, node_map=node_map)
            assert out.cpu().equal(row[n_id])
    on_device = [n_id.to(device) for n_id in n_ids]
    expected = degree_by_sets(n_ids)
    assert 0.2 < float(expected[0, 2]) < 0.4
    for _ in range(3):
        assert match_degree(on_device, num_nodes, node_map=node_map).cpu().equal(expected)


@pytest.mark.parametrize('count', [31, 32, 33, 48, 70])
@pytest.mark.parametrize('hashed', [False, True])
def test_degrees_of_many_batches(device: torch.device, count: int, hashed: bool) -> None:
    n_ids = [torch.randint(90, (int(torch.randint(40, ())),)) for _ in range(count)]
    node_map = NodeMap(90, device, hashed)
    out = match_degree([n_id.to(device) for n_id in n_ids], 90, node_map=node_map)
    assert out.cpu().equal(degree_by_sets(n_ids))


def test_known_degrees(device: torch.device) -> None:
    n_ids = [tensor(ids, device) for ids in ([4, 4, 1, 2], [1, 2, 9, 8, 7], [], [0])]
    expected = torch.zeros(4, 4, dtype=torch.float64).fill_diagonal_(1)
    expected[2, 2] = 0
    expected[0, 1] = expected[1, 0] = 2 / 3
    assert match_degree(n_ids, 10).cpu().equal(expected)


@pytest.mark.parametrize('dtype', INTEGERS)
def test_types_and_strides(device: torch.device, dtype: torch.dtype) -> None:
    n_id = torch.randint(NODES, (60,), device=device).to(dtype)
    previous = torch.randperm(NODES, device=device).to(dtype)
    expected = reference.match(n_id[::2].long(), previous[::3].long(), n_id, 0, NODES)
    assert match(n_id[::2], previous[::3], NODES).equal(expected)
    degrees = match_degree([n_id[::2], previous[::3]], NODES).cpu()
    assert degrees.equal(degree_by_sets([n_id[::2], previous[::3]]))


@pytest.mark.parametrize('hashed', [False, True])
def test_stamps_that_run_out(device: torch.device, hashed: bool) -> None:
    node_map = NodeMap(NODES, device, hashed)
    n_id = torch.arange(NODES, device=device)
    match(n_id, n_id, NODES, node_map=node_map)
    for stamp in (2, 1, 0):
        node_map._stamp = stamp
        for previous in (n_id[:5], n_id[5:], n_id[:0]):
            expected = reference.match(n_id, previous, n_id, 0, NODES)
            assert match(n_id, previous, NODES, node_map=node_map).equal(expected)
            degrees = match_degree([n_id, previous], NODES, node_map=node_map).cpu()
            assert degrees.equal(degree_by_sets([n_id, previous]))


def test_empty(device: torch.device) -> None:
    none, some = tensor([], device), tensor([1, 2], device)
    assert match(none, some, 3).shape == (0,)
    assert match(some, none, 3).tolist() == [-1, -1]
    assert match(none, none, 0).shape == (0,)
    assert match_degree([none], 0).tolist() == [[0.0]]
    assert match_degree([none, none], 5).tolist() == [[0.0] * 2] * 2


@pytest.mark.parametrize('hashed', [False, True])
def test_ids_out_of_range_match_nothing(device: torch.device, hashed: bool) -> None:
    # The loader does not check ids on a GPU.
    node_map = NodeMap(NODES, device, hashed)
    wild = tensor([-1, 2, -(2**62), 5, -1, NODES, 2**62, *range(NODES, 200)], device)
    table, stamp = node_map.table(wild.numel()), node_map.next_stamp()
    found = ops.match(wild, wild, table, stamp, NODES).tolist()
    assert found == [k if node in (2, 5) else -1 for k, node in enumerate(wild.tolist())]
    ptr, stamp = torch.tensor([0, wild.numel()]), node_map.next_stamp()
    count = ops.match_degree(wild, ptr, table, stamp, NODES)
    assert count.tolist() == [[2]]


def test_opcheck_and_fake_kernels(device: torch.device) -> None:
    node_map = NodeMap(NODES, device)
    ids, previous = (torch.randint(NODES, (n,), device=device) for n in (9, 6))
    ptr = torch.tensor([0, 4, 4, 9])
    for name, first in (('match', (ids, previous)), ('match_degree', (ids, ptr))):
        op = getattr(ops, name)
        args = (*first, node_map.table(9), node_map.next_stamp(), NODES)
        out = op(*args)
        assert out.equal(getattr(reference, name)(*args))
        if {a.device.type for a in args if isinstance(a, Tensor)} != {device.type}:
            continue  # Fake tensors know one device alone.
        torch.library.opcheck(getattr(torch.ops.pyg_fast, name).default, args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    table = NodeMap(NODES, device).table(9)
    ids, ptr = torch.arange(9, device=device), torch.tensor([0, 4, 9])
    bad: list[tuple[str, tuple]] = [
        ('match', (ids.int(), ids, table, 1)),
        ('match', (ids, ids.int(), table, 1)),
        ('match', (ids[None], ids, table, 1)),
        ('match', (ids, ids[None], table, 1)),
        ('match', (ids, ids, table[0], 1)),
        ('match', (ids, ids, table.int(), 1)),
        ('match', (ids, ids, table, -1)),
        ('match', (ids, ids, table, 2**32)),
        ('match', (ids, ids, table.new_zeros(2, 12), 1)),
        ('match', (ids, ids, table.new_full((2, 8), -1), 1)),
        ('match', (ids, ids, table[:, 1:].contiguous(), 1)),
        ('match_degree', (ids.int(), ptr, table, 1)),
        ('match_degree', (ids, ptr.int(), table, 1)),
        ('match_degree', (ids, ptr[:0], table, 1)),
        ('match_degree', (ids, ptr.flip(0), table, 1)),
        ('match_degree', (ids, ptr - 1, table, 1)),
        ('match_degree', (ids, ptr + 1, table, 1)),
        ('match_degree', (ids, ptr[None], table, 1)),
        ('match_degree', (ids, torch.zeros(34, dtype=torch.int64), table, 1)),
        ('match_degree', (ids, ptr, table.new_full((2, 8), -1), 1)),
    ]
    if device.type == 'cuda':
        bad += [('match', (ids, ids.cpu(), table, 1)), ('match', (ids, ids, table.cpu(), 1))]
        bad += [('match_degree', (ids, ptr.to(device), table, 1))]
    for name, args in bad:
        with pytest.raises(RuntimeError):
            getattr(ops, name)(*args, NODES)


IDS = torch.arange(4)
FAILS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (TypeError, "'n_id' must be a tensor, got list", lambda: match([0], IDS, 4)),
    (TypeError, "'n_id' must hold integers, got torch.float32", lambda: match(IDS * 1.0, IDS, 4)),
    (TypeError, "'previous' must hold integers, got torch.bool", lambda: match(IDS, IDS > 1, 4)),
    (TypeError, "'previous' must be a strided", lambda: match(IDS, IDS.to_sparse(), 4)),
    (TypeError, "'num_nodes' must be an integer, got float", lambda: match(IDS, IDS, 4.0)),
    (ValueError, "'num_nodes' must not be negative, got -1", lambda: match(IDS, IDS, -1)),
    (ValueError, "'n_id' must have one dimension, got 2", lambda: match(IDS[None], IDS, 4)),
    (ValueError, "'previous' must be on cpu, got meta", lambda: match(IDS, IDS.to('meta'), 4)),
    (ValueError, "'node_map' must be of 4 nodes on cpu, got one of 5",
     lambda: match(IDS, IDS, 4, node_map=NodeMap(5, 'cpu'))),
    (ValueError, "'node_map' must be of 4 nodes on cpu, got one of 4 on meta",
     lambda: match(IDS, IDS, 4, node_map=NodeMap(4, 'meta'))),
    (ValueError, "'device' must be a device, .* got 'cud'", lambda: NodeMap(4, 'cud')),
    (TypeError, "'device' must be a device, .* got 3.5", lambda: NodeMap(4, 3.5)),
    (IndexError, "'n_id' must hold nodes in", lambda: match(IDS, IDS[:2], 3)),
    (IndexError, "'previous' must hold nodes in", lambda: match(IDS, IDS - 1, 4)),
    (IndexError, "'previous' must hold nodes in",
     lambda: match(IDS, IDS + 1, 4, node_map=NodeMap(4, 'cpu'))),
    (TypeError, "'n_ids' must be a list of tensors, got Tensor", lambda: match_degree(IDS, 4)),
    (ValueError, "'n_ids' must hold at least one tensor", lambda: match_degree([], 4)),
    (TypeError, r"'n_ids\[1\]' must be a tensor", lambda: match_degree([IDS, 3], 4)),
    (ValueError, r"'n_ids\[1\]' must be on cpu",
     lambda: match_degree([IDS, IDS.to('meta')], 4)),
    (TypeError, "'num_nodes' must be an integer, got bool", lambda: match_degree([IDS], True)),
    (IndexError, r"'n_ids\[1\]' must hold nodes in \[0, 4\), got values from 1 to 4",
     lambda: match_degree([IDS, IDS + 1], 4)),
    (ValueError, "'node_map' must be of 4",
     lambda: match_degree([IDS], 4, node_map=NodeMap(5, 'cpu'))),
]  # fmt: skip


@pytest.mark.parametrize(('error', 'text', 'call'), FAILS)
def test_bad_input(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()


def test_range_on_a_device_without_a_map(device: torch.device) -> None:
    ids = torch.arange(4, device=device)
    with pytest.raises(IndexError, match='n_id'):
        match(ids, ids[:2], 3)
    with pytest.raises(IndexError, match='n_ids'):
        match_degree([ids - 1], 4)
