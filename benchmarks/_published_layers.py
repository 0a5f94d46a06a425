"""Layers in the manner of what people publish, written for the benchmarks and tests.

Each is a :class:`~torch.nn.Module` that takes some of the inputs of :class:`Inputs`, and returns
node features. They keep the habits of published code: embeddings of bonds, `aggregate` overridden,
`softmax(score, index)` without a size, products by relation, states kept on `self`.
"""
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

from . import _published_aggregates, _published_edges
from ._published_inputs import (
    BASES,
    BONDS,
    EDGE_WIDTH,
    HEADS,
    RELATIONS,
    Published,
    mlp,
    symmetric,
)


class Bonds(nn.Module):
    """The sum of an embedding for each feature of a bond."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Embedding(values, width) for values in BONDS])

    def forward(self, bond: Tensor) -> Tensor:
        out = self.parts[0](bond[:, 0])
        for k in range(1, len(BONDS)):
            out = out + self.parts[k](bond[:, k])
        return out


# Molecules --------------------------------------------------------------------------------------

class MoleculeGIN(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, width))
        self.eps = nn.Parameter(torch.zeros(1))
        self.bonds = Bonds(width)

    def forward(self, x: Tensor, edge_index: Tensor, bond: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, edge_attr=self.bonds(bond))
        return self.mlp((1 + self.eps) * x + out)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return F.relu(x_j + edge_attr)

    def update(self, aggr_out: Tensor) -> Tensor:
        return aggr_out


class MoleculeGCN(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.linear, self.root = nn.Linear(width, width), nn.Embedding(1, width)
        self.bonds = Bonds(width)

    def forward(self, x: Tensor, edge_index: Tensor, bond: Tensor) -> Tensor:
        x = self.linear(x)
        deg = degree(edge_index[0], x.size(0), x.dtype) + 1
        inv = deg.pow(-0.5)
        norm = inv[edge_index[0]] * inv[edge_index[1]]
        out = self.propagate(edge_index, x=x, edge_attr=self.bonds(bond), norm=norm)
        return out + F.relu(x + self.root.weight) / deg.view(-1, 1)

    def message(self, x_j: Tensor, edge_attr: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * F.relu(x_j + edge_attr)


class GatedGCN(MessagePassing):
    """The sum of gates divides; the gates become the new edge features."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.A, self.B, self.D, self.E = (nn.Linear(width, width) for _ in range(4))
        self.C = nn.Linear(EDGE_WIDTH, width)
        self.norm_x, self.norm_e = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        e = self.C(edge_attr)
        out = self.propagate(
            edge_index, Ax=self.A(x), Bx=self.B(x), Dx=self.D(x), Ex=self.E(x), Ce=e)
        return x + F.relu(self.norm_x(out)) + F.relu(self.norm_e(self.e)).mean(0)

    def message(self, Dx_i: Tensor, Ex_j: Tensor, Ce: Tensor) -> Tensor:
        e_ij = Dx_i + Ex_j + Ce
        self.e = e_ij
        return torch.sigmoid(e_ij)

    def aggregate(
        self, sigma_ij: Tensor, index: Tensor, Bx_j: Tensor, Bx: Tensor,
    ) -> Tensor:
        size = Bx.shape[0]
        above = scatter(sigma_ij * Bx_j, index, 0, dim_size=size, reduce='sum')
        below = scatter(sigma_ij, index, 0, dim_size=size, reduce='sum')
        return above / (below + 1e-6)

    def update(self, aggr_out: Tensor, Ax: Tensor) -> Tensor:
        return Ax + aggr_out


