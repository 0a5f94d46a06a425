"""The directive `result`: a table of benchmarks/results, with the run that it comes from.

.. result:: spmm-nvidia-h200-20261121T061127.md
   :section: Title of the section whose first table is shown
   :columns: graph; ours; PyG        all, if not given
   :rows: arxiv-like; reddit-like    those that begin so in any of the columns, all if not given
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from result_tables import chosen, table_of
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / 'benchmarks' / 'results'


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(';') if part.strip()]


class Result(SphinxDirective):
    """The table, and below it the file and the machine."""

    required_arguments = 1
    option_spec = {
        'section': directives.unchanged_required,
        'columns': parts,
        'rows': parts,
    }

    def run(self) -> list[nodes.Node]:
        file = RESULTS / self.arguments[0]
        self.env.note_dependency(str(file))
        try:
            text = file.read_text()
            table = table_of(text, self.options['section'])
            table = chosen(table, self.options.get('columns', []), self.options.get('rows', []))
        except (OSError, KeyError, ValueError) as error:
            raise self.error(f'{file.name}: {error}') from error
        title = text.splitlines()[0].removeprefix('# ')
        source = [f'Run "{title}": ``benchmarks/results/{file.name}``, section', '']
        source[0] += f' "{self.options["section"]}".'
        lines = ['.. list-table::', '   :header-rows: 1', '']
        for row in table:
            for k, cell in enumerate(row):
                lines.append(f'   {"* " if k == 0 else "  "}- {cell}')
        return self.parsed([*lines, '', *source])

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.name), 0, holder)
        return holder.children


def setup(app: Any) -> dict[str, Any]:
    app.add_directive('result', Result)
    return {'parallel_read_safe': True}
