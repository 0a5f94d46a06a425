"""Writes the Triton code of the values of a tile of edges: loads, operations of each edge, and
products by parameters on tensor cores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ._activations import find_softplus
from ._ir import NODES, Load, Program, Refused, is_float, number
from ._tile_texts import EDGES, all_of, load_text, store_text
from ._triton import Out
from ._values import CALLS, POWERS, next_power_of_two, sum_text

# The least dimension of a block of a matrix product.
MIN_BLOCK = 16
# The widest values: registers hold no wider tile.
_MAX_WIDTH = 128
# Wider values take more warps.
WIDE = 64
# A pass of so many products has more values than registers.
_LONG = 3
HALF = ('float16', 'bfloat16')
# Parts in float16 of the factors of products of float32, by torch's name of their precision.
PARTS = {'highest': 2, 'high': 1}
# A pass of so many products of float32, at most, also multiplies what the gradients of matrices are
# products of: more would take its registers.
_MULTIPLIED = {'highest': 2, 'high': 4}
# In float32 alone, as all values of a tile are.
_CALLS = CALLS | {
    'sigmoid': 'sigmoid({})', 'softplus': 'log1p_exp({})', 'softplus_grad': '{} * sigmoid({})',
}  # fmt: skip
# Numbers of a factor are a multiple of that: products of 16-byte aligned rows are the fast ones.
_ALIGNED = 8


class Factor(NamedTuple):
    """A value of each edge that the kernel stores in the order of the tiles: torch multiplies it
    with another one, into the gradient of a matrix."""

    size: int
    stored: int  # numbers, with zeros up to a multiple of 16 bytes
    dtype: str
    is_local: bool  # of the tile of a program alone: no other kernel reads it


class Scaled(NamedTuple):
    """A block as a sum of parts in float16, times powers of two."""

    parts: list[str]
    up: str  # the powers by which its numbers are multiplied
    down: str  # their inverse


class TileValue(NamedTuple):
    """A block of the code: `width` is 1 where all columns are equal."""

    name: str
    width: int
    in_loop: bool  # whether it varies with the edge


def widest(program: Program, outs: Sequence[Out]) -> int:
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


def _is_of_matrix(op: str, shape: tuple[int, ...]) -> bool:
    """Whether a value is a matrix that products alone read."""
    return op in ('load', 'permute') and _is_matrix_shape(shape)


def padded(size: int) -> int:
    return 1 if size == 1 else max(MIN_BLOCK, next_power_of_two(size))


@dataclass
class TileValues:
    """The code of the values of one kernel."""

    program: Program
    outs: Sequence[Out]
    precision: str
    loads: dict[Load, str] = field(default_factory=dict)
    values: dict[int, TileValue] = field(default_factory=dict)
    matrices: dict[int, str] = field(default_factory=dict)
    multiplied: set[int] = field(default_factory=set)  # matrices
    scaled: dict[str, 'Scaled'] = field(default_factory=dict)  # by the code of a block
    widths: dict[int, None] = field(default_factory=dict)  # of rows of numbers
    first: list[str] = field(default_factory=list)  # before the loop over tiles
    lines: list[str] = field(default_factory=list)  # in it
    is_wide: bool = field(init=False)
    is_long: bool = field(init=False)  # whether it has so many products that registers are few
    # Whether it multiplies the factors of gradients of matrices itself.
    multiplies: bool = field(init=False)
    has_breaks: bool = field(init=False)  # whether products read others' results from memory
    has_dropout: bool = False
    read_back: dict[int, str] = field(default_factory=dict)  # what a factor's number was read as
    operands: dict[int, str] = field(default_factory=dict)  # of products, by position
    factors: dict[int, Factor] = field(default_factory=dict)  # by position in the program
    scratches: dict[int, int] = field(default_factory=dict)  # factors of values read in parts
    pairs: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    totals: dict[int, int] = field(default_factory=dict)
    total_width: int = 0

    def __post_init__(self) -> None:
        self.is_wide = widest(self.program, self.outs) > WIDE
        self.is_long = self._count_products() >= _LONG
        self.has_breaks = self.is_wide or (self.is_long and self._derives())
        fits = self._is_half() or self._count_products() <= _MULTIPLIED[self.precision]
        self.multiplies = not self.is_wide and fits

    def _count_products(self) -> int:
        order = self.program.reachable(out.at for out in self.outs)
        return sum(self.program[at].op == 'mm' for at in order)

    def _derives(self) -> bool:
        return any(self.program[out.at].op == 'outer' for out in self.outs)

    def _is_half(self) -> bool:
        return {value.dtype for value in self.program.values if value.op == 'mm'}.issubset(HALF)

    # Values.

    def value(self, at: int) -> TileValue:
        """The block of a value, computed once."""
        order = self.program.reachable([at], self.values)
        whole = _read_whole(self.program, order)
        for each in order:
            op, _, _, shape, _ = self.program[each]
            if op == 'load' and each != at and each not in whole:
                continue
            # Those of two dimensions are parameters of products, which these read.
            if not _is_of_matrix(op, shape):
                self.values[each] = self._compute(each)
        return self._block_of(at)

    def _block_of(self, at: int) -> TileValue:
        if at not in self.values:
            op, _, _, shape, _ = self.program[at]
            if _is_of_matrix(op, shape):
                raise Refused(f'a parameter of shape {shape} around a matrix product')
            self.value(at)
        return self.values[at]

    def _forget(self) -> None:
        """Where registers are few, lets the values go that no product computes: what needs them
        later loads their inputs again."""
        if not (self.is_wide or self.is_long):
            return
        for at, block in [*self.values.items()]:
            if block.in_loop and block.width > 1 and not self._is_chained(at):
                del self.values[at]

    def _emit(self, text: str, width: int, in_loop: bool) -> TileValue:
        name = f'v{len(self.lines) + len(self.first)}'
        (self.lines if in_loop else self.first).append(f'{name} = {text}')
        return TileValue(name, width, in_loop)

    def _compute(self, at: int) -> TileValue:
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
        if op not in _CALLS:
            raise Refused(f'{op} around a matrix product')
        op, args = find_softplus(self.program, at) or (op, args)
        blocks = [self._block_of(arg) for arg in args]
        if op == 'pow' and self.program[args[1]].op == 'const':
            exponent = number(self.program[args[1]])
            if exponent in POWERS:
                blocks, op = blocks[:1], POWERS[exponent]
        return self._emit(
            _CALLS[op].format(*(block.name for block in blocks)),
            max(block.width for block in blocks),
            any(block.in_loop for block in blocks),
        )

    def _constant(self, at: int) -> TileValue:
        value, dtype = number(self.program[at]), self.program[at].dtype
        if dtype == 'bool':
            return self._emit(f'tl.full([1, 1], {bool(value)}, tl.int1)', 1, False)
        text = repr(float(value)) if math.isfinite(value) else f"float('{value}')"
        return self._emit(f'tl.full([1, 1], {text}, tl.float32)', 1, False)

    def _columns(self, size: int) -> tuple[str, str]:
        """The places of the numbers of a row, and the mask of those that exist, if not all do."""
        width = padded(size)
        if width == 1:
            return '0', ''
        self.widths[width] = None
        return f'c{width}', '' if width == size else f'(c{width} < {size})'

    def _slice(self, at: int) -> TileValue:
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

    def _join(self, at: int) -> TileValue:
        """Values one after another, by way of memory."""
        parts = [(self.value(one), math.prod(self.program[one].shape)) for one in self._parts(at)]
        return self._load_channels(self._scratch(parts), 0, math.prod(self.program[at].shape))

    def _scratch(self, parts: Sequence[tuple[TileValue, int]]) -> int:
        """Stores blocks one after another, for this tile alone; returns the number."""
        number, size = len(self.factors), sum(size for _, size in parts)
        self.factors[-1 - number] = Factor(size, size, 'float32', True)
        self.lines.append('tl.debug_barrier()')  # All have read what it had of another tile.
        start = 0
        for block, size in parts:
            columns, mask = self._columns(size)
            place = self._place_of_factor(number, f'{columns} + {start}' if start else columns)
            text = self._of_edges(block, padded(size))
            mask = all_of('inside[:, None]', mask)
            self.lines.append(store_text(f'factor{number}', place, text, mask))
            start += size
        return number

    def _load_channels(self, number: int, start: int, size: int) -> TileValue:
        columns, mask = self._columns(size)
        name = self._load_factor(number, f'{columns} + {start}' if start else columns, mask)
        return TileValue(name, padded(size), True)

    def _load(self, at: int, start: int, size: int) -> TileValue:
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
            return self._emit(load_text(place, mask) + convert, padded(size), True)
        row = {'src': 'src', 'edge': 'eid'}.get(role, 'dst')
        step = f'STEP_{pointer}' if role in NODES else math.prod(shape)
        place = f'(tl.cast({row}, OFFSET) * {step}{first} + {columns})'
        # Where there is no edge, row 0 is read: a mask would take time.
        block = self._emit(load_text(f'{pointer} + {place}', mask) + convert, padded(size), True)
        if role != 'picked':
            return block
        chosen = self._pointer('arg', slot)
        text = f'tl.load({chosen} + {place}, {all_of("m_", mask)}, -1) == eid'
        return self._emit(f'tl.where({text}, {block.name}, 0.0)', padded(size), True)

    def _keep(self, which: int, share: str, size: int) -> TileValue:
        """The factors of a dropout, as kernels of rows draw them."""
        self.has_dropout = True
        p = float.fromhex(share)
        columns, _ = self._columns(size)
        place = f'tl.cast(eid, tl.int64) * {size} + {columns}'
        drawn = self._emit(f'tl.rand(seed + {which}, {place})', padded(size), True)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return self._emit(f'tl.where({drawn.name} >= {p!r}, {scale!r}, 0.0)', padded(size), True)

    def _pointer(self, role: str, slot: int | str) -> str:
        return self.loads.setdefault((role, slot), f'{role}{slot}')  # type: ignore[arg-type]

    def _reduction(self, at: int) -> TileValue:
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

    def _masked(self, block: TileValue, size: int, other: str = '0.0') -> str:
        """A block with `other` in the columns that pad it."""
        _, mask = self._columns(size)
        return f'tl.where({mask}, {block.name}, {other})' if mask else block.name

    # Matrix products.

    def _product(self, at: int) -> TileValue:
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
        # The gradient of a parameter is a product of the same value.
        is_factor = self._derives() or (self.has_breaks and self._is_chained(x))
        text = self._operand(x, dtype) if is_factor else self._full(block, inner)
        if dtype in HALF:
            product = f'tl.dot(({text}).to(tl.{dtype}), ({name}).to(tl.{dtype}))'
            if self.has_breaks:  # What follows must not become the start of its sum.
                product = f'added({product}, 0.0)'
            return self._emit(product, padded(outer), True)
        left, right = self._in_parts(text), self._parts_of_matrix(weight)
        product = self._product_of_parts(left.parts, right.parts)
        return self._emit(f'{product} * joint({left.down}, {right.down})', padded(outer), True)

    def _product_of_parts(self, left: Sequence[str], right: Sequence[str]) -> str:
        if len(left) == 1:
            return f'tl.dot({left[0]}, {right[0]})'
        function = 'product_of_parts' + '_apart' * self.has_breaks
        return f'{function}({", ".join([*left, *right])})'

    def _operand(self, at: int, dtype: str) -> str:
        """The code of a factor of products, 0 where there is no edge."""
        if self.has_breaks and self._is_chained(at):
            return self._through_memory(at, dtype)
        if at not in self.operands:
            block, size = self.value(at), math.prod(self.program[at].shape)
            text = self._of_edges(block._replace(name=self._masked(block, size)), padded(size))
            convert = f'.to(tl.{dtype})' * (dtype in HALF)
            self.operands[at] = self._emit(f'({text}){convert}', padded(size), True).name
        return self.operands[at]

    def _is_chained(self, at: int) -> bool:
        """Whether a product computes the value."""
        return any(self.program[each].op == 'mm' for each in self.program.reachable([at]))

    def _through_memory(self, at: int, dtype: str) -> str:
        """The code of a value by way of memory. Triton gives a product whose result reaches another
        one whole rows of warps, so that the second half of 8 warps computes what the first does."""
        number = self._store_factor(at, dtype)
        columns, mask = self._columns(self.factors[at].stored)
        if number not in self.read_back:
            self._forget()
            self.read_back[number] = self._load_factor(number, columns, mask)
        return self.read_back[number]

    def _load_factor(self, number: int, columns: str, mask: str) -> str:
        place = self._place_of_factor(number, columns)
        mask = all_of('inside[:, None]', mask)
        self.lines.append('tl.debug_barrier()')
        return self._emit(load_text(f'factor{number} + {place}', mask), 1, True).name

    def _place_of_factor(self, number: int, columns: str) -> str:
        one = [*self.factors.values()][number]
        first = f'(pid - t) * {EDGES}' if one.is_local else f'-first_tile * {EDGES}'
        return f'(tl.cast(e + {first}, OFFSET)[:, None] * {one.stored} + {columns})'

    def _in_parts(self, text: str) -> Scaled:
        """A block with a power of two for each row."""
        if text not in self.scaled:
            self.scaled[text] = self._scale(f'scales({text})', text, self.lines)
        return self.scaled[text]

    def _parts_of_matrix(self, at: int) -> Scaled:
        """A parameter with one power of two, split once."""
        op, args, _, _, _ = self.program[at]
        if op == 'permute':
            inner = self._parts_of_matrix(args[0])
            return inner._replace(parts=[f'tl.trans({name})' for name in inner.parts])
        name = self._matrix(at)
        if name not in self.scaled:
            self.scaled[name] = self._scale(f'scale_of_all({name})', name, self.first)
        return self.scaled[name]

    def _scale(self, powers: str, text: str, lines: list[str]) -> Scaled:
        name = f's{len(self.scaled)}'
        parts = [f'{name}_{n}' for n in range(PARTS[self.precision])]
        lines.append(f'{name}_up, {name}_down = {powers}')
        value = f'({text}) * {name}_up'
        split = f'two_parts({value})' if len(parts) > 1 else f'to_float16({value})'
        lines.append(f'{", ".join(parts)} = {split}')
        return Scaled(parts, f'{name}_up', f'{name}_down')

    def _full(self, block: TileValue, size: int) -> str:
        """A block with all its columns, 0 where they pad it."""
        text = self._masked(block, size)
        if block.width == 1:
            return f'tl.broadcast_to({text}, [{EDGES}, {padded(size)}])'
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
            height, (place, mask) = padded(rows), self._columns(columns)
            pointer = self._pointer(*self.program[at].attrs)
            name = self.matrices[at] = f'w{len(self.matrices)}'
            down = f'tl.arange(0, {height})[:, None]'
            mask = all_of(f'({down} < {rows})' * (height > rows), mask)
            text = load_text(f'{pointer} + {down} * {columns} + {place}', mask)
            self.first.append(f'{name} = {text}.to(tl.float32)')
        return self.matrices[at]

    def _row_of_matrix(self, at: int) -> TileValue:
        """A parameter with one row or column, as a row."""
        base = self.program[at].args[0] if self.program[at].op == 'permute' else at
        if not _is_matrix(self.program, base):
            raise Refused('a matrix product by what is no parameter')
        if base not in self.values:
            self.values[base] = self._load(base, 0, math.prod(self.program[base].shape))
        return self.values[base]

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

    def _of_edges(self, block: TileValue, width: int) -> str:
        """A block of that width, 0 where there is no edge."""
        zeros = f' + tl.zeros([{EDGES}, {width}], tl.float32)'
        return f'tl.where(m_, {block.name}, 0.0)' + zeros * (block.width != width)

    def _store_factor(self, at: int, dtype: str) -> int:
        """Stores a value in the order of the tiles, once; returns its number."""
        if at in self.factors:
            return [*self.factors].index(at)
        block, size = self.value(at), math.prod(self.program[at].shape)
        number, stored = len(self.factors), -(-size // _ALIGNED) * _ALIGNED
        is_local = self.multiplies or not self._derives()
        self.factors[at] = Factor(size, stored, dtype if dtype in HALF else 'float32', is_local)
        if is_local:
            self.lines.append('tl.debug_barrier()')
        text = self._of_edges(block._replace(name=self._masked(block, size)), padded(size))
        columns, mask = self._columns(stored)
        place, mask = self._place_of_factor(number, columns), all_of('inside[:, None]', mask)
        self.lines.append(store_text(f'factor{number}', place, text, mask))
        return number
