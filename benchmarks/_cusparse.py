"""Direct calls of cuSPARSE: a chosen algorithm; descriptors and work buffer are made once."""
import contextlib
import ctypes
import functools
import importlib.util
import weakref
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = 'libcusparse.so.12'
ALGORITHMS = {'ALG1': 4, 'ALG2': 6, 'ALG3': 12}  # CUSPARSE_SPMM_CSR_ALG*

_NON_TRANSPOSE, _TRANSPOSE = 0, 1
_INDEX = {torch.int32: 2, torch.int64: 3}  # CUSPARSE_INDEX_32I, CUSPARSE_INDEX_64I
_VALUE = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_*
_ORDER_ROW = 2
_BASE_ZERO = 0
_NUMERIC = 1
_CSR2CSC_DEFAULT = 1
_NOT_SUPPORTED = 10

_ptr, _enum, _i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_product = [_ptr, _enum, _enum, _ptr, _ptr, _ptr, _ptr, _ptr, _enum, _enum, _ptr]
_transposition = [_ptr, _enum, _enum, _enum, *[_ptr] * 6, _enum, _enum, _enum, _enum, _ptr]
_PROTOTYPES = {
    'cusparseCreate': [_ptr],
    'cusparseSetStream': [_ptr, _ptr],
    'cusparseGetVersion': [_ptr, _ptr],
    'cusparseCreateCsr': [_ptr, _i64, _i64, _i64, _ptr, _ptr, _ptr, _enum, _enum, _enum, _enum],
    'cusparseCreateDnMat': [_ptr, _i64, _i64, _i64, _ptr, _enum, _enum],
    'cusparseDestroySpMat': [_ptr],
    'cusparseDestroyDnMat': [_ptr],
    **{f'cusparseSpMM{step}': _product for step in ('_bufferSize', '_preprocess', '')},
    'cusparseCsr2cscEx2_bufferSize': _transposition,
    'cusparseCsr2cscEx2': _transposition,
}


class CusparseError(RuntimeError):
    """A cuSPARSE call that did not succeed."""


