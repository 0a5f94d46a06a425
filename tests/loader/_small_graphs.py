"""Small graphs with every kind of attribute, and comparisons of their batches."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data


class PairData(Data):
    """Two graphs in one, with increments of its own: one of them a tensor."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key == 'edge_index_t':
            return self.x_t.size(0)
        if key == 'edge_index_st':
            return torch.tensor([[self.num_nodes], [self.x_t.size(0)]])
        if key == 'count':
            return 2
        if key == 'scalar_inc':
            return torch.tensor(3)
        return super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return None if key == 'stacked' else super().__cat_dim__(key, value, *args, **kwargs)


def _edges(num_src: int, num_dst: int, generator: torch.Generator, least: int = 0) -> Tensor:
    count = int(torch.randint(least, least + 12, (1,), generator=generator))
    count = count if num_src * num_dst else 0
    ends = [torch.randint(max(1, n), (count,), generator=generator) for n in (num_src, num_dst)]
    return torch.stack(ends)


def _attributes(graph: int, generator: torch.Generator, is_cycle: bool) -> dict[str, Any]:
    """Every kind of attribute, for one graph."""

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n = int(torch.randint(1, 7, (1,), generator=generator))
    # Never as many as edges, unless there are none: PyG would take these rows for edges.
    m = int(torch.randint(4, (1,), generator=generator)) * 30
    edges = _edges(n, n, generator)
    if is_cycle:  # as many edges as nodes
        edges = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    e = edges.size(1)
    return {
        'edge_index': edges, 'x': real(n, 3), 'edge_attr': real(e, 2), 'y': real(1, 2),
        'edge_label': real(e), 'edge_names': [f'{graph}.{k}' for k in range(e)],
        'node_names': tuple(f'{k}' for k in range(n)), 'edge_array': real(e, 1).numpy(),
        'name': f'graph {graph}', 'number': graph, 'share': graph / 7, 'flag': graph % 2 == 0,
        'scalar': torch.tensor(graph), 'rings': real(m, 2), 'ring_index': torch.randint(n, (2, m)),
        'index_mask': real(n) > 0, 'small_index': torch.randint(n, (m,), dtype=torch.int32),
        'face': torch.randint(n, (3, m)), 'wide': real(2, n).t(),
        'atom_batch': torch.arange(n) // 2,
        'nested': {'a': real(n), 'deep': {'b_index': torch.arange(n), 'c': 'text'}, 'd': 2.5},
        'parts': [real(n, 1), real(m)], 'empty': [], 'half': real(n, 1).half(),
        'batch': torch.arange(n), 'complex': torch.complex(real(m), real(m)),
        'edge_kind': real(e) > 0,
        # of PairData
        'x_t': real(m, 2), 'edge_index_t': _edges(m, m, generator, 12), 'stacked': real(2, 3),
        'edge_index_st': _edges(n, m, generator, 12), 'count': 5, 'scalar_inc': torch.arange(m),
        'num_nodes': n,
    }  # fmt: skip


OF_PAIRS = ('x_t', 'edge_index_t', 'stacked', 'edge_index_st', 'count', 'scalar_inc')
NAMES = list(_attributes(0, torch.Generator(), False))


def random_graphs(
    count: int, names: list[str], seed: int = 0, cls: type = Data, is_cycle: bool = False
) -> list[Data]:
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for graph in range(count):
        values = _attributes(graph, generator, is_cycle)
        graphs.append(cls(**{name: copy.deepcopy(values[name]) for name in names}))
    return graphs


def molecules(count: int, seed: int = 0) -> list[Data]:
    """Rings of bonds both ways, with numbers that have gradients."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        n = int(torch.randint(5, 20, (1,), generator=generator))
        ends = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
        out.append(Data(
            x=torch.randn(n, 4, generator=generator), edge_index=torch.cat([ends, ends.flip(0)], 1),
            edge_attr=torch.randn(2 * n, 3, generator=generator),
            y=torch.randn(1, 1, generator=generator),
        ))  # fmt: skip
    return out


def check_equal(got: Any, wanted: Any, key: object = '') -> None:
    """Raises unless values have the same types, shapes and numbers."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), key
        got, wanted = (t.as_tensor() if isinstance(t, EdgeIndex) else t for t in (got, wanted))
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), key
        assert torch.equal(got.cpu(), wanted.cpu()), key
    elif isinstance(wanted, Mapping):
        assert list(got) == list(wanted), key
        for name in wanted:
            check_equal(got[name], wanted[name], (key, name))
    elif isinstance(wanted, (list, tuple)):
        assert type(got) is type(wanted), key
        assert len(got) == len(wanted), key
        for a, b in zip(got, wanted, strict=True):
            check_equal(a, b, key)
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(got, wanted), key
    else:
        assert type(got) is type(wanted), key
        assert got == wanted, key


def check_batch(got: Batch, wanted: Batch, device: torch.device) -> None:
    """Raises unless two batches, what PyG keeps in them, and their graphs are the same."""
    assert type(got) is type(wanted)
    check_equal(got._store._mapping, wanted._store._mapping)
    check_equal(got._slice_dict, wanted._slice_dict)
    check_equal(got._inc_dict, wanted._inc_dict)
    assert got.num_graphs == len(got) == wanted.num_graphs
    assert got.num_nodes == wanted.num_nodes
    for value in got._store._mapping.values():
        assert not isinstance(value, Tensor) or value.device.type == device.type
    for a, b in zip(got.to_data_list(), wanted.to_data_list(), strict=True):
        assert type(a) is type(b)
        check_equal(a._store._mapping, b._store._mapping)
