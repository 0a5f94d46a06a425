"""Execution paths: the rows and edges of each layer's backward pass when only some nodes train."""

import copy
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj

from ...graph._cache import Entry
from ...graph.signature import hash_of, signature_of
from ...ops._edges import is_capturing
from ...ops.path import Rows, Watch, check_counter, watched
from ...sparse.graph import Graph
from ...sparse.groups import check_size
from ...sparse.operator import SparseOperator

T = TypeVar('T')


class ExecutionPath:
    r"""The part of a graph that one layer's backward pass needs, as in the
    `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on GPUs"
    <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathcal{S}_{\ell} = \mathcal{S}_{\ell + 1} \cup \mathcal{N}_{in}(\mathcal{S}_{\ell + 1}),
        \quad \mathcal{S}_L = \mathcal{V}_{train}

    The output gradient of layer :math:`\ell` of :math:`0, \ldots, L - 1` is non-zero only in
    :math:`\mathcal{S}_{\ell + 1}`, its input gradient only in :math:`\mathcal{S}_{\ell}`. The path
    holds the edges into :math:`\mathcal{S}_{\ell + 1}` except self-loops. A loss on the training
    nodes reads no others, so the result is exact. A path with most of the edges (with
    :obj:`forward`, of the nodes) stores no copy: its layer runs on the whole graph.

    :class:`~pyg_fast.transforms.ExecutionPaths` makes it; pass it to layers as :obj:`path`. A
    gradient outside of :math:`\mathcal{S}_{\ell + 1}` comes from a loss on other nodes, or from a
    layer that mixes nodes, such as a batch norm, and would be lost: the device counts it. The first
    backward pass, on a CPU each, raises an error; later ones on a GPU leave that to the next
    forward pass with this path (in compiled code to a later backward pass), or to :meth:`check`.

    Shapes:
        - **src_nodes:** :math:`\mathcal{S}_{\ell}`, ascending, :obj:`None` for all nodes;
          **dst_nodes:** :math:`\mathcal{S}_{\ell + 1}`, same form
        - **dst_position:** the position of each node in :math:`\mathcal{S}_{\ell + 1}`, or -1
          :math:`(N)`, int32; **src_position:** the same for :math:`\mathcal{S}_{\ell}`
        - **rowptr**, **col**, **perm**, **t_rowptr**, **t_col**, **t_perm:** the edges in CSR and
          CSC form as in :class:`~pyg_fast.graph.Graph`, between these rows; :obj:`perm` only for
          weighted graphs
        - **loops:** the number of self-loops of each node :math:`(N)`, :obj:`None` if none exist
        - **degree:** the number of edges into each node but self-loops :math:`(N)`, int32; only for
          paths without the graph, see :class:`~pyg_fast.transforms.ExecutionPaths`
        - **counter:** the number of gradient rows outside of the path :math:`(1)`, int64
    """

    layer: int
    num_layers: int
    num_nodes: int
    num_edges: int
    num_src: int  # nodes in S_l
    num_dst: int  # nodes in S_{l+1}
    num_path_edges: int
    graph_signature: tuple[int, ...]
    mask_signature: tuple[int, ...]
    forward: bool
    checks: bool
    strict: bool
    debug: bool
    group_size: int | None = None
    t_group_size: int | None = None
    rowptr: Tensor | None = None
    col: Tensor | None = None
    perm: Tensor | None = None
    t_rowptr: Tensor | None = None
    t_col: Tensor | None = None
    t_perm: Tensor | None = None
    src_nodes: Tensor | None = None
    src_position: Tensor | None = None
    dst_nodes: Tensor | None = None
    dst_position: Tensor
    self_row: Tensor | None = None
    t_self_row: Tensor | None = None
    loops: Tensor | None
    degree: Tensor | None = None
    counter: Tensor

    _TENSORS = (
        'rowptr', 'col', 'perm', 't_rowptr', 't_col', 't_perm', 'src_nodes', 'src_position',
        'dst_nodes', 'dst_position', 'self_row', 't_self_row', 'loops', 'degree', 'counter',
    )  # fmt: skip

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)
        self._noted: tuple[Tensor, torch.cuda.Event] | None = None
        self._is_noted = self._is_watched = False
        self._key = watched(self)
        self._derived: dict[Hashable, Entry] = {}
        # Read by captured CUDA graphs, and so by their replays.
        self._captured: dict[int, Entry] = {}

    # Methods of a tensor container ------------------------------------------------------------

    def _mapped(self, func: Callable[[Tensor], Tensor]) -> 'ExecutionPath':
        fields = {k: v for k, v in self.__dict__.items() if not k.startswith('_')}
        moved: dict[int, Tensor] = {}  # Fields that share a tensor keep sharing it.
        for name in self._TENSORS:
            tensor = fields.get(name)  # None in an older pickle
            if tensor is not None:
                if id(tensor) not in moved:
                    moved[id(tensor)] = func(tensor)
                fields[name] = moved[id(tensor)]
        return ExecutionPath(**fields)

    def to(
        self, device: torch.device | str | int | None = None, non_blocking: bool = False
    ) -> 'ExecutionPath':
        """The path on another device."""
        return self._mapped(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self) -> 'ExecutionPath':
        """The path in host memory."""
        return self.to(device='cpu')

    def cuda(
        self, device: torch.device | str | int | None = None, non_blocking: bool = False
    ) -> 'ExecutionPath':
        """The path on a GPU."""
        return self.to(device='cuda' if device is None else device, non_blocking=non_blocking)

    def pin_memory(self) -> 'ExecutionPath':
        """The path in pinned memory."""
        return self._mapped(Tensor.pin_memory)

    def share_memory_(self) -> 'ExecutionPath':
        """Moves the path into shared memory."""
        for name in self._TENSORS:
            if getattr(self, name) is not None:
                getattr(self, name).share_memory_()
        return self

    def clone(self) -> 'ExecutionPath':
        """A copy."""
        return self._mapped(Tensor.clone)

    def detach(self) -> 'ExecutionPath':
        """The path itself: it requires no gradient."""
        return self._mapped(Tensor.detach)

    def __copy__(self) -> 'ExecutionPath':
        return self._mapped(lambda t: t)

    def __deepcopy__(self, memo: dict) -> 'ExecutionPath':
        return self._mapped(lambda t: copy.deepcopy(t, memo))

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith('_')}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """The device of the path."""
        return self.dst_position.device

    @property
    def is_whole(self) -> bool:
        """Whether the path has most edges (or nodes), and so stores no copy of them."""
        return self.rowptr is None

    @property
    def stands_alone(self) -> bool:
        """Whether layers run on the path without the graph."""
        return self.degree is not None

    def in_degree(self, dtype: torch.dtype, loops: bool) -> Tensor:
        """The number of edges into each node of a path that stands alone, with or without
        self-loops."""
        assert self.degree is not None
        degree = self.degree.to(dtype)
        return degree if self.loops is None or not loops else degree + self.loops

    @property
    def num_bytes(self) -> int:
        """The memory of the path in bytes; shared tensors count for both layers."""
        tensors = {id(t): t for t in (getattr(self, name) for name in self._TENSORS)
                   if t is not None}  # fmt: skip
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def __repr__(self) -> str:
        share = self.num_path_edges / self.num_edges if self.num_edges else 1.0
        whole = ', whole graph' if self.is_whole else ''
        sizes = (self.group_size, self.t_group_size)
        groups = '' if sizes == (None, None) else f', group_sizes={sizes}'
        return (
            f'{type(self).__name__}(layer={self.layer} of {self.num_layers}, '
            f'active={self.num_dst} -> {self.num_src} of {self.num_nodes} nodes, '
            f'edges={self.num_path_edges} ({share:.1%} of the graph{whole}), '
            f'bytes={self.num_bytes}{groups})'
        )

    # Methods for layers ------------------------------------------------------------------------

    @property
    def src(self) -> Rows:
        """The rows of the layer's input."""
        return Rows(self.src_nodes, self.src_position)

    @property
    def dst(self) -> Rows:
        """The rows of the layer's output."""
        return Rows(self.dst_nodes, self.dst_position if self.dst_nodes is not None else None)

    def set_group_sizes(self, size: int | None, t_size: int | None) -> None:
        """Divides the sums of the forward and of the backward pass into groups of at most this
        many edges from now on; :obj:`None`: by rows.

        Raises:
            TypeError, ValueError: If a size is not a positive integer.
        """
        for name, value in (('size', size), ('t_size', t_size)):
            if value is not None:
                check_size(value, name)
        self.group_size, self.t_group_size = size, t_size
        self._derived.clear()

    @property
    def graph(self) -> Graph:
        """The edges of a path that is not whole."""
        if self.rowptr is None or self.col is None:
            raise ValueError('path.is_whole: no edges stored; use the original graph')
        graph = Graph(
            self.rowptr, self.col, self.perm, self.t_rowptr, self.t_col, self.t_perm,
            self.num_nodes if self.src_nodes is None else self.num_src, self.num_dst,
        )  # fmt: skip
        if self.group_size is None and self.t_group_size is None:
            return graph
        key = ('groups', self.group_size, self.t_group_size)
        if torch.compiler.is_compiling():  # Making groups waits for the device.
            return self._derived[key].value if key in self._derived else graph
        return self.derived(key, lambda: graph.with_groups(self.group_size, self.t_group_size))

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value that depends only on the structure of the graph, made once and ready on every
        CUDA stream."""
        if torch.compiler.is_compiling():
            return make()
        entry = self._derived.get(key)
        if entry is not None and entry.is_ready():
            if is_capturing(self.dst_position):
                self._captured[id(entry)] = entry
            return entry.value
        with torch.inference_mode(False), torch.no_grad():  # A later training step may use it.
            value = make()
        if not is_capturing(self.dst_position):
            self._derived[key] = Entry(value, wait=True)
        return value

    def part(self, op: SparseOperator) -> SparseOperator:
        """The path's part of an operator of all nodes, for :meth:`SparseOperator.on`."""
        if op.value is not None and self.perm is None:
            raise ValueError(
                "'path' was made for a graph without edge weights, but there are some: give "
                'ExecutionPaths their name'
            )

        def of(rows: Rows, scale: Tensor | None) -> Tensor | None:
            return None if scale is None else rows.of(scale)

        src, dst = self.src, self.dst
        diag, self_row = of(dst, op.diag), self.self_row
        t_diag = None if self_row is None else of(src, op.diag)
        return SparseOperator(
            self.graph, op.value, of(dst, op.row_scale), of(src, op.col_scale), diag, self_row,
            t_diag, self.t_self_row, op.mean,
        )  # fmt: skip

    def watch(self) -> Watch | None:
        """The check of the output gradient outside of the path, or None."""
        hidden = self.forward and self.debug  # NaN rows have NaN gradients, even where zero.
        if not self.checks or hidden:
            return None
        return Watch(
            self.dst_position, self.counter, self._key, self.layer, self.num_dst, self.strict
        )

    def note(self, counter: Tensor) -> None:
        """Takes note of the counter after a backward pass; in compiled code that is a copy, which
        becomes that of the path later."""
        if self._noted is not None and int(self._noted[0]):  # of an earlier one, in compiled code
            self.check()
        # The first backward pass waits for a GPU: a model that is wrong shall not take a step.
        if not self._is_watched or not counter.is_cuda:
            self._is_watched = True
            check_counter(counter, self.layer, self.num_dst)
            return
        if self._noted is None:
            host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self._noted = host, torch.cuda.Event()
        host, event = self._noted
        host.copy_(counter, non_blocking=True)  # while the backward pass continues
        event.record()
        self._is_noted = True

    def check_noted(self) -> None:
        """Raises if the last backward pass had a gradient outside of the path."""
        if not self._is_noted or is_capturing(self.counter):
            return
        self._is_noted = False
        count = self.counter
        if self._noted is not None:
            count, event = self._noted
            event.synchronize()
        if int(count):
            self.check()

    def check(self) -> None:
        """Raises if any backward pass since the last check had a gradient outside of the path.

        Waits for the device.

        Raises:
            ValueError: If so, with the number of rows.
        """
        self._is_noted = False
        if self._noted is not None:
            host, event = self._noted
            event.synchronize()
            host.zero_()  # Reported once.
        check_counter(self.counter, self.layer, self.num_dst)

    def check_fits(self, device: torch.device, edge_index: Adj, num_nodes: int) -> None:
        """Raises unless the path is of this graph and on the device of the features."""
        if self.device != device:
            raise ValueError(f"'path' is on {self.device}, but 'x' is on {device}")
        if num_nodes != self.num_nodes:
            raise ValueError(
                f"'path' is of a graph of {self.num_nodes} nodes, but there are {num_nodes}"
            )
        if isinstance(edge_index, Tensor) and _can_compare(edge_index):
            signature = signature_of(edge_index)
            # The order of edges matters only with weights.
            length = len(signature) if self.perm is not None else -1
            if signature[:length] != self.graph_signature[:length]:
                raise ValueError(
                    "'path' was made of another graph than 'edge_index', or the graph has changed "
                    'since: prepare the paths again'
                )


