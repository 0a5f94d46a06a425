"""Writes the Triton source of passes with matrix products: a program takes tiles of consecutive
edges, in the order of their destinations, and multiplies the values of a tile by a parameter on
tensor cores."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ._ir import NODES, Load, Program, Refused
from ._tile_texts import EDGES, FUNCTIONS, all_of, store_text
from ._tile_values import (
    HALF,
    MIN_BLOCK,
    PARTS,
    WIDE,
    Factor,
    TileValue,
    TileValues,
    padded,
    widest,
)
from ._triton import Out
from ._values import ROUNDED_ADD, sum_text

# Registers of a multiprocessor.
_REGISTERS = 2**16
# The shared memory of a program of compute capability 9.0, where there is no GPU, and the least of
# all that have products of bfloat16.
_SHARED_MEMORY, _LEAST_SHARED_MEMORY = 227 * 2**10, 99 * 2**10
# That the system takes of it for each program.
RESERVED = 2**10
# With more spills a kernel takes longer than with fewer programs.
_FEW_SPILLS = 20
# The rows whose sums a product computes at once.
_ROWS = 16
# In how many parts of bfloat16 it takes numbers, by their type or the precision of products: these
# have lost the other digits.
_PARTS = {'bfloat16': 1, 'float16': 2, 'high': 2, 'highest': 3}


class Form(NamedTuple):
    """How a kernel runs."""

    warps: int
    per_processor: int  # programs
    # With 2 a program reads what the next tile needs while it computes, into shared memory.
    stages: int = 1
    spills: int = 48  # numbers of a thread that its registers do not hold, at most

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, _REGISTERS // (32 * self.warps * self.per_processor) // 8 * 8)


class TileSource(NamedTuple):
    """A generated kernel over tiles of edges."""

    text: str
    loads: tuple[Load, ...]  # the inputs, in the order of the parameters
    forms: tuple[Form, ...]  # of which the first one runs whose values fit on a multiprocessor
    factors: tuple[Factor, ...]
    pairs: dict[int, tuple[tuple[int, int], ...]]  # of factors, whose products a result adds up
    totals: dict[int, int]  # the first column of other sums over all edges, in a row of a program
    total_width: int


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
    factors = tuple(tiles.factors.values())
    return TileSource(
        text, tuple(tiles.loads), tiles.forms(), factors, tiles.pairs, tiles.totals,
        tiles.total_width,
    )  # fmt: skip


@lru_cache
def shared_memory() -> int:
    """The shared memory of a program on the GPUs here, in bytes; 0 where one has no products of
    bfloat16."""
    if not torch.cuda.is_available():
        return _SHARED_MEMORY
    each = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    sizes = [getattr(one, 'shared_memory_per_block_optin', _LEAST_SHARED_MEMORY) for one in each]
    return min(size if one.major >= 8 else 0 for size, one in zip(sizes, each, strict=True))


class _Tiles(TileValues):
    """The code of one kernel."""

    def text(self) -> str:
        """The kernel, and the functions that it calls."""
        # A sum that needs little comes first: its values take registers no longer than it does.
        needed = [len(self.program.reachable([out.at])) for out in self.outs]
        for k in sorted(range(len(self.outs)), key=needed.__getitem__):
            self._add_result(k, self.outs[k])
        if self._shared_bytes() > shared_memory():
            raise Refused('matrices that do not fit into shared memory')
        begin, edges = self._edges()
        body = [
            'pid = tl.program_id(0)',
            *[f'totals = pid * {self.total_width}'] * bool(self.totals),
            *['seed = tl.load(seed_at)'] * self.has_dropout,
            f'i = tl.arange(0, {EDGES})',
            *(f'c{width} = tl.arange(0, {width})[None, :]' for width in self.widths),
            *self.first,
            *begin,
            'for t in tl.range(first_tile + pid, num_tiles, num_programs, num_stages=STAGES):',
            *('    ' + line for line in [*edges, *self.lines]),
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
            'HAS_PERM: tl.constexpr', 'OFFSET: tl.constexpr', 'STAGES: tl.constexpr',
            *(f'STEP_{name}: tl.constexpr' for (role, _), name in self.loads.items()
              if role in NODES),
        ]  # fmt: skip
        return '\n'.join(
            [
                ROUNDED_ADD.rstrip(),
                '',
                '',
                FUNCTIONS,
                f'@triton.jit(do_not_specialize={numbers})',
                f'def message_tiles({", ".join(parameters)}):',
                *('    ' + line for line in body),
                '',
            ]
        )

    def _shared_bytes(self) -> int:
        """A bound of the shared memory: parameters, in parts of float16, and the values of a tile
        on the way to a product."""
        count = 1 if self._is_half() else PARTS[self.precision]
        shapes = [self.program[at].shape for at in self.multiplied]
        matrices = sum(math.prod(map(padded, shape)) for shape in shapes)
        tile = 4 * EDGES * padded(widest(self.program, self.outs))
        kinds = {out.kind for out in self.outs}
        is_padded = any(padded(n) > n for shape in shapes for n in shape)
        # As compiled kernels of many networks have it.
        if count == 1 or not self.has_breaks:
            tiles = 3.0
        elif kinds & {'max', 'min'}:
            tiles = 2.0
        else:
            tiles = 1.5 if is_padded or any(role == 'arg' for role, _ in self.loads) else 1.0
        if self.multiplies and self._derives():
            tiles += count
        return 2 * count * matrices + int(tiles * tile)

    def forms(self) -> tuple[Form, ...]:
        """How the kernel may run: more programs hide the latency of memory, fewer have more
        registers. Those that read ahead take more of both, which pays for rows of edges, since
        caches do not hold them, and for halves."""
        most = max(1, shared_memory() // (self._shared_bytes() + RESERVED))
        if self.has_breaks:
            wide = Form(8, 1)
            if self.is_wide or most < 2:
                return (wide,)
            return Form(8, 2, spills=_FEW_SPILLS), Form(4, 2), wide
        three, two = (Form(4, min(count, most)) for count in (3, 2))
        ahead = tuple(each._replace(stages=2) for each in (three, two))
        if self._derives():
            return (ahead[1], two) if self._may_read_ahead() else (two,)
        kinds = {out.kind for out in self.outs}
        has_rows = any(role == 'edge' for role, _ in self.loads)
        pays = (has_rows or self._is_half()) and not kinds & {'max', 'min'}
        plain = three._replace(spills=_FEW_SPILLS), two
        return (*ahead, *plain) if pays and self._may_read_ahead() else plain

    def _may_read_ahead(self) -> bool:
        """Whether Triton may read what the next tile needs: not what this one stores. It does not
        compile the smallest products so."""
        shapes = [self.program[out.at].shape for out in self.outs if out.kind == 'total']
        has_smallest = any([padded(n) for n in shape] == [MIN_BLOCK] * 2 for shape in shapes)
        return not (has_smallest or 'tl.debug_barrier()' in self.lines)

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
            self._add_part(part, out.kind, self.value(at), self.program[at].dtype)
            start += part.size

    def _add_part(self, part: '_Part', kind: str, block: TileValue, dtype: str) -> None:
        size = part.size
        if kind == 'total':
            if size != part.stride:
                raise Refused('a sum of joined values over all edges')
            self._add_total(part.result, block, size)
            return
        text = f'{block.name} + tl.zeros([{EDGES}, {padded(size)}], tl.float32)'
        full = self._emit(text, padded(size), True)
        columns, mask = self._columns(size)
        if kind == 'edge':
            place = f'({part.row("tl.cast(eid, OFFSET)")} + {columns})'
            self.lines.append(store_text(f'out{part.result}', place, full.name, all_of('m_', mask)))
        elif kind in ('sum', 'mean') and self.has_breaks:
            self._add_sums_through_memory(part, full, dtype)
        elif kind in ('sum', 'mean'):
            self._add_sum(part, full, dtype)
        elif kind in ('max', 'min'):
            self._add_extreme(part, kind, full)
        else:
            raise Refused(f'{kind} around a matrix product')

    def _add_total(self, k: int, block: TileValue, size: int) -> None:
        """A sum over all edges."""
        columns, mask = self._columns(size)
        of_edges = self._of_edges(block, padded(size))
        self._reserve(k, size)
        place = f'(totals + {columns}) + tl.zeros([1, 1], tl.int32)'
        self._add_up(k, sum_text(of_edges, 0), place, mask)

    def _reserve(self, k: int, size: int) -> None:
        """Columns for the sums of a result, in the row that each program has for all of them."""
        if k not in self.totals:
            self.totals[k] = self.total_width
            self.total_width += -(-size // 4) * 4  # Aligned to 16 bytes.

    def _add_up(self, k: int, text: str, place: str, mask: str) -> None:
        """Adds the sums of a tile to what the program has of the tiles before, in memory: many such
        sums would take the registers of the tile. One thread alone adds to a place, tile by tile:
        the bits are the same at every run, and nothing waits for what was there before."""
        mask = f', {mask}' if mask else ''
        self.lines.append(f"tl.atomic_add(out{k} + {place}, {text}{mask}, sem='relaxed')")

    def _add_sums_through_memory(self, part: '_Part', block: TileValue, dtype: str) -> None:
        """The sums of some columns at a time."""
        number = self._scratch([(block, part.size)])
        for start in range(0, part.size, WIDE):
            size = min(WIDE, part.size - start)
            some = part._replace(name=f'{part.name}_{start}', size=size, start=part.start + start)
            self._add_sum(some, self._load_channels(number, start, size), dtype)

    def _add_sum(self, part: '_Part', block: TileValue, dtype: str) -> None:
        """The sums of each row: a product by the matrix that says which edge is in which row, of
        some rows at a time, with the numbers as sums of parts in bfloat16. What is not finite makes
        NaN of other rows: then the numbers of each row are added up by themselves."""
        k, name, size = part.result, f'values{part.name}', part.size
        columns, mask = self._columns(size)
        width = max(MIN_BLOCK, padded(size))
        block = self._emit(self._masked(block, size), block.width, True)
        self.lines += [
            f'{name} = {block.name} + tl.zeros([{EDGES}, {width}], tl.float32)',
            f'rest = {name}',
        ]
        parts = [f'{name}_{n}' for n in range(_PARTS.get(dtype, _PARTS[self.precision]))]
        for n, each in enumerate(parts):
            self.lines += [f'rest = rest - {parts[n - 1]}.to(tl.float32)'] * (n > 0)
            self.lines.append(f'{each} = to_bfloat16(rest)')
        alone = f'tl.where((rank == first + n)[:, None], {name}, 0.0)'
        rows = [
            'to = first_to',
            f'for first in range(0, num_ranks, {_ROWS}):',
            f'    ranks = first + tl.arange(0, {_ROWS})',
            '    which = (ranks[:, None] == rank[None, :]).to(tl.bfloat16)',
            f'    sums = tl.dot(which, {parts[-1]})',
            *(f'    sums = tl.dot(which, {each}, sums)' for each in parts[-2::-1]),
            '    if tl.max(tl.max((sums != sums).to(tl.int32), axis=1), axis=0) > 0:',
            f'        for n in range({_ROWS}):',
            f'            one = {sum_text(alone, 0)}',
            '            sums = tl.where((ranks == first + n)[:, None], one, sums)',
            *['    sums = tl.max(sums, axis=1, keep_dims=True)'] * (width > padded(size)),
            '    is_row = ((to >= 0) & (to < num_rows))[:, None]',
            '    is_part = (to >= num_rows)[:, None]',
            '    to_row = tl.cast(to, OFFSET)[:, None]',
            '    to_part = tl.cast(to - num_rows, OFFSET)[:, None]',
            *(
                '    ' + store_text(f'{out}{k}', f'({part.row(at)} + {columns})', 'sums', both)
                for out, at, both in (
                    ('out', 'to_row', all_of('is_row', mask)),
                    ('part', 'to_part', all_of('is_part', mask)),
                )
            ),
            f'    ranks += {_ROWS}',
            f'    to = tl.load(place_of + (t * {EDGES} + ranks), ranks < num_ranks, -1)',
        ]
        # Triton does not read ahead in a loop over tiles that has another one in it, but for one
        # under a condition.
        self.lines += ['if num_ranks > 0:', *('    ' + line for line in rows)]

    def _add_extreme(self, part: '_Part', kind: str, block: TileValue) -> None:
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
        ends_row, ends_part = all_of('ends_row', mask), all_of('ends_part', mask)
        self.lines += [
            f'best, keys = tl.associative_scan(({value}, {keys}), 0, {combine})',
            f'chosen = t * {EDGES} + (keys & {EDGES - 1})',
            store_text(f'out{k}', row, 'best', ends_row),
            store_text(f'part{k}', slot, 'best', ends_part),
            store_text(f'arg{k}', row, 'chosen', ends_row),
            store_text(f'parg{k}', slot, 'chosen', ends_part),
        ]

    def _add_outer(self, k: int, out: Out) -> None:
        """The gradient of a matrix: the sum over edges of outer products of two values."""
        _, args, _, shape, dtype = self.program[out.at]
        if out.kind != 'total':
            raise Refused('a product of two values of an edge')
        pairs = list(zip(args[::2], args[1::2], strict=True))
        if 1 in shape:
            self._add_vector(k, pairs, shape)
            return
        if self.multiplies:
            self._add_products(k, pairs, shape, dtype)
            return
        self.pairs[k] = tuple(
            [(self._store_factor(one, dtype), self._store_factor(two, dtype)) for one, two in pairs]
        )

    def _add_products(
        self, k: int, pairs: Sequence[tuple[int, int]], shape: tuple[int, ...], dtype: str
    ) -> None:
        """The gradient of a matrix, by products of the values of a tile."""
        place, mask = self._place_of_total(k, shape)
        for left, right in pairs:
            one, two = self._operand(left, dtype), self._operand(right, dtype)
            if dtype in HALF:
                text = f'tl.dot(tl.trans({one}), {two})'
            else:
                a, b = self._in_parts(one), self._in_parts(two)
                self.lines.append(f'left{k}, right{k}, most{k} = shares({a.down}, {b.down})')
                lefts = [f'tl.trans({part} * left{k})' for part in a.parts]
                rights = [f'{part} * right{k}' for part in b.parts]
                text = f'{self._product_of_parts(lefts, rights)} * most{k}'
            self._add_up(k, text, place, mask)

    def _add_vector(self, k: int, pairs: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> None:
        """The gradient of a matrix with one row or column."""
        height, width = map(padded, shape)
        place, mask = self._place_of_total(k, shape)
        for left, right in pairs:
            a = self._of_edges(self.value(left), height)
            b = self._of_edges(self.value(right), width)
            total = sum_text(f'({a}) * ({b})', 0)
            # With one column the sums lie in a row.
            self._add_up(k, f'tl.trans({total})' if width == 1 else total, place, mask)

    def _place_of_total(self, k: int, shape: tuple[int, ...]) -> tuple[str, str]:
        """Where a program adds up a matrix, and the mask of the numbers that exist."""
        self._reserve(k, math.prod(shape))
        height = padded(shape[0])
        down = f'tl.arange(0, {height})[:, None]'
        columns, mask = self._columns(shape[1])
        mask = all_of(f'({down} < {shape[0]})' * (height > shape[0]), mask)
        return f'(totals + {down} * {shape[1]} + {columns})', mask
