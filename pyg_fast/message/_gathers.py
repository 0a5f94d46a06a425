"""Rows of nodes that a message gathers itself, by the destinations or the sources of edges."""

from ._ir import PARAM, Program, Refused
from ._rows import REDUCES

# Operations that are the number of a node at one end of the edge: its role, and the argument.
_ENDS = {'index': 'dst', 'source': 'src'}
INDICES = {'index': 'index', 'source': 'edge_index_j'}


def gather_by_end(program: Program, x: int, index: int, on_nodes: bool) -> int | None:
    """The row of :obj:`x` that is of one end of the edge; None if `index` is no end of it. Whether
    a parameter has as many rows as there are nodes is asked at each call.

    Raises:
        Refused: If `x` is neither a parameter nor :obj:`on_nodes`, a value of all nodes.
    """
    op, _, attrs, shape, dtype = program[x]
    end = program[index].op
    if end not in INDICES:
        return None
    if op == 'load' and attrs[0] == 'param':
        return program.gather(_ENDS[end], 'param', attrs[1], shape[1:], dtype)
    if not on_nodes:
        raise Refused(f"message gathers by '{INDICES[end]}' from what has no row for each node")
    return x if end == 'index' else _at_source(program, x)


def _at_source(program: Program, x: int) -> int:
    """A value of all nodes at the source of the edge instead of at the destination."""
    places: dict[int, int] = {}
    for at in program.reachable([x]):
        op, args, attrs, shape, dtype = program[at]
        if program.dependence(at) == PARAM:
            places[at] = at
        elif op == 'load' and attrs[0] == 'row':
            places[at] = program.gather('src', 'row', attrs[1], shape, dtype)
        elif args and op not in REDUCES:
            places[at] = program.add(op, [places[arg] for arg in args], attrs, shape, dtype)
        else:
            raise Refused("message gathers by 'edge_index_j' what it aggregated")
    return places[x]


def argument_of(program: Program, x: int) -> str:
    """The name of the argument that a value is, in brackets; empty if it is none."""
    while program[x].op in ('view', 'expand', 'slice', 'cast'):
        (x,) = program[x].args
    op, _, attrs, *_ = program[x]
    name = attrs[1] if op == 'load' and isinstance(attrs[1], str) else INDICES.get(op)
    return '' if name is None else f" ('{name}')"
