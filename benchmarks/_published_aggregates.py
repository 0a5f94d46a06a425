"""Layers whose whole `propagate` is their own: `aggregate` or `propagate` overridden, parts without
gradients, values of edges that `forward` reads."""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor, Size
from torch_geometric.utils import degree, scatter, softmax

from ._published_inputs import EDGE_WIDTH, HEADS, OptInt, Published, mlp, symmetric

# Aggregate overridden ---------------------------------------------------------------------------

class DegreeScalers(MessagePassing):
    """PNA: reducers side by side, each scaled by functions of the degree."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr=None, node_dim=0)
        self.aggregators, self.avg_log_deg = ('mean', 'min', 'max', 'std'), 1.5
        self.pre_nn, self.post_nn = nn.Linear(2 * width, width), nn.Linear(13 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, size=None)
        return self.post_nn(torch.cat([x, out], dim=-1))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.pre_nn(torch.cat([x_i, x_j], dim=-1))

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: OptInt = None) -> Tensor:
        outs = []
        for aggregator in self.aggregators:
            if aggregator == 'std':
                mean = scatter(inputs, index, 0, dim_size, reduce='mean')
                mean_squares = scatter(inputs * inputs, index, 0, dim_size, reduce='mean')
                out = torch.sqrt(torch.relu(mean_squares - mean * mean) + 1e-5)
            else:
                out = scatter(inputs, index, 0, dim_size, reduce=aggregator)
            outs.append(out)
        out = torch.cat(outs, dim=-1)
        deg = degree(index, dim_size, dtype=inputs.dtype).view(-1, 1)
        amplification = torch.log(deg + 1) / self.avg_log_deg
        attenuation = self.avg_log_deg / torch.log(deg + 1)
        attenuation[deg == 0] = 1
        return torch.cat([out, out * amplification, out * attenuation], dim=-1)


class IndexAddMean(MessagePassing):
    """GraphSAGE's mean, in plain PyTorch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.lin_l(self.propagate(edge_index, x=x, w=weight)) + self.lin_r(x)

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return F.relu(x_j) * w[:, None]

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        out = torch.zeros(dim_size, inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
        count = torch.zeros(dim_size, dtype=inputs.dtype, device=inputs.device)
        out.index_add_(0, index, inputs)
        count.index_add_(0, index, torch.ones_like(index, dtype=inputs.dtype))
        return out / count.clamp(min=1).unsqueeze(1)


def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """As the code of EGNN has it."""
    result_shape = (num_segments, data.size(1))
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result = data.new_full(result_shape, 0)
    count = data.new_full(result_shape, 0)
    result.scatter_add_(0, segment_ids, data)
    count.scatter_add_(0, segment_ids, torch.ones_like(data))
    return result / count.clamp(min=1)


class RadialField(MessagePassing):
    """Forces along the edges, and a sum of messages: a tuple of both."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='sum')
        self.lin, self.phi, self.out = (
            nn.Linear(width, width), nn.Linear(2 * width, 1), nn.Linear(width + 3, width))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        agg, force = self.propagate(edge_index, h=self.lin(x), x=x, pos=pos)
        return x + self.out(torch.cat([agg, pos + force], dim=-1))

    def message(
        self, h_j: Tensor, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rij = pos_i - pos_j
        radial = torch.sum(rij ** 2, 1).unsqueeze(1)
        force = torch.tanh(self.phi(torch.cat((x_i, x_j), dim=1))) * rij / (radial + 1.0)
        return torch.exp(-radial) * h_j, force

    def aggregate(
        self, inputs: tuple[Tensor, Tensor], index: Tensor, dim_size: int,
    ) -> tuple[Tensor, Tensor]:
        h, force = inputs
        return scatter(h, index, 0, dim_size), unsorted_segment_mean(force, index, dim_size)

    def update(self, aggr_out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return aggr_out


class AttentionInAggregate(MessagePassing):
    """The message gives scores and values, the softmax follows in `aggregate`."""

    def __init__(self, width: int) -> None:
        super().__init__(node_dim=0)
        self.heads, self.dim = HEADS, width // HEADS
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).view(-1, self.heads, 3 * self.dim).chunk(3, dim=-1)
        return self.to_out(self.propagate(edge_index, q=q, k=k, v=v))

    def message(self, q_i: Tensor, k_j: Tensor, v_j: Tensor) -> tuple[Tensor, Tensor]:
        return (q_i * k_j).sum(dim=-1) * self.dim ** -0.5, v_j

    def aggregate(
        self, inputs: tuple[Tensor, Tensor], index: Tensor, ptr: OptTensor = None,
        dim_size: OptInt = None,
    ) -> Tensor:
        sim, v = inputs
        attn = softmax(sim, index, ptr, num_nodes=dim_size, dim=self.node_dim)
        out = scatter(attn.unsqueeze(-1) * v, index, self.node_dim, dim_size, reduce='sum')
        return out.reshape(-1, self.heads * self.dim)


class HandSoftmax(MessagePassing):
    """Edge softmax of `scatter_reduce` and `exp`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.W, self.attn = nn.Linear(width, width, bias=False), nn.Linear(2 * width, 1, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.elu(self.propagate(edge_index, h=self.W(x)))

    def message(self, h_i: Tensor, h_j: Tensor) -> Tensor:
        e = F.leaky_relu(self.attn(torch.cat([h_i, h_j], dim=-1)), 0.2)
        return torch.cat([e, h_j], dim=-1)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        e, h = inputs[:, 0], inputs[:, 1:]
        top = torch.full((dim_size,), float('-inf'), dtype=e.dtype, device=e.device)
        top = top.scatter_reduce(0, index, e.detach(), reduce='amax')
        exp = torch.exp(e - top[index])
        total = torch.zeros(dim_size, dtype=e.dtype, device=e.device).scatter_add(0, index, exp)
        alpha = exp / (total[index] + 1e-16)
        return h.new_zeros(dim_size, h.size(1)).index_add(0, index, alpha[:, None] * h)


class PaiNN(MessagePassing):
    """Scalars and vectors of three dimensions, in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.hidden = width
        self.phi, self.filter = mlp(width, width, 3 * width), nn.Linear(EDGE_WIDTH, 3 * width)
        self.vec = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, pos: Tensor) -> Tensor:
        v = pos.unsqueeze(-1) * self.vec(x).unsqueeze(1)
        rij = pos[edge_index[0]] - pos[edge_index[1]]
        out = self.propagate(
            edge_index, s=self.phi(x), v=v, W=self.filter(edge_attr), dir=F.normalize(rij + 1e-3))
        return x + out['s'] + (v + out['v']).pow(2).sum(1)

    def message(self, s_j: Tensor, v_j: Tensor, W: Tensor, dir: Tensor) -> dict[str, Tensor]:
        ds, dv1, dv2 = torch.split(s_j * W, self.hidden, dim=-1)
        return {'s': ds, 'v': v_j * dv1.unsqueeze(1) + dir.unsqueeze(-1) * dv2.unsqueeze(1)}

    def aggregate(
        self, inputs: dict[str, Tensor], index: Tensor, dim_size: int,
    ) -> dict[str, Tensor]:
        return {key: scatter(value, index, dim=0, dim_size=dim_size, reduce='sum')
                for key, value in inputs.items()}


class PowerMean(MessagePassing):
    """DeeperGCN's aggregation by a learned power, in place."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr=None)
        self.p, self.eps = nn.Parameter(torch.tensor([1.5])), 1e-7
        self.lin_edge, self.mlp = nn.Linear(EDGE_WIDTH, width), mlp(width, 2 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, edge_attr=self.lin_edge(edge_attr))
        return self.mlp(x + out)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return F.relu(x_j + edge_attr) + self.eps

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: OptInt = None) -> Tensor:
        min_value, max_value = 1e-7, 1e2
        torch.clamp_(inputs, min_value, max_value)
        out = scatter(torch.pow(inputs, self.p), index, dim=self.node_dim, dim_size=dim_size,
                      reduce='mean')
        torch.clamp_(out, min_value, max_value)
        return torch.pow(out, 1 / self.p)


class MeanAndDeviation(MessagePassing):
    """PyG's own mean by `super`, and the deviation from it in a second pass."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.lin = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.relu(self.lin(torch.cat([x, self.propagate(edge_index, x=x)], dim=1)))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j - x_i

    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None,
    ) -> Tensor:
        mean = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        centered = inputs - mean.index_select(0, index)
        var = self.aggr_module(centered * centered, index, ptr=ptr, dim_size=dim_size)
        return torch.cat([mean, (var + 1e-5).sqrt()], dim=1)


# Parts without gradients ------------------------------------------------------------------------

class FrozenSoftmax(MessagePassing):
    """DeeperGCN with a temperature that is not learned."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='softmax')
        self.t, self.learn_t, self.lin = 0.5, False, nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x) + x)

    def message(self, x_j: Tensor) -> Tensor:
        return F.relu(x_j) + 1e-7

    def aggregate(
        self, inputs: Tensor, index: Tensor, ptr: OptTensor = None, dim_size: OptInt = None,
    ) -> Tensor:
        if self.learn_t:
            out = softmax(inputs * self.t, index, ptr, dim_size, self.node_dim)
        else:
            with torch.no_grad():
                out = softmax(inputs * self.t, index, ptr, dim_size, self.node_dim)
        return scatter(inputs * out, index, self.node_dim, dim_size, reduce='sum')


