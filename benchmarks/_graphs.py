"""The graphs of the grid: planted ones, drawn on the spot, and real ones from PYG_FAST_DATA."""
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, HeterophilousGraphDataset, Planetoid

from pyg_fast.datasets import SIZES, PlantedSize, planted_structure

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
NAMES = (*GRID, *(name for name in SIZES if name not in GRID))


class Missing(Exception):
    """A graph that cannot be had here, with the reason."""


class Graph:
    """A square graph in CSR format: rows are destinations, ``col`` holds the source of each edge.

    Args:
        name: What to call it.
        rowptr: Row pointers of shape ``[num_nodes + 1]``, int32.
        col: Sources of shape ``[num_edges]``, int32, ascending within a row.
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
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """``rowptr``, ``col`` and, for each of its edges, the position in ``self.col``."""
        perm = self.col.argsort(stable=True)
        return _pointers(self.col, self.num_nodes), self.row[perm].int(), perm

    def matrix(self, value: Tensor, transposed: bool = False) -> Tensor:
        """The adjacency matrix as a :class:`torch.sparse_csr_tensor`."""
        size = (self.num_nodes, self.num_nodes)
        if not transposed:
            return torch.sparse_csr_tensor(self.rowptr, self.col, value, size)
        rowptr, col, perm = self.transpose
        return torch.sparse_csr_tensor(rowptr, col, value[perm], size)

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
    """A real dataset, read by PyG's own class from a copy of its raw files.

    Raises:
        Missing: If the files are not there.
    """
    return _read(name, _folder()).clone()


@functools.lru_cache(maxsize=4)
def _read(name: str, folder: Path) -> Data:
    cls, collection = _DATASETS[name]
    with copied(collection, name) as root:
        return cls(str(root / collection), name)[0]


@contextlib.contextmanager
def copied(collection: str, name: str) -> Iterator[Path]:
    """A folder with a copy of the raw files of a real dataset, beside which PyG may write.

    Raises:
        Missing: If the files are not there.
    """
    source = _folder() / collection / name / 'raw'
    if not source.is_dir():
        raise Missing(f'${DATA}/{collection}/{name}/raw does not exist')
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root) / collection / name / 'raw'
        raw.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copyfile(file, raw / file.name)
        yield Path(root)


def load(name: str, device: torch.device) -> Graph:
    """Makes the graph called ``name``.

    Raises:
        Missing: If it is a real graph whose files are not there.
    """
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
        return Graph(name, *planted_structure(name, seed=0, device=device))
    return from_edge_index(name, edge_index.to(device), num_nodes)


def cora(device: torch.device) -> tuple[Data, str]:
    """Cora, or a planted graph of its size with random features, and which of the two it is."""
    try:
        return dataset('Cora').to(device), 'Cora'
    except Missing as reason:
        size = PlantedSize(2708, 5278, 7)
        graph = Graph('planted', *planted_structure(size, seed=0, device=device))
        generator = torch.Generator(device=device).manual_seed(0)
        x = torch.rand(size.num_nodes, 1433, generator=generator, device=device)
        y = torch.randint(7, (size.num_nodes,), generator=generator, device=device)
        mask = torch.arange(size.num_nodes, device=device) < 140
        return (
            Data(x=x, edge_index=graph.edge_index, y=y, train_mask=mask),
            f'planted graph of the size of Cora ({reason})')


def default_names(device: torch.device) -> tuple[str, ...]:
    return GRID if device.type == 'cuda' else REAL


def quick_names(device: torch.device) -> tuple[str, ...]:
    return ('arxiv-like', 'Computers', 'ddi') if device.type == 'cuda' else ('Computers', 'ddi')


def load_each(
    names: Iterable[str], device: torch.device, left_out: dict[str, str],
) -> Iterator[Graph]:
    """Yields the graphs one by one; those that are missing go into ``left_out``."""
    for name in names:
        try:
            graph = load(name, device)
        except Missing as reason:
            left_out[name] = str(reason)
            print(f'{name} left out: {reason}', file=sys.stderr)
            continue
        yield graph
        del graph  # before the next one is drawn
