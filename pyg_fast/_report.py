"""What runs the layers of a model, and why: for programs, and as a table."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .message._cures import cure_of

PYGS = "PyG's code"
SCRIPTED = 'compiled by TorchScript'


class LayerReport(NamedTuple):
    """What runs a layer: an entry of :func:`accelerate_report`.

    - **name** (str): the layer's name in the model, as in :meth:`named_modules`
    - **layer** (str): the user's class
    - **fused** (str, optional): our class; :obj:`None` if PyG's code runs for every input
    - **reason** (str, optional): why PyG's code runs, for every input or in the last eager call
    - **ran** (str, optional): what ran in the last eager call: our class, or
      :obj:`"PyG's code: "` and the reason; :obj:`None` before the first one
    - **how** (str, optional): if that was ours: by a :obj:`"kernel"`, or over :obj:`"blocks"` of
      edges
    """

    name: str
    layer: str
    fused: str | None
    reason: str | None
    ran: str | None = None
    how: str | None = None

    @property
    def runs_on(self) -> str:
        """What runs the layer: :obj:`"kernel"`, :obj:`"blocks"`, :obj:`"PyG's code"`,
        :obj:`"compiled"` by TorchScript, or :obj:`"no eager call yet"`."""
        if self.reason == SCRIPTED:
            return 'compiled'
        if self.reason is not None:
            return PYGS
        return self.how or 'no eager call yet'

    @property
    def cure(self) -> str | None:
        """What helps where PyG's code runs."""
        return None if self.reason is None else cure_of(self.reason)


class AccelerateReport(list[LayerReport]):
    """A list of :class:`LayerReport` that prints as a table."""

    def __repr__(self) -> str:
        if not self:
            return 'the model has no MessagePassing layer'
        return table_of(
            ('layer', 'class', 'runs on', 'why not a kernel', 'what helps'),
            [(r.name or '(model)', r.layer, r.runs_on, r.reason or '', r.cure or '') for r in self],
        )

    __str__ = __repr__


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as text in columns, without columns that are empty."""
    table = [row for row in zip(*[head, *rows], strict=True) if any(row[1:])]
    widths = [max(map(len, column)) for column in table]
    lines = zip(*table, strict=True)
    return '\n'.join(
        '  '.join(f'{cell:<{width}}' for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
