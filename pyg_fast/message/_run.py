"""Runs a plan: the prologue on nodes, the kernels, and the linear map after them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import softmax

from ..ops._saved import save, saved
from ..ops._transforms import is_batched
from ..ops.column_sums import column_sums
from ..ops.head_map import head_map
from ..ops.product import product
from ..sparse.graph import Graph, ends_of
from ..sparse.operator import SparseOperator
from . import _blocks
from ._cpu import run_pass_cpu
from ._cuda import dot_of_results, on_device, run_pass_cuda, schedule_of
from ._gradients import cotangents_of
from ._ir import NODES, OF_DST, SRC, is_float
from ._passes import Pass, Passes
from ._plan import Plan, WeightedSum, sums_of


def run_pass(
    one: Pass, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass, and the chosen edges of a maximum or minimum."""
    if one.in_blocks:
        return _blocks.reduced(one.program, one.outs, graph, _seeded(inputs, seed), acc)
    if not graph.col.is_cuda:
        if one.outs[-1].kind == 'var':
            return _variance_cpu(one, graph, inputs, acc, seed)
        return run_pass_cpu(one, graph, inputs, acc, seed)
    schedule = schedule_of(graph, one.row_role)
    with on_device(graph.col.device):
        return run_pass_cuda(one, schedule, inputs, acc, seed)


def _variance_cpu(
    one: Pass, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass whose last one is a variance, by differences from the first message of
    each destination: those of equal messages are 0."""
    starts, given = graph, inputs
    if graph.num_edges > 0:
        start = graph.rowptr[:-1].clamp(max=graph.num_edges - 1)
        edges = start if graph.perm is None else graph.perm[start]
        rowptr = torch.arange(start.numel() + 1, dtype=start.dtype)
        starts = graph._replace(rowptr=rowptr, col=graph.col[start], perm=edges)
        missing = start.numel() - graph.num_edges  # The kernel takes a row for each of these edges.
        given = inputs | {
            key: torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
            for key, x in inputs.items() if key[0] == 'edge' and missing > 0
        }  # fmt: skip
    (first,), _ = run_pass_cpu(one.first(), starts, given, acc, seed)
    outs, chosen = run_pass_cpu(one.from_first(), graph, inputs | {('first', 0): first}, acc, seed)
    *others, away, squares = outs
    var = (squares - away * away).clamp_(min=0)
    has_edges = (graph.rowptr.diff() > 0).view(-1, *(1,) * (away.dim() - 1))
    mean = torch.where(has_edges, first + away, 0)
    return [*others, var.to(getattr(torch, one.outs[-1].dtype))], [*chosen[:-2], mean]


def _seeded(
    inputs: dict[tuple[str, int], Tensor], seed: Tensor | None
) -> dict[tuple[str, int], Tensor]:
    return inputs if seed is None else {**inputs, ('seed', 0): seed}


def _with_dot(
    plan: Plan, known: dict[tuple[str, int], Tensor], n: int, grads: Sequence[Tensor],
    results: Sequence[Tensor], acc: torch.dtype,
) -> None:  # fmt: skip
    """Adds the sum of a softmax's values times their gradients, where results are multiples of it:
    that is the sum of the results times theirs."""
    most, scale = known['most', n], known['scale', n]
    if plan.in_blocks or not most.is_cuda:
        shape = (most.size(0), *plan.kernel[plan.softmaxes[n]].shape, -1)
        first, *others = (
            (grad * each).reshape(shape).sum(-1)
            for grad, each in zip(grads, results, strict=True)
        )
        known['dot', n] = sum(others, first)
        return
    dot, stats = dot_of_results(most, scale, grads, results, acc)
    known['dot', n], known['stats', n] = dot, stats


class FusedMessage(torch.autograd.Function):
    """The kernels of a plan. With `create_graph=True` its backward is that of torch operations."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
        only_read: bool, *inputs: Tensor,
    ) -> Any:  # fmt: skip
        found, kept = results_of(passes, graph, seed, needs, inputs)
        ctx.passes, ctx.needs = passes, needs
        rounded = tuple(map(_no_view, found))
        if not only_read:  # The caller may write into what it gets.
            results = [x.clone() if any(x is y for y in rounded) else x for x in kept.results]
            kept = kept._replace(results=tuple(results))
        save(ctx, graph, seed, inputs, *kept)
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        passes, needs = ctx.passes, ctx.needs
        graph, seed, inputs, *kept = saved(ctx)
        # create_graph=True, or several gradients at once.
        if torch.is_grad_enabled() or any(map(is_batched, grads)):
            chosen = Kept(*kept).chosen
            found = _differentiable(
                passes, graph, seed, inputs, chosen, needs, grads, passes.acc
            )
        else:
            found = gradients_of(passes, graph, seed, needs, inputs, Kept(*kept), grads)
        return None, None, None, None, None, *found


