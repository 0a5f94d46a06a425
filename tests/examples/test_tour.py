"""The notebook runs from top to bottom."""

import json
import sys
import types
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / 'examples/tour.ipynb'


def test_tour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    cells = json.loads(TOUR.read_text())['cells']
    codes = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    assert len(codes) > 10
    assert not any(cell.get('outputs') for cell in cells)
    module = types.ModuleType('tour')
    monkeypatch.setitem(sys.modules, 'tour', module)
    for number, code in enumerate(codes):
        exec(compile(code, f'cell {number} of {TOUR.name}', 'exec'), module.__dict__)
    printed = capsys.readouterr().out
    assert "PyG's code | a reduction over edges (" in printed
    assert printed.count('kernel') >= 5
    assert '<All keys matched successfully>' in printed
