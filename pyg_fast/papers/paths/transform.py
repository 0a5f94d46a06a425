"""Execution paths for the layers of a model that trains on some nodes."""

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from ..._alike import naming_keywords
from ...ops._edges import check_edge_index
from ...ops._numbers import check_flag, check_number
from ...transforms.to_csr import check_no_data
from .build import execution_paths
from .execution_path import check_mask


@functional_transform('execution_paths')
class ExecutionPaths(BaseTransform):
    r"""Prepares the part of the graph that each layer's backward pass needs if the loss reads only
    the training nodes, as in the `"Accelerating Backward Aggregation in GCN Training with Execution
    Path Preparing on GPUs" <https://arxiv.org/abs/2204.02662>`_ paper (functional name:
    :obj:`execution_paths`).

    .. math::
        \mathcal{S}_{\ell} = \mathcal{S}_{\ell + 1} \cup
        \mathcal{N}_{in}(\mathcal{S}_{\ell + 1}), \quad \mathcal{S}_L = \mathcal{V}_{train}

    Layer :math:`\ell` of :math:`0, \ldots, L - 1` reads gradients in
    :math:`\mathcal{S}_{\ell + 1}` and writes them in :math:`\mathcal{S}_{\ell}`, over the edges
    into :math:`\mathcal{S}_{\ell + 1}`. :obj:`data.execution_paths` becomes a list of
    :class:`~pyg_fast.graph.ExecutionPath`, one per layer, on the device of the graph. Pass them to
    layers as :obj:`path=data.execution_paths[l]`, or all of them to
    :class:`~pyg_fast.nn.PathPreparedGNN`. Losses and gradients equal those of the whole graph up to
    summation order.

    With :obj:`forward=True` layers in training also compute only the rows in
    :math:`\mathcal{S}_{\ell + 1}`. The other rows mean nothing: layers give zeros there (the
    smallest positive number, behind which a ReLU has a gradient), in the output of
    :class:`~pyg_fast.nn.PathPreparedGNN` they are NaN. So :obj:`out[data.train_mask]` still works,
    scores of other nodes need :obj:`model.eval()`. Without dropout, and with that of
    :class:`~pyg_fast.nn.PathPreparedGNN`, losses and gradients stay the same; with
    :func:`torch.nn.functional.dropout` between layers they are the same in distribution. Norms over
    all nodes and readouts between layers raise an error in the backward pass: their gradients reach
    those rows, also through a ReLU. What reads other nodes without a gradient (detached statistics)
    shows with :obj:`debug=True`. In evaluation all rows are computed.

    Apply it after :class:`~pyg_fast.transforms.ToCSR`, or use
    :class:`~pyg_fast.transforms.Prepare`, which does both.

    Args:
        num_layers (int): Number of layers :math:`L`.
        mask (str): Name of the mask of training nodes. (default: :obj:`"train_mask"`)
        edge_weight (str, optional): Name of the edge weights that the layers will get: paths of
            weighted graphs store the positions of their edges. (default: :obj:`"edge_weight"`, if
            the data have it)
        forward (bool): Whether the forward pass of training also computes only the path.
            (default: :obj:`False`)
        checks (bool): Whether to detect a loss on other nodes, and layers between that mix nodes:
            the device counts rows of gradients outside of a path; the first backward pass, the next
            forward pass with it, or :meth:`path.check() <pyg_fast.graph.ExecutionPath.check>`
            raises an error. (default: :obj:`True`)
        strict (bool): Whether to raise the error always in the backward pass, which then waits for
            the device. (default: :obj:`False`)
        debug (bool): Whether rows that are not computed are NaN instead of zero, which shows
            wherever they are read; gradients are not checked then. (default: :obj:`False`)
        keep_graph (bool): Whether :obj:`edge_index` stays. Otherwise every path holds its edges,
            also most of them, and :obj:`model(x, None, paths=data.execution_paths)` of a
            :class:`~pyg_fast.nn.PathPreparedGNN` trains on the paths alone. Needs
            :obj:`forward=True`, and no edge weights. (default: :obj:`True`)

    Shapes:
        - **input:** :obj:`edge_index` :math:`(2, |\mathcal{E}|)`, :obj:`mask`
          :math:`(|\mathcal{V}|)`, bool

    Raises:
        TypeError: If an argument has a wrong type, the mask is not a bool tensor, or data are
            heterogeneous.
        ValueError: If the mask is missing, empty or has not one entry per node, there
            is no :obj:`edge_index` or none of other weights than :obj:`"edge_weight"`,
            :obj:`num_layers` is below one, :obj:`strict` is set without :obj:`checks`, or paths
            cannot stand without the graph.
        IndexError: If an index of :obj:`edge_index` is negative or too large.
    """

    @naming_keywords
    def __init__(
        self,
        num_layers: int,
        mask: str = 'train_mask',
        edge_weight: str | None = 'edge_weight',
        forward: bool = False,
        checks: bool = True,
        strict: bool = False,
        debug: bool = False,
        keep_graph: bool = True,
    ) -> None:
        check_no_data('ExecutionPaths(num_layers)', num_layers)
        check_number('num_layers', num_layers, 1)
        if not isinstance(mask, str):
            raise TypeError(
                "'mask' must be the name of a mask in the data, such as 'train_mask', got "
                f'{type(mask).__name__}: store it, data.train_mask = mask'
            )
        if edge_weight is not None and not isinstance(edge_weight, str):
            raise TypeError(
                "'edge_weight' must be the name of weights in the data, or None, got "
                f'{type(edge_weight).__name__}: store them, data.edge_weight = edge_weight'
            )
        self.num_layers = num_layers
        self.mask = mask
        self.edge_weight = edge_weight
        self.options = dict(
            forward=forward, checks=checks, strict=strict, debug=debug, keep_graph=keep_graph
        )
        for name, flag in self.options.items():
            check_flag(name, flag)
        if strict and not checks:
            raise ValueError("'strict' must be False without 'checks', got True: drop either")

    def forward(self, data: Data | HeteroData) -> Data:
        if not isinstance(data, Data):
            raise TypeError(f"'data' must be homogeneous, got {type(data).__name__}")
        if 'edge_index' not in data:
            raise ValueError("'data' must have an edge_index, got none")
        check_edge_index(data.edge_index)
        mask = data.get(self.mask)
        if mask is None:
            raise ValueError(f"'data' must have the mask {self.mask!r}, got {sorted(data.keys())}")
        check_mask(mask, data.num_nodes, f'data.{self.mask}')
        if self.edge_weight not in (None, 'edge_weight') and data.get(self.edge_weight) is None:
            raise ValueError(
                f"'data' must have the edge weights {self.edge_weight!r}, got {sorted(data.keys())}"
            )
        weighted = self.edge_weight is not None and data.get(self.edge_weight) is not None
        data.execution_paths = execution_paths(
            data.edge_index, mask.to(data.edge_index.device), self.num_layers, weighted,
            **self.options,
        )  # fmt: skip
        if not self.options['keep_graph']:
            num_nodes = data.num_nodes
            del data.edge_index
            if not data._store.can_infer_num_nodes:
                data.num_nodes = num_nodes
        return data

    def __repr__(self) -> str:
        usual = dict(forward=False, checks=True, strict=False, debug=False, keep_graph=True)
        options = ''.join(
            f', {name}={value}' for name, value in self.options.items() if value != usual[name]
        )
        return f'{type(self).__name__}({self.num_layers}, mask={self.mask!r}{options})'
