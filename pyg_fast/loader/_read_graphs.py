"""Reads the graphs of a dataset, once."""

import pickle
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from torch_geometric.data import Batch, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.transforms import Compose, ComposeFilters
from torch_geometric.typing import TensorFrame
from tqdm import tqdm

T = TypeVar('T')

# Transforms of PyG that give another result at each call; so do all whose names begin with Random.
_RANDOM = frozenset((
    'AddLaplacianEigenvectorPE', 'AddRandomMetaPaths', 'FixedPoints', 'HalfHop',
    'NodePropertySplit', 'RootedRWSubgraph', 'SamplePoints',
))  # fmt: skip
_SLOW = 2.0  # seconds, after which a bar shows the progress


class GraphDataset(Protocol):
    """A dataset that can be indexed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


def check_dataset(dataset: object) -> None:
    """Raises unless the dataset can be indexed, holds a graph, and gives each the same at every
    call."""
    if isinstance(dataset, BaseData):
        graphs = 'data.to_data_list()' if isinstance(dataset, Batch) else '[data]'
        raise TypeError(
            "'dataset' must be a list of Data or a dataset that can be indexed, got one "
            f'{type(dataset).__name__}: write {graphs}'
        )
    is_text = isinstance(dataset, (str, bytes))
    if not isinstance(dataset, Sized) or not hasattr(dataset, '__getitem__') or is_text:
        raise TypeError(
            "'dataset' must be a list of Data or a dataset that can be indexed, got "
            f'{type(dataset).__name__}'
        )
    if len(dataset) == 0:
        raise ValueError("'dataset' must hold at least one graph")
    for transform in _transforms_of(dataset):
        name = type(transform).__name__
        if name in _RANDOM or name.startswith('Random'):
            raise ValueError(
                f"'dataset' applies {name}, which is random, and a GraphLoader reads each graph "
                'once: apply it to the batches, or use torch_geometric.loader.DataLoader'
            )


def check_item(item: object) -> None:
    """Raises for an item of a dataset that is neither a graph nor anything that PyG batches with
    graphs."""
    if isinstance(item, (str, bytes)) or not isinstance(
        item, (BaseData, Tensor, TensorFrame, float, int, Mapping, Sequence)
    ):
        raise TypeError(f"'dataset' must hold graphs, got {type(item).__name__} as graph 0")


def _transforms_of(dataset: object) -> Iterator[object]:
    if isinstance(dataset, Subset):
        yield from _transforms_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _transforms_of(part)
    else:
        yield from _parts_of(getattr(dataset, 'transform', None))


def _parts_of(transform: object) -> Iterator[object]:
    if isinstance(transform, (Compose, ComposeFilters)):
        parts = transform.transforms if isinstance(transform, Compose) else transform.filters
        for part in parts:
            yield from _parts_of(part)
    elif transform is not None:
        yield transform


def _state_of_random() -> bytes:
    """The state of the generators that transforms draw from."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


def with_bar(items: Sequence[T], name: str) -> Iterator[T]:
    """The items; a bar shows the progress if it takes long."""
    yield from tqdm(items, name, unit='graph', delay=_SLOW)


def read_graphs(dataset: GraphDataset) -> Sequence[object]:
    """All graphs of a dataset."""
    if isinstance(dataset, (list, tuple)):
        return dataset
    copies = dataset._data_list if isinstance(dataset, InMemoryDataset) else None
    before = _state_of_random()
    graphs = [dataset[k] for k in with_bar(range(len(dataset)), 'reading graphs')]
    if _state_of_random() != before:
        warnings.warn(
            "'dataset' drew random numbers while a GraphLoader read its graphs, which it does "
            'once: all epochs have the same. Apply a random transform to the batches, or use '
            'torch_geometric.loader.DataLoader', stacklevel=3,
        )  # fmt: skip
    if isinstance(dataset, InMemoryDataset):
        dataset._data_list = copies  # PyG would keep every graph a second time.
    return graphs
