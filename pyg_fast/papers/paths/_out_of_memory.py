"""What a model on execution paths says when memory runs out: where, and what would help."""

import re
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import Adj, OptTensor

from ...graph.prepared_graph import PreparedGraph
from ...nn._aggregated import AggregatedInput
from .execution_path import ExecutionPath

if TYPE_CHECKING:
    from .gnn import PathPreparedGNN


class Call(NamedTuple):
    """What all layers share in one call of the model."""

    edge_index: Adj | None
    edge_weight: OptTensor
    num_nodes: int
    device: torch.device
    recomputes: bool


def explain(
    error: torch.OutOfMemoryError,
    model: 'PathPreparedGNN',
    k: int,
    x: Tensor | AggregatedInput,
    call: Call,
    path: ExecutionPath | None,
    active_only: bool,
) -> torch.OutOfMemoryError:
    """The error with the part of the model that it comes from, and what would help.

    Args:
        error: The error.
        model: The model.
        k: The layer, or the number of layers for the output of all nodes.
        x: The input of the model.
        call: The call.
        path: The path of the layer.
        active_only: As in the call.
    """
    trains = model.training and torch.is_grad_enabled()
    text = f'{error} It was for the output of all {x.size(0)} nodes.'
    if k < model.num_layers:
        num_dst = path.num_dst if path is not None and path.forward and trains else x.size(0)
        fin, fout = model._widths[k : k + 2]
        text = (
            f'{error} It was for {_tensor_of(str(error), (fin, fout), x, path)}layer {k} '
            f'({type(model.convs[k]).__name__}, {num_dst} of {x.size(0)} rows, {fin} to {fout} '
            'columns).'
        )
    helps = _helps(model, x, call, path, trains, active_only)
    return torch.OutOfMemoryError(f'{text} What helps: {"; ".join(helps)}.' if helps else text)


def _helps(
    model: 'PathPreparedGNN',
    x: Tensor | AggregatedInput,
    call: Call,
    path: ExecutionPath | None,
    trains: bool,
    active_only: bool,
) -> list[str]:
    helps = []
    on_path = path is not None and path.forward
    if trains and not on_path:
        helps.append('paths prepared with forward=True compute only rows that the loss reads')
    if trains and not model.checkpoint:
        helps.append('PathPreparedGNN(..., checkpoint=True) keeps no aggregated features')
    if isinstance(x, Tensor) and x.device == call.device and not x.requires_grad:
        helps.append('x.cpu().pin_memory() as features, which are copied in columns')
    if on_path and not active_only:
        helps.append('active_only=True makes no output of all nodes')
    if call.edge_index is not None and not isinstance(call.edge_index, PreparedGraph):
        helps.append('ToCSR(keep_edge_index=False) keeps no int64 list of edges')
    if call.edge_index is not None and on_path and trains:
        helps.append('Prepare(keep_graph=False) keeps only the paths')
    if not trains:
        helps.append('model.inference(data, max_bytes=...) evaluates in blocks')
    return helps


def _tensor_of(
    text: str, widths: tuple[int, int], x: Tensor | AggregatedInput, path: ExecutionPath | None
) -> str:
    """The tensor of a layer that has about the bytes of an error of PyTorch or of a kernel."""
    found = re.search(r'ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)', text)
    if found is None:
        return ''
    tried = float(found[1]) * {'bytes': 1, 'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30}[found[2]]
    num_nodes, (fin, fout) = x.size(0), widths
    sizes = {'the output': (num_nodes, fout), 'the features of all sources': (num_nodes, fin)}
    if path is not None and path.forward:
        sizes = {
            'the output': (path.num_dst, fout), 'the aggregated features': (path.num_dst, fin),
            'the features of the sources': (path.num_src, fin),
            'the mapped features of the sources': (path.num_src, fout), **{
                f'{name} for all nodes': size for name, size in sizes.items()
            },
        }  # fmt: skip
    for name, (rows, columns) in sizes.items():
        if abs(rows * columns * x.dtype.itemsize - tried) <= 0.01 * tried:
            return f'{name} of '
    return ''
