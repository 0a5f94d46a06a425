"""Names that live elsewhere: public ones of the rooms of papers, which the core does not import,
those that pickles of earlier releases look for, and those that a user seeks in the package."""

import sys
from collections.abc import Callable
from importlib import import_module


def lazy(package: str, homes: dict[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module that offers names of other modules, imported at the first use.

    Args:
        package: The name of the module.
        homes: The module of each name, relative to :obj:`pyg_fast`.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(  # To which Python adds a name that is alike.
                f'module {package!r} has no attribute {name!r}',
                name=name, obj=sys.modules[package],
            )  # fmt: skip
        return getattr(import_module(f'pyg_fast.{homes[name]}'), name)

    return find


def placed(package: str, rooms: list[str]) -> Callable[[str], object]:
    """The `__getattr__` of the package, whose error tells in which of its modules a name is.

    Args:
        package: The name of the package.
        rooms: Its modules with public names.
    """

    def find(name: str) -> object:
        homes = [room for room in rooms if name in import_module(f'{package}.{room}').__all__]
        where = f': it is {package}.{homes[0]}.{name}' if homes else ''
        raise AttributeError(
            f'module {package!r} has no attribute {name!r}{where}',
            name=name, obj=sys.modules[package],
        )  # fmt: skip

    return find


def moved(home: str) -> Callable[[str], object]:
    """The `__getattr__` of a module whose names are now those of another one."""
    return lambda name: getattr(import_module(f'pyg_fast.{home}'), name)
