"""The manual and README: their code runs, cited files exist, Sphinx builds without warnings."""

import ast
import contextlib
import doctest
import functools
import html
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
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
MODULES = ['nn', 'transforms', 'ops', 'graph', 'loader', 'datasets', 'errors']


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


def printed_by(text: str) -> dict[int, str]:
    """The text blocks that directly follow a Python block, by the line that the latter begins on:
    what it prints, with ... for what varies."""
    found, codes = {}, blocks(text, 'python')
    lines = text.splitlines()
    for line, output in blocks(text, 'text'):
        before = [(number, code) for number, code in codes if number < line]
        if before:
            number, code = before[-1]
            between = ' '.join(lines[number + len(code.splitlines()) : line - 1])
            if not re.sub('```', '', between).strip():
                found[number] = output.strip() + '\n'
    return found


def run_blocks(page: Path, namespace: dict[str, object]) -> None:
    text = page.read_text()
    expected = printed_by(text)
    for line, code in blocks(text, 'python'):
        # What a page prints is what users see, on small graphs too.
        small = pyg_fast.small_graphs('pyg') if expected else contextlib.nullcontext()
        with small, contextlib.redirect_stdout(io.StringIO()) as printed:
            # The lines of the page, so that an error names them.
            exec(compile('\n' * line + code, str(page), 'exec'), namespace)
        if line in expected:
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(expected[line], printed.getvalue(), options)
            assert same, f'{page.name}:{line} prints\n{printed.getvalue()}'


def test_blocks_are_found() -> None:
    text = (
        'Text\n\n.. code-block:: python\n\n   a = 1\n\n   b = 2\n\nText\n\n'
        '   .. code-block:: python\n\n      c = 3\n\n   Text\n\n```python\nd = 4\n```\n'
        '.. code-block:: sh\n\n   no\n'
    )
    assert [code.strip() for _, code in blocks(text, 'python')] == [
        'a = 1\n\nb = 2', 'c = 3', 'd = 4'
    ]  # fmt: skip
    text += '\n.. code-block:: python\n\n   print(1)\n\n.. code-block:: text\n\n   1\n\n'
    text += 'Words.\n\n.. code-block:: text\n\n   2\n\n'
    text += '```python\nprint(3)\n```\n\n```text\n3\n```\n'
    assert list(printed_by(text).values()) == ['1\n', '3\n']
    with_code = [page.name for page in PAGES if blocks(page.read_text(), 'python')]
    assert {'five_minutes.rst', 'paths.rst', 'mini_batches.rst'} <= set(with_code)


def test_code_of_readme() -> None:
    assert len(blocks((ROOT / 'README.md').read_text(), 'python')) > 5
    run_blocks(ROOT / 'README.md', small_data())


@pytest.mark.parametrize(
    'page',
    # The page of `test_layers_that_are_taken` runs there.
    [page for page in PAGES if page.stem != 'taken' and blocks(page.read_text(), 'python')],
    ids=lambda page: page.stem,
)
def test_code_of_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module that is found by its name, as a script is: Dynamo reads the globals of messages.
    module = types.ModuleType(f'page_{page.stem}')
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_blocks(page, module.__dict__)


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
    page.write_text('```python\nprint(1, 2)\n```\n\n```text\n1 ...\n```\n')
    run_blocks(page, {})
    page.write_text('```python\nprint(1)\n```\n\n```text\n2\n```\n')
    with pytest.raises(AssertionError, match='prints'):
        run_blocks(page, {})


def results(text: str) -> list[str]:
    return re.findall(r'\.\. result:: (\S+)', text)


def test_results_are_there() -> None:
    cited = {name for page in PAGES for name in results(page.read_text())}
    assert len(cited) > 5
    assert [name for name in cited if not (ROOT / 'benchmarks/results' / name).is_file()] == []


@pytest.mark.parametrize('module', MODULES)
def test_reference_has_all_modules(module: str) -> None:
    assert (
        f'.. automodule:: pyg_fast.{module}\n   :members:'
        in (DOCS / 'api' / f'{module}.rst').read_text()
    )
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