class EGNN(MessagePassing):
    """Messages and moves, aggregated each in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.edge = nn.Sequential(
            nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.node, self.move = mlp(2 * width, width), mlp(width, width, 1)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        out, moved = self.propagate(edge_index, x=x, pos=pos)
        return x + self.node(torch.cat([x, out], -1)) + moved.square().sum(-1, keepdim=True)

    def message(
        self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gap = pos_i - pos_j
        distance = (gap * gap).sum(-1, keepdim=True)
        message = self.edge(torch.cat([x_i, x_j, distance], -1))
        return message, gap / (distance + 1).sqrt() * self.move(message)

    def aggregate(
        self, inputs: tuple[Tensor, Tensor], index: Tensor, dim_size: int,
    ) -> tuple[Tensor, Tensor]:
        return (scatter(inputs[0], index, 0, dim_size, 'sum'),
                scatter(inputs[1], index, 0, dim_size, 'mean'))

    def update(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs


class MPNN(MessagePassing):
    """A message of both ends and the edge, and a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.message_net = mlp(2 * width + EDGE_WIDTH, width)
        self.gru = nn.GRUCell(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.gru(self.propagate(edge_index, x=x, edge_attr=edge_attr), x)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.message_net(torch.cat([x_i, x_j, edge_attr], dim=-1))


class ContinuousFilter(MessagePassing):
    """SchNet: a filter of the distance, expanded in Gaussians."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.filter = nn.Sequential(
            nn.Linear(EDGE_WIDTH, width), nn.Softplus(), nn.Linear(width, width))
        self.before, self.after = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.register_buffer('centers', torch.linspace(0, 5, EDGE_WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).square().sum(-1).add(1e-6).sqrt()
        smeared = torch.exp(-2.0 * (distance.view(-1, 1) - self.centers).square())
        cutoff = 0.5 * (torch.cos(distance * math.pi / 10) + 1)
        weight = self.filter(smeared) * cutoff.view(-1, 1)
        return self.after(self.propagate(edge_index, x=self.before(x), W=weight))

    def message(self, x_j: Tensor, W: Tensor) -> Tensor:
        return x_j * W


class Crystal(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.gate = nn.Linear(2 * width + EDGE_WIDTH, width)
        self.core = nn.Linear(2 * width + EDGE_WIDTH, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        z = torch.cat([x_i, x_j, edge_attr], dim=-1)
        return self.gate(z).sigmoid() * F.softplus(self.core(z))


# Points -----------------------------------------------------------------------------------------

class EdgeMax(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='max')
        self.mlp = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j - x_i], dim=1))


class PointMax(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='max')
        self.mlp = mlp(width + 3, width)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return F.relu(self.propagate(edge_index, h=x, pos=pos))

    def message(self, h_j: Tensor, pos_j: Tensor, pos_i: Tensor) -> Tensor:
        return self.mlp(torch.cat([h_j, pos_j - pos_i], dim=-1))


class Interaction(MessagePassing):
    """A simulator's step: edges first, with a norm of layers."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='sum')
        self.edge = nn.Sequential(mlp(2 * width + EDGE_WIDTH, width), nn.LayerNorm(width))
        self.node = nn.Sequential(mlp(2 * width, width), nn.LayerNorm(width))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return x + self.node(torch.cat([x, out], dim=-1))

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.edge(torch.cat([x_i, x_j, edge_attr], dim=-1))


# Relations --------------------------------------------------------------------------------------

class RelationalBases(MessagePassing):
    """R-GCN: of each relation a combination of a few maps."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean', node_dim=0)
        self.bases = nn.Parameter(torch.empty(BASES, width, width))
        self.coefficients = nn.Parameter(torch.empty(RELATIONS, BASES))
        self.root = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.bases)
        nn.init.xavier_uniform_(self.coefficients)

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor) -> Tensor:
        mapped = torch.einsum('ni,bio->nbo', x, self.bases)
        return self.root(x) + self.propagate(edge_index, h=mapped, relation=relation)

    def message(self, h_j: Tensor, relation: Tensor) -> Tensor:
        return (self.coefficients[relation].unsqueeze(-1) * h_j).sum(1)


class RelationLoop(nn.Module):
    """R-GCN: relation by relation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([WeightedMean(width) for _ in range(RELATIONS)])
        self.root = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor, weight: Tensor) -> Tensor:
        out = self.root(x)
        for k, conv in enumerate(self.convs):
            mask = relation == k
            out = out + conv(x, edge_index[:, mask], weight[mask])
        return out


