"""Captures calls in CUDA graphs."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

T = TypeVar('T')


def warm_up(step: Callable[[], Any], calls: int) -> None:
    """Calls `step` on a stream beside the current one, as a capture will."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(step: Callable[[], T], warm_ups: int = 1) -> tuple[Callable[[], None], T]:
    """Replays a call of `step`; and what that call returned, which each replay fills again."""
    warm_up(step, warm_ups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def check_training(model: Module, loss: Callable[[Module], Tensor], **tolerances: float) -> None:
    """Compares replays of a captured step of training with steps that are not captured."""

    def step(model: Module, optimizer: torch.optim.Adam) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss(model).backward()
        optimizer.step()

    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    warm_up(lambda: step(model, optimizer), 3)
    eager = copy.deepcopy(model)
    eager_optimizer = torch.optim.Adam(eager.parameters(), capturable=True)
    eager_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [p.detach().clone() for p in model.parameters()]
    replay, _ = captured(lambda: step(model, optimizer), warm_ups=0)
    for _ in range(2):
        replay()
        step(eager, eager_optimizer)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(eager.named_parameters()), **tolerances
    )
