"""Generated graphs, without downloads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from .graph import Graph
from .ops import spmm

SIGMA = 1.3  # of the log-normal propensities: the largest degree is some hundred times the mean
# Edges and nodes of a DirectedSize that are drawn at once: other numbers give other graphs.
_EDGE_BLOCK, _NODE_BLOCK = 2**22, 2**18


class PlantedSize(NamedTuple):
    """The size of a planted graph.

    Args:
        num_nodes: Number of nodes.
        num_pairs: Number of node pairs drawn. A graph has at most twice as many (directed)
            edges; duplicates are removed.
        num_communities: Number of planted communities.
        inside: Share of the pairs that is drawn within a community. (default: ``0.8``)
    """

    num_nodes: int
    num_pairs: int
    num_communities: int
    inside: float = 0.8


SIZES: dict[str, PlantedSize] = {
    'tiny': PlantedSize(300, 1_500, 4),
    'small': PlantedSize(3_000, 15_000, 7),
    'medium': PlantedSize(50_000, 570_000, 16),
    'arxiv-like': PlantedSize(169_343, 1_166_243, 40, 0.7),
    'reddit-like': PlantedSize(232_965, 57_307_946, 41),
    'products-like': PlantedSize(2_449_029, 61_859_140, 2000),
    'dense-small': PlantedSize(3_000, 150_000, 12, 0.5),
    'dense-medium': PlantedSize(50_000, 2_500_000, 16, 0.5),
    'dense-hubs': PlantedSize(8_000, 5_400_000, 16, 0.5),
}


class DirectedSize(NamedTuple):
    """The size of a directed planted graph: edges run one way, and may repeat. Memory besides that
    of the graph itself is bounded, so it may have billions of edges.

    Args:
        num_nodes: Number of nodes, at least two.
        num_edges: Number of (directed) edges.
        num_communities: Number of planted communities, of equal sizes.
        inside: Share of the edges that is drawn within a community. (default: ``0.8``)
        train: Share of the nodes that are for training. (default: ``0.01087``, that of
            ogbn-papers100M, as the next two)
        val: Share for validation. (default: ``0.001128``)
        test: Share for the test; all others are in no mask. (default: ``0.00193``)
    """

    num_nodes: int
    num_edges: int
    num_communities: int
    inside: float = 0.8
    train: float = 0.01087
    val: float = 0.001128
    test: float = 0.00193


# Nodes, edges and classes of ogbn-papers100M, and the same at shares of it.
DIRECTED_SIZES: dict[str, DirectedSize] = {
    'papers-like-tiny': DirectedSize(20_000, 290_000, 10),
    'papers-like-eighth': DirectedSize(13_882_494, 201_960_734, 172),
    'papers-like-half': DirectedSize(55_529_978, 807_842_936, 172),
    'papers-like': DirectedSize(111_059_956, 1_615_685_872, 172),
}


def planted_structure(
    size: str | PlantedSize,
    seed: int = 0,
    device: torch.device | str = 'cpu',
) -> tuple[Tensor, Tensor]:
    """Only the structure of :class:`PlantedGraph`, for benchmarks.

    Args:
        size: A name in :obj:`SIZES`, or a :class:`PlantedSize`.
        seed: Seed of the random generator. (default: ``0``)
        device: The device of the graph. (default: ``'cpu'``)

    Returns:
        ``rowptr`` of shape ``[num_nodes + 1]`` and ``col`` of shape ``[num_edges]``, both int32,
        columns ascending within a row.

    Raises:
        TypeError, ValueError: If ``size`` is unknown or invalid.
    """
    rowptr, col, _ = _plant(_resolve(size), _generator(seed, device))
    return rowptr, col


class _PlantedDataset(InMemoryDataset):
    """A dataset of one generated graph, which shows its size."""

    _planted_size: str | PlantedSize | DirectedSize | None = None  # of one that 0.2 has pickled

    def __repr__(self) -> str:
        size = '' if self._planted_size is None else repr(self._planted_size)
        return f'{type(self).__name__}({size})'


class PlantedGraph(_PlantedDataset):
    r"""A graph of planted communities with skewed degrees, for node classification.

    Node :math:`i` has a community :math:`c_i`, uniform, and a propensity
    :math:`\theta_i = \exp(1.3 \, z_i)` with :math:`z_i \sim \mathcal{N}(0, 1)`. Each pair joins a
    node :math:`i`, drawn in proportion to :math:`\theta_i`, to a node :math:`j` drawn with

    .. math::
        P(j \mid i) = p \, \frac{\theta_j [c_i = c_j]}{\sum_{k: c_k = c_i} \theta_k}
        + (1 - p) \, \frac{\theta_j}{\sum_k \theta_k}

    where :math:`p` is the share ``inside``. Edges run both ways and are sorted, without
    duplicates; a few are self-loops, and some nodes are isolated. A label :math:`y_i` is
    :math:`c_i \bmod C`; for a share ``astray`` of the nodes it is uniform: the edges of
    those nodes mislead, so graph convolutions cannot reach a perfect accuracy. Features are

    .. math::
        \mathbf{x}_i = s \, \boldsymbol{\mu}_{y_i} + \boldsymbol{\epsilon}_i, \qquad
        \boldsymbol{\epsilon}_i \sim \mathcal{N}(\mathbf{0}, \mathbf{I}), \qquad
        \|\boldsymbol{\mu}_{y_i}\| = 1

    with the strength ``signal`` as :math:`s`; features without edges do not determine a class. Half
    of the nodes are for training, a quarter each for validation and test.

    With a :class:`DirectedSize` each edge is drawn on its own: a destination :math:`j` in
    proportion to :math:`\theta_j`, a source :math:`i` in proportion to another
    :math:`\theta^{\prime}_i`, of the community of :math:`j` with the probability :math:`p`, else
    of any. Edges are unsorted, none is a self-loop, some repeat; :math:`c_i` is :math:`i` modulo
    the number of communities. All is written in blocks: at the peak, memory holds ``edge_index``,
    ``x``, ``y``, the masks and below 0.5 GB more. The graphs of :obj:`DIRECTED_SIZES` share with
    ogbn-papers100M (or an eighth or half of it) the numbers of nodes, edges, features and classes
    and the shares of the masks, no more. The dataset keeps its data: delete it after
    ``data = dataset[0]`` where a transform is to free them.

    The same arguments give the same graph on the same type of device; the graphs of a CPU and a GPU
    differ.

    Args:
        size: A name in :obj:`SIZES` or :obj:`DIRECTED_SIZES`, a :class:`PlantedSize` or a
            :class:`DirectedSize`. (default: ``'small'``)
        seed: Seed of the random generator. (default: ``0``)
        transform: Applied to the data on every access. (default: ``None``)
        num_channels: Number of features of a node. (default: ``64``, for a
            :class:`DirectedSize` ``128``)
        num_classes: Number of classes :math:`C`. (default: the number of communities, at most 47,
            for a :class:`DirectedSize` at most 172)
        signal: Norm of the class centroids, in standard deviations of the noise.
            (default: ``2.0``)
        astray: Share of the nodes labelled regardless of their community. (default: ``0.05``)
        dtype: The type of the features. (default: ``torch.float32``)
        index_dtype: The type of ``edge_index``: ``torch.int32`` takes half the memory, and
            our transforms take it, but not all of PyG. (default: ``torch.int64``)
        device: The device of the graph. (default: ``'cpu'``)

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        size: str | PlantedSize | DirectedSize = 'small',
        seed: int = 0,
        transform: Callable[[Data], Data] | None = None,
        *,
        num_channels: int | None = None,
        num_classes: int | None = None,
        signal: float = 2.0,
        astray: float = 0.05,
        dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype = torch.int64,
        device: torch.device | str = 'cpu',
    ) -> None:
        super().__init__(None, transform)
        self._planted_size = size
        size = _resolve_any(size)
        directed = isinstance(size, DirectedSize)
        if num_channels is None:
            num_channels = 128 if directed else 64
        if num_classes is None:
            num_classes = min(size.num_communities, 172 if directed else 47)
        _check('num_channels', num_channels, 1)
        _check('num_classes', num_classes, 1, size.num_communities)
        _check('astray', astray, 0, 1)
        _check_dtypes(dtype, index_dtype)

        generator = _generator(seed, device)
        if isinstance(size, DirectedSize):
            masks = _few_masks(size, generator)  # first, while there is room for a permutation
            edge_index = _plant_directed(size, index_dtype, generator)
            y, x = _draw_nodes(size, num_classes, num_channels, signal, astray, dtype, generator)
        else:
            rowptr, col, community = _plant(size, generator)  # first, as in planted_structure
            edge_index = _edge_index(rowptr, col).to(index_dtype)
            y = _draw_strays(community % num_classes, num_classes, astray, generator)
            centroids = _centroids(num_classes, num_channels, signal, generator)
            x = _normal(size.num_nodes, num_channels, generator).add_(centroids[y]).to(dtype)
            masks = _masks(size.num_nodes, generator)
        self.data, self.slices = self.collate([Data(x=x, edge_index=edge_index, y=y, **masks)])


