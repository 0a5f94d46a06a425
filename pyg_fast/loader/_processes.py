"""Objects that the processes of a group tell each other."""

from typing import Any

import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def gathered(value: Any, group: Any) -> list[Any]:
    """The values of all processes of a group; without processes, the only one."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def raise_first(what: str, texts: list[str | None], cause: Exception | None) -> None:
    """Raises an error if a process tells one."""
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f'{what} failed in process {rank}: {text}') from cause


def told(error: Exception | None) -> str | None:
    return None if error is None else repr(error)
