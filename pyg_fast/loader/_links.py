"""Links around which batches are sampled, and their negatives."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

from ._negatives import Negatives, negatives_of
from ._seeds import SeedBatch, copy_input_id, find_outside, mix_seeds
from ._structure import Structure

BINARY = ('input_id', 'edge_label_index', 'edge_label', 'edge_label_time')
TRIPLET = ('input_id', 'src_index', 'dst_pos_index', 'dst_neg_index', 'seed_time')


@dataclass(frozen=True)
class LinkInput:
    """A loader's arguments that say around which links to sample."""

    argument: ClassVar[str] = 'edge_label_index'
    edge_label_index: Tensor | None
    edge_label: Tensor | None = None
    input_id: Tensor | None = None
    neg_sampling: NegativeSampling | None = None
    true_negatives: bool = False
    drops_edges: bool = False
    drops_reverse: bool = False

    def seeds(self, data: Data | None, graph: Structure, device: torch.device) -> 'LinkSeeds':
        """The seeds, checked and copied."""
        edges = self.edge_label_index
        if edges is None:
            edges = edges_of(graph) if data is None or 'edge_index' not in data else data.edge_index
        links = _copy_links(edges, graph.num_nodes)
        count, sampling, input_id = links.size(1), self.neg_sampling, self.input_id
        if input_id is not None:
            input_id = copy_input_id(input_id, count, self.argument)
        label = None if self.edge_label is None else _copy_label(self.edge_label, count)
        negatives = None
        if sampling is not None:
            if label is not None and sampling.is_triplet():
                raise ValueError(
                    "'edge_label' must be None for 'triplet' negative sampling: batches have "
                    'src_index, dst_pos_index and dst_neg_index'
                )
            if label is not None and label.numel() and label.min() == 0:
                label = label + 1  # Zero is the label of negatives.
            if count:
                sizes = graph.num_nodes, graph.num_nodes
                known = None
                if self.true_negatives:
                    known = torch.cat([edges_of(graph), links.to(graph.col.device)], 1)
                negatives = negatives_of(sampling, sizes, known, links, (None, None), device)
        return LinkSeeds(links, label, input_id, self, negatives)