class Composed(MessagePassing):
    """CompGCN: products with the embeddings of relations."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.relations = nn.Embedding(RELATIONS, width)
        self.lin, self.loop = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor) -> Tensor:
        norm = symmetric(edge_index, x.size(0), x.dtype)
        out = self.propagate(edge_index, x=x, edge_type=relation, norm=norm)
        return (out + self.loop(x)) / 2

    def message(self, x_j: Tensor, edge_type: Tensor, norm: Tensor) -> Tensor:
        return self.lin(x_j * self.relations(edge_type)) * norm.view(-1, 1)


class TypedAttention(MessagePassing):
    """HGN: scores with a learned one of the edge's type."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.lin = nn.Linear(width, width, bias=False)
        self.types = nn.Embedding(RELATIONS, HEADS)
        self.a_src = nn.Parameter(torch.randn(1, HEADS, width // HEADS) * 0.3)
        self.a_dst = nn.Parameter(torch.randn(1, HEADS, width // HEADS) * 0.3)

    def forward(self, x: Tensor, edge_index: Tensor, relation: Tensor) -> Tensor:
        h = self.lin(x).view(x.size(0), HEADS, -1)
        scores = (h * self.a_src).sum(-1), (h * self.a_dst).sum(-1)
        out = self.propagate(edge_index, h=h, s=scores, t=self.types(relation))
        return F.elu(out.flatten(1))

    def message(
        self, h_j: Tensor, s_i: Tensor, s_j: Tensor, t: Tensor, index: Tensor, ptr: OptTensor,
        size_i: int,
    ) -> Tensor:
        alpha = softmax(F.leaky_relu(s_i + s_j + t, 0.2), index, ptr, size_i)
        return h_j * alpha.unsqueeze(-1)


# Attention --------------------------------------------------------------------------------------

class HandGAT(MessagePassing):
    """As most write it: the softmax without the number of nodes."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin, self.att = nn.Linear(width, width, bias=False), nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        score = F.leaky_relu(self.att(torch.cat([x_i, x_j], dim=-1)), 0.2)
        return softmax(score, index) * x_j


class HandTransformer(MessagePassing):
    """Heads, edge features in keys and values, the weights kept."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.edge = nn.Linear(EDGE_WIDTH, width, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        q, k, v = (lin(x).view(x.size(0), HEADS, -1) for lin in (self.q, self.k, self.v))
        e = self.edge(edge_attr).view(edge_attr.size(0), HEADS, -1)
        return x + self.propagate(edge_index, q=q, k=k, v=v, e=e).flatten(1)

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, e: Tensor, index: Tensor, ptr: OptTensor,
        size_i: int,
    ) -> Tensor:
        score = (q_i * (k_j + e)).sum(-1) / math.sqrt(q_i.size(-1))
        alpha = softmax(score, index, ptr, size_i)
        return (v_j + e) * alpha.unsqueeze(-1)


class Additive(MessagePassing):
    """GATv2 by hand, one vector of attention."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.att = nn.Parameter(torch.randn(width) / math.sqrt(width))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, left=self.left(x), right=self.right(x), size=None)

    def message(
        self, left_j: Tensor, right_i: Tensor, index: Tensor, ptr: OptTensor, size_i: int,
    ) -> Tensor:
        score = (torch.tanh(left_j + right_i) * self.att).sum(dim=-1, keepdim=True)
        return left_j * softmax(score, index, ptr, size_i)


class SoftmaxPool(MessagePassing):
    """GENConv by hand: a softmax for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.t, self.mlp = nn.Parameter(torch.ones(1)), mlp(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.mlp(x + self.propagate(edge_index, x=x))

    def message(
        self, x_j: Tensor, index: Tensor, ptr: OptTensor, size_i: int,
    ) -> Tensor:
        m = F.relu(x_j) + 1e-7
        return m * softmax(m * self.t, index, ptr, size_i)


class Diffusion(MessagePassing):
    """GRAND: differences, weighted by attention."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.q, self.k = nn.Linear(width, width // 4), nn.Linear(width, width // 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + 0.5 * self.propagate(edge_index, x=x, q=self.q(x), k=self.k(x))

    def message(
        self, x_i: Tensor, x_j: Tensor, q_i: Tensor, k_j: Tensor, index: Tensor, ptr: OptTensor,
        size_i: int,
    ) -> Tensor:
        score = (q_i * k_j).sum(-1, keepdim=True) / q_i.size(-1) ** 0.5
        return softmax(score, index, ptr, size_i) * (x_j - x_i)


class SignedAttention(MessagePassing):
    """FAGCN: a gate between -1 and 1."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.gate = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm = symmetric(edge_index, x.size(0), x.dtype)
        return 0.3 * x + self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_i: Tensor, x_j: Tensor, norm: Tensor) -> Tensor:
        alpha = torch.tanh(self.gate(torch.cat([x_i, x_j], dim=1)))
        return x_j * alpha * norm.view(-1, 1)


# Spectral filters and walks ---------------------------------------------------------------------

class Weighted(MessagePassing):
    """`weight * x_j`, summed: the base of those below."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**{'aggr': 'add', **options})
        self.lin = nn.Linear(width, width)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class LightGCN(Weighted):
    """No map, no nonlinearity."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.lin

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, norm=symmetric(edge_index, x.size(0), x.dtype))


class WeightedMean(Weighted):
    def __init__(self, width: int) -> None:
        super().__init__(width, aggr='mean')

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), norm=weight)


