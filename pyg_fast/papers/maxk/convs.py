"""MaxK as a nonlinearity, and layers that aggregate its output."""

import math
import warnings
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from ...nn._aggregated import AggregatedInput
from ...nn._layer import Mixin
from ...nn._modules import allow_propagate
from ...nn._reduce import Features, Neighbours
from ...ops._checks import DTYPES
from ...ops.cbsr import CBSR
from ...ops.product import needs_transpose
from ..paths.convs import PathPreparedGCNConv, PathPreparedGINConv, PathPreparedSAGEConv
from .op import maxk


class Omitted(Enum):
    """The type of an argument that was not given."""

    K = '<required>'

    def __repr__(self) -> str:
        return self.value


OMITTED = Omitted.K


def given_k(k: int | None | Omitted, cls: type) -> int | None:
    """The argument :obj:`k` of a constructor, which warns if it was omitted."""
    if isinstance(k, Omitted):
        warnings.warn(
            f"{cls.__name__} without 'k' applies no MaxK, and will be an error in the next "
            'release: give the number of features to keep by name, such as k=8, or k=None for none',
            FutureWarning, stacklevel=4,  # of who calls the constructor, which names its options
        )  # fmt: skip
        return None
    return k


def check_not_k(name: str, value: object) -> None:
    """Raises if an argument looks as if it were :obj:`k`, whose place it has in other layers."""
    if type(value) is int and value > 1:
        raise TypeError(
            f"'{name}' must not be the integer {value}, as in PyG's layer: give the number of "
            f'features to keep by name, k={value}'
        )


class MaxK(torch.nn.Module):
    r"""The nonlinearity of the `"MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph
    Neural Networks Training" <https://arxiv.org/abs/2312.08656>`_ paper: keeps the :math:`k`
    largest features of each node.

    .. math::
        h(\mathbf{x})_f = \begin{cases} x_f & \text{if } f \in \mathrm{top}_k(\mathbf{x}) \\
        0 & \text{otherwise} \end{cases}

    The output is dense; :func:`pyg_fast.ops.maxk` returns the compressed form that the layers here
    aggregate. Of equal features the first is kept, and NaN counts as larger than any number.

    Args:
        k (int): Number of features to keep.
        balanced (bool, optional): A different nonlinearity: keeps the largest of each of the
            :math:`k` groups of features whose indices are equal modulo :math:`k`.
            (default: :obj:`False`)

    Shapes:
        - **input:** features :math:`(*, F)`
        - **output:** features :math:`(*, F)`

    Raises:
        TypeError: If :obj:`k` is not an integer, or features are not float32, float64,
            float16 or bfloat16.
        ValueError: If :obj:`k` is not within :math:`1, \ldots, F`.
    """

    def __init__(self, k: int, balanced: bool = False) -> None:
        super().__init__()
        check_k(k)
        self.k = k
        self.balanced = balanced

    def forward(self, x: Tensor) -> Tensor:
        """"""
        return _kept(x, self.k, self.balanced)

    def extra_repr(self) -> str:
        return f'{self.k}{", balanced=True" if self.balanced else ""}'


def check_k(k: object, *channels: int) -> None:
    """Raises unless :obj:`k` of :obj:`channels` features (-1: not known yet) can be kept."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"'k' must be an integer, got {type(k).__name__}")
    most = min((c for c in channels if c > 0), default=math.inf)
    if not 1 <= k <= most:
        bounds = 'at least 1' if most == math.inf else f'1 to {most}, the number of channels'
        raise ValueError(f"'k' must be {bounds}, got {k}")


def _kept(x: Tensor, k: int, balanced: bool) -> Tensor:
    """Dense MaxK of dense features."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'x' must be a tensor, got {type(x).__name__}")
    if x.dim() == 2:
        return maxk(x, k, balanced).to_dense()
    if x.dim() == 0:
        raise ValueError("'x' must have at least one dimension")
    rows = x.reshape(math.prod(x.shape[:-1]), x.size(-1))
    return maxk(rows, k, balanced).to_dense().view(x.shape)


