"""Writes a layer that no library ships, and runs its message as one kernel.

The layer is a gated sum of neighbours, with a gate of both ends and of edge features:

    y_i = sum over j of sigmoid(k_i + q_j + W a_ji) * tanh(v_j)

The script checks it against the same layer on PyG's code, outputs and gradients, prints the plan
of the message, and times both. `python examples/custom_layer.py --help` lists its options.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pyg_fast.datasets import PlantedSize, planted_structure
from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import FusedMessagePassing


class GatedConv(FusedMessagePassing):
    """Only the base class differs from a layer of PyG."""

    def __init__(self, channels: int, edge_channels: int, strict: bool = True) -> None:
        super().__init__(aggr='sum', strict=strict)
        self.key, self.query, self.value = (nn.Linear(channels, channels) for _ in range(3))
        self.edge = nn.Linear(edge_channels, channels, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(
            edge_index, k=self.key(x), q=self.query(x), v=self.value(x), edge_attr=edge_attr)

    def message(self, k_i: Tensor, q_j: Tensor, v_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.sigmoid(k_i + q_j + self.edge(edge_attr)) * torch.tanh(v_j)


class PyGGatedConv(GatedConv):
    """The same layer on PyG's code."""

    propagate = MessagePassing.propagate


def step(conv: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of a training step."""
    out = conv(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), list(conv.parameters()))]


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == 'cuda':
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> float:
    """Returns the largest difference to PyG's code, relative to the largest number."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--nodes', type=int, default=20_000)
    parser.add_argument('--edges', type=int, default=400_000)
    parser.add_argument('--channels', type=int, default=64)
    parser.add_argument('--edge-channels', type=int, default=16)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    torch.manual_seed(0)

    rowptr, col = planted_structure(PlantedSize(args.nodes, args.edges // 2, 16), device=device)
    row = torch.arange(args.nodes, device=device).repeat_interleave(rowptr.diff())
    edges = torch.stack([col.long(), row])
    edge_index, _ = prepare_edge_index(edges, (args.nodes, args.nodes))  # sorted once
    x = torch.randn(args.nodes, args.channels, device=device)
    edge_attr = torch.randn(edges.size(1), args.edge_channels, device=device)

    conv = GatedConv(args.channels, args.edge_channels).to(device)
    theirs = PyGGatedConv(args.channels, args.edge_channels).to(device)
    theirs.load_state_dict(conv.state_dict())
    found, expected = step(conv, x, edge_index, edge_attr), step(theirs, x, edges, edge_attr)
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))
    print(conv.plan)
    print(f'largest difference of outputs and gradients: {error:.1e}')

    for name, layer, graph in (('PyG', theirs, edges), ('pyg_fast', conv, edge_index)):
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        taken = seconds(lambda: step(layer, x, graph, edge_attr), device, args.repeats)  # noqa: B023
        line = f'{name:8} {1e3 * taken:8.2f} ms a step'
        if device.type == 'cuda':
            line += f', {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB'
        print(line)
    return error


if __name__ == '__main__':
    main()
