"""Whatever the input: a result as by the reference, or an error that names the argument."""

import inspect
import re
from typing import Any

import pytest
import torch
from _raw_ops import raise_pending
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast import ops
from pyg_fast.graph.graph import graph_of

from ._entries import ENTRIES, WITHOUT_INPUT, compare, on
from ._mutations import FLOATS, LAYOUTS, OTHERS, SHAPES, TYPES, mutations

# Ops that do not check the graph: they must not crash; their walks are undefined.
UNCHECKED = {'random_walk': ('rowptr', 'col'), 'pinsage_neighbors': ('rowptr', 'col')}
CPU = torch.device('cpu')
# The name of the argument in messages.
ALSO = {'graph': 'edge_index'}


def copied(value: Any) -> Any:
    """The same, with the same strides, in memory of its own."""
    if isinstance(value, list):
        return [copied(v) for v in value]
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return value
    with torch.inference_mode(value.is_inference()):
        if 0 in value.stride() or not value.is_contiguous():
            return value.detach()  # never written to, see `same`
        return value.detach().clone()


def same(a: Any, b: Any) -> bool:
    """Whether both are the same bits."""
    if isinstance(a, list):
        return isinstance(b, list) and all(map(same, a, b))
    if not isinstance(a, Tensor):
        return a is b or type(a) is not type(b) or a == b
    if a.layout != torch.strided or a.is_meta:
        return True
    plain = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    bits = (t.view(-1).view(torch.uint8) for t in plain)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def leaves(args: dict[str, Any]) -> dict[str, Tensor]:
    """Those that gradients are asked for."""
    return {
        name: value
        for name, value in args.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def is_random(args: dict[str, Any]) -> bool:
    """Whether no seed was given, or a slope is too steep for a softmax in float32."""
    slope = args.get('negative_slope', 0.2)
    return args.get('seed', 0) is None or not abs(slope) < 2**31


def check(name: str, args: dict[str, Any], changed: set[str]) -> bool:
    """Whether the op took these arguments, of which some are not as they should be."""
    entry = ENTRIES[name]
    before = {key: copied(value) for key, value in args.items()}
    given = {key: copied(value) for key, value in args.items()}
    actual, message = None, ''
    try:
        actual = entry.run(**given)
        if torch.cuda.is_available():  # Edges out of range are reported by the next call.
            torch.cuda.synchronize()
            raise_pending()
    except (TypeError, ValueError, IndexError) as error:
        message = f'{error!r}'
    for key in given.keys() - {entry.changes}:
        assert same(given[key], before[key]), f'{key} was modified'
        assert same(args[key], before[key]), f'{key} was modified'
    if actual is None:
        assert names_argument(args, message), message
        return False
    on_meta = any(t.is_meta for t in actual)
    if on_meta or is_random(args) or changed & set(UNCHECKED.get(entry.op, ())):
        return True
    expected = entry.reference(**{key: on(CPU, value) for key, value in args.items()})
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        compare(a.cpu(), e, f'result {k}')
    return True


def names_argument(args: dict[str, Any], message: str) -> bool:
    names = {*args, *(ALSO[key] for key in args if key in ALSO)}
    return bool(names & set(re.findall(r"'(\w+)", message)))


def check_gradients(name: str, args: dict[str, Any]) -> None:
    """Gradients of an op that takes these arguments."""
    entry, wanted = ENTRIES[name], leaves(args)
    if not entry.differentiable or args.get('quantize') or is_random(args):
        return
    if any(t.is_meta or not t.isfinite().all() for t in wanted.values()):
        return
    if any(isinstance(t, Tensor) and t.is_inference() for t in args.values()):
        return  # Torch does not save these for a backward pass.
    both, grad = [], None
    for run in (entry.run, entry.reference):
        inputs = {key: value.detach().requires_grad_() for key, value in wanted.items()}
        out = run(**{**args, **inputs})[-1]
        if not out.requires_grad:
            return
        if grad is None:  # Rounded as the op's result is, for both.
            grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        grad_out = grad.to(out.device, out.dtype)
        grads = torch.autograd.grad(out, [*inputs.values()], grad_out, allow_unused=True)
        both.append(grads)
    for key, a, e in zip(wanted, *both, strict=True):
        assert (a is None) == (e is None), key
        if a is not None:
            compare(a, e.to(a.device, torch.float64), f'gradient of {key}')


def made(name: str, seed: int = 0, device: torch.device | None = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {k: v if device is None else on(device, v) for k, v in ENTRIES[name].make().items()}


def test_every_op_has_an_entry() -> None:
    assert {entry.op for entry in ENTRIES.values()} | WITHOUT_INPUT == set(ops.__all__)


def test_every_argument_is_in_an_entry() -> None:
    given: dict[str, set[str]] = {}
    for name, entry in ENTRIES.items():
        given.setdefault(entry.op, set()).update(made(name))
    for op, names in given.items():
        known = set(inspect.signature(getattr(ops, op)).parameters)
        known |= {'x', 'k'} if op == 'CBSR' else set()  # of `from_dense`
        if op == 'cbsr_spmm':
            known = known - {'cbsr'} | {'values', 'columns', 'num_columns'}
        elif op == 'NodeMap':
            known -= {'device', 'hashed'}
        assert names == known, op


@pytest.mark.parametrize('name', ENTRIES)
def test_valid_input(name: str) -> None:
    args = made(name)
    assert check(name, args, set())
    check_gradients(name, args)


@pytest.mark.parametrize('name', ENTRIES)
def test_one_argument_is_not_as_it_should_be(name: str) -> None:
    good = made(name)
    taken = refused = 0
    for key, value in good.items():
        for kind, other in mutations(value):
            if key == ENTRIES[name].changes and kind == 'of inference':
                continue  # Torch itself refuses to change these.
            try:
                if check(name, {**good, key: copied(other)}, {key}):
                    taken += 1
                else:
                    refused += 1
            except Exception as error:
                raise AssertionError(f'{name} with {key} = {kind}: {error!r}') from error
    assert taken >= 2
    assert refused >= 20


@pytest.mark.parametrize('name', ENTRIES)
@given(data=st.data())
@settings(max_examples=12)
def test_several_arguments_are_not_as_they_should_be(name: str, data: st.DataObject) -> None:
    good = made(name, data.draw(st.integers(0, 2**20), 'seed'))
    args = dict(good)
    keys = {data.draw(st.sampled_from([*good])) for _ in range(2)}
    for key in sorted(keys):
        kinds = dict(mutations(good[key]))
        if key == ENTRIES[name].changes:
            del kinds['of inference']
        args[key] = kinds[data.draw(st.sampled_from([*kinds]), key)]
    if check(name, args, keys):
        check_gradients(name, args)


@pytest.mark.parametrize(
    'name', [name for name in ENTRIES if 'graph' in made(name) and name != 'aggregate scatter']
)
def test_tensor_of_a_graph_is_not_as_it_should_be(device: torch.device, name: str) -> None:
    good = made(name, device=device)
    size = max(t.size(0) for key, t in good.items() if 'x' in key or key == 'values')
    graph = graph_of(good['graph'], size, size)
    good['add_self_loops'] = False
    if 'dropout' not in good:
        del good['add_self_loops']
    ENTRIES[name].run(**{**good, 'graph': graph})
    for field in ('rowptr', 'col', 'perm', 't_rowptr', 't_col', 't_perm'):
        t = getattr(graph, field)
        bad = [change(t) for kind, change in SHAPES.items() if kind != 'flat']
        bad += [change(t) for kind, change in TYPES.items() if kind != 'int32']
        bad += [other for other in OTHERS if other is not None or 'perm' not in field]
        for other in bad:
            if other is None and field == 't_rowptr':
                continue  # A graph without its transpose.
            with pytest.raises((TypeError, ValueError), match="'graph"):
                ENTRIES[name].run(**{**good, 'graph': graph._replace(**{field: other})})
    for other in (graph.t()._replace(num_src=size + 1), graph._replace(num_dst=size - 1)):
        with pytest.raises((TypeError, ValueError), match="'(graph|x|x_src|alpha_dst)"):
            ENTRIES[name].run(**{**good, 'graph': other})


@pytest.mark.parametrize('name', ENTRIES)
def test_one_argument_on_cuda(cuda: torch.device, name: str) -> None:
    good = made(name, device=cuda)
    assert check(name, good, set())
    for key, value in good.items():
        if not isinstance(value, Tensor):
            continue
        kinds = {**LAYOUTS, **(FLOATS if value.is_floating_point() else {})}
        if key == ENTRIES[name].changes:
            del kinds['of inference']
        if name == 'gcn_norm':
            kinds.pop('denormal', None)  # Atomic additions of a GPU flush these to zero.
        if name.startswith('segment_attention') and key == 'value':
            # They make NaN of results of their graph.
            kinds = {kind: change for kind, change in kinds.items() if 'infinit' not in kind}
        for change in kinds.values():
            check(name, {**good, key: change(value)}, {key})
        mixed = {**good, key: value.cpu()}
        # The only tensor brings its device with it.
        alone = not any(isinstance(v, Tensor) for k, v in good.items() if k != key)
        assert check(name, mixed, {key}) == (alone and 'node_map' not in good)
