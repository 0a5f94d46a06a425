"""What the layers of the corpus take, and how it describes a layer."""
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.utils import degree

from pyg_fast.graph import prepare_edge_index

EDGE_WIDTH, BASES, RELATIONS, HEADS = 16, 4, 5, 4
PREDICATES, FRAMES = 237, 3  # relations of a knowledge graph, points in time
OptInt: TypeAlias = Optional[int]  # noqa: UP045 (PyG reads no unions of other forms)
BONDS = (5, 6, 2)  # values of each feature of a bond


class Inputs(NamedTuple):
    """What the layers take, of a graph with N nodes and E edges: (N, F), (2, E), (E, 16), (E, 3) of
    integers, (E,), (E,) of integers, (N, 3), (E,) of integers, (T, N, F)."""

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    bond: Tensor
    weight: Tensor
    relation: Tensor
    pos: Tensor
    predicate: Tensor
    frames: Tensor

    @classmethod
    def make(
        cls, edge_index: Tensor, num_nodes: int, width: int, dtype: torch.dtype = torch.float32,
    ) -> 'Inputs':
        device, num_edges = edge_index.device, edge_index.size(1)
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        def integers(high: int) -> Tensor:
            return torch.randint(high, (num_edges,), generator=generator, device=device)

        weight = torch.rand(num_edges, generator=generator, device=device).to(dtype)
        return cls(
            normal(num_nodes, width), edge_index, normal(num_edges, EDGE_WIDTH),
            torch.stack([integers(high) for high in BONDS], 1), weight + 0.1, integers(RELATIONS),
            normal(num_nodes, 3), integers(PREDICATES), normal(FRAMES, num_nodes, width))

    def prepared(self) -> 'Inputs':
        """The same with a prepared graph, whose edges are in another order."""
        edge_index, perm = prepare_edge_index(self.edge_index, (self.x.size(0),) * 2)
        of_edges = ('edge_attr', 'bond', 'weight', 'relation', 'predicate')
        moved = {name: getattr(self, name)[perm] for name in of_edges}
        return self._replace(edge_index=edge_index, **moved)

    def of(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Some of them; those of nodes ask for gradients."""
        found = [getattr(self, name) for name in names]
        found = [t.to(dtype) if t.is_floating_point() else t for t in found]
        return [t.clone().requires_grad_() if name in ('x', 'pos', 'frames') else t
                for name, t in zip(names, found, strict=True)]


def mlp(num_in: int, width: int, num_out: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, width), nn.SiLU(), nn.Linear(width, num_out or width))


def symmetric(edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> Tensor:
    """The weights of GCN without self-loops."""
    scale = degree(edge_index[1], num_nodes, dtype).clamp(min=1).pow(-0.5)
    return scale[edge_index[0]] * scale[edge_index[1]]


# What a layer does beyond a map of node and edge features that an aggregation by name reduces.
KINDS = {
    'message': 'nothing',
    'aggregate': '`aggregate` overridden',
    'edge MLP': 'a map of values computed for each edge',
    'edge_index': '`edge_index` or one of its rows read in `message`',
    'types': 'rows of a table by an integer of the edge',
    'norm': 'a norm over the channels of an edge',
    'detach': '`detach` or `torch.no_grad` inside',
    'edge output': 'values of edges that `forward` or another layer reads',
    'wrapper': '`propagate` overridden, or called by another method',
    'selection': 'an `arange` over edges, sources not read, tuples of edge features',
    'geometry': 'angles, cross products, norms and products of small matrices of an edge',
    'batch': 'a batch of features of the same nodes, `node_dim=-2`',
}


class Published(NamedTuple):
    """How a layer of some width is made, the inputs that it takes, and its key in
    :obj:`KINDS`; ``ties``: several gradients are right, so that they are not compared."""

    make: Callable[[int], nn.Module]
    inputs: str
    kind: str = 'message'
    ties: bool = False
