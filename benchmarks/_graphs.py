"""The graphs of the benchmarks: generated ones, and real ones from PYG_FAST_DATA."""
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, HeterophilousGraphDataset, Planetoid

from pyg_fast.datasets import SIZES, PlantedSize, planted_structure
from pyg_fast.graph import prepare_edge_index
from pyg_fast.graph.graph import graph_of
from pyg_fast.sparse.graph import Graph as Structure
from pyg_fast.transforms import ToCSR

DATA = 'PYG_FAST_DATA'
_STRUCTURES = {
    'ddi': 'ogbl_ddi_train', 'moby': 'moby_thesaurus', 'ca-astroph': 'ca_astroph'}
_DATASETS = {
    'Computers': (Amazon, 'Amazon'),
    'tolokers': (HeterophilousGraphDataset, 'HeterophilousGraphDataset'),
    **dict.fromkeys(('Cora', 'CiteSeer', 'PubMed'), (Planetoid, 'Planetoid')),
}
REAL = ('Computers', 'tolokers', 'ddi', 'moby')
GRID = ('reddit-like', 'arxiv-like', 'products-like', 'ddi', 'moby', 'Computers', 'tolokers')
# Graphs of the papers, as OGB, PyG, SNAP and the papers list them: nodes, pairs of nodes (of
# directed graphs half the edges), communities (classes, or a guess).
PLANTED: dict[str, PlantedSize] = SIZES | {
    'Cora-sized': PlantedSize(2_708, 5_278, 7),
    'proteins-like': PlantedSize(132_534, 39_561_252, 16, 0.5),
    'BlogCatalog-like': PlantedSize(88_784, 2_093_195, 40),
    'YouTube-like': PlantedSize(1_134_890, 2_987_624, 8000),
    'papers100M-like': PlantedSize(111_059_956, 807_842_936, 172),
    'IGB-like': PlantedSize(100_000_000, 611_785_682, 19),
}
NAMES = tuple(dict.fromkeys((*GRID, *PLANTED, *_DATASETS, *_STRUCTURES)))


class Missing(Exception):
    """A graph that does not exist here, with the reason."""


class Graph:
    """A square graph in CSR format, int32: rows are destinations, ``col`` holds the source of
    each edge, ascending within a row.
    """

    def __init__(self, name: str, rowptr: Tensor, col: Tensor) -> None:
        self.name = name
        self.rowptr = rowptr
        self.col = col
        self.num_nodes = rowptr.numel() - 1
        self.num_edges = col.numel()

    @functools.cached_property
    def degree(self) -> Tensor:
        return self.rowptr.diff()

    @functools.cached_property
    def row(self) -> Tensor:
        return torch.arange(self.num_nodes, device=self.col.device).repeat_interleave(
            self.degree, output_size=self.num_edges)

    @functools.cached_property
    def edge_index(self) -> Tensor:
        return torch.stack([self.col.long(), self.row])

    @functools.cached_property
    def prepared(self) -> Tensor:
        """The ``edge_index`` as our ops want it."""
        edge_index, perm = prepare_edge_index(self.edge_index, (self.num_nodes,) * 2)
        # Weights, references and rivals take the edges in the order of the graph.
        if not bool((perm == torch.arange(perm.numel(), device=perm.device)).all()):
            raise RuntimeError('prepare_edge_index: moved edges that were sorted already')
        return edge_index

    @functools.cached_property
    def structure(self) -> Structure:
        return graph_of(self.prepared, self.num_nodes, self.num_nodes)

    def normal(self, seed: int = 1) -> Callable[..., Tensor]:
        return normal(self.col.device, seed)

    @functools.cached_property
    def on_host(self) -> Tensor:
        """``edge_index`` in host memory, for loaders."""
        return self.edge_index.cpu()

    @functools.cached_property
    def prepared_on_host(self) -> Tensor:
        return ToCSR()(Data(edge_index=self.on_host, num_nodes=self.num_nodes)).edge_index

    @functools.cached_property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """``rowptr``, ``col`` and, for each of its edges, the position in ``self.col``."""
        perm = self.col.argsort(stable=True)
        return _pointers(self.col, self.num_nodes), self.row[perm].int(), perm

    def matrix(
        self, value: Tensor, transposed: bool = False, dtype: torch.dtype = torch.int,
    ) -> Tensor:
        """The adjacency matrix as a :class:`torch.sparse_csr_tensor`; ``dtype``: of its indices."""
        rowptr, col = self.rowptr, self.col
        if transposed:
            rowptr, col, perm = self.transpose
            value = value[perm]
        return torch.sparse_csr_tensor(
            rowptr.to(dtype), col.to(dtype), value, (self.num_nodes, self.num_nodes))

    def sparse_tensor(self, value: Tensor | None = None) -> Any:
        """The adjacency matrix as a SparseTensor of torch-sparse, with its transpose."""
        from torch_sparse import SparseTensor
        return SparseTensor(
            rowptr=self.rowptr.long(), col=self.col.long(), value=value,
            sparse_sizes=(self.num_nodes, self.num_nodes), is_sorted=True, trust_data=True,
        ).fill_cache_()

    def has_edges(self, src: Tensor, dst: Tensor) -> Tensor:
        """Whether there is an edge from each of some nodes to each of others."""
        keys, wanted = (b * self.num_nodes + a for a, b in ((self.col, self.row), (src, dst)))
        place = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
        return keys[place] == wanted

    def without_loops(self) -> 'Graph':
        kept = self.col != self.row
        return Graph(self.name, _pointers(self.row[kept], self.num_nodes), self.col[kept])

    def summary(self) -> dict[str, int]:
        return {
            'nodes': self.num_nodes,
            'edges': self.num_edges,
            'largest_degree': int(self.degree.max()) if self.num_nodes else 0,
            'isolated_nodes': int((self.degree == 0).sum()),
        }


