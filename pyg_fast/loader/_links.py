"""Links around which batches are sampled, and their negatives."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling
from torch_geometric.sampler.base import SubgraphType

from ..ops.typed_sample import TypedSeeds
from ._negatives import Negatives, negatives_of
from ._options import SamplingOptions
from ._pipeline import put
from ._seeds import SeedBatch, copy_of_seeds, copy_of_times, copy_on_cpu, find_outside, mix_seeds
from ._structure import Structure
from ._typed_structure import EdgeType, NodeType, TypedStructure

V = TypeVar('V')

_CPU = torch.device('cpu')
# Links of a batch, with negative ones, whose seeds a CPU finds: an estimate, which no record shows.
_MOST_ON_CPU = 4096


@dataclass(frozen=True)
class LinkInput:
    """A loader's arguments that say around which links to sample."""

    argument: ClassVar[str] = 'edge_label_index'
    edge_label_index: Any  # PyG's
    edge_label: Tensor | None = None
    edge_label_time: Tensor | None = None
    input_id: Tensor | None = None
    neg_sampling: NegativeSampling | None = None
    true_negatives: bool = False
    drop_seed_edges: bool = False
    rev_edge_type: tuple[str, str, str] | bool = False

    def read(
        self, data: Data | HeteroData | None, graph: Structure | TypedStructure,
        options: SamplingOptions, device: torch.device,
    ) -> 'LinkSeeds':  # fmt: skip
        """The seeds, checked and copied."""
        key, links = _split_links(data, self.edge_label_index)
        ends = (None, None) if key is None else (key[0], key[2])
        sizes = [_num_nodes(data, graph, node_type) for node_type in ends]
        if links is None:
            store: Any = data if key is None or data is None else data[key]
            is_list = store is not None and 'edge_index' in store
            links = store.edge_index if is_list else edges_of(graph, key)
        links = _copy_links(links, sizes)
        count, sampling, input_id = links.size(1), self.neg_sampling, self.input_id
        given, label, time = (count, self.argument), None, None
        if input_id is not None:
            input_id = copy_of_seeds('input_id', input_id, *given)
        if self.edge_label is not None:
            label = _copy_label(self.edge_label, sampling, count)
        if self.edge_label_time is not None:
            time = copy_of_times('edge_label_time', self.edge_label_time, *given)
        negatives, known = None, None
        if sampling is not None and count:
            if self.true_negatives:
                known = [links.to(graph.col.device)]
                if isinstance(graph, Structure) or key in graph.edge_types:
                    known.append(edges_of(graph, key))
            times = [
                graph.node_time.get(node_type) if isinstance(graph, TypedStructure) else None
                for node_type in ends
            ]
            negatives = negatives_of(
                sampling, sizes, None if known is None else torch.cat(known, 1), links, times,
                device,
            )  # fmt: skip
        dropped = self._dropped_types(data, key, options)
        types = None
        if key is not None and isinstance(graph, TypedStructure):
            types = LinkTypes.of(graph, key, device)
        return LinkSeeds(
            links, label, time, input_id, self, key, negatives, dropped, options, types
        )

    def _dropped_types(
        self, data: Data | HeteroData | None, key: EdgeType, options: SamplingOptions
    ) -> tuple[tuple[EdgeType, bool], ...]:
        """The edge types from which links are dropped, and whether against their direction."""
        if not self.drop_seed_edges:
            return ()
        reverse, is_both_ways = self.rev_edge_type, options.subgraph_type == _BOTH_WAYS
        if not isinstance(data, HeteroData) or key is None:
            if not isinstance(reverse, bool):
                raise ValueError(
                    f"'rev_edge_type' must be True or False for a graph with one type of edges, "
                    f'got {reverse!r}'
                )
            return ((None, False), (None, True)) if reverse or is_both_ways else ((None, False),)
        if reverse is True:
            reverse = key
        if not reverse:
            if is_both_ways:
                raise ValueError(
                    "'rev_edge_type' must name the type of the reverse edges for "
                    "'drop_seed_edges=True' and subgraph_type='bidirectional'"
                )
            return ((key, False),)
        reverse = _canonical(data, 'rev_edge_type', reverse)
        if reverse not in data.edge_types or (reverse[0], reverse[2]) != (key[2], key[0]):
            raise ValueError(
                f"'rev_edge_type' must be an edge type of 'data' from {key[2]!r} to {key[0]!r}, "
                f'got {reverse}'
            )
        return ((key, False), (reverse, True))


_BOTH_WAYS = SubgraphType.bidirectional