class MultiLabelPlantedGraph(_PlantedDataset):
    r"""A graph of planted communities whose nodes have any number of labels each, determined only
    by their neighbourhoods.

    Communities :math:`c_i` and edges are those of :class:`PlantedGraph`. Community :math:`c`
    favours label :math:`l` by :math:`b_{c, l} \sim \mathcal{N}(0, 1)`, and the score of a label is
    the mean of its neighbours' :math:`b`, with noise:

    .. math::
        s_{i, l} = \frac{1}{|\mathcal{N}(i)|} \sum_{j \in \mathcal{N}(i)} b_{c_j, l}
        + \tau \, \nu_{i, l}, \qquad \nu_{i, l} \sim \mathcal{N}(0, 1)

    Because of the noise, of strength :math:`\tau`, no model reaches a perfect ranking. Label
    :math:`l` goes to the share :math:`f_l` of the nodes whose score is highest. The shares are
    skewed: of :math:`L` labels the most frequent has 40% of the nodes, the rarest 2%,

    .. math::
        f_l = \frac{2}{5} \cdot 20^{-l / (L - 1)}

    Features :math:`\mathbf{x}_i = s \, \boldsymbol{\mu}_{c_i} + \boldsymbol{\epsilon}_i` are noisy
    centroids as in :class:`PlantedGraph`, those of communities: too weak to determine a node's
    community, or its neighbours'. Half of the nodes are for training, a quarter each for validation
    and test.

    The same arguments give the same graph on the same type of device; the graphs of a CPU and a GPU
    differ.

    Args:
        size: A name in :obj:`SIZES`, or a :class:`PlantedSize`. (default: ``'dense-small'``)
        seed: Seed of the random generator. (default: ``0``)
        transform: Applied to the data on every access. (default: ``None``)
        num_channels: Number of features of a node. (default: ``64``)
        num_labels: Number of labels :math:`L`, the columns of ``y``. (default: ``32``)
        signal: Norm :math:`s` of the centroids, in standard deviations of the noise.
            (default: ``2.0``)
        noise: Standard deviation :math:`\tau` of the noise of the scores. (default: ``0.25``)
        device: The device of the graph. (default: ``'cpu'``)

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        size: str | PlantedSize = 'dense-small',
        seed: int = 0,
        transform: Callable[[Data], Data] | None = None,
        *,
        num_channels: int = 64,
        num_labels: int = 32,
        signal: float = 2.0,
        noise: float = 0.25,
        device: torch.device | str = 'cpu',
    ) -> None:
        super().__init__(None, transform)
        self._planted_size = size
        size = _resolve(size)
        _check('num_channels', num_channels, 1)
        _check('num_labels', num_labels, 1)
        _check('noise', noise, 0)

        generator = _generator(seed, device)
        rowptr, col, community = _plant(size, generator)  # first, as in planted_structure
        favours = _normal(size.num_communities, num_labels, generator).double()
        num_nodes = size.num_nodes
        graph = Graph(rowptr, col, None, None, None, None, num_nodes, num_nodes)
        score = spmm(graph, favours[community], reduce='mean')
        score += noise * _normal(num_nodes, num_labels, generator)
        centroids = _centroids(size.num_communities, num_channels, signal, generator)
        x = _normal(num_nodes, num_channels, generator).add_(centroids[community])
        self.data, self.slices = self.collate(
            [
                Data(
                    x=x,
                    edge_index=_edge_index(rowptr, col),
                    y=_top_shares(score),
                    **_masks(num_nodes, generator),
                )
            ]
        )


def _top_shares(score: Tensor) -> Tensor:
    """Ones where the score is among the highest of its column, zeros elsewhere."""
    num_nodes, num_labels = score.shape
    label = torch.arange(num_labels, device=score.device)
    counts = (0.4 * num_nodes * 0.05 ** (label / max(num_labels - 1, 1))).round()
    place = torch.arange(num_nodes, device=score.device).view(-1, 1)
    order = score.argsort(dim=0, descending=True, stable=True)
    return torch.empty_like(score, dtype=torch.float).scatter_(0, order, (place < counts).float())


def _edge_index(rowptr: Tensor, col: Tensor) -> Tensor:
    nodes = torch.arange(rowptr.numel() - 1, device=rowptr.device)
    return torch.stack([nodes.repeat_interleave(rowptr.diff()), col.long()])


def _masks(num_nodes: int, generator: torch.Generator) -> dict[str, Tensor]:
    fold = torch.randperm(num_nodes, generator=generator, device=generator.device) % 4
    return {'train_mask': fold < 2, 'val_mask': fold == 2, 'test_mask': fold == 3}


def _few_masks(size: DirectedSize, generator: torch.Generator) -> dict[str, Tensor]:
    order = torch.randperm(size.num_nodes, generator=generator, device=generator.device)
    masks, start = {}, 0
    for name, share in zip(('train', 'val', 'test'), size[4:], strict=True):
        mask = torch.zeros(size.num_nodes, dtype=torch.bool, device=generator.device)
        end = start + round(share * size.num_nodes)
        mask[order[start:end]] = True
        masks[f'{name}_mask'], start = mask, end
    return masks


def _resolve_any(size: str | PlantedSize | DirectedSize) -> PlantedSize | DirectedSize:
    if isinstance(size, str) and size not in {**SIZES, **DIRECTED_SIZES}:
        known = ', '.join((*SIZES, *DIRECTED_SIZES))
        raise ValueError(f"'size' must be one of {known}, got {size!r}")
    if isinstance(size, str) and size in DIRECTED_SIZES:
        return DIRECTED_SIZES[size]
    if isinstance(size, (str, PlantedSize)):
        return _resolve(size)
    if not isinstance(size, DirectedSize):
        raise TypeError(
            f"'size' must be a name, a PlantedSize or a DirectedSize, got {type(size).__name__}"
        )
    _check('num_nodes', size.num_nodes, 2, 2**31 - 1)
    _check('num_edges', size.num_edges, 0)
    _check('num_communities', size.num_communities, 1, size.num_nodes)
    _check('inside', size.inside, 0, 1)
    for name, share in zip(('train', 'val', 'test'), size[4:], strict=True):
        _check(name, share, 0, 1)
    _check("train' + 'val' + 'test", math.fsum(size[4:]), 0, 1)
    return size


def _resolve(size: str | PlantedSize) -> PlantedSize:
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"'size' must be one of {', '.join(SIZES)}, got {size!r}")
        return SIZES[size]
    if not isinstance(size, PlantedSize):
        raise TypeError(f"'size' must be a name or a PlantedSize, got {type(size).__name__}")
    _check('num_nodes', size.num_nodes, 1, 2**31 - 1)
    _check('num_pairs', size.num_pairs, 0, 2**30 - 1)  # twice as many edges, counted in int32
    _check('num_communities', size.num_communities, 1, size.num_nodes)
    _check('inside', size.inside, 0, 1)
    return size


def _check(name: str, value: float, low: float, high: float = float('inf')) -> None:
    if not low <= value <= high:
        bounds = f'at least {low}' if high == float('inf') else f'{low} to {high}'
        raise ValueError(f"'{name}' must be {bounds}, got {value}")


def _check_dtypes(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"'dtype' must be a floating-point type, got {dtype}")
    if index_dtype not in (torch.int32, torch.int64):
        raise TypeError(f"'index_dtype' must be torch.int32 or torch.int64, got {index_dtype}")


def _generator(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _uniform(count: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    return torch.rand(count, dtype=dtype, generator=generator, device=generator.device)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device=generator.device)


def _centroids(
    num_classes: int, num_channels: int, signal: float, generator: torch.Generator
) -> Tensor:
    """Random vectors of length ``signal``."""
    centroids = _normal(num_classes, num_channels, generator)
    return centroids.mul_(signal / centroids.norm(dim=1, keepdim=True))


def _draw_strays(y: Tensor, num_classes: int, astray: float, generator: torch.Generator) -> Tensor:
    """Labels of which a share is drawn anew."""
    strays = _uniform(y.numel(), generator) < astray
    anything = torch.randint(num_classes, y.shape, generator=generator, device=y.device)
    return torch.where(strays, anything, y)


def _plant(size: PlantedSize, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``rowptr``, ``col`` and the community of every node.

    Published results use these graphs: the order of the draws must not change.
    """
    num_nodes, num_pairs, num_communities, inside = size
    device = generator.device
    propensity = torch.randn(num_nodes, generator=generator, device=device).mul_(SIGMA).exp_()
    community = torch.randint(num_communities, (num_nodes,), generator=generator, device=device)
    order = community.argsort()  # communities become intervals of the cumulated propensities
    community = community[order]
    ends = propensity[order].double().cumsum(0)
    total = ends[-1]
    bounds = ends.new_zeros(num_communities + 1)
    members = community.bincount(minlength=num_communities).cumsum(0)
    bounds[1:] = torch.cat([ends.new_zeros(1), ends])[members]

    def draw(low: Tensor | float, high: Tensor) -> Tensor:
        point = low + (high - low) * _uniform(num_pairs, generator, torch.double)
        return torch.searchsorted(ends, point).clamp_(max=num_nodes - 1)

    src = draw(0.0, total)
    stays = _uniform(num_pairs, generator) < inside
    home = community[src]
    dst = draw(torch.where(stays, bounds[home], 0.0), torch.where(stays, bounds[home + 1], total))

    shuffle = torch.randperm(num_nodes, generator=generator, device=device)
    src, dst = shuffle[src], shuffle[dst]
    both = torch.cat([src * num_nodes + dst, dst * num_nodes + src])
    del src, dst, stays, home
    edge = torch.unique_consecutive(both.sort()[0])
    rowptr = edge.new_zeros(num_nodes + 1)
    rowptr[1:] = (edge // num_nodes).bincount(minlength=num_nodes).cumsum(0)
    return (
        rowptr.int(),
        (edge % num_nodes).int(),
        torch.empty_like(community).index_put_((shuffle,), community),
    )


def _draw_nodes(
    size: DirectedSize,
    num_classes: int,
    num_channels: int,
    signal: float,
    astray: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Labels and features, written block by block."""
    device = generator.device
    centroids = _centroids(num_classes, num_channels, signal, generator).to(dtype)
    y = torch.empty(size.num_nodes, dtype=torch.int64, device=device)
    x = torch.empty(size.num_nodes, num_channels, dtype=dtype, device=device)
    for start in range(0, size.num_nodes, _NODE_BLOCK):
        label, rows = (tensor[start : start + _NODE_BLOCK] for tensor in (y, x))
        count = label.numel()
        node = torch.arange(start, start + count, device=device)
        planted = node % size.num_communities % num_classes
        label.copy_(_draw_strays(planted, num_classes, astray, generator))
        rows.normal_(generator=generator).add_(centroids[label])
    return y, x


def _plant_directed(size: DirectedSize, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``edge_index`` of independent edges, written block by block, without a table or a sort.

    Of propensities that are the quantiles of a log-normal distribution, the share of the ranks
    above that of a node drawn in proportion to them is ``ndtr(z - SIGMA)`` with a normal ``z``.
    """
    num_nodes, num_edges, num_communities, inside = size[:4]
    device = generator.device
    least = num_nodes // num_communities  # members of a community; the first few have one more
    more = num_nodes % num_communities

    def draw(community: Tensor, stride: int) -> Tensor:
        members = least + (community < more).long()
        rank = torch.randn(community.shape, dtype=torch.double, generator=generator, device=device)
        rank = torch.special.ndtr(rank.sub_(SIGMA)).mul_(members).long()
        # Frequent nodes are spread over the graph, others as sources than as destinations.
        rank = torch.minimum(rank, members - 1).add_(community).add_(1)
        place = rank.mul_(stride).remainder_(members)
        return place.mul_(num_communities).add_(community)

    edge_index = torch.empty(2, num_edges, dtype=dtype, device=device)
    strides = _stride(least, 0.618), _stride(least, 0.755)
    for start in range(0, num_edges, _EDGE_BLOCK):
        block = edge_index[:, start : start + _EDGE_BLOCK]
        count = block.size(1)
        community, other = torch.randint(
            num_communities, (2, count), generator=generator, device=device
        )
        dst = draw(community, strides[0])
        stays = _uniform(count, generator) < inside
        src = draw(torch.where(stays, community, other), strides[1])
        src = torch.where(src == dst, (src + 1) % num_nodes, src)
        block[0], block[1] = src, dst
    return edge_index


def _stride(members: int, share: float) -> int:
    """A number that is coprime to the sizes of all communities, about this share of them."""
    stride = max(1, round(share * members))
    while math.gcd(stride, members * (members + 1)) != 1:
        stride += 1
    return stride
