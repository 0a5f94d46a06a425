"""Transforms that prepare graphs once, for all layers and epochs."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from .group_sizes import GroupSizes, choose_group_size
from .to_csr import ToCSR

if TYPE_CHECKING:
    from ..papers.paths import ExecutionPaths, Prepare
    from ..papers.reorder import Reorder

_ROOMS = {
    'ExecutionPaths': 'papers.paths', 'Prepare': 'papers.paths', 'Reorder': 'papers.reorder'
}  # fmt: skip
__getattr__ = lazy(__name__, _ROOMS)

__all__ = ['ExecutionPaths', 'GroupSizes', 'Prepare', 'Reorder', 'ToCSR', 'choose_group_size']


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
