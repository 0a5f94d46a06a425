"""How Sphinx makes the manual: `make docs`."""

import sys
from pathlib import Path
from typing import Any

import pyg_fast

sys.path.insert(0, str(Path(__file__).parent / '_ext'))

project = 'pyg_fast'
author = copyright = 'The pyg_fast authors'
release = version = pyg_fast.__version__
extensions = [
    'sphinx.ext.autodoc',
    'sphinx.ext.intersphinx',
    'sphinx.ext.napoleon',
    'myst_parser',  # for the pages that a program writes
    'layers',
    'mathml',
    'results',
]
exclude_patterns = ['_build']
html_theme = 'furo'
html_static_path = ['_static']
html_css_files = ['manual.css']
html_title = f'pyg_fast {release}'
html_show_copyright = False
highlight_language = 'none'

autodoc_inherit_docstrings = False  # PyG's and torch's methods are theirs to describe.
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # Docstrings name the types.
maximum_signature_line_length = 88
# Pages of the names of torch and PyG that the manual uses, as text: a build needs no network.
intersphinx_mapping = {
    'torch': ('https://docs.pytorch.org/docs/stable', '_inventories/torch.inv'),
    'torch_geometric': (
        'https://pytorch-geometric.readthedocs.io/en/latest', '_inventories/torch_geometric.inv'
    ),
}  # fmt: skip
intersphinx_cache_limit = 0  # Reads changed inventories.
# Links to what is ours have to lead somewhere; names that the inventories lack are plain text.
nitpicky = True
nitpick_ignore_regex = [('py:obj', '.*'), ('py:.*', r'(?!pyg_fast\.).*')]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ['Shapes']


def skip(app: Any, kind: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out fields of named tuples that say no more than their number."""
    doc = getattr(obj, '__doc__', None) or ''
    return True if doc.startswith('Alias for field number') else None


def public_bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Leaves out the classes that are only there to be mixed in."""
    ours = [base for base in bases if getattr(base, '__module__', '').startswith('pyg_fast.')]
    hidden = [base for base in ours if not hasattr(pyg_fast.nn, base.__name__)]
    bases[:] = [base for base in bases if base not in hidden]


def setup(app: Any) -> None:
    app.connect('autodoc-process-bases', public_bases)
    app.connect('autodoc-skip-member', skip)
