"""The symmetric normalisation of a GCN over unsorted edges."""

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from ..graph.prepared_graph import list_of
from ..ops._checks import DTYPES, check_device, check_strided
from ..ops._edges import check_edge_index, is_capturing
from ..ops._numbers import check_flag, check_number
from ..ops._transforms import transforms_active
from ..ops.gcn_norm import gcn_weight

FLOWS = ('source_to_target', 'target_to_source')


def gcn_norm(
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = 'source_to_target',
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Normalises edge weights symmetrically by in-degrees, as the `"Semi-supervised Classification
    with Graph Convolutional Networks" <https://arxiv.org/abs/1609.02907>`_ paper does. It reads the
    edges once for the degrees and once for the weights.

    .. math::
        w'_e = \frac{w_e}{\sqrt{\hat{d}_i \hat{d}_j}}, \qquad
        \hat{d}_i = \sum_{e = (j, i) \in \mathcal{E}} w_e

    The results, and the order of edges, are those of
    :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm` for a plain :obj:`edge_index`: self-loops come
    last, one per node, with the weight of the node's last self-loop (all self-loops of the node get
    its gradient). Differentiable in :obj:`edge_weight`, any number of times. Degrees of float16 and
    bfloat16 weights are summed in float32.

    On CUDA the degrees of weighted edges are added atomically: their last bits vary from run to
    run, unless :func:`torch.use_deterministic_algorithms` is on, which sorts the edges. All other
    results are bitwise reproducible.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`, of any integer
            dtype.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)`, float32, float64,
            float16 or bfloat16. (default: :obj:`None`, all one, also for added self-loops)
        num_nodes (int, optional): Number of nodes :math:`N`. (default: :obj:`None`, the largest
            index plus one; CUDA waits for it)
        improved (bool): Whether self-loops added to weighted edges have weight two.
            (default: :obj:`False`)
        add_self_loops (bool): Whether nodes without self-loop get one. The shape of the result
            depends on their number: CUDA waits for it at every call, and
            :func:`torch.compile` needs :obj:`capture_dynamic_output_shape_ops`.
            (default: :obj:`True`)
        flow (str): Degrees are those of destinations (:obj:`"source_to_target"`) or of sources
            (:obj:`"target_to_source"`). (default: :obj:`"source_to_target"`)
        dtype (torch.dtype, optional): The dtype of weights if :obj:`edge_weight` is :obj:`None`.
            (default: :obj:`None`, torch's default type)

    Returns:
        :obj:`(edge_index, edge_weight)` with :math:`|\mathcal{E}'|` edges; :obj:`edge_index` itself
        if no self-loops are added.

    Raises:
        TypeError: If a dtype is not supported.
        ValueError: If a shape or device does not fit, or :obj:`flow` is unknown.
        IndexError: If an index is negative or too large; without :obj:`add_self_loops` as
            :func:`~pyg_fast.ops.to_csr` does.
        RuntimeError: If :obj:`add_self_loops` is set while a CUDA graph is captured: its replays
            cannot return another shape.
    """
    if flow not in FLOWS:
        raise ValueError(f"'flow' must be one of {FLOWS}, got {flow!r}")
    check_flag('improved', improved)
    check_flag('add_self_loops', add_self_loops)
    check_edge_index(edge_index)
    if edge_weight is not None:
        _check_weight(edge_weight, edge_index)
        dtype = edge_weight.dtype
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise TypeError(f"'dtype' must be one of {DTYPES}, got {dtype}")
    size, edge_index = getattr(edge_index, '_sparse_size', (None, None)), list_of(edge_index)
    num_nodes = _count_nodes(edge_index, size) if num_nodes is None else num_nodes
    check_number('num_nodes', num_nodes)
    if transforms_active():
        return pyg_gcn_norm(
            edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype
        )
    if add_self_loops and is_capturing(edge_index):
        raise RuntimeError(
            "'add_self_loops' must be False while a CUDA graph is captured: the shape of the "
            'result depends on the number of self-loops. Normalise before the capture, or pass the '
            'edges to the layer'
        )
    reverse = flow == 'target_to_source'
    fill_value = 2.0 if improved and edge_weight is not None else 1.0
    return gcn_weight(
        edge_index, edge_weight, num_nodes, dtype, add_self_loops, fill_value, reverse
    )


def _count_nodes(edge_index: Tensor, size: tuple[int | None, int | None]) -> int:
    if size[0] is not None and size[1] is not None:
        return max(size[0], size[1])
    return int(edge_index.max()) + 1 if edge_index.numel() > 0 else 0


def _check_weight(edge_weight: Tensor, edge_index: Tensor) -> None:
    check_strided(edge_weight, 'edge_weight')
    if edge_weight.dtype not in DTYPES:
        raise TypeError(f"'edge_weight' must be one of {DTYPES}, got {edge_weight.dtype}")
    if edge_weight.dim() != 1 or edge_weight.size(0) != edge_index.size(1):
        raise ValueError(
            f"'edge_weight' must have shape [{edge_index.size(1)}], got {list(edge_weight.shape)}"
        )
    check_device(edge_weight, edge_index, 'edge_weight', 'edge_index')
