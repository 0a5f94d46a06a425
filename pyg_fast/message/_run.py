"""Runs a plan: the prologue on nodes, the passes over edges, and the linear map after them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric.utils import softmax

from ..graph.small_graphs import runs_pygs_code
from ..ops._saved import Context, save, saved
from ..ops._transforms import is_batched
from ..ops.column_sums import column_sums
from ..ops.head_map import head_map
from ..ops.product import product
from ..sparse.graph import Graph, ends_of
from ..sparse.operator import SparseOperator
from . import _blocks, _tiles_cuda
from ._cpu import run_pass_cpu
from ._cuda import dot_of_results, on_device, run_pass_cuda, schedule_of
from ._fallback import BySize
from ._gradients import cotangents_of
from ._ir import DST_ROLES, NODES, SRC, Inputs, Program, Refused, look_up_rows, wrap_rows
from ._passes import Backward, Pass, Passes
from ._plan import Output, Plan, WeightedSum, kernel_reduces
from ._prologue import has_edges, replace_unread_rows

# The results of a pass, and for each the second one of kinds that have two (else None).
Results: TypeAlias = tuple[list[Tensor], list[Tensor | None]]


def run_pass(
    pass_: Pass, graph: Graph, inputs: Inputs, acc: torch.dtype, seed: Tensor | None
) -> Results:
    """Runs a pass on blocks, on a GPU or on a CPU."""
    if pass_.in_tiles and not graph.col.is_cuda:
        return run_pass_cpu(pass_, graph, inputs, acc, seed)
    if pass_.in_tiles and _tiles_cuda.takes(graph):
        with on_device(graph.col.device):
            return _tiles_cuda.run_pass_tiles(pass_, graph, inputs, seed)
    if pass_.in_blocks or pass_.in_tiles:
        return _blocks.reduce_blocks(
            pass_.program, pass_.outs, graph, _with_seed(inputs, seed), acc
        )
    if not graph.col.is_cuda:
        if pass_.outs[-1].kind == 'var':
            return _variance_cpu(pass_, graph, inputs, acc, seed)
        return run_pass_cpu(pass_, graph, inputs, acc, seed)
    schedule = schedule_of(graph, pass_.row_role)
    with on_device(graph.col.device):
        return run_pass_cuda(pass_, schedule, inputs, acc, seed)


def _variance_cpu(
    pass_: Pass, graph: Graph, inputs: Inputs, acc: torch.dtype, seed: Tensor | None
) -> Results:
    """Runs a pass whose last result is a variance, by moments about the first message of each
    destination: the variance of equal messages is exactly 0."""
    starts, given = graph, inputs
    if graph.num_edges > 0:
        # A graph of the first edge of each destination; for one without edges, of any edge.
        start = graph.rowptr[:-1].clamp(max=graph.num_edges - 1)
        edges = start if graph.perm is None else graph.perm[start]
        rowptr = torch.arange(start.numel() + 1, dtype=start.dtype)
        starts = graph._replace(rowptr=rowptr, col=graph.col[start], perm=edges)
        missing = start.numel() - graph.num_edges  # The kernel takes a row for each of these edges.
        given = inputs | {
            load: torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
            for load, x in inputs.items() if load[0] == 'edge' and missing > 0
        }  # fmt: skip
    (first,), _ = run_pass_cpu(pass_.first_value_pass(), starts, given, acc, seed)
    given = inputs | {('first', 0): first}
    outs, chosen = run_pass_cpu(pass_.moments_pass(), graph, given, acc, seed)
    *others, away, squares = outs
    var = (squares - away * away).clamp_(min=0)
    mean = replace_unread_rows(first + away, has_edges(graph.rowptr), 0)
    return [*others, var.to(getattr(torch, pass_.outs[-1].dtype))], [*chosen[:-2], mean]


SLOWER_TWICE = "the derivative of a kernel's derivative takes longer than that of PyG's code"
SLOWER_IN_TILES = (
    'the backward pass would compute the linear maps of each edge again, which takes longer than '
    'to keep their values'
)


def is_slower_in_tiles(
    passes: Passes, num_edges: int, trains: bool, device: torch.device | None = None
) -> bool:
    """Whether PyG's code is faster than tiles: on a GPU with wide values of float32, where their
    tensors fit into the memory of the `device`."""
    plan = passes.plan
    if not (trains and plan.on_cuda and plan.in_tiles and runs_pygs_code()):
        return False
    return passes.repeats_wide_maps and (
        device is None or _blocks.fits_memory(plan, num_edges, device)
    )  # fmt: skip


def keeps_maps(passes: Passes, num_edges: int, device: torch.device) -> bool:
    """Whether torch computes the linear maps for training, and keeps their values: of features of
    edges alone, where these fit into the memory of the `device`."""
    may_keep = passes.may_keep_maps and runs_pygs_code()
    if not may_keep or passes.multiplies_in_tiles[_tiles_cuda.may_round()]:
        return False
    return _blocks.fits_memory(passes.plan, num_edges, device)


def _with_seed(inputs: Inputs, seed: Tensor | None) -> Inputs:
    return inputs if seed is None else {**inputs, ('seed', 0): seed}


class _Context(Context):
    """What the backward pass gets beside the saved tensors."""

    passes: Passes
    needs: tuple[bool, ...]


class FusedMessage(torch.autograd.Function):
    """The passes of a plan. Its double backward differentiates torch's own operators."""

    @staticmethod
    def forward(
        ctx: _Context,
        given: tuple[Passes, Graph, Tensor | None, tuple[bool, ...], bool],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        # One argument: autograd looks at each one several times.
        passes, graph, seed, needs, only_read = given
        results, kept = compute_results(passes, graph, seed, needs, inputs, not only_read)
        ctx.passes, ctx.needs = passes, needs
        ctx.set_materialize_grads(False)
        rounded = tuple(map(_as_non_view, results))
        if not only_read:  # The caller may write into what it gets.
            own = [x.clone() if any(x is y for y in rounded) else x for x in kept.results]
            kept = kept._replace(results=tuple(own))
        save(ctx, graph, seed, inputs, *kept)
        return rounded

    @staticmethod
    def backward(ctx: _Context, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs
        graph, seed, inputs, *rest = saved(ctx)
        passes, kept, grads = _used(ctx.passes, graph, needs, inputs, Saved(*rest), given)
        derives_twice = torch.is_grad_enabled()  # create_graph=True
        if derives_twice:
            ctx.passes.derives_twice = True
        if derives_twice or is_batched(*grads):  # Or several gradients at once.
            chosen = kept.chosen
            of_inputs = _differentiate_in_torch(passes, graph, seed, inputs, chosen, needs, grads)
        else:
            of_inputs = compute_gradients(passes, graph, seed, needs, inputs, kept, grads)
        return None, *of_inputs


def _used(
    passes: Passes, graph: Graph, needs: tuple[bool, ...], inputs: Sequence[Tensor], kept: 'Saved',
    grads: Sequence[Tensor | None],
) -> tuple[Passes, 'Saved', tuple[Tensor, ...]]:  # fmt: skip
    """The passes, what they read, and the gradients, without results that get none: the zeros of
    these would be NaN where their derivative is infinite, and cost as much."""
    count = passes.num_written if passes.has_variance else len(grads)
    unused = tuple([k for k in range(count) if grads[k] is None])
    if unused and len(unused) < len(grads):
        with suppress(Refused):
            others = passes.without(unused)
            others.prepare_backward(needs, graph, others.by_load(inputs))
            used = [k for k in range(len(grads)) if k not in unused]
            chosen, results = kept.chosen, kept.results
            if any(passes.multiples):
                results = tuple([results[k] for k in used])
            passes = others
            kept = kept._replace(
                chosen=chosen and tuple([chosen[k] for k in used]), results=results
            )
            grads = [grads[k] for k in used]
    return passes, kept, tuple([
        grad if grad is not None else _zeros(passes, graph, output)
        for grad, output in zip(grads, passes.plan.outputs, strict=True)
    ])  # fmt: skip


def _zeros(passes: Passes, graph: Graph, output: Output) -> Tensor:
    rows = graph.num_edges if output.reduce == 'edge' else graph.num_dst
    shape = passes.plan.message[output.at].shape
    return torch.zeros(rows, *shape, dtype=getattr(torch, output.dtype), device=graph.col.device)


class Saved(NamedTuple):
    """What the backward pass of a plan reads of the forward pass, in the dtype of the arithmetic.

    :obj:`local` are the sums of derivatives by some inputs of destinations, :obj:`chosen` the edges
    that maxima and minima chose, :obj:`stats` for each softmax the largest score of each
    destination and the reciprocal of its sum of exponentials, and :obj:`results` those that
    :obj:`Passes.saved_results` lists.
    """

    local: tuple[Tensor, ...]
    chosen: tuple[Tensor | None, ...]
    stats: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def compute_results(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor], copies: bool = False,
) -> tuple[list[Tensor], Saved]:  # fmt: skip
    """The results of a plan, and what the backward pass reads, perhaps the same tensors; with
    `copies` others where a kernel writes them at once."""
    values = passes.by_load(inputs)
    passes.prepare_backward(needs, graph, values)
    local = passes.backward(needs).local
    outs, chosen, stats, wide = _run_forward(
        passes, local, graph, values, seed, keeps=any(needs), copies=copies
    )
    dtypes = passes.dtypes
    count = len(dtypes)
    rounded = [out.to(dtype) for out, dtype in zip(outs, dtypes, strict=False)]
    results = tuple(wide) or tuple([outs[k] for k in passes.saved_results])
    return rounded, Saved(
        tuple(outs[count:]), tuple(chosen[:count]), tuple(stats.values()), results
    )


def compute_gradients(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor], kept: Saved, grads: tuple[Tensor, ...],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs that need one, by the passes of the plan."""
    plan, acc, backward = passes.plan, passes.acc, passes.backward(needs)
    values = passes.by_load(inputs)
    cotangents = _load_cotangents(passes, graph, seed, values, kept, grads)
    out: list[Tensor | None] = [None] * len(inputs)
    if plan.in_blocks or (plan.in_tiles and not _has_tiles(backward, graph)):
        given = _with_seed(values, seed)
        if plan.in_tiles:  # The forward pass drew factors in another way than blocks do.
            given |= {('keep', at): x for at, x in _dropouts(passes, graph, seed).items()}
        out = _blocks.block_gradients(plan, graph, given, needs, acc)
        backward = Backward((), (), False)
    if backward.local:
        grad = cotangents[plan.outputs[0].at]
        if not graph.full[0]:  # A destination without edges gives none, whatever its result gets.
            grad = replace_unread_rows(grad, has_edges(graph.rowptr), 0)
    for k, derivative in zip(backward.local, kept.local, strict=True):
        out[k] = (grad.reshape(derivative.shape) * derivative).to(inputs[k].dtype)
    for pass_, targets, shared in backward.passes:
        results, _ = run_pass(pass_, graph, values, acc, seed)
        values |= zip(shared, results[len(targets) :], strict=True)
        for ks, grad, result in zip(targets, results, pass_.outs, strict=False):
            if result.kind == 'total':
                grad = column_sums(grad) if grad.size(0) > 1 else grad
            for k in ks:  # Gradients of different parameters must not share memory.
                own = grad if k == ks[0] else grad.clone()
                if plan.inputs[k].role == 'table' and result.kind == 'edge':
                    own = _sum_by_row_of_table(plan, k, values, grad)
                x = inputs[k]
                own = own if own.dtype == x.dtype else own.to(x.dtype)
                out[k] = own if own.shape == x.shape else own.reshape(x.shape)
    for k, needed in enumerate(needs):
        if needed and out[k] is None:
            out[k] = torch.zeros_like(inputs[k])
    return out


def _has_tiles(backward: Backward, graph: Graph) -> bool:
    """Whether tiles compute the gradients of a plan that they run."""
    return bool(backward.passes) and (not graph.col.is_cuda or _tiles_cuda.takes(graph))


def _sum_by_row_of_table(plan: Plan, k: int, inputs: Inputs, grad: Tensor) -> Tensor:
    """The gradient of a table, of that of each edge; in a fixed order."""
    lookup, count = plan.lookup(k), plan.inputs[k].shape[0]
    index = _values_of_index(plan.message, lookup.args[0], inputs)
    if lookup.attrs[-1]:
        index = wrap_rows(index, count)
    return torch.ops.aten.embedding_dense_backward.default(
        grad.reshape(index.numel(), -1), index.reshape(-1), count, -1, False
    )


def _values_of_index(message: Program, at: int, inputs: Inputs) -> Tensor:
    """The rows of a table that the edges look up."""
    loads = {
        each: inputs[message[each].attrs] for each in message.reachable([at])
        if message[each].op == 'load'
    }  # fmt: skip
    return message.evaluate([at], loads)[0]


def _load_cotangents(
    passes: Passes, graph: Graph, seed: Tensor | None, values: Inputs, kept: Saved,
    grads: tuple[Tensor, ...],
) -> dict[int, Tensor]:  # fmt: skip
    """Adds to `values` what passes of the backward pass load of each destination: the gradients
    of the results, and the statistics of softmaxes. Returns the cotangents by value."""
    plan, acc = passes.plan, passes.acc
    if passes.has_variance:
        *others, of_mean, of_var = grads
        grads = *others, of_mean - 2 * kept.results[0] * of_var, of_var
    grads = tuple([grad.contiguous() for grad in grads])
    for n in range(len(plan.softmaxes)):
        values['most', n], values['scale', n] = kept.stats[2 * n : 2 * n + 2]
    cotangents = _edge_cotangents(plan, graph, grads, acc)
    for role, k, at in cotangents_of(plan):
        chosen = kept.chosen[k] if role == 'picked' else None
        if role == 'edge':
            values['edge', k] = grads[k - len(plan.inputs)]
        elif chosen is not None:
            values['grad', k], values['arg', k] = grads[k], chosen
        else:
            values['grad', k] = cotangents[at]
    for n, is_multiple in enumerate(passes.multiples):
        if is_multiple:
            _load_dot_of_results(plan, values, n, grads, kept.results, acc)
        elif not (plan.in_blocks or (plan.in_tiles and passes.map_gradients is None)):
            (values['dot', n],), _ = run_pass(passes.dot_pass(n), graph, values, acc, seed)
    return cotangents


def _load_dot_of_results(
    plan: Plan, values: Inputs, n: int, grads: Sequence[Tensor], results: Sequence[Tensor],
    acc: torch.dtype,
) -> None:  # fmt: skip
    """Adds the sum of a softmax's values times their gradients, for results that are multiples of
    it: it equals the sum of the results times theirs."""
    most, scale = values['most', n], values['scale', n]
    if plan.in_blocks or not most.is_cuda:
        shape = (most.size(0), *plan.message[plan.softmaxes[n]].shape, -1)
        first, *others = (
            (grad * each).reshape(shape).sum(-1) for grad, each in zip(grads, results, strict=True)
        )
        values['dot', n] = sum(others, first)
        return
    values['dot', n], values['stats', n] = dot_of_results(most, scale, grads, results, acc)


def _as_non_view(x: Tensor) -> Tensor:
    """A tensor that the caller may write into: autograd forbids it for views made in a function."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def _run_forward(
    passes: Passes, local: tuple[int, ...], graph: Graph, inputs: Inputs, seed: Tensor | None,
    keeps: bool = False, copies: bool = False,
) -> tuple[list[Tensor], list[Tensor | None], Inputs, list[Tensor]]:  # fmt: skip
    """The results and the derivatives by `local` inputs, the edges that maxima chose, the
    statistics of softmaxes, and the results again where :meth:`Passes.joint_pass` writes them so,
    which takes `keeps` and `copies`."""
    acc, cuda = passes.acc, graph.col.is_cuda
    joint = passes.joint_pass(cuda, keeps, copies) if passes.plan.softmaxes else None
    if joint is not None:
        (most, *outs), (scale, *chosen) = run_pass(joint, graph, inputs, acc, seed)
        assert scale is not None
        count = len(passes.plan.outputs)
        return outs[:count], chosen, {('most', 0): most, ('scale', 0): scale}, outs[count:]
    stats = _softmax_statistics(passes, graph, inputs, seed)
    outs, chosen = [], []
    for pass_ in passes.forward_passes(local, graph.col.is_cuda):
        results, seconds = run_pass(pass_, graph, inputs | stats, acc, seed)
        outs += results
        chosen += seconds
    if passes.has_variance:
        mean = chosen.pop()
        assert mean is not None
        outs.insert(-1, mean)
        chosen += [None, None]
    return outs, chosen, stats, []


