"""Layers whose messages read more than features: the structure, tables by types of edges, norms,
selections, geometry, batches."""
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, degree, softmax

from ._published_inputs import (
    BONDS,
    EDGE_WIDTH,
    HEADS,
    PREDICATES,
    RELATIONS,
    OptInt,
    Published,
    mlp,
    symmetric,
)

# The structure read in message ------------------------------------------------------------------

class DegreeInMessage(MessagePassing):
    """The first tutorials' GCN: the norm is computed for each message."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, size=(x.size(0), x.size(0)), x=self.lin(x))

    def message(self, x_j: Tensor, edge_index: Tensor, size: tuple[int, int]) -> Tensor:
        row, col = edge_index
        deg = degree(row, size[0], dtype=x_j.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return norm.view(-1, 1) * x_j


class OldGAT(MessagePassing):
    """GATConv of PyG 1.4: `edge_index_i` goes to the softmax."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.heads, self.out_channels = HEADS, width // HEADS
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.att = nn.Parameter(torch.randn(1, HEADS, 2 * self.out_channels) * 0.3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.mm(x, self.weight).view(-1, self.heads, self.out_channels)
        return self.propagate(edge_index, x=x)

    def message(
        self, edge_index_i: Tensor, x_i: Tensor, x_j: Tensor, size_i: int,
    ) -> Tensor:
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1)
        alpha = F.leaky_relu(alpha, 0.2)
        alpha = softmax(alpha, edge_index_i, num_nodes=size_i)
        return x_j * alpha.view(-1, self.heads, 1)

    def update(self, aggr_out: Tensor) -> Tensor:
        return aggr_out.view(-1, self.heads * self.out_channels)


class ScoresOfNodes(MessagePassing):
    """Gates of nodes, kept on the layer and gathered by hand at both ends."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.lin, self.gate = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.source, self.target = self.gate(x).unbind(-1)
        return x + self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor, edge_index_i: Tensor, edge_index_j: Tensor) -> Tensor:
        gate = torch.sigmoid(self.target[edge_index_i] + self.source[edge_index_j])
        return x_j * gate.unsqueeze(-1)


# Tables by types --------------------------------------------------------------------------------

class CompGCN(MessagePassing):
    """Both directions of a knowledge graph, and one of three compositions.

    The circular correlation is that of real DFT matrices, as exported models have it.
    """

    def __init__(self, width: int, opn: str) -> None:
        super().__init__(aggr='add')
        self.opn = opn
        self.w_in, self.w_out, self.w_loop = (
            nn.Parameter(torch.randn(width, width) / math.sqrt(width)) for _ in range(3))
        self.rel = nn.Parameter(torch.randn(2 * PREDICATES, width) / math.sqrt(width))
        angle = torch.arange(width).outer(torch.arange(width)) % width * (2 * math.pi / width)
        self.register_buffer('cos', angle.cos())
        self.register_buffer('sin', angle.sin())

    def forward(self, x: Tensor, edge_index: Tensor, predicate: Tensor) -> Tensor:
        out = x @ self.w_loop
        for mode in ('in', 'out'):
            edges = edge_index if mode == 'in' else edge_index.flip(0)
            edge_type = predicate if mode == 'in' else predicate + PREDICATES
            out = out + self.propagate(
                edges, x=x, edge_type=edge_type, rel_embed=self.rel, mode=mode,
                edge_norm=symmetric(edges, x.size(0), x.dtype))
        return torch.tanh(out / 3)

    def ccorr(self, a: Tensor, b: Tensor) -> Tensor:
        a_re, a_im, b_re, b_im = a @ self.cos, a @ self.sin, b @ self.cos, b @ self.sin
        out = (a_re * b_re + a_im * b_im) @ self.cos + (a_re * b_im - a_im * b_re) @ self.sin
        return out / a.size(-1)

    def rel_transform(self, ent_embed: Tensor, rel_embed: Tensor) -> Tensor:
        if self.opn == 'corr':
            return self.ccorr(ent_embed, rel_embed)
        return ent_embed - rel_embed if self.opn == 'sub' else ent_embed * rel_embed

    def message(
        self, x_j: Tensor, edge_type: Tensor, rel_embed: Tensor, edge_norm: Tensor, mode: str,
    ) -> Tensor:
        weight = getattr(self, f'w_{mode}')
        rel_emb = torch.index_select(rel_embed, 0, edge_type)
        out = torch.mm(self.rel_transform(x_j, rel_emb), weight)
        return out if edge_norm is None else out * edge_norm.view(-1, 1)


class BlockDiagonal(MessagePassing):
    """R-GCN: a matrix of blocks for each relation, multiplied edge by edge."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.submat = width // HEADS
        self.weight = nn.Parameter(torch.randn(RELATIONS, HEADS, self.submat, self.submat) * 0.3)
        self.root = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor) -> Tensor:
        return F.relu(self.propagate(edge_index, x=x, etypes=relation) + self.root(x))

    def message(self, x_j: Tensor, etypes: Tensor) -> Tensor:
        weight = self.weight[etypes].view(-1, self.submat, self.submat)
        node = x_j.reshape(-1, 1, self.submat)
        return torch.bmm(node, weight).view(-1, HEADS * self.submat)


