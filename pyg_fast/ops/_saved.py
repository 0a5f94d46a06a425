"""What a backward pass reads, all of it among autograd's saved tensors."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ._transforms import check_no_forward_ad

_TENSOR = ...  # stands for a saved tensor


def save(ctx: Any, *values: Any) -> None:
    """Keeps values for :func:`saved`, their tensors by :meth:`save_for_backward`.

    A context attribute would keep a tensor alive as long as the result, and would not notice that
    it is changed in place before the backward pass.

    Args:
        ctx (Any): The context of an autograd function.
        *values (Any): Tensors, numbers, and (named) tuples of such.
    """
    tensors: list[Tensor] = []
    ctx.form = _split(values, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> Any:
    """What :func:`save` was given."""
    check_no_forward_ad()
    return _joined(ctx.form, iter(ctx.saved_tensors))


# Of a tuple the form is its type and those of its parts.
def _split(values: tuple, tensors: list[Tensor]) -> tuple:
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
    return tuple(form)


def _joined(form: tuple, tensors: Iterator[Tensor]) -> tuple:
    kind, *values = form
    for k, value in enumerate(values):
        if value is _TENSOR:
            values[k] = next(tensors)
        elif isinstance(value, tuple):
            values[k] = _joined(value, tensors)
    return tuple(values) if kind is tuple else kind(*values)