@functools.cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded, of the system, or of an installed nvidia package."""
    spec = importlib.util.find_spec('nvidia')
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    packaged = [str(path) for root in roots for path in sorted(Path(root).glob(f'*/lib/{LIBRARY}'))]
    errors = []
    for name in [LIBRARY, *packaged]:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
            continue
        for function, argtypes in _PROTOTYPES.items():
            getattr(library, function).argtypes = argtypes
            getattr(library, function).restype = _enum
        library.cusparseGetErrorString.argtypes = [_enum]
        library.cusparseGetErrorString.restype = ctypes.c_char_p
        return library
    raise CusparseError('; '.join(errors))


def _status(function: str, *args: object) -> int:
    return getattr(_library(), function)(*args)


def _call(function: str, *args: object) -> None:
    status = _status(function, *args)
    if status:
        reason = _library().cusparseGetErrorString(status).decode()
        raise CusparseError(f'{function}: {reason}')


@functools.cache
def _handle() -> ctypes.c_void_p:
    torch.cuda.current_stream()  # cusparseCreate needs a context
    handle = ctypes.c_void_p()
    _call('cusparseCreate', ctypes.byref(handle))
    return handle


def version() -> int | None:
    """The version of the library, ``None`` if there is none."""
    number = ctypes.c_int()
    with contextlib.suppress(CusparseError):
        _call('cusparseGetVersion', _handle(), ctypes.byref(number))
    return number.value or None


def _set_stream() -> None:
    _call('cusparseSetStream', _handle(), torch.cuda.current_stream().cuda_stream)


class _Descriptor:
    def __init__(self, create: str, destroy: str, *args: object) -> None:
        self.pointer = ctypes.c_void_p()
        _call(create, ctypes.byref(self.pointer), *args)
        weakref.finalize(self, _status, destroy, self.pointer).atexit = False


def _csr(rowptr: Tensor, col: Tensor, value: Tensor, num_cols: int) -> _Descriptor:
    return _Descriptor(
        'cusparseCreateCsr', 'cusparseDestroySpMat', rowptr.numel() - 1, num_cols, col.numel(),
        rowptr.data_ptr(), col.data_ptr(), value.data_ptr(), _INDEX[rowptr.dtype],
        _INDEX[col.dtype], _BASE_ZERO, _VALUE[value.dtype])


def _dense(matrix: Tensor) -> _Descriptor:
    if not matrix.is_contiguous():
        raise ValueError('matrix: got strides, expected a contiguous tensor')
    rows, columns = matrix.shape
    return _Descriptor(
        'cusparseCreateDnMat', 'cusparseDestroyDnMat', rows, columns, columns, matrix.data_ptr(),
        _VALUE[matrix.dtype], _ORDER_ROW)


class SpMM:
    """``out = A @ x``, with ``A`` in CSR format (int32 or int64) and ``x`` row-major; with
    ``num_cols``, the number of columns of ``A``, ``A.t() @ x``. Sums of half types run in float32.
    ``preprocess``: calls ``cusparseSpMM_preprocess`` once, as for a graph that stays.
    """

    def __init__(
        self, rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, algorithm: str,
        preprocess: bool = False, num_cols: int | None = None,
    ) -> None:
        transposed = num_cols is not None
        self.out = x.new_empty(num_cols if transposed else rowptr.numel() - 1, x.size(1))
        # Descriptors of its own: what preprocess finds is bound to them.
        descriptors = (
            _csr(rowptr, col, value, num_cols if transposed else x.size(0)),
            _dense(x), _dense(self.out))
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        scalar = ctypes.c_double if compute == torch.float64 else ctypes.c_float
        self.alpha, self.beta = scalar(1), scalar(0)
        self.kept = descriptors, (rowptr, col, value, x)
        matrix, given, into = (descriptor.pointer for descriptor in descriptors)
        self.args = (
            _handle(), _TRANSPOSE if transposed else _NON_TRANSPOSE, _NON_TRANSPOSE,
            ctypes.byref(self.alpha), matrix, given, ctypes.byref(self.beta), into,
            _VALUE[compute], ALGORITHMS[algorithm])
        size = ctypes.c_size_t()
        _set_stream()
        _call('cusparseSpMM_bufferSize', *self.args, ctypes.byref(size))
        self.buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)
        if preprocess:
            status = _status('cusparseSpMM_preprocess', *self.args, self.buffer.data_ptr())
            if status not in (0, _NOT_SUPPORTED):  # optional: some algorithms have none
                raise CusparseError(f'cusparseSpMM_preprocess: status {status}')

    def __call__(self) -> Tensor:
        _set_stream()
        _call('cusparseSpMM', *self.args, self.buffer.data_ptr())
        return self.out


def transpose(
    rowptr: Tensor, col: Tensor, value: Tensor, num_cols: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``A.t()`` in CSR format, by ``cusparseCsr2cscEx2``; indices are int32."""
    t_rowptr = rowptr.new_empty(num_cols + 1)
    t_col, t_value = torch.empty_like(col), torch.empty_like(value)
    args = (
        _handle(), rowptr.numel() - 1, num_cols, col.numel(), value.data_ptr(), rowptr.data_ptr(),
        col.data_ptr(), t_value.data_ptr(), t_rowptr.data_ptr(), t_col.data_ptr(),
        _VALUE[value.dtype], _NUMERIC, _BASE_ZERO, _CSR2CSC_DEFAULT)
    _set_stream()
    size = ctypes.c_size_t()
    _call('cusparseCsr2cscEx2_bufferSize', *args, ctypes.byref(size))
    buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=col.device)
    _call('cusparseCsr2cscEx2', *args, buffer.data_ptr())
    return t_rowptr, t_col, t_value
