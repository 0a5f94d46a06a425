"""The choice of group sizes: formulas, measuring, and what graphs get of it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

from pyg_fast.graph import graph_of, prepare_edge_index
from pyg_fast.nn import PathPreparedGCNConv
from pyg_fast.transforms import GroupSizes, ToCSR, choose_group_size, group_sizes
from pyg_fast.transforms.group_sizes import SIZES, ChosenSize, Degrees, regression_size

N, E = 60, 900


def homogeneous(device: torch.device | str = 'cpu') -> Data:
    edge_index = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(3))
    edge_index[1, :200] = 7
    x = torch.randn(N, 5)
    return Data(x=x, edge_index=edge_index, edge_attr=torch.rand(E)).to(device)


def rows_of(degrees: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(degrees).tolist()])


# --- formulas ------------------------------------------------------------------------------------


def test_atomic_is_a_flag() -> None:
    with pytest.raises(TypeError, match="'atomic' must be True or False, got str"):
        GroupSizes(atomic='yes')


def test_degrees(device: torch.device) -> None:
    for dtype in (torch.int32, torch.int64):
        rowptr = rows_of([3, 0, 5, 1]).to(device, dtype)
        assert Degrees.of(rowptr) == (4, 9, 5, 35)
    assert Degrees.of(torch.tensor([0], device=device)) == (0, 0, 0, 0)
    # Squares that an int32 does not hold.
    assert Degrees.of(torch.tensor([0, 2**17], dtype=torch.int32)).squares == 2**34


@pytest.mark.parametrize(('degrees', 'size'), [
    # 0.65538 + 1.67431e-5 |V| - 2.24342e-6 |E| + 0.63641 |E| / |V|, undirected.
    (Degrees(1000, 2 * 100_000, 5000, 0), 64),  # 0.655 + 0.017 - 0.224 + 63.641 = 64.09
    (Degrees(1000, 2 * 100_000, 60, 0), 60),  # the largest degree
    (Degrees(2_449_029, 2 * 61_859_140, 10_000, 0), 1),  # below zero
    (Degrees(232_965, 2 * 57_307_946, 20_000, 0), 33),  # 0.655 + 3.901 - 128.566 + 156.553
    (Degrees(0, 0, 0, 0), 1),
    (Degrees(10, 0, 0, 0), 1),
])  # fmt: skip
def test_formula_of_the_paper(degrees: Degrees, size: int) -> None:
    assert regression_size(degrees, 64, 'paper') == regression_size(degrees, 16, 'paper') == size


def test_fitted_formula(limits: Callable[..., None]) -> None:
    limits(fitted_group_sizes=(0.5, 0.1, 0.3, 0.2, -0.1, 0.25))
    degrees = Degrees(1023, 1023 * 15, 255, 1023 * 15 * 63)
    # log2: 0.5 + 0.1 * 10 + 0.3 * 4 + 0.2 * 8 - 0.1 * 6 + 0.25 * log2(width)
    assert regression_size(degrees, 64) == round(2**5.2)
    assert regression_size(degrees, 16, 'fitted') == round(2**4.7)
    assert regression_size(degrees._replace(largest=3), 64) == 3
    assert regression_size(degrees, 64, 'paper') != regression_size(degrees, 64)


def test_learned_is_the_fitted_regression() -> None:
    for edge_index in (homogeneous().edge_index, torch.randint(5000, (2, 200_000))):
        graph = graph_of(edge_index, 5000, 5000)
        for width in (16, 128):
            size = regression_size(Degrees.of(graph.rowptr), width, 'fitted')
            for coefficients in (None, 'paper'):
                assert size == choose_group_size(
                    graph.rowptr, 5000, width, 'learned', coefficients=coefficients
                )


RECORD = Path(__file__).parents[2] / 'benchmarks/results/group-sizes-nvidia-h200.json'


@pytest.mark.skipif(not RECORD.exists(), reason='of a source tree with benchmarks')
def test_choices_beside_the_times_recorded() -> None:
    logs = []
    for graph in json.loads(RECORD.read_text())['graphs']:
        degrees = Degrees(**graph['degrees'])
        for width, ms in graph['ms'].items():
            sizes, times = zip(*((int(k), t) for k, t in ms.items() if k != 'none'), strict=True)
            size = regression_size(degrees, int(width))
            size = sizes[-1] if size >= degrees.largest else size  # No row is cut.
            logs.append(np.interp(np.log(size), np.log(sizes), np.log(times)) - np.log(min(times)))
    assert len(logs) == 276
    assert math.exp(np.mean(logs)) < 1.035
    assert math.exp(max(logs)) < 1.35


# --- measuring -----------------------------------------------------------------------------------


def test_measured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # Degrees of no other test, as sizes are remembered by degrees.
    graph = graph_of(homogeneous(device).edge_index[:, 1:], N, N)
    if device.type == 'cpu':
        assert choose_group_size(graph.rowptr, N, 64, 'measured', col=graph.col) is None
        return
    times = group_sizes.measure_group_sizes(graph, 64)
    largest = Degrees.of(graph.rowptr).largest
    assert list(times) == [None, *(s for s in SIZES if s < 2 * largest)]
    assert all(ms > 0 for ms in times.values())
    calls = []

    def measure(graph: object, width: int) -> dict:
        calls.append(width)
        return {None: 3.0, 4: 2.0, 8: 1.0 + width}

    monkeypatch.setattr(group_sizes, 'measure_group_sizes', measure)
    for _ in range(2):
        for width, size in ((64, 4), (16, 4)):
            chosen = choose_group_size(graph.rowptr, N, width, 'measured', col=graph.col)
            assert chosen == size
    assert calls == [64, 16]


# --- the transform -------------------------------------------------------------------------------


def sizes_of(edge_index: EdgeIndex, size: tuple[int, int]) -> tuple:
    graph = graph_of(edge_index, *size)
    return tuple(None if g is None else g.size for g in (graph.groups, graph.t_groups))


@pytest.mark.parametrize('strategy', ['regression', 'learned'])
def test_transform(device: torch.device, strategy: str) -> None:
    data = homogeneous(device)
    out = GroupSizes(strategy, width=32)(data)
    assert type(data.edge_index) is Tensor
    assert 'group_sizes' not in data
    prepared = ToCSR()(data)
    assert torch.equal(out.edge_index.as_tensor(), prepared.edge_index.as_tensor())
    assert torch.equal(out.edge_attr, prepared.edge_attr)
    graph = graph_of(prepared.edge_index, N, N)
    expected = tuple(
        choose_group_size(g.rowptr, N, 32, strategy, col=g.col) for g in (graph, graph.t())
    )
    assert sizes_of(out.edge_index, (N, N)) == expected
    assert out.group_sizes == ChosenSize(*expected, 32, strategy)
    assert sizes_of(prepared.edge_index, (N, N)) == (None, None)


def test_layers_use_the_groups(device: torch.device) -> None:
    data = homogeneous(device)
    conv = PathPreparedGCNConv(5, 4).to(device)
    plain = conv(data.x, ToCSR()(data).edge_index)
    out = GroupSizes(atomic=True)(data)
    assert graph_of(out.edge_index, N, N).groups.atomic
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    conv(data.x, out.edge_index)  # the normalisation
    with Seen():
        again = conv(data.x, out.edge_index)
    torch.testing.assert_close(again, plain)
    assert 'pyg_fast::spmm_groups' in seen
    assert 'pyg_fast::spmm' not in seen


def test_hetero_data(device: torch.device) -> None:
    data = HeteroData()
    data['a'].x, data['b'].x = torch.randn(9, 2), torch.randn(200, 2)
    data['a', 'to', 'b'].edge_index = torch.stack([torch.randint(9, (800,)),
                                                   torch.randint(200, (800,))])  # fmt: skip
    data['b', 'of', 'b'].edge_index = torch.randint(200, (2, 30))
    out = GroupSizes(coefficients='paper')(data.to(device))
    for key, size in ((('a', 'to', 'b'), (9, 200)), (('b', 'of', 'b'), (200, 200))):
        chosen = out[key].group_sizes
        assert sizes_of(out[key].edge_index, size) == (chosen.size, chosen.t_size)
    # 0.655 + 400 / 9 * 0.636 for rows of 89 edges.
    assert out['a', 'to', 'b'].group_sizes == ChosenSize(2, 29, 64, 'regression')


def test_strategy_without_a_choice() -> None:
    out = GroupSizes('measured')(homogeneous())
    assert sizes_of(out.edge_index, (N, N)) == (None, None)
    assert repr(out.group_sizes) == 'no groups (measured, 64 wide)'


def test_graph_that_is_prepared_already(device: torch.device) -> None:
    data = homogeneous(device)
    data.edge_index = prepare_edge_index(data.edge_index, (N, N))[0]
    rowptr = graph_of(data.edge_index, N, N).rowptr
    out = T.Compose([ToCSR(), GroupSizes()])(data)
    assert out.edge_index is data.edge_index
    assert graph_of(out.edge_index, N, N).rowptr is rowptr
    assert graph_of(out.edge_index, N, N).groups is not None


def test_moved_data_keeps_the_row_and_forgets_the_groups(device: torch.device) -> None:
    out = GroupSizes()(homogeneous(device))
    clone = out.clone()
    assert clone.group_sizes == out.group_sizes
    assert sizes_of(clone.edge_index, (N, N)) == (None, None)
    assert out.to(device).group_sizes == out.group_sizes
    batch = Batch.from_data_list([out, out])
    assert batch.group_sizes == [out.group_sizes] * 2
    assert sizes_of(batch.edge_index, (2 * N, 2 * N)) == (None, None)


def test_data_without_edges(device: torch.device) -> None:
    empty = Data(x=torch.randn(3, 2), edge_index=torch.empty(2, 0, dtype=torch.long)).to(device)
    out = GroupSizes()(empty)
    assert out.group_sizes.size == out.group_sizes.t_size == 1
    assert 'group_sizes' not in GroupSizes()(Data(x=torch.randn(3, 2)))


def test_repr() -> None:
    assert repr(GroupSizes()) == "GroupSizes('regression', width=64)"
    assert repr(GroupSizes('regression', 16, 'paper', atomic=True)) == (
        "GroupSizes('regression', width=16, coefficients='paper', atomic=True)")  # fmt: skip
    assert repr(ChosenSize(8, None, 64, 'learned')) == (
        'groups of 8, transposed a row (learned, 64 wide)')  # fmt: skip


@pytest.mark.parametrize('make', [GroupSizes, lambda **kwargs: choose_group_size(
    torch.tensor([0, 1]), 1, col=torch.tensor([0]), **kwargs)])  # fmt: skip
@pytest.mark.parametrize('bad', [
    (ValueError, 'strategy', 'best'), (ValueError, 'coefficients', 'mine'),
    (ValueError, 'width', 0), (TypeError, 'width', 64.0), (TypeError, 'width', True),
])  # fmt: skip
def test_bad_arguments(make: Callable, bad: tuple) -> None:
    error, name, value = bad
    with pytest.raises(error, match=f"'{name}'"):
        make(**{name: value})


def test_edges_in_place_of_row_pointers() -> None:
    with pytest.raises(ValueError, match=r"'rowptr' must be integers of shape .*, got \[2, 9\]"):
        choose_group_size(torch.randint(60, (2, 9)), 60)


def test_measuring_takes_no_coefficients() -> None:
    with pytest.raises(ValueError, match="'coefficients' must be None for strategy='measured'"):
        GroupSizes('measured', coefficients='paper')


def test_measuring_needs_columns() -> None:
    with pytest.raises(ValueError, match="'col'.*'measured'"):
        choose_group_size(torch.tensor([0, 1]), 1, strategy='measured')


def test_bad_graph_names_the_store() -> None:
    with pytest.raises(IndexError, match=r"data: 'edge_index\[0\]'"):
        GroupSizes()(Data(edge_index=torch.tensor([[5], [0]]), num_nodes=3))
