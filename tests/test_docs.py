"""The manual and README: their code runs, cited files exist, Sphinx builds without warnings."""

import ast
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _forks
import pytest
from torch_geometric.nn import GCN

import pyg_fast
from pyg_fast.datasets import PlantedGraph

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
PAGES = sorted(page for page in DOCS.rglob('*.rst') if '_build' not in page.parts)
MODULES = ['nn', 'transforms', 'ops', 'graph', 'loader', 'datasets']


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The code blocks of a page and the lines that they begin on."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if line.strip() == f'```{language}':
            end = lines.index('```', number)
            found.append((number + 1, '\n'.join(lines[number + 1 : end])))
        elif match := re.fullmatch(rf'( *)\.\. code-block:: {language}', line):
            block = []
            for each in lines[number + 1 :]:
                if each.strip() and not each.startswith(match[1] + ' '):
                    break
                block.append(each)
            found.append((number + 1, textwrap.dedent('\n'.join(block))))
    return found


def small_data() -> dict[str, object]:
    """The variables that the code of README uses."""
    data = PlantedGraph('tiny', num_channels=16)[0]
    return {'data': data, 'x': data.x, 'model': GCN(16, 32, num_layers=2)}


def run_blocks(page: Path, namespace: dict[str, object]) -> None:
    for line, code in blocks(page.read_text(), 'python'):
        # The lines of the page, so that an error names them.
        exec(compile('\n' * line + code, str(page), 'exec'), namespace)


def test_blocks_are_found() -> None:
    text = (
        'Text\n\n.. code-block:: python\n\n   a = 1\n\n   b = 2\n\nText\n\n'
        '   .. code-block:: python\n\n      c = 3\n\n   Text\n\n```python\nd = 4\n```\n'
        '.. code-block:: sh\n\n   no\n'
    )
    assert [code.strip() for _, code in blocks(text, 'python')] == [
        'a = 1\n\nb = 2', 'c = 3', 'd = 4'
    ]  # fmt: skip
    with_code = [page.name for page in PAGES if blocks(page.read_text(), 'python')]
    assert {'five_minutes.rst', 'paths.rst', 'mini_batches.rst'} <= set(with_code)


def test_code_of_readme() -> None:
    assert len(blocks((ROOT / 'README.md').read_text(), 'python')) > 5
    run_blocks(ROOT / 'README.md', small_data())


@pytest.mark.parametrize(
    'page',
    [page for page in PAGES if blocks(page.read_text(), 'python')],
    ids=lambda page: page.stem,
)
def test_code_of_page(page: Path) -> None:
    run_blocks(page, {'__name__': '__main__'})


def test_layers_that_are_taken() -> None:
    """Each layer of the page runs as a kernel, or for the reason that its table gives as PyG's."""
    page, space = DOCS / 'systems/taken.rst', dict[str, Any]()
    run_blocks(page, space)
    reasons = dict(re.findall(r'\* - ``(\w+)``\n +- ``(.+)``\n', page.read_text()))
    layers = {each.__name__: each for each in space['Layer'].__subclasses__()}
    assert reasons.keys() < layers.keys()
    assert len(layers) > 35
    ran = {name: space['what_ran'](layer()) for name, layer in layers.items()}
    wrong = {
        name: how for name, how in ran.items()
        if not how.startswith(f"PyG's code: {reasons[name]}" if name in reasons else 'Fused')
    }  # fmt: skip
    assert wrong == {}


def test_wrong_code_is_found(tmp_path: Path) -> None:
    page = tmp_path / 'page.rst'
    page.write_text('Text\n\n.. code-block:: python\n\n   x = 1\n   assert x == 2\n')
    with pytest.raises(AssertionError) as error:
        run_blocks(page, {})
    assert error.traceback[-1].lineno == 5  # counted from zero


def results(text: str) -> list[str]:
    return re.findall(r'\.\. result:: (\S+)', text)


def test_results_are_there() -> None:
    cited = {name for page in PAGES for name in results(page.read_text())}
    assert len(cited) > 5
    assert [name for name in cited if not (ROOT / 'benchmarks/results' / name).is_file()] == []


@pytest.mark.parametrize('module', MODULES)
def test_reference_has_all_modules(module: str) -> None:
    assert f'.. automodule:: pyg_fast.{module}\n   :members:' in (
        DOCS / 'api' / f'{module}.rst'
    ).read_text()
    importlib.import_module(f'pyg_fast.{module}')


def test_reference_has_all_of_the_package() -> None:
    page = (DOCS / 'api/pyg_fast.rst').read_text()
    own = set(pyg_fast.__all__) - {'__version__', 'with_cuda', *MODULES}
    assert own == set(re.findall(r'auto(?:function|class):: pyg_fast\.(\w+)', page))
    assert 'with_cuda' in pyg_fast.ops.__all__


