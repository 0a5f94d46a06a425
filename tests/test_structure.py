"""Imports go down only, and kernels are free of torch."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The parts that each part may import. A part without an entry may import every other one.
RAW = {'ops._library', 'ops._edges', 'ops._numbers', '_alike', '_lazy', '_progress', 'errors'}
OPS = RAW | {'sparse', 'ops'}
GRAPH = OPS | {'graph'}
FUNCTIONS = GRAPH | {'functional'}
CORE = FUNCTIONS | {'message', 'attention', 'nn', 'transforms', 'loader'}
BELOW: dict[str, set[str]] = {
    '_alike': set(),
    '_lazy': set(),
    'errors': set(),
    '_progress': set(),
    'ops._library': set(),
    'ops._numbers': set(),
    'ops._edges': {'ops._library'},
    'sparse': RAW,
    'ops': OPS,
    'graph': GRAPH,
    'functional': FUNCTIONS,
    'message': GRAPH,
    'attention': GRAPH | {'message'},
    'nn': FUNCTIONS | {'message', 'attention'},
    'datasets': FUNCTIONS,
    'transforms': FUNCTIONS | {'nn'},
    'loader': FUNCTIONS | {'nn'},
    'papers': CORE,
    # Paths in pickles of version 0.2, which nothing imports.
    'graph.structure': {'_lazy'},
    'graph.groups': {'_lazy'},
    'graph.operator': {'_lazy'},
}


def part_of(module: str) -> str:
    """The part of the package that a module belongs to, such as 'nn' for 'pyg_fast.nn.gcn'."""
    inner = module.removeprefix('pyg_fast').removeprefix('.')
    if inner == 'ops':  # It gives users the functions, which stand above graphs.
        return 'functional'
    return inner if inner in BELOW else inner.split('.')[0]


def imported_modules(source: str, module: str, is_package: bool, known: set[str]) -> set[str]:
    """The modules of `known` that the text of `module` imports, anywhere in it, unless only type
    checkers read the import."""
    found = set()
    tree = ast.parse(source)
    unread = {
        node for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == 'TYPE_CHECKING'
        for statement in block.body for node in ast.walk(statement)
    }  # fmt: skip
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                parents = module.split('.')[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = '.'.join(filter(None, [*parents, base]))
            for alias in node.names:
                inner = f'{base}.{alias.name}'
                found.add(inner if inner in known else base)
    return found & known


def upward_imports(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Imports against the direction, of modules given as name -> (text, is it a package)."""
    wrong = []
    for module, (text, is_package) in sources.items():
        part = part_of(module)
        if part not in BELOW:
            continue
        for other in imported_modules(text, module, is_package, set(sources)):
            if part_of(other) not in BELOW[part] | {part}:
                wrong.append(f'{module} imports {other}')
    return sorted(wrong)


