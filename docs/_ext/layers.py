"""The directive `layers`: what runs each of PyG's layers, of the record that the tests keep."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from results import Result

RECORD = Path(__file__).parents[1] / 'systems' / 'layers.json'


class Layers(Result):
    """A row for each layer and what runs it, with the options tested."""

    required_arguments = 0
    option_spec = {}

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RECORD))
        lines = ['.. list-table::', '   :header-rows: 1', '']
        lines += ['   * - Layer', '     - Runs as', '     - Options tested']
        for row in json.loads(RECORD.read_text()):
            runs, options = row['runs'], '; '.join(f'``{each}``' for each in row['options'])
            runs = f'hand-written kernels: ``{runs}``' if runs.endswith('Conv') else runs
            lines += [f'   * - ``{row["layer"]}``', f'     - {runs}', f'     - {options}']
        return self.parsed(lines)


def setup(app: Any) -> dict[str, Any]:
    app.add_directive('layers', Layers)
    return {'parallel_read_safe': True}
