"""Scripts of `examples/` as modules."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def script(name: str, *others: str) -> Iterator[ModuleType]:
    """A script, and the others that it imports, for as long as the context lasts."""
    folder = str(Path(__file__).parents[2] / 'examples')
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for each in (name, *others):
            sys.modules.pop(each, None)
