"""A plan as text, and back. The op of a message takes the text: caches of compiled code, also those
of other processes, are keyed by it."""

import json
from typing import Any

from ._ir import Program
from ._plan import Input, Output, Plan, Tail

# Changes whenever a text of before would mean another plan.
_VERSION = 1


def dumps(plan: Plan) -> str:
    """The canonical text of a plan: equal texts, equal plans."""
    fields: dict[str, Any] = plan._asdict()
    for name in ('before', 'kernel'):
        fields[name] = _rows(fields[name])
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
    for name in ('before', 'kernel'):
        fields[name] = _program(fields[name])
    fields['inputs'] = tuple(
        Input(role, at, tuple(shape), dtype) for role, at, shape, dtype in fields['inputs']
    )
    fields['outputs'] = tuple(Output(*each) for each in fields['outputs'])
    if fields['tail'] is not None:
        weight, bias, shape, heads = fields['tail']
        fields['tail'] = Tail(weight, bias, tuple(shape), heads)
    fields['reduces'], fields['softmaxes'] = (
        tuple(fields[name]) for name in ('reduces', 'softmaxes')
    )
    return Plan(**fields)


def _rows(program: Program) -> list[Any]:
    return [[*value, program.level(at)] for at, value in enumerate(program.values)]


def _program(rows: list[Any]) -> Program:
    program = Program()
    for op, args, attrs, shape, dtype, level in rows:
        program.add(op, tuple(args), _tuples(attrs), tuple(shape), dtype, level)
    return program


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