def _softmax_statistics(
    passes: Passes, graph: Graph, inputs: Inputs, seed: Tensor | None
) -> Inputs:
    """For each softmax, the largest score of each destination, and the reciprocal of the sum of
    exponentials."""
    stats: Inputs = {}
    for n in range(len(passes.plan.softmaxes)):
        if passes.plan.in_blocks:
            largest, sums = passes.softmax_passes_in_blocks(n)
            (stats['most', n],), _ = run_pass(largest, graph, inputs, passes.acc, seed)
            (total,), _ = run_pass(sums, graph, inputs | stats, passes.acc, seed)
            stats['scale', n] = total.reciprocal_()
            continue
        pass_ = passes.softmax_pass(n)
        (stats['most', n],), (scale,) = run_pass(pass_, graph, inputs, passes.acc, seed)
        assert scale is not None
        stats['scale', n] = scale
    return stats


def _edge_cotangents(
    plan: Plan, graph: Graph, grads: tuple[Tensor, ...], acc: torch.dtype
) -> dict[int, Tensor]:
    """By value of the message: the gradient that each edge of a destination gets, from all sums and
    means of the value together."""
    degree: Tensor | None = None
    total: dict[int, Tensor] = {}
    for output, grad in zip(plan.outputs, grads, strict=True):
        if output.reduce in ('max', 'min', 'edge'):
            continue
        if output.reduce in ('mean', 'var'):
            if degree is None:
                degree = graph.rowptr.diff().clamp(min=1)
            grad = grad.to(acc) / degree.view(-1, *(1,) * (grad.dim() - 1))
        total[output.at] = total[output.at] + grad if output.at in total else grad
    return total


