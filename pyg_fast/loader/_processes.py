"""Objects that the processes of a group tell each other."""

from typing import TypeAlias, TypeVar

import torch.distributed as dist

T = TypeVar('T')

#: A group of processes; None: all. A name: not every torch has the class.
Group: TypeAlias = 'dist.ProcessGroup | None'


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather_objects(value: T, group: Group) -> list[T]:
    """Gathers the values of all processes of a group; without processes, the only one."""
    if not is_distributed():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def raise_first(what: str, texts: list[str | None], cause: Exception | None) -> None:
    """Raises an error if a process tells one."""
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f'{what} failed in process {rank}: {text}') from cause


def text_of(error: Exception | None) -> str | None:
    return None if error is None else repr(error)
