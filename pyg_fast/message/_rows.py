"""Splits a captured `aggregate`: reductions over the edges of each destination, which passes
compute, and what follows them on rows of destinations, which torch's operators do."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._ir import DST, Program, Refused

# Operations that read several edges, and the reduction of those that passes compute.
REDUCES = {'rowsum': 'sum', 'rowmean': 'mean', 'rowmax': 'max', 'rowmin': 'min'}
ACROSS_EDGES = {*REDUCES, 'degree', 'index', 'source'}
# Operations whose results vary by edge.
_OF_EDGES = {'keep', 'softmax', 'index', 'source'}


class Reduced(NamedTuple):
    """A value of the message to reduce; how is not said where the layer's aggregation tells."""

    at: int
    reduce: str = ''


def put_in(container: str, results: list[Tensor]) -> Any:
    """The results of an `aggregate` in its container."""
    kind, *keys = container.split(' ')
    if kind == 'dict':
        return dict(zip(keys, results, strict=True))
    return {'': lambda: results[0], 'tuple': lambda: tuple(results)}.get(kind, lambda: results)()


class RowPart(NamedTuple):
    """What an `aggregate` computes of its reductions. Loads of :obj:`program` are `reduced`, by
    number, `degree`, `row` and `param`."""

    program: Program
    outputs: tuple[int, ...]
    # In which `aggregate` returns its results: '', 'tuple', 'list', or 'dict' and its keys.
    container: str

    def operations(self) -> str:
        """The names of its operations."""
        program = self.program
        return ' '.join(
            program[at].op
            for at in program.reachable(self.outputs)
            if program[at].op not in ('load', 'const', 'view', 'expand')
        )


def split_rows(
    program: Program, outputs: Sequence[int], container: str
) -> tuple[tuple[Reduced, ...], RowPart]:
    """The reductions that values of destinations need, and the program of these values.

    Raises:
        Refused: If a value is not one of destinations.
    """
    rows, reduced = Program(), dict[Reduced, int]()
    places: dict[int, int] = {}
    stack = list(outputs)
    while stack:
        at = stack[-1]
        op, args, attrs, shape, dtype = program[at]
        if at in places:
            stack.pop()
        elif op in REDUCES and attrs:
            raise Refused('aggregate returns what is not finite where no edge ends')
        elif op in REDUCES:
            k = reduced.setdefault(Reduced(args[0], REDUCES[op]), len(reduced))
            places[at] = rows.add('load', (), ('reduced', k), shape, dtype, DST)
        elif op == 'degree':
            places[at] = rows.add('load', (), ('degree', 0), shape, dtype, DST)
        elif op in _OF_EDGES or (op == 'load' and attrs[0] in ('src', 'edge')):
            raise Refused('aggregate returns what varies by edge, or drops out after a reduction')
        elif missing := [arg for arg in args if arg not in places]:
            stack += missing
        else:
            places[at] = rows.add(
                op, [places[arg] for arg in args], attrs, shape, dtype, program.dependence(at)
            )
    if any(not key.isidentifier() for key in container.split(' ')[1:]):
        raise Refused('aggregate returns a dict with keys that are no names')
    if not reduced:
        raise Refused('aggregate reduces no message')
    return tuple(reduced), RowPart(rows, tuple(places[at] for at in outputs), container)
