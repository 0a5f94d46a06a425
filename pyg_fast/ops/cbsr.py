"""CBSR: a sparse matrix with the same number of stored entries in each row."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from ._checks import DTYPES, check_device, check_features
from ._library import fake, ops, reference
from ._numbers import check_number
from ._saved import Context, save, saved
from ._transforms import transforms_active

_MOST_COLUMNS = 2**31 - 1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


def column_dtype(num_columns: int) -> torch.dtype:
    """The narrowest dtype that can store CBSR columns."""
    if num_columns <= 256:
        return torch.uint8
    return torch.uint16 if num_columns <= 65536 else torch.int32


class CBSR:
    r"""A matrix whose rows all store the same number of entries: the *compressed balanced
    sparse row* format of the `"MaxK-GNN" <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        \mathbf{X}_{i, \, \mathrm{columns}_{i, c}} = \mathrm{values}_{i, c}

    The entries of a row may be in any order; :func:`~pyg_fast.ops.maxk` uses the order that the
    kernels of its device read fastest. Differentiable in :obj:`values`.

    Args:
        values (Tensor): Stored entries :math:`(N, k)`, float32, float64, float16 or
            bfloat16.
        columns (Tensor): Their columns :math:`(N, k)`, distinct within a row, of any integer dtype;
            stored as uint8 for up to 256 columns, uint16 for up to 65,536, int32 otherwise.
        num_columns (int): Number of columns :math:`F` of the matrix.

    Raises:
        TypeError: If :obj:`values` are not floating-point numbers, :obj:`columns` not integers,
            or :obj:`num_columns` is not an integer.
        ValueError: If shapes or devices do not match, :math:`k` is not within
            :math:`1, \ldots, F`, or a row has a column twice.
        IndexError: If a column is not within :math:`0, \ldots, F - 1`. Under
            :func:`torch.compile` and in a CUDA graph the checks of columns become one device-side
            assertion.
    """

    values: Tensor
    columns: Tensor
    num_columns: int
    # Last valid state: columns, their version, num_columns; None: not checked yet.
    _checked: tuple[Tensor, int, int] | None

    def __init__(self, values: Tensor, columns: Tensor, num_columns: int) -> None:
        check_features(values, 'values')
        if not isinstance(columns, Tensor):
            raise TypeError(f"'columns' must be a tensor, got {type(columns).__name__}")
        if columns.dtype not in _INTEGERS:
            raise TypeError(f"'columns' must hold integers, got {columns.dtype}")
        if columns.layout != torch.strided:
            raise TypeError(f"'columns' must be a strided tensor, got {columns.layout}")
        check_number('num_columns', num_columns, 1)
        if columns.shape != values.shape:
            raise ValueError(
                f"'columns' must have shape {list(values.shape)} as 'values', got "
                f'{list(columns.shape)}'
            )
        check_device(columns, values, 'columns', 'values')
        if not 1 <= values.size(1) <= num_columns:
            raise ValueError(
                f"'values' must have 1 to {num_columns} columns ('num_columns'), got "
                f'{list(values.shape)}'
            )
        if num_columns > _MOST_COLUMNS:
            raise ValueError(f"'num_columns' must be at most {_MOST_COLUMNS}, got {num_columns}")
        _check_columns(columns, num_columns)
        self.values, self.num_columns = values, num_columns
        self.columns = columns.to(column_dtype(num_columns))
        self._set_checked()

    @classmethod
    def _of(cls, values: Tensor, columns: Tensor, num_columns: int) -> 'CBSR':
        """Made from valid tensors, without checks."""
        out = cls.__new__(cls)
        out.values, out.columns, out.num_columns = values, columns, num_columns
        out._set_checked()
        return out

    @classmethod
    def from_dense(cls, x: Tensor, k: int | None = None) -> 'CBSR':
        r"""Stores the non-zero entries of a matrix.

        Args:
            x (Tensor): A matrix :math:`(N, F)`.
            k (int, optional): Entries per row; rows with fewer non-zeros also store zeros.
                (default: :obj:`None`, the most non-zeros of a row)

        Raises:
            TypeError: If :obj:`x` has no supported dtype or :obj:`k` is not an integer.
            ValueError: If :obj:`x` is not a matrix, :obj:`k` not within :math:`1, \ldots, F`, or
                smaller than the number of non-zeros of a row.
        """
        check_features(x, 'x')
        if x.is_meta:
            raise ValueError("'x' must hold data, got a tensor on meta")
        nonzero = x != 0
        most = int(nonzero.sum(1).max()) if x.numel() > 0 else 0
        if k is None:
            k = max(most, 1)
        check_k(k, x.size(1))
        if most > k:
            raise ValueError(f"'k' must be at least {most}, the most non-zeros of a row, got {k}")
        _, columns = ops.maxk(nonzero.to(x.dtype), k, False)
        return cls._of(sample(x, columns), columns, x.size(1))

    def to_dense(self) -> Tensor:
        r"""The dense matrix :math:`(N, F)`."""
        self._check()
        return to_dense(self.values, self.columns, self.num_columns)

    def _set_checked(self) -> None:
        self._checked = None
        if not torch.compiler.is_compiling():
            self._checked = self.columns, _version(self.columns), self.num_columns

    def _check(self) -> None:
        """Raises if columns were edited since the last check and are now invalid."""
        if torch.compiler.is_compiling():
            return
        columns, *rest = self._checked or (None,)
        if columns is not self.columns or rest != [_version(columns), self.num_columns]:
            _check_columns(self.columns, self.num_columns)
            self._set_checked()

    def __getstate__(self) -> dict:
        columns = self.columns
        if columns.dtype == torch.uint16:  # not supported by pickle
            columns = columns.view(torch.int16)
        return {**self.__dict__, 'columns': columns, '_checked': None}

    def __setstate__(self, state: dict) -> None:
        columns = state['columns']
        if columns.dtype == torch.int16:
            columns = columns.view(torch.uint16)
        # A file may hold invalid columns.
        self.__dict__.update(state, columns=columns, _checked=None)

    @property
    def k(self) -> int:
        """Entries per row."""
        return self.values.size(1)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        return torch.Size((self.values.size(0), self.num_columns))

    @overload
    def size(self) -> torch.Size: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape of the matrix, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the entries."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the entries."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Whether the entries require a gradient."""
        return self.values.requires_grad

    def _with(self, values: Callable[[Tensor], Tensor], columns: Callable | None = None) -> 'CBSR':
        self._check()
        return CBSR._of(values(self.values), (columns or values)(self.columns), self.num_columns)

    def to(
        self,
        device: torch.device | torch.dtype | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> 'CBSR':
        """The matrix on another device, or with entries of another dtype."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(f"'dtype' must be one of {DTYPES}, got {dtype}")
        return self._with(
            lambda t: t.to(device=device, dtype=dtype, non_blocking=non_blocking),
            lambda t: t.to(device=device, non_blocking=non_blocking),
        )

    def cpu(self) -> 'CBSR':
        """The matrix in host memory."""
        return self.to('cpu')

    def cuda(
        self, device: torch.device | str | int | None = None, non_blocking: bool = False
    ) -> 'CBSR':
        """The matrix on a GPU."""
        return self.to('cuda' if device is None else device, non_blocking=non_blocking)

    def pin_memory(self) -> 'CBSR':
        """The matrix in pinned memory."""
        return self._with(Tensor.pin_memory)

    def share_memory_(self) -> 'CBSR':
        """Moves the matrix to shared memory."""
        self.values.share_memory_()
        self.columns.share_memory_()
        return self

    def clone(self) -> 'CBSR':
        """A copy."""
        return self._with(Tensor.clone)

    def detach(self) -> 'CBSR':
        """The matrix detached from autograd."""
        return self._with(Tensor.detach)

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}(shape={list(self.shape)}, k={self.k}, dtype={self.dtype}, '
            f'device={self.device})'
        )


def check_k(k: object, num_columns: int) -> None:
    """Raises unless a row of :obj:`num_columns` columns can store :obj:`k` entries."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"'k' must be an integer, got {type(k).__name__}")
    if not 1 <= k <= num_columns:
        raise ValueError(f"'k' must be 1 to {num_columns}, the number of columns, got {k}")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # Inference tensors have no version.


def _check_columns(columns: Tensor, num_columns: int) -> None:
    if columns.numel() == 0:
        return
    columns = columns.long().sort(1)[0]
    if torch.compiler.is_compiling() or (
        columns.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        right = (columns[:, 0] >= 0) & (columns[:, -1] < num_columns)
        right &= (columns[:, 1:] != columns[:, :-1]).all(1)
        torch._assert_async(right.all(), "pyg_fast: 'columns' are out of range or occur twice")
        return
    low, high = (int(v) for v in columns.aminmax())
    if low < 0 or high >= num_columns:
        raise IndexError(
            f"'columns' must be within [0, {num_columns}), got values from {low} to {high}"
        )
    twice = (columns[:, 1:] == columns[:, :-1]).nonzero()
    if twice.size(0) > 0:
        row, at = twice[0].tolist()
        raise ValueError(
            f"'columns' must be distinct within a row, row {row} has column "
            f'{int(columns[row, at])} twice'
        )


def to_dense(values: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Writes the entries to a dense matrix. Unchecked."""
    if transforms_active():
        return _cbsr_to_dense_reference(values, columns, num_columns).to(values.dtype)
    return ToDense.apply(values, columns, num_columns)


def sample(dense: Tensor, columns: Tensor) -> Tensor:
    """Reads the entries at given columns. Unchecked."""
    if transforms_active():
        return dense.gather(1, columns.long())
    return Sample.apply(dense, columns)


class ToDense(torch.autograd.Function):
    """Writes the entries to a dense matrix."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, columns: Tensor, num_columns: int) -> Tensor:
        save(ctx, columns)
        return ops.cbsr_to_dense(values, columns, num_columns)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (columns,) = saved(ctx)
        return Sample.apply(grad, columns), None, None


class Sample(torch.autograd.Function):
    """Reads the entries at given columns: the adjoint of :class:`ToDense`."""

    @staticmethod
    def forward(ctx: Context, dense: Tensor, columns: Tensor) -> Tensor:
        save(ctx, columns, dense.size(1))
        return ops.cbsr_sample(dense, columns)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, num_columns = saved(ctx)
        return ToDense.apply(grad, columns, num_columns), None


@fake('cbsr_to_dense')
def _cbsr_to_dense_fake(values: Tensor, dim: int) -> Tensor:
    return values.new_empty(values.size(0), dim)


@fake('cbsr_sample')
def _cbsr_sample_fake(dense: Tensor, columns: Tensor) -> Tensor:
    return dense.new_empty(columns.size(0), columns.size(1))


@reference('cbsr_to_dense')
def _cbsr_to_dense_reference(values: Tensor, columns: Tensor, dim: int) -> Tensor:
    values = values.double()
    return values.new_zeros(values.size(0), dim).scatter(1, columns.long(), values)


@reference('cbsr_sample')
def _cbsr_sample_reference(dense: Tensor, columns: Tensor) -> Tensor:
    return dense.double().gather(1, columns.long())


torch.serialization.add_safe_globals([CBSR])
