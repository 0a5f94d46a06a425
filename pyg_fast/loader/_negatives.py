"""Draws the nodes of negative links, on any device.

Random numbers are functions of a seed and of their number, so the same seed draws the same nodes on
every device, and nothing waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from ..ops._hash import mix64_, shifted
from ..ops._reference import mixed_bits
from ._drop import is_in

_TRIES = 8  # draws by weight that may hit edges


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def random_bits(seed: int, num_draws: int, count: int, device: torch.device) -> Tensor:
    """64 random bits for each of `count` numbers in each draw, as ``csrc/params/random.h`` has
    them."""
    starts = [mixed_bits((seed + k * 0xD1342543DE82EF95) % 2**64) for k in range(num_draws)]
    start = torch.tensor([[_signed(bits)] for bits in starts]).to(device, non_blocking=True)
    number = torch.arange(count, device=device)
    return mix64_(start + number * _signed(0x9E3779B97F4A7C15))


def _below(bits: Tensor, count: Tensor | int) -> Tensor:
    """A random integer in [0, count), of fewer than :math:`2^{31}`."""
    high, low = shifted(bits, 32), bits & (2**32 - 1)
    return (high * count + (low * count >> 32)) >> 32


def _unit(bits: Tensor) -> Tensor:
    """A random number in (0, 1]."""
    return (shifted(bits, 11) + 1).double() * 2**-53


@dataclass(frozen=True)
class Candidates:
    """The nodes that may be drawn, by rank: in the order of their times if they have any."""

    count: int
    nodes: Tensor | None = None  # by rank; None: all of them in order
    sums: Tensor | None = None  # running sums of weights, all positive; None: equal ones
    times: Tensor | None = None

    @classmethod
    def of(
        cls, num_nodes: int, weight: Tensor | None, time: Tensor | None, device: torch.device
    ) -> 'Candidates':
        nodes = sums = None
        if time is not None:
            nodes = time.cpu().argsort(stable=True)
        if weight is not None:
            weight = weight.detach().double().cpu()
            nodes = (weight > 0).nonzero().view(-1) if nodes is None else nodes[weight[nodes] > 0]
            sums = weight[nodes].cumsum(0).to(device)  # on the CPU: the same on every device
        count = num_nodes if nodes is None else nodes.numel()
        times = None if time is None or nodes is None else time.cpu()[nodes].to(device)
        return cls(count, None if nodes is None else nodes.to(device), sums, times)

    def num_eligible(self, time: Tensor | None) -> Tensor | int:
        """The number of nodes that exist at a time, the earliest one in any case."""
        if self.times is None or time is None:
            return self.count
        return torch.searchsorted(self.times, time, right=True).clamp(min=1)

    def draw(self, bits: Tensor, eligible: Tensor | int) -> Tensor:
        """Ranks among the first ones that are eligible."""
        if self.sums is None:
            return _below(bits, eligible)
        return torch.searchsorted(self.sums, _unit(bits) * self.sums[eligible - 1])

    def at(self, rank: Tensor) -> Tensor:
        return rank if self.nodes is None else self.nodes[rank]

    def ranks(self, num_nodes: int, device: torch.device) -> Tensor:
        """The rank of each node; -1: it is none."""
        if self.nodes is None:
            return torch.arange(num_nodes, device=device)
        rank = torch.full((num_nodes,), -1, device=device)
        rank[self.nodes] = torch.arange(self.count, device=device)
        return rank


class KnownEdges:
    """The edges that no negative link may repeat: a sorted list of
    :math:`\\textrm{source} \\cdot \\textrm{count} + \\textrm{rank}`, of candidates as destinations.

    Takes 16 bytes for each edge.
    """

    def __init__(self, src: Tensor, rank: Tensor, count: int) -> None:
        self.count = count
        keys = (src * count + rank)[rank >= 0].unique()
        keys = torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])
        self.keys = keys
        #: Of each edge, the number of pairs before it that are no edges.
        self.gaps = keys - torch.arange(keys.numel(), device=keys.device)

    def num_free(self, src: Tensor, eligible: Tensor | int) -> Tensor:
        """The number of eligible candidates to which a source has no edge."""
        return eligible - (self._before(src, eligible) - self._before(src, 0))

    def _before(self, src: Tensor, rank: Tensor | int) -> Tensor:
        return torch.searchsorted(self.keys, src * self.count + rank)

    def has(self, src: Tensor, rank: Tensor) -> Tensor:
        return is_in(src * self.count + rank, self.keys)

    def draw(self, bits: Tensor, src: Tensor, eligible: Tensor | int) -> Tensor:
        """The rank of a candidate to which a source has no edge, all alike; 0 if there is none."""
        free = self.num_free(src, eligible)
        first = src * self.count
        number = first - self._before(src, 0) + _below(bits, free)
        rank = number + torch.searchsorted(self.gaps, number, right=True) - first
        return rank.where(free > 0, 0)


class Negatives:
    """Draws sources and destinations of negative links.

    Args:
        sources: Which nodes may be drawn as sources.
        destinations: Which nodes may be drawn as destinations.
        edges: What no negative link may be. (default: None, anything)
    """

    def __init__(
        self, sources: Candidates, destinations: Candidates, edges: KnownEdges | None = None
    ) -> None:
        self.sources, self.destinations, self.edges = sources, destinations, edges

    @property
    def on_device(self) -> bool:
        """Whether a draw reads tensors, which are on the device of the batches."""
        parts = self.sources.nodes, self.sources.sums, self.destinations.nodes
        return any(x is not None for x in (*parts, self.destinations.sums, self.edges))

    def draw(
        self, count: int, seed: int, time: Tensor | None, src: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Draws destinations that exist at these times, for sources that are given or drawn."""
        nodes, edges = self.destinations, self.edges
        num_tries = 0 if edges is None or nodes.sums is None else _TRIES
        of_src, of_dst, *_ = bits = random_bits(seed, 2 + num_tries, count, device)
        if src is None:
            src = self.sources.at(self.sources.draw(of_src, self.sources.num_eligible(time)))
        eligible = nodes.num_eligible(time)
        if edges is None:
            return src, nodes.at(nodes.draw(of_dst, eligible))
        rank = edges.draw(of_dst, src, eligible)
        if num_tries:
            tried = nodes.draw(bits[2:], eligible)
            fails = edges.has(src, tried)
            first = fails.int().argmin(0, keepdim=True)
            rank = rank.where(fails.all(0), tried.gather(0, first)[0])
        return src, nodes.at(rank)


