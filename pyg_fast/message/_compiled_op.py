"""The ops of a message in compiled code, and of its gradients.

`pyg_fast::message` gets a plan as text and runs its passes. It returns the results, and then what
`pyg_fast::message_backward` reads, see :class:`~pyg_fast.message._run.Saved`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..ops.product import gradient_of_features, gradient_of_values
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._passes import Passes
from ._run import Saved, compute_gradients, compute_results, run_weighted_sum
from ._text import loads

_MAX_PLANS = 1024

_library = torch.library.Library('pyg_fast', 'FRAGMENT')
_STRUCTURE = 'Tensor[] csr, Tensor? perm, Tensor? t_perm, SymInt num_src, SymInt num_dst'
_library.define(
    f'message(str plan, bool[] needs, Tensor[] inputs, Tensor? seed, {_STRUCTURE}) -> Tensor[]'
)
_library.define(
    'message_backward(str plan, bool[] needs, Tensor[] grads, Tensor[] inputs, Tensor? seed, '
    f'{_STRUCTURE}, Tensor[] kept) -> Tensor[]'
)


@lru_cache(maxsize=_MAX_PLANS)
def passes_of(text: str) -> Passes:
    """The passes of a plan, with its gradients. Autograd derives these in a thread of their own: in
    the thread of an op it is excluded from dispatch."""

    def make() -> Passes:
        passes = Passes(loads(text))
        if passes.plan.in_tiles:
            _ = passes.map_gradients
        elif not passes.plan.in_blocks and passes.weighted_sum is None:
            _ = passes.gradients
        return passes

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


# Shapes of rows and dtypes of tensors; None is the dtype of the structure.
_Rows: TypeAlias = list[tuple[tuple[int, ...], torch.dtype | None]]


class _ResultLayout(NamedTuple):
    """What `message` returns."""

    results: _Rows
    local: _Rows
    chosen: _Rows
    stats: _Rows
    wide: _Rows  # results before rounding
    # Which results the backward pass reads: as they are, and before rounding.
    same: list[int]
    rounded: list[int]


@lru_cache(maxsize=_MAX_PLANS)
def _layout(passes: Passes, needs: tuple[bool, ...]) -> _ResultLayout:
    plan, acc = passes.plan, passes.acc
    results: _Rows = [(plan.message[o.at].shape, getattr(torch, o.dtype)) for o in plan.outputs]
    if passes.weighted_sum is not None or not any(needs):
        return _ResultLayout(results, [], [], [], [], [], [])
    local: _Rows = [
        (passes.gradients.local_program[passes.gradients.local[k]].shape, acc)  # type: ignore[index]
        for k in passes.backward(needs).local
    ]  # fmt: skip
    chosen: _Rows = [
        (shape, None) for (shape, _), output in zip(results, plan.outputs, strict=True)
        if output.reduce in ('max', 'min')
    ]  # fmt: skip
    stats: _Rows = [(plan.message[at].shape, acc) for at in plan.softmaxes for _ in range(2)]
    same = [k for k in passes.saved_results if results[k][1] == acc]
    rounded = [k for k in passes.saved_results if results[k][1] != acc]
    wide: _Rows = [(results[k][0], acc) for k in rounded]
    return _ResultLayout(results, local, chosen, stats, wide, same, rounded)


def _saved_from(passes: Passes, needs: tuple[bool, ...], kept: Sequence[Tensor]) -> Saved:
    """What the backward pass reads, from results that it reads as they are and what `message`
    returned after its results."""
    layout = _layout(passes, needs)
    rest = iter(kept)

    def some(of: Sequence[object]) -> tuple[Tensor, ...]:
        return tuple(next(rest) for _ in of)

    same, local, chosen = some(layout.same), some(layout.local), some(layout.chosen)
    stats, wide = some(layout.stats), some(layout.wide)
    edges = iter(chosen)
    results = dict(zip((*layout.same, *layout.rounded), (*same, *wide), strict=True))
    return Saved(
        local,
        tuple(
            next(edges) if output.reduce in ('max', 'min') else None
            for output in passes.plan.outputs
        ),
        stats,
        tuple(results[k] for k in passes.saved_results),
    )


def graph_from(
    csr: Sequence[Tensor], perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int
) -> Graph:
    """The graph of the op's arguments, with or without its transpose."""
    rowptr, col, *transposed = csr
    t_rowptr, t_col = transposed or (None, None)
    return Graph(rowptr, col, perm, t_rowptr, t_col, t_perm, num_src, num_dst)


def _message(
    plan: str, needs: list[bool], inputs: list[Tensor], seed: Tensor | None,
    csr: list[Tensor], perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int,
) -> list[Tensor]:  # fmt: skip
    passes, wanted = passes_of(plan), tuple(needs)
    graph = graph_from(csr, perm, t_perm, num_src, num_dst)
    with torch.no_grad():
        if passes.weighted_sum is not None:
            dtype = passes.plan.outputs[0].dtype
            return [run_weighted_sum(passes.weighted_sum, graph, inputs, dtype).contiguous()]
        results, kept = compute_results(passes, graph, seed, wanted, inputs)
        if not any(needs):
            return [x.contiguous() for x in results]
        rounded = _layout(passes, wanted).rounded
        pairs = zip(passes.saved_results, kept.results, strict=True)
        wide = [x for k, x in pairs if k in rounded]
        chosen = [x for x in kept.chosen if x is not None]
        return [x.contiguous() for x in (*results, *kept.local, *chosen, *kept.stats, *wide)]


