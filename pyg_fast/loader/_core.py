"""Makes mini-batches: seeds -> sample and relabel -> features -> batch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from ..ops.match import match_degree
from ..ops.node_map import NodeMap
from ._batch import build_batch
from ._columns import Budget
from ._features import HeteroFeatures, LocalFeatures, features_of_data, shard_features
from ._fetch import HeteroFetcher, LocalFetcher, RemoteFetcher
from ._hetero_batch import build_hetero_batch
from ._hetero_subgraph import HeteroSubgraph
from ._links import LinkInput, LinkSeeds
from ._options import GraphData, SamplingOptions, StorageOptions
from ._order import greedy_order
from ._pipeline import Batches, PendingBatch, run_on
from ._remote import RemoteFeatures
from ._sample import sample_batch
from ._seeds import NodeInput, NodeSeeds, check_positions, mix_seeds
from ._stats import Meter
from ._structure import Structure, structure_of_data, structure_of_store
from ._subgraph import Subgraph
from ._typed_sample import numbered_nodes, rules_of, typed_map
from ._typed_structure import TypedStructure, typed_structure

Part: TypeAlias = Subgraph | HeteroSubgraph  # a batch before its attributes are fetched


class Core:
    """State shared by the iterators of a loader; it does not know the loader.

    A copy without shared memory, such as an unpickled one, is made again from the same arguments:
    it reads the graph again, and decides again what fits on its device.
    """

    def __init__(
        self, data: GraphData, seeds: NodeInput | LinkInput, sampling: SamplingOptions,
        storage: StorageOptions, seed: int, custom_cls: Callable[[], Data] | None,
    ) -> None:  # fmt: skip
        self.given, self.storage = shard_features(data, storage)
        is_local = isinstance(self.given, (Data, HeteroData))
        self.data: Data | HeteroData | None = self.given if is_local else None
        self.sampling, self.seed, self.custom_cls = sampling, seed, custom_cls
        self.device = storage.device
        self.meter = Meter(self.device)
        is_cuda = self.device.type == 'cuda'
        # High priority: otherwise the kernels of a training step leave its small ones no room.
        self.stream = torch.cuda.Stream(self.device, -1) if is_cuda else None
        self._maps: list[NodeMap] = []
        self._lock = threading.Lock()
        budget = Budget(self.device, storage.max_device_bytes)
        graph = self._read_graph()
        self.seeds: NodeSeeds | LinkSeeds = seeds.read(self.data, graph, sampling, self.device)
        on_host = is_cuda and not budget.take(storage.topology, graph.num_bytes)
        self.graph: Structure | TypedStructure = graph.place(self.device, on_host)
        self.rules = rules_of(sampling, self.device) if sampling.is_typed else None
        self.features: LocalFeatures | HeteroFeatures | RemoteFeatures
        if isinstance(self.data, HeteroData):
            assert isinstance(graph, TypedStructure)
            self.features = HeteroFeatures(self.data, graph, self.storage, budget, self.stream)
        elif self.data is not None:
            self.features = features_of_data(self.data, graph, self.storage, budget, self.stream)
        else:
            self.features = RemoteFeatures(self.given[0], self.device)
        # A node of several subgraphs has several rows, of which a match would find one.
        can_match = storage.match and not sampling.has_roots
        self.does_match = can_match and self.features.crosses_bus()
        reorder = self.does_match if storage.reorder is None else storage.reorder
        self.reorder = reorder and not sampling.has_roots
        self.window = storage.window if is_cuda or self.reorder else 1

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Core, (
            self.given, self.seeds.to_input(), self.sampling, self.storage, self.seed,
            self.custom_cls,
        )  # fmt: skip

    def _read_graph(self) -> Structure | TypedStructure:
        sampling = self.sampling
        if self.data is not None and sampling.is_typed:
            return typed_structure(self.data, sampling)
        if self.data is not None:
            return structure_of_data(
                self.data, sampling.is_sorted, sampling.weight_attr, sampling.replace
            )
        if sampling.weight_attr is not None:
            raise ValueError("'weight_attr' must not be given for a (FeatureStore, GraphStore)")
        return structure_of_store(*self.given)

    @property
    def num_neighbors(self) -> list[int] | dict[Any, list[int]]:
        """The fan-outs by hop; by edge type if they differ."""
        if self.sampling.by_type is None:
            return list(self.sampling.fanouts)
        assert isinstance(self.graph, TypedStructure)
        lists = [list(by_hop) for by_hop in zip(*self.sampling.by_type, strict=True)]
        if all(by_hop == lists[0] for by_hop in lists):
            return lists[0]
        return dict(zip(self.graph.edge_types, lists, strict=True))

    def make_batches(self, positions: Iterator[tuple[int, Tensor]], epoch: int) -> Batches:
        """Makes the batches of an epoch, in the order in which the loader returns them."""
        meter, stream = self.meter, self.stream
        with self._borrow_node_map() as node_map:
            fetcher = self._fetcher(node_map)
            while window := list(islice(positions, self.window)):
                start = meter.now(stream)
                parts = [
                    self._sample(index, mix_seeds(self.seed, epoch, number, 1), node_map)
                    for number, index in window
                ]
                order = self._order(parts, node_map)
                meter.add_time('sample', start, meter.now(stream))
                for k in order:
                    part, parts[k] = parts[k], None  # type: ignore[call-overload]
                    start = meter.now(stream)
                    pending = self._fetch(part, fetcher)
                    meter.add_time('fetch', start, meter.now(stream))
                    yield pending
                    del pending, part

    def make_batch(self, index: Tensor | list[int], seed: int) -> Any:
        """Makes a single batch, in this thread, of positions that the user gives."""
        meter, current = self.meter, None
        try:
            positions = check_positions("'index'", index, len(self.seeds))
            with run_on(self.stream), self._borrow_node_map() as node_map:
                start = meter.now()
                part = self._sample(positions, seed, node_map)
                sampled = meter.now()
                pending = self._fetch(part, self._fetcher(node_map))
                meter.add_time('sample', start, sampled)
                meter.add_time('fetch', sampled, meter.now())
        except Exception as error:
            self.features.end_iterator(error)
            raise
        if self.stream is not None:
            self.stream.synchronize()  # The caller may free the graph in host memory now.
            current = torch.cuda.current_stream(self.device)
            for tensor in pending.tensors:
                tensor.record_stream(current)
        return pending.complete(meter, current, meter.now(current))

    def _sample(self, positions: Tensor, seed: int, node_map: NodeMap) -> Part:
        seeds = self.seeds.take(positions, self.device, seed)
        return sample_batch(self.graph, self.sampling, self.rules, seeds, seed, node_map)

    def _order(self, parts: list[Part], node_map: NodeMap) -> list[int]:
        """The order of the batches of a window."""
        if not self.reorder or len(parts) <= 2:
            return list(range(len(parts)))
        n_ids = [numbered_nodes(self.graph, part) for part in parts]
        return greedy_order(match_degree(n_ids, self.graph.num_nodes, node_map=node_map))

    def _fetcher(self, node_map: NodeMap) -> LocalFetcher | HeteroFetcher | RemoteFetcher:
        features, is_ahead = self.features, self.stream is not None
        args = self.does_match, self.meter, node_map
        if isinstance(features, RemoteFeatures):
            return RemoteFetcher(features, *args)
        if isinstance(features, HeteroFeatures):
            return HeteroFetcher(features, *args, self.device, is_ahead)
        return LocalFetcher(features, *args, self.device, is_ahead)

    def _fetch(
        self, part: Part, fetcher: LocalFetcher | HeteroFetcher | RemoteFetcher
    ) -> PendingBatch:
        graph = self.graph
        if isinstance(part, HeteroSubgraph):
            assert isinstance(fetcher, HeteroFetcher)
            assert isinstance(graph, TypedStructure)
            by_type = fetcher.fetch(part)
            self.meter.add_batch(part.num_nodes, part.num_edges)
            return build_hetero_batch(self.data, graph, part, by_type, self.seeds.write)
        assert not isinstance(fetcher, HeteroFetcher)
        attributes = fetcher.fetch(part)
        self.meter.add_batch(part.num_nodes, part.num_edges)
        if isinstance(graph, TypedStructure):
            edges = graph.layout[None], graph.loop_free[None]
        else:
            edges = graph.layout, graph.loop_free
        return build_batch(self.data, self.custom_cls, *edges, part, attributes, self.seeds.write)

    @contextmanager
    def _borrow_node_map(self) -> Iterator[NodeMap]:
        """A map for exclusive use, on the loader's stream."""
        with self._lock:
            node_map = self._maps.pop() if self._maps else None
        if node_map is None and isinstance(self.graph, TypedStructure):
            node_map = typed_map(self.graph, self.sampling, self.device)
        elif node_map is None:
            node_map = NodeMap(self.graph.num_nodes, self.device)
        try:
            yield node_map
        finally:
            with self._lock:
                self._maps.append(node_map)


def _made_anew(arguments: dict) -> Core:
    """Makes a core that version 0.2 pickled: by this name, with the options in one dict."""
    options = {**arguments, 'max_device_bytes': arguments['limit']}
    options['transform'] = arguments['transform_sampler_output']
    sampling, storage = (
        {field.name: options[field.name] for field in fields(kind) if field.name in options}
        for kind in (SamplingOptions, StorageOptions)
    )
    return Core(
        options['data'], NodeInput(options['input_nodes'], options['input_id']),
        SamplingOptions(**sampling), StorageOptions(**storage), options['seed'],
        options['custom_cls'],
    )  # fmt: skip
