"""Estimates of a training step's memory, against what it takes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _live import live_bytes
from _pairs import pairs
from torch_geometric.data import Data

from pyg_fast import MemoryEstimate, memory_estimate
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import Prepare

N, C = 6000, 5


def data_of(device: torch.device, edges: int, scale: int = 1, **kwargs: Any) -> Data:
    nodes = N * scale
    mask = torch.zeros(nodes, dtype=torch.bool)
    mask[torch.randperm(nodes)[: nodes // 50]] = True
    data = Data(
        x=torch.randn(nodes, 32), edge_index=torch.randint(nodes, (2, edges * scale)),
        y=torch.randint(C, (nodes,)), train_mask=mask,
    )  # fmt: skip
    return Prepare(3, group_sizes=None, forward=True, **kwargs)(data.to(device))


def step_bytes(net: PathPreparedGNN, data: Data, active_only: bool = True, x: Any = None) -> int:
    """The most bytes that a step takes, in addition to what was there before."""
    x = data.x if x is None else x
    optimizer = torch.optim.Adam(net.parameters())
    target = data.y[data.train_mask]

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        out = net(x, data.get('edge_index'), paths=data.execution_paths, active_only=active_only)
        loss = F.cross_entropy(out if active_only else out[data.train_mask], target)
        loss.backward()
        optimizer.step()

    for _ in range(2):  # Then paths, graph, gradients and states are there.
        step()
    return live_bytes(step, data.y.device, rounded=False)[1]


def part_of_step(estimate: MemoryEstimate) -> int:
    return sum(estimate.activations) + estimate.temporaries


def assert_near(estimate: int, taken: int) -> None:
    # A GPU's allocator rounds, and libraries take memory for themselves.
    share = 0.1 if torch.cuda.is_available() else 0.01
    assert abs(estimate - taken) <= share * taken


# Of 9000 edges each path is a part; of 60000 the first two are the whole graph.
@pairs(
    ('edges', 'model', 'hidden'),
    [(9000, True), (60000, True), (60000, False)],
    [('gcn', {}), ('gcn', {'checkpoint': True}), ('gcn', {'tile': 8}), ('gcn', {'act': None}),
     ('gcn', {'norm': 'layer_norm', 'act': 'tanh'}), ('sage', {}), ('sage', {'checkpoint': True}),
     ('sage', {'tile': 8}), ('gin', {}), ('gin', {'checkpoint': True})],
    [32, 48],
)  # fmt: skip
def test_is_what_a_step_takes(
    device: torch.device, limits: Callable[..., None], edges: tuple[int, bool],
    model: tuple[str, dict[str, Any]], hidden: int,
) -> None:  # fmt: skip
    limits(fewest_rows_of_streams=300)  # Several parts, not so many that they take long.
    (num_edges, active_only), (conv, options) = edges, model
    data = data_of(device, num_edges)
    net = PathPreparedGNN(conv, 32, hidden, C, 3, dropout=0.5, **options).to(device)
    taken = step_bytes(net, data, active_only)
    assert_near(part_of_step(memory_estimate(net, data, active_only=active_only)), taken)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('on_path', [True, False])
def test_of_an_aggregated_input(device: torch.device, conv: str, on_path: bool) -> None:
    data = data_of(device, 9000)
    net = PathPreparedGNN(conv, 32, 48, C, 3).to(device)
    paths = data.execution_paths if on_path else None
    x = net.aggregate_input(data.x, data.edge_index, paths=paths)
    taken = step_bytes(net, data, x=x)
    estimate = memory_estimate(net, data, x=x, active_only=True)
    assert_near(part_of_step(estimate), taken)
    rows = data.execution_paths[0].num_dst if on_path else N
    assert estimate.features >= rows * 32 * 4 * (1 if conv == 'gcn' else 2)


@pytest.mark.parametrize('edges', [9000, 60000])
@pytest.mark.parametrize('checkpoint', [True, False])
def test_counts_what_is_there(device: torch.device, checkpoint: bool, edges: int) -> None:
    data = data_of(device, edges)
    net = PathPreparedGNN('gcn', 32, 48, C, 3, checkpoint=checkpoint).to(device)
    before = memory_estimate(net, data)
    assert before.features == N * 32 * 4
    assert before.parameters == before.gradients == 4 * sum(p.numel() for p in net.parameters())
    assert before.optimizer == 2 * before.parameters
    assert memory_estimate(net, data, optimizer_states=0).optimizer == 0
    assert before.other == N * 8 + N + 8 * data.e_perm.numel()  # labels, mask, and the last
    assert before.paths >= sum(path.num_bytes for path in data.execution_paths[:1])
    assert before.total == sum(before[:7]) + sum(before.activations) + before.temporaries
    step_bytes(net, data)
    after = memory_estimate(net, data)
    # What the first step computes for graph and paths is foreseen.
    for name in ('graph', 'paths'):
        assert abs(getattr(after, name) - getattr(before, name)) <= 0.02 * getattr(after, name)
    text = repr(before)
    assert f'most in {before.moment}' in text
    assert all(f'  {name} ' in text for name in ('graph', 'activations[2]', 'total'))


@pytest.mark.parametrize('edges', [9000, 60000])
def test_of_paths_that_stand_alone(device: torch.device, edges: int) -> None:
    data = data_of(device, edges, keep_graph=False)
    assert 'edge_index' not in data
    net = PathPreparedGNN('gcn', 32, 48, C, 3, checkpoint=True).to(device)
    estimate = memory_estimate(net, data, active_only=True)
    assert estimate.graph == 0
    assert_near(part_of_step(estimate), step_bytes(net, data))
    after = memory_estimate(net, data, active_only=True)
    assert abs(after.paths - estimate.paths) <= 0.02 * after.paths


def test_changes_nothing_but_what_the_first_step_would(device: torch.device) -> None:
    data = data_of(device, 60000, keep_edge_index=False)
    net = PathPreparedGNN('gin', 32, 48, C, 3, dropout=0.5, checkpoint=True).to(device).eval()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    estimate = memory_estimate(net, data, active_only=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in net.parameters())
    assert '_hidden' not in vars(net)
    assert_near(part_of_step(estimate), step_bytes(net.train(), data))


def test_the_whole_of_it(cuda: torch.device) -> None:
    torch.cuda.empty_cache()
    at_first = torch.cuda.memory_allocated(cuda)
    data = data_of(cuda, 60000, scale=40)
    net = PathPreparedGNN('gcn', 32, 48, C, 3, dropout=0.5, checkpoint=True).to(cuda)
    estimate = memory_estimate(net, data, active_only=True)
    before = torch.cuda.memory_allocated(cuda) - at_first
    step_bytes(net, data)
    taken = step_bytes(net, data) + torch.cuda.memory_allocated(cuda) - at_first
    assert before < taken
    assert_near(estimate.total, taken)


def test_features_in_host_memory(cuda: torch.device) -> None:
    data = data_of(cuda, 60000, scale=40)
    host = data.x.cpu().pin_memory()
    data.x = None
    for conv in ('gcn', 'sage'):
        for checkpoint in (True, False):
            net = PathPreparedGNN(conv, 32, 48, C, 3, tile=8, checkpoint=checkpoint).to(cuda)
            taken = step_bytes(net, data, x=host)
            estimate = memory_estimate(net, data, x=host, active_only=True)
            assert estimate.features == 0
            assert_near(part_of_step(estimate), taken)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    data = data_of(device, 9000)
    net = PathPreparedGNN('gcn', 32, 48, C, 2).to(device)
    with pytest.raises(TypeError, match="'model' must be a PathPreparedGNN, got Linear"):
        memory_estimate(torch.nn.Linear(2, 2), data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'data' must be a torch_geometric.data.Data, got NoneType"):
        memory_estimate(net, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'optimizer_states' must not be negative, got -1"):
        memory_estimate(net, data, optimizer_states=-1)
    with pytest.raises(TypeError, match="'active_only' must be True or False, got str"):
        memory_estimate(net, data, active_only='yes')  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'data.execution_paths' must be those of 2 layers, got 3"):
        memory_estimate(net, data)
    data.x = None
    with pytest.raises(ValueError, match="'data' must have features 'x'"):
        memory_estimate(net, data)
