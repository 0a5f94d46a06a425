"""Saves everything that a backward pass reads as autograd's saved tensors."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ._transforms import check_no_forward_ad

_TENSOR = ...  # stands for a saved tensor


def save(ctx: Any, *values: Any) -> None:
    """Saves values for :func:`saved`, their tensors by :meth:`save_for_backward`.

    A context attribute would keep a tensor alive as long as the result, and would not detect an
    in-place change before the backward pass.

    Args:
        ctx (Any): The context of an autograd function.
        *values (Any): Tensors, numbers, and (named) tuples of such.
    """
    tensors: list[Tensor] = []
    ctx.form = _split(values, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """The values passed to :func:`save`."""
    check_no_forward_ad()
    form = ctx.form
    return _joined(form, iter(ctx.saved_tensors)) if type(form) is list else form


def _split(values: tuple, tensors: list[Tensor]) -> Any:
    """A tuple's type and parts as a list, with marks for tensors; the tuple if it has none."""
    count = len(tensors)
    form: list[Any] = [type(values)]
    for value in values:
        if value is None:
            form.append(None)
        elif isinstance(value, Tensor):
            tensors.append(value)
            form.append(_TENSOR)
        elif isinstance(value, tuple):
            form.append(_split(value, tensors))
        else:
            form.append(value)
    return form if len(tensors) > count else values


def _joined(form: list[Any], tensors: Iterator[Tensor]) -> tuple:
    values: list[Any] = [
        next(tensors) if part is _TENSOR else _joined(part, tensors) if type(part) is list else part
        for part in form[1:]
    ]
    kind = form[0]
    return tuple(values) if kind is tuple else kind(*values)
