"""One command for all benchmarks: python -m benchmarks NAME [options]."""
import importlib
import pkgutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks: every module here that is not private, and the papers."""
    found = [module.name for module in pkgutil.iter_modules([str(FOLDER)])]
    return sorted(name for name in found if not name.startswith('_'))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in names():
        lines = []
        for name in names():
            module = importlib.import_module(f'benchmarks.{name}')
            lines.append(f'  {name:18}{(module.__doc__ or "").splitlines()[0]}')
        sys.exit('\n'.join(['python -m benchmarks NAME [options]', *lines]))
    name = sys.argv.pop(1)
    package = f'benchmarks.{name}.__main__' if (FOLDER / name).is_dir() else f'benchmarks.{name}'
    importlib.import_module(package).main()


if __name__ == '__main__':
    main()