class _MaxKMessages(Mixin):
    """Mixin for a fused layer that sends MaxK of its messages, also when PyG's code runs."""

    k: int | None
    balanced: bool
    maxk_root = False
    _is_exact = False

    def _set_maxk(self, k: int | None, balanced: bool, *channels: int) -> None:
        if k is not None:
            check_k(k, *channels)
        self.k = k
        self.balanced = balanced

    def _maxk(self, x: Tensor | CBSR) -> Tensor | CBSR:
        """MaxK of features, or the features themselves if it keeps all."""
        if self.k is None:
            return x
        if isinstance(x, CBSR):
            raise TypeError(
                f"'x' is a CBSR, to which this layer would apply MaxK again: make the layer with "
                f'k=None, got k={self.k}'
            )
        return x if self.k == x.size(-1) else maxk(x, self.k, self.balanced)

    def _dense_maxk(self, x: Tensor) -> Tensor:
        """MaxK of dense features of any number of dimensions, dense."""
        if self.k is None or self.k == x.size(-1):
            return x
        return _kept(x, self.k, self.balanced)

    def _changes_messages(self) -> bool:
        return self.k is not None

    def _messages_of(self, to: Neighbours) -> Neighbours:
        to = super()._messages_of(to)
        source, root = self._maxk(to.source), to.root
        if self.maxk_root and root is not None:
            root = source if root is to.source else self._maxk(root)
        return to._replace(source=source, root=root)

    def _features_for_pyg(self, x: Features) -> Tensor | OptPairTensor:
        if not self.maxk_root and isinstance(x, Tensor):
            return x
        source, root = (x, x) if isinstance(x, (Tensor, CBSR)) else x
        if isinstance(source, CBSR):
            source = self._maxk(source).to_dense()  # `propagate` applies MaxK to dense ones.
        if self.maxk_root and root is not None:
            root = self._maxk(root) if isinstance(root, CBSR) else self._dense_maxk(root)
        if isinstance(root, CBSR):
            root = root.to_dense()
        return source, root

    def propagate(
        self, edge_index: Adj, size: Size = None, *, x: Tensor | OptPairTensor, **kwargs: object
    ) -> Tensor:
        """PyG's own, of the features that MaxK keeps."""
        if isinstance(x, Tensor):
            x = self._dense_maxk(x)
        else:
            pair = self._dense_maxk(x[0]), x[1]
            # With flow='target_to_source' PyG's compiled templates send the first of a pair, but
            # its Python code, which runs here, sends the second.
            x = pair if self.flow == 'source_to_target' else pair[::-1]
        return MessagePassing.propagate(self, edge_index, size, x=x, **kwargs)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # A template would replace `propagate`.
        cls = type(self)
        cls._orig_propagate = cls._jinja_propagate = cls.propagate

    def to_base(self) -> MessagePassing:
        """PyG's own layer, sharing the parameters; exists only for :obj:`k=None`."""
        if self.k is not None:
            raise NotImplementedError(
                f'{type(self).__name__} with k={self.k} has no equivalent in PyG, and TorchScript '
                f'cannot compile it: use torch.compile'
            )
        return super().to_base()

    def __repr__(self) -> str:
        balanced = ', balanced=True' if self.balanced else ''
        return f'{super().__repr__()[:-1]}, k={self.k}{balanced})'


allow_propagate(_MaxKMessages.propagate)