def _can_compare(edge_index: Tensor) -> bool:
    # A capture cannot wait for a hash; a prepared graph has it cached.
    if torch.compiler.is_compiling():
        return False
    return isinstance(edge_index, EdgeIndex) or not is_capturing(edge_index)


def mask_signature_of(mask: Tensor) -> tuple[int, ...]:
    """A signature of a mask, computed at every call.

    Raises:
        TypeError, ValueError: As :func:`check_mask`.
    """
    check_mask(mask)
    nodes = mask.nonzero().view(-1)
    return mask.numel(), nodes.numel(), int(hash_of(nodes + 1))


def check_mask(mask: object, num_nodes: int | None = None, name: str = 'mask') -> None:
    """Raises unless it is a bool mask with at least one node."""
    check_mask_shape(mask, num_nodes, name)
    assert isinstance(mask, Tensor)
    if not bool(mask.any()):
        raise ValueError(f"'{name}' must hold a node, got none")


def check_mask_shape(mask: object, num_nodes: int | None, name: str = 'mask') -> None:
    """Raises unless it is a bool mask, without a look at its values."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"'{name}' must be a bool tensor, got {got}")
    if mask.dim() != 1 or (num_nodes is not None and mask.size(0) != num_nodes):
        raise ValueError(f"'{name}' must have shape [{num_nodes}], got {list(mask.shape)}")


# Also by the name under which 0.2 has saved it.
torch.serialization.add_safe_globals(
    [ExecutionPath, (ExecutionPath, 'pyg_fast.graph.execution_path.ExecutionPath')]
)
