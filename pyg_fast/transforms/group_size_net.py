"""The graph classifier that chooses group sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, SAGPooling, global_max_pool, global_mean_pool

from ._degrees import Degrees

# The sample of a graph: evenly spaced rows, and evenly spaced edges of each row.
_ROWS = 256
_EDGES = 4
LOG_DEGREE = 10.0  # scales logarithms of degrees to about one


def sample_of(rowptr: Tensor, col: Tensor, num_cols: int, width: int) -> Data:
    """The classifier's input for a graph, on the CPU: deterministic, of bounded size.

    Its nodes are rows and the columns of some of their edges, each with its degree in the whole
    graph. One pass over the edges counts the degrees of columns.
    """
    degrees = Degrees.of(rowptr)
    num_rows = min(degrees.num_rows, _ROWS)
    rowptr, device = rowptr.long(), rowptr.device
    row = torch.arange(num_rows, device=device) * degrees.num_rows // max(num_rows, 1)
    begin, degree = rowptr[row], rowptr[row + 1] - rowptr[row]
    step = torch.arange(_EDGES, device=device)
    count = degree.clamp(max=_EDGES)
    edge = begin.view(-1, 1) + (2 * step + 1) * degree.view(-1, 1) // (2 * count.view(-1, 1) + 1)
    is_edge = step < count.view(-1, 1)
    target = torch.arange(num_rows, device=device).view(-1, 1).expand_as(edge)[is_edge]
    source, number = col[edge[is_edge]].long().unique(return_inverse=True)
    of_source = torch.bincount(col[: degrees.num_edges], minlength=num_cols)[source]
    edges = torch.stack([number + num_rows, target])
    return as_data(torch.cat([degree, of_source]).cpu(), edges.cpu(), degrees, width)


def as_data(node_degrees: Tensor, edges: Tensor, degrees: Degrees, width: int) -> Data:
    """The classifier's input: the degrees of the sample's nodes, rows first, and its edges."""
    features = torch.tensor([degrees.features(width)]).div_(LOG_DEGREE)
    log_degree = node_degrees.add(1).log2().div(LOG_DEGREE)
    is_row = torch.arange(log_degree.size(0)) < min(degrees.num_rows, _ROWS)
    x = torch.stack([log_degree, is_row.float(), log_degree - features[0, 2]], dim=1)
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    return Data(x=x, edge_index=edge_index, features=features, node_degrees=node_degrees)


class GroupSizeNet(nn.Module):
    r"""Two graph convolutions with self-attention pooling, as in the `"Self-Attention Graph
    Pooling" <https://arxiv.org/abs/1904.08082>`_ paper, with a readout after each. Together with
    the degrees of the whole graph and the width they give a score for each size.

    .. math::
        \mathrm{score}_g = -t \left( \log_2 g - \mathbf{w}^{\top} \mathbf{f} -
        \mathrm{MLP}(\mathbf{r}, \mathbf{f}) \right)^2

    with the readout :math:`\mathbf{r}` and the features :math:`\mathbf{f}` of the whole graph.
    The formula encodes the order of the sizes, so few training graphs suffice.

    Args:
        sizes (sequence): The group sizes to choose from.
        hidden (int): Number of hidden channels. (default: :obj:`16`)
    """

    def __init__(self, sizes: tuple[int, ...] | list[int], hidden: int = 16) -> None:
        super().__init__()
        self.sizes, self.hidden = tuple(sizes), hidden
        self.convs = nn.ModuleList([GraphConv(3, hidden), GraphConv(hidden, hidden)])
        self.pools = nn.ModuleList(SAGPooling(hidden, ratio=0.5) for _ in range(2))
        num_features = len(Degrees(0, 0, 0, 0).features(1))
        self.linear = nn.Linear(num_features, 1)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)  # initially only degrees and width count
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(
            nn.Linear(2 * hidden + num_features, hidden), nn.ReLU(), nn.Dropout(0.2), last
        )
        self.sharpness = nn.Parameter(torch.zeros(()))
        self.register_buffer('powers', torch.tensor(self.sizes).log2(), persistent=False)

    def forward(self, data: Data) -> Tensor:
        x, edge_index = data.x, data.edge_index
        batch = x.new_zeros(x.size(0), dtype=torch.long) if data.batch is None else data.batch
        num_graphs = data.features.size(0)
        read = x.new_zeros(num_graphs, 2 * self.hidden)
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = conv(x, edge_index).relu()
            x, edge_index, _, batch, _, _ = pool(x, edge_index, batch=batch)
            both = [fn(x, batch, num_graphs) for fn in (global_mean_pool, global_max_pool)]
            read = read + torch.cat(both, dim=1)
        features = data.features
        best = self.linear(features) + self.head(torch.cat([read, features], dim=1))
        return -self.sharpness.exp() * (self.powers - best).square()

    @torch.no_grad()
    def start_from(self, weights: Sequence[float]) -> None:
        """Initialises it with a regression of the logarithm of the size."""
        self.linear.weight.copy_(torch.tensor([weights]).mul(LOG_DEGREE))
        self.linear.bias.zero_()


def save(net: GroupSizeNet) -> dict[str, Any]:
    """The weights of a classifier, for JSON."""
    state = {name: _rounded(t.tolist()) for name, t in net.state_dict().items()}
    return {'sizes': list(net.sizes), 'hidden': net.hidden, 'state': state}


def load(saved: dict[str, Any]) -> GroupSizeNet:
    """The classifier from the result of :func:`save`."""
    net = GroupSizeNet(saved['sizes'], saved['hidden'])
    net.load_state_dict({name: torch.tensor(t) for name, t in saved['state'].items()})
    return net.eval()


def _rounded(values: Any) -> Any:
    return [_rounded(v) for v in values] if isinstance(values, list) else float(f'{values:.5g}')