def normal(device: torch.device, seed: int = 1) -> Callable[..., Tensor]:
    """Draws random numbers, always the same for a seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, device=device)


def _pointers(index: Tensor, size: int) -> Tensor:
    rowptr = torch.zeros(size + 1, dtype=torch.int, device=index.device)
    rowptr[1:] = index.bincount(minlength=size).cumsum(0)
    return rowptr


def from_edge_index(name: str, edge_index: Tensor, num_nodes: int) -> Graph:
    key = (edge_index[1].long() * num_nodes + edge_index[0]).sort()[0]
    row, col = key // num_nodes, key % num_nodes
    return Graph(name, _pointers(row, num_nodes), col.int())


def _folder() -> Path:
    if not os.environ.get(DATA):
        raise Missing(f'{DATA} is not set')
    return Path(os.environ[DATA])


def dataset(name: str) -> Data:
    """A real dataset: the class of PyG reads a copy of its raw files, or Missing is raised."""
    return _read(name, _folder()).clone()


@functools.lru_cache(maxsize=4)
def _read(name: str, folder: Path) -> Data:
    cls, collection = _DATASETS[name]
    with copied(collection, name) as root:
        return cls(str(root / collection), name)[0]


@contextlib.contextmanager
def copied(collection: str, name: str) -> Iterator[Path]:
    """A temporary folder with a copy of the raw files of a real dataset, if they exist."""
    source = _folder() / collection / name / 'raw'
    if not source.is_dir():
        raise Missing(f'${DATA}/{collection}/{name}/raw does not exist')
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root) / collection / name / 'raw'
        raw.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copyfile(file, raw / file.name)
        yield Path(root)


def smaller(name: str, max_edges: int | None) -> tuple[str, PlantedSize]:
    """The size of a generated graph, or a fraction of it that has at most ``max_edges``."""
    size, parts = PLANTED[name], 1
    while max_edges is not None and 2 * size.num_pairs // parts > max_edges:
        parts *= 2
    if parts == 1:
        return name, size
    num_nodes = size.num_nodes // parts
    return f'{name} 1/{parts}', size._replace(
        num_nodes=num_nodes, num_pairs=size.num_pairs // parts,
        num_communities=max(1, min(size.num_communities, num_nodes // 20)))


def load(name: str, device: torch.device, max_edges: int | None = None) -> Graph:
    """Makes the graph called ``name``, or a fraction of it if it is generated and too large."""
    if name in _DATASETS:
        data = dataset(name)
        edge_index, num_nodes = data.edge_index, data.num_nodes
    elif name in _STRUCTURES:
        path = _folder() / 'structure' / f'{_STRUCTURES[name]}.npz'
        if not path.is_file():
            raise Missing(f'${DATA}/structure/{path.name} does not exist')
        with np.load(path) as arrays:
            edge_index = torch.from_numpy(np.stack([arrays['col'], arrays['row']]))
            num_nodes = int(arrays['num_nodes'])
    else:
        name, size = smaller(name, max_edges)
        return Graph(name, *planted_structure(size, seed=0, device=device))
    return from_edge_index(name, edge_index.to(device), num_nodes)


def load_each(
    names: Iterable[str], device: torch.device, left_out: dict[str, str],
    max_edges: int | None = None,
) -> Iterator[Graph]:
    """Yields the graphs one by one; missing graphs go into ``left_out``."""
    for name in names:
        try:
            graph = load(name, device, max_edges)
        except Missing as reason:
            left_out[name] = str(reason)
            print(f'{name} left out: {reason}', file=sys.stderr)
            continue
        yield graph
        del graph  # before the next one is drawn