class LinkTypes(NamedTuple):
    """The node types of links, in the order of the graph."""

    keys: tuple[str, ...]
    places: tuple[int, ...]  # among all types
    first_node: tuple[int, ...]  # of all types in one numbering, and where the last one ends
    bounds: Tensor  # the same, on the device

    @classmethod
    def of(
        cls, graph: TypedStructure, key: tuple[str, str, str], device: torch.device
    ) -> 'LinkTypes':
        keys = [each for each in graph.node_types if each is not None and each in key[::2]]
        first_node = graph.graph.types.first_node
        return cls(
            tuple(keys), tuple(map(graph.node_types.index, keys)), first_node,
            torch.tensor(first_node, device=device),
        )  # fmt: skip

    def distinct(self, nodes: dict[str, Tensor]) -> tuple[TypedSeeds, dict[str, Tensor]]:
        """The distinct nodes of each type, and the positions of all nodes among them, without a
        wait for the device."""
        sizes = [0] * (len(self.first_node) - 1)
        if not nodes[self.keys[0]].is_cuda:
            seeds, by_type = [], {}
            for key, place in zip(self.keys, self.places, strict=True):
                ids, by_type[key] = torch.unique(nodes[key], return_inverse=True)
                sizes[place] = ids.numel()
                seeds.append(ids + self.first_node[place])
            return TypedSeeds(torch.cat(seeds), tuple(sizes)), by_type
        for key, place in zip(self.keys, self.places, strict=True):
            sizes[place] = nodes[key].numel()
        ids, local, count = distinct(torch.cat([
            nodes[key] + self.first_node[place]
            for key, place in zip(self.keys, self.places, strict=True)
        ]))  # fmt: skip
        ends = torch.searchsorted(ids, self.bounds).clamp(max=count)
        parts = local.split([nodes[key].numel() for key in self.keys])
        return TypedSeeds(ids, tuple(sizes), counts=ends.diff()), {
            key: part - ends[place]
            for key, place, part in zip(self.keys, self.places, parts, strict=True)
        }


