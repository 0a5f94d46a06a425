"""Saves everything that a backward pass reads as autograd's saved tensors."""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from ._transforms import check_no_forward_ad


class Context(Protocol):
    """The context of an autograd function. What else a function sets on it is no tensor."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


def save(ctx: Context, *values: object) -> None:
    """Saves values for :func:`saved`, their tensors by :meth:`save_for_backward`.

    A context attribute would keep a tensor alive as long as the result, and would not detect an
    in-place change before the backward pass.

    Args:
        ctx (Context): The context of an autograd function.
        *values (object): Tensors, numbers, and (named) tuples of such.
    """
    tensors: list[Tensor] = []
    ctx.form = _split(values, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Context) -> tuple:
    """The values passed to :func:`save`.

    Raises:
        RuntimeError: If one was written since.
    """
    check_no_forward_ad()
    try:
        tensors = ctx.saved_tensors
    except RuntimeError as error:
        if 'inplace operation' not in str(error):
            raise
        raise RuntimeError(
            'a tensor that a layer of pyg_fast read was written before the backward pass, which '
            f'reads it again: write x = x + ... in place of x += ... ({error})'
        ) from None
    return _joined(ctx.form, iter(tensors))


# The type of a tuple, and its parts: forms in place of tuples, but empty ones, and the class Tensor
# in place of tensors.
_Form: TypeAlias = tuple[type, list]
_PLAIN = {int, bool, type(None)}


def _split(values: tuple, tensors: list[Tensor]) -> _Form:
    parts = list(values)
    for at, value in enumerate(values):
        if type(value) in _PLAIN:  # As most parts of a graph are: `isinstance` takes longer.
            continue
        if isinstance(value, Tensor):
            tensors.append(value)
            parts[at] = Tensor
        elif isinstance(value, tuple) and value:
            parts[at] = _split(value, tensors)
    return type(values), parts


def _joined(form: _Form, tensors: Iterator[Tensor]) -> tuple:
    kind, parts = form
    whole = [
        next(tensors) if part is Tensor
        else _joined(part, tensors) if type(part) is tuple and part
        else part for part in parts
    ]  # fmt: skip
    return tuple(whole) if kind is tuple else kind(*whole)
