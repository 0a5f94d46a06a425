"""Attention, GAT's and GATv2's: kernels, layers, small models and graphs that are new at each step.

python -m benchmarks.gat                            everything below
python -m benchmarks.gat --quick                    a minute or less
python -m benchmarks.gat --kernels                  of GAT: inference, training, backward, dropout
python -m benchmarks.gat --v2                       likewise of GATv2
python -m benchmarks.gat --layers --models gat      one layer, and the paper's model on Cora
python -m benchmarks.gat --inductive                a new graph at each step
python -m benchmarks.gat --graphs reddit-like --configs 8x8,1x64 --dtypes float32,bfloat16
"""
import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv
from torch_geometric.utils import scatter, softmax

from pyg_fast.datasets import SIZES, PlantedSize, planted_structure
from pyg_fast.graph import prepare_edge_index
from pyg_fast.graph.graph import Graph as Structure
from pyg_fast.graph.graph import graph_of
from pyg_fast.nn import FusedGATConv, FusedGATv2Conv
from pyg_fast.ops._attention import keeps

from . import _graphs, _harness
from ._graphs import Graph
from ._harness import Cell, Contender, Result, Section, Settings, Versus
from .gcn import deviation, repeated
from .maxk import spread, worst
from .spmm import FORWARD, STEP, excess

GRAPHS = {'cuda': ('reddit-like', 'arxiv-like'), 'cpu': ('Computers', 'tolokers', 'ddi')}
QUICK_GRAPHS = {'cuda': ('arxiv-like',), 'cpu': ('Computers',)}
CONFIGS = ((8, 8), (8, 32), (1, 64))  # heads and channels
LAYER_CONFIGS = {'cuda': ((8, 8), (8, 64)), 'cpu': ((8, 8),)}
QUICK_CONFIGS = ((8, 8),)
CHANNELS = 64  # that a layer takes
SLOPE, DROPOUT = 0.2, 0.6
HEADS, HIDDEN = 8, 8  # of the first layer of the paper's model
BACKWARD = 'backward'
CORA_SIZE = PlantedSize(2_708, 5_278, 7)
NEW_GRAPHS = 4  # take turns in inductive training
_INDUCTIVE_EDGES = 1 << 23
_REFERENCE_BYTES = {'cuda': 1 << 31, 'cpu': 1 << 29}  # of PyG's messages in float64
_ROWS_COMPARED = 64  # of a kernel's gradients
_CANCELLED = 1e-2  # of the largest gradient's norm
_CHUNK = 1 << 26  # entries of a reference made at a time
# Of a gradient, for float32. GATv2 has a kink for each channel of an edge, not for each edge.
_NORM_TOLERANCE = {'gat': 3e-4, 'gatv2': 1e-3}
_SUMS = 4  # one upon the other: softmax, result, its product with the gradient, gradient

INFERENCE, TRAINING, OURS = 'ours, inference', 'ours, training', 'ours'
DROPPED = f'ours, training, dropout {DROPOUT}'
OURS_DROPPED = f'ours, dropout {DROPOUT}'
COMPOSED = 'PyG ops'
PREPARED, PLAIN, PYG = 'ours, prepared', 'ours, edge_index', 'PyG'
LAYERS = (PREPARED, PLAIN, PYG)
PYG_CONVS = {'gat': GATConv, 'gatv2': GATv2Conv}
FUSED_CONVS = {'gat': FusedGATConv, 'gatv2': FusedGATv2Conv}

kernels = torch.ops.pyg_fast


def log(graph: str, title: str, results: dict[str, Result]) -> None:
    _harness.log(f'{graph} {title}: ' + ', '.join(
        f'{name} {result.text()}' for name, result in results.items()))


# Kernels ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Truth:
    """What is right in float64: all of the result, some rows of gradients.

    With every tensor stands what its terms add up to in magnitude.
    """

    out: tuple[Tensor, Tensor]
    grads: list[tuple[Tensor, Tensor]]