class DConv(Weighted):
    """Walks in both directions."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.randn(2, 3, width, width) / width)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        out = self.lin(x)
        for k, edges in enumerate((edge_index, edge_index.flip(0))):
            total = scatter(weight, edges[0], 0, x.size(0), 'sum').clamp(min=1e-6)
            norm, h = weight / total[edges[0]], x
            for hop in range(3):
                out = out + h @ self.weight[k, hop]
                h = self.propagate(edges, x=h, norm=norm) if hop < 2 else h
        return out


class BernNet(Weighted):
    """Polynomials of Bernstein of the Laplacian, K = 3."""

    K = 3

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.temp = nn.Parameter(torch.ones(self.K + 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm, temp = symmetric(edge_index, x.size(0), x.dtype), F.relu(self.temp)
        powers = [self.lin(x)]
        for _ in range(self.K):
            powers.append(powers[-1] + self.propagate(edge_index, x=powers[-1], norm=norm))
        out = math.comb(self.K, 0) / 2 ** self.K * temp[0] * powers[self.K]
        for i in range(self.K):
            h = powers[self.K - i - 1]
            for _ in range(i + 1):
                h = h - self.propagate(edge_index, x=h, norm=norm)
            out = out + math.comb(self.K, i + 1) / 2 ** self.K * temp[i + 1] * h
        return out


class Chebyshev(Weighted):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.lins = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm = -symmetric(edge_index, x.size(0), x.dtype)
        before, now = x, self.propagate(edge_index, x=x, norm=norm)
        out = self.lin(x) + self.lins[0](now)
        return out + self.lins[1](2 * self.propagate(edge_index, x=now, norm=norm) - before)


class PersonalPageRank(Weighted):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm, h = symmetric(edge_index, x.size(0), x.dtype), self.lin(x)
        z = h
        for _ in range(5):
            z = 0.9 * self.propagate(edge_index, x=z, norm=norm) + 0.1 * h
        return z


class RecurrentGCN(nn.Module):
    """T-GCN: a GRU with graph convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(width, width) for _ in range(3)])
        self.lins = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        h = x.tanh()
        z, r = (torch.sigmoid(lin(torch.cat([conv(x, edge_index, weight), h], 1)))
                for conv, lin in zip(self.convs[:2], self.lins[:2], strict=True))
        new = torch.tanh(self.lins[2](torch.cat([self.convs[2](x, edge_index, weight), h * r], 1)))
        return z * h + (1 - z) * new


# Others -----------------------------------------------------------------------------------------

