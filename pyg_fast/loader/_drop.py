"""Drops edges from the subgraph of a batch: those that a model is to predict."""

from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._hetero_subgraph import HeteroSubgraph, dict_of
from ._subgraph import Subgraph
from ._typed_structure import EdgeType


class _Edges(NamedTuple):
    """Edges sorted by destination: positions of their ends in the nodes of two types."""

    edge_index: Tensor
    rowptr: Tensor
    col: Tensor
    e_id: Tensor | None
    sizes: list[int] | None  # by hop

    def mark(self, src: Tensor, dst: Tensor, pairs: Tensor, is_of_seeds: bool) -> '_Marked':
        """Marks all edges between these sources and destinations; `src`, `dst`: the nodes."""
        sizes, num_edges = self.sizes, self.edge_index.size(1)
        # A seed, given once, has all its edges in the first hop.
        last = sizes[0] if is_of_seeds and sizes is not None else num_edges
        if pairs.size(1) == 0 or last == 0:
            return _Marked(self, self.rowptr.new_empty(0, dtype=torch.bool), self.rowptr[:1])
        sources, targets = src[self.edge_index[0, :last]], dst[self.edge_index[1, :last]]
        count = pairs[0].max() + 1  # one more than any source to drop
        dropped = (pairs[1] * count + pairs[0]).sort()[0]
        stays = ~(is_in(targets * count + sources, dropped) & (sources < count))
        return _Marked(self, stays, pad(stays.cumsum(0, dtype=torch.int32), (1, 0)))


class _Marked(NamedTuple):
    """Edges of which the first ones may be dropped: which of these stay, and how many do before
    each of them and in all."""

    edges: _Edges
    stays: Tensor
    before: Tensor

    def moved(self, position: Tensor) -> Tensor:
        """Where an edge is among those that stay."""
        last = self.stays.numel()
        return self.before[position.clamp(max=last)] + (position - last).clamp(min=0)

    def hop_ends(self) -> Tensor:
        """How many edges stay up to the end of each hop: of all edges, where hops are not known."""
        sizes, num_edges = self.edges.sizes, self.edges.edge_index.size(1)
        ends = [num_edges] if sizes is None else list(accumulate(sizes))
        return self.moved(torch.tensor(ends).to(self.before.device, non_blocking=True))

    def drop(self, hop_ends: list[int]) -> _Edges:
        """The edges that stay, of which `hop_ends` is read from the device."""
        edges, last = self.edges, self.stays.numel()
        num_kept = hop_ends[-1] - (edges.edge_index.size(1) - last)
        if num_kept == last:
            return edges
        # The edges that go share a place behind the others, which is cut off.
        place = torch.where(self.stays, self.before[:-1], num_kept).long()
        kept = place.new_empty(num_kept + 1)
        kept = kept.scatter_(0, place, torch.arange(last, device=place.device))[:num_kept]

        def choose(values: Tensor) -> Tensor:
            return torch.cat([values[..., kept], values[..., last:]], -1)

        sizes = edges.sizes
        if sizes is not None:
            sizes = [end - begin for begin, end in pairwise([0, *hop_ends])]
        return _Edges(
            choose(edges.edge_index), self.moved(edges.rowptr), choose(edges.col),
            None if edges.e_id is None else choose(edges.e_id), sizes,
        )  # fmt: skip


def drop_edges(
    part: Subgraph | HeteroSubgraph, dropped: dict[EdgeType, Tensor]
) -> Subgraph | HeteroSubgraph:
    """Drops all edges between these sources and destinations :math:`(2, D)`, by edge type, all of
    them ends of seeds. On CUDA it waits once, for the numbers of edges that stay."""
    is_of_seeds = part.batch is None
    if isinstance(part, Subgraph):
        assert part.rowptr is not None
        assert part.col is not None
        edges = _Edges(part.edge_index, part.rowptr, part.col, part.e_id, part.num_sampled_edges)
        (edges,) = _without([edges.mark(part.n_id, part.n_id, dropped[None], is_of_seeds)])
        hops = part.hops
        if hops is not None and edges.sizes is not None:
            hops = hops._replace(edges=edges.sizes)
        return part._replace(
            edge_index=edges.edge_index, rowptr=edges.rowptr, col=edges.col, e_id=edges.e_id,
            num_sampled_edges=edges.sizes, hops=hops,
        )  # fmt: skip
    by_type = part.num_sampled_edges
    keys = [key for key in dropped if key is not None and key in part.edge_index]
    found = _without([
        _Edges(
            part.edge_index[key], part.rowptr[key], part.col[key], part.e_id[key],
            None if by_type is None else by_type[key],
        ).mark(part.n_id[key[0]], part.n_id[key[2]], dropped[key], is_of_seeds)
        for key in keys
    ])  # fmt: skip
    for key, edges in zip(keys, found, strict=True):
        indptr = edges.rowptr.long()
        own = [edges.edge_index, edges.rowptr, indptr, edges.col]
        own += [] if edges.e_id is None else [edges.e_id]
        part = part._replace(
            edge_index={**dict_of(part.edge_index), key: edges.edge_index},
            rowptr={**dict_of(part.rowptr), key: edges.rowptr},
            indptr={**dict_of(part.indptr), key: indptr},
            col={**dict_of(part.col), key: edges.col},
            e_id={**dict_of(part.e_id), key: edges.e_id},
            num_sampled_edges=(
                None if by_type is None or edges.sizes is None
                else {**dict_of(by_type), key: edges.sizes}
            ),
            hops=(
                None if part.hops is None or edges.sizes is None
                else (part.hops[0], {**dict_of(part.hops[1]), key: tuple(edges.sizes)})
            ),
            wholes=(*part.wholes, *own) if part.wholes else (),
        )  # fmt: skip
        by_type = part.num_sampled_edges
    return part


def _without(all_marked: Sequence[_Marked]) -> list[_Edges]:
    """The edges that stay."""
    ends = [marked.hop_ends() for marked in all_marked]
    numbers = iter(torch.cat(ends).tolist() if ends else ())
    return [
        marked.drop(list(islice(numbers, end.numel())))
        for marked, end in zip(all_marked, ends, strict=True)
    ]


def is_in(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which ids are in a list that ascends and is not empty."""
    position = torch.searchsorted(ascending, ids).clamp(max=ascending.numel() - 1)
    return ascending[position] == ids