class Kept(NamedTuple):
    """What the backward pass of a plan reads of the forward pass, in the dtype of the arithmetic.

    :obj:`local` are the sums of derivatives by some inputs of destinations, :obj:`chosen` the edges
    that maxima and minima chose, :obj:`stats` two tensors for each softmax, and :obj:`results` some
    of the results, see :func:`kept_results`.
    """

    local: tuple[Tensor, ...]
    chosen: tuple[Tensor | None, ...]
    stats: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def kept_results(passes: Passes) -> Sequence[int]:
    """The results that the backward pass reads."""
    count = len(passes.plan.outputs)
    return range(count) if passes.multiple else [count - 2] if passes.has_variance else ()


def results_of(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor], Kept]:  # fmt: skip
    """The results of a plan, and what the backward pass reads, perhaps the same tensors."""
    acc, local = passes.acc, passes.local(needs)
    known = passes.by_role(inputs)
    # What the backward pass cannot compute is refused now.
    passes.prepare(needs, local, acc, graph, known)
    outs, chosen, of_softmax = _forward(passes, local, graph, known, acc, seed)
    outputs = passes.plan.outputs
    count = len(outputs)
    rounded = [
        out.to(getattr(torch, output.dtype)) for out, output in zip(outs, outputs, strict=False)
    ]
    results = tuple([outs[k] for k in kept_results(passes)])
    return rounded, Kept(
        tuple(outs[count:]), tuple(chosen[:count]), tuple(of_softmax.values()), results
    )