class MaxKGCNConv(_MaxKMessages, PathPreparedGCNConv):
    r"""The graph convolution of :class:`~torch_geometric.nn.conv.GCNConv` on sparse features, as
    in the `"MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks
    Training" <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \, h(\mathbf{X} \mathbf{\Theta}) + \mathbf{b}

    where :math:`h` keeps the :math:`k` largest of the :obj:`out_channels` features of each node.
    The kernels aggregate them and their gradient in the compressed form of
    :func:`~pyg_fast.ops.maxk`: an edge moves :math:`k` numbers, and nothing of size
    :math:`|\mathcal{E}| \times F` is allocated. A plain :obj:`edge_index` is sorted once per call,
    not twice: the backward pass reads no transpose. On CUDA it adds atomically instead, unless
    :func:`torch.use_deterministic_algorithms` is on: the last bits of gradients vary.

    Parameters and state_dict are those of :class:`~torch_geometric.nn.conv.GCNConv`. With
    :obj:`k=None` or :obj:`k=out_channels` the layer equals
    :class:`~pyg_fast.nn.PathPreparedGCNConv`. Hooks, explainers, static batches and aggregations
    other than sums run PyG's own code, with MaxK. TorchScript cannot compile the layer,
    :func:`torch.compile` can.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive it from the first
            input.
        out_channels (int): Size of each output sample.
        improved (bool, optional): Computes :math:`\mathbf{\hat{A}}` as
            :math:`\mathbf{A} + 2 \mathbf{I}`; as in PyG, only for weighted or sparse input.
            (default: :obj:`False`)
        cached (bool, optional): Keeps the normalised graph of the first call for later calls.
            (default: :obj:`False`)
        add_self_loops (bool, optional): Whether to add self-loops.
            (default: :obj:`None`, as :obj:`normalize`)
        normalize (bool, optional): Whether to add self-loops and normalise.
            (default: :obj:`True`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        k (int or None): Number of features to keep of each node;
            :obj:`None` keeps all. Omitting it does too, with a warning; the next release needs it.
        balanced (bool, optional): A different nonlinearity, see :class:`MaxK`.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix :math:`(|\mathcal{V}|, |\mathcal{V}|)`,
          edge weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        TypeError: If :obj:`k` is not an integer, or features are not float32, float64,
            float16 or bfloat16.
        ValueError: If :obj:`k` is not within :math:`1, \ldots, F_{out}`; and as
            :class:`~pyg_fast.nn.PathPreparedGCNConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        k: int | None | Omitted = OMITTED,
        balanced: bool = False,
        **kwargs: object,
    ) -> None:
        check_not_k('improved', improved)
        super().__init__(
            in_channels, out_channels, improved, cached, add_self_loops, normalize, bias, **kwargs
        )
        self._set_maxk(given_k(k, type(self)), balanced, out_channels)

    def forward(  # type: ignore[override]
        self,
        x: Tensor | AggregatedInput,
        edge_index: Adj,
        edge_weight: OptTensor = None,
    ) -> Tensor:
        """"""
        k = self.k
        if k is None or k == self.out_channels or isinstance(x, AggregatedInput):
            return super().forward(x, edge_index, edge_weight)
        if self._fusible(x) and self._sums(x):
            topk = maxk(self.lin(x), k, self.balanced)
            norm = self._operator(x, edge_index, edge_weight, needs_transpose(topk))
            if norm is not None:
                return self._aggregated(topk, norm)
        elif isinstance(x, Tensor) and x.dtype not in DTYPES:
            raise TypeError(f"'x' must be one of {DTYPES}, got {x.dtype}")
        return self._by_pyg(x, edge_index, edge_weight)

    def _commutes(self) -> bool:
        return self.k is None and super()._commutes()


class MaxKSAGEConv(_MaxKMessages, PathPreparedSAGEConv):
    r"""The GraphSAGE operator of :class:`~torch_geometric.nn.conv.SAGEConv` on sparse features, as
    in the `"MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks
    Training" <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} h(\mathbf{x}_j)

    where :math:`h` keeps the :math:`k` largest of the :obj:`in_channels` features of each
    neighbour. The kernels aggregate them and their gradient in the compressed form of
    :func:`~pyg_fast.ops.maxk`; on CUDA the gradient is added atomically, as in
    :class:`MaxKGCNConv`.

    Parameters and state_dict are those of :class:`~torch_geometric.nn.conv.SAGEConv`. With
    :obj:`k=None` or :obj:`k=in_channels` the layer equals
    :class:`~pyg_fast.nn.PathPreparedSAGEConv`. Sums and means read the compressed form, the other
    fused aggregations its dense form. All other inputs run PyG's own code, with MaxK. TorchScript
    cannot compile the layer, :func:`torch.compile` can.

    With :obj:`k=None` features may also be a :class:`~pyg_fast.ops.CBSR`, the output of MaxK (and
    dropout). The linear map of the node's own features then makes the dense form twice, once for
    the product in the forward pass and once in the backward pass; between them only the :math:`k`
    entries of each row are stored.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to derive it from the
            first input. A tuple stands for the sizes of sources and destinations.
        out_channels (int): Size of each output sample.
        aggr (str or [str] or Aggregation, optional): The aggregation.
            (default: :obj:`"mean"`)
        normalize (bool, optional): Whether to :math:`\ell_2`-normalise the output.
            (default: :obj:`False`)
        root_weight (bool, optional): Whether to add the transformed features of the node itself.
            (default: :obj:`True`)
        project (bool, optional): Whether to apply a linear map and a ReLU before MaxK.
            (default: :obj:`False`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        k (int or None): Number of features to keep of each neighbour;
            :obj:`None` keeps all. Omitting it does too, with a warning; the next release needs it.
        balanced (bool, optional): A different nonlinearity, see :class:`MaxK`.
            (default: :obj:`False`)
        maxk_root (bool, optional): Whether to apply MaxK to the node's own features too, as the
            paper does: :math:`\mathbf{W}_1 h(\mathbf{x}_i)`. (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite, edge indices
          :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`k` is not an integer or not :obj:`None` for a CBSR, or features are not
            float32, float64, float16 or bfloat16.
        ValueError: If :obj:`k` is not within :math:`1, \ldots, F_{in}`; and as
            :class:`~pyg_fast.nn.PathPreparedSAGEConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] | Aggregation | None = 'mean',
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        *,
        k: int | None | Omitted = OMITTED,
        balanced: bool = False,
        maxk_root: bool = False,
        **kwargs: object,
    ) -> None:
        check_not_k('aggr', aggr)
        super().__init__(
            in_channels, out_channels, aggr, normalize, root_weight, project, bias, **kwargs
        )
        source, root = (in_channels,) * 2 if isinstance(in_channels, int) else in_channels
        root = root if maxk_root and root_weight else -1
        self._set_maxk(given_k(k, type(self)), balanced, source, root)
        self.maxk_root = maxk_root


