"""Replaces regions of a graph that :func:`torch.compile` captured by the op of a message.

The graph is that of Dynamo, before autograd and before functionalization. A region that no kernel
computes stays as it is, see :mod:`~pyg_fast.message._region`.
"""

import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph.small_graphs import are_few, runs_pygs_code, width_of_mlp
from ..ops._edges import assert_no_invalid
from ..ops.head_map import in_torch
from . import _markers
from ._compiled_op import graph_from, message, passes_of
from ._ir import Refused
from ._passes import Passes
from ._plan import Plan, make_plan
from ._region import Region, RegionInput, is_call, is_marker
from ._run import SLOWER_IN_TILES, finish_results, is_slower_in_tiles
from ._text import dumps
from ._tiles_cuda import may_round
from ._traffic import Traffic, fake_of, record_traffic

_log = logging.getLogger('pyg_fast')


def replace_messages(
    module: GraphModule, gradients: bool | None = None,
    told: Callable[[Node, str], None] | None = None,
) -> int:  # fmt: skip
    """Replaces regions in place, also in the bodies of higher-order operators.

    Args:
        module (GraphModule): What Dynamo captured, or the graph of an exported program.
        gradients (bool, optional): Whether kernels give gradients to all inputs of float types, as
            an exported program does not tell which need them. Without, a backward pass raises an
            error. (default: :obj:`None`, to those that need them in the captured graph)
        told (Callable, optional): Called for each message with a node of it, and why PyG's code
            stays; an empty text if it does not. (default: :obj:`None`)

    Returns:
        int: How many messages became kernels.
    """
    graph, count = module.graph, 0
    for node in graph.nodes:
        body = getattr(module, node.target, None) if node.op == 'get_attr' else None
        if isinstance(body, GraphModule):
            count += replace_messages(body, gradients, told)
    groups: dict[object, list[Node]] = {}
    for node in graph.nodes:
        if is_call(node, _markers.rows):
            groups.setdefault((tuple(node.args[8]), node.args[3]), []).append(node)
        if is_call(node, _markers.aggregate):
            groups.setdefault((node.args[0], node.args[3]), []).append(node)
    if not groups:
        return count
    _merge_duplicates(graph)
    try:
        traffic = record_traffic(module)
    except Refused as reason:
        _log.info("all messages of a graph run PyG's code, compiled: %s", reason)
        for aggregates in groups.values():
            if told is not None:
                told(aggregates[0], str(reason))
        return count
    for aggregates in groups.values():
        first, why = aggregates[0], ''
        name = _layer_name(first)
        try:
            how = _replace(module, aggregates, traffic, count, gradients)
        except Refused as reason:
            why = str(reason)
            _log.info("%s runs PyG's code, compiled: %s", name, why)
        else:
            count += 1
            _log.info('%s runs as a kernel in compiled code: %s', name, how)
        if told is not None:
            told(first, why)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.op == 'get_attr' or _is_pure(node)):
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return count


def _is_pure(node: Node) -> bool:
    """Whether a node without users may be erased: FX does not know all operators that write."""
    return is_marker(node) or node.target is operator.getitem


def _layer_name(node: Node) -> str:
    """The class of the layer that a node belongs to."""
    stack = node.meta.get('nn_module_stack') or {}
    names = [cls.__name__ if isinstance(cls, type) else str(cls) for _, cls in stack.values()]
    return names[-1] if names else 'a message'


