"""Random layers give PyG's results and gradients, or run PyG's code and say why."""

import copy
from typing import Any

import torch
from hypothesis import assume, given, reject, settings
from torch import Tensor

import pyg_fast
from tests._compiled import assert_like_pyg
from tests._report import why_pygs

from ._propagates import TYPES, Base, C, N, Propagate, propagates

E = 70


def inputs(seed: int = 0) -> list[Tensor]:
    """Nodes, of which the last two have no edges and one has many, edges and their values."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(N - 2, (2, E + seed), generator=generator)
    edge_index[seed % 2, : E // 3] = 1
    x, z, e = (
        torch.randn(n, C, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (N, N, E + seed)
    )
    return [x, z, edge_index, e, torch.randint(TYPES, (E + seed,), generator=generator)]


def results(layer: Base, args: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outs = layer(*args)
    generator = torch.Generator().manual_seed(1)
    leaves = [*args[:2], args[3], *layer.parameters()]
    needed = [out for out in outs if out.requires_grad]
    if not needed:
        return outs, []
    weights = [torch.randn(out.shape, dtype=out.dtype, generator=generator) for out in needed]
    return outs, [*torch.autograd.grad(needed, leaves, weights, materialize_grads=True)]


def is_moderate(values: tuple[list[Tensor], list[Tensor]]) -> bool:
    """Whether results and gradients are so small that they magnify no rounding."""
    return all(bool(x.isfinite().all()) and x.abs().max() < 1e6 for each in values for x in each)


def results_of_pyg(layer: Base, args: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Rejects examples that are no layers of PyG, such as of writes into what autograd saved, and
    those that magnify rounding."""
    try:
        found = results(layer, args)
    except RuntimeError:
        reject()
    assume(is_moderate(found))
    return found


def compare(layer: Base, fast: Any, args: list[Tensor]) -> None:
    theirs, their_grads = results_of_pyg(layer, args)
    ours, our_grads = results(fast, args)
    assert [out.requires_grad for out in ours] == [out.requires_grad for out in theirs]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_grads, their_grads)


# What a random layer may contain that is none of a kernel's.
REASONS = (
    'a linear map of values computed for each edge', 'a softmax of another softmax',
    'a softmax of linear maps of each edge', 'a variance of linear maps of each edge',
    'a message whose derivative is zero', 'aggregate returns its input, or one tensor twice',
    'message writes into its input', 'a write under torch.no_grad', 'no input of nodes',
    'the message of an edge depends on other edges',
)  # fmt: skip


@settings(max_examples=30)
@given(propagates(most=2))
def test_like_pyg(propagate: Propagate) -> None:
    torch.manual_seed(0)
    layer = propagate.layer()
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    for seed in (0, 3):
        compare(layer, fast, inputs(seed))
    why = why_pygs(fast)
    assert why == '' or why.startswith(REASONS)


@settings(max_examples=4)
@given(propagates(most=2))
def test_compiled_like_pyg(propagate: Propagate) -> None:
    torch.manual_seed(0)
    layer = propagate.layer()
    results_of_pyg(copy.deepcopy(layer), inputs())
    assert_like_pyg(layer, [inputs(), inputs(3)], tolerance=1e-7)