class StraightGate(MessagePassing):
    """Edges are on or off, their gradient is that of a sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='mean')
        self.lin, self.temperature = nn.Linear(width, width), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), logit=weight - 0.6) + x

    def message(self, x_j: Tensor, logit: Tensor) -> Tensor:
        soft = torch.sigmoid(logit / self.temperature)
        with torch.no_grad():
            hard = (logit > 0).to(soft.dtype) - soft
        return x_j * (hard + soft).view(-1, 1)


class StoppedScores(MessagePassing):
    """Similar neighbours count more, and similarity is not trained."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        return self.propagate(edge_index, x=h, z=F.normalize(h, dim=-1))

    def message(
        self, x_j: Tensor, z_i: Tensor, z_j: Tensor, index: Tensor, size_i: OptInt,
    ) -> Tensor:
        sim = (z_i * z_j).sum(-1, keepdim=True).detach()
        return softmax(2.0 * sim, index, num_nodes=size_i) * x_j


# Values of edges that others read ---------------------------------------------------------------

class EdgeGate(MessagePassing):
    def __init__(self, width: int, edge_width: int) -> None:
        super().__init__(aggr='add')
        self.lin, self.src, self.dst = (nn.Linear(width, width) for _ in range(3))
        self.edge = nn.Linear(edge_width, width)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        out = self.propagate(
            edge_index, x=self.lin(x), src=self.src(x), dst=self.dst(x), e=self.edge(e))
        e, self.e_new = self.e_new, None
        return x + out, e

    def message(self, x_j: Tensor, dst_i: Tensor, src_j: Tensor, e: Tensor) -> Tensor:
        self.e_new = F.silu(dst_i + src_j + e)
        return self.e_new.sigmoid() * x_j