@dataclass(frozen=True)
class LinkSeeds:
    """Links around which batches are sampled, on the CPU: copies, as those of nodes."""

    links: Tensor  # int64
    label: Tensor | None
    input_id: Tensor | None  # `batch.input_id` of each; None: its position
    input: LinkInput
    negatives: Negatives | None  # None: without negative sampling, or without links

    def __len__(self) -> int:
        return self.links.size(1)

    def take(self, positions: Tensor, device: torch.device, seed: int) -> SeedBatch:
        """The seeds of a batch: the ends of its links and of their negatives, each node once."""
        src, dst = self.links[:, positions].to(device)
        dropped = None
        if self.input.drops_edges:
            dropped = torch.stack([src, dst])
            if self.input.drops_reverse:
                dropped = torch.cat([dropped, dropped.flip(0)], 1)
        input_id = positions if self.input_id is None else self.input_id[positions]
        label = None if self.label is None else self.label[positions].to(device)
        sampling, num_pos = self.input.neg_sampling, positions.numel()
        if sampling is not None:
            ends = self._draw(src, sampling, mix_seeds(seed, 3))
            if sampling.is_binary():
                src = torch.cat([src, ends[0]])
                label = src.new_ones(num_pos, dtype=torch.float) if label is None else label
                label = torch.cat([label, label.new_zeros(ends[0].numel(), *label.shape[1:])])
            dst = torch.cat([dst, ends[1]])
        nodes, local, num_nodes = distinct(torch.cat([src, dst]))
        metadata: tuple[object, ...]
        if sampling is None or sampling.is_binary():
            metadata = input_id.to(device), local.view(2, -1), label, None
        else:
            # The negatives of a link are as far apart as it has links.
            src_index, positive, negative = local.split([num_pos, num_pos, dst.numel() - num_pos])
            negative = negative.view(int(sampling.amount), num_pos).t().contiguous().squeeze(-1)
            metadata = input_id.to(device), src_index, positive, negative, None
        return SeedBatch(nodes, metadata, num_nodes, dropped)

    def _draw(
        self, src: Tensor, sampling: NegativeSampling, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The ends of negative links."""
        count = math.ceil(src.numel() * sampling.amount)
        if self.negatives is None or count == 0:
            return src[:0], src[:0]
        if sampling.is_binary():
            src = self.negatives.draw_sources(count, seed, None, src)
        else:
            src = src.repeat(int(sampling.amount))
        return src, self.negatives.draw_destinations(src, seed, None)

    def write(self, batch: Data, metadata: tuple) -> None:
        """Writes what a batch tells of its links."""
        sampling = self.input.neg_sampling
        is_triplet = sampling is not None and sampling.is_triplet()
        for name, value in zip(TRIPLET if is_triplet else BINARY, metadata, strict=True):
            batch[name] = value
        if is_triplet:  # Attributes of the whole graph of these names would be wrong here.
            for name in ('edge_label_index', 'edge_label_time'):
                batch._store.pop(name, None)

    def to_input(self) -> LinkInput:
        return replace(
            self.input, edge_label_index=self.links, edge_label=self.label, input_id=self.input_id
        )

    def to_pyg(self) -> EdgeSamplerInput:
        """A copy, as PyG's loader has it."""
        input_id, label = (t if t is None else t.clone() for t in (self.input_id, self.label))
        return EdgeSamplerInput(input_id, *self.links, label)


def distinct(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`torch.unique`, without a wait for the device: the distinct ids, ascending, followed
    by repetitions of the last one; the position of each id among them; their number."""
    if ids.numel() == 0:
        return ids, ids, ids.new_zeros(())
    ascending, order = ids.sort()
    rank = pad((ascending[1:] != ascending[:-1]).cumsum(0), (1, 0))
    out = ascending[-1:].repeat(ids.numel())
    out[rank] = ascending
    local = torch.empty_like(ids)
    local[order] = rank
    return out, local, rank[-1] + 1


def edges_of(graph: Structure) -> Tensor:
    """The edges of a graph by destination :math:`(2, |\\mathcal{E}|)`."""
    degree, col = graph.rowptr.diff().long(), graph.col.long()
    dst = torch.arange(graph.num_nodes, device=col.device)
    return torch.stack([col, dst.repeat_interleave(degree, output_size=col.numel())])


def _copy_links(links: object, num_nodes: int) -> Tensor:
    if not isinstance(links, Tensor):
        raise TypeError(f"'edge_label_index' must be a tensor, got {type(links).__name__}")
    if links.is_floating_point() or links.is_complex() or links.dtype == torch.bool:
        raise TypeError(f"'edge_label_index' must hold integers, got {links.dtype}")
    if links.dim() != 2 or links.size(0) != 2:
        raise ValueError(
            f"'edge_label_index' must have shape [2, num_links], got {list(links.shape)}"
        )
    links = links.as_tensor() if isinstance(links, EdgeIndex) else links
    # Copy first: a check of the original would not cover later writes.
    links = torch.clone(links.detach().cpu()).to(torch.int64)
    wrong = find_outside(links, num_nodes)
    if wrong is not None:
        raise IndexError(f"'edge_label_index' must be from 0 to {num_nodes - 1}, got {wrong}")
    return links


def _copy_label(label: object, count: int) -> Tensor:
    if not isinstance(label, Tensor):
        raise TypeError(f"'edge_label' must be a tensor, got {type(label).__name__}")
    if label.dim() == 0 or label.size(0) != count:
        raise ValueError(
            f"'edge_label' must have {count} entries as 'edge_label_index', got shape "
            f'{list(label.shape)}'
        )
    return torch.clone(label.detach().cpu())