# Messages ---------------------------------------------------------------------------------------
def templates(node: ast.AST) -> list[str]:
    """The text of a message, with … for what is filled in; one for each alternative."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = (templates(v) if isinstance(v, ast.Constant) else ['…'] for v in node.values)
        return [''.join(part[0] for part in parts)]
    if isinstance(node, ast.BinOp):
        return [a + b for a in templates(node.left) for b in templates(node.right)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    return ['…']


def messages(text: str) -> Iterator[str]:
    """Of errors that are raised in Python code, of warnings and of assertions on the device."""
    for node in ast.walk(ast.parse(text)):
        call, first, prefix = node, 0, ''
        if isinstance(node, ast.Raise):
            call = node.exc
            # Reasons to run PyG's code: `accelerate_report` shows them.
            names = 'Fallback', 'BySize', 'InMemory', 'Refused', '_Changes'
            if isinstance(call, ast.Call) and ast.unparse(call.func) in names:
                continue
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == 'fail':
                prefix = 'pyg_fast: '
            elif name == 'torch._assert_async':
                first = 1
            elif name != 'warnings.warn':
                continue
        else:
            continue
        if isinstance(call, ast.Call) and len(call.args) > first:
            yield from (prefix + text for text in templates(call.args[first]))


def all_messages() -> set[str]:
    files = [ROOT / 'setup.py', *(ROOT / 'pyg_fast').rglob('*.py')]
    files.remove(ROOT / 'pyg_fast/_self_test.py')
    found = {message for file in files for message in messages(file.read_text())}
    return {message for message in found if re.search('[a-z]{3}', message)}


def documented() -> list[str]:
    text = (DOCS / 'troubleshooting.rst').read_text()
    return [line for _, block in blocks(text, 'text') for line in block.splitlines() if line]


def fits(message: str, pattern: str) -> bool:
    return re.fullmatch('.*'.join(map(re.escape, pattern.split('…'))), message) is not None


def test_messages_are_found() -> None:
    text = (
        "raise ValueError(f'a {b} c' if d else 'e')\nwarnings.warn('f' + g)\nfail(f'h {i}')\n"
        "torch._assert_async(ok, 'j')\nprint('k')\nraise l\n"
    )
    assert sorted(messages(text)) == ['a … c', 'e', 'f…', 'j', 'pyg_fast: h …']
    assert len(all_messages()) > 150


def test_every_message_has_a_cure() -> None:
    patterns = documented()
    assert len(patterns) == len(set(patterns))
    missing = [m for m in all_messages() if not any(fits(m, p) for p in patterns)]
    assert sorted(missing) == []


def test_every_cure_has_a_message() -> None:
    known = all_messages()
    assert [p for p in documented() if not any(fits(m, p) for m in known)] == []


# Sphinx -----------------------------------------------------------------------------------------
def test_sphinx_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip('sphinx')
    pytest.importorskip('furo')
    pytest.importorskip('myst_parser')
    command = ['-m', 'sphinx', '-q', '-W', '--keep-going', '-b', 'html', '-d']
    run = _forks.run(
        *command, str(tmp_path / 'doctrees'), str(DOCS), str(tmp_path / 'html'), cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    page = (tmp_path / 'html/api/nn.html').read_text()
    assert all(f'id="pyg_fast.nn.{name}"' in page for name in pyg_fast.nn.__all__)
    assert '<td>' in (tmp_path / 'html/systems/paths.html').read_text()
    layers = (tmp_path / 'html/systems/layers.html').read_text()
    record = json.loads((DOCS / 'systems/layers.json').read_text())
    assert layers.count('<tr') == 1 + len(record)
    assert all(row['layer'] in layers for row in record)
    assert '.svg' in (tmp_path / 'html/performance.html').read_text()


def test_table_of_results() -> None:
    sys.path.insert(0, str(DOCS / '_ext'))
    try:
        results = importlib.import_module('result_tables')
    finally:
        sys.path.pop(0)
    rows = ['| g | k | ms |', '| --- | --: | --: |', '| a | 1 | 2 |', '| b | 3 | 4 |']
    text = '\n'.join(['# t', '', '## A', '', *rows, '', '| no |'])
    table = results.table_of(text, 'A')
    assert table == [['g', 'k', 'ms'], ['a', '1', '2'], ['b', '3', '4']]
    assert results.chosen(table, ['g', 'ms'], ['b']) == [['g', 'ms'], ['b', '4']]
    for columns, rows in ((['s'], []), ([], ['c'])):
        with pytest.raises(ValueError):
            results.chosen(table, columns, rows)
    for wrong in ('B', ''):
        with pytest.raises(ValueError, match='no section'):
            results.table_of(text, wrong)
