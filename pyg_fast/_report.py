"""What runs the layers of a model, and why: for programs, and as a table."""

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from .message._cures import FAILS, cure_of

PYGS = "PyG's code"
SCRIPTED = 'compiled by TorchScript'
PLAIN = 'not accelerated: pyg_fast.accelerate(model)'
SORTS = (
    'edges are sorted at each call: prepare a graph that stays the same by ToCSR, batches of small '
    'graphs by GraphLoader'
)
LOST = (
    'edges are sorted at each call, as forward makes a new list of them: call what makes the same '
    'list each time, such as add_self_loops, once on the data, before ToCSR'
)
EDGES = (
    "edge_update runs PyG's code, with a row for each edge: what message alone reads of it, such "
    'as an attention, belongs into message, and is a part of the kernel then'
)
WHY = 'why not a kernel'
RAISED = 'its last call raised'
_PLACE = r'File "[^"]*", line \d+'
_WIDTH = 100  # columns of notes, in every terminal and file


class LayerReport(NamedTuple):
    """What runs a layer: an entry of :func:`accelerate_report`.

    - **name** (str): the layer's name in the model, as in :meth:`named_modules`
    - **layer** (str): the user's class
    - **fused** (str, optional): our class; :obj:`None` if PyG's code runs for every input
    - **reason** (str, optional): why PyG's code runs, for every input or in the last eager call,
      or else in compiled code
    - **ran** (str, optional): what ran in the last eager call: our class, or
      :obj:`"PyG's code: "` and the reason; :obj:`None` before the first one
    - **how** (str, optional): if that was ours: by a :obj:`"kernel"`, or over :obj:`"blocks"` of
      edges; for a layer that :func:`accelerate` has not replaced yet, that it has not; for a call
      without `propagate` that it ran :obj:`"nothing: ..."`
    - **compiled** (str, optional): what runs the layer in code that :func:`torch.compile` compiled
      last: a :obj:`"kernel"`, or :obj:`"PyG's code: "` and the reason
    - **sorts** (bool): whether ours sorted the edges in the last eager call, which had a plain
      :obj:`edge_index`, or made a new list in :obj:`forward`
    - **error** (str, optional): what the last eager call raised
    - **remakes** (bool): whether the list that ours sorted is one that :obj:`forward` made of
      another, whose preparation is lost, as by :obj:`add_self_loops`
    - **updates_edges** (bool): whether the layer is a user's that has an :obj:`edge_update`, which
      PyG's code runs whatever runs :obj:`message`
    """

    name: str
    layer: str
    fused: str | None
    reason: str | None
    ran: str | None = None
    how: str | None = None
    compiled: str | None = None
    sorts: bool = False
    error: str | None = None
    remakes: bool = False
    updates_edges: bool = False

    @property
    def runs_on(self) -> str:
        """What runs the layer: :obj:`"kernel"`, :obj:`"blocks"`, :obj:`"PyG's code"`,
        :obj:`"compiled"` by TorchScript, :obj:`"not accelerated: ..."`, :obj:`"nothing: ..."` or
        :obj:`"no eager call yet"`, or if the last one did :obj:`"raised an error"`; and after
        :obj:`"compiled: "` what does in compiled code."""
        if self.reason == SCRIPTED:
            return 'compiled'
        ran_pygs = self.ran is not None and self.ran.startswith(PYGS)
        never = self.fused is None and self.reason is not None
        eager = PYGS if ran_pygs or never else self.how
        if eager is None and self.error is not None:
            eager = 'raised an error'
        if self.compiled is None:
            return eager or 'no eager call yet'
        compiled = f'compiled: {self.compiled.partition(": ")[0]}'
        return compiled if eager is None else f'{eager}; {compiled}'

    @property
    def cure(self) -> str | None:
        """What helps where PyG's code runs, or where ours sorts the edges. An error of the last
        call that names an argument tells itself what helps, unless the reason speaks of it, too."""
        if self.reason is None:
            sorts = LOST if self.remakes else SORTS
            return sorts if self.sorts else None
        eager = self.reason.partition('; compiled: ')[0]
        named = re.match(r"\w+: '(\w+)", self.error or '')
        if named is not None and not re.search(rf'\b{named[1]}\b', eager.partition(' (File ')[0]):
            return None
        if self.error is not None and re.match(r'message cannot be traced: \w+Error', eager):
            return FAILS
        return cure_of(eager.partition('; with more: ')[2] or eager)


class AccelerateReport(list[LayerReport]):
    """A list of :class:`LayerReport` that prints as a table."""

    def __repr__(self) -> str:
        if not self:
            return 'the model has no MessagePassing layer'
        return table_of(
            ('layer', 'class', 'runs on'),
            [(r.name or '(model)', r.layer, r.runs_on) for r in self],
            [
                {
                    WHY: r.reason,
                    'what helps': r.cure,
                    RAISED: r.error,
                    'beside': EDGES if r.updates_edges else None,
                }
                for r in self
            ],  # fmt: skip
        )

    __str__ = __repr__


def table_of(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[Mapping[str, str | None]] = (),
) -> str:
    """Rows as text in columns, without columns that are empty. Notes of a row, by what they tell,
    stand on lines of their own below it: they are long."""
    table = [column for column in zip(*[head, *rows], strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in table]
    below = dict(enumerate(notes, 1))  # The head has none.
    lines: list[str] = []
    for k, row in enumerate(zip(*table, strict=True)):
        cells = zip(row, widths, strict=True)
        lines.append('  '.join(f'{cell:<{width}}' for cell, width in cells).rstrip())
        for what, text in below.get(k, {}).items():
            lines += [] if text is None else _wrap(f'{what}: {text}')
    return '\n'.join(lines)


def _wrap(text: str) -> list[str]:
    """Indented lines. A place of the user's code stays whole: terminals make a link of it."""
    joined = re.sub(_PLACE, lambda place: place[0].replace(' ', '\0'), text)
    lines = wrap(
        joined, _WIDTH, initial_indent=' ' * 4, subsequent_indent=' ' * 8,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace('\0', ' ') for line in lines]
