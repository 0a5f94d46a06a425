"""Writes the Triton source of passes with matrix products: a program takes tiles of consecutive
edges, in the order of their destinations, and multiplies the values of a tile by a parameter on
tensor cores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from ._ir import NODES, Load, Program, Refused, is_float, number
from ._triton import Out
from ._values import CALLS, POWERS, ROUNDED_ADD, next_power_of_two, sum_text

# The least dimension of a block of a matrix product.
_MIN_BLOCK = 16
# The widest values: registers hold no wider tile.
_MAX_WIDTH = 128
# Registers of a multiprocessor.
_REGISTERS = 2**16
# The shared memory of a program of compute capability 9.0, where there is no GPU, and the least of
# all that have products of bfloat16.
_SHARED_MEMORY, _LEAST_SHARED_MEMORY = 227 * 2**10, 99 * 2**10
# Edges of a tile; the rows whose sums a product computes at once; wider values take more warps.
EDGES, _ROWS, WIDE = 64, 16, 64
_HALF = ('float16', 'bfloat16')
# Parts in bfloat16 of the factors of products of float32, by torch's name of their precision.
_PARTS = {'highest': 3, 'high': 2}
# Numbers of a factor are a multiple of that: products of 16-byte aligned rows are the fast ones.
_ALIGNED = 8


class Factor(NamedTuple):
    """A value of each edge that the kernel stores in the order of the tiles: torch multiplies it
    with another one, into the gradient of a matrix."""

    size: int
    stored: int  # numbers, with zeros up to a multiple of 16 bytes
    dtype: str
    is_local: bool  # of the tile of a program alone: no other kernel reads it


class TileSource(NamedTuple):
    """A generated kernel over tiles of edges."""

    text: str
    loads: tuple[Load, ...]  # the inputs, in the order of the parameters
    warps: int
    registers: int  # of a thread at most
    per_processor: int  # programs
    factors: tuple[Factor, ...]
    pairs: dict[int, tuple[tuple[int, int], ...]]  # of factors, whose products a result adds up


class _Value(NamedTuple):
    """A block of the code: `width` is 1 where all columns are equal."""

    name: str
    width: int
    in_loop: bool  # whether it varies with the edge


class _Part(NamedTuple):
    """Some channels of a result: its number, a name, their number, the first one, and all."""

    result: int
    name: str
    size: int
    start: int
    stride: int

    def row(self, number: str) -> str:
        """The code of the place of the first number in a row."""
        return f'{number} * {self.stride}' + f' + {self.start}' * (self.start > 0)


def check_tiles(program: Program, outs: Sequence[Out]) -> None:
    """Raises :class:`Refused` if tiles cannot compute a pass."""
    _Tiles(program, outs, 'highest').text()


def generate_tiles(program: Program, outs: Sequence[Out], precision: str) -> TileSource:
    """The source of a pass.

    Args:
        program: Its values, each of one dimension at most.
        outs: Its results, all by destination, by edge or over all edges.
        precision: Of products of float32, by torch's name: `highest` or `high`.

    Raises:
        Refused: If tiles cannot compute it.
    """
    tiles = _Tiles(program, outs, precision)
    text = tiles.text()
    warps = 8 if tiles.has_breaks else 4
    several = tiles.programs()
    registers = min(255, _REGISTERS // (32 * warps * several) // 8 * 8)
    factors = tuple(tiles.factors.values())
    return TileSource(text, tuple(tiles.loads), warps, registers, several, factors, tiles.pairs)


@lru_cache
def shared_memory() -> int:
    """The shared memory of a program on the GPUs here, in bytes; 0 where one has no products of
    bfloat16."""
    if not torch.cuda.is_available():
        return _SHARED_MEMORY
    each = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    sizes = [getattr(one, 'shared_memory_per_block_optin', _LEAST_SHARED_MEMORY) for one in each]
    return min(size if one.major >= 8 else 0 for size, one in zip(sizes, each, strict=True))


def _widest(program: Program, outs: Sequence[Out]) -> int:
    """The numbers of the widest block: those of a join, and of what is read in parts alone, are
    none."""
    order = program.reachable(out.at for out in outs)
    whole = _read_whole(program, order)
    return max(
        math.prod(program[at].shape) for at in order
        if program[at].op not in ('outer', 'permute', 'cat') and not _is_matrix(program, at)
        and (program[at].op != 'load' or at in whole)
    )  # fmt: skip


def _read_whole(program: Program, order: Sequence[int]) -> set[int]:
    """What others than slices read."""
    return {arg for at in order if program[at].op != 'slice' for arg in program[at].args}


def _is_matrix(program: Program, at: int) -> bool:
    """Whether a value is the parameter of a matrix product, as it lies in memory."""
    return (
        program[at].op == 'load'
        and program[at].attrs[0] == 'param'
        and (len(program[at].shape) == 2)
    )


def _is_matrix_shape(shape: tuple[int, ...]) -> bool:
    return sum(n > 1 for n in shape) > 1


def _block(size: int) -> int:
    return 1 if size == 1 else max(_MIN_BLOCK, next_power_of_two(size))


@dataclass
class _Tiles:
    """The code of one kernel."""

    program: Program
    outs: Sequence[Out]
    precision: str
    loads: dict[Load, str] = field(default_factory=dict)
    values: dict[int, _Value] = field(default_factory=dict)
    matrices: dict[int, str] = field(default_factory=dict)
    multiplied: set[int] = field(default_factory=set)  # matrices
    thirds: dict[str, list[str]] = field(default_factory=dict)  # by the code of a block
    widths: dict[int, None] = field(default_factory=dict)  # of rows of numbers
    first: list[str] = field(default_factory=list)  # before the loop over tiles
    lines: list[str] = field(default_factory=list)  # in it
    last: list[str] = field(default_factory=list)  # after it
    is_wide: bool = field(init=False)
    has_breaks: bool = field(init=False)  # whether products read others' results from memory
    has_dropout: bool = False
    factors: dict[int, Factor] = field(default_factory=dict)  # by position in the program
    scratches: dict[int, int] = field(default_factory=dict)  # factors of values read in parts
    pairs: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_wide = _widest(self.program, self.outs) > WIDE
        # The registers of 4 warps hold no derivative, and few wide values.
        self.has_breaks = self.is_wide or self._derives()

    def _derives(self) -> bool:
        return any(self.program[out.at].op == 'outer' for out in self.outs)

    def text(self) -> str:
        """The kernel, and the functions that it calls."""
        for k, out in enumerate(self.outs):
            self._add_result(k, out)
        if self._shared_bytes() > shared_memory():
            raise Refused('matrices that do not fit into shared memory')
        begin, edges = self._edges()
        body = [
            'pid = tl.program_id(0)',
            *['seed = tl.load(seed_at)'] * self.has_dropout,
            f'i = tl.arange(0, {EDGES})',
            *(f'c{width} = tl.arange(0, {width})[None, :]' for width in self.widths),
            *self.first,
            *begin,
            # One stage: buffers for more tiles would take the memory of a second program.
            'for t in tl.range(first_tile + pid, num_tiles, num_programs, num_stages=1):',
            *('    ' + line for line in [*edges, *self.lines]),
            *self.last,
        ]
        reduced = [k for k, out in enumerate(self.outs) if out.kind not in ('edge', 'total')]
        extremes = [k for k in reduced if self.outs[k].kind in ('max', 'min')]
        numbers = ['num_edges', 'num_rows', 'first_tile', 'num_tiles', 'num_programs']
        parameters = [
            'row_of', 'col', 'perm', 'rank_of', 'place_of', *self.loads.values(),
            *(f'factor{n}' for n in range(len(self.factors))),
            *(f'out{k}' for k in range(len(self.outs)) if k not in self.pairs),
            *(f'arg{k}' for k in extremes),
            *(f'part{k}' for k in reduced), *(f'parg{k}' for k in extremes), 'seed_at', *numbers,
            'HAS_PERM: tl.constexpr', 'OFFSET: tl.constexpr',
            *(f'STEP_{name}: tl.constexpr' for (role, _), name in self.loads.items()
              if role in NODES),
        ]  # fmt: skip
        return '\n'.join(
            [
                ROUNDED_ADD.rstrip(),
                '',
                '',
                _FUNCTIONS,
                f'@triton.jit(do_not_specialize={numbers})',
                f'def message_tiles({", ".join(parameters)}):',
                *('    ' + line for line in body),
                '',
            ]
        )

    def _shared_bytes(self) -> int:
        """A bound of the shared memory: parameters, in parts of bfloat16, and the values of a tile
        on the way to a product."""
        count = 1 if self._is_half() else _PARTS[self.precision]
        shapes = [self.program[at].shape for at in self.multiplied]
        matrices = sum(math.prod(map(_block, shape)) for shape in shapes)
        tile = 4 * EDGES * _block(_widest(self.program, self.outs))
        kinds = {out.kind for out in self.outs}
        is_padded = any(_block(n) > n for shape in shapes for n in shape)
        # As compiled kernels of many networks have it.
        if count == 1 or not self.has_breaks:
            tiles = 3.0
        elif kinds & {'max', 'min'}:
            tiles = 2.0
        else:
            tiles = 1.5 if is_padded or any(role == 'arg' for role, _ in self.loads) else 1.0
        return 2 * count * matrices + int(tiles * tile)

    def programs(self) -> int:
        """How many programs a multiprocessor runs at once: more hide the latency of memory, fewer
        have more registers."""
        most = 3 if not self.has_breaks else 2 if self._is_half() else 1
        return max(1, min(most, shared_memory() // (self._shared_bytes() + 2**10)))

    def _is_half(self) -> bool:
        return {value.dtype for value in self.program.values if value.op == 'mm'}.issubset(_HALF)

    def _edges(self) -> tuple[list[str], list[str]]:
        """What is read of the edges of the first tile, before the loop, and what the loop begins
        with: it reads what the next tile needs before it computes, for memory takes long."""
        kinds = {out.kind for out in self.outs} - {'edge', 'total'}
        has_ids = self.has_dropout or any(role in ('edge', 'arg') for role, _ in self.loads)
        has_ids = has_ids or any(out.kind == 'edge' for out in self.outs)
        reads = [
            'row_ = tl.load(row_of + e, e < num_edges, num_rows)',
            'col_ = tl.load(col + e, e < num_edges, 0)',
        ]
        if has_ids:
            reads += ['eid_ = e', 'if HAS_PERM:', '    eid_ = tl.load(perm + e, e < num_edges, 0)']
        if kinds:
            reads.append('rank_ = tl.load(rank_of + e, e < num_edges, -1)')
        lines = [
            f'e = t * {EDGES} + i',
            'inside = e < num_edges',
            'row = row_',
            'm = row < num_rows',
            'm_ = m[:, None]',
            'src = tl.where(m, col_, 0)[:, None]',
            'dst = tl.where(m, row, 0)[:, None]',
        ]
        if has_ids:
            lines.append('eid = tl.where(m, eid_, 0)[:, None]')
        if kinds:
            lines.append('rank = rank_')
        if kinds & {'sum', 'mean'}:
            lines += [
                f'last = tl.minimum((t + 1) * {EDGES}, num_edges) - 1',
                'num_ranks = tl.load(rank_of + last) + 1',
                f'first_to = tl.load(place_of + (t * {EDGES} + tl.arange(0, {_ROWS})))',
            ]
        if kinds & {'max', 'min'}:  # Where the numbers of a row end in the tile.
            lines += [
                'next_rank = tl.load(rank_of + (e + 1), e + 1 < num_edges, -1)',
                f'ends = m & ((rank != next_rank) | (i == {EDGES - 1}))',
                f'place = tl.load(place_of + (t * {EDGES} + tl.maximum(rank, 0)), ends, -1)',
                'ends_row = ((place >= 0) & (place < num_rows))[:, None]',
                'ends_part = (place >= num_rows)[:, None]',
                'end_slot = tl.cast(place - num_rows, OFFSET)[:, None]',
                f'key = (rank * {EDGES} + i)[:, None]',
            ]
        begin = [f'e = (first_tile + pid) * {EDGES} + i', *reads]
        # The place of an edge behind the next tile may pass 2^31.
        skip = f'e = tl.minimum(t + num_programs, num_tiles) * {EDGES} + i'
        return begin, [*lines, skip, *reads, f'e = t * {EDGES} + i']

    # Values.

    def value(self, at: int) -> _Value:
        """The block of a value, computed once."""
        order = self.program.reachable([at], self.values)
        whole = _read_whole(self.program, order)
        for each in order:
            op, _, _, shape, _ = self.program[each]
            if op == 'load' and each != at and each not in whole:
                continue
            # Those of two dimensions are parameters of products, which these read.
            if op not in ('load', 'permute') or not _is_matrix_shape(shape):
                self.values[each] = self._compute(each)
        return self._block_of(at)

    def _block_of(self, at: int) -> _Value:
        if at not in self.values:
            raise Refused(f'a parameter of shape {self.program[at].shape} around a matrix product')
        return self.values[at]

    def _emit(self, text: str, width: int, in_loop: bool) -> _Value:
        name = f'v{len(self.lines) + len(self.first)}'
        (self.lines if in_loop else self.first).append(f'{name} = {text}')
        return _Value(name, width, in_loop)

    def _compute(self, at: int) -> _Value:
        op, args, attrs, shape, dtype = self.program[at]
        size = math.prod(shape)
        if _is_matrix_shape(shape):
            raise Refused(f'values of shape {shape} around a matrix product')
        if size > _MAX_WIDTH:
            raise Refused(f'{size} channels around a matrix product')
        if op == 'load':
            return self._load(at, 0, size)
        if op == 'slice':
            return self._slice(at)
        if op == 'cat':
            return self._join(at)
        if op == 'const':
            return self._constant(at)
        if op == 'keep':
            return self._keep(attrs[0], attrs[1], size)
        if op == 'mm':
            return self._product(at)
        if op in ('sum', 'amax', 'amin'):
            return self._reduction(at)
        if op in ('view', 'expand', 'permute', 'detach'):
            return self._block_of(args[0])
        if op == 'cast':
            inner = self._block_of(args[0])
            if is_float(dtype) and not is_float(self.program[args[0]].dtype):
                return self._emit(f'{inner.name}.to(tl.float32)', inner.width, inner.in_loop)
            return inner
        if op not in CALLS:
            raise Refused(f'{op} around a matrix product')
        blocks = [self._block_of(arg) for arg in args]
        if op == 'pow' and self.program[args[1]].op == 'const':
            exponent = number(self.program[args[1]])
            if exponent in POWERS:
                blocks, op = blocks[:1], POWERS[exponent]
        return self._emit(
            CALLS[op].format(*(block.name for block in blocks)),
            max(block.width for block in blocks),
            any(block.in_loop for block in blocks),
        )

    def _constant(self, at: int) -> _Value:
        value, dtype = number(self.program[at]), self.program[at].dtype
        if dtype == 'bool':
            return self._emit(f'tl.full([1, 1], {bool(value)}, tl.int1)', 1, False)
        text = repr(float(value)) if math.isfinite(value) else f"float('{value}')"
        return self._emit(f'tl.full([1, 1], {text}, tl.float32)', 1, False)

    def _columns(self, size: int) -> tuple[str, str]:
        """The places of the numbers of a row, and the mask of those that exist, if not all do."""
        width = _block(size)
        if width == 1:
            return '0', ''
        self.widths[width] = None
        return f'c{width}', '' if width == size else f'(c{width} < {size})'

    def _slice(self, at: int) -> _Value:
        """Some channels of an input, or by way of memory of a computed value."""
        _, (x,), (dim, start, _, step), shape, _ = self.program[at]
        if math.prod(shape[:dim]) != 1 or step != 1:
            raise Refused('a part of rows of a value around a matrix product')
        while self.program[x].op == 'view':
            (x,) = self.program[x].args
        first, size = start * math.prod(shape[dim + 1 :]), math.prod(shape)
        if self.program[x].op == 'load':
            return self._load(x, first, size)
        if x not in self.scratches:
            whole = math.prod(self.program[x].shape)
            self.scratches[x] = self._scratch([(self._block_of(x), whole)])
        return self._load_channels(self.scratches[x], first, size)

    def _join(self, at: int) -> _Value:
        """Values one after another, by way of memory."""
        parts = [(self.value(one), math.prod(self.program[one].shape)) for one in self._parts(at)]
        return self._load_channels(self._scratch(parts), 0, math.prod(self.program[at].shape))

    def _scratch(self, parts: Sequence[tuple[_Value, int]]) -> int:
        """Stores blocks one after another, for this tile alone; returns the number."""
        number, size = len(self.factors), sum(size for _, size in parts)
        self.factors[-1 - number] = Factor(size, size, 'float32', True)
        self.lines.append('tl.debug_barrier()')  # All have read what it had of another tile.
        start = 0
        for block, size in parts:
            columns, mask = self._columns(size)
            place = self._place_of_factor(number, f'{columns} + {start}' if start else columns)
            text = self._of_edges(block, _block(size))
            mask = _all_of('inside[:, None]', mask)
            self.lines.append(_store(f'factor{number}', place, text, mask))
            start += size
        return number

    def _load_channels(self, number: int, start: int, size: int) -> _Value:
        columns, mask = self._columns(size)
        name = self._load_factor(number, f'{columns} + {start}' if start else columns, mask)
        return _Value(name, _block(size), True)

    def _load(self, at: int, start: int, size: int) -> _Value:
        """Numbers of an input, from `start`."""
        _, _, (role, slot, *gathers), shape, dtype = self.program[at]
        columns, mask = self._columns(size)
        if gathers or role not in (*NODES, 'edge', 'param', 'grad', 'picked'):
            raise Refused(f'{role} around a matrix product')
        pointer = self._pointer('grad' if role == 'picked' else role, slot)
        convert = '.to(tl.float32)' if is_float(dtype) else ''
        first = f' + {start}' * (start > 0)
        if role == 'param':
            place = f'{pointer} + tl.zeros([1, 1], tl.int32){first} + {columns}'
            # In the loop: it is in the cache, and would take the registers of all tiles.
            return self._emit(_load(place, mask) + convert, _block(size), True)
        row = {'src': 'src', 'edge': 'eid'}.get(role, 'dst')
        step = f'STEP_{pointer}' if role in NODES else math.prod(shape)
        place = f'(tl.cast({row}, OFFSET) * {step}{first} + {columns})'
        mask = _all_of('m_', mask)
        block = self._emit(_load(f'{pointer} + {place}', mask) + convert, _block(size), True)
        if role != 'picked':
            return block
        chosen = self._pointer('arg', slot)
        text = f'tl.load({chosen} + {place}, {mask}, -1) == eid'
        return self._emit(f'tl.where({text}, {block.name}, 0.0)', _block(size), True)

    def _keep(self, which: int, share: str, size: int) -> _Value:
        """The factors of a dropout, as kernels of rows draw them."""
        self.has_dropout = True
        p = float.fromhex(share)
        columns, _ = self._columns(size)
        place = f'tl.cast(eid, tl.int64) * {size} + {columns}'
        drawn = self._emit(f'tl.rand(seed + {which}, {place})', _block(size), True)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return self._emit(f'tl.where({drawn.name} >= {p!r}, {scale!r}, 0.0)', _block(size), True)

    def _pointer(self, role: str, slot: int | str) -> str:
        return self.loads.setdefault((role, slot), f'{role}{slot}')  # type: ignore[arg-type]

    def _reduction(self, at: int) -> _Value:
        op, args, _, shape, _ = self.program[at]
        block, size = self._block_of(args[0]), math.prod(self.program[args[0]].shape)
        if not is_float(self.program[args[0]].dtype):
            raise Refused(f'{op} of {self.program[args[0]].dtype} around a matrix product')
        if math.prod(shape) == size:
            return block
        if block.width == 1:
            scaled = f'{block.name} * {float(size)}' if op == 'sum' else block.name
            return self._emit(scaled, 1, block.in_loop)
        other = {'sum': '0.0', 'amax': "float('-inf')", 'amin': "float('inf')"}[op]
        text = self._masked(block, size, other)
        if op == 'sum':
            return self._emit(sum_text(text, 1), 1, block.in_loop)
        return self._emit(f'tl.{op[1:]}({text}, axis=1, keep_dims=True)', 1, block.in_loop)

    def _masked(self, block: _Value, size: int, other: str = '0.0') -> str:
        """A block with `other` in the columns that pad it."""
        _, mask = self._columns(size)
        return f'tl.where({mask}, {block.name}, {other})' if mask else block.name

    # Matrix products.

    def _product(self, at: int) -> _Value:
        """The values of a tile times a parameter."""
        _, (x, weight), _, _, dtype = self.program[at]
        inner, outer = self.program[weight].shape
        if math.prod(self.program[x].shape) != inner:
            raise Refused('a linear map of several rows of an edge')
        block = self._block_of(x)
        if not block.in_loop:
            raise Refused('a matrix product of parameters')
        if inner == 1 or outer == 1:
            row = self._row_of_matrix(weight)
            if inner == 1:
                return self._emit(f'{block.name} * {row.name}', row.width, True)
            text = f'({self._masked(block, inner)}) * {row.name}'
            return self._emit(sum_text(text, 1), 1, True)
        name = self._matrix(weight)
        is_transposed = self.program[weight].op == 'permute'
        self.multiplied.add(self.program[weight].args[0] if is_transposed else weight)
        text = self._full(block, inner)
        if self.has_breaks and self._is_chained(x):
            text = self._through_memory(x, dtype)
        if dtype in _HALF:
            product = f'tl.dot(({text}).to(tl.{dtype}), ({name}).to(tl.{dtype}))'
            return self._emit(product, _block(outer), True)
        count = _PARTS[self.precision]
        parts = [*self._split(text)[:count], *self._parts_of_matrix(weight)[:count]]
        function = f'product_of_{count}' + '_apart' * self.has_breaks
        return self._emit(f'{function}({", ".join(parts)})', _block(outer), True)

    def _is_chained(self, at: int) -> bool:
        """Whether a product computes the value."""
        return any(self.program[each].op == 'mm' for each in self.program.reachable([at]))

    def _through_memory(self, at: int, dtype: str) -> str:
        """The code of a value by way of memory. Triton gives a product whose result reaches another
        one whole rows of warps, so that the second half of 8 warps computes what the first does."""
        number = self._store_factor(at, dtype)
        columns, mask = self._columns(self.factors[at].stored)
        return self._load_factor(number, columns, mask)

    def _load_factor(self, number: int, columns: str, mask: str) -> str:
        place = self._place_of_factor(number, columns)
        mask = _all_of('inside[:, None]', mask)
        self.lines.append('tl.debug_barrier()')
        return self._emit(_load(f'factor{number} + {place}', mask), 1, True).name

    def _place_of_factor(self, number: int, columns: str) -> str:
        one = [*self.factors.values()][number]
        first = f'(pid - t) * {EDGES}' if one.is_local else f'-first_tile * {EDGES}'
        return f'(tl.cast(e + {first}, OFFSET)[:, None] * {one.stored} + {columns})'

    def _split(self, text: str) -> list[str]:
        """A block as the sum of three of bfloat16."""
        if text not in self.thirds:
            names = self.thirds[text] = [f'h{len(self.thirds)}_{n}' for n in range(3)]
            self.lines.append(f'{", ".join(names)} = thirds({text})')
        return self.thirds[text]

    def _parts_of_matrix(self, at: int) -> list[str]:
        """A parameter as the sum of three of bfloat16, split once."""
        op, args, _, _, _ = self.program[at]
        if op == 'permute':
            return [f'tl.trans({name})' for name in self._parts_of_matrix(args[0])]
        name = self._matrix(at)
        if name not in self.thirds:
            names = self.thirds[name] = [f'{name}_{n}' for n in range(3)]
            self.first.append(f'{", ".join(names)} = thirds({name})')
        return self.thirds[name]

    def _full(self, block: _Value, size: int) -> str:
        """A block with all its columns, 0 where they pad it."""
        text = self._masked(block, size)
        if block.width == 1:
            return f'tl.broadcast_to({text}, [{EDGES}, {_block(size)}])'
        return text

    def _matrix(self, at: int) -> str:
        """A parameter (in, out) in registers or shared memory."""
        op, args, _, _, _ = self.program[at]
        if op == 'permute':
            return f'tl.trans({self._matrix(args[0])})'
        if not _is_matrix(self.program, at):
            raise Refused('a matrix product by what is no parameter')
        if at not in self.matrices:
            rows, columns = self.program[at].shape
            height, (place, mask) = _block(rows), self._columns(columns)
            pointer = self._pointer(*self.program[at].attrs)
            name = self.matrices[at] = f'w{len(self.matrices)}'
            down = f'tl.arange(0, {height})[:, None]'
            mask = _all_of(f'({down} < {rows})' * (height > rows), mask)
            text = _load(f'{pointer} + {down} * {columns} + {place}', mask)
            self.first.append(f'{name} = {text}.to(tl.float32)')
        return self.matrices[at]

    def _row_of_matrix(self, at: int) -> _Value:
        """A parameter with one row or column, as a row."""
        base = self.program[at].args[0] if self.program[at].op == 'permute' else at
        if not _is_matrix(self.program, base):
            raise Refused('a matrix product by what is no parameter')
        if base not in self.values:
            self.values[base] = self._load(base, 0, math.prod(self.program[base].shape))
        return self.values[base]

    # Results.

    def _add_result(self, k: int, out: Out) -> None:
        value = self.program[out.at]
        if value.op == 'outer':
            self._add_outer(k, out)
            return
        size = math.prod(value.shape)
        start = 0
        for at in self._parts(out.at):
            part = _Part(k, f'{k}_{start}', math.prod(self.program[at].shape), start, size)
            self._add_part(part, out.kind, self.value(at))
            start += part.size

    def _parts(self, at: int) -> list[int]:
        """The values whose channels a value joins."""
        op, args, attrs, shape, _ = self.program[at]
        if op == 'view':
            return self._parts(args[0]) if self.program[args[0]].op == 'cat' else [at]
        if op != 'cat':
            return [at]
        if math.prod(shape[: attrs[0]]) != 1:
            raise Refused('joined rows around a matrix product')
        return [part for arg in args for part in self._parts(arg)]

    def _add_part(self, part: '_Part', kind: str, block: _Value) -> None:
        size = part.size
        if kind == 'total':
            if size != part.stride:
                raise Refused('a sum of joined values over all edges')
            self._add_total(part.result, block, size)
            return
        text = f'{block.name} + tl.zeros([{EDGES}, {_block(size)}], tl.float32)'
        full = self._emit(text, _block(size), True)
        columns, mask = self._columns(size)
        if kind == 'edge':
            place = f'({part.row("tl.cast(eid, OFFSET)")} + {columns})'
            self.lines.append(_store(f'out{part.result}', place, full.name, _all_of('m_', mask)))
        elif kind in ('sum', 'mean') and self.has_breaks:
            self._add_sums_through_memory(part, full)
        elif kind in ('sum', 'mean'):
            self._add_sum(part, full)
        elif kind in ('max', 'min'):
            self._add_extreme(part, kind, full)
        else:
            raise Refused(f'{kind} around a matrix product')

    def _add_total(self, k: int, block: _Value, size: int) -> None:
        """A sum over all edges."""
        columns, mask = self._columns(size)
        of_edges = self._of_edges(block, _block(size))
        place = f'(pid * {size} + {columns}) + tl.zeros([1, 1], tl.int32)'
        self._add_up(k, sum_text(of_edges, 0), place, mask)

    def _add_up(self, k: int, text: str, place: str, mask: str) -> None:
        """Adds the sums of a tile to what the program has of the tiles before, in memory: many such
        sums would take the registers of the tile."""
        total = f'{text} + {_load(f"out{k} + {place}", mask)}'
        self.lines.append(_store(f'out{k}', place, total, mask))

    def _add_sums_through_memory(self, part: '_Part', block: _Value) -> None:
        """The sums of some columns at a time."""
        number = self._scratch([(block, part.size)])
        for start in range(0, part.size, WIDE):
            size = min(WIDE, part.size - start)
            some = part._replace(name=f'{part.name}_{start}', size=size, start=part.start + start)
            self._add_sum(some, self._load_channels(number, start, size))

    def _add_sum(self, part: '_Part', block: _Value) -> None:
        """The sums of each row: a product by the matrix that says which edge is in which row, of
        some rows at a time. What is not finite would make NaN of other rows: then the numbers of
        each row are added up by themselves."""
        k, name, size = part.result, f'values{part.name}', part.size
        columns, mask = self._columns(size)
        width = max(_MIN_BLOCK, _block(size))
        block = self._emit(self._masked(block, size), block.width, True)
        self.lines.append(f'{name} = {self._of_edges(block, width)}')
        parts = ', '.join(self._split(name))
        alone = f'tl.where((rank == first + n)[:, None], {name}, 0.0)'
        self.lines += [
            'to = first_to',
            f'for first in range(0, num_ranks, {_ROWS}):',
            f'    ranks = first + tl.arange(0, {_ROWS})',
            f'    sums = selected(ranks[:, None] == rank[None, :], {parts})',
            '    if tl.max(tl.max((sums != sums).to(tl.int32), axis=1), axis=0) > 0:',
            f'        for n in range({_ROWS}):',
            f'            one = {sum_text(alone, 0)}',
            '            sums = tl.where((ranks == first + n)[:, None], one, sums)',
            *['    sums = tl.max(sums, axis=1, keep_dims=True)'] * (width > _block(size)),
            '    is_row = ((to >= 0) & (to < num_rows))[:, None]',
            '    is_part = (to >= num_rows)[:, None]',
            '    to_row = tl.cast(to, OFFSET)[:, None]',
            '    to_part = tl.cast(to - num_rows, OFFSET)[:, None]',
            *(
                '    ' + _store(f'{out}{k}', f'({part.row(at)} + {columns})', 'sums', both)
                for out, at, both in (
                    ('out', 'to_row', _all_of('is_row', mask)),
                    ('part', 'to_part', _all_of('is_part', mask)),
                )
            ),
            f'    ranks += {_ROWS}',
            f'    to = tl.load(place_of + (t * {EDGES} + ranks), ranks < num_ranks, -1)',
        ]

    def _add_extreme(self, part: '_Part', kind: str, block: _Value) -> None:
        """The largest or smallest number of each row: its last edge in the tile gets the result of
        a scan, which combines numbers of the same row alone."""
        k = part.result
        columns, mask = self._columns(part.size)
        combine = {'max': 'larger_of_row', 'min': 'smaller_of_row'}[kind]
        value = self._of_edges(block, block.width)
        keys = f'key + tl.zeros([{EDGES}, {block.width}], tl.int32)'
        row, slot = (
            f'({part.row(place)} + {columns})' for place in ('tl.cast(dst, OFFSET)', 'end_slot')
        )
        ends_row, ends_part = _all_of('ends_row', mask), _all_of('ends_part', mask)
        self.lines += [
            f'best, keys = tl.associative_scan(({value}, {keys}), 0, {combine})',
            f'chosen = t * {EDGES} + (keys & {EDGES - 1})',
            _store(f'out{k}', row, 'best', ends_row),
            _store(f'part{k}', slot, 'best', ends_part),
            _store(f'arg{k}', row, 'chosen', ends_row),
            _store(f'parg{k}', slot, 'chosen', ends_part),
        ]

    def _of_edges(self, block: _Value, width: int) -> str:
        """A block of that width, 0 where there is no edge."""
        zeros = f' + tl.zeros([{EDGES}, {width}], tl.float32)'
        return f'tl.where(m_, {block.name}, 0.0)' + zeros * (block.width != width)

    def _add_outer(self, k: int, out: Out) -> None:
        """The gradient of a matrix: the sum over edges of outer products of two values."""
        _, args, _, shape, dtype = self.program[out.at]
        if out.kind != 'total':
            raise Refused('a product of two values of an edge')
        pairs = list(zip(args[::2], args[1::2], strict=True))
        if 1 in shape:
            self._add_vector(k, pairs, shape)
            return
        self.pairs[k] = tuple(
            [(self._store_factor(one, dtype), self._store_factor(two, dtype)) for one, two in pairs]
        )

    def _add_vector(self, k: int, pairs: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> None:
        """The gradient of a matrix with one row or column."""
        height, width = map(_block, shape)
        down = f'tl.arange(0, {height})[:, None]'
        columns, mask = self._columns(shape[1])
        mask = _all_of(f'({down} < {shape[0]})' * (height > shape[0]), mask)
        place = f'(pid * {math.prod(shape)} + {down} * {shape[1]} + {columns})'
        for left, right in pairs:
            a = self._of_edges(self.value(left), height)
            b = self._of_edges(self.value(right), width)
            total = sum_text(f'({a}) * ({b})', 0)
            # With one column the sums lie in a row.
            self._add_up(k, f'tl.trans({total})' if width == 1 else total, place, mask)

    def _store_factor(self, at: int, dtype: str) -> int:
        """Stores a value in the order of the tiles, once; returns its number."""
        if at in self.factors:
            return [*self.factors].index(at)
        block, size = self.value(at), math.prod(self.program[at].shape)
        number, stored = len(self.factors), -(-size // _ALIGNED) * _ALIGNED
        is_local = not self._derives()
        self.factors[at] = Factor(size, stored, dtype if dtype in _HALF else 'float32', is_local)
        if is_local:
            self.lines.append('tl.debug_barrier()')
        text = self._of_edges(block._replace(name=self._masked(block, size)), _block(size))
        columns, mask = self._columns(stored)
        place, mask = self._place_of_factor(number, columns), _all_of('inside[:, None]', mask)
        self.lines.append(_store(f'factor{number}', place, text, mask))
        return number


def _all_of(*masks: str) -> str:
    """The code of all masks that are not empty."""
    return ' & '.join(filter(None, masks))


def _load(place: str, mask: str) -> str:
    return f'tl.load({place}, {mask}, 0)' if mask else f'tl.load({place})'


def _store(pointer: str, place: str, value: str, mask: str) -> str:
    value = f'({value}).to({pointer}.dtype.element_ty)'
    return f'tl.store({pointer} + {place}, {value}{", " * bool(mask)}{mask})'


# A product with the error of float32 is one of sums of three numbers of bfloat16, without the least
# parts; one of two such numbers has less error than TF32. A lesser part of what is not finite is 0.
PRODUCTS = """@triton.jit
def thirds(x):
    a = x.to(tl.bfloat16)
    rest = x - a.to(tl.float32)
    rest = tl.where(rest == rest, rest, 0.0)
    b = rest.to(tl.bfloat16)
    return a, b, (rest - b.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product_of_3(a0, a1, a2, b0, b1, b2):
    low = tl.dot(a2, b0)
    low = tl.dot(a1, b1, low)
    low = tl.dot(a0, b2, low)
    low = tl.dot(a1, b0, low)
    low = tl.dot(a0, b1, low)
    return tl.dot(a0, b0, tl.where(low == low, low, 0.0))


@triton.jit
def product_of_2(a0, a1, b0, b1):
    low = tl.dot(a1, b0)
    low = tl.dot(a0, b1, low)
    return tl.dot(a0, b0, tl.where(low == low, low, 0.0))
"""

# What the kernels call. Products `apart` have no sums in one accumulator, which Triton takes for
# products of products. The key of a number has its row, then its place in the tile.
_FUNCTIONS = f"""{PRODUCTS}

@triton.jit
def product_of_3_apart(a0, a1, a2, b0, b1, b2):
    low = added(tl.dot(a2, b0), tl.dot(a1, b1))
    low = added(low, tl.dot(a0, b2))
    low = added(low, added(tl.dot(a1, b0), tl.dot(a0, b1)))
    return added(tl.dot(a0, b0), tl.where(low == low, low, 0.0))


@triton.jit
def product_of_2_apart(a0, a1, b0, b1):
    low = added(tl.dot(a1, b0), tl.dot(a0, b1))
    return added(tl.dot(a0, b0), tl.where(low == low, low, 0.0))


@triton.jit
def selected(which, a0, a1, a2):
    which = which.to(tl.bfloat16)
    out = tl.dot(which, a2)
    out = tl.dot(which, a1, out)
    return tl.dot(which, a0, out)


@triton.jit
def larger_of_row(v0, k0, v1, k1):
    keep = ((k0 ^ k1) < {EDGES}) & ((v0 >= v1) | (v0 != v0))
    return tl.where(keep, v0, v1), tl.where(keep, k0, k1)


@triton.jit
def smaller_of_row(v0, k0, v1, k1):
    keep = ((k0 ^ k1) < {EDGES}) & ((v0 <= v1) | (v0 != v0))
    return tl.where(keep, v0, v1), tl.where(keep, k0, k1)


"""


# The kernel that says for each edge the how-manieth row of its tile it is in (`rank`), and for each
# row of a tile where its result goes (`place`): to that row, or, counted behind all rows, to one of
# two parts of the tile, as the row has edges in the tile before (the first part) or behind.
PLAN = f"""@triton.jit(do_not_specialize=['num_edges', 'num_rows'])
def plan_tiles(row_of, rank_of, place_of, num_edges, num_rows):
    t = tl.program_id(0)
    i = tl.arange(0, {EDGES})
    e = t * {EDGES} + i
    inside = e < num_edges
    row = tl.load(row_of + e, inside, num_rows)
    above = tl.load(row_of + (e - 1), inside & (e > 0), -1)
    below = tl.load(row_of + (e + 1), e + 1 < num_edges, -1)
    starts = (row != above) | (i == 0)
    rank = tl.cumsum(starts.to(tl.int32), 0) - 1
    tl.store(rank_of + e, rank, inside)
    before = tl.load(row_of + (t * {EDGES} - 1), t > 0, -1)
    is_head = row == before
    is_tail = (row == below) & (i == {EDGES - 1})
    place = tl.where(row < num_rows, row, -1)
    place = tl.where(is_tail & (row < num_rows), num_rows + 2 * t + 1, place)
    place = tl.where(is_head & (row < num_rows), num_rows + 2 * t, place)
    tl.store(place_of + e, -1 + i * 0)
    tl.debug_barrier()
    ends = (row != below) | (i == {EDGES - 1})
    tl.store(place_of + (t * {EDGES} + rank), place, ends & inside)
"""


@lru_cache
def combine_text(kind: str, size: int) -> str:
    """The kernel that combines the parts of rows that several tiles have, of one result: a program
    takes the row that begins in its tile and goes on behind that."""
    width, several = next_power_of_two(size), 16
    has_places = kind in ('max', 'min')
    second = ', arg, parg' if has_places else ''
    mask = f'(c < {size})' if width > size else '(c >= 0)'
    lines = [
        f'last = ((tl.load(rowptr + row + 1) - 1) // {EDGES}).to(tl.int32)',
        f'c = tl.arange(0, {width})[None, :]',
        f'u = tl.arange(0, {several})[:, None]',
        f'start = tl.cast(2 * t + 1, OFFSET) * {size} + c + u * 0',
        f'v = tl.load(part + start, (u == 0) & {mask}, {_START[kind]})',
    ]
    loop = [
        f'for first in range(t + 1, last + 1, {several}):',
        f'    place = tl.cast(2 * (first + u), OFFSET) * {size} + c',
        f'    m = (first + u <= last) & {mask}',
    ]
    if has_places:
        better = '>' if kind == 'max' else '<'
        lines += [
            f'a = tl.load(parg + start, (u == 0) & {mask}, -1)',
            *loop,
            f'    w = tl.load(part + place, m, {_START[kind]})',
            '    b = tl.load(parg + place, m, -1)',
            f'    take = m & ((w {better} v) | (a < 0) | ((w != w) & (v == v)))',
            '    v = tl.where(take, w, v)',
            '    a = tl.where(take, b, a)',
            'is_nan = tl.sum((v != v).to(tl.int32), axis=0, keep_dims=True) > 0',
            f'best = tl.{kind}(tl.where(v == v, v, {_START[kind]}), axis=0, keep_dims=True)',
            'chosen = (a >= 0) & ((v != v) | ((v == best) & (is_nan == 0)))',
            'a = tl.min(tl.where(chosen, a, 2147483647), axis=0, keep_dims=True)',
            "v = tl.where(is_nan, float('nan'), best)",
        ]
    else:
        lines += [*loop, '    v += tl.load(part + place, m, 0)', f'v = {sum_text("v", 0)}']
    lines += [f'to = tl.cast(row, OFFSET) * {size} + c', _store('out', 'to', 'v', mask)]
    if has_places:
        lines.append(_store('arg', 'to', 'a', mask))
    numbers = ['num_edges', 'num_rows']
    return '\n'.join([
        ROUNDED_ADD.rstrip(), '', '', f'@triton.jit(do_not_specialize={numbers})',
        f'def combine_tiles(rowptr, row_of, out, part{second}, num_edges, num_rows, '
        'OFFSET: tl.constexpr):', '    t = tl.program_id(0)',
        f'    if (t + 1) * {EDGES} < num_edges:',
        f'        row = tl.load(row_of + ((t + 1) * {EDGES} - 1))',
        '        begin = tl.load(rowptr + tl.minimum(row, num_rows - 1))',
        f'        goes_on = tl.load(row_of + (t + 1) * {EDGES}) == row',
        f'        if (row < num_rows) & goes_on & (begin >= t * {EDGES}):',
        *('            ' + line for line in lines), '',
    ])  # fmt: skip


_START = {'sum': '0', 'mean': '0', 'max': "float('-inf')", 'min': "float('inf')"}