def _merge_duplicates(graph: FxGraph) -> None:
    """Merges equal calls that sort edges or take a row of them: each layer has its own. Rows that
    no message gathers by stay apart: what `forward` computes of them varies by no message."""
    first_of: dict[object, Node] = {}
    for node in list(graph.nodes):
        sorts = is_call(node, _markers.csr)
        if sorts or (node.op == 'call_function' and node.target is operator.getitem):
            key = node.target, node.args, sorts or any(map(is_marker, node.users))
            try:
                first = first_of.setdefault(key, node)
            except TypeError:  # An index that is a slice.
                continue
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _replace(
    module: GraphModule, aggregates: Sequence[Node], traffic: Traffic, number: int,
    gradients: bool | None,
) -> str:  # fmt: skip
    """Replaces one region; tells how.

    Raises:
        Refused: If no kernel computes it; the graph is as before.
    """
    graph, order = module.graph, list(module.graph.nodes)
    with _autocast_at(order, aggregates[0]) as inside:
        region = Region(module, aggregates, traffic)
        # The mode of gradients is that of the graph, not that in which it is compiled.
        trains = any(fake_of(node).requires_grad for node in aggregates)
        derives = trains if gradients is None else gradients
        plan, reads, places, writes, constants = _plan_region(region, derives)
        passes = passes_of(text := dumps(plan))
        _check_size(region, passes)
        autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda'))) or inside
    if constants and gradients is not None:
        raise Refused('a constant tensor made in message')  # An exported program would need it.
    mode = fake_of(region.index).fake_mode
    made = [_insert_constant(module, each, aggregates[0], mode) for each in constants]
    reads += [RegionInput(node, 'param', '', 0) for node in made]
    inputs, dims = [each.node for each in reads], [each.dim for each in reads]
    arguments = [
        *region.csr, region.perm, region.t_perm, region.num_src, region.num_dst, *inputs,
        _find_invalid(graph, region.csr[0]),
    ]  # fmt: skip
    read = {at: fake_of(inputs[places[role, name]]) for at, role, name in passes.reads}
    for at, role in passes.gathers:
        count = fake_of(region.num_src if role == 'src' else region.num_dst)
        if not statically_known_true(read[at].shape[0] == count):
            raise Refused('message gathers from what has no row for each node')
    needs = _needs_gradient(passes, read, derives, gradients)
    count = fake_of(region.index).shape[0]
    if isinstance(count, int) and is_slower_in_tiles(passes, count, any(needs)):
        raise Refused(SLOWER_IN_TILES)
    if plan.in_tiles and any(needs) and not passes.backward(tuple(needs)).passes:
        raise Refused('gradients of a linear map of values computed for each edge')
    copied = [node in region.written for node in inputs]
    asked = [] if gradients is False else needs
    body = _trace_replacement(
        passes, text, places, len(region.csr), arguments, dims, copied, needs, asked
    )
    results = _insert_op(module, body, arguments, aggregates[0], number, autocast)
    _use_results(graph, region, aggregates, writes, results, trains)
    _erase_region(graph, region, order)
    reduces = ', '.join(output.reduce for output in passes.plan.outputs)
    return f'{len(passes.plan.inputs)} inputs, {reduces}'


def _plan_region(
    region: Region, derives: bool
) -> tuple[
    Plan, list[RegionInput], dict[tuple[str, str | int], int], list[Node], tuple[Tensor, ...]
]:  # fmt: skip
    """The plan of a region; its inputs with their places; the values of edges that it writes; and
    constants, which follow the inputs.

    Raises:
        Refused: If no kernel computes it.
    """
    elsewhere = region.read_elsewhere()
    writes = elsewhere if all(map(region.can_write, elsewhere)) else []
    try:
        captured, reads, places = region.capture(writes)
        plan = make_plan(captured, region.reduces)
    except Refused:
        if not writes:
            raise
        writes = []
        captured, reads, places = region.capture()
        plan = make_plan(captured, region.reduces)
    keeps = derives and plan.may_keep_maps and runs_pygs_code()
    if keeps and not plan.multiplies_in_tiles(may_round()):
        plan = make_plan(captured, region.reduces, True)
    if plan.in_blocks:
        raise Refused('a linear map of values computed for each edge')
    region.check_drawn_once(writes)
    if plan.in_tiles and len(writes) < len(elsewhere):
        raise Refused('its linear maps would run twice, since others read values of its edges')
    return plan, reads, places, writes, captured.constants


def _insert_constant(
    module: GraphModule, tensor: Tensor, before: Node, mode: FakeTensorMode
) -> Node:
    """A tensor that a message makes of numbers."""
    names = (f'_pyg_fast_constant_{k}' for k in itertools.count())
    name = next(name for name in names if not hasattr(module, name))
    setattr(module, name, tensor)  # No buffer: Dynamo knows where those come from.
    with module.graph.inserting_before(before):
        held = module.graph.create_node('get_attr', name)
        node = module.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (held,))
    held.meta['example_value'] = tensor
    node.meta['example_value'] = mode.from_tensor(tensor)
    return node