class Case:
    """Inputs of a kernel on one graph, in one dtype, for some heads and channels."""

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        device = graph.col.device
        self.graph, self.heads, self.channels = graph, heads, channels
        self._generator = torch.Generator(device=device).manual_seed(1)
        self.x = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.grad = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.seed = torch.tensor([2**40 + 1], device=device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.graph.col.device)

    @functools.cached_property
    def structure(self) -> Structure:
        size = self.graph.num_nodes, self.graph.num_nodes
        return graph_of(prepare_edge_index(self.graph.edge_index, size)[0], *size)

    def inputs(self) -> tuple[Tensor, ...]:
        """What gradients are asked of."""
        raise NotImplementedError

    def forward(self, training: bool, dropout: float) -> tuple[Tensor, ...]:
        """The result, and what the backward reads if there will be one."""
        raise NotImplementedError

    def backward(self, kept: Sequence[Tensor], dropout: float) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def composed(self, *inputs: Tensor) -> Tensor:
        """The result by what PyG composes it of."""
        raise NotImplementedError

    # The reference

    @functools.cached_property
    def rows(self) -> Tensor:
        """Nodes whose gradients are compared, the fullest among them."""
        degree = self.graph.degree
        fullest = degree.topk(min(_ROWS_COMPARED // 8, degree.numel()))[1]
        return torch.cat([fullest, spread(_ROWS_COMPARED, degree.numel(), degree.device)]).unique()

    def edges_at(self, end: Tensor) -> Tensor:
        """The edges that have one of the compared nodes at that end."""
        chosen = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device=end.device)
        chosen[self.rows] = True
        return chosen[end.long()].nonzero().view(-1)

    def chunks(self, width: int) -> Iterator[Tensor]:
        edges = torch.arange(self.graph.num_edges, device=self.graph.col.device)
        yield from edges.split(max(1, _CHUNK // width))

    def kept(self, dropout: float) -> Tensor:
        """Which edges dropout keeps, of each head."""
        return torch.cat([
            keeps(self.seed, ids, self.heads, dropout)
            for ids in self.chunks(self.heads)])

    def logits(self, head: int) -> Tensor:
        raise NotImplementedError

    def grads_of(self, head: 'Head') -> list[tuple[Tensor, Tensor]]:
        """Some rows of the gradients of all inputs."""
        raise NotImplementedError

    @functools.cached_property
    def truth(self) -> dict[float, Truth]:
        """By dropout."""
        dropouts = (0.0, DROPOUT)
        kept = self.kept(DROPOUT)
        made: dict[float, list[tuple[Any, Any]]] = {dropout: [] for dropout in dropouts}
        for head in range(self.heads):
            weight = self.logits(head).exp_()  # of such numbers float64 needs no maximum
            ones = weight.new_ones(self.graph.num_nodes, 1)
            total = torch.sparse.mm(self.graph.matrix(weight), ones).view(-1)
            weight /= total[self.graph.row]
            for dropout in dropouts:
                applied = weight * kept[:, head] / (1 - dropout) if dropout else weight
                of = Head(self, head, weight, applied)
                made[dropout].append(((of.y, of.y_scale), self.grads_of(of)))

        def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            right, scale = (torch.stack(tensors, 1) for tensors in zip(*parts, strict=True))
            return right, _SUMS * scale

        return {
            dropout: Truth(
                joined([out for out, _ in heads]),
                [joined(parts) for parts in zip(*(grads for _, grads in heads), strict=True)])
            for dropout, heads in made.items()}

    def out_error(self, outputs: Sequence[Tensor], dropout: float = 0.0) -> float:
        return excess(outputs[0], *self.truth[dropout].out)

    def grad_error(self, outputs: Sequence[Tensor], dropout: float = 0.0) -> float:
        raise NotImplementedError

    def step_error(self, outputs: Sequence[Tensor], dropout: float = 0.0) -> float:
        return worst([
            self.out_error(outputs, dropout), self.grad_error(outputs[1:], dropout)])


class Head:
    """One head in float64: its attention before and after dropout, and its result."""

    def __init__(self, case: Case, head: int, weight: Tensor, applied: Tensor) -> None:
        self.case, self.head, self.weight, self.applied = case, head, weight, applied
        self.x, self.grad = case.x[:, head].double(), case.grad[:, head].double()
        both = torch.sparse.mm(
            case.graph.matrix(self.applied), torch.cat([self.x, self.x.abs()], 1))
        self.y, self.y_scale = both.split(case.channels, 1)
        self.inner = (self.grad * self.y).sum(1)
        self.inner_scale = (self.grad.abs() * self.y_scale).sum(1)

    def ends(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        return self.case.graph.col[edges].long(), self.case.graph.row[edges]

    def grad_logits(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Of these edges, with its scale."""
        src, dst = self.ends(edges)
        weight, applied = self.weight[edges], self.applied[edges]
        terms = self.grad[dst] * self.x[src]
        return (
            applied * terms.sum(1) - weight * self.inner[dst],
            applied * terms.abs().sum(1) + weight * self.inner_scale[dst])

    def summed(
        self, values: tuple[Tensor, Tensor], index: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Values and scales of edges, at the compared rows."""
        found = [
            value.new_zeros(self.case.graph.num_nodes, *value.shape[1:]).index_add_(
                0, index, value)[self.case.rows] for value in values]
        return found[0], found[1]


def steepness(score: Tensor) -> Tensor:
    """The derivative of the leaky ReLU."""
    return 1 - (1 - SLOPE) * (score <= 0).double()


def plus(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return sum(right for right, _ in pairs), sum(scale for _, scale in pairs)


class GATCase(Case):
    """Inputs of :func:`pyg_fast.ops.gat`."""

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        super().__init__(graph, dtype, heads, channels)
        acc = torch.promote_types(dtype, torch.float32)
        self.alpha_src, self.alpha_dst = (
            self.random(graph.num_nodes, heads).to(acc) for _ in range(2))

    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.alpha_src, self.alpha_dst

    def forward(self, training: bool, dropout: float) -> tuple[Tensor, ...]:
        return kernels.gat(
            *self.structure[:3], *self.inputs(), None, None, None, self.seed if dropout else None,
            0, SLOPE, dropout, training, False)

    def backward(self, kept: Sequence[Tensor], dropout: float) -> tuple[Tensor, ...]:
        return kernels.gat_backward(
            *self.structure[3:6], *self.inputs(), None, None, self.seed if dropout else None,
            *kept, self.grad, 0, SLOPE, dropout)[:3]

    def composed(self, *inputs: Tensor) -> Tensor:
        x, alpha_src, alpha_dst = inputs
        (src, dst), num_nodes = self.graph.edge_index, self.graph.num_nodes
        score = F.leaky_relu(alpha_src[src] + alpha_dst[dst], SLOPE)
        weight = softmax(score, dst, num_nodes=num_nodes).to(x.dtype)
        return scatter(weight.unsqueeze(-1) * x[src], dst, 0, num_nodes)

    def scores(self, head: int, edges: Tensor | slice = slice(None)) -> Tensor:
        """Before the leaky ReLU."""
        src, dst = self.graph.col[edges].long(), self.graph.row[edges]
        return self.alpha_src[:, head].double()[src] + self.alpha_dst[:, head].double()[dst]

    def logits(self, head: int) -> Tensor:
        return F.leaky_relu(self.scores(head), SLOPE)

    def grads_of(self, head: Head) -> list[tuple[Tensor, Tensor]]:
        made = []
        for place in (0, 1):  # source, destination
            edges = self.edges_at((self.graph.col, self.graph.row)[place])
            ends = head.ends(edges)
            right, scale = head.grad_logits(edges)
            right = right * steepness(self.scores(head.head, edges))
            made.append(head.summed((right, scale), ends[place]))
            if place == 0:
                terms = head.applied[edges].view(-1, 1) * head.grad[ends[1]]
                made.insert(0, head.summed((terms, terms.abs()), ends[0]))
        return made

    def grad_error(self, outputs: Sequence[Tensor], dropout: float = 0.0) -> float:
        return worst(
            excess(out[self.rows], *right)
            for out, right in zip(outputs, self.truth[dropout].grads, strict=True))


class GATv2Case(Case):
    """Inputs of :func:`pyg_fast.ops.gatv2`."""

    def __init__(self, graph: Graph, dtype: torch.dtype, heads: int, channels: int) -> None:
        super().__init__(graph, dtype, heads, channels)
        self.x_dst = self.random(graph.num_nodes, heads, channels).to(dtype)
        self.att = (self.random(heads, channels) / channels**0.5).to(dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.x_dst, self.att

    def forward(self, training: bool, dropout: float) -> tuple[Tensor, ...]:
        return kernels.gatv2(
            *self.structure[:3], *self.inputs(), None, self.seed if dropout else None, 0, SLOPE,
            dropout, training, False)

    def backward(self, kept: Sequence[Tensor], dropout: float) -> tuple[Tensor, ...]:
        return kernels.gatv2_backward(
            *self.structure[:6], *self.inputs(), self.seed if dropout else None, *kept, self.grad,
            0, SLOPE, dropout)

    def composed(self, *inputs: Tensor) -> Tensor:
        x, x_dst, att = inputs
        (src, dst), num_nodes = self.graph.edge_index, self.graph.num_nodes
        sent = x[src]
        score = (F.leaky_relu(sent + x_dst[dst], SLOPE) * att).sum(-1)
        weight = softmax(score, dst, num_nodes=num_nodes)
        return scatter(weight.unsqueeze(-1) * sent, dst, 0, num_nodes)

    def sums(self, head: int, edges: Tensor) -> Tensor:
        """Before the leaky ReLU."""
        src, dst = self.graph.col[edges].long(), self.graph.row[edges]
        return self.x[:, head].double()[src] + self.x_dst[:, head].double()[dst]

    def logits(self, head: int) -> Tensor:
        att = self.att[head].double()
        return torch.cat([
            F.leaky_relu(self.sums(head, edges), SLOPE) @ att
            for edges in self.chunks(self.channels)])

    def grads_of(self, head: Head) -> list[tuple[Tensor, Tensor]]:
        made = []
        for place in (0, 1):  # source, destination
            edges = self.edges_at((self.graph.col, self.graph.row)[place])
            ends = head.ends(edges)
            through = self.att[head.head].double() * steepness(self.sums(head.head, edges))
            right, scale = (t.view(-1, 1) for t in head.grad_logits(edges))
            pairs = [(right * through, scale * through.abs())]
            if place == 0:
                terms = head.applied[edges].view(-1, 1) * head.grad[ends[1]]
                pairs.append((terms, terms.abs()))
            made.append(head.summed(plus(*pairs), ends[place]))
        parts = []
        for edges in self.chunks(self.channels):
            right, scale = head.grad_logits(edges)
            leaky = F.leaky_relu(self.sums(head.head, edges), SLOPE)
            parts.append((right @ leaky, scale @ leaky.abs()))
        right, scale = plus(*parts)
        return [*made, (right.view(1, -1), scale.view(1, -1))]

    def grad_error(self, outputs: Sequence[Tensor], dropout: float = 0.0) -> float:
        *of_nodes, grad_att = outputs
        found = [*(out[self.rows] for out in of_nodes), grad_att.view(1, *self.att.shape)]
        return worst(
            excess(out, *right)
            for out, right in zip(found, self.truth[dropout].grads, strict=True))


CASES: dict[str, type[Case]] = {'gat': GATCase, 'gatv2': GATv2Case}
# GATv2's are compared with kernels of others, whose backward is known with the forward alone.
MODES = {'gat': (FORWARD, BACKWARD), 'gatv2': (FORWARD, STEP)}


def kernel_contenders(case: Case, mode: str, scatter_limit: float) -> list[Contender]:
    made: list[Contender] = []
    error = {FORWARD: case.out_error, BACKWARD: case.grad_error, STEP: case.step_error}[mode]

    def ours(name: str, dropout: float, training: bool = True) -> None:
        def make() -> Callable[[], tuple[Tensor, ...]]:
            if mode == FORWARD:
                return lambda: case.forward(training, dropout)
            if mode == BACKWARD:
                kept = case.forward(True, dropout)[1:]
                return lambda: case.backward(kept, dropout)

            def run() -> tuple[Tensor, ...]:
                out, *kept = case.forward(True, dropout)
                return out, *case.backward(kept, dropout)
            return run

        made.append(Contender(name, make, True, functools.partial(error, dropout=dropout)))

    def composed() -> Callable[[], tuple[Tensor, ...]]:
        if mode == FORWARD:
            return lambda: (case.composed(*case.inputs()),)
        leaves = [t.detach().requires_grad_() for t in case.inputs()]
        if mode == BACKWARD:
            out = case.composed(*leaves)
            return lambda: torch.autograd.grad(out, leaves, case.grad, retain_graph=True)

        def run() -> tuple[Tensor, ...]:
            out = case.composed(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, case.grad)
        return run

    if mode == FORWARD:
        ours(INFERENCE, 0.0, training=False)
        ours(TRAINING, 0.0)
        ours(DROPPED, DROPOUT)
    else:
        ours(OURS, 0.0)
        ours(OURS_DROPPED, DROPOUT)
    messages = case.graph.num_edges * case.x[0].numel() * case.x.element_size()
    if messages <= scatter_limit * 2**30:
        made.append(Contender(COMPOSED, composed, check=error))
    return made


def run_kernels(
    graph: Graph, model: str, configs: Sequence[tuple[int, int]], dtypes: Sequence[str],
    scatter_limit: float, settings: Settings, report: _harness.Report,
) -> None:
    for dtype, (heads, channels) in itertools.product(dtypes, configs):
        case = CASES[model](graph, _harness.DTYPES[dtype], heads, channels)
        state = _harness.cache_state(
            case.x.numel() * case.x.element_size(), settings.device)
        for mode in MODES[model]:
            ours = (INFERENCE, TRAINING, DROPPED) if mode == FORWARD else (OURS, OURS_DROPPED)
            section = report.section(
                f'ops.{model}, {mode}, {dtype}', width='H C',
                columns={name: [name] for name in (*ours, COMPOSED)},
                versus=[
                    Versus(COMPOSED, ours[0], [COMPOSED]),
                    *(Versus(less, more, [less]) for less, more in itertools.pairwise(ours))])
            results = _harness.measure(
                kernel_contenders(case, mode, scatter_limit), settings)
            name = f'{graph.name}, {heads} x {channels}'
            section.cells.append(Cell(name, heads * channels, results, state))
            log(name, section.title, results)
        del case  # its reference, before the next one is made


# Layers -----------------------------------------------------------------------------------------

def step_error(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], model: str,
) -> float:
    """The largest error in units of what is allowed, of a result and gradients.

    The result is compared row by row, gradients by their norms: rounding decides on which side of
    the kink of the leaky ReLU a score near zero is, and so do a few entries of a gradient. One may
    cancel to nothing, such as that of GATv2's destinations where the leaky ReLU does not bend.
    """
    if [out.shape for out in outputs] != [right.shape for right in expected]:
        return float('inf')
    norms = [float(right.norm()) for right in expected[1:]]
    least = _CANCELLED * max(norms)
    return worst([
        deviation(outputs[:1], expected[:1]),
        *(float((out.double() - right).norm()) / (_NORM_TOLERANCE[model] * max(norm, least))
          for out, right, norm in zip(outputs[1:], expected[1:], norms, strict=True))])


class Layer:
    """Inputs and weights of one layer on one graph, and what is right for them in float64."""

    def __init__(
        self, edge_index: Tensor, num_nodes: int, model: str, heads: int, channels: int,
        in_channels: int = CHANNELS,
    ) -> None:
        device = edge_index.device
        generator = torch.Generator(device=device).manual_seed(1)
        self.edge_index, self.model, self.num_nodes = edge_index, model, num_nodes
        self.config = in_channels, channels, heads
        self.x = torch.randn(num_nodes, in_channels, generator=generator, device=device)
        self.grad = torch.randn(num_nodes, heads * channels, generator=generator, device=device)
        self.state = self.conv(PYG).state_dict()
        self.state['bias'] = torch.randn(heads * channels, generator=generator, device=device)

    @functools.cached_property
    def prepared(self) -> Tensor:
        return prepare_edge_index(self.edge_index, (self.num_nodes, self.num_nodes))[0]

    def conv(self, name: str) -> nn.Module:
        cls = (PYG_CONVS if name == PYG else FUSED_CONVS)[self.model]
        return cls(*self.config).to(self.x.device)

    def step(
        self, name: str, graphs: Sequence[Tensor] = (), dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Steps, one on each graph; the last of them gives the output and all gradients."""
        conv = self.conv(name)
        conv.load_state_dict(self.state)
        conv.to(dtype)
        x, grad = self.x.detach().to(dtype).requires_grad_(), self.grad.to(dtype)
        leaves = [x, *conv.parameters()]
        graphs = graphs or [self.prepared if name == PREPARED else self.edge_index]

        def run() -> tuple[Tensor, ...]:
            for edge_index in graphs:
                out = conv(x, edge_index)
                grads = torch.autograd.grad(out, leaves, grad)
            return out.detach(), *grads

        return run

    @functools.cached_property
    def by_pyg(self) -> bool:
        """Whether PyG's layer in float64 fits: what is right is by ours in float64 otherwise."""
        messages = (self.edge_index.size(1) + self.num_nodes) * self.grad.size(1) * 8
        return messages <= _REFERENCE_BYTES[self.x.device.type]

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PYG if self.by_pyg else PREPARED, dtype=torch.double)()

    def check(self, outputs: Sequence[Tensor]) -> float:
        return step_error(outputs, self.expected, self.model)

    def contenders(self) -> list[Contender]:
        return [
            Contender(name, functools.partial(self.step, name), name != PYG, self.check)
            for name in LAYERS]


def layer_section(report: _harness.Report, title: str) -> Section:
    return report.section(
        title, columns={name: [name] for name in LAYERS}, width='H C', memory=True,
        versus=[Versus(PYG, PREPARED, [PYG]), Versus(PYG, PLAIN, [PYG])])


def run_layers(
    graph: Graph, models: Sequence[str], configs: Sequence[tuple[int, int]], in_channels: int,
    settings: Settings, report: _harness.Report,
) -> None:
    for model, (heads, channels) in itertools.product(models, configs):
        layer = Layer(graph.edge_index, graph.num_nodes, model, heads, channels, in_channels)
        section = layer_section(report, f'One {PYG_CONVS[model].__name__} layer, {STEP}')
        results = _harness.measure(layer.contenders(), settings)
        name = f'{graph.name}, {heads} x {channels}'
        state = _harness.cache_state(4 * layer.grad.numel(), settings.device)
        section.cells.append(Cell(name, heads * channels, results, state))
        log(name, section.title, results)


# Cora -------------------------------------------------------------------------------------------

class Net(nn.Module):
    """The model of the paper, by default for Cora."""

    def __init__(
        self, conv: type[nn.Module], in_channels: int, num_classes: int, dropout: float,
        heads: int = HEADS, hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = conv(in_channels, hidden, heads, dropout=dropout)
        self.conv2 = conv(heads * hidden, num_classes, 1, concat=False, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


class Cora:
    """The model by both, its inputs and what it is timed on."""

    def __init__(self, data: Data, model: str) -> None:
        self.data, self.model = data, model
        size = data.num_nodes, data.num_nodes
        self.prepared = prepare_edge_index(data.edge_index, size)[0]
        self.train = data.train_mask.nonzero().view(-1)  # a mask would synchronise at every step
        self.target = data.y[self.train]
        self.num_classes = int(data.y.max()) + 1
        generator = torch.Generator(device=data.x.device).manual_seed(1)
        self.grad = torch.randn(
            data.num_nodes, self.num_classes, generator=generator, device=data.x.device)
        self.state = self.net(PYG, dropout=0.0).state_dict()

    def net(self, name: str, dropout: float) -> Net:
        cls = (PYG_CONVS if name == PYG else FUSED_CONVS)[self.model]
        net = Net(cls, self.data.num_features, self.num_classes, dropout)
        return net.to(self.data.x.device)

    def edge_index(self, name: str) -> Tensor:
        return self.prepared if name == PREPARED else self.data.edge_index

    def layers(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step without dropout or optimizer."""
        net, edge_index = self.net(name, dropout=0.0), self.edge_index(name)
        net.load_state_dict(self.state)
        net.to(dtype)
        x, grad, parameters = self.data.x.to(dtype), self.grad.to(dtype), list(net.parameters())

        def step() -> tuple[Tensor, ...]:
            out = net(x, edge_index)
            return out.detach(), *torch.autograd.grad(out, parameters, grad)

        return step

    def training(self, name: str, dropout: float = DROPOUT) -> Callable[[], Tensor]:
        """A step of training, which returns the loss."""
        net, edge_index = self.net(name, dropout), self.edge_index(name)
        net.load_state_dict(self.state)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.005, weight_decay=5e-4)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            out = net(self.data.x, edge_index)
            loss = F.cross_entropy(out.index_select(0, self.train), self.target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def check_training(self) -> None:
        """Without dropout, which drops other edges, all of them learn the same.

        Raises:
            Incorrect: If they do not.
        """
        losses = {}
        for name in LAYERS:
            step = self.training(name, dropout=0.0)
            losses[name] = torch.stack([step() for _ in range(3)])
            if not torch.allclose(losses[name], losses.get(PREPARED, losses[name]), rtol=1e-3):
                raise _harness.Incorrect(f'losses on Cora: {losses}')


def run_cora(
    models: Sequence[str], settings: Settings, report: _harness.Report, quick: bool,
) -> None:
    data, name = _graphs.cora(settings.device)
    report.notes.append(
        f'The model of the paper, {data.num_features} -> {HEADS} x {HIDDEN} -> '
        f'{int(data.y.max()) + 1}, on: {name}. Wall time of a step, launches and Python included, '
        'over batches of steps synchronised once. The whole training step has dropout '
        f'{DROPOUT} of features and attention, cross entropy and Adam.')
    calls = (10 if quick else 50) if settings.device.type == 'cuda' else 1
    for model in models:
        case = Cora(data, model)
        case.check_training()
        expected = case.layers(PYG, torch.double)()

        def check(
            outputs: Sequence[Tensor], expected: tuple[Tensor, ...] = expected,
            model: str = model,
        ) -> float:
            return step_error(outputs, expected, model)

        def finite(loss: Tensor) -> float:
            return 0.0 if bool(loss.isfinite()) else float('nan')

        title = f'Cora, {PYG_CONVS[model].__name__}'
        for what, make, checked in (
            ('the two layers forward + backward', case.layers, check),
            ('the whole training step', case.training, finite),
        ):
            section = layer_section(report, f'{title}, {what}')
            results = _harness.measure([
                Contender(
                    which, lambda which=which, make=make: repeated(make(which), calls),
                    which != PYG, checked, calls)
                for which in LAYERS], settings)
            section.cells.append(Cell(name.split(' (')[0], HEADS * HIDDEN, results))
            log('', section.title, results)


# Launches ---------------------------------------------------------------------------------------

@dataclasses.dataclass
class Counted(Result):
    """The number of kernels that a step launches; no times."""

    launches: int | None = None


class Launches(Section):
    """A table of kernel launches."""

    def counts(self, cell: Cell) -> dict[str, int | None]:
        return {name: getattr(result, 'launches', None) for name, result in cell.results.items()}

    def summary(self) -> list[dict[str, Any]]:
        """PyG's over ours, one row for each kind of step and way of ours."""
        return [{
            'graph': cell.graph, 'ours': name, 'ratio': counts[PYG] / count,
        } for cell in self.cells for counts in [self.counts(cell)]
            for name, count in counts.items() if name != PYG and count and counts[PYG]]

    def markdown(self) -> str:
        ratios = {(row['graph'], row['ours']): f"{row['ratio']:.2f}" for row in self.summary()}
        rows = []
        for cell in self.cells:
            counts = self.counts(cell)
            rows.append([
                cell.graph,
                *('–' if counts[name] is None else str(counts[name]) for name in LAYERS),
                *(ratios.get((cell.graph, name), '–') for name in (PREPARED, PLAIN))])
        head = ['step', *LAYERS, *(f'{PYG} / {name}' for name in (PREPARED, PLAIN))]
        return '\n'.join([f'## {self.title}', '', *_harness.table(head, rows)])


def is_launch(event: Any) -> bool:
    """Whether an event of the profiler is a kernel on the device."""
    return (
        event.device_type == DeviceType.CUDA and not event.is_user_annotation
        and not event.name.startswith(('Memcpy', 'Memset')))


def launches(run: Callable[[], Any]) -> int:
    """How many kernels a call launches."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    count = sum(map(is_launch, recorded.events()))
    if count == 0:
        raise RuntimeError("torch's profiler has seen no kernel")
    return count


def run_launches(
    names: Sequence[str], models: Sequence[str], configs: Sequence[tuple[int, int]],
    in_channels: int, settings: Settings, report: _harness.Report,
) -> None:
    """Comes last, since the profiler might slow launches down from then on."""
    section = report.section(
        'Kernel launches of a step', Launches, columns={name: [name] for name in LAYERS})

    def count(step: str, width: int, make: Callable[[str], Callable[[], Any]]) -> None:
        results: dict[str, Result] = {}
        for name in LAYERS:
            try:
                results[name] = Counted(count=1, launches=launches(make(name)))
            except torch.cuda.OutOfMemoryError:
                if name != PYG:
                    raise
                results[name] = Counted(note='OOM')
            _harness._free(True)
        section.cells.append(Cell(step, width, results))

    data, _ = _graphs.cora(settings.device)
    for model in models:
        case, title = Cora(data, model), PYG_CONVS[model].__name__
        count(f'Cora, {title}, the two layers', HEADS * HIDDEN, case.layers)
        count(f'Cora, {title}, the whole training step', HEADS * HIDDEN, case.training)
    for graph in _graphs.load_each(names, settings.device, {}):
        for model, (heads, channels) in itertools.product(models, configs):
            layer = Layer(graph.edge_index, graph.num_nodes, model, heads, channels, in_channels)
            count(f'{graph.name}, {PYG_CONVS[model].__name__} {heads} x {channels}',
                  heads * channels, layer.step)


# Inductive --------------------------------------------------------------------------------------

def new_graphs(size: str | PlantedSize, device: torch.device) -> list[Tensor]:
    """As many graphs of one size, with their edges in no order."""
    made = []
    for seed in range(NEW_GRAPHS):
        generator = torch.Generator(device=device).manual_seed(seed)
        edge_index = Graph('', *planted_structure(size, seed, device)).edge_index
        order = torch.randperm(edge_index.size(1), generator=generator, device=device)
        made.append(edge_index[:, order].contiguous())
    return made


def run_inductive(
    names: Sequence[str], models: Sequence[str], configs: Sequence[tuple[int, int]],
    in_channels: int, settings: Settings, report: _harness.Report,
) -> None:
    sizes = {name: SIZES[name] for name in names
             if name in SIZES and 2 * SIZES[name].num_pairs <= _INDUCTIVE_EDGES}
    for name, size in {'Cora-sized': CORA_SIZE, **sizes}.items():
        graphs = new_graphs(size, settings.device)
        for model, (heads, channels) in itertools.product(models, configs):
            layer = Layer(graphs[-1], size.num_nodes, model, heads, channels, in_channels)
            section = report.section(
                f'Inductive: one {PYG_CONVS[model].__name__} layer, {STEP}, a new graph each step',
                columns={which: [which] for which in LAYERS}, width='H C',
                versus=[Versus(PYG, PLAIN, [PYG]), Versus(PLAIN, PREPARED, [PLAIN])])
            given = {PREPARED: [layer.prepared] * NEW_GRAPHS, PLAIN: graphs, PYG: graphs}
            results = _harness.measure([
                Contender(
                    which, functools.partial(layer.step, which, taken), which != PYG, layer.check,
                    NEW_GRAPHS)
                for which, taken in given.items()], settings)
            cell = f'{name}, {heads} x {channels}'
            section.cells.append(Cell(cell, heads * channels, results))
            log(cell, section.title, results)


# ------------------------------------------------------------------------------------------------

def configurations(text: str) -> tuple[tuple[int, int], ...]:
    """Reads heads and channels such as 8x32, between commas."""
    found = []
    for word in text.split(','):
        heads, _, channels = word.partition('x')
        if not (heads.isdecimal() and channels.isdecimal() and int(heads) and int(channels)):
            raise argparse.ArgumentTypeError(f"got '{word}', expected heads x channels as in 8x32")
        found.append((int(heads), int(channels)))
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('Attention of GAT and GATv2: kernels, layers, a model, new graphs.')
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    parser.add_argument(
        '--configs', type=configurations, help='heads and channels, such as 8x8,1x64')
    parser.add_argument(
        '--dtypes', type=_harness.choice('dtype', tuple(_harness.DTYPES)), default=('float32',),
        help='of the kernels')
    parser.add_argument(
        '--models', type=_harness.choice('model', tuple(CASES)), default=tuple(CASES),
        help=f"of {', '.join(CASES)}: whose layers")
    parser.add_argument(
        '--in-channels', type=int, default=CHANNELS, help='that a layer takes')
    parser.add_argument(
        '--kernels', action='store_true', help="GAT's kernels and nothing else, unless combined")
    parser.add_argument('--v2', action='store_true', help="likewise, GATv2's kernels")
    parser.add_argument('--layers', action='store_true', help='likewise')
    parser.add_argument('--inductive', action='store_true', help='likewise')
    parser.add_argument(
        '--scatter-limit', type=float, metavar='GIB',
        help="PyG's ops, which store messages per edge, are left out beyond this (4 on CUDA, else "
        "0.25); PyG's layers never are")
    args = parser.parse_args(argv)
    wall = _harness.start(args)
    kernel = dataclasses.replace(wall, device_time=True)
    cuda = args.device == 'cuda'
    if args.scatter_limit is None:
        args.scatter_limit = 4.0 if cuda else 0.25
    names = args.graphs or (QUICK_GRAPHS if args.quick else GRAPHS)[args.device]
    usual = QUICK_CONFIGS if args.quick else CONFIGS
    layer_configs = args.configs or (
        QUICK_CONFIGS if args.quick else LAYER_CONFIGS[args.device])
    everything = not (args.kernels or args.v2 or args.layers or args.inductive)
    ops = [model for model, asked in (('gat', args.kernels), ('gatv2', args.v2))
           if everything or asked]
    layers = everything or args.layers
    report = _harness.Report('gat', args, [
        'Times in ms, medians, contenders taking turns, no cache flushed between them; ratio: the '
        'best rival over ours. H x C: heads and channels of each. '
        + ('Kernels by CUDA events, launches hidden; all else by' if cuda else 'All by')
        + ' wall time to the end of the work. † inexact, ‡ one cold run.'])
    if ops:
        report.notes.append(
            'Kernels: scores and the graph with its transpose are at hand; no self-loops are '
            f'added. "{COMPOSED}": gather, softmax and scatter of torch_geometric.utils. Compared '
            'with float64, dropout included: all of a result, gradients of the fullest and other '
            f'nodes, {_ROWS_COMPARED} or a few more, and all of that of the attention vector.')
    if layers or everything or args.inductive:
        report.notes.append(
            f'Layers: {args.in_channels} channels in, heads joined, self-loops added, float32, '
            'output and gradients of input and parameters. Compared with the layer in float64: '
            "PyG's, or where that does not fit ours, with which PyG's in float32 is compared too. "
            f'"{PLAIN}": edges as they are, anew at every step.')
    if everything or args.inductive:
        report.notes.append(
            f'Inductive: {NEW_GRAPHS} graphs of one size take turns, edges in no order; beside it '
            f'"{PREPARED}": one of them all the time, prepared once.')
    if ops or layers:
        for graph in _graphs.load_each(names, wall.device, report.left_out):
            report.graphs[graph.name] = graph.summary()
            for model in ops:
                run_kernels(
                    graph, model, args.configs or usual, args.dtypes, args.scatter_limit, kernel,
                    report)
                report.save()
            if layers:
                run_layers(graph, args.models, layer_configs, args.in_channels, wall, report)
                report.save()
    if layers:
        run_cora(args.models, wall, report, args.quick)
        report.save()
    if everything or args.inductive:
        run_inductive(
            names, args.models, (layer_configs[0],), args.in_channels, wall, report)
        report.save()
    if layers and cuda:
        run_launches(names, args.models, layer_configs, args.in_channels, wall, report)
    report.finish()


if __name__ == '__main__':
    main()
