"""A plan as canonical text, and back. The op of a message takes the text: caches of compiled code,
also those of other processes, are keyed by it."""

import json

from ._ir import Program
from ._plan import Input, Output, Plan, Tail
from ._rows import RowPart

# Changes whenever an earlier text would mean another plan.
_VERSION = 1
# The programs of a plan, by their names in the text.
_PROGRAMS = {'before': 'prologue', 'kernel': 'message'}


def dumps(plan: Plan) -> str:
    """The canonical text of a plan: equal texts, equal plans."""
    names = {field: name for name, field in _PROGRAMS.items()}
    fields = {
        names.get(field, field): _rows(value) if isinstance(value, Program) else value
        for field, value in plan._asdict().items()
    }
    if plan.rows is not None:
        fields['rows'] = [_rows(plan.rows.program), *plan.rows[1:]]
    return json.dumps([_VERSION, fields], separators=(',', ':'))


def loads(text: str) -> Plan:
    """The plan of a text.

    Raises:
        ValueError: If another version of this package wrote the text.
    """
    version, fields = json.loads(text)
    if version != _VERSION:
        raise ValueError(
            f"'plan' must be of version {_VERSION}, got {version}: compile or export the model "
            'again with the pyg_fast that runs it'
        )
    for name, field in _PROGRAMS.items():
        fields[field] = _program(fields.pop(name))
    for name in ('inputs', 'outputs', 'tail', 'reduces', 'softmaxes'):
        fields[name] = _tuples(fields[name])
    fields['inputs'] = tuple(Input(*each) for each in fields['inputs'])
    fields['outputs'] = tuple(Output(*each) for each in fields['outputs'])
    if fields['tail'] is not None:
        fields['tail'] = Tail(*fields['tail'])
    if fields.get('rows') is not None:
        program, outputs, container = fields['rows']
        fields['rows'] = RowPart(_program(program), tuple(outputs), container)
    return Plan(**fields)


def _rows(program: Program) -> list[list[object]]:
    return [[*value, program.dependence(at)] for at, value in enumerate(program.values)]


def _program(rows: list[list]) -> Program:
    program = Program()
    for op, args, attrs, shape, dtype, dependence in rows:
        program.add(op, tuple(args), _tuples(attrs), tuple(shape), dtype, dependence)
    return program


def _tuples(value: object) -> tuple:
    """Lists of JSON as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value  # type: ignore
