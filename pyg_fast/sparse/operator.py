"""A sparse matrix over a graph, in the form that is passed to the kernels."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops._numbers import acc_dtype
from .graph import Graph

# The codes of `Strategy` in csrc/params/sample.h.
_CODES = {'fastrand': 1, 'adaptive': 4, 'bucket': 0, 'unbiased': 2, 'paper': 3}
STRATEGIES = tuple(_CODES)
SCALED = ('unbiased', 'adaptive')  # sums of samples are scaled to estimate those of all edges
WORD = 2**64  # range of a seed


class Sampling(NamedTuple):
    """At most :obj:`num_samples` edges of each row, chosen by :obj:`strategy`. :obj:`"unbiased"`
    uses :obj:`seed`, an int64 tensor of shape :math:`(1)`."""

    num_samples: int
    strategy: str = 'fastrand'
    seed: Tensor | None = None

    def args(self) -> tuple[int, int, Tensor | None]:
        """Arguments of the raw ops."""
        return self.num_samples, _CODES[self.strategy], self.seed

    def drawn(self, device: torch.device, seed: int | Tensor | None = None) -> 'Sampling':
        """Adds a seed if the strategy needs one: a copy of the given one, or one from torch's
        generator."""
        if self.strategy != 'unbiased':
            return self
        if seed is None:
            seed = torch.randint(2**63 - 1, (1,), device=device)
        elif isinstance(seed, Tensor):
            seed = seed.clone()  # The backward pass must use the same sample.
        else:
            seed = torch.full((1,), (seed + 2**63) % WORD - 2**63, device=device)
        return self._replace(seed=seed)

    def weight(self, rowptr: Tensor, mean: bool, dtype: torch.dtype) -> Tensor | None:
        """The factor that scales each row's sum to all edges of the row."""
        if self.strategy not in SCALED or mean:
            return None
        zeros = int(self.strategy == 'adaptive')  # As `sum_scale` in csrc/params/sample.h.
        degree = rowptr.diff().to(acc_dtype(dtype))
        return ((degree + zeros) / (self.num_samples + zeros)).clamp_(min=1)


class Path(Protocol):
    """What :meth:`SparseOperator.on` asks of an :class:`~pyg_fast.graph.ExecutionPath`."""

    def part(self, op: 'SparseOperator') -> 'SparseOperator':
        """The operator's part on the path."""


class SparseOperator(NamedTuple):
    r"""A sparse matrix :math:`\mathbf{D}_r \mathbf{A} \mathbf{D}_c + \mathbf{E}` from the rows of
    the sources to those of the destinations; :math:`\mathbf{E}` connects the rows of one node.

    Immutable. It multiplies features by :func:`~pyg_fast.ops.product.product`, which is
    differentiable in :obj:`value`; everything else is constant. Scales and diagonals are float32
    (float64 for float64 features).

    Shapes:
        - **value:** entries of :math:`\mathbf{A}` :math:`(|\mathcal{E}|)`, :obj:`None` for ones
        - **row_scale**, **col_scale:** :math:`\mathbf{D}_r` :math:`(n_{dst})` and
          :math:`\mathbf{D}_c` :math:`(n_{src})`, :obj:`None` for ones
        - **diag:** :math:`\mathbf{E}` by destination :math:`(n_{dst})`, :obj:`None` for zeros
        - **self_row:** the source row of each destination :math:`(n_{dst})`, or -1;
          :obj:`None`: the same row
        - **t_diag:** :math:`\mathbf{E}` by source :math:`(n_{src})`, **t_self_row:** the
          destination row of each source :math:`(n_{src})`; both are only set together with
          :obj:`self_row`

    With :obj:`mean` each row is divided by its number of edges. With :obj:`sampling`
    :math:`\mathbf{A}` has at most that many edges per row, chosen inside the kernel.
    """

    graph: Graph
    value: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    diag: Tensor | None = None
    self_row: Tensor | None = None
    t_diag: Tensor | None = None
    t_self_row: Tensor | None = None
    mean: bool = False
    sampling: Sampling | None = None

    def t(self) -> 'SparseOperator':
        """The transposed matrix.

        Raises:
            RuntimeError: If the graph was made without its transpose.
            ValueError: If it is a mean, see :meth:`without_mean`, or a sample.
        """
        if self.mean or self.sampling is not None:
            raise ValueError(
                'a mean or a sample has no transpose: use without_mean(), or the graph of the '
                'sampled edges'
            )
        if self.graph.t_rowptr is None:
            raise RuntimeError('this graph was made without the transpose that backward needs')
        t_diag = self.diag if self.self_row is None else self.t_diag
        return SparseOperator(
            self.graph.t(), self.value, self.col_scale, self.row_scale, t_diag, self.t_self_row,
            self.diag, self.self_row,
        )  # fmt: skip

    def sampled(
        self, num_samples: int, strategy: str = 'fastrand', seed: Tensor | None = None
    ) -> 'SparseOperator':
        """The operator over a sample of each row's edges.

        Raises:
            ValueError: If it is an execution path's part of a matrix.
        """
        if self.self_row is not None:
            raise ValueError('an execution path cannot be sampled: use the whole operator')
        return self._replace(sampling=Sampling(num_samples, strategy, seed))

    def on(self, path: Path) -> 'SparseOperator':
        """Its part on an :class:`~pyg_fast.graph.ExecutionPath`.

        Raises:
            ValueError: If it is a sample.
        """
        if self.sampling is not None:
            raise ValueError('an execution path cannot be sampled: use the whole operator')
        return path.part(self)

    def without_mean(self, dtype: torch.dtype) -> 'SparseOperator':
        """The operator with the division of a mean in :obj:`row_scale`, for a dtype of features."""
        if not self.mean:
            return self
        inverse = inverse_degree(self.graph.rowptr, dtype)
        scale = inverse if self.row_scale is None else inverse * self.row_scale
        return self._replace(row_scale=scale, mean=False)

    def plus_diag(self, number: Tensor) -> 'SparseOperator':
        """Adds a number to the diagonal of each node that both sides have. It is given as a vector
        with an entry for each row of the larger side, all the same."""

        def added(diag: Tensor | None, count: int) -> Tensor:
            entries = number if number.size(0) == count else number.narrow(0, 0, count)
            return entries if diag is None else diag + entries

        diag, t_diag = added(self.diag, self.graph.num_dst), None
        if self.self_row is not None:
            t_diag = added(self.t_diag, self.graph.num_src)
        return self._replace(diag=diag, t_diag=t_diag)


def inverse_degree(rowptr: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the number of edges of each row, one for an empty row."""
    return rowptr.diff().clamp_(min=1).to(acc_dtype(dtype)).reciprocal_()
