"""Graphs with several types, and batches of them in plain Python."""

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from tests.ops._typed import Graph, Rule, Sampled, Seeds, sample

NODES = {'paper': 40, 'author': 25, 'place': 6}
EDGES = {
    ('paper', 'cites', 'paper'): 150, ('author', 'writes', 'paper'): 80,
    ('paper', 'of', 'author'): 70, ('author', 'lives', 'place'): 30,
    ('place', 'of', 'author'): 20, ('paper', 'at', 'place'): 0,
}  # fmt: skip


def random_hetero(seed: int = 0) -> HeteroData:
    """Types with and without features, times of nodes and of edges, and weights; repeated edges
    and loops; an edge type without edges."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator)

    data = HeteroData(name='planted')
    for key, count in NODES.items():
        if key == 'place':
            data[key].num_nodes = count
        else:
            data[key].x = torch.randn(count, len(key), generator=generator)
            data[key].time = draw(20, count).int() - 5
    data['paper'].y = draw(3, NODES['paper'])
    for key, count in EDGES.items():
        data[key].edge_index = torch.stack([draw(NODES[key[k]], count) for k in (0, 2)])
        if key[1] != 'lives':
            data[key].edge_time = draw(20, count)
            data[key].weight = draw(4, count) / 3
    data['paper', 'cites', 'paper'].edge_attr = torch.randn(150, 2, generator=generator)
    return data


def plain_graph(data: Data | HeteroData, time: str | None, weight: str | None = None) -> Graph:
    """The graph as the reference takes it."""
    if isinstance(data, Data):
        stores, ends, num_nodes, times = [data], [(0, 0)], [data.num_nodes], [data]
    else:
        stores, times = data.edge_stores, data.node_stores
        ends = [tuple(map(data.node_types.index, (s._key[0], s._key[2]))) for s in stores]
        num_nodes = [store.num_nodes for store in data.node_stores]

    def time_of(store, source) -> Tensor | None:  # type: ignore[no-untyped-def]
        if time == 'edge_time':
            return store.get(time)
        values = None if time is None else times[source].get(time)
        return None if values is None else values[store.edge_index[0]]

    return Graph(
        num_nodes, ends, [store.edge_index for store in stores],
        [time_of(store, src) for store, (src, _) in zip(stores, ends, strict=True)],
        [None if weight is None else store.get(weight) for store in stores],
    )  # fmt: skip


def expected(
    data: Data | HeteroData, kind: str | None, nodes: list[int], fanouts: list[list[int]],
    seed: int, *, disjoint: bool = False, time: str | None = None,
    seed_time: list[int] | None = None, weight: str | None = None, **rule: object,
) -> Sampled:  # fmt: skip
    """The batch around seeds of a type."""
    types = [None] if kind is None else data.node_types
    place = types.index(kind)
    parts = [nodes if k == place else [] for k in range(len(types))]
    roots = [list(range(len(part))) for part in parts] if disjoint or time else None
    return sample(
        plain_graph(data, time, weight), Seeds(parts, roots, seed_time),
        Rule(fanouts, **rule), seed,  # type: ignore[arg-type]
    )  # fmt: skip


def check_hetero(data: HeteroData, batch: HeteroData, wanted: Sampled, kind: str) -> None:
    """Compares a batch with the reference, and its attributes with those of data."""
    batch = batch.cpu()
    assert batch.name == data.name
    for number, key in enumerate(data.node_types):
        store = batch[key]
        assert store.n_id.tolist() == [node for _, node in wanted.nodes[number]]
        assert store.num_nodes == store.n_id.numel()
        assert store.num_sampled_nodes == wanted.num_nodes[number]
        if 'batch' in store:
            assert store.batch.tolist() == [root for root, _ in wanted.nodes[number]]
        for name in ('x', 'y', 'time'):
            assert (name in store) == (name in data[key])
            if name in store:
                assert store[name].dtype == data[key][name].dtype
                assert torch.equal(store[name], data[key][name][store.n_id])
        for name in ('input_id', 'batch_size'):
            assert (name in store) == (key == kind)
    for number, key in enumerate(data.edge_types):
        store, edges = batch[key], wanted.edges[number]
        assert store.e_id.tolist() == [e for _, _, e in edges]
        source, target = store.edge_index.as_tensor().tolist()
        assert list(zip(source, target, strict=True)) == [edge[:2] for edge in edges]
        assert store.num_sampled_edges == wanted.num_edges[number]
        assert store.edge_index.sparse_size() == (batch[key[0]].num_nodes, batch[key[2]].num_nodes)
        assert store.edge_index.validate() is not None
        for name in ('edge_attr', 'edge_time', 'weight'):
            assert (name in store) == (name in data[key])
            if name in store:
                assert torch.equal(store[name], data[key][name][store.e_id])