def gradients_of(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor], kept: Kept, grads: tuple[Tensor, ...],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs that need one, by kernels."""
    plan, acc = passes.plan, passes.acc
    if passes.has_variance:
        *others, of_mean, of_var = grads
        grads = *others, of_mean - 2 * kept.results[0] * of_var, of_var
    grads = tuple([grad.contiguous() for grad in grads])
    known = passes.by_role(inputs)
    for n in range(len(plan.softmaxes)):
        known['most', n], known['scale', n] = kept.stats[2 * n : 2 * n + 2]
    total = _cotangents(plan, graph, grads, acc)
    for role, k, at in cotangents_of(plan):
        chosen = kept.chosen[k] if role == 'picked' else None
        if chosen is not None:
            known['grad', k], known['arg', k] = grads[k], chosen
        else:
            known['grad', k] = total[at]
    for n in range(len(plan.softmaxes)):
        if passes.is_multiple(n):
            _with_dot(plan, known, n, grads, kept.results, acc)
        elif not plan.in_blocks:
            (known['dot', n],), _ = run_pass(passes.dot(n), graph, known, acc, seed)
    out: list[Tensor | None] = [None] * len(inputs)
    if plan.in_blocks:
        out = _blocks.gradients(plan, graph, _seeded(known, seed), needs, acc)
    local = passes.local(needs)
    for k, derivative in zip(local, kept.local, strict=True):
        grad = total[plan.outputs[0].at]
        out[k] = (grad.reshape(derivative.shape) * derivative).to(inputs[k].dtype)
    for one, which, extra in [] if plan.in_blocks else passes.backward(needs, local):
        found, _ = run_pass(one, graph, known, acc, seed)
        known |= zip(extra, found[len(which) :], strict=True)
        for ks, each in zip(which, found, strict=False):
            if plan.inputs[ks[0]].role == 'param':
                each = column_sums(each) if each.size(0) > 1 else each
            for k in ks:  # Copies: gradients of different parameters must not share memory.
                grad = each if k == ks[0] else each.clone()
                out[k] = grad.to(inputs[k].dtype).reshape(inputs[k].shape)
    for k, needed in enumerate(needs):
        if needed and out[k] is None:
            out[k] = torch.zeros_like(inputs[k])
    return out


def _no_view(x: Tensor) -> Tensor:
    """A tensor that the caller may write into: autograd forbids it for views made in a function."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def _forward(
    passes: Passes, local: tuple[int, ...], graph: Graph, inputs: dict[tuple[str, int], Tensor],
    acc: torch.dtype, seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None], dict[tuple[str, int], Tensor]]:  # fmt: skip
    """The results, chosen edges, and what each softmax needs of all scores."""
    joint = passes.joint(graph.col.is_cuda) if passes.plan.softmaxes else None
    if joint is not None:
        (most, *outs), (scale, *chosen) = run_pass(joint, graph, inputs, acc, seed)
        assert scale is not None
        return outs, chosen, {('most', 0): most, ('scale', 0): scale}
    found = _of_softmaxes(passes, graph, inputs, acc, seed)
    outs, chosen = run_pass(passes.forward(local), graph, inputs | found, acc, seed)
    if passes.has_variance:
        mean = chosen.pop()
        assert mean is not None
        outs.insert(-1, mean)
        chosen += [None, None]
    return outs, chosen, found