def _use_results(
    graph: FxGraph, region: Region, aggregates: Sequence[Node], writes: Sequence[Node],
    results: Sequence[Node], trains: bool,
) -> None:  # fmt: skip
    """Puts the results of an op in the place of the aggregations, and of values of edges where
    others read them."""

    def put(node: Node, result: Node, readers: Sequence[Node]) -> None:
        with graph.inserting_before(aggregates[0]):
            if trains and not fake_of(node).requires_grad:
                result = graph.call_method('detach', (result,))
            if region.dim:
                result = graph.call_method('movedim', (result, 0, region.dim))
                result = graph.call_method('contiguous', (result,))
        # That of the trace is detached, and the next message asks whether it needs a gradient.
        result.meta['example_value'] = fake_of(node)
        region.traffic.result[result] |= region.traffic.result[node]
        for reader in readers:
            reader.replace_input_with(node, result)

    for node in region.late if writes else ():
        aggregates[0].prepend(node)
    for node, result in zip(writes, results[len(results) - len(writes) :], strict=True):
        put(node, result, [each for each in node.users if region.is_later_reader(each)])
    for node in aggregates:
        which = str(node.args[4])
        result = results[int(which) if region.of_rows else region.reduces.index(which)]
        put(node, result, list(node.users))
    for node in aggregates:
        graph.erase_node(node)


def _erase_region(graph: FxGraph, region: Region, order: Sequence[Node]) -> None:
    """Erases what nobody reads any more, also writes, and what Dynamo asserts of the number of
    nodes that a softmax takes from its index."""
    own = {*region.nodes, *filter(_is_pure, region.frontier)}
    for node in order:
        asserts = node.target is torch.ops.aten._assert_scalar.default
        compares = isinstance(fake_of(node), torch.SymBool)
        if (asserts or compares) and not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    for node in reversed(order):
        if node in own and not node.users and node.op != 'placeholder':
            graph.erase_node(node)


def _needs_gradient(
    passes: Passes, read: dict[int, Tensor], trains: bool, gradients: bool | None
) -> list[bool]:
    """Which inputs of the passes need a gradient, by the fake tensors that the prologue reads."""
    leaves = {
        at for at, x in read.items()
        if trains and x.is_floating_point() and (gradients or x.requires_grad)
    }  # fmt: skip
    return [not leaves.isdisjoint(each) for each in passes.leaves]


def _insert_op(
    module: GraphModule, body: GraphModule, arguments: Sequence[object], before: Node, number: int,
    autocast: bool,
) -> list[Node]:  # fmt: skip
    """Inserts the op of a message with what surrounds it, out of autocast; its results."""
    amp, device = torch.amp.autocast_mode, fake_of(arguments[0]).device.type
    with module.graph.inserting_before(before):
        if autocast:  # The plan has its conversions.
            enter = module.graph.call_function(amp._enter_autocast, (device, None, False, None))
        results = _insert_graph(module, body, arguments, before, number)
        if autocast:
            module.graph.call_function(amp._exit_autocast, (enter,))
    return results


def _find_invalid(graph: FxGraph, rowptr: Node) -> Node | None:
    """The node that counts invalid edges, where the graph sorts a list that nothing has checked."""
    sort = rowptr.args[0] if rowptr.target is operator.getitem else None
    if not isinstance(sort, Node) or not is_call(sort, _markers.csr):
        return None
    for node in sort.users:
        if node.args[1] == _INVALID_RESULT:  # In an exported graph it may be unused.
            return None if node.users else node
    with graph.inserting_after(sort):
        node = graph.call_function(operator.getitem, (sort, _INVALID_RESULT))
    node.meta['example_value'] = fake_of(sort)[_INVALID_RESULT]
    return node


_INVALID_RESULT = 6  # the result of `csr` that counts invalid edges


def _check_size(region: Region, passes: Passes) -> None:
    """Refuses a region of so few edges that PyG's compiled code is faster."""
    plan, index = passes.plan, fake_of(region.index)
    # On a GPU the matrices of an MLP count: a kernel over tiles pays early.
    roles = ('param', 'table') if index.is_cpu else ()
    width = max([math.prod(each.shape) for each in plan.inputs if each.role not in roles] or [1])
    if plan.is_mlp and index.is_cuda:
        width = width_of_mlp(width, True)
    kind = 'compiled' if passes.weighted_sum is None else 'compiled sum'
    if index.is_cpu and torch.get_num_threads() == 1 and plan.is_loop:
        kind = f'{kind} on one thread'
    if are_few(index.shape[0], width, index.is_cuda, kind):
        raise Refused('too few edges for a kernel to pay')


