"""Progress bars."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar('T')

LARGE = 10_000_000  # edges: preparing fewer takes no two seconds


def progress(
    items: Iterable[T], title: str, total: int | None = None, shown: bool = True
) -> Iterable[T]:
    """The items, with a progress bar after two seconds of work.

    Args:
        items: What a loop goes over.
        title: What the bar says.
        total: The number of items, if they have no length.
        shown: Whether there is a bar; there is none where errors of the process go into a file.
    """
    return tqdm(items, title, total, delay=2, leave=False, disable=None) if shown else items
