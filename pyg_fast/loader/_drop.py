"""Drops edges from the subgraph of a batch: those that a model is to predict."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._hetero_subgraph import HeteroSubgraph
from ._subgraph import Subgraph
from ._typed_structure import EdgeType


class _Edges(NamedTuple):
    """Edges sorted by destination: positions of their ends in the nodes of two types."""

    edge_index: Tensor
    rowptr: Tensor
    col: Tensor
    e_id: Tensor | None
    sizes: list[int] | None  # by hop

    def without(self, src: Tensor, dst: Tensor, pairs: Tensor, is_of_seeds: bool) -> '_Edges':
        """Drops all edges between these sources and destinations; `src`, `dst`: the nodes.

        On CUDA it waits for the number of edges that stay.
        """
        sizes, num_edges = self.sizes, self.edge_index.size(1)
        # A seed, given once, has all its edges in the first hop.
        last = sizes[0] if is_of_seeds and sizes is not None else num_edges
        if pairs.size(1) == 0 or last == 0:
            return self
        sources, targets = src[self.edge_index[0, :last]], dst[self.edge_index[1, :last]]
        count = pairs[0].max() + 1  # one more than any source to drop
        dropped = (pairs[1] * count + pairs[0]).sort()[0]
        is_dropped = is_in(targets * count + sources, dropped) & (sources < count)
        kept = (~is_dropped).nonzero().view(-1)
        if kept.numel() == last:
            return self
        before = pad((~is_dropped).cumsum(0, dtype=torch.int32), (1, 0))

        def moved(position: Tensor) -> Tensor:
            """Where an edge is among those that stay."""
            return before[position.clamp(max=last)] + (position - last).clamp(min=0)

        def choose(values: Tensor) -> Tensor:
            return torch.cat([values[..., kept], values[..., last:]], -1)

        if sizes is not None:
            ptr = torch.tensor([0, *sizes], device=before.device).cumsum(0)
            sizes = moved(ptr).diff().tolist()
        return _Edges(
            choose(self.edge_index), moved(self.rowptr), choose(self.col),
            None if self.e_id is None else choose(self.e_id), sizes,
        )  # fmt: skip


def drop_edges(
    part: Subgraph | HeteroSubgraph, dropped: dict[EdgeType, Tensor]
) -> Subgraph | HeteroSubgraph:
    """Drops all edges between these sources and destinations :math:`(2, D)`, by edge type, all of
    them ends of seeds."""
    is_of_seeds = part.batch is None
    if isinstance(part, Subgraph):
        assert part.rowptr is not None
        assert part.col is not None
        edges = _Edges(part.edge_index, part.rowptr, part.col, part.e_id, part.num_sampled_edges)
        edges = edges.without(part.n_id, part.n_id, dropped[None], is_of_seeds)
        hops = part.hops
        if hops is not None and edges.sizes is not None:
            hops = hops._replace(edges=edges.sizes)
        return part._replace(
            edge_index=edges.edge_index, rowptr=edges.rowptr, col=edges.col, e_id=edges.e_id,
            num_sampled_edges=edges.sizes, hops=hops,
        )  # fmt: skip
    for key, pairs in dropped.items():
        if key is None or key not in part.edge_index:
            continue
        by_type, indptr = part.num_sampled_edges, part.indptr
        edges = _Edges(
            part.edge_index[key], part.rowptr[key], part.col[key], part.e_id[key],
            None if by_type is None else by_type[key],
        ).without(part.n_id[key[0]], part.n_id[key[2]], pairs, is_of_seeds)  # fmt: skip
        part = part._replace(
            edge_index={**part.edge_index, key: edges.edge_index},
            rowptr={**part.rowptr, key: edges.rowptr}, col={**part.col, key: edges.col},
            e_id={**part.e_id, key: edges.e_id},
            indptr=None if indptr is None else {**indptr, key: edges.rowptr.long()},
            num_sampled_edges=(
                None if by_type is None or edges.sizes is None else {**by_type, key: edges.sizes}
            ),
        )  # fmt: skip
    return part


def is_in(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which ids are in a list that ascends and is not empty."""
    position = torch.searchsorted(ascending, ids).clamp(max=ascending.numel() - 1)
    return ascending[position] == ids
