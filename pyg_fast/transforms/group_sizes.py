"""Group sizes: how many edges of a row a GPU thread group sums at once."""

import functools
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from ..graph import Graph, graph_of, set_group_sizes
from ..ops.product import raw_product
from ..sparse.groups import check_size
from ..sparse.operator import SparseOperator
from ._degrees import Degrees
from .to_csr import ToCSR

STRATEGIES = ('regression', 'measured', 'learned')
COEFFICIENTS = ('fitted', 'paper')
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # candidates

# Written by `python -m benchmarks.group_sizes --fit`.
FITTED = Path(__file__).with_name('group_sizes.json')
SCRIPT = "'python -m benchmarks.group_sizes'"

# The paper's Section IV: coefficients of 1, |V|, |E| and the average degree.
_PAPER = (0.65538, 1.67431e-5, -2.24342e-6, 0.63641)


@dataclass(frozen=True)
class ChosenSize:
    """The group sizes of a graph and of its transpose, and how they were chosen; :obj:`None`: the
    kernel divides the work by rows."""

    size: int | None
    t_size: int | None
    width: int
    strategy: str

    def __repr__(self) -> str:
        if self.size is self.t_size is None:
            return f'no groups ({self.strategy}, {self.width} wide)'
        return (
            f'groups of {self.size or "a row"}, transposed {self.t_size or "a row"} '
            f'({self.strategy}, {self.width} wide)'
        )


torch.serialization.add_safe_globals([ChosenSize])


@functional_transform('group_sizes')
class GroupSizes(BaseTransform):
    r"""Chooses how many edges at once a GPU sums, for each graph and its transpose (functional
    name: :obj:`group_sizes`).

    As in the `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on
    GPUs" <https://arxiv.org/abs/2204.02662>`_ paper, the edges of a node are cut into groups of at
    most :math:`g` edges; a warp or a part of it sums each group. Rows of several groups are summed
    in two stages. The size comes from

    - :obj:`"regression"`: a function of the degrees, rounded and clamped to
      :math:`[1, \max_i d_i]`; with the coefficients of the paper

      .. math::
          g = 0.65538 + 1.67431 \cdot 10^{-5} |\mathcal{V}| - 2.24342 \cdot 10^{-6} |\mathcal{E}|
          + 0.63641 \, \bar{d}

      where :math:`|\mathcal{E}|` and :math:`\bar{d} = |\mathcal{E}| / |\mathcal{V}|` count
      undirected edges, half of the listed ones; or, fitted on an H200,

      .. math::
          \log_2 g = \mathbf{w}^{\top} \log_2 \left( 2, 1 + |\mathcal{V}|, 1 + \bar{d},
          1 + \max_i d_i, 1 + \frac{\sum_i d_i^2}{\sum_i d_i}, F \right)

    - :obj:`"measured"`: the fastest of 4, 8, ..., 1024 and of no groups, timed on the device; the
      process remembers it by the graph's signature;
    - :obj:`"learned"`: a graph classifier, which pools a sample of nodes by their degrees
      (`SAGPool <https://arxiv.org/abs/1904.08082>`_) and reads :math:`F`.

    The graphs are prepared as by :class:`~pyg_fast.transforms.ToCSR`, which chooses a size by the
    number of edges alone; sums over them use the groups of this transform from then on.
    :obj:`group_sizes` of the data (for heterogeneous data of each edge type) is the choice. It
    belongs to the :class:`~torch_geometric.EdgeIndex` object: apply this
    transform last, on the device where the graph is used; :obj:`to`, copies and edits drop the
    choice. On a CPU groups change nothing, and :obj:`"measured"` chooses none.

    Each of :obj:`data.execution_paths` gets its own sizes, since its degrees differ from the
    graph's.

    Args:
        strategy (str): :obj:`"regression"`, :obj:`"measured"` or :obj:`"learned"`.
            (default: :obj:`"regression"`)
        width (int): The number of features :math:`F` to choose for. (default: :obj:`64`)
        coefficients (str, optional): The coefficients of :obj:`"regression"`: :obj:`"fitted"` or
            :obj:`"paper"`. (default: :obj:`None`, fitted ones if the package has them)
        atomic (bool): Whether the groups of one row are added atomically, which varies the last
            bits, instead of in order. Ignored with :func:`torch.use_deterministic_algorithms`.
            (default: :obj:`False`)

    Shapes:
        - **input:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)` of any integer dtype
        - **output:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)`

    Raises:
        TypeError, ValueError: If an argument is invalid, or as
            :class:`~pyg_fast.transforms.ToCSR`.
        IndexError: As :class:`~pyg_fast.transforms.ToCSR`.
        RuntimeError: If the package has no fitted coefficients for a strategy.
    """

    def __init__(
        self,
        strategy: str = 'regression',
        width: int = 64,
        coefficients: str | None = None,
        atomic: bool = False,
    ) -> None:
        _check(strategy, width, coefficients)
        self.strategy = strategy
        self.width = width
        self.coefficients = coefficients
        self.atomic = atomic

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        data = ToCSR().forward(data)
        for store in data.edge_stores:
            if 'edge_index' not in store:
                continue
            edge_index = store['edge_index']
            graph = graph_of(edge_index, *edge_index.sparse_size(), values=False)
            size, t_size = self._chosen(graph)
            set_group_sizes(edge_index, size, t_size, self.atomic)
            store['group_sizes'] = ChosenSize(size, t_size, self.width, self.strategy)
        for path in data.get('execution_paths', []) if isinstance(data, Data) else []:
            if not path.is_whole:
                path.set_group_sizes(*self._chosen(path.graph))
        return data

    def _chosen(self, graph: Graph) -> tuple[int | None, int | None]:
        """The sizes of a graph and of its transpose."""
        size, t_size = (
            choose_group_size(
                each.rowptr, each.num_src, self.width, self.strategy, col=each.col,
                coefficients=self.coefficients,
            )  # fmt: skip
            for each in (graph, graph.t())
        )
        return size, t_size

    def __repr__(self) -> str:
        parts = [repr(self.strategy), f'width={self.width}']
        if self.coefficients is not None:
            parts.append(f'coefficients={self.coefficients!r}')
        return f'{type(self).__name__}({", ".join(parts + ["atomic=True"] * self.atomic)})'


