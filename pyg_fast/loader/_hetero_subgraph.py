"""The nodes and edges of a batch with several types, before its attributes are fetched."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.sampler import HeteroSamplerOutput

from ._options import OutputTransform
from ._subgraph import metadata_of
from ._versions import version_of

EdgeType: TypeAlias = tuple[str, str, str]
#: The numbers of nodes and of edges of each hop, by type.
HopsByType: TypeAlias = tuple[Mapping[str, Iterable[int]], Mapping[EdgeType, Iterable[int]]]
K = TypeVar('K')
T = TypeVar('T')


class PartsByType(Mapping[K, T]):
    """The parts of something by type, which are made where they are read."""

    def __init__(self, number: Mapping[K, int], parts: Sequence[T]) -> None:
        self._number, self._parts = number, parts

    def __getitem__(self, key: K) -> T:
        return self._parts[self._number[key]]

    def __iter__(self) -> Iterator[K]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)

    def to_dict(self) -> dict[K, T]:
        """All of them."""
        return dict(zip(self._number, self._parts, strict=True))


def dict_of(parts: Mapping[K, T] | None) -> dict[K, T]:
    """A new dict of parts by type."""
    return parts.to_dict() if isinstance(parts, PartsByType) else dict(parts or {})


class HeteroSubgraph(NamedTuple):
    """A sampled subgraph, by type of nodes and of edges: its edges are positions in `n_id`, sorted
    by destination if the type has a `rowptr`. There is an entry for each type of the graph.

    `hops` repeats the numbers of sampled nodes and edges where they still describe the edges.
    """

    n_id: Mapping[str, Tensor]
    edge_index: Mapping[EdgeType, Tensor]
    rowptr: Mapping[EdgeType, Tensor]
    indptr: Mapping[EdgeType, Tensor]  # as rowptr, int64
    col: Mapping[EdgeType, Tensor]
    e_id: Mapping[EdgeType, Tensor | None]
    num_sampled_nodes: Mapping[str, list[int]] | None
    num_sampled_edges: Mapping[EdgeType, list[int]] | None
    metadata: tuple  # as that of PyG's HeteroSamplerOutput: what the batch tells of its seeds
    hops: HopsByType | None
    longest_row: Mapping[EdgeType, int | None]  # upper bounds, where the sampler knows them
    batch: Mapping[str, Tensor] | None = None
    # Of which all others are parts: the streams that use a batch are told of these alone. None if
    # a tensor is of its own, which whoever replaces one must say.
    wholes: tuple[Tensor, ...] = ()

    @property
    def num_nodes(self) -> int:
        return sum(nodes.numel() for nodes in self.n_id.values())

    @property
    def num_edges(self) -> int:
        return sum(map(Tensor.numel, dict_of(self.edge_index).values())) // 2

    def tensors(self) -> list[Tensor]:
        """Tensors that hold the memory of all."""
        if self.wholes:
            return [*self.wholes, *(v for v in self.metadata if isinstance(v, Tensor))]
        parts = (
            self.n_id, self.edge_index, self.rowptr, self.indptr, self.col, self.e_id, self.batch,
        )  # fmt: skip
        values: list[object] = []
        for part in parts:
            values += (part or {}).values()
        return [v for v in (*values, *self.metadata) if isinstance(v, Tensor)]

    def with_batch(self, batch: Tensor) -> 'HeteroSubgraph':
        """Gives the subgraphs of seeds other numbers."""
        roots = self.batch or {}
        numbered = {key: batch[root] for key, root in roots.items()}
        wholes = (*self.wholes, *numbered.values()) if self.wholes else ()
        return self._replace(batch=numbered or None, wholes=wholes)

    def to_bidirectional(self) -> 'HeteroSubgraph':
        """Adds the reverse of each edge, as PyG does: also the edges of a reverse type."""
        return self._replace_output(self._to_output().to_bidirectional(), is_sorted=True)

    def apply(self, transform: OutputTransform) -> 'HeteroSubgraph':
        """Applies the user's function to the sampler's output."""
        before = self._to_output()
        versions = [version_of(edges) for edges in self.edge_index.values()]
        given = copy.copy(before)
        for name in ('node', 'row', 'col', 'edge'):
            setattr(given, name, dict(getattr(before, name)))
        out = transform(given)
        if not isinstance(out, HeteroSamplerOutput):
            raise TypeError(
                f"'transform_sampler_output' must return a HeteroSamplerOutput, got "
                f'{type(out).__name__}'
            )
        is_same = all(
            getattr(out, name).get(key) is value
            for name in ('node', 'row', 'col')
            for key, value in getattr(before, name).items()
        ) and versions == [version_of(edges) for edges in self.edge_index.values()]
        if is_same:
            return self._replace(
                e_id=self._edges_of(out), batch=out.batch,
                num_sampled_nodes=out.num_sampled_nodes, num_sampled_edges=out.num_sampled_edges,
                metadata=metadata_of(out, self.metadata), wholes=(),
            )  # fmt: skip
        return self._replace_output(out, is_sorted=False)

    def _edges_of(self, out: HeteroSamplerOutput) -> dict[EdgeType, Tensor | None]:
        edges = out.edge or {}
        return {key: edges.get(key) for key in self.edge_index}

    def _to_output(self) -> HeteroSamplerOutput:
        def owned(parts: Mapping[K, T] | None) -> dict[K, T] | None:
            return None if parts is None else dict_of(parts)

        return HeteroSamplerOutput(
            node=dict_of(self.n_id), row={key: e[0] for key, e in self.edge_index.items()},
            col={key: e[1] for key, e in self.edge_index.items()}, edge=dict_of(self.e_id),
            batch=owned(self.batch), num_sampled_nodes=owned(self.num_sampled_nodes),
            num_sampled_edges=owned(self.num_sampled_edges), metadata=self.metadata,
        )  # fmt: skip

    def _replace_output(self, out: HeteroSamplerOutput, is_sorted: bool) -> 'HeteroSubgraph':
        none = next(iter(self.n_id.values())).new_empty(0)
        n_id = {key: out.node.get(key, none) for key in self.n_id}
        ends = {
            key: torch.stack([out.row.get(key, none), out.col.get(key, none)])
            for key in self.edge_index
        }
        e_id, rowptr, indptr, col = self._edges_of(out), {}, {}, {}
        for key, (source, target) in ends.items():
            # PyG leaves the edges of a reverse type in the order of the others.
            if is_sorted and not bool((target[1:] < target[:-1]).any()):
                indptr[key] = index2ptr(target, n_id[key[2]].numel())
                rowptr[key] = indptr[key].int()
                col[key] = source.int()
        return self._replace(
            n_id=n_id, edge_index=ends, rowptr=rowptr, indptr=indptr, col=col, e_id=e_id,
            batch=out.batch, num_sampled_nodes=out.num_sampled_nodes,
            num_sampled_edges=out.num_sampled_edges, metadata=metadata_of(out, self.metadata),
            hops=None, longest_row=dict.fromkeys(ends), wholes=(),
        )  # fmt: skip
