"""Progress bars."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar('T')


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar after two seconds of work; none where errors of the process go
    into a file."""
    return tqdm(items, title, total, delay=2, leave=False, disable=None)