def choose_group_size(
    rowptr: Tensor,
    num_cols: int,
    width: int = 64,
    strategy: str = 'regression',
    *,
    col: Tensor | None = None,
    coefficients: str | None = None,
) -> int | None:
    r"""The group size of one CSR structure, square or not.

    Args:
        rowptr (Tensor): Row pointers :math:`(N + 1)`.
        num_cols (int): Number of source nodes.
        width, strategy, coefficients: As in :class:`GroupSizes`.
        col (Tensor, optional): The source of each edge; required except for :obj:`"regression"`.
            (default: :obj:`None`)

    Returns:
        int, optional: The most edges per group, or :obj:`None`: no groups are best, or measuring
        on a CPU.

    Raises:
        As :class:`GroupSizes`.
    """
    _check(strategy, width, coefficients)
    if strategy == 'regression':
        return regressed_size(Degrees.of(rowptr), width, coefficients)
    if col is None:
            raise ValueError(f"'col' is required for strategy={strategy!r}")
    if strategy == 'measured':
        return _measured_size(Graph(rowptr, col, None, None, None, None, num_cols,
                                    rowptr.size(0) - 1), width)  # fmt: skip
    from .group_size_net import load, sample_of  # only this strategy needs it

    net = load(_fitted('classifier'))
    with torch.no_grad():
        scores = net(sample_of(rowptr, col, num_cols, width))
    return clamped(net.sizes[int(scores.argmax())], Degrees.of(rowptr))


def regressed_size(degrees: Degrees, width: int, coefficients: str | None = None) -> int:
    """What :obj:`"regression"` chooses."""
    if coefficients is None:
        coefficients = 'fitted' if 'regression' in _file() else 'paper'
    if coefficients == 'paper':
        undirected = degrees.num_edges / 2
        factors = (1, degrees.num_rows, undirected, undirected / max(degrees.num_rows, 1))
        size = sum(c * f for c, f in zip(_PAPER, factors, strict=True))
    else:
        weights = _fitted('regression')['weights']
        power = sum(w * f for w, f in zip(weights, degrees.features(width), strict=True))
        size = 2 ** min(power, 40.0)
    return clamped(round(size), degrees)


def clamped(size: int, degrees: Degrees) -> int:
    """The size, clamped to one and the largest degree."""
    return max(1, min(size, degrees.largest))


_AHEAD = 1_000_000  # cycles for which the GPU waits, so that launches are hidden

# By signature of the graph: rows, columns, degrees, width and device.
_remembered: dict[tuple[Any, ...], int | None] = {}


def _measured_size(graph: Graph, width: int) -> int | None:
    if not graph.rowptr.is_cuda:
        return None
    degrees = Degrees.of(graph.rowptr)
    device = torch.cuda.get_device_name(graph.rowptr.device)
    key = (degrees, graph.num_src, width, device)
    if key not in _remembered:
        times = measure_group_sizes(graph, width)
        _remembered[key] = min(times, key=times.__getitem__)
    return _remembered[key]


def measure_group_sizes(
    graph: Graph, width: int, sizes: tuple[int, ...] = SIZES, repeats: int = 5
) -> dict[int | None, float]:
    """Times a sum over a graph on a GPU for each size, and without groups (:obj:`None`).

    Args:
        graph (Graph): The graph, on a GPU.
        width (int): The number of features.
        sizes (tuple): Sizes to try; of the sizes that cut no row only the first.
            (default: 4, 8, ..., 1024)
        repeats (int): Measurements per size. (default: :obj:`5`)

    Returns:
        dict: Medians in milliseconds.
    """
    largest = Degrees.of(graph.rowptr).largest
    x = torch.randn(graph.num_src, width, device=graph.rowptr.device)
    times: dict[int | None, float] = {}
    with torch.no_grad(), torch.cuda.device(x.device):
        for size in (None, *sizes):
            grouped = graph.with_groups(size)
            run = functools.partial(raw_product, SparseOperator(grouped), x)
            run()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            torch.cuda._sleep(_AHEAD)
            marks[0].record()
            for mark in marks[1:]:
                run()
                mark.record()
            marks[-1].synchronize()
            spans = itertools.pairwise(marks)
            times[size] = statistics.median(a.elapsed_time(b) for a, b in spans)
            if size is not None and size >= largest:
                break
    return times


def _check(strategy: str, width: int, coefficients: str | None) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"'strategy' must be one of {STRATEGIES}, got {strategy!r}")
    if coefficients not in (None, *COEFFICIENTS):
        raise ValueError(f"'coefficients' must be one of {COEFFICIENTS}, got {coefficients!r}")
    check_size(width, 'width')


@functools.cache
def _file() -> dict[str, Any]:
    return json.loads(FITTED.read_text()) if FITTED.exists() else {}


def _fitted(part: str) -> dict[str, Any]:
    """A part of the coefficients fitted on a GPU."""
    if part not in _file():
        raise RuntimeError(
            f'{FITTED.name} has no {part} yet: {SCRIPT} fits it, with --measure on a GPU and then '
            'with --fit'
        )
    return _file()[part]