class Rotation(MessagePassing):
    """RotatE: the relation turns halves of the features, as a complex number would."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.phase, self.lin = nn.Embedding(PREDICATES, width // 2), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, predicate: Tensor) -> Tensor:
        norm = symmetric(edge_index, x.size(0), x.dtype)
        return x + self.lin(self.propagate(edge_index, x=x, rel=predicate, norm=norm))

    def message(self, x_j: Tensor, rel: Tensor, norm: Tensor) -> Tensor:
        re, im = torch.chunk(x_j, 2, dim=-1)
        theta = self.phase(rel)
        cos, sin = torch.cos(theta), torch.sin(theta)
        return norm[:, None] * torch.cat([re * cos - im * sin, re * sin + im * cos], dim=-1)


class BondsInMessage(MessagePassing):
    """Types of bonds become features inside the message."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.mlp = mlp(width, 2 * width, width)
        self.bond_type, self.bond_stereo = (nn.Embedding(count, width) for count in BONDS[:2])

    def forward(self, x: Tensor, edge_index: Tensor, bond: Tensor) -> Tensor:
        return self.mlp(self.propagate(edge_index, x=x, edge_attr=bond))

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j + self.bond_type(edge_attr[:, 0]) + self.bond_stereo(edge_attr[:, 1])


# Norms over channels ----------------------------------------------------------------------------

