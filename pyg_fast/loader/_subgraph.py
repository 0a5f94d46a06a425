"""The nodes and edges of a batch, before its attributes are fetched."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from ..graph._cache import SampledHops
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
    hops: SampledHops | None
    edge_weight: Tensor | None = None
    batch: Tensor | None = None
    longest_row: int | None = None  # an upper bound, if the sampler knows one

    @property
    def num_nodes(self) -> int:
        return self.n_id.numel()

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    def with_batch(self, batch: Tensor) -> 'Subgraph':
        """Gives the subgraphs of seeds other numbers."""
        return self if self.batch is None else self._replace(batch=batch[self.batch])

    def to_bidirectional(self) -> 'Subgraph':
        """Adds the reverse of each edge."""
        return self._replace_output(self._to_output().to_bidirectional(), is_sorted=True)

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
                num_sampled_edges=out.num_sampled_edges, metadata=metadata_of(out, self.metadata),
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
            out.num_sampled_nodes, out.num_sampled_edges, metadata_of(out, self.metadata), None,
            None, out.batch,
        )  # fmt: skip


def metadata_of(out: SamplerOutput | HeteroSamplerOutput, before: tuple) -> tuple:
    """What the user's function made of what a batch tells of its seeds."""
    return out.metadata if isinstance(out.metadata, tuple) else before
