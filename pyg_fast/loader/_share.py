"""One copy of a graph in host memory, shared by all processes of a machine."""

import io
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from typing import BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData

from ..graph._cache import cache_of, store
from ..sparse.graph import Graph
from ._processes import Group, gather_objects, is_distributed, raise_first, text_of

T = TypeVar('T')

_ALIGNMENT = 4096  # page size: a GPU driver locks whole pages
_MEMORY = '/dev/shm'


def share_data(make_data: Callable[[], T], group: Group = None) -> T:
    r"""Makes data in one process of each machine and shares its tensors with the others there.

    Processes started by :obj:`torchrun` share no memory, so each of them would hold the whole
    graph. This function writes it once to shared memory, aligned to pages for the GPU driver, and
    every process maps it, including :class:`~torch_geometric.EdgeIndex` caches and the data of our
    kernels. All processes must call it. The memory has no name after all have mapped it, so it is
    freed when the last process ends, in any way.

    Where processes are forked or spawned, PyG's :meth:`data.share_memory_` does the same.

    .. code-block:: python

        torch.distributed.init_process_group('nccl')
        data = share_data(lambda: ToCSR()(PygNodePropPredDataset('ogbn-products')[0]))

    Args:
        make_data (callable): Returns data on the CPU; besides tensors anything that can be
            pickled. Only the first process of each machine calls it.
        group (ProcessGroup, optional): The processes. (default: :obj:`None`, all; without
            initialized :mod:`torch.distributed` the result is :obj:`make_data()`)

    Returns:
        The result of :obj:`make_data`. All processes see writes to its tensors.

    Raises:
        RuntimeError: In all processes, if one of them cannot make, share or map the data.
        OSError: As its cause, if there is not enough shared memory.
    """
    if isinstance(make_data, BaseData) or not callable(make_data):
        raise TypeError(f"'make_data' must be callable, got {type(make_data).__name__}")
    if not is_distributed():
        return make_data()
    rank = dist.get_rank(group)
    machines = gather_objects(_machine(), group)
    leader = machines.index(machines[rank])
    path = None
    error: Exception | None = None
    try:
        if rank == leader:
            try:
                path = _write(make_data())
            except Exception as reason:
                error = reason
        replies = gather_objects((path, text_of(error)), group)
        raise_first('share_data', [text for _, text in replies], error)
        data = None
        try:
            data = _map(replies[leader][0])  # type: ignore[arg-type]
        except Exception as reason:
            error = reason
        # Also a barrier: all processes have mapped the file, so its name can be removed.
        raise_first('share_data', gather_objects(text_of(error), group), error)
    finally:
        if path is not None:
            os.unlink(path)
    return data  # type: ignore[return-value]


def _machine() -> str:
    # Containers of one host may share the name but not the shared memory.
    folder = os.stat(_folder())
    return f'{socket.gethostname()}:{folder.st_dev}:{folder.st_ino}'


def _folder() -> str:
    return _MEMORY if os.path.isdir(_MEMORY) else tempfile.gettempdir()


class _Pickler(pickle.Pickler):
    """Omits dense tensors, and records them."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not Tensor or value.layout != torch.strided or value.requires_grad:
            return None
        if value.device.type != 'cpu':
            raise ValueError(f'data to share must be on the CPU, got a tensor on {value.device}')
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def _write(data: object) -> str:
    """Writes data to a new file of the shared memory, and returns its path."""
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickler.dump((data, [_graphs(index) for index in _edge_indices(data)]))
    tensors = [tensor.contiguous() for tensor in pickler.tensors]
    layout, size = [], 0
    for tensor in tensors:
        layout.append((size, tensor.dtype, tuple(tensor.shape)))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    head = pickle.dumps((size, layout, skeleton.getvalue()))
    file, path = tempfile.mkstemp(prefix='pyg_fast_', dir=_folder())
    try:
        # Without allocation, a lack of memory would kill the process at its first write.
        os.posix_fallocate(file, 0, size + len(head) + 8)
        memory = _memory(path, size)
        for (start, dtype, shape), tensor in zip(layout, tensors, strict=True):
            _view(memory, start, dtype, shape).copy_(tensor)
        os.pwrite(file, head + len(head).to_bytes(8, 'little'), size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path


def _map(path: str) -> object:
    """The data that :func:`_write` wrote, mapped from the file."""
    with open(path, 'rb') as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(8), 'little')
        file.seek(-8 - length, os.SEEK_END)
        size, layout, skeleton = pickle.loads(file.read(length))
    memory = _memory(path, size)
    tensors = [_view(memory, *place) for place in layout]
    data, graphs = _Unpickler(io.BytesIO(skeleton), tensors).load()
    for edge_index, own in zip(_edge_indices(data), graphs, strict=True):
        for request, graph in own.items():
            store(edge_index, request, graph)
    return data


def _memory(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _view(memory: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    # `.data`: views of one tensor would share a version.
    return memory[start : start + count].view(dtype).view(shape).data


def _edge_indices(data: object) -> list[EdgeIndex]:
    if not isinstance(data, (Data, HeteroData)):
        return []
    return [v for store in data.stores for v in store.values() if isinstance(v, EdgeIndex)]


def _graphs(edge_index: EdgeIndex) -> dict:
    entries = cache_of(edge_index).entries.items()
    return {request: entry.value for request, entry in entries if isinstance(entry.value, Graph)}