def _message_fake(
    plan: str, needs: list[bool], inputs: list[Tensor], seed: Tensor | None, csr: list[Tensor],
    perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int,
) -> list[Tensor]:  # fmt: skip
    passes, num_edges = passes_of(plan), csr[1].size(0)
    results, *kept = _layout(passes, tuple(needs))[:5]
    written, results = results[: passes.num_written], results[passes.num_written :]
    return [
        csr[0].new_empty((rows, *shape), dtype=csr[0].dtype if dtype is None else dtype)
        for rows, part in ((num_edges, written), *((num_dst, part) for part in (results, *kept)))
        for shape, dtype in part
    ]


def _backward(
    plan: str, needs: list[bool], grads: list[Tensor], inputs: list[Tensor], seed: Tensor | None,
    csr: list[Tensor], perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int,
    kept: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    passes, wanted = passes_of(plan), tuple(needs)
    graph = graph_from(csr, perm, t_perm, num_src, num_dst)
    with torch.no_grad():
        if passes.weighted_sum is not None:
            grads_of_inputs = _weighted_sum_gradients(passes, graph, wanted, inputs, grads[0])
        else:
            grads_of_inputs = compute_gradients(
                passes, graph, seed, wanted, inputs, _saved_from(passes, wanted, kept), tuple(grads)
            )
        out: list[Tensor] = []
        for x, needed in zip(grads_of_inputs, needs, strict=True):
            if needed:
                assert x is not None
                x = x.contiguous()
                # An op returns no tensor twice, and none of its arguments.
                out.append(x.clone() if any(x is y for y in (*out, *grads)) else x)
    return out


def _weighted_sum_gradients(
    passes: Passes, graph: Graph, needs: tuple[bool, ...], inputs: list[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of a plan that spmm runs."""
    how = passes.weighted_sum
    assert how is not None
    x, weight = inputs[how.x], None if how.weight is None else inputs[how.weight]
    op = SparseOperator(graph, None if weight is None else weight.reshape(-1), mean=how.mean)
    rows, sources = (t.reshape(t.size(0), -1).contiguous() for t in (grad, x))
    out: list[Tensor | None] = [None] * len(inputs)
    if needs[how.x]:
        of_x = gradient_of_features(op, rows, op.value)
        out[how.x] = of_x.to(x.dtype).view(x.shape)
    if weight is not None and how.weight is not None and needs[how.weight]:
        of_weight = gradient_of_values(op, rows, sources, weight.numel())
        out[how.weight] = of_weight.to(weight.dtype).view(weight.shape)
    return out


def _backward_fake(
    plan: str, needs: list[bool], grads: list[Tensor], inputs: list[Tensor], *rest: object
) -> list[Tensor]:
    return [
        x.new_empty(x.shape) for x, needed in zip(inputs, needs, strict=True) if needed
    ]  # fmt: skip


for _name, _real, _fake in (
    ('message', _message, _message_fake), ('message_backward', _backward, _backward_fake),
):  # fmt: skip
    for _device in ('CPU', 'CUDA'):
        _library.impl(_name, _real, _device)
    _library.impl(_name, _fake, 'Meta')


class _Context(FunctionCtx):
    """What the backward pass gets beside the saved tensors."""

    plan: str
    needs: list[bool]
    sizes: tuple[int, int]  # of sources and destinations
    num_results: int
    counts: tuple[int, int, int]  # of inputs, of the structure, and of what is saved of the results
    has: list[bool]  # whether there are a seed, perm and t_perm
    saved_tensors: tuple[Tensor, ...]


def _setup_context(ctx: _Context, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    plan, needs, given, seed, csr, perm, t_perm, num_src, num_dst = inputs
    ctx.plan, ctx.needs, ctx.sizes = plan, needs, (num_src, num_dst)
    passes, optional = passes_of(plan), (seed, perm, t_perm)
    ctx.num_results = len(passes.plan.outputs)
    same = [output[k] for k in _layout(passes, tuple(needs)).same]
    kept = [*same, *output[ctx.num_results :]]
    ctx.counts, ctx.has = (len(given), len(csr), len(kept)), [x is not None for x in optional]
    ctx.set_materialize_grads(True)
    ctx.save_for_backward(*given, *csr, *kept, *(x for x in optional if x is not None))


def _message_backward(ctx: _Context, grads: list[Tensor]) -> tuple[object, ...]:
    if not ctx.needs:
        raise RuntimeError(
            'this program was exported without gradients: use pyg_fast.export(..., gradients=True)'
        )
    inputs, csr, kept, optional = _split(ctx.saved_tensors, ctx.counts)
    rest = iter(optional)
    seed, perm, t_perm = (next(rest) if has else None for has in ctx.has)
    found = iter(message_backward(
        ctx.plan, ctx.needs, list(grads[: ctx.num_results]), inputs, seed, csr, perm, t_perm,
        *ctx.sizes, kept,
    ))  # fmt: skip
    of_inputs = [next(found) if needed else None for needed in ctx.needs]
    return None, None, of_inputs, None, [None] * len(csr), None, None, None, None


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    out, start = [], 0
    for count in counts:
        out.append(list(tensors[start : start + count]))
        start += count
    return [*out, list(tensors[start:])]


message = torch.ops.pyg_fast.message.default
message_backward = torch.ops.pyg_fast.message_backward.default
torch.library.register_autograd(
    'pyg_fast::message', _message_backward, setup_context=_setup_context, lib=_library
)