class EdgeGates(nn.Module):
    """Two layers: the second reads the edges that the first wrote."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = EdgeGate(width, EDGE_WIDTH), EdgeGate(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, e = self.first(x, edge_index, edge_attr)
        return self.second(F.relu(x), edge_index, e)[0]


class ResidualAttention(MessagePassing):
    """RealFormer: `forward` returns the weights, and scores add to those of the layer before."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add', node_dim=0)
        self.qkv = nn.Linear(width, 3 * width)
        self._alpha: Any = None

    def layer(self, x: Tensor, edge_index: Tensor, prev: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x).view(-1, HEADS, 3, x.size(1) // HEADS).unbind(2)
        out = self.propagate(edge_index, q=qkv[0], k=qkv[1], v=qkv[2], prev=prev)
        alpha, self._alpha = self._alpha, None
        return x + out.flatten(1), alpha

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, alpha = self.layer(x, edge_index, x.new_zeros(edge_index.size(1), HEADS))
        return self.layer(x, edge_index, alpha)[0]

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, prev: Tensor, index: Tensor,
        size_i: OptInt,
    ) -> Tensor:
        alpha = (q_i * k_j).sum(-1) / q_i.size(-1) ** 0.5 + prev
        self._alpha = alpha
        return softmax(alpha, index, num_nodes=size_i).unsqueeze(-1) * v_j


# Propagate through others -----------------------------------------------------------------------

class Hops(MessagePassing):
    """GPR-GNN: a method takes the hops."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin, self.K = nn.Linear(width, width), 3
        self.gamma = nn.Parameter(0.1 * 0.9 ** torch.arange(self.K + 1))

    def hop(self, edge_index: Tensor, **kwargs: Any) -> Tensor:
        return self.propagate(edge_index, size=None, **kwargs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm, x = symmetric(edge_index, x.size(0), x.dtype), self.lin(x)
        hidden = x * self.gamma[0]
        for k in range(self.K):
            x = self.hop(edge_index, x=x, norm=norm)
            hidden = hidden + self.gamma[k + 1] * x
        return hidden

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class OwnPropagate(MessagePassing):
    """`propagate` overridden: the sum is divided by degrees afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.lin, self.lin_e = nn.Linear(width, width), nn.Linear(EDGE_WIDTH, width)

    def propagate(self, edge_index: Tensor, size: Size = None, **kwargs: Any) -> Tensor:
        out = super().propagate(edge_index, size=size, **kwargs)
        return out / degree(edge_index[1], out.size(0), out.dtype).clamp(min=1).view(-1, 1).sqrt()

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), e=self.lin_e(edge_attr))

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return F.relu(x_j + e)


LAYERS = {
    'PNA scalers': Published(DegreeScalers, 'x edge_index', 'aggregate', ties=True),
    'index_add mean': Published(IndexAddMean, 'x edge_index weight', 'aggregate'),
    'radial field': Published(RadialField, 'x edge_index pos', 'aggregate'),
    'attention in aggregate': Published(AttentionInAggregate, 'x edge_index', 'aggregate'),
    'softmax by hand': Published(HandSoftmax, 'x edge_index', 'aggregate'),
    'PaiNN': Published(PaiNN, 'x edge_index edge_attr pos', 'aggregate'),
    'power mean': Published(PowerMean, 'x edge_index edge_attr', 'aggregate'),
    'mean and deviation': Published(MeanAndDeviation, 'x edge_index', 'aggregate'),
    'frozen softmax': Published(FrozenSoftmax, 'x edge_index', 'detach'),
    'straight-through gate': Published(StraightGate, 'x edge_index weight', 'detach'),
    'stopped scores': Published(StoppedScores, 'x edge_index', 'detach'),
    'edge gates': Published(EdgeGates, 'x edge_index edge_attr', 'edge output'),
    'residual attention': Published(ResidualAttention, 'x edge_index', 'edge output'),
    'GPR-GNN': Published(Hops, 'x edge_index', 'wrapper'),
    'own propagate': Published(OwnPropagate, 'x edge_index edge_attr', 'wrapper'),
}