@dataclass(frozen=True)
class LinkSeeds:
    """Links around which batches are sampled, on the CPU: copies, as those of nodes."""

    links: Tensor  # int64
    label: Tensor | None
    time: Tensor | None  # in its own dtype
    input_id: Tensor | None  # `batch.input_id` of each; None: its position
    input: LinkInput
    edge_type: EdgeType
    negatives: Negatives | None  # None: without negative sampling, or without links
    dropped_types: tuple[tuple[EdgeType, bool], ...]
    options: SamplingOptions
    types: LinkTypes | None  # None: one type

    def __len__(self) -> int:
        return self.links.size(1)

    def take(self, positions: Tensor, device: torch.device, seed: int) -> SeedBatch:
        """The seeds of a batch: the ends of its links and of their negatives."""
        if device.type == 'cuda' and self._suits_cpu(positions.numel()):
            return _moved(self.take(positions, _CPU, seed), device)

        def at(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[positions].to(device, non_blocking=True)

        num_pos, label, time = positions.numel(), at(self.label), at(self.time)
        input_id = positions if self.input_id is None else self.input_id[positions]
        input_id = input_id.to(device, non_blocking=True)
        links = self.links[:, positions].to(device, non_blocking=True)
        dropped = self._dropped(links)
        src, dst = links

        # Of each end of a link, also of a negative one, the number of its positive link.
        number = torch.arange(num_pos, device=device)
        numbers = [[number], [number]]
        sampling = self.input.neg_sampling
        is_triplet = sampling is not None and sampling.is_triplet()
        if sampling is not None:
            count = math.ceil(num_pos * sampling.amount)
            if count != num_pos:
                number = torch.arange(count, device=device) % max(1, num_pos)
            negative = self._draw(src, number, time, mix_seeds(seed, 3))
            dst, numbers[1] = torch.cat([dst, negative[1]]), [*numbers[1], number]
            if not is_triplet:
                src, numbers[0] = torch.cat([src, negative[0]]), numbers[1]
                label = torch.ones(num_pos, device=device) if label is None else label
                label = torch.cat([label, label.new_zeros(count, *label.shape[1:])])

        nodes, local, num_nodes = self._seeds_of(src, dst)
        batch = seed_time = None
        if self.options.has_roots:
            batch = torch.cat([*numbers[0], *numbers[1]])
            if time is not None:
                of_src, of_dst = (time.long()[torch.cat(parts)] for parts in numbers)
                seed_time = self._by_type(of_src, of_dst)
        metadata: tuple[object, ...]
        if sampling is not None and is_triplet:
            # Negatives of a link are as far apart as the batch has links.
            positive, other = local[1].split([num_pos, dst.numel() - num_pos])
            other = other.view(int(sampling.amount), num_pos).t().contiguous().squeeze(-1)
            metadata = input_id, local[0], positive, other, time
        else:
            label_time = None if time is None else time[torch.cat(numbers[0])]
            metadata = input_id, torch.stack(local), label, label_time
        return SeedBatch(nodes, metadata, seed_time, num_nodes, batch, dropped)

    def _suits_cpu(self, num_links: int) -> bool:
        """Whether the links are few: to launch tens of kernels takes time, too."""
        sampling, negatives = self.input.neg_sampling, self.negatives
        total = num_links * (1 if sampling is None else 1 + sampling.amount)
        return total <= _MOST_ON_CPU and (negatives is None or not negatives.on_device)

    def _dropped(self, links: Tensor) -> dict[EdgeType, Tensor] | None:
        out: dict[EdgeType, Tensor] = {}
        for key, is_reverse in self.dropped_types:
            pairs = links.flip(0) if is_reverse else links
            out[key] = torch.cat([out[key], pairs], 1) if key in out else pairs
        return out or None

    def _draw(
        self, src: Tensor, number: Tensor, time: Tensor | None, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The ends of negative links; `number` are those of their positive ones."""
        if self.negatives is None or number.numel() == 0:
            return src[:0], src[:0]
        assert self.input.neg_sampling is not None
        time = None if time is None else time.long()[number]
        given = src[number] if self.input.neg_sampling.is_triplet() else None
        return self.negatives.draw(number.numel(), seed, time, given, src.device)

    def _by_type(self, src: Tensor, dst: Tensor) -> Tensor | dict[str, Tensor]:
        """What seeds are or have, in the order in which subgraphs of theirs are numbered."""
        if self.edge_type is None:
            return torch.cat([src, dst])
        if self.edge_type[0] == self.edge_type[2]:
            return {self.edge_type[0]: torch.cat([src, dst])}
        return {self.edge_type[0]: src, self.edge_type[2]: dst}

    def _seeds_of(
        self, src: Tensor, dst: Tensor
    ) -> tuple[
        Tensor | dict[str, Tensor] | TypedSeeds, tuple[Tensor, Tensor], Tensor | None
    ]:  # fmt: skip
        """The seeds, the positions of sources and destinations among those of their types, and the
        number of seeds."""
        nodes = self._by_type(src, dst)
        parts, num_nodes = list(nodes.values()) if isinstance(nodes, dict) else [nodes], None
        seeds: Tensor | dict[str, Tensor] | TypedSeeds = nodes
        if self.options.has_roots:
            local = [torch.arange(part.numel(), device=part.device) for part in parts]
        elif isinstance(nodes, dict):
            assert self.types is not None
            seeds, by_type = self.types.distinct(nodes)
            local = [by_type[key] for key in nodes]
        else:
            if nodes.is_cuda:
                seeds, inverse, num_nodes = distinct(nodes)
            else:
                seeds, inverse = torch.unique(nodes, return_inverse=True)
            local = [inverse]
        if len(local) == 1:
            local = list(local[0].split([src.numel(), dst.numel()]))
        return seeds, (local[0], local[1]), num_nodes

    def write(self, batch: Any, metadata: tuple) -> None:
        """Writes what a batch tells of its links."""
        sampling, key = self.input.neg_sampling, self.edge_type
        ends = (None, None, None) if key is None else (key[0], key, key[2])
        src, link, dst = (batch._store if each is None else batch[each] for each in ends)
        if sampling is None or sampling.is_binary():
            names = 'input_id', 'edge_label_index', 'edge_label', 'edge_label_time'
            for name, value in zip(names, metadata, strict=True):
                put(link, name, value)
            return
        input_id, index, positive, negative, time = metadata
        for store, name, value in (
            (link, 'input_id', input_id), (src, 'src_index', index),
            (dst, 'dst_pos_index', positive), (dst, 'dst_neg_index', negative),
            (src, 'seed_time', time), (dst, 'seed_time', time),
            # Attributes of the whole graph of these names would be wrong here.
            (link, 'edge_label_index', None), (link, 'edge_label_time', None),
        ):  # fmt: skip
            put(store, name, value)

    def to_input(self) -> LinkInput:
        links = self.links if self.edge_type is None else (self.edge_type, self.links)
        return replace(
            self.input, edge_label_index=links, edge_label=self.label, edge_label_time=self.time,
            input_id=self.input_id,
        )  # fmt: skip

    def to_pyg(self) -> EdgeSamplerInput:
        """A copy, as PyG's loader has it."""
        input_id, label, time = (
            t if t is None else t.clone() for t in (self.input_id, self.label, self.time)
        )
        return EdgeSamplerInput(input_id, *self.links, label, time, self.edge_type)


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


def _moved(value: V, device: torch.device) -> V:
    """The same with its tensors on a device: few numbers are copied without a wait."""
    out: Any = value
    if isinstance(value, Tensor):
        out = value.to(device, non_blocking=True)
    elif isinstance(value, dict):
        out = {key: _moved(part, device) for key, part in value.items()}
    elif isinstance(value, tuple):
        parts = [_moved(part, device) for part in value]
        out = type(value)(*parts) if hasattr(value, '_fields') else tuple(parts)
    return out


def edges_of(graph: Structure | TypedStructure, key: EdgeType = None) -> Tensor:
    """The edges of a type by destination :math:`(2, |\\mathcal{E}|)`."""
    if isinstance(graph, Structure):
        rowptr, col = graph.rowptr, graph.col.long()
    else:
        types, k = graph.graph.types, graph.edge_types.index(key)
        sizes, ends = types.sizes(), types.ends
        row = sum(sizes[dst] for _, dst in ends[:k])
        rowptr = graph.graph.rowptr[row : row + sizes[ends[k][1]] + 1]
        col = graph.graph.col[int(rowptr[0]) : int(rowptr[-1])].long()
        col = col - types.first_node[ends[k][0]]
    degree = rowptr.diff().long()
    dst = torch.arange(degree.numel(), device=col.device)
    return torch.stack([col, dst.repeat_interleave(degree, output_size=col.numel())])


def _num_nodes(
    data: Data | HeteroData | None, graph: Structure | TypedStructure, node_type: NodeType
) -> int:
    if isinstance(data, HeteroData):
        return data[node_type].num_nodes
    return graph.num_nodes


def _canonical(data: HeteroData, name: str, key: object) -> tuple[str, str, str]:
    """An edge type as PyG spells it out."""
    is_type = isinstance(key, (tuple, list)) and all(isinstance(part, str) for part in key)
    if not is_type or len(key) not in (2, 3):  # type: ignore[arg-type]
        raise TypeError(f"'{name}' must name an edge type, got {key!r}")
    return data._to_canonical(*key)  # type: ignore[misc]


def _split_links(data: Data | HeteroData | None, given: Any) -> tuple[EdgeType, Tensor | None]:
    """The edge type of the links of :class:`~torch_geometric.data.HeteroData`, and the links; None:
    all edges."""
    if not isinstance(data, HeteroData):
        return None, given
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise TypeError(
            f"'edge_label_index' must be an edge type, or a pair of it and links, for HeteroData, "
            f'got {type(given).__name__}'
        )
    is_type = all(isinstance(part, str) for part in given)
    key, links = (given, None) if is_type else given
    key = _canonical(data, 'edge_label_index', key)
    missing = [node_type for node_type in (key[0], key[2]) if node_type not in data.node_types]
    if missing or (links is None and key not in data.edge_types):
        raise ValueError(
            f"'edge_label_index' must name one of the edge types {data.edge_types}, got {key}"
        )
    return key, links


def _copy_links(links: object, sizes: list[int]) -> Tensor:
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
    links = copy_on_cpu('edge_label_index', links).to(torch.int64)
    for ids, size in zip(links, sizes, strict=True):
        wrong = find_outside(ids, size)
        if wrong is not None:
            raise IndexError(f"'edge_label_index' must be from 0 to {size - 1}, got {wrong}")
    return links


def _copy_label(label: object, sampling: NegativeSampling | None, count: int) -> Tensor:
    """A copy of the labels, plus one where zero becomes the label of negatives."""
    if sampling is not None and sampling.is_triplet():
        raise ValueError(
            "'edge_label' must be None for 'triplet' negative sampling: batches have src_index, "
            'dst_pos_index and dst_neg_index'
        )
    if not isinstance(label, Tensor):
        raise TypeError(f"'edge_label' must be a tensor, got {type(label).__name__}")
    if label.dim() == 0 or label.size(0) != count:
        raise ValueError(
            f"'edge_label' must have {count} entries as 'edge_label_index', got shape "
            f'{list(label.shape)}'
        )
    label = copy_on_cpu('edge_label', label)
    return label + 1 if sampling is not None and count and label.min() == 0 else label
