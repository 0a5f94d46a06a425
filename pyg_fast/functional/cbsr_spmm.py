"""Aggregation of CBSR features: sum and mean, with every gradient."""

from torch import Tensor

from ..ops._checks import check_edge_weight
from ..ops.cbsr import CBSR
from ..ops.product import needs_transpose, product
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._arguments import checked_graph

REDUCE = ('sum', 'add', 'mean')


def cbsr_spmm(
    graph: Graph | Tensor,
    cbsr: CBSR,
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
) -> Tensor:
    r"""Aggregates the stored features of each node's in-neighbours: the SpGEMM of the `"MaxK-GNN"
    <https://arxiv.org/abs/2312.08656>`_ paper, whose backward is its SSpMM.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    where :math:`\mathbf{X}` is the matrix in :obj:`cbsr`. Differentiable in its values
    and in :obj:`edge_weight`, any number of times; the gradient of the values is computed at the
    stored columns only. Sums of float16 and bfloat16 run in float32.

    The result is bitwise reproducible. The gradient of the values on CUDA adds atomically
    (in float32 for float16 and bfloat16), unless :func:`torch.use_deterministic_algorithms` is on;
    then it gathers over the transposed graph. Nodes with more than 16,384 outgoing edges gather in
    any case if the graph is prepared: as many atomic additions in float32 would not be exact.

    Args:
        graph (EdgeIndex, Tensor or Graph): As in :func:`~pyg_fast.ops.spmm`.
        cbsr (CBSR): Features of the source nodes :math:`(N_{src}, F)`, from
            :func:`~pyg_fast.ops.maxk`.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of
            :obj:`cbsr`, in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`) or :obj:`"mean"`, which divides by the number
            of edges. A node without edges gets zeros. (default: :obj:`"sum"`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`, dense.

    Raises:
        TypeError: If :obj:`cbsr` is not a CBSR, or its dtype differs from :obj:`edge_weight`'s.
        ValueError: If a shape or device does not fit, :obj:`reduce` is unknown, or an edited column
            of :obj:`cbsr` occurs twice in a row.
        IndexError: If the graph holds a node that :obj:`cbsr` does not have, or an edited column
            is out of range.
    """
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    if not isinstance(cbsr, CBSR):
        raise TypeError(f"'cbsr' must be a CBSR, got {type(cbsr).__name__}")
    cbsr._check()
    graph = checked_graph(
        graph, cbsr.values, 'cbsr', needs_transpose(cbsr), edge_weight is not None
    )
    if edge_weight is not None:
        check_edge_weight(edge_weight, cbsr.values, graph.num_edges, 'cbsr')
    return product(SparseOperator(graph, edge_weight, mean=reduce == 'mean'), cbsr)