def _differentiate_in_torch(
    passes: Passes, graph: Graph, seed: Tensor | None, inputs: tuple[Tensor, ...],
    chosen: tuple[Tensor | None, ...], needs: tuple[bool, ...], grads: tuple[Tensor, ...],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients in torch operations, for another derivative, or several at once."""
    create_graph, keeps = torch.is_grad_enabled(), _dropouts(passes, graph, seed)
    # The forward pass has been cast already.
    with torch.enable_grad(), torch.autocast(graph.col.device.type, enabled=False):
        inputs = tuple(t.view_as(t) for t in inputs)  # One tensor may be several inputs.
        outs = _run_in_torch(passes.plan, graph, inputs, keeps, chosen)
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    grads_of = iter(torch.autograd.grad(
        outs, wanted, grads, create_graph=create_graph, allow_unused=True, materialize_grads=True,
    ))  # fmt: skip
    return [next(grads_of) if needed else None for needed in needs]


def _dropouts(passes: Passes, graph: Graph, seed: Tensor | None) -> dict[int, Tensor]:
    """The factors of dropouts for all edges, as the forward pass drew them, by position in the
    message."""
    keeps, message = {}, passes.plan.message
    for at in message.reachable([output.at for output in passes.plan.outputs]):
        if message[at].op == 'keep' and passes.plan.in_blocks:
            assert seed is not None
            edges = torch.arange(graph.num_edges, device=graph.col.device)
            keeps[at] = _blocks.dropout_factors(message[at], edges, seed)
        elif message[at].op == 'keep':
            (keeps[at],), _ = run_pass(passes.dropout_pass(at), graph, {}, passes.acc, seed)
    return keeps


def _run_in_torch(
    plan: Plan, graph: Graph, inputs: tuple[Tensor, ...], keeps: dict[int, Tensor],
    chosen: tuple[Tensor | None, ...],
) -> list[Tensor]:  # fmt: skip
    """The results of the kernels in torch operations, with tensors of the size of the edges.
    `keeps` are the factors of dropouts, `chosen` the edges that maxima and minima chose."""
    message = plan.message
    col, row = ends_of(graph)
    ends = {'src': col, 'dst': row}
    values = dict(keeps)
    for at in message.reachable([output.at for output in plan.outputs]):
        if message[at].op == 'load' and message[at].attrs[0] not in DST_ROLES:
            role, k = message[at].attrs
            values[at] = inputs[k].index_select(0, ends[role]) if role in ends else inputs[k]
        elif message[at].op == 'lookup':
            (index,) = message.evaluate(message[at].args, values)
            _, k, wraps = message[at].attrs
            values[at] = look_up_rows(inputs[k], index, wraps)
    for at in plan.softmaxes:
        (score,) = message.evaluate(message[at].args[:1], values)
        score = score.to(getattr(torch, message[at].dtype))
        score = score.expand(col.size(0), *message[at].shape)
        values[at] = softmax(score, row, num_nodes=graph.num_dst)
    outs = []
    for output, arg in zip(plan.outputs, chosen, strict=True):
        # A variance reads the message itself, of which the mean before it is.
        at = plan.outputs[-2].at if output.reduce == 'var' else output.at
        (x,) = message.evaluate([at], values)
        x = x.expand(col.size(0), *message[output.at].shape)
        if arg is not None:
            picked = x.gather(0, arg.clamp(min=0).long())
            out = picked.masked_fill(arg < 0, 0)
        elif output.reduce == 'edge':
            out = x
        else:
            wide = getattr(torch, message[output.at].dtype)
            out = _scatter(x, row, graph.num_dst, output.reduce, wide)
        outs.append(out.to(getattr(torch, output.dtype)))
    return outs


def _scatter(x: Tensor, row: Tensor, num_rows: int, reduce: str, wide: torch.dtype) -> Tensor:
    """Reduces values of edges by row; a variance in the dtype `wide`."""
    index = row.view(-1, *(1,) * (x.dim() - 1)).expand_as(x)
    if reduce == 'var':
        x = x.to(wide)
        mean = _scatter(x, row, num_rows, 'mean', wide)
        x, reduce = (x - mean.index_select(0, row)).square(), 'mean'
    zero = x.new_zeros(num_rows, *x.shape[1:])
    name = {'max': 'amax', 'min': 'amin'}.get(reduce, reduce)
    return zero.scatter_reduce(0, index, x, name, include_self=False)


def run(
    passes: Passes, graph_of: Callable[[bool], Graph], args: tuple[Tensor, ...],
    named: dict[tuple[str, str], Tensor], device: torch.device, only_read: bool,
) -> list[Tensor]:  # fmt: skip
    """The aggregated message.

    Args:
        passes: The passes of its plan.
        graph_of: Makes the graph, with its transpose on request.
        args: The arguments of the captured function, parameters among them.
        named: The inputs of nodes and edges by role and name.
        device: That of the inputs.
        only_read: Whether the caller promises not to write into the result.
    """
    if torch.is_autocast_enabled(device.type):  # The plan has its conversions.
        with torch.autocast(device.type, enabled=False):
            return run(passes, graph_of, args, named, device, only_read)
    plan = passes.plan
    seed = torch.randint(2**62, (1,), device=device) if plan.num_dropouts else None
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
    transpose = needs is not None and passes.backward(needs).needs_transpose
    graph = graph_of(SRC in hoists or transpose)
    if passes.gathers:
        _check_rows(passes, read, graph)
    values = passes.prologue(read, graph if hoists else None)
    # Here, so that the backward pass has the inputs of the graph of autograd.
    pairs = zip(values, plan.inputs, strict=False)
    inputs = [
        x if x.is_contiguous() or _has_readable_rows(x, each.role) else x.contiguous()
        for x, each in pairs
    ]
    if passes.weighted_sum is not None:
        outs = [run_weighted_sum(passes.weighted_sum, graph, inputs, plan.outputs[0].dtype)]
    elif needs is not None and True in needs:
        only_read = only_read or plan.tail is not None
        outs = list(FusedMessage.apply((passes, graph, seed, needs, only_read), *inputs))
        for k in passes.without_gradient(needs) if passes.leaves_differ else ():
            outs[k] = outs[k].detach()
    else:
        outs, *_ = _run_forward(passes, (), graph, passes.by_load(inputs), seed)
    after: Sequence[Tensor] = ()
    if passes.after is not None:
        after = [
            args[name] if role == 'param' else named[role, name]
            for _, role, name in passes.after.reads
        ]
    return finish_results(passes, outs, values, after, graph.rowptr)


def _check_rows(passes: Passes, read: dict[int, Tensor], graph: Graph) -> None:
    """Raises :class:`BySize` if the message gathers from what has not a row for each node."""
    for at, role in passes.gathers:
        rows, count = read[at].size(0), graph.num_src if role == 'src' else graph.num_dst
        if rows != count:
            end = 'sources' if role == 'src' else 'destinations'
            raise BySize(f'message gathers from {rows} rows by the indices of {count} {end}')


def finish_results(
    passes: Passes, outs: list[Tensor], values: Sequence[Tensor], after: Sequence[Tensor],
    rowptr: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The aggregated message, from the results of the kernels, the values of the prologue, and what
    the part `after` the reductions reads; then the values of edges that attributes hold."""
    plan = passes.plan
    written, outs = outs[: passes.num_written], outs[passes.num_written :]
    if plan.tail is not None:
        parts = [out.flatten(1) for out in outs[-plan.tail.parts :]]
        out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        weight = values[len(plan.inputs)].to(out.dtype)
        other = outs[0].flatten(1) if len(outs) > len(parts) else None
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
        sums = dict(zip(kernel_reduces(plan.reduces), outs, strict=True))
        outs = [sums[reduce] for reduce in plan.reduces]
    if passes.after is not None:
        return [*passes.after(outs, after, rowptr), *written]
    return [*[out.to(passes.dtype) for out in outs], *written]


def _has_readable_rows(x: Tensor, role: str) -> bool:
    """Whether kernels read a tensor without a copy: on CUDA rows of nodes may have any stride."""
    return x.is_cuda and role in NODES and x.detach()[0].is_contiguous()


def run_weighted_sum(how: WeightedSum, graph: Graph, inputs: list[Tensor], dtype: str) -> Tensor:
    """The product of a sparse matrix with features, by the kernels of spmm."""
    x = inputs[how.x]
    weight = None if how.weight is None else inputs[how.weight].reshape(-1)
    op = SparseOperator(graph, weight, mean=how.mean)
    rows = x.reshape(x.size(0), -1).contiguous()
    out = product(op, rows, out_acc=rows.dtype != getattr(torch, dtype))
    return out.view(-1, *x.shape[1:])
