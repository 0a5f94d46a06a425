"""Runs the CUDA kernels of messages where no GPU is: their Triton source, by numpy.

Programs run one after another, and every read and write is checked to be inside of its tensor.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_fast.sparse.groups import Groups, groups_of

from ._parts import Pieces, _cuda, _entry, _passes, _run, _tiles_cuda


class Block(np.ndarray):
    """A value of a program."""

    def to(self, dtype: Any, bitcast: bool = False) -> 'Block':
        if dtype in HALF:  # Held as float32.
            rounded = torch.from_numpy(np.asarray(self, np.float32)).to(HALF[dtype])
            return rounded.float().numpy().view(Float16 if dtype == 'float16' else Block)
        return (self.view(dtype) if bitcast else self.astype(dtype)).view(Block)


class Float16(Block):
    """Products of such numbers are rounded."""

    def __mul__(self, other: Any) -> 'Block':
        product = np.asarray(self) * np.asarray(other)
        assert isinstance(other, Float16)
        return product.view(Block).to('float16')


HALF = {'bfloat16': torch.bfloat16, 'float16': torch.float16}


def block(x: Any, dtype: Any = None) -> Block:
    return np.asarray(x, dtype).view(Block)


class Pointer:
    """Places in a tensor. Integers that are added move them."""

    def __init__(self, memory: np.ndarray, place: Any = 0) -> None:
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> 'Pointer':
        return Pointer(self.memory, self.place + other)

    def inside(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The places, and which of them are meant."""
        place, mask = np.broadcast_arrays(self.place, True if mask is None else mask)
        assert np.all((place >= 0) & (place < self.memory.size) | ~mask), 'out of bounds'
        return place, mask


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Block:
    place, mask = pointer.inside(mask)
    if not pointer.memory.size:
        return block(np.full(place.shape, other, pointer.memory.dtype))
    found = pointer.memory[np.where(mask, place, 0)]
    return block(np.where(mask, found, np.asarray(other, pointer.memory.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, mask = pointer.inside(mask)
    value = np.broadcast_to(value, np.broadcast_shapes(place.shape, np.shape(value)))
    assert value.shape == place.shape
    pointer.memory[place[mask]] = value[mask]


def _add(pointer: Pointer, value: Any, mask: Any = None, sem: str = 'acq_rel') -> None:
    store(pointer, load(pointer, mask) + value, mask)


def _sum(x: Any, axis: int | None = None, keep_dims: bool = False) -> Block:
    """As threads do: neighbours first."""
    x = np.asarray(x).reshape(-1) if axis is None else np.moveaxis(np.asarray(x), axis, 0)
    while len(x) > 1:
        x = x[::2] + x[1::2]
    x = x[0]
    return block(np.expand_dims(x, axis) if keep_dims and axis is not None else x)


def _best(of: np.ufunc) -> Callable[..., Block]:
    def best(x: Any, axis: int | None = None, keep_dims: bool = False) -> Block:
        return block(of.reduce(np.asarray(x), axis=axis, keepdims=keep_dims))

    return best


def _better(ignoring: np.ufunc, keeping: np.ufunc) -> Callable[..., Block]:
    def better(a: Any, b: Any, propagate_nan: bool = False) -> Block:
        return block((keeping if propagate_nan else ignoring)(a, b))

    return better


def _dot(
    a: Block, b: Block, acc: Any = 0, input_precision: str = 'tf32', out_dtype: Any = np.float32
) -> Block:
    assert min(*a.shape, *b.shape) >= 16 or input_precision == 'tf32x3'
    return block(np.matmul(np.asarray(a, out_dtype), np.asarray(b, out_dtype)) + acc, out_dtype)


def _scan(blocks: Sequence[Any], axis: int, combine: Callable[..., Any]) -> list[Block]:
    """From first to last, one row after another."""
    assert axis == 0
    rows = [np.moveaxis(np.asarray(each), 0, 0) for each in np.broadcast_arrays(*blocks)]
    out = [[each[0] for each in rows]]
    for k in range(1, len(rows[0])):
        out.append(list(combine(*out[-1], *(each[k] for each in rows))))
    return [block(np.stack(each)) for each in zip(*out, strict=True)]


def _rand(seed: Any, place: Any) -> Block:
    bits = np.asarray(place, np.int64).astype(np.uint64) + np.uint64(int(seed) % 2**32 * 2**20)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return block((bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Block]:
    return lambda *args: block(function(*args))


def _where(condition: Any, a: Any, b: Any) -> Block:
    out = block(np.where(condition, a, b))
    return out.astype(np.float32) if isinstance(a, float) and isinstance(b, float) else out


def _assembly(asm: str, constraints: str, args: list[Block], **options: Any) -> Block:
    """A sigmoid, a power, halves, or the row of a table, which stops where the table has none."""
    if 'rcp' in asm:
        return block(1 / (1 + np.exp(-args[0])))
    if 'ex2' in asm:
        return block(np.exp2(args[0]))
    if 'cvt.rn' in asm or 'shl' in asm:
        return args[0].to(options['dtype'])
    row, count = args
    assert 'trap' in asm
    assert np.all((row >= 0) & (row < count)), 'no row of the table'
    return row


_program = 0
_erf = np.vectorize(math.erf, otypes=[np.float32])
TL = SimpleNamespace(
    **{name: name for name in HALF},
    **{name: np.dtype(name) for name in ('int32', 'int64', 'uint32', 'float32', 'float64')},
    int1=np.dtype(bool), constexpr=None, PropagateNan=SimpleNamespace(ALL=True),
    **{name: _elementwise(getattr(np, name)) for name in (
        'abs', 'ceil', 'cos', 'exp', 'exp2', 'floor', 'log', 'log2', 'sin', 'sqrt',
        'expand_dims',
    )}, where=_where,
    rsqrt=_elementwise(lambda x: 1 / np.sqrt(x)), erf=_elementwise(_erf),
    program_id=lambda axis: block(_program, np.int32),
    range=lambda a, b, step, num_stages: range(int(a), int(b), int(step)),
    arange=lambda a, b: block(np.arange(a, b, dtype=np.int32)),
    zeros=lambda shape, dtype: block(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype: block(np.full(shape, value, dtype)),
    cast=lambda x, dtype: block(x, dtype), cdiv=lambda a, b: block(-(-a // b)),
    load=load, store=store, atomic_add=_add, debug_barrier=lambda: None, rand=_rand,
    sum=_sum, reduce=lambda x, axis, combine, keep_dims=False: _sum(x, axis, keep_dims),
    max=_best(np.fmax), min=_best(np.fmin),
    maximum=_better(np.fmax, np.maximum), minimum=_better(np.fmin, np.minimum),
    associative_scan=_scan, broadcast_to=lambda x, shape: block(np.broadcast_to(x, shape)),
    cumsum=lambda x, axis: block(np.cumsum(x, axis, dtype=x.dtype)),
    dot=_dot, trans=_elementwise(np.transpose), inline_asm_elementwise=_assembly,
)  # fmt: skip
LIBDEVICE = SimpleNamespace(
    **{name: _elementwise(getattr(np, name)) for name in ('expm1', 'log1p', 'log10', 'tanh')},
    **{name: _elementwise(getattr(np, name.replace('a', 'arc', 1)))
       for name in ('asin', 'acos', 'atan', 'atan2')},
    pow=_elementwise(np.power), add_rn=_elementwise(np.add), sub_rn=_elementwise(np.subtract),
)  # fmt: skip


def _jit(function: Any = None, **options: Any) -> Any:
    return (lambda each: each) if function is None else function


@lru_cache
def _function(text: str, name: str) -> Any:
    scope = {'triton': SimpleNamespace(jit=_jit), 'tl': TL, 'libdevice': LIBDEVICE}
    exec(compile(text, '<message>', 'exec', dont_inherit=True), scope)
    return scope[name]


def _memory(x: Tensor) -> Pointer:
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return Pointer(x.detach().as_strided((size,), (1,)).numpy())


def _launch(
    text: str, name: str, num_warps: int, num_programs: int, tensors: Sequence[Tensor],
    numbers: Sequence[int], constants: Sequence[Any], registers: int | None = None,
) -> None:  # fmt: skip
    global _program
    fixed = [getattr(TL, {'fp32': 'float32', 'fp64': 'float64'}.get(str(c), str(c)), c)
             for c in constants]  # fmt: skip
    scalars = [block(n, np.int32) for n in numbers]
    with np.errstate(all='ignore'):
        for k in range(num_programs):
            _program = k
            _function(text, name)(*map(_memory, tensors), *scalars, *fixed)


@contextmanager
def by_numpy(
    pieces: Callable[..., Pieces | Groups], group_size: int | None = None
) -> Iterator[list[str]]:
    """Runs the passes of messages on a CPU as on a GPU, with long rows divided by `pieces`, and
    graphs with groups of a size. Yields the names of kernels that ran, in their order."""
    names: list[str] = []

    def launch(text: str, name: str, *args: Any) -> None:
        names.append(name)
        _launch(text, name, *args)

    def run_pass(one: Any, graph: Any, inputs: Any, acc: torch.dtype, seed: Any) -> Any:
        if one.in_tiles:
            return _tiles_cuda.run_pass_tiles(one, graph, inputs, seed)
        schedule = _cuda.schedule_of(graph, one.row_role)
        if group_size is not None:
            schedule = schedule._replace(groups=groups_of(schedule.rowptr, group_size))
        return _cuda.run_pass_cuda(one, schedule, inputs, acc, seed)

    joint, make_plan = _passes.Passes.joint_pass, _entry.make_plan

    def plan_on_gpu(captured: Any, *args: Any) -> Any:
        return make_plan(dataclasses.replace(captured, on_cuda=True), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _passes.Passes, 'joint_pass', lambda passes, cuda, *args: joint(passes, True, *args)
        )
        patch.setattr(_passes.Passes, 'prepare_backward', lambda *args: None)
        patch.setattr(_entry, 'make_plan', plan_on_gpu)
        patch.setattr(_entry, '_passes_for', _entry._passes_for.__wrapped__)
        patch.setattr(_entry, '_stores', {})  # Their captures have plans of a CPU.
        patch.setattr(_cuda, 'launch_kernel', launch)
        patch.setattr(_tiles_cuda, '_choose_form', lambda source, *args: source.forms[0])
        patch.setattr(_run, 'run_pass', run_pass)
        patch.setattr(_cuda, 'divide_rows', pieces)
        patch.setattr(_tiles_cuda, 'processors', lambda device: 3)
        patch.setattr(_tiles_cuda, 'takes', lambda graph: True)
        patch.setattr(_tiles_cuda, 'product_of_halves', lambda a, b: a.float() @ b.float())
        yield names
