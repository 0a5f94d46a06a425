"""The attention kernels of GAT and GATv2: inference, training, gradients, with and without dropout.

python -m benchmarks gat                       both kernels
python -m benchmarks gat --quick               a minute or less
python -m benchmarks gat --models gatv2 --graphs reddit-like --configs 8x8,1x64
python -m benchmarks gat --dtypes float32,bfloat16

Layers and models with attention: python -m benchmarks layers.
"""
import argparse
import functools
import itertools
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast import ops
from pyg_fast.ops._attention import keeps

from . import _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option, worst
from .spmm import FORWARD, STEP

GRAPHS = {
    'quick': {'cuda': ('arxiv-like',), 'cpu': ('Computers',)},
    'cuda': ('reddit-like', 'arxiv-like'), 'cpu': ('Computers', 'tolokers', 'ddi')}
CONFIGS = {'quick': ((8, 8),), 'usual': ((8, 8), (8, 32), (1, 64))}  # heads and channels
SLOPE, DROPOUT = 0.2, 0.6
BACKWARD = 'backward'
REFERENCE_BYTES = {'cuda': 1 << 31, 'cpu': 1 << 29}  # of PyG's messages in float64
TOLERANCE = 1e-4  # of the largest entry, for float32

INFERENCE, TRAINING, OURS = 'ours, inference', 'ours, training', 'ours'
DROPPED = f'ours, training, dropout {DROPOUT}'
OURS_DROPPED = f'ours, dropout {DROPOUT}'
COMPOSED, GENERATED = 'PyG ops', 'generated kernels'


def pyg_fits(messages: int, device: torch.device) -> bool:
    """Whether PyG's messages, of so many numbers, fit into memory in float64; otherwise ours in
    float64 is the reference, which the tests compare with PyG's."""
    return 8 * messages <= REFERENCE_BYTES[device.type]


