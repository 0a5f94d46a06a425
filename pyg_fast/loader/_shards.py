"""Features whose rows are divided over the processes of a group."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._checks import check_strided
from ..ops._ids import is_readable
from ..ops.gather_rows import gather_rows
from ._processes import Group, gather_objects, is_distributed, raise_first, text_of
from ._versions import State, state_of

#: Number of rows, and what the parts of all processes must have in common: dtype, row shape, number
#: of nodes.
_Part: TypeAlias = tuple[int, str, tuple[int, ...], int]

_ACTIVE, _ENDED, _FAILED = range(3)  # what a process says in a round


class ShardedFeatures:
    r"""Features of all nodes, of which every process of a group holds some rows.

    Set it as an attribute of :obj:`data`, in place of the tensor, and set :obj:`data.num_nodes`,
    which it does not tell. A :class:`FastNeighborLoader` then reads the rows of each batch from the
    processes that hold them, by all-to-all collectives: on CUDA over the group's own backend, NCCL,
    on a CPU over gloo. Batches hold plain tensors, with the same rows as from the whole tensor.
    PyG's :meth:`model.inference` needs the whole one.

    .. code-block:: python

        torch.distributed.init_process_group('nccl')
        data.num_nodes = num_nodes
        data.x = ShardedFeatures(part, num_nodes)  # e.g. rows that only this process has read
        loader = FastNeighborLoader(data, [15, 10, 5], batch_size=1024, device='cuda', seed=0,
                                    rank=rank, num_replicas=num_replicas)

    **Collectives.** All processes of the group make it, make loaders of it, and take batches, in
    the same order of calls. Rows are exchanged in the thread that takes a batch, when the loader
    returns it: collectives of the training step, before and after, have the same order in all
    processes. What the exchange needs is sampled, matched and sorted ahead. Processes may have
    different numbers of batches: at the end of its epoch, each answers until all have ended. To
    leave an epoch early, do so in all processes after the same number of batches. If making a
    batch fails in one process, all of them raise an error; if a process ends, the others raise
    one; if it does not answer, they do after the timeout of the group (with NCCL alone, of a gloo
    group that the loader makes: initialise :obj:`'cpu:gloo,cuda:nccl'` to choose it).

    **Writes.** No copy of :obj:`part` is made: an exchange reads it on the current stream of the
    process that holds it. After a write to any part that changes its version, no batch reuses rows
    of the one before (:obj:`match`); after other writes call :meth:`FastNeighborLoader.refresh` in
    all processes.

    Args:
        part (Tensor): The rows of this process :math:`(n, *)`, of any dtype, without gradients: on
            the device of the batches, or for a GPU in pinned host memory. Process 0 holds the
            first nodes, process 1 the next ones, and so on.
        num_nodes (int): Number of nodes of the graph, the sum of all :math:`n`.
        group (ProcessGroup, optional): The processes. (default: :obj:`None`, all; without
            initialized :mod:`torch.distributed` this process alone)

    Raises:
        TypeError: If an argument has a type that is not supported.
        ValueError: If the parts do not fit together.
        RuntimeError: If the arguments of another process are wrong.
    """

    #: The rows of this process.
    part: Tensor
    #: Number of nodes of the graph.
    num_nodes: int
    #: The processes, or :obj:`None` for all.
    group: Group
    #: The first node of each process, and the number of nodes.
    bounds: tuple[int, ...]

    def __init__(self, part: Tensor, num_nodes: int, group: Group = None) -> None:
        own = error = None
        try:
            own = _describe_part(part, num_nodes)
        except (TypeError, ValueError) as reason:
            error = reason
        replies = gather_objects((own, text_of(error)), group)
        if error is not None:
            raise error
        raise_first('ShardedFeatures', [text for _, text in replies], None)
        parts = [part for part, _ in replies if part is not None]
        counts, kinds = [part[0] for part in parts], [part[1:] for part in parts]
        if len(set(kinds)) > 1:
            raise ValueError(
                "'part' and 'num_nodes' must have the same dtype, row shape and value in all "
                f'processes, got {kinds}'
            )
        if sum(counts) != num_nodes:
            raise ValueError(
                f"'part' must have {num_nodes} rows in all processes together, one for each of "
                f"'num_nodes', got {' + '.join(map(str, counts))}"
            )
        self.part, self.num_nodes, self.group = part, num_nodes, group
        self.bounds = tuple(sum(counts[:k]) for k in range(len(counts) + 1))

    @classmethod
    def split(
        cls, x: Tensor, group: Group = None, device: torch.device | str | None = None
    ) -> 'ShardedFeatures':
        r"""Keeps an equal part of a tensor that every process has.

        Args:
            x (Tensor): Features of all nodes :math:`(N, *)`, the same in all processes, e.g. in
                shared memory (:func:`share_data`).
            group (ProcessGroup, optional): The processes. (default: :obj:`None`, all)
            device (torch.device or str, optional): Where the part goes, a copy.
                (default: :obj:`None`, the device of :obj:`x`)
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"'x' must be a tensor, got {type(x).__name__}")
        if x.dim() == 0:
            raise ValueError("'x' must have a row for each node, got a scalar")
        rank, size = _place_in(group)
        start, end = (k * x.size(0) // size for k in (rank, rank + 1))
        device = x.device if device is None else torch.device(device)
        part = torch.empty(end - start, *x.shape[1:], dtype=x.dtype, device=device)
        part.copy_(x.detach()[start:end])
        if part.is_cuda:  # Exchanges may run on other streams.
            torch.cuda.current_stream(part.device).synchronize()
        return cls(part, x.size(0), group)

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows together."""
        return torch.Size((self.num_nodes, *self.part.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self.part.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.part.shape[1:]) * self.part.element_size()

    def __repr__(self) -> str:
        return f'{type(self).__name__}({list(self.shape)}, rows={self.part.size(0)})'

    def __deepcopy__(self, memo: dict[int, object]) -> 'ShardedFeatures':
        out = copy.copy(self)
        out.part = copy.deepcopy(self.part, memo)
        return out

    def __copy__(self) -> 'ShardedFeatures':
        out = object.__new__(type(self))
        out.__dict__.update(self.__dict__)
        return out

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"'{type(self).__name__}' cannot be pickled: other processes hold the rest of its rows"
        )


def _describe_part(part: Tensor, num_nodes: int) -> _Part:
    check_strided(part, 'part')
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int):
        raise TypeError(f"'num_nodes' must be an integer, got {type(num_nodes).__name__}")
    if part.dim() == 0:
        raise ValueError("'part' must have a row for each of its nodes, got a scalar")
    if part.requires_grad:
        raise ValueError("'part' must not require gradients: none flow to other processes")
    return part.size(0), str(part.dtype), tuple(part.shape[1:]), num_nodes


def _place_in(group: Group) -> tuple[int, int]:
    """This process's number in a group, and the number of processes."""
    if not is_distributed():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("'group' must contain this process")
    return rank, dist.get_world_size(group)


class Request(NamedTuple):
    """Rows that a batch needs."""

    ids: Tensor  # nodes: in the order of the processes that hold them, those of this one last
    counts: list[int]  # of each other process; 0 of this one
    position: Tensor  # of each node of the batch among them

    @property
    def num_moved(self) -> int:
        """The number of rows that other processes hold."""
        return sum(self.counts)


class Exchange:
    """Reads rows from the processes that hold them. A round knows nothing of batches: each process
    says which rows it needs, if any, and gets them.

    Rounds belong to the thread that takes batches: the order of collectives is that of the program.
    """

    def __init__(self, features: ShardedFeatures, device: torch.device) -> None:
        self._group, self._bounds, self._device = features.group, features.bounds, device
        self._rank, self.size = _place_in(features.group)
        self._offsets = torch.tensor(features.bounds, device=device)
        self._control = _control_of(features.group)
        # Where it takes tensors on the device of the batches.
        self._data = self._control if device.type == 'cpu' else features.group
        self._states: list[State] | None = None  # of the parts of this process
        #: Changes when a process has written its part: rows read before may be stale.
        self.generation = 0

    def check(self, key: str, features: ShardedFeatures) -> None:
        """Raises an error if rows of these features cannot be read with those of the others."""
        if features.group is not self._group or features.bounds != self._bounds:
            raise ValueError(
                f"'data.{key}' must be divided as the other ShardedFeatures of 'data', over the "
                'same group'
            )
        if not is_readable(features.part, self._device):
            raise ValueError(
                f"'data.{key}.part' must be on {self._device}, the device of the batches, or for a "
                f'GPU in pinned host memory, got {features.part.device}'
            )

    def plan(self, n_id: Tensor) -> Request:
        """Plans the request for the rows of nodes. It needs no other process."""
        ids, order = n_id.long().sort()
        cuts = torch.searchsorted(ids, self._offsets).tolist()
        if cuts[0] != 0 or cuts[-1] != ids.numel():
            raise IndexError(
                f'a batch must have nodes from 0 to {self._bounds[-1] - 1}, got some from '
                f'{int(ids[0])} to {int(ids[-1])}'
            )
        start, end = cuts[self._rank], cuts[self._rank + 1]
        order = torch.cat((order[:start], order[end:], order[start:end]))
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel(), device=order.device)
        counts = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        counts[self._rank] = 0
        return Request(n_id.long()[order], counts, position)

    def read_rows(
        self,
        request: Request,
        features: Sequence[ShardedFeatures],
        request_all: Callable[[], Request],
    ) -> tuple[Request, list[Tensor]]:
        """The rows of a request; if a process has written its part since the last round, those of
        `request_all`, which reuses none. Returns the request, too."""
        asked, changed, _ = self._round(_ACTIVE, request.counts, features)
        while changed:
            request = request_all()
            asked, changed, _ = self._round(_ACTIVE, request.counts, features)
        return request, self._send_rows(request, asked, features)

    def answer(self, features: Sequence[ShardedFeatures]) -> None:
        """Sends rows to the other processes until none of them makes batches any more."""
        nothing = self.plan(self._offsets[:0])
        while True:
            asked, changed, all_ended = self._round(_ENDED, nothing.counts, features)
            if all_ended:
                return
            if not changed:
                self._send_rows(nothing, asked, features)

    def fail(self, error: Exception) -> None:
        """Tells the other processes of an error, which the caller raises itself."""
        with suppress(RuntimeError):
            self._round(_FAILED, [0] * self.size, [], error)

    def _round(
        self, status: int, counts: list[int], features: Sequence[ShardedFeatures],
        error: Exception | None = None,
    ) -> tuple[list[int], bool, bool]:  # fmt: skip
        """Tells the others how many rows this process needs from each. Returns how many they need
        from it, whether a process has written its part, and whether all have ended: the last two
        are the same in all processes."""
        row_bytes = sum(part.row_bytes for part in features)
        states = [state_of(part.part) for part in features]
        before, self._states = self._states, states
        written = before is not None and states != before
        sent = torch.tensor([[count, status, row_bytes, written] for count in counts])
        got = torch.empty_like(sent)
        _all_to_all(got, sent, self._control)
        asked, others, sizes, changes = got.t().tolist()
        if _FAILED in others:
            texts = gather_objects(text_of(error), self._control)
            if error is None:
                raise_first('making a batch', texts, None)
        if any(size != row_bytes for size in sizes):
            raise RuntimeError(
                f"'data' must hold the same ShardedFeatures in all processes, got rows of {sizes} "
                'bytes'
            )
        self.generation += any(changes)
        return asked, any(changes), all(other == _ENDED for other in others)

    def _send_rows(
        self, request: Request, asked: list[int], features: Sequence[ShardedFeatures]
    ) -> list[Tensor]:
        """Sends rows to the processes that asked for them; returns those of the request."""
        num_moved, first = request.num_moved, self._bounds[self._rank]
        ids = request.ids.new_empty(sum(asked))
        _all_to_all(ids, request.ids[:num_moved], self._data, asked, request.counts)
        out = []
        for held in features:
            part = held.part.detach()
            sent = gather_rows(part, ids - first)
            rows = sent.new_empty(request.ids.numel(), *part.shape[1:])
            # As bytes, so that the backend need not know the dtype.
            size = held.row_bytes
            _all_to_all(
                _as_bytes(rows[:num_moved]), _as_bytes(sent), self._data,
                [count * size for count in request.counts], [count * size for count in asked],
            )  # fmt: skip
            rows[num_moved:] = gather_rows(part, request.ids[num_moved:] - first)
            out.append(rows)
        return out


def _all_to_all(
    out: Tensor, sent: Tensor, group: Group, out_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> None:  # fmt: skip
    if not is_distributed():
        out.copy_(sent)  # of the only process, to itself
        return
    try:
        dist.all_to_all_single(out, sent, out_sizes, sent_sizes, group=group)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as reason:
        raise RuntimeError(
            'features of other processes cannot be read: one of them has ended, or does not take '
            'batches any more'
        ) from reason


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _control_of(group: Group) -> Group:
    """A group of the same processes that takes tensors on the CPU."""
    if not is_distributed() or 'cpu' in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    # Without sorting only where `group` was made so: not every torch has the option.
    new_group = partial(dist.new_group, ranks, backend='gloo', use_local_synchronization=True)
    return new_group() if ranks == sorted(ranks) else new_group(sort_ranks=False)