def import_circle(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Modules that import each other, the first one twice; none if imports have an order."""
    names = set(sources)
    imports = {
        module: imported_modules(text, module, is_package, names) - {module}
        for module, (text, is_package) in sources.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def torch_includes(text: str) -> list[str]:
    headers = r'(?:torch|ATen|c10|caffe2|bindings)/[^>"]*|(?:[^>"]*/)?stable\.h'
    include = rf'^\s*#\s*include\s*[<"]({headers})'
    return re.findall(include, text, re.MULTILINE)


def package_sources() -> dict[str, tuple[str, bool]]:
    sources = {}
    for path in (ROOT / 'pyg_fast').rglob('*.py'):
        parts = path.relative_to(ROOT).with_suffix('').parts
        is_package = parts[-1] == '__init__'
        name = '.'.join(parts[:-1] if is_package else parts)
        sources[name] = (path.read_text(), is_package)
    return sources


def test_imports_go_down() -> None:
    sources = package_sources()
    assert {'pyg_fast', 'pyg_fast.ops._library', 'pyg_fast.nn'} <= set(sources)
    assert upward_imports(sources) == []


def test_lower_parts_have_no_circle() -> None:
    sources = package_sources()
    lower = {name: text for name, text in sources.items() if part_of(name) in FUNCTIONS}
    assert {'pyg_fast.ops', 'pyg_fast.sparse.graph'} <= set(lower)
    assert import_circle(lower) == []


def test_layers_have_no_circle() -> None:
    layers = {name: text for name, text in package_sources().items() if part_of(name) == 'nn'}
    assert {'pyg_fast.nn._explain', 'pyg_fast.nn._explain_code'} <= set(layers)
    assert import_circle(layers) == []


def test_lower_parts_hide_no_import_in_a_function() -> None:
    hidden = [
        path.name
        for part in ('sparse', 'ops', 'graph', 'functional')
        for path in (ROOT / 'pyg_fast' / part).glob('*.py')
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(function))
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ('module', 'text'),
    [
        ('pyg_fast.ops.spmm', 'from pyg_fast.nn.gcn import GCN'),
        ('pyg_fast.graph.graph', 'from ..nn import gcn'),
        ('pyg_fast.ops.spmm', 'from pyg_fast import with_cuda'),
        ('pyg_fast.ops._library', 'from . import spmm'),
        ('pyg_fast.sparse.graph', 'from ..ops.spmm import spmm'),
        ('pyg_fast.sparse.graph', 'from ..graph import graph'),
        ('pyg_fast.ops.spmm', 'from ..graph.graph import graph_of'),
        ('pyg_fast.ops.spmm', 'from . import gat'),
        ('pyg_fast.graph.graph', 'from ..functional.gat import gat'),
        ('pyg_fast.graph.graph', 'from .structure import Graph'),
        ('pyg_fast.nn.gcn', 'from ..graph.structure import Graph'),
        ('pyg_fast.graph.graph', 'def f():\n    import pyg_fast.nn.gcn'),
        ('pyg_fast.nn', 'from ..transforms import ToCSR'),
        ('pyg_fast.transforms', 'from pyg_fast.loader import match'),
        ('pyg_fast.datasets', 'from .nn import gcn'),
        ('pyg_fast.nn', 'from pyg_fast import accelerate'),
        ('pyg_fast.nn', 'from ..papers.maxk import MaxK'),
    ],
)
def test_upward_import_is_found(module: str, text: str) -> None:
    packages = [
        '', '.sparse', '.ops', '.graph', '.functional', '.nn', '.transforms', '.loader', '.papers',
        '.papers.maxk',
    ]  # fmt: skip
    modules = ['.ops.spmm', '.ops._library', '.graph.graph', '.nn.gcn', '.datasets']
    more = ['.sparse.graph', '.graph.structure', '.functional.gat', '.accelerate']
    names = [*packages, *modules, *more]
    sources = {f'pyg_fast{name}': ('', name in packages) for name in names}
    sources[module] = (text, sources[module][1])
    assert len(upward_imports(sources)) == 1


def test_downward_import_is_fine() -> None:
    sources = {
        'pyg_fast': ('from .nn import gcn', True),
        'pyg_fast.nn': (
            'from .gcn import GCN\nif TYPE_CHECKING:\n    from ..papers import maxk',
            True,
        ),
        'pyg_fast.papers': ('from ..nn import gcn', True),
        'pyg_fast.papers.maxk': ('', True),
        'pyg_fast.nn.gcn': ('from pyg_fast import ops\nfrom .. import graph', False),
        'pyg_fast.graph': ('from ..ops._library import lib\nfrom ..ops import spmm', True),
        'pyg_fast.functional.gat': ('from ..graph import Graph\nfrom ..ops import spmm', False),
        'pyg_fast.ops': ('from ..functional.gat import gat\nfrom . import _library', True),
        'pyg_fast.ops.spmm': ('from ..sparse.graph import Graph', False),
        'pyg_fast.sparse.graph': ('from ..ops._library import lib', False),
        'pyg_fast.ops._library': ('import torch', False),
    }
    assert upward_imports(sources) == []


def test_circle_is_found() -> None:
    sources = {
        'pyg_fast.ops': ('from . import a', True),
        'pyg_fast.ops.a': ('from . import b', False),
        'pyg_fast.ops.b': ('import torch', False),
    }
    assert import_circle(sources) == []
    sources['pyg_fast.ops.b'] = ('def f():\n    from .a import g', False)
    assert set(import_circle(sources)) == {'pyg_fast.ops.a', 'pyg_fast.ops.b'}


def test_kernels_are_free_of_torch() -> None:
    for folder in ('params', 'cpu', 'cuda'):
        texts = {f.name: f.read_text() for f in (ROOT / 'csrc' / folder).iterdir()}
        assert len(texts) > 4
        assert {name: found for name, t in texts.items() if (found := torch_includes(t))} == {}


def test_op_is_a_family_of_files() -> None:
    families = {path.stem for path in (ROOT / 'csrc/bindings').glob('*.cpp')}
    assert {'maxk', 'runtime', 'spmm'} <= families
    assert families <= {path.stem for path in (ROOT / 'csrc/params').iterdir()}


def test_torch_include_is_found() -> None:
    text = '#include <vector>\n#  include <torch/library.h>\n#include "c10/util/Half.h"\n'
    assert torch_includes(text) == ['torch/library.h', 'c10/util/Half.h']
    assert torch_includes('#include "../stable.h"') == ['../stable.h']