def _of_softmaxes(
    passes: Passes, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> dict[tuple[str, int], Tensor]:  # fmt: skip
    """For each softmax, the largest score of each destination, and the reciprocal of the sum of
    exponentials."""
    found: dict[tuple[str, int], Tensor] = {}
    for n in range(len(passes.plan.softmaxes)):
        if passes.plan.in_blocks:
            most, sums = passes.of_softmax_in_blocks(n)
            (found['most', n],), _ = run_pass(most, graph, inputs, acc, seed)
            (total,), _ = run_pass(sums, graph, inputs | found, acc, seed)
            found['scale', n] = total.reciprocal_()
            continue
        one = passes.of_softmax(n)
        (found['most', n],), (scale,) = run_pass(one, graph, inputs, acc, seed)
        assert scale is not None
        found['scale', n] = scale
    return found


def _cotangents(
    plan: Plan, graph: Graph, grads: tuple[Tensor, ...], acc: torch.dtype
) -> dict[int, Tensor]:
    """By value of the message: the gradient that each of its edges gets, at the destination."""
    degree: Tensor | None = None
    total: dict[int, Tensor] = {}
    for output, grad in zip(plan.outputs, grads, strict=True):
        if output.reduce in ('max', 'min'):
            continue
        if output.reduce in ('mean', 'var'):
            if degree is None:
                degree = graph.rowptr.diff().clamp(min=1)
            grad = grad.to(acc) / degree.view(-1, *(1,) * (grad.dim() - 1))
        total[output.at] = total[output.at] + grad if output.at in total else grad
    return total


def _differentiable(
    passes: Passes, graph: Graph, seed: Tensor | None, inputs: tuple[Tensor, ...],
    chosen: tuple[Tensor | None, ...], needs: tuple[bool, ...], grads: tuple[Tensor, ...],
    acc: torch.dtype,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients in torch operations, for another derivative, or several at once."""
    plan, create_graph = passes.plan, torch.is_grad_enabled()
    keeps = {}
    for at in plan.kernel.reachable([output.at for output in plan.outputs]):
        if plan.kernel[at].op == 'keep' and plan.in_blocks:
            assert seed is not None
            edges = torch.arange(graph.num_edges, device=graph.col.device)
            keeps[at] = _blocks.kept(plan.kernel[at], edges, seed)
        elif plan.kernel[at].op == 'keep':
            (keeps[at],), _ = run_pass(passes.kept(at), graph, {}, acc, seed)
    # The forward pass has been cast already.
    with torch.enable_grad(), torch.autocast(graph.col.device.type, enabled=False):
        inputs = tuple(t.view_as(t) for t in inputs)  # One tensor may be several inputs.
        outs = unfused(plan, graph, inputs, keeps, chosen)
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    found = iter(torch.autograd.grad(
        outs, wanted, grads, create_graph=create_graph, allow_unused=True, materialize_grads=True,
    ))  # fmt: skip
    return [next(found) if needed else None for needed in needs]


def unfused(
    plan: Plan,
    graph: Graph,
    inputs: tuple[Tensor, ...],
    keeps: dict[int, Tensor] | None = None,
    chosen: tuple[Tensor | None, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The results of the kernels in torch operations, with tensors of the size of the edges.

    Args:
        plan (Plan): The plan.
        graph (Graph): The graph.
        inputs (tuple of Tensor): Inputs of the kernel.
        keeps (dict, optional): Factors of dropouts, by their place in the program.
            (default: :obj:`None`)
        chosen (tuple, optional): The edges that maxima and minima chose. (default: :obj:`None`,
            torch divides the gradient of a tie)
        dtype (torch.dtype, optional): The dtype to compute in. (default: :obj:`None`, that of the
            inputs)
    """
    kernel = plan.kernel
    col, row = ends_of(graph)
    ends = {'src': col, 'dst': row}
    known: dict[int, Tensor] = dict(keeps or {})
    for at in kernel.reachable([output.at for output in plan.outputs]):
        if kernel[at].op == 'load' and kernel[at].attrs[0] not in OF_DST:
            role, k = kernel[at].attrs
            x = (
                inputs[k]
                if dtype is None or not is_float(kernel[at].dtype)
                else inputs[k].to(dtype)
            )
            known[at] = x.index_select(0, ends[role]) if role in ends else x
    for at in plan.softmaxes:
        (score,) = kernel.evaluate(kernel[at].args[:1], known, dtype)
        own = getattr(torch, kernel[at].dtype) if dtype is None else dtype
        score = score.to(own).expand(col.size(0), *kernel[at].shape)
        known[at] = softmax(score, row, num_nodes=graph.num_dst)
    names = {'sum': 'sum', 'mean': 'mean', 'var': 'mean', 'max': 'amax', 'min': 'amin'}
    outs = []
    for k, output in enumerate(plan.outputs):
        at = plan.outputs[-2].at if output.reduce == 'var' else output.at
        (m,) = kernel.evaluate([at], known, dtype)
        m = m.expand(col.size(0), *kernel[output.at].shape)
        arg = None if chosen is None else chosen[k]
        if arg is not None:
            picked = m.gather(0, arg.clamp(min=0).long())
            outs.append(picked.masked_fill(arg < 0, 0))
            continue
        zero = m.new_zeros(graph.num_dst, *m.shape[1:])
        index = row.view(-1, *(1,) * (m.dim() - 1)).expand_as(m)
        if output.reduce == 'var':
            if dtype is None:
                m = m.to(getattr(torch, kernel[output.at].dtype))
            zero = zero.to(m.dtype)
            mean = zero.scatter_reduce(0, index, m, 'mean', include_self=False)
            m = (m - mean.index_select(0, row)).square()
        outs.append(zero.scatter_reduce(0, index, m, names[output.reduce], include_self=False))
    if dtype is None:
        pairs = zip(outs, plan.outputs, strict=True)
        outs = [out.to(getattr(torch, output.dtype)) for out, output in pairs]
    return outs


def run(
    passes: Passes, graph_of: Callable[[bool], Graph], args: tuple,
    named: dict[tuple[str, str], Tensor], seed: Tensor | None, only_read: bool,
) -> list[Tensor]:  # fmt: skip
    """The aggregated message, for the arguments of the captured function and its inputs of nodes
    and edges. `graph_of` makes the graph, with its transpose on request. The caller must not write
    into the result if that is `only_read`."""
    device = next(iter(named.values())).device.type
    if torch.is_autocast_enabled(device):  # The plan has its conversions.
        with torch.autocast(device, enabled=False):
            return run(passes, graph_of, args, named, seed, only_read)
    plan = passes.plan
    read = {
        at: args[name] if role == 'param' else named[role, name] for at, role, name in passes.reads
    }
    needs = None
    if torch.is_grad_enabled():
        leaves = {at for at, x in read.items() if x.requires_grad}
        if leaves:
            needs = tuple([not leaves.isdisjoint(each) for each in passes.leaves])
            # Autograd saves no tensor of inference mode; PyG saves the rows gathered of it.
            read = {at: x.clone() if x.is_inference() else x for at, x in read.items()}
    hoists = passes.prologue.ends if needs is not None else ()
    graph = graph_of(SRC in hoists or (needs is not None and passes.needs_transpose(needs)))
    values = passes.prologue(read, graph if hoists else None)
    # Here, so that the backward pass has the inputs of the graph of autograd.
    pairs = zip(values, plan.inputs, strict=False)
    inputs = [x if _is_readable(x, each.role) else x.contiguous() for x, each in pairs]
    if passes.weighted_sum is not None:
        outs = [product_of(passes.weighted_sum, graph, inputs, plan.outputs[0].dtype)]
    elif needs is not None and True in needs:
        only_read = only_read or plan.tail is not None
        outs = list(FusedMessage.apply(passes, graph, seed, needs, only_read, *inputs))
    else:
        outs, _, _ = _forward(passes, (), graph, passes.by_role(inputs), passes.acc, seed)
    return finished(passes, outs, values, graph.rowptr)


def finished(
    passes: Passes, outs: list[Tensor], values: Sequence[Tensor], rowptr: Tensor
) -> list[Tensor]:
    """The aggregated message, from the results of the kernels and the values of the prologue."""
    plan = passes.plan
    if plan.tail is not None:
        *others, out = outs
        out, weight = out.flatten(1), values[len(plan.inputs)].to(out.dtype)
        other = others[0].flatten(1) if others else None
        if plan.tail.heads > 1:
            out = head_map(out, weight, plan.tail.heads, other=other)
        else:
            out = out @ weight if other is None else torch.addmm(other, out, weight)
        if plan.tail.bias is not None:
            bias = values[-1]
            degree = rowptr.diff().unsqueeze(1)
            if plan.outputs[0].reduce == 'mean':
                degree = degree.clamp(max=1)
            out = out + bias * degree.to(out.dtype)
        outs = [out.view(-1, *plan.tail.shape)]
    if 'var' in plan.reduces:
        sums = dict(zip(sums_of(plan.reduces), outs, strict=True))
        outs = [sums[reduce] for reduce in plan.reduces]
    return [out.to(passes.dtype) for out in outs]


def _is_readable(x: Tensor, role: str) -> bool:
    """Whether kernels read a tensor as it is: on CUDA they take rows of nodes at any distance."""
    if x.is_contiguous():
        return True
    return x.is_cuda and role in NODES and x.detach()[0].is_contiguous()


def product_of(how: WeightedSum, graph: Graph, inputs: list[Tensor], dtype: str) -> Tensor:
    x = inputs[how.x]
    weight = None if how.weight is None else inputs[how.weight].reshape(-1)
    op = SparseOperator(graph, weight, mean=how.mean)
    rows = x.reshape(x.size(0), -1).contiguous()
    out = product(op, rows, out_acc=rows.dtype != getattr(torch, dtype))
    return out.view(-1, *x.shape[1:])