class MaxKGINConv(_MaxKMessages, PathPreparedGINConv):
    r"""The graph isomorphism operator of :class:`~torch_geometric.nn.conv.GINConv` on sparse
    features, as in the `"MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural
    Networks Training" <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} h(\mathbf{x}_j) \right)

    where :math:`h` keeps the :math:`k` largest features of each neighbour. The kernels aggregate
    them and their gradient in the compressed form of :func:`~pyg_fast.ops.maxk`; on CUDA the
    gradient is added atomically, as in :class:`MaxKGCNConv`.

    Parameters and state_dict are those of :class:`~torch_geometric.nn.conv.GINConv`. With
    :obj:`k=None` or :math:`k = F_{in}` the layer equals :class:`~pyg_fast.nn.PathPreparedGINConv`.
    Aggregations, other inputs and CBSR features are as in :class:`MaxKSAGEConv`. With
    :obj:`maxk_root` (or for a CBSR) the kernel applies a constant :math:`\epsilon`; a learned one
    is applied to the dense form of the node's own features.

    Args:
        nn (torch.nn.Module): The network :math:`h_{\mathbf{\Theta}}` that maps features of size
            :math:`F_{in}` to :math:`F_{out}`.
        eps (float, optional): The (initial) :math:`\epsilon`. (default: :obj:`0.`)
        train_eps (bool, optional): Whether to learn :math:`\epsilon`. (default: :obj:`False`)
        k (int or None): Number of features to keep of each neighbour;
            :obj:`None` keeps all. Omitting it does too, with a warning; the next release needs it.
        balanced (bool, optional): A different nonlinearity, see :class:`MaxK`.
            (default: :obj:`False`)
        maxk_root (bool, optional): Whether to apply MaxK to the node's own features too, as the
            paper does: :math:`(1 + \epsilon) \cdot h(\mathbf{x}_i)`. (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_{in}), (|\mathcal{V}_t|, F_{in}))` if bipartite, edge
          indices :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`k` is not an integer or not :obj:`None` for a CBSR, or features are not
            float32, float64, float16 or bfloat16.
        ValueError: If :obj:`k` is not within :math:`1, \ldots, F_{in}`; and as
            :class:`~pyg_fast.nn.PathPreparedGINConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def __init__(
        self,
        nn: Callable,
        eps: float = 0.0,
        train_eps: bool = False,
        *,
        k: int | None | Omitted = OMITTED,
        balanced: bool = False,
        maxk_root: bool = False,
        **kwargs: object,
    ) -> None:
        if isinstance(k, Omitted):
            check_not_k('eps', eps)
        super().__init__(nn, eps, train_eps, **kwargs)
        self._set_maxk(given_k(k, type(self)), balanced)
        self.maxk_root = maxk_root