@functools.cache
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
@pytest.fixture(scope='module')
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built manual."""
    for package in ('sphinx', 'furo', 'myst_parser'):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp('manual')
    command = ['-m', 'sphinx', '-q', '-W', '--keep-going', '-b', 'html', '-d']
    run = _forks.run(*command, str(folder / 'doctrees'), str(DOCS), str(folder / 'html'), cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return folder / 'html'


def test_sphinx_builds_without_warnings(manual: Path) -> None:
    page = (manual / 'api/nn.html').read_text()
    assert all(f'id="pyg_fast.nn.{name}"' in page for name in pyg_fast.nn.__all__)
    assert 'docs.pytorch.org/docs/stable/generated/torch.compile.html#torch.compile' in page
    assert '<td>' in (manual / 'systems/paths.html').read_text()
    layers = (manual / 'systems/layers.html').read_text()
    record = json.loads((DOCS / 'systems/layers.json').read_text())
    assert layers.count('<tr') == 1 + len(record)
    assert all(row['layer'] in layers for row in record)
    assert '.svg' in (manual / 'performance.html').read_text()


def test_the_manual_needs_no_network(manual: Path) -> None:
    """Formulas are MathML, and no page loads a script, a style or a picture from elsewhere."""
    assert '<math' in (manual / 'systems/paths.html').read_text()
    loads = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="https?://[^"]*"')
    assert [
        (page.name, found[0]) for page in manual.rglob('*.html')
        if (found := loads.search(page.read_text()))
    ] == []  # fmt: skip


def test_tables_of_the_manual_are_narrow(manual: Path) -> None:
    """What needs no browser: a page of 1,300 pixels has room for as many characters."""
    wide = []
    for page in manual.rglob('*.html'):
        for table in re.findall(r'<table class="docutils.*?</table>', page.read_text(), re.DOTALL):
            rows = [
                re.findall(r'<t[hd][^>]*>(.*?)</t[hd]>', row, re.DOTALL)
                for row in re.findall(r'<tr.*?</tr>', table, re.DOTALL)
            ]
            words = [[word_length(cell) for cell in row] for row in rows]
            if sum(max(column) for column in zip(*words, strict=True)) > 110:
                wide.append((page.name, rows[0]))
    assert wide == []


def word_length(cell: str) -> int:
    """The longest part that a browser does not break, and room around it; code may break."""
    text = re.sub(r'<code.*?</code>', ' ', cell, flags=re.DOTALL)
    return 2 + max(map(len, re.split(r'[\s-]+', re.sub('<[^>]*>', '', text))))


def test_word_length() -> None:
    cells = '<p>of an <em>edge</em></p>', '<code class="x">long_name</code> a', 'nvidia-h200', ''
    assert [word_length(cell) for cell in cells] == [6, 3, 8, 2]


def browser() -> str | None:
    """Chromium, or what Playwright has installed."""
    names = 'chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome'
    caches = Path.home().glob('.cache/ms-playwright/chromium*/*/*headless*shell')
    found = [os.environ.get('PYG_FAST_BROWSER'), *map(shutil.which, names), *map(str, caches)]
    return next(filter(None, found), None)


def test_nothing_is_cut_in_a_browser(manual: Path) -> None:
    """Tables, pictures, formulas and code at 1,300 pixels."""
    program = browser()
    if program is None:
        pytest.skip('no Chromium: apt install chromium, or PYG_FAST_BROWSER=/path/to/it')
    pages = sorted(
        page.relative_to(manual).as_posix() for page in manual.rglob('*.html')
        if page.name not in ('genindex.html', 'py-modindex.html', 'search.html')
    )  # fmt: skip
    script = (ROOT / 'tests/_overflow.html').read_text()
    (manual / 'overflow.html').write_text(script.replace('PAGES', json.dumps(pages), 1))
    options = ['--headless', '--no-sandbox', '--disable-gpu', '--allow-file-access-from-files']
    options += ['--virtual-time-budget=120000', '--window-size=1400,1000', '--dump-dom']
    try:
        run = subprocess.run(
            [program, *options, f'file://{manual}/overflow.html'], capture_output=True, text=True,
            timeout=180,
        )  # fmt: skip
    finally:
        (manual / 'overflow.html').unlink()
    measured = re.search(r'measured (\[.*\])', html.unescape(run.stdout))
    assert measured is not None, run.stderr[-2000:]
    assert json.loads(measured[1]) == [len(pages), []]


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
