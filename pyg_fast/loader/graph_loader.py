"""Batches of small graphs, made on the device that uses them."""

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader

from ..ops._checks import to_device
from ..ops._numbers import check_number
from ._attributes import NotCollatable
from ._buckets import (
    BatchSizes,
    Bucket,
    Buckets,
    choose_buckets,
    sample_batches,
    sum_batches,
)
from ._collated import Collated
from ._levels import EDGES, Ints
from ._options import (
    check_bool,
    check_choice,
    refuse_unknown,
    resolve_device,
    resolve_replicas,
)
from ._place import Place
from ._read_graphs import GraphDataset, check_dataset, check_item, read_graphs
from ._selection import Draw, Draws

_log = logging.getLogger('pyg_fast')
_EDGE_ORDERS = ('sorted', 'dataset')
# They end, and give graphs in order or shuffled.
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
# Of batches whose numbers are made at once.
_MOST_BATCHES, _MOST_GRAPHS = 64, 1 << 16


class GraphLoader(DataLoader):
    r"""PyG's :class:`~torch_geometric.loader.DataLoader` for datasets of small graphs, such as
    molecules, that stay on the device.

    The dataset is read and collated once, and its edges are sorted once. A batch is then a gather
    of the rows of its graphs on :obj:`device`: it takes a few launches, and neither a sort nor a
    wait for the GPU.

    .. code-block:: python

        loader = GraphLoader(dataset, batch_size=256, shuffle=True, device='cuda')
        for batch in loader:
            out = model(batch.x, batch.edge_index, batch.batch)

    **Batches** are those of PyG's loader: a :class:`~torch_geometric.data.Batch` with the same
    attributes, :obj:`batch` and :obj:`ptr`, the same increments (:meth:`__inc__`) and dimensions
    (:meth:`__cat_dim__`), which each graph is asked for once. :obj:`batch[i]` and
    :obj:`batch.to_data_list()` give the graphs back. Given the same seed or :obj:`generator`,
    batches have the graphs of PyG's.

    **Edges** are sorted by destination, then source, and with them :obj:`edge_attr` and all other
    attributes that have a row for each edge in every graph. The :obj:`edge_index` is an
    :class:`~torch_geometric.EdgeIndex` that kernels read without sorting; for
    :func:`torch.compile` of PyG's layers use :obj:`batch.edge_index.as_tensor()`. With
    :obj:`edge_order='dataset'` edges keep their order, and the :obj:`edge_index` is a plain tensor;
    for layers of PyG that are not accelerated that takes less time.
    Positions of edges that an attribute holds, such as those of reverse edges, follow the order if
    a class of yours increments them by the number of edges; code for which edge :obj:`i ^ 1` is the
    reverse of edge :obj:`i` needs the order of the dataset. Graphs of which nobody knows whether an
    attribute is one of edges need the order of the dataset: where all have as many edges as nodes,
    and its name has neither "edge" nor "node", or where :obj:`edge_attr` lacks rows; the loader
    keeps it then, and logs why.

    **Changed data.** The dataset is copied: later changes of it have no effect on batches. Its
    :obj:`transform` runs once, when the loader is made.

    **Memory.** On CUDA an attribute that does not fit into half of the free memory stays in pinned
    host memory, from which the GPU reads the rows of a batch.

    **Padding.** With :obj:`pad='buckets'` batches have one of at most six sizes, as CUDA graphs and
    compiled code with static shapes need. One more graph takes the padding:
    its attributes are zero, its strings and objects :obj:`None`, and its edges connect its own
    nodes, of which it has at least two, so results of the other graphs stay the same.
    :obj:`batch.node_mask`, :obj:`batch.edge_mask` and :obj:`batch.graph_mask` are :obj:`False`
    there; :obj:`batch.num_graphs` counts that graph. Attributes with other rows than one for each
    node, edge or graph keep their sizes. The sizes are chosen from sums of shuffled graphs, for a
    :obj:`sampler` of your own from its first epoch, which is not padded. Batches of fewer graphs,
    such as the last one, and those above the largest size are not padded; their masks are
    :obj:`True` everywhere. :attr:`num_unpadded` counts the latter.

    **What only PyG can collate** goes through its own code and then to :obj:`device`:
    :class:`~torch_geometric.data.HeteroData`, sparse matrices, nested tensors, tensors that require
    gradients. The logger :obj:`pyg_fast` tells it once. Such batches cannot be padded.

    Arguments of :class:`torch.utils.data.DataLoader` about worker processes and pinned memory
    (:obj:`num_workers`, :obj:`persistent_workers`, :obj:`pin_memory`, ...) are accepted and have no
    effect.

    Args:
        dataset (Dataset or [Data]): The graphs: an
            :class:`~torch_geometric.data.InMemoryDataset`, a list of
            :class:`~torch_geometric.data.Data`, or any dataset that can be indexed, such as a
            :class:`~torch.utils.data.Subset`.
        batch_size (int): Number of graphs of a batch. (default: :obj:`1`)
        shuffle (bool): Shuffle the graphs in every epoch. (default: :obj:`False`)
        follow_batch ([str], optional): Attributes :obj:`key` of which batches have
            :obj:`key_batch` and :obj:`key_ptr`. (default: :obj:`None`)
        exclude_keys ([str], optional): Attributes that batches do not have.
            (default: :obj:`None`)
        device (torch.device or str, optional): The device of the batches. (default: :obj:`None`,
            that of the dataset)
        pad (str, optional): :obj:`"buckets"` rounds the sizes of batches up.
            (default: :obj:`None`)
        edge_order (str): :obj:`"sorted"` or :obj:`"dataset"`. (default: :obj:`"sorted"`)
        sampler (Sampler, optional): Gives the graphs one by one, for example a
            :class:`~torch.utils.data.distributed.DistributedSampler`. (default: :obj:`None`)
        batch_sampler (Sampler, optional): Gives lists of graphs. (default: :obj:`None`)
        drop_last (bool): Drop a last batch that is smaller. (default: :obj:`False`)
        generator (torch.Generator, optional): Of the order of the graphs.
            (default: :obj:`None`, torch's own)
        rank (int, optional): Number of this replica, if several share the graphs as by a
            :class:`~torch.utils.data.distributed.DistributedSampler`, whose epochs are counted
            here. (default: :obj:`None`)
        num_replicas (int, optional): Number of replicas. (default: :obj:`None`)

    Raises:
        TypeError: If an argument has a type that is not supported, or graphs are of several
            classes.
        ValueError: If a value does not fit; if graphs differ in their attributes, in dtypes, or in
            shapes beside the number of rows; or the dataset applies a random transform.
        IndexError: If an edge names a node that its graph does not have.
    """

    #: The number of batches that were too large for all buckets.
    num_unpadded: int
    #: The number of the next epoch.
    epoch: int

    def __init__(
        self,
        dataset: GraphDataset,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        device: torch.device | str | None = None,
        pad: str | None = None,
        edge_order: str = 'sorted',
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: object,
    ) -> None:
        check_dataset(dataset)
        _check_options(batch_size, shuffle, drop_last, edge_order, pad, kwargs)
        self.pad, self.edge_order = pad, edge_order
        self.rank, self.num_replicas = rank, num_replicas
        self.num_unpadded = self.epoch = 0
        if rank is not None or num_replicas is not None:
            if sampler is not None or batch_sampler is not None:
                raise ValueError(
                    "'sampler' and 'batch_sampler' must be given without 'rank' and 'num_replicas'"
                )
            sampler = _share(dataset, rank, num_replicas, shuffle, drop_last, generator)
            shuffle = False
        super().__init__(
            dataset, batch_size, shuffle, follow_batch, exclude_keys, sampler=sampler,
            batch_sampler=batch_sampler, drop_last=drop_last, generator=generator,
        )  # fmt: skip
        self._read(read_graphs(dataset), device)
        self._seen: dict[int, list[tuple[int, int]]] = {}
        self._buckets = None if pad is None else self._choose_buckets()

    def _read(self, graphs: Sequence[object], device: torch.device | str | None) -> None:
        """Collates the dataset, or keeps the graphs for PyG's code."""
        self._collated: Collated | None = None
        self._graphs: Sequence[object] | None = None
        first = graphs[0]
        check_item(first)
        is_plain = isinstance(first, Data) and not isinstance(first, Batch)
        self.device = None if device is None else to_device(device)
        try:
            if not is_plain:
                raise NotCollatable(f'the dataset holds objects of type {type(first).__name__}')
            self.device = resolve_device(first, device)
            self._collated = Collated(
                graphs, Place(self.device, self.pad is not None),
                self.edge_order == 'sorted', self.follow_batch or (), self.exclude_keys or (),
            )  # fmt: skip
        except NotCollatable as reason:
            if self.pad is not None:
                raise ValueError(
                    f"'pad' must be None, since PyG's code makes the batches: {reason}"
                ) from reason
            _log.warning("GraphLoader makes batches by PyG's code: %s", reason)
            self._graphs = graphs

    def __iter__(self) -> Iterator[BaseData]:
        if self._graphs is not None:
            return (self._make_by_pyg(ids) for some in self._begin() for ids in some)
        return (self._make_batch(draw) for draw in self._draw())

    def _draw(self) -> Iterator[Draw]:
        """Begins an epoch, and gives the graphs of each batch."""
        return self._draws(self._begin())

    def _begin(self) -> Iterator[Ints]:
        """Begins an epoch, and gives the graphs of some batches at a time."""
        # As torch's loader, so that batches of the same seed are the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if self.num_replicas is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return self._ids()

    def _draws(self, batches: Iterator[Ints]) -> Iterator[Draw]:
        assert self._collated is not None
        for ids in batches:
            draws = Draws(self._collated.levels, ids)
            for number in range(len(ids)):
                yield self._fit(Draw(draws, number))
        if self.pad is not None and self._buckets is None:
            self._buckets = self._choose_seen()

    def _ids(self) -> Iterator[Ints]:
        if self.batch_size is None or type(self.sampler) not in _SAMPLERS:
            for ids in self.batch_sampler:
                yield _resolve_ids(ids, len(self.dataset))[None]
            return
        order, size = _order_of(self.sampler), self.batch_size
        whole = len(order) - len(order) % size
        step = size * max(1, min(_MOST_BATCHES, _MOST_GRAPHS // size))
        for begin in range(0, whole, step):
            yield order[begin : min(begin + step, whole)].reshape(-1, size)
        if whole < len(order) and not self.drop_last:
            yield order[None, whole:]

    def __call__(self, index: Iterable[int]) -> BaseData:
        """The batch of these graphs, padded if it fits into a bucket.

        Raises:
            IndexError: If the dataset has no such graph.
            TypeError: If :obj:`index` holds no integers.
        """
        ids = _resolve_ids(index, len(self.dataset))
        if self._collated is None:
            return self._make_by_pyg(ids)
        return self._make_batch(self._fit(Draw(Draws(self._collated.levels, ids[None]), 0)))

    def _fit(self, draw: Draw) -> Draw:
        """The graphs with the padding of their batch, if it has one."""
        if self.pad is None:
            return draw
        count, nodes, edges = draw.num_rows[: EDGES + 1]
        if self._buckets is None:
            self._seen.setdefault(count, []).append((nodes, edges))
            return draw
        if count != self._buckets.num_graphs:
            return draw
        padding = self._buckets.fit(nodes, edges)
        if padding is None:
            self.num_unpadded += 1
        return draw._replace(padding=padding)

    def _make_batch(self, draw: Draw) -> BaseData:
        assert self._collated is not None
        return self._collated.make_batch(draw, masks=self.pad is not None)

    def _make_by_pyg(self, ids: Ints) -> BaseData:
        assert self._graphs is not None
        batch = self.collate_fn([self._graphs[k] for k in ids.tolist()])
        return batch if self.device is None else _move(batch, self.device)

    def _choose_buckets(self) -> Buckets | None:
        """The buckets of torch's own samplers; None: the first epoch will show them."""
        assert self._collated is not None
        nodes, edges = self._collated.num_nodes, self._collated.num_edges
        for name in self._collated.own_masks:
            raise ValueError(
                f"'dataset' must have no attribute {name!r} with pad=, which tells by it what is "
                f"no padding: rename it, or pass exclude_keys=['{name}']"
            )
        if not self._collated.can_be_padded:
            raise ValueError(
                "'pad' needs graphs that tell their number of nodes, and whose edge_index PyG "
                'increments by it: pass pad=None'
            )
        if self.batch_size is None or type(self.sampler) not in _SAMPLERS:
            return None
        size = min(self.batch_size, len(self.sampler), len(nodes))
        if type(self.sampler) is SequentialSampler:
            order = np.arange(len(nodes))
            seen = BatchSizes(sum_batches(nodes, order, size), sum_batches(edges, order, size))
            return choose_buckets(seen, size, None)
        most = Bucket(*(int(np.sort(each)[-size:].sum()) for each in (nodes, edges)))
        return choose_buckets(sample_batches(nodes, edges, size), size, most)

    def _choose_seen(self) -> Buckets | None:
        """The buckets of a sampler by the batches of its first epoch."""
        if not self._seen:
            return None
        num_graphs, seen = max(self._seen.items(), key=lambda item: len(item[1]))
        assert self._collated is not None
        nodes, edges = self._collated.num_nodes, self._collated.num_edges
        most = Bucket(*(int(np.sort(each)[-num_graphs:].sum()) for each in (nodes, edges)))
        self._seen = {}
        sizes = np.array(seen, dtype=np.int64)
        return choose_buckets(BatchSizes(sizes[:, 0], sizes[:, 1]), num_graphs, most)

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """The numbers of nodes and of edges of padded batches."""
        return () if self._buckets is None else self._buckets.sizes

    def __repr__(self) -> str:
        parts = [f'{len(self.dataset)} graphs', f'batch_size={self.batch_size}']
        if self.device is not None:
            parts.append(f"device='{self.device}'")
        if self._buckets is not None:
            sizes = [tuple(size) for size in self.buckets]
            parts.append(f'buckets={sizes}, overhead={self._buckets.overhead:.1%}')
        elif self.pad is not None:
            parts.append('buckets after the first epoch')
        return f'{type(self).__name__}({", ".join(parts)})'


def _check_options(
    batch_size: int, shuffle: bool, drop_last: bool, edge_order: str, pad: str | None,
    others: Mapping[str, object],
) -> None:  # fmt: skip
    refuse_unknown(GraphLoader, others)
    check_number('batch_size', batch_size, 1)
    check_bool('shuffle', shuffle)
    check_bool('drop_last', drop_last)
    check_choice('edge_order', edge_order, _EDGE_ORDERS)
    if pad not in (None, 'buckets'):
        raise ValueError(f"'pad' must be 'buckets' or None, got {pad!r}")


def _share(
    dataset: GraphDataset, rank: int | None, num_replicas: int | None, shuffle: bool,
    drop_last: bool, generator: torch.Generator | None,
) -> DistributedSampler:  # fmt: skip
    """The sampler of one replica."""
    rank, count = resolve_replicas(rank, num_replicas)
    seed = 0 if generator is None else generator.initial_seed() % 2**31
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        count,
        rank,
        shuffle,
        seed,
        drop_last,
    )


def _order_of(sampler: Iterable[int]) -> Ints:
    """What torch's samplers give, without a Python number for each graph."""
    if type(sampler) is SequentialSampler:
        return np.arange(len(sampler))
    if type(sampler) is not RandomSampler or sampler.replacement:
        return np.fromiter(sampler, dtype=np.int64)
    count, wanted, generator = len(sampler.data_source), sampler.num_samples, sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    # It draws one permutation more than it gives, if that is a multiple.
    orders = [torch.randperm(count, generator=generator) for _ in range(wanted // count + 1)]
    return torch.cat(orders)[:wanted].cpu().numpy()


def _resolve_ids(index: object, count: int) -> Ints:
    """The numbers of graphs, negative ones counted from the end."""
    if not isinstance(index, Iterable) or isinstance(index, str):
        raise TypeError(
            f"'index' must be a list of numbers of graphs, got {type(index).__name__}: loader([0])"
        )
    try:
        ids = np.array([operator.index(k) for k in index], dtype=np.int64)
    except TypeError as error:
        raise TypeError(f"'index' must hold numbers of graphs: {error}") from error
    if len(ids) and not (-count <= ids.min() and ids.max() < count):
        wrong = ids[(ids < -count) | (ids >= count)][0]
        raise IndexError(f'the dataset has {count} graphs, got the number {wrong}')
    return np.where(ids < 0, ids + count, ids)


def _move(batch: object, device: torch.device) -> object:
    """What PyG's loader made, on the device."""
    if isinstance(batch, (BaseData, Tensor)):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, '_make'):
        return batch._make([_move(value, device) for value in batch])
    return [_move(value, device) for value in batch] if isinstance(batch, list) else batch
