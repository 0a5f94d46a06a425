"""The op of a message in compiled code, and that of its gradients.

`pyg_fast::message` runs the kernels of a plan, which it gets as text, and returns the results and
then what `pyg_fast::message_backward` reads, see :class:`~pyg_fast.message._run.Kept`.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.product import gradient_of_features, gradient_of_values
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._passes import Passes
from ._run import Kept, gradients_of, kept_results, product_of, results_of
from ._text import loads

_MOST_PLANS = 1024

_library = torch.library.Library('pyg_fast', 'FRAGMENT')
_STRUCTURE = 'Tensor[] csr, Tensor? perm, Tensor? t_perm, SymInt num_src, SymInt num_dst'
_library.define(
    f'message(str plan, bool[] needs, Tensor[] inputs, Tensor? seed, {_STRUCTURE}) -> Tensor[]'
)
_library.define(
    'message_backward(str plan, bool[] needs, Tensor[] grads, Tensor[] inputs, Tensor? seed, '
    f'{_STRUCTURE}, Tensor[] kept) -> Tensor[]'
)


@lru_cache(maxsize=_MOST_PLANS)
def passes_of(text: str) -> Passes:
    """The kernels of a plan, with its gradients. These are derived in a thread of their own: that
    of an op leaves out autograd, which derives them."""
    made: list[Any] = []

    def make() -> None:
        try:
            passes = Passes(loads(text))
            if not passes.plan.in_blocks and passes.weighted_sum is None:
                _ = passes.gradients
            made.append(passes)
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (found,) = made
    if isinstance(found, Exception):
        raise found
    return found


class _Layout(NamedTuple):
    """Shapes of rows and dtypes of what `message` returns: None is the dtype of the structure."""

    results: list[tuple[tuple[int, ...], torch.dtype]]
    local: list[tuple[tuple[int, ...], torch.dtype]]
    chosen: list[tuple[tuple[int, ...], None]]
    stats: list[tuple[tuple[int, ...], torch.dtype]]
    wide: list[tuple[tuple[int, ...], torch.dtype]]  # results before their rounding
    # Results that the backward pass reads: as they are, and before their rounding.
    same: list[int]
    rounded: list[int]


@lru_cache(maxsize=_MOST_PLANS)
def _layout(passes: Passes, needs: tuple[bool, ...]) -> _Layout:
    plan, acc = passes.plan, passes.acc
    results = [(plan.kernel[o.at].shape, getattr(torch, o.dtype)) for o in plan.outputs]
    if passes.weighted_sum is not None or not any(needs):
        return _Layout(results, [], [], [], [], [], [])
    derived = passes.gradients
    local = [
        (derived.local_program[derived.local[k]].shape, acc)  # type: ignore[index]
        for k in passes.local(needs)
    ]  # fmt: skip
    chosen = [
        (shape, None) for (shape, _), output in zip(results, plan.outputs, strict=True)
        if output.reduce in ('max', 'min')
    ]  # fmt: skip
    stats = [(plan.kernel[at].shape, acc) for at in plan.softmaxes for _ in range(2)]
    same = [k for k in kept_results(passes) if results[k][1] == acc]
    rounded = [k for k in kept_results(passes) if results[k][1] != acc]
    wide = [(results[k][0], acc) for k in rounded]
    return _Layout(results, local, chosen, stats, wide, same, rounded)


def _kept_of(passes: Passes, needs: tuple[bool, ...], found: Sequence[Tensor]) -> Kept:
    """What the backward pass reads, from the results that it reads as they are and all that
    `message` returned after its results."""
    layout = _layout(passes, needs)
    rest = iter(found)

    def some(of: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(next(rest) for _ in of)

    same, local, chosen = some(layout.same), some(layout.local), some(layout.chosen)
    stats, wide = some(layout.stats), some(layout.wide)
    edges = iter(chosen)
    results = dict(zip((*layout.same, *layout.rounded), (*same, *wide), strict=True))
    return Kept(
        local,
        tuple(
            next(edges) if output.reduce in ('max', 'min') else None
            for output in passes.plan.outputs
        ),
        stats,
        tuple(results[k] for k in kept_results(passes)),
    )


def graph_from(
    csr: Sequence[Tensor], perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int
) -> Graph:
    """The graph of what the op gets: its structure, and perhaps that of its transpose."""
    rowptr, col, *transposed = csr
    t_rowptr, t_col = transposed or (None, None)
    return Graph(rowptr, col, perm, t_rowptr, t_col, t_perm, num_src, num_dst)


def _message(
    plan: str, needs: list[bool], inputs: list[Tensor], seed: Tensor | None, *structure: Any
) -> list[Tensor]:
    passes, graph, wanted = passes_of(plan), graph_from(*structure), tuple(needs)
    with torch.no_grad():
        if passes.weighted_sum is not None:
            dtype = passes.plan.outputs[0].dtype
            return [product_of(passes.weighted_sum, graph, inputs, dtype).contiguous()]
        results, kept = results_of(passes, graph, seed, wanted, inputs)
        if not any(needs):
            return [x.contiguous() for x in results]
        which = _layout(passes, wanted).rounded
        wide = [x for k, x in zip(kept_results(passes), kept.results, strict=True) if k in which]
        chosen = [x for x in kept.chosen if x is not None]
        return [x.contiguous() for x in (*results, *kept.local, *chosen, *kept.stats, *wide)]


def _message_fake(
    plan: str, needs: list[bool], inputs: list[Tensor], seed: Tensor | None, csr: list[Tensor],
    perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int,
) -> list[Tensor]:  # fmt: skip
    parts = _layout(passes_of(plan), tuple(needs))[:5]
    return [
        csr[0].new_empty((num_dst, *shape), dtype=csr[0].dtype if dtype is None else dtype)
        for part in parts for shape, dtype in part
    ]  # fmt: skip


def _backward(
    plan: str, needs: list[bool], grads: list[Tensor], inputs: list[Tensor], seed: Tensor | None,
    csr: list[Tensor], perm: Tensor | None, t_perm: Tensor | None, num_src: int, num_dst: int,
    kept: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    passes, wanted = passes_of(plan), tuple(needs)
    graph = graph_from(csr, perm, t_perm, num_src, num_dst)
    with torch.no_grad():
        if passes.weighted_sum is not None:
            found = _of_product(passes, graph, wanted, inputs, grads[0])
        else:
            found = gradients_of(
                passes, graph, seed, wanted, inputs, _kept_of(passes, wanted, kept), tuple(grads)
            )
        seen: list[Tensor] = []
        for x, needed in zip(found, needs, strict=True):
            if needed:
                assert x is not None
                x = x.contiguous()
                # An op returns no tensor twice, and none of its arguments.
                seen.append(x.clone() if any(x is y for y in (*seen, *grads)) else x)
    return seen


def _of_product(
    passes: Passes, graph: Graph, needs: tuple[bool, ...], inputs: list[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of a weighted sum of rows."""
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
    plan: str, needs: list[bool], grads: list[Tensor], inputs: list[Tensor], *rest: Any
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    plan, needs, given, seed, csr, perm, t_perm, num_src, num_dst = inputs
    ctx.plan, ctx.needs, ctx.sizes = plan, needs, (num_src, num_dst)
    passes, optional = passes_of(plan), (seed, perm, t_perm)
    ctx.num_results = len(passes.plan.outputs)
    same = [output[k] for k in _layout(passes, tuple(needs)).same]
    kept = [*same, *output[ctx.num_results :]]
    ctx.counts, ctx.has = (len(given), len(csr), len(kept)), [x is not None for x in optional]
    ctx.set_materialize_grads(True)
    ctx.save_for_backward(*given, *csr, *kept, *(x for x in optional if x is not None))


def _of_message(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
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
    'pyg_fast::message', _of_message, setup_context=_setup, lib=_library
)