def negatives_of(
    sampling: NegativeSampling, sizes: list[int], edges: Tensor | None, links: Tensor,
    times: list[Tensor | None], device: torch.device,
) -> Negatives:  # fmt: skip
    """What draws negatives for links :math:`(2, P)`.

    Args:
        sampling: PyG's options.
        sizes: The numbers of nodes of the sources' and of the destinations' type.
        edges: The edges that no negative may be :math:`(2, |\\mathcal{E}|)`.
        links: The positive links.
        times: The times of these nodes.
        device: That of the batches.

    Raises:
        TypeError, ValueError: If a weight is invalid, or there is no negative.
    """
    weights = [
        _check_weight(f'neg_sampling.{name}', weight, size)
        for name, weight, size in zip(
            ('src_weight', 'dst_weight'), (sampling.src_weight, sampling.dst_weight), sizes,
            strict=True,
        )
    ]  # fmt: skip
    destinations = Candidates.of(sizes[1], weights[1], times[1], device)
    if edges is None:
        return Negatives(Candidates.of(sizes[0], weights[0], times[0], device), destinations)
    src, dst = edges.to(device)
    rank = destinations.ranks(sizes[1], device)
    excluded = KnownEdges(src, rank[dst], destinations.count)
    if times[1] is None:
        free = excluded.num_free(torch.arange(sizes[0], device=device), destinations.count)
        if sampling.is_triplet():
            _check_free(free, links[0].to(device))
        else:  # A source is as likely as the pairs with it that are no edges.
            weights[0] = _weight_of_free(excluded, destinations, free, weights[0])
    sources = Candidates.of(sizes[0], weights[0], times[0], device)
    return Negatives(sources, destinations, excluded)


def _weight_of_free(
    edges: KnownEdges, destinations: Candidates, free: Tensor, weight: Tensor | None
) -> Tensor:
    """The weights of sources, times those of the destinations to which they have no edge."""
    out = free.double().cpu()
    if destinations.sums is not None:
        # On the CPU: the same on every device.
        sums, keys = destinations.sums.cpu(), edges.keys[:-1].cpu()
        weights = sums.diff(prepend=sums.new_zeros(1))
        src, rank = keys // edges.count, keys % edges.count
        taken = torch.zeros_like(out).index_add_(0, src, weights[rank])
        out = (sums[-1:] - taken).clamp(min=0).where(out > 0, 0)
    out = out if weight is None else out * weight.double().cpu()
    if out.numel() and not bool((out > 0).any()):
        raise ValueError(
            "'true_negatives' must be False: every pair of nodes that may be drawn is an edge"
        )
    return out


def _check_free(free: Tensor, src: Tensor) -> None:
    without = src[free[src] <= 0]
    if without.numel():
        raise ValueError(
            f"'true_negatives' must be False: node {int(without[0])}, a source of "
            "'edge_label_index', has an edge to every node that may be drawn"
        )


def _check_weight(name: str, weight: object, size: int) -> Tensor | None:
    if weight is None:
        return None
    if not isinstance(weight, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(weight).__name__}")
    if weight.shape != (size,):
        raise ValueError(
            f"'{name}' must have shape [{size}], one entry for each node, got {list(weight.shape)}"
        )
    if weight.is_complex():
        raise TypeError(f"'{name}' must hold real numbers, got {weight.dtype}")
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ValueError(f"'{name}' must not be negative, infinite or NaN")
    if size and not bool((weight > 0).any()):
        raise ValueError(f"'{name}' must have a positive entry")
    return weight
