"""One command for all benchmarks: python -m benchmarks NAME [options]."""
import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first line of each benchmark, by its name."""
    files = {path.stem: path for path in FOLDER.glob('[!_]*.py')}
    return {
        name: (ast.get_docstring(ast.parse(path.read_text())) or '').split('\n')[0]
        for name, path in sorted(files.items())}


def main() -> None:
    known = benchmarks()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        lines = [f'  {name:18}{line}' for name, line in known.items()]
        sys.exit('\n'.join(['python -m benchmarks NAME [options]', *lines]))
    name = sys.argv.pop(1)
    importlib.import_module(f'benchmarks.{name}').main()


if __name__ == '__main__':
    main()
