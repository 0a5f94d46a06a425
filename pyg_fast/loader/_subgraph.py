"""The nodes and edges of a batch, before its attributes are fetched."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric.index import index2ptr
from torch_geometric.sampler import SamplerOutput

from ._options import OutputTransform
from ._versions import version_of


class Subgraph(NamedTuple):
    """A sampled subgraph: its edges are positions in `n_id`, sorted by destination if it has a
    `rowptr`.

    `hops` repeats the numbers of sampled nodes and edges where they still describe the edges.
    """

    n_id: Tensor
    edge_index: Tensor
    rowptr: Tensor | None
    col: Tensor | None
    e_id: Tensor | None
    num_sampled_nodes: list[int] | None
    num_sampled_edges: list[int] | None
    metadata: tuple  # as that of PyG's SamplerOutput: what the batch tells of its seeds
    hops: tuple[tuple[int, ...], tuple[int, ...]] | None
    edge_weight: Tensor | None = None
    batch: Tensor | None = None
    longest_row: int | None = None  # an upper bound, if the sampler knows one

    def to_bidirectional(self) -> 'Subgraph':
        """Adds the reverse of each edge."""
        return self._replace_output(self._to_output().to_bidirectional(), is_sorted=True)

    def without(self, pairs: Tensor, num_nodes: int) -> 'Subgraph':
        """Drops all edges between these sources and destinations, nodes of the graph.

        On CUDA it waits for the number of edges that stay.
        """
        assert self.rowptr is not None
        assert self.col is not None
        if pairs.size(1) == 0:
            return self
        hops = self.num_sampled_edges
        # Both ends are seeds, and a seed, given once, has all its edges in the first hop.
        last = self.edge_index.size(1) if hops is None or self.batch is not None else hops[0]
        ends = self.n_id[self.edge_index[:, :last]]
        keys, dropped = ends[0] * num_nodes + ends[1], pairs[0] * num_nodes + pairs[1]
        keep = ~is_in(keys, dropped.sort()[0])
        kept = keep.nonzero().view(-1)
        if kept.numel() == last:
            return self
        before = pad(keep.cumsum(0, dtype=torch.int32), (1, 0))

        def moved(position: Tensor) -> Tensor:
            """Where an edge is among those that stay."""
            return before[position.clamp(max=last)] + (position - last).clamp(min=0)

        def choose(values: Tensor) -> Tensor:
            return torch.cat([values[..., kept], values[..., last:]], -1)

        if hops is not None:
            ptr = torch.tensor([0, *hops], device=before.device).cumsum(0)
            hops = moved(ptr).diff().tolist()
        return self._replace(
            edge_index=choose(self.edge_index), col=choose(self.col), rowptr=moved(self.rowptr),
            e_id=None if self.e_id is None else choose(self.e_id), num_sampled_edges=hops,
            hops=None if self.hops is None or hops is None else (self.hops[0], tuple(hops)),
        )  # fmt: skip

    def apply(self, transform: OutputTransform) -> 'Subgraph':
        """Applies the user's function to the sampler's output."""
        before, version = self._to_output(), version_of(self.edge_index)
        out = transform(copy.copy(before))
        if not isinstance(out, SamplerOutput):
            raise TypeError(
                f"'transform_sampler_output' must return a SamplerOutput, got {type(out).__name__}"
            )
        is_same = out.row is before.row and out.col is before.col and out.node is before.node
        if is_same and version_of(self.edge_index) == version:
            return self._replace(
                e_id=out.edge, batch=out.batch, num_sampled_nodes=out.num_sampled_nodes,
                num_sampled_edges=out.num_sampled_edges, metadata=self._metadata_of(out),
            )  # fmt: skip
        return self._replace_output(out, is_sorted=False)

    def _to_output(self) -> SamplerOutput:
        return SamplerOutput(
            node=self.n_id, row=self.edge_index[0], col=self.edge_index[1], edge=self.e_id,
            batch=self.batch, num_sampled_nodes=self.num_sampled_nodes,
            num_sampled_edges=self.num_sampled_edges, metadata=self.metadata,
        )  # fmt: skip

    def _replace_output(self, out: SamplerOutput, is_sorted: bool) -> 'Subgraph':
        rowptr = col = None
        if is_sorted:
            rowptr = index2ptr(out.col, out.node.numel()).int()
            col = out.row.int()
        return Subgraph(
            out.node, torch.stack([out.row, out.col]), rowptr, col, out.edge,
            out.num_sampled_nodes, out.num_sampled_edges, self._metadata_of(out), None, None,
            out.batch,
        )  # fmt: skip

    def _metadata_of(self, out: SamplerOutput) -> tuple:
        return out.metadata if isinstance(out.metadata, tuple) else self.metadata


def is_in(ids: Tensor, ascending: Tensor) -> Tensor:
    """Which ids are in a list that ascends and is not empty."""
    position = torch.searchsorted(ascending, ids).clamp(max=ascending.numel() - 1)
    return ascending[position] == ids
