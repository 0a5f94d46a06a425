"""What the loaders of sampled mini-batches share, whatever their seeds are."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch_geometric.data import Data
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NodeSamplerInput, NumNeighbors

from ..ops._numbers import check_number
from ._core import Core
from ._links import LinkInput
from ._mistakes import warn_of_empty_mask, warn_of_stale_perm
from ._options import (
    BatchOptions,
    GraphData,
    OutputTransform,
    SamplingOptions,
    StorageOptions,
    resolve_seed,
)
from ._pipeline import InlineIterator, ThreadedIterator, Transform
from ._seeds import NodeInput, SeedBatches, mix_seeds
from ._stats import LoaderStats

T = TypeVar('T')

_PREFETCH = 2  # batches that wait on the device


class SampledLoader:
    """A loader of mini-batches that are sampled around seeds."""

    #: All positions in the list of seeds.
    dataset: range
    #: Seeds per batch.
    batch_size: int
    #: Whether to drop seeds that do not fill a batch.
    drop_last: bool
    #: The number of the next epoch.
    epoch: int

    def _set_up(
        self, data: GraphData, seeds: NodeInput | LinkInput, sampling: SamplingOptions,
        batches: BatchOptions, storage: StorageOptions, seed: int | None,
        generator: torch.Generator | None, transform: Transform | None,
        custom_cls: Callable[[], Data] | None,
    ) -> None:  # fmt: skip
        """The constructor, of checked options."""
        seed = resolve_seed(seed, generator, batches)
        core = Core(data, seeds, sampling, storage, seed, custom_cls)
        if isinstance(seeds, NodeInput) and not len(core.seeds):
            warn_of_empty_mask(data, seeds.input_nodes, stacklevel=3)
        warn_of_stale_perm(data, stacklevel=3)
        self._core = core
        self._seeds = SeedBatches(len(core.seeds), batches, seed, seeds.argument)
        self.transform = transform
        self.epoch = self._calls = 0
        self._init_torch_loader(batches, generator)

    def _init_torch_loader(self, batches: BatchOptions, generator: torch.Generator | None) -> None:
        """Sets what torch's and PyG's loaders have. PyG's own constructor would make a sampler that
        needs other packages."""
        num_seeds = len(self._core.seeds)
        DataLoader.__init__(
            self, range(num_seeds), batches.batch_size,  # type: ignore[arg-type]
            batches.shuffle and num_seeds > 0, batches.sampler,
            batches.batch_sampler,  # type: ignore[arg-type]
            drop_last=batches.drop_last, generator=generator,
        )  # fmt: skip
        del self.collate_fn  # torch's attribute, which hides the method
        self.filter_per_worker = True  # As in PyG: collate_fn returns whole batches.

    def __len__(self) -> int:
        return len(self._seeds)

    def __iter__(self) -> InlineIterator | ThreadedIterator:
        epoch, core = self.epoch, self._core
        check_number('epoch', epoch)
        self.epoch += 1
        batches = core.make_batches(self._seeds.of_epoch(epoch), epoch)
        args = (batches, self.transform, core.meter, len(self))
        on_end = None if core.features.exchange is None else core.features.end_iterator
        if core.stream is None:
            return InlineIterator(*args, on_end)
        core.stream.wait_stream(torch.cuda.current_stream(core.device))
        return ThreadedIterator(*args, core.stream, _PREFETCH, on_end)

    def __call__(self, index: Tensor | list[int]) -> Any:
        """A batch of these seeds, given as positions in the list of seeds. Each call draws a new
        sample, in a sequence given by :obj:`seed`; on CUDA it waits for the batch.

        Raises:
            TypeError: If :obj:`index` does not hold integers.
            IndexError: If a position is negative or too large.
        """
        return self.filter_fn(self.collate_fn(index))

    def collate_fn(self, index: Tensor | list[int]) -> Any:
        """As :meth:`__call__`, for PyG's and torch's loaders that combine others."""
        worker = get_worker_info()  # Of ZipLoader, for example: each has a copy of this loader.
        if worker is not None and self._core.features.exchange is not None:
            raise RuntimeError(
                'batches with ShardedFeatures cannot be made in a worker process, which is not in '
                "the group: use 'num_workers=0'"
            )
        number, own = self._calls, 0 if worker is None else worker.seed
        self._calls += 1
        core = self._core
        batch = core.make_batch(index, mix_seeds(core.seed, number, own, 2))
        return batch if self.transform is None else self.transform(batch)

    def filter_fn(self, out: T) -> T:
        """Returns a batch of :meth:`collate_fn` unchanged: it is complete."""
        return out

    def refresh(self) -> None:
        """Reads all copies of attributes again; the next batch reuses no rows of the previous one.

        Call it after writes that no version counter sees: by NumPy, through :obj:`.data`, by
        collectives, fused optimizers, CUDA graphs or other processes. When it returns, the copies
        are made, and the originals may be written again. Batches that were fetched ahead keep their
        rows: up to three on CUDA, none before an epoch begins.
        """
        self._core.features.refresh()

    @property
    def data(self) -> GraphData:
        """The given graph, with :obj:`features='sharded'` a copy that holds
        :class:`ShardedFeatures`. For another graph make another loader."""
        return self._core.given

    @property
    def input_data(self) -> NodeSamplerInput | EdgeSamplerInput:
        """The seeds and :obj:`batch.input_id` of each, with the labels that batches have: a copy.
        For other seeds make another loader."""
        return self._core.seeds.to_pyg()

    @property
    def custom_cls(self) -> Callable[[], Data] | None:
        """As given."""
        return self._core.custom_cls

    @property
    def transform_sampler_output(self) -> OutputTransform | None:
        """As given."""
        return self._core.sampling.transform

    def enable_cpu_affinity(self, loader_cores: object = None) -> NoReturn:
        """Not supported: this loader has no worker processes.

        Raises:
            ValueError: Always, as PyG's loader without workers.
        """
        raise ValueError(
            "'enable_cpu_affinity' needs worker processes, which this loader does not have: choose "
            'the cores of the process with os.sched_setaffinity or taskset'
        )

    def enable_multithreading(self, worker_threads: int | None = None) -> NoReturn:
        """Not supported: this loader has no worker processes.

        Raises:
            ValueError: Always, as PyG's loader without workers.
        """
        raise ValueError(
            "'enable_multithreading' needs worker processes, which this loader does not have: its "
            'kernels use the threads of torch.set_num_threads'
        )

    @property
    def stats(self) -> LoaderStats:
        """The statistics of the loader so far."""
        return self._core.meter.read(self._core.stream)

    def reset_stats(self) -> None:
        """Starts counting anew."""
        self._core.meter.reset()

    def __repr__(self) -> str:
        core, options = self._core, self._seeds.options
        parts = [
            f'num_neighbors={core.num_neighbors}', f'batch_size={options.batch_size}',
            f'seeds={len(core.seeds)}', f'batches={len(self)}', f"device='{core.device}'",
        ]  # fmt: skip
        parts += [f'{name}=True' for name in ('shuffle', 'drop_last') if getattr(options, name)]
        return f'{type(self).__name__}({", ".join(parts)})'


class NamedSampler(BaseSampler):
    """The part of a sampler that PyG's models read."""

    edge_permutation = None

    def __init__(self, num_neighbors: list[int] | dict[Any, list[int]]) -> None:
        self.num_neighbors = NumNeighbors(num_neighbors)

    def sample_from_nodes(self, index: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            'the sampler of a loader cannot sample: call the loader with positions of seeds, or '
            'use pyg_fast.ops.neighbor_sample'
        )

    def sample_from_edges(self, index: object, neg_sampling: object = None) -> NoReturn:
        raise NotImplementedError(
            'the sampler of a loader cannot sample: make a FastLinkNeighborLoader for edges'
        )