def _trace_replacement(
    passes: Passes, text: str, places: dict[tuple[str, str | int], int], num_csr: int,
    arguments: Sequence[object], dims: Sequence[int], copied: Sequence[bool], needs: Sequence[bool],
    asked: Sequence[bool],
) -> GraphModule:  # fmt: skip
    """The op of a message between its prologue and its tail, traced into torch's operators. All of
    it is differentiable by the dispatcher: the op gives the gradients that are `asked`. It copies
    inputs that are written after it."""
    plan = passes.plan

    def emit(*given: Any) -> list[Tensor]:
        csr, (perm, t_perm, num_src, num_dst, *inputs, invalid) = given[:num_csr], given[num_csr:]
        if invalid is not None:
            assert_no_invalid(invalid)
        inputs = [x.clone() if copy else x for x, copy in zip(inputs, copied, strict=True)]
        inputs = [x.movedim(dim, 0) if dim else x for x, dim in zip(inputs, dims, strict=True)]
        read = {at: inputs[places[role, name]] for at, role, name in passes.reads}
        hoists = passes.prologue.ends if True in needs else ()
        graph = graph_from(csr, perm, t_perm, num_src, num_dst)
        values = passes.prologue(read, graph if hoists else None)
        kernel_inputs = [x.contiguous() for x in values[: len(needs)]]
        seed = None
        if plan.num_dropouts:
            seed = torch.randint(2**62, (1,), device=csr[0].device)
        outs = message(text, asked, kernel_inputs, seed, list(csr), perm, t_perm, num_src, num_dst)
        reads = () if passes.after is None else passes.after.reads
        after = [inputs[places[role, name]] for _, role, name in reads]
        return finish_results(passes, outs[: len(plan.outputs)], values, after, csr[0])

    fakes = [fake_of(each) for each in arguments]
    mode = next(x.fake_mode for x in fakes if isinstance(x, FakeTensor))
    with ExitStack() as stack:
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(mode)
        stack.enter_context(in_torch())
        for kind in ('cpu', 'cuda'):
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            body = make_fx(emit, tracing_mode='real')(*fakes)
        except RecursionError:
            raise Refused('too many operations') from None
        except RuntimeError as error:
            raise Refused(f'its operators cannot be traced: {error}') from error
    body.graph.eliminate_dead_code()
    return body


def _insert_graph(
    module: GraphModule, body: GraphModule, arguments: Sequence[Any], like: Node, number: int
) -> list[Node]:
    """Copies a graph to the present place of another one; its results there."""
    graph, copies = module.graph, {}
    given = iter(arguments)
    for node in body.graph.nodes:
        if node.op == 'placeholder':
            copies[node] = next(given)
            continue
        if node.op == 'output':
            return [copies[each] for each in node.args[0]]
        if node.op == 'get_attr':
            name = f'_pyg_fast_{number}_{node.target}'
            setattr(module, name, getattr(body, node.target))
            new = graph.get_attr(name)
        else:
            new = graph.node_copy(node, copies.__getitem__)
        names = 'stack_trace', 'nn_module_stack'
        # The keys of Dynamo and of exported programs.
        new.meta = dict.fromkeys(('example_value', 'val'), node.meta.get('val'))
        new.meta |= {key: like.meta[key] for key in names if key in like.meta}
        copies[node] = new
    raise AssertionError


@contextmanager
def _autocast_at(order: Sequence[Node], place: Node) -> Iterator[bool]:
    """Enters the autocast under which a node runs; yields whether the graph sets any."""
    active: list[tuple] = []
    for node in order:
        if node is place:
            break
        name = getattr(node.target, '__name__', '')
        if name == '_enter_autocast':
            active.append(node.args)
        elif name == '_exit_autocast':
            active.pop()
    with ExitStack() as stack:
        for device, dtype, enabled, cache in active:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache))
        yield bool(active)