class Case:
    """Inputs of a kernel on one graph, in one dtype, for some heads and channels."""

    op: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # with gradients

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        self.graph, self.heads, self.channels, self.dtype = graph, heads, channels, dtype
        self.random = graph.normal()
        self.x = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.grad = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.seed = torch.tensor([2**40 + 1], device=graph.col.device)
        self._truth: dict[float, tuple[Tensor, ...]] = {}

    def ours(self, *inputs: Tensor, dropout: float = 0.0) -> Tensor:
        """The result by our op."""
        return self.op(
            self.graph.structure, *inputs, negative_slope=SLOPE, dropout=dropout,
            seed=self.seed if dropout else None)

    def scores(self, src: Tensor, dst: Tensor, *inputs: Tensor) -> Tensor:
        """The attention scores of all edges, before the softmax."""
        raise NotImplementedError

    def composed(self, *inputs: Tensor, dropout: float = 0.0) -> Tensor:
        """The result by the ops of PyG."""
        (src, dst), num_nodes = self.graph.edge_index, self.graph.num_nodes
        weight = softmax(self.scores(src, dst, *inputs), dst, num_nodes=num_nodes)
        if dropout:
            edges = torch.arange(self.graph.num_edges, device=src.device)
            weight = weight * keeps(self.seed, edges, self.heads, dropout) / (1 - dropout)
        x = inputs[0]
        return scatter(weight.to(x.dtype).unsqueeze(-1) * x[src], dst, 0, num_nodes)

    def work(
        self, run: Callable[..., Tensor], mode: str, dropout: float = 0.0, training: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """What to time of a way to compute the result: it, its gradients, or both."""
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_(training) for t in self.inputs]
        grad = self.grad.to(dtype or self.dtype)
        forward = functools.partial(run, *leaves, dropout=dropout)
        if mode == FORWARD:
            return lambda: (forward().detach(),)
        if mode == STEP:
            return _harness.with_gradients(forward, leaves, grad)
        out = forward()
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def truth(self, dropout: float) -> tuple[Tensor, ...]:
        """The result and the gradients in float64."""
        if dropout not in self._truth:
            by_pyg = pyg_fits(self.graph.num_edges * self.heads * self.channels, self.x.device)
            run = self.composed if by_pyg else self.ours
            self._truth[dropout] = self.work(run, STEP, dropout, dtype=torch.double)()
        return self._truth[dropout]

    def error(self, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        if any(out.numel() != right.numel() for out, right in zip(
                outputs, expected, strict=True)):
            return float('inf')
        tolerance = max(TOLERANCE, torch.finfo(self.dtype).eps)
        return worst(
            float((out.double().view_as(right) - right).abs().max() / right.abs().max())
            / tolerance for out, right in zip(outputs, expected, strict=True))

    def check(self, outputs: Sequence[Tensor], mode: str, dropout: float = 0.0) -> float:
        kept = 1 if mode == FORWARD else None
        return self.error(outputs[:kept], self.truth(dropout)[mode == BACKWARD:kept])


class GATCase(Case):
    """Inputs of :func:`pyg_fast.ops.gat`."""

    op = staticmethod(ops.gat)

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        super().__init__(graph, dtype, heads, channels)
        acc = torch.promote_types(dtype, torch.float32)
        self.inputs = self.x, *(self.random(graph.num_nodes, heads).to(acc) for _ in range(2))

    def scores(self, src: Tensor, dst: Tensor, *inputs: Tensor) -> Tensor:
        _, alpha_src, alpha_dst = inputs
        return F.leaky_relu(alpha_src[src] + alpha_dst[dst], SLOPE)


class GATv2Message(pyg.MessagePassing):
    """The attention of GATv2, as a layer of one's own has it."""

    def __init__(self) -> None:
        super().__init__(aggr='add', node_dim=0)

    def forward(self, edge_index: Tensor, *inputs: Tensor) -> Tensor:
        x, x_dst, att = inputs
        return self.propagate(edge_index, x=(x, x_dst), att=att)

    def message(
        self, x_i: Tensor, x_j: Tensor, att: Tensor, index: Tensor, size_i: int,
    ) -> Tensor:
        scores = (F.leaky_relu(x_j + x_i, SLOPE) * att).sum(-1)
        return x_j * softmax(scores, index, num_nodes=size_i).unsqueeze(-1)


class GATv2Case(Case):
    """Inputs of :func:`pyg_fast.ops.gatv2`."""

    op = staticmethod(ops.gatv2)

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        super().__init__(graph, dtype, heads, channels)
        x_dst = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.inputs = self.x, x_dst, (self.random(heads, channels) / channels**0.5).to(dtype)

    def scores(self, src: Tensor, dst: Tensor, *inputs: Tensor) -> Tensor:
        x, x_dst, att = inputs
        return (F.leaky_relu(x[src] + x_dst[dst], SLOPE) * att).sum(-1)

    @functools.cached_property
    def layer(self) -> pyg.MessagePassing:
        return pyg_fast.accelerate(GATv2Message(), strict=True)

    def generated(self, *inputs: Tensor, dropout: float = 0.0) -> Tensor:
        """The result by the kernels that layers of users get."""
        return self.layer(self.graph.prepared, *inputs)


CASES: dict[str, type[Case]] = {'gat': GATCase, 'gatv2': GATv2Case}
MODES = {'gat': (FORWARD, BACKWARD), 'gatv2': (FORWARD, STEP)}


def kernel_contenders(case: Case, mode: str, scatter_limit: float) -> list[Contender]:
    error = functools.partial(case.check, mode=mode)

    declared = {OURS: (0.0, True), OURS_DROPPED: (DROPOUT, True)} if mode != FORWARD else {
        INFERENCE: (0.0, False), TRAINING: (0.0, True), DROPPED: (DROPOUT, True)}
    made = [
        Contender(name, functools.partial(case.work, case.ours, mode, *how), True,
                  functools.partial(error, dropout=how[0]))
        for name, how in declared.items()]
    if isinstance(case, GATv2Case):
        made.append(Contender(GENERATED, functools.partial(
            case.work, case.generated, mode, training=mode != FORWARD), check=error))
    messages = case.graph.num_edges * case.x[0].numel() * case.x.element_size()
    if messages <= scatter_limit * 2**30:
        made.append(Contender(COMPOSED, functools.partial(
            case.work, case.composed, mode, training=mode != FORWARD), check=error))
    return made


def configurations(text: str) -> tuple[tuple[int, int], ...]:
    """Reads heads and channels such as 8x32, between commas."""
    found = [re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', word) for word in text.split(',')]
    if not all(found):
        raise argparse.ArgumentTypeError(f"got '{text}', expected heads x channels as in 8x32")
    return tuple((int(each[1]), int(each[2])) for each in found if each)


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'gat', __doc__, argv, graphs=GRAPHS,
        configs=Option(CONFIGS, configurations, 'heads and channels, such as 8x8,1x64'),
        dtypes=_harness.names('dtype', tuple(_harness.DTYPES), ('float32',)),
        models=_harness.names('model', tuple(CASES), tuple(CASES)),
        scatter_limit=Option(
            {'cuda': 4.0, 'cpu': 0.25}, float, "GiB of messages that PyG's ops may store"),
        notes=[
            'H C: heads times channels of a head. Scores and the graph with its transpose are '
            f'given; no self-loops are added. "{COMPOSED}": gather, softmax and scatter of '
            'torch_geometric.utils. Results and gradients, with dropout too, are compared with '
            f'"{COMPOSED}" in float64, or where that does not fit into memory with our kernel in '
            'float64.'])
    args = bench.args
    for graph in bench.graphs():
        for model, dtype, (heads, channels) in itertools.product(
                args.models, args.dtypes, args.configs):
            case = CASES[model](graph, _harness.DTYPES[dtype], heads, channels)
            for mode in MODES[model]:
                made = kernel_contenders(case, mode, args.scatter_limit)
                ours = [each.name for each in made if each.ours]
                bench.measure(
                    f'ops.{model}, {mode}, {dtype}', f'{graph.name}, {heads} x {channels}',
                    heads * channels, made, bench.kernel, label='H C',
                    pairs=[(more, less) for less, more in itertools.pairwise(ours)])
            del case  # with its reference
    bench.finish()


if __name__ == '__main__':
    main()