class PoolSAGE(MessagePassing):
    def __init__(self, width: int) -> None:
        super().__init__(aggr='max')
        self.pool, self.lin = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=F.relu(self.pool(x)))
        return F.normalize(self.lin(torch.cat([x, out], -1)), dim=-1)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Principal(MessagePassing):
    """PNA: four ways to aggregate, then scaled by degrees."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr=['mean', 'max', 'min', 'std'])
        self.pre, self.post = nn.Linear(2 * width, width), nn.Linear(13 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x)
        scale = (degree(edge_index[1], x.size(0), x.dtype) + 1).log().clamp(min=0.5).view(-1, 1)
        return self.post(torch.cat([x, out, out * scale, out / scale], -1))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.pre(torch.cat([x_i, x_j], dim=-1))


class Recommender(MessagePassing):
    """NGCF: messages of the item, and of its affinity to the user."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.W1, self.W2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm = symmetric(edge_index, x.size(0), x.dtype)
        return F.leaky_relu(self.propagate(edge_index, x=x, norm=norm) + self.W1(x))

    def message(self, x_i: Tensor, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * (self.W1(x_j) + self.W2(x_j * x_i))


class Spike(torch.autograd.Function):
    """A step whose gradient is that of a sigmoid."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        s = torch.sigmoid(4 * ctx.saved_tensors[0])
        return grad * 4 * s * (1 - s)


class Spiking(MessagePassing):
    """Leaky neurons fire into the neighbourhood, three steps."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        current, v, out = self.lin(x), torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(3):
            v = 0.5 * v + current
            spikes = Spike.apply(v - 1.0)
            v = v * (1 - spikes)
            out = out + self.propagate(edge_index, x=spikes)
        return out / 3

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class EdgeMask(MessagePassing):
    """An explainer's learned mask of edges, kept on the layer."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), mask=(4 * weight - 2).sigmoid())

    def message(self, x_j: Tensor, mask: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * mask.unsqueeze(-1)


LAYERS = {
    'molecule GIN': Published(MoleculeGIN, 'x edge_index bond'),
    'molecule GCN': Published(MoleculeGCN, 'x edge_index bond'),
    'GatedGCN': Published(GatedGCN, 'x edge_index edge_attr', 'aggregate'),
    'EGNN': Published(EGNN, 'x edge_index pos', 'edge MLP'),
    'MPNN': Published(MPNN, 'x edge_index edge_attr', 'edge MLP'),
    'SchNet': Published(ContinuousFilter, 'x edge_index pos'),
    'crystal': Published(Crystal, 'x edge_index edge_attr'),
    'EdgeConv max': Published(EdgeMax, 'x edge_index', 'edge MLP', ties=True),
    'PointNet max': Published(PointMax, 'x edge_index pos', 'edge MLP', ties=True),
    'interaction network': Published(Interaction, 'x edge_index edge_attr', 'edge MLP'),
    'R-GCN bases': Published(RelationalBases, 'x edge_index relation', 'types'),
    'R-GCN loop': Published(RelationLoop, 'x edge_index relation weight'),
    'CompGCN': Published(Composed, 'x edge_index relation', 'types'),
    'HGN': Published(TypedAttention, 'x edge_index relation'),
    'GAT by hand': Published(HandGAT, 'x edge_index'),
    'transformer by hand': Published(HandTransformer, 'x edge_index edge_attr'),
    'additive attention': Published(Additive, 'x edge_index'),
    'softmax pool': Published(SoftmaxPool, 'x edge_index'),
    'GRAND': Published(Diffusion, 'x edge_index'),
    'FAGCN': Published(SignedAttention, 'x edge_index'),
    'LightGCN': Published(LightGCN, 'x edge_index'),
    'weighted mean': Published(WeightedMean, 'x edge_index weight'),
    'DConv': Published(DConv, 'x edge_index weight'),
    'BernNet': Published(BernNet, 'x edge_index'),
    'Chebyshev': Published(Chebyshev, 'x edge_index'),
    'APPNP by hand': Published(PersonalPageRank, 'x edge_index'),
    'T-GCN': Published(RecurrentGCN, 'x edge_index weight'),
    'SAGE pool': Published(PoolSAGE, 'x edge_index', ties=True),
    'PNA by hand': Published(Principal, 'x edge_index', ties=True),
    'NGCF': Published(Recommender, 'x edge_index', 'edge MLP'),
    'spiking': Published(Spiking, 'x edge_index', ties=True),
    'edge mask': Published(EdgeMask, 'x edge_index weight', 'edge_index'),
    **_published_aggregates.LAYERS,
    **_published_edges.LAYERS,
}
