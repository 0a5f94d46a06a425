"""Group sizes: how many edges of a row a GPU thread group sums at once."""

import functools
import itertools
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from .._alike import naming_keywords
from ..graph import Graph, graph_of, set_group_sizes
from ..ops._numbers import check_flag, check_number
from ..ops.product import raw_product
from ..sparse.groups import check_size
from ..sparse.operator import SparseOperator
from ._degrees import Degrees
from .to_csr import ToCSR, check_no_data

STRATEGIES = ('regression', 'measured', 'learned')
COEFFICIENTS = ('fitted', 'paper')
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # candidates

# Of Degrees.features, fitted by `python -m benchmarks group_sizes --fit` to the times of 92 graphs
# in benchmarks/results/group-sizes-nvidia-h200.json. On graphs held out the choice takes 1.04 times
# the time of the best size; always 64 takes 1.11 times.
_FITTED = (-0.514199, 0.358645, 0.863411, -0.547235, 0.286768, 0.126815)

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
    - :obj:`"learned"`: as :obj:`"regression"` with fitted coefficients. In version 0.2 it was a
      classifier, whose choice took 1.038 times the time of the best size, this one 1.042 times.

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
            :obj:`"paper"`. (default: :obj:`None`, fitted ones)
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
    """

    @naming_keywords
    def __init__(
        self,
        strategy: str = 'regression',
        width: int = 64,
        coefficients: str | None = None,
        atomic: bool = False,
    ) -> None:
        check_no_data('GroupSizes()', strategy)
        _check(strategy, width, coefficients)
        check_flag('atomic', atomic)
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
            size, t_size = self._choose(graph)
            set_group_sizes(edge_index, size, t_size, self.atomic)
            store['group_sizes'] = ChosenSize(size, t_size, self.width, self.strategy)
        for path in data.get('execution_paths', []) if isinstance(data, Data) else []:
            if not path.is_whole:
                path.set_group_sizes(*self._choose(path.graph))
        return data

    def _choose(self, graph: Graph) -> tuple[int | None, int | None]:
        """The sizes of a graph and of its transpose."""
        size, t_size = (
            choose_group_size(
                each.rowptr,
                each.num_src,
                self.width,
                self.strategy,
                col=each.col,
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
        col (Tensor, optional): The source of each edge; required for :obj:`"measured"`.
            (default: :obj:`None`)

    Returns:
        int, optional: The most edges per group, or :obj:`None`: no groups are best, or measuring
        on a CPU.

    Raises:
        As :class:`GroupSizes`.
    """
    _check(strategy, width, coefficients)
    if not isinstance(rowptr, Tensor) or rowptr.dim() != 1 or rowptr.is_floating_point():
        got = list(rowptr.shape) if isinstance(rowptr, Tensor) else type(rowptr).__name__
        raise ValueError(f"'rowptr' must be integers of shape [num_rows + 1], got {got}")
    check_number('num_cols', num_cols)
    if strategy != 'measured':
        coefficients = 'fitted' if strategy == 'learned' else coefficients
        return regression_size(Degrees.of(rowptr), width, coefficients)
    if col is None:
        raise ValueError(f"'col' is required for strategy={strategy!r}")
    num_dst = rowptr.size(0) - 1
    return _measure_size(Graph(rowptr, col, None, None, None, None, num_cols, num_dst), width)


def regression_size(degrees: Degrees, width: int, coefficients: str | None = None) -> int:
    """What :obj:`"regression"` chooses."""
    if coefficients == 'paper':
        undirected = degrees.num_edges / 2
        factors = (1, degrees.num_rows, undirected, undirected / max(degrees.num_rows, 1))
        size = sum(c * f for c, f in zip(_PAPER, factors, strict=True))
    else:
        power = sum(w * f for w, f in zip(_FITTED, degrees.features(width), strict=True))
        size = 2 ** min(power, 40.0)
    return max(1, min(round(size), degrees.largest))


_AHEAD = 1_000_000  # cycles for which the GPU waits, so that launches are hidden

# By signature of the graph: rows, columns, degrees, width and device.
_remembered: dict[tuple[Degrees, int, int, str], int | None] = {}


def _measure_size(graph: Graph, width: int) -> int | None:
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
    if coefficients is not None and strategy == 'measured':
        raise ValueError(
            f"'coefficients' must be None for strategy='measured', got {coefficients!r}: they are "
            "of 'regression'"
        )
    check_size(width, 'width')
