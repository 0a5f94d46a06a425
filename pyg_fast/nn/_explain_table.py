"""Says which numbers do not fit that look up rows of a table, or are classes."""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding
from torch_geometric.nn import MessagePassing

from ..errors import DtypeError, IndicesError, ShapeError
from ._explain_call import argument_that_is, propagated
from ._explain_code import failed, frames_of, operand, value_of

# By functions that look up rows, of torch and ours: the table.
_TABLES = {'embedding': 'weight', 'look_up_rows': 'table'}
_CLASSES = 'classes'  # in place of the name of a table


def check_numbers(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for numbers that a table or `one_hot` lacks: for the argument of the call that they
    are, or that `propagate` got."""
    for index, rows, name in _looked_up(conv, error):
        if index.numel() == 0 or index.dtype not in (torch.int64, torch.int32):
            continue
        low, high = map(int, index.aminmax())
        of_classes = name == _CLASSES
        least = 0 if of_classes else -rows  # `table[index]` counts from the end, too.
        frames = frames_of(error)
        of_call, of_propagate = (
            argument_that_is(index, each, frames) for each in (given, propagated(frames))
        )
        found = of_call or of_propagate
        if found is None or (least <= low and high < rows):
            continue
        if of_classes:
            raise IndicesError(
                f"'{found[0]}' must hold classes in [0, {rows}), as one_hot gets {rows} of them, "
                f'got values from {low} to {high}'
            )
        raise IndexError(
            f"'{found[0]}' must hold numbers of rows of the table that it indexes, '{name}', "
            f'which has {rows}, got values from {low} to {high}'
        )


def _looked_up(conv: Any, error: Exception) -> Iterator[tuple[Tensor, int, str]]:
    """Numbers by which the call that failed looks up rows of a table, the number of rows and the
    name of the table, if it is one of the layer; or the classes of a `one_hot`."""
    tables = dict(conv.named_parameters()) | dict(conv.named_buffers())
    text, found = str(error), failed(error)
    if found is not None:  # PyG's code
        expression, frame = found
        if isinstance(expression, ast.Subscript) and 'out of bounds for dimension 0' in text:
            name = ast.unparse(expression.value).removeprefix('self.')
            index = operand(expression.slice, frame)
            if index is not None and name in tables:
                yield index.value, tables[name].size(0), name
        if isinstance(expression, ast.Call) and text.startswith('Class values must be'):
            values = [*expression.args, *(each.value for each in expression.keywords)]
            index = operand(values[0], frame) if values else None
            count = value_of(values[-1], frame)
            if index is not None and type(count) is int:
                yield index.value, count, _CLASSES
    for frame in frames_of(error):  # a kernel
        if frame.f_code.co_name != 'look_up_rows':
            continue
        table, index = frame.f_locals['table'], frame.f_locals['index']
        rows = table.size(0)
        names = [k for k, v in tables.items() if v.data_ptr() == table.data_ptr()]
        if names:
            yield index, rows, names[0].removesuffix('.weight')
        elif table.shape == (rows, rows) and table.equal(torch.eye(rows).to(table)):
            yield index, rows, _CLASSES


def check_embedding(conv: Any, error: Exception) -> None:
    """Raises for numbers that an embedding of the layer lacks."""
    found = embedding_of(conv, error)
    if found is not None:
        name, module, low, high = found
        rows = module.num_embeddings
        raise IndexError(
            f"'{name}' must get numbers in [0, {rows}), as its num_embeddings is {rows}, got "
            f'values from {low} to {high}'
        )


def embedding_of(conv: Any, error: Exception) -> tuple[str, Embedding, int, int] | None:
    """The embedding of a layer that lacks numbers which it has got in the call that failed, its
    name, and the least and the largest number."""
    frames = frames_of(error)
    tables = [(frame.f_locals.get('weight'), frame.f_locals.get('input')) for frame in frames]
    tables += [(frame.f_locals.get('table'), frame.f_locals.get('index')) for frame in frames]
    for name, module in conv.named_modules():
        for table, index in tables if isinstance(module, Embedding) else ():
            if not isinstance(table, Tensor) or not isinstance(index, Tensor) or index.numel() == 0:
                continue
            low, high = map(int, index.aminmax())
            is_it = table.data_ptr() == module.weight.data_ptr()
            if is_it and (low < 0 or high >= module.num_embeddings):
                return name, module, low, high
    return None


def indices_of(error: Exception) -> Tensor | None:
    """The numbers that an embedding has got in the call that failed."""
    for frame in frames_of(error):
        value = frame.f_locals.get('input')
        if frame.f_code is Embedding.forward.__code__ and isinstance(value, Tensor):
            return value
    return None


def check_numbers_of_rows(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises if one argument alone can hold the numbers that a table lacks."""
    text = str(error)
    found = re.search(r'index -?\d+ is out of bounds for dimension 0 with size (\d+)', text)
    if found is None and 'index out of range in self' not in text:
        return
    rows = _rows_of_table(error) if found is None else int(found[1])
    ranges = {
        name: tuple(int(each) for each in value.aminmax()) for name, value in given.items()
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        and value.dim() == 1 and value.numel() > 0
    }  # fmt: skip
    if rows is not None:
        least = 0 if found is None else -rows  # `table[index]` counts from the end, too.
        ranges = {
            name: (low, high) for name, (low, high) in ranges.items()
            if low < least or high >= rows
        }  # fmt: skip
    if len(ranges) == 1:
        ((name, (low, high)),) = ranges.items()
        table = embedding_of(conv, error)
        which = '' if rows is None else f', which has {rows}'
        which = which if table is None else f", '{table[0]}'{which}"
        raise IndexError(
            f"'{name}' must hold numbers of rows of the table that it indexes{which}, got values "
            f'from {low} to {high}'
        )


def _rows_of_table(error: Exception) -> int | None:
    """The rows of the table of which an error of torch says only that it lacks some."""
    for frame in frames_of(error):
        table = frame.f_locals.get(_TABLES.get(frame.f_code.co_name, ''))
        if isinstance(table, Tensor):
            return table.size(0)
    return None


def check_numbers_of_types(given: Mapping[str, object], error: Exception) -> None:
    """Raises if one argument alone can be what a table takes as numbers of its rows."""
    text, indices = str(error), indices_of(error)
    of_classes = text.startswith('one_hot is only applicable to index tensor of type Long')
    if 'scalar types: Long, Int' in text or 'used as indices must be' in text or of_classes:
        found = [
            (name, value.dtype) for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 1
            and (indices is None or indices.data_ptr() == value.data_ptr())
        ]  # fmt: skip
        if len(found) == 1:
            ((name, dtype),) = found
            raise DtypeError(f"'{name}' must hold integers, got {dtype}: {name}.long()")
    for name, value in given.items() if 'memory' in text else ():
        if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
            continue
        if value.dim() == 2 and value.size(1) == 1:
            raise ShapeError(
                f"'{name}' must have shape [num_edges], a number for each edge, got "
                f'{list(value.shape)}: {name}.view(-1)'
            )


def warn_of_columns(
    conv: MessagePassing, out: object, edge_index: object, kwargs: Mapping[str, object],
    stacklevel: int,
) -> None:  # fmt: skip
    """Warns of numbers of edges that are a column, if what :obj:`propagate` returns has a dimension
    of the edges: rows of a table by them have one dimension more, and combine all edges with
    all."""
    if not isinstance(out, Tensor) or not isinstance(edge_index, Tensor):
        return
    num_edges = edge_index.size(-1)
    if conv.node_dim != -2 or out.dim() != 3 or out.size(0) != num_edges:
        return
    for name, value in kwargs.items():
        is_column = isinstance(value, Tensor) and value.shape == (num_edges, 1)
        if is_column and value.dtype in (torch.int64, torch.int32):  # type: ignore[attr-defined]
            warnings.warn(
                f"'{name}' has shape {[num_edges, 1]}, by which a table gives a row for each pair "
                f"of edges, and 'message' {num_edges} rows for each edge: {name}.view(-1) gives "
                'one for each edge',
                stacklevel=stacklevel + 1,
            )
