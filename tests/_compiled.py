"""Compares compiled layers with PyG's own, uncompiled."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.nn import Module

import pyg_fast
from pyg_fast._compile import replace_and_note


class Backend:
    """As the backend `pyg_fast`, with eager kernels in place of those of Inductor. Counts frames
    compiled, and messages that became kernels."""

    def __init__(self, replaces: bool = True) -> None:
        self.replaces = replaces
        self.frames = self.kernels = 0

    def __call__(self, module: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.frames += 1
        if self.replaces:
            self.kernels += replace_and_note(module)
        return aot_eager(module, examples)


def tensors(value: Any) -> list[Tensor]:
    """The float tensors of arguments or results."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (tuple, list)):
        return [each for part in value for each in tensors(part)]
    return []


def fresh(value: Any) -> Any:
    """A copy of arguments; prepared graphs stay."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(fresh, value))
    if type(value) is not Tensor:
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def graph_data(
    num_nodes: int, num_edges: int, device: torch.device, num_src: int | None = None,
    channels: int = 8, dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    """Features of sources, edges and features of edges."""
    generator = torch.Generator().manual_seed(num_nodes + num_edges)
    num_src = num_nodes if num_src is None else num_src

    def random(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).requires_grad_()

    edges = [torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_nodes)]
    return [random(num_src, channels), torch.stack(edges).to(device), random(num_edges, channels)]


def assert_like_pyg(
    reference: Module,
    calls: Sequence[list[Any]],
    *,
    kernels: int | None = None,
    frames: int | None = None,
    through: Callable[..., Any] = lambda model, *args: model(*args),
    theirs: Callable[[list[Any]], list[Any]] = fresh,
    tolerance: float = 1e-9,
    backend: Backend | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = True,
) -> Backend:
    """Compares the results, all gradients, and what the arguments hold after a call."""
    torch._dynamo.reset()
    reference = copy.deepcopy(reference).to(tensors(calls[0])[0].device)
    ours = pyg_fast.accelerate(copy.deepcopy(reference))
    backend = Backend() if backend is None else backend
    compiled = torch.compile(ours, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    close = dict(atol=tolerance, rtol=tolerance, equal_nan=True)
    for args in calls:
        found = []
        given = theirs(args), fresh(args)
        for model, own in zip((reference, compiled), given, strict=True):
            torch.manual_seed(3)
            outs = tensors(through(model, *own))
            total = sum(
                (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)).sum()
                for out in outs
            )
            leaves = [x for x in (*tensors(own), *model.parameters()) if x.requires_grad]
            grads: Sequence[Any] = [None] * len(leaves)
            if isinstance(total, Tensor) and total.requires_grad:
                grads = torch.autograd.grad(total, leaves, allow_unused=True)
            found.append([*outs, *grads, *tensors(own)])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(other, one, **close)
    if kernels is not None:
        assert backend.kernels == kernels
    if frames is not None:
        assert backend.frames == frames
    return backend