class NormedEdge(MessagePassing):
    """GNS with one layer: LayerNorm of the edge's new state."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.edge_fn = nn.Sequential(
            nn.Linear(2 * width + EDGE_WIDTH, width), nn.LayerNorm(width), nn.ReLU())
        self.node_fn = nn.Sequential(nn.Linear(2 * width, width), nn.LayerNorm(width))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.propagate(edge_index=edge_index, x=x, edge_features=edge_attr)
        return x + self.node_fn(torch.cat([out, x], dim=-1))

    def message(self, x_i: Tensor, x_j: Tensor, edge_features: Tensor) -> Tensor:
        return self.edge_fn(torch.cat([x_i, x_j, edge_features], dim=-1))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class KeyNorm(MessagePassing):
    """Attention in the manner of HiVT and of language models: keys of an edge are normalised."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.lin_q, self.lin_k, self.lin_v = (nn.Linear(width, width) for _ in range(3))
        self.lin_e, self.norm = nn.Linear(EDGE_WIDTH, width), RMSNorm(width // HEADS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        q, k, v = (lin(x).view(-1, HEADS, x.size(1) // HEADS)
                   for lin in (self.lin_q, self.lin_k, self.lin_v))
        e = self.lin_e(edge_attr).view(-1, *q.shape[1:])
        return x + self.propagate(edge_index, q=self.norm(q), k=k, v=v, e=e).flatten(1)

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, e: Tensor, index: Tensor, ptr: OptTensor,
        size_i: OptInt,
    ) -> Tensor:
        alpha = (q_i * self.norm(k_j + e)).sum(dim=-1) / q_i.size(-1) ** 0.5
        return v_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class Standardised(MessagePassing):
    """Products of both ends, standardised by hand."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, a=self.a(x), b=self.b(x)) + x

    def message(self, a_i: Tensor, b_j: Tensor) -> Tensor:
        m = a_i * b_j
        mean, var = m.mean(-1, keepdim=True), m.var(-1, unbiased=False, keepdim=True)
        return F.gelu((m - mean) / torch.sqrt(var + 1e-5) * self.gamma + self.beta)


# Selections of edges and parts ------------------------------------------------------------------

class SelectedMap(MessagePassing):
    """The maps of all relations at the node, of which an `arange` selects one for each edge."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean', node_dim=0)
        self.weight = nn.Parameter(torch.randn(RELATIONS, width, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor) -> Tensor:
        h = torch.einsum('ni,rio->nro', x, self.weight)
        return self.propagate(edge_index, h=h, edge_type=relation) + self.bias

    def message(self, h_j: Tensor, edge_type: Tensor) -> Tensor:
        return h_j[torch.arange(h_j.size(0), device=h_j.device), edge_type]


class EdgesToNodes(MessagePassing):
    """Sums edge features at their target: no source is read."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.edge_encoder, self.lin = nn.Linear(EDGE_WIDTH, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        size = (x.size(0), x.size(0))
        out = self.propagate(edge_index, edge_attr=self.edge_encoder(edge_attr), size=size)
        return self.lin(torch.cat([x, out], dim=-1)).relu()

    def message(self, edge_attr: Tensor) -> Tensor:
        return edge_attr.relu()


class EdgeTuple(MessagePassing):
    """Distances and directions come as a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.rbf, self.dirs = nn.Linear(1, width), nn.Linear(3, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        vec = pos[edge_index[0]] - pos[edge_index[1]]
        dist = (vec.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x + self.out(self.propagate(edge_index, x=x, geometry=(dist, vec / (1 + dist))))

    def message(self, x_j: Tensor, geometry: tuple[Tensor, Tensor]) -> Tensor:
        dist, direction = geometry
        return x_j * self.rbf(torch.exp(-dist)) + self.dirs(direction)


# Geometry ---------------------------------------------------------------------------------------

def angle(v1: Tensor, v2: Tensor) -> Tensor:
    """As PPFNet's code has it."""
    return torch.atan2(
        torch.cross(v1, v2, dim=1).norm(p=2, dim=1), (v1 * v2).sum(dim=1) + 1e-6)


class PointPairs(MessagePassing):
    """PPF: the distance, and three angles with normals."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.normal, self.lin = nn.Linear(width, 3), nn.Linear(4, width)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        normal = F.normalize(self.normal(x), dim=-1)
        return self.propagate(edge_index, x=x, pos=pos, normal=normal)

    def message(
        self, x_j: Tensor, pos_i: Tensor, pos_j: Tensor, normal_i: Tensor, normal_j: Tensor,
    ) -> Tensor:
        pseudo = pos_j - pos_i
        ppf = torch.stack([
            pseudo.norm(p=2, dim=1), angle(normal_i, pseudo), angle(normal_j, pseudo),
            angle(normal_i, normal_j)], dim=1)
        return x_j * self.lin(ppf)


class AngleGate(MessagePassing):
    """The angle between the bond and a direction of the atom, by `acos`."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.direction, self.lin = nn.Linear(width, 3), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=self.lin(x), pos=pos, d=self.direction(x))

    def message(self, x_j: Tensor, pos_i: Tensor, pos_j: Tensor, d_i: Tensor) -> Tensor:
        bond = pos_j - pos_i
        cos_theta = (bond * d_i).sum(-1) / (bond.norm(dim=-1) * d_i.norm(dim=-1) + 1e-2)
        theta = torch.acos(torch.clamp(cos_theta, -1, 1))
        return x_j * (torch.cos(theta / 2) ** 2).unsqueeze(-1)


class LocalFrames(MessagePassing):
    """ClofNet: vectors of the neighbour in a frame of the edge."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.vec, self.lin, self.out = (
            nn.Linear(width, 3), nn.Linear(3, width), nn.Linear(width, width))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return self.out(F.silu(self.propagate(edge_index, x=x, pos=pos, vec=self.vec(x))))

    def message(self, x_j: Tensor, pos_i: Tensor, pos_j: Tensor, vec_j: Tensor) -> Tensor:
        diff, cross = pos_i - pos_j, torch.cross(pos_i, pos_j, dim=-1)
        diff = diff / (torch.linalg.norm(diff, dim=-1, keepdim=True) + 1)
        cross = cross / (torch.linalg.norm(cross, dim=-1, keepdim=True) + 1)
        vertical = torch.cross(diff, cross, dim=-1)
        frame = torch.stack([diff, cross, vertical], dim=1)
        local = torch.matmul(frame, vec_j.unsqueeze(-1)).squeeze(-1)
        return x_j * self.lin(local)


# Batches of features ----------------------------------------------------------------------------

class TrafficGCN(MessagePassing):
    """Frames of a time series on one graph, summed with the weights of roads."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=-2)
        self.lin, self.temporal = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, frames: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        out = F.relu(self.propagate(edge_index, x=self.lin(frames), edge_weight=weight))
        return (torch.softmax(self.temporal(out), dim=0) * out).sum(dim=0)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


class WeatherGates(MessagePassing):
    """neural-lam's batches: both ends of an edge, and features that all of them share."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean', node_dim=-2)
        self.both, self.edge, self.out = (
            nn.Linear(2 * width, width), nn.Linear(EDGE_WIDTH, width), nn.Linear(width, width))

    def forward(self, frames: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        e = self.edge(edge_attr).expand(frames.size(0), -1, -1)
        out = self.propagate(edge_index, x=frames, edge_attr=e)
        return (frames + self.out(out)).mean(0)

    def message(self, x_j: Tensor, x_i: Tensor, edge_attr: Tensor) -> Tensor:
        return F.silu(self.both(torch.cat((x_j, x_i), dim=-1)) + edge_attr)


LAYERS = {
    'degree in message': Published(DegreeInMessage, 'x edge_index', 'edge_index'),
    'GAT of PyG 1.4': Published(OldGAT, 'x edge_index', 'edge_index'),
    'scores of nodes': Published(ScoresOfNodes, 'x edge_index', 'edge_index'),
    **{f'CompGCN {opn}': Published(
        functools.partial(CompGCN, opn=opn), 'x edge_index predicate', 'types')
       for opn in ('sub', 'mult', 'corr')},
    'R-GCN blocks': Published(BlockDiagonal, 'x edge_index relation', 'types'),
    'RotatE': Published(Rotation, 'x edge_index predicate', 'types'),
    'bonds in message': Published(BondsInMessage, 'x edge_index bond', 'types'),
    'GNS step': Published(NormedEdge, 'x edge_index edge_attr', 'norm'),
    'RMSNorm of keys': Published(KeyNorm, 'x edge_index edge_attr', 'norm'),
    'standardised products': Published(Standardised, 'x edge_index', 'norm'),
    'selected map': Published(SelectedMap, 'x edge_index relation', 'selection'),
    'edges to nodes': Published(EdgesToNodes, 'x edge_index edge_attr', 'selection'),
    'edge tuple': Published(EdgeTuple, 'x edge_index pos', 'selection'),
    'point pairs': Published(PointPairs, 'x edge_index pos', 'geometry'),
    'angle gate': Published(AngleGate, 'x edge_index pos', 'geometry'),
    'local frames': Published(LocalFrames, 'x edge_index pos', 'geometry'),
    'traffic': Published(TrafficGCN, 'frames edge_index weight', 'batch'),
    'weather': Published(WeatherGates, 'frames edge_index edge_attr', 'batch'),
}
