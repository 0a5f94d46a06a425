"""The raw ops: schemas, fake kernels, references, and refusal of arguments that do not fit."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from _raw_ops import OF_PYTHON, fake, fakes, op_names, ops, reference
from torch import Tensor
from torch._subclasses import FakeTensorMode

import pyg_fast.message._compiled_op  # which registers its ops
import pyg_fast.message._cpu  # noqa: F401 (the fake kernel of its op)
from pyg_fast.ops.product import raw_product
from pyg_fast.sparse.operator import SparseOperator

from ._graphs import DTYPES, GRAPHS, assert_near, exact, random_columns
from ._samples import Given, samples

SAMPLES = samples()
OPS = list(SAMPLES)
INDEX = [torch.int32, torch.int64]


def sample(
    op: str,
    device: torch.device | str = 'cpu',
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    full: bool = True,
) -> dict[str, object]:
    """Arguments of an op; `full` gives the optional ones too."""
    return SAMPLES[op](Given(device, dtype, index, full))


@pytest.mark.parametrize('op', OPS)
def test_signature_is_that_of_the_reference(op: str) -> None:
    schema = getattr(torch.ops.pyg_fast, op).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == list(inspect.signature(getattr(reference, op)).parameters) == list(sample(op))


def test_every_op_is_here() -> None:
    in_files_of_their_own = {
        'gat', 'gat_backward', 'gatv2', 'gatv2_backward', 'count_outside', 'rabbit_order',
        'sample_transposed', 'begin_sample', 'sample_counts', 'sample_neighbors', 'append_nodes',
        'take_sample', 'begin_typed', 'typed_counts', 'typed_neighbors', 'append_typed',
        'take_typed', 'count_induced', 'induced_edges', 'relabel',
        'match', 'match_degree', 'gather_rows', 'take_rows', 'join_edges', 'random_walk',
        'pinsage_neighbors', 'message_pass', 'message', 'message_backward', 'note_outside',
        'segment_attention', 'segment_attention_backward',
    }  # fmt: skip
    assert op_names() == {*OPS, 'with_cuda', 'error_record', *in_files_of_their_own}


def test_every_op_has_a_fake_kernel() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in op_names() - OF_PYTHON:
        schema = getattr(torch.ops.pyg_fast, name).default._schema
        kinds = {str(a.type) for a in (*schema.arguments, *schema.returns)}
        # An op without tensors has nothing to fake.
        assert has_kernel(f'pyg_fast::{name}', 'Meta') == any('Tensor' in kind for kind in kinds)
        assert has_kernel(f'pyg_fast::{name}', 'Meta') == (name in fakes)


def test_fake_kernel_reads_arguments_of_its_op() -> None:
    with pytest.raises(ValueError, match='features'):
        fake('maxk')(lambda features: features)


@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('full', [False, True])
def test_opcheck(device: torch.device, op: str, full: bool) -> None:
    args = tuple(sample(op, device, full=full).values())
    torch.library.opcheck(getattr(torch.ops.pyg_fast, op).default, args)


@pytest.mark.parametrize('op', OPS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', INDEX)
@pytest.mark.parametrize('full', [False, True])
def test_reference_and_fake_kernel(
    device: torch.device, op: str, dtype: torch.dtype, index: torch.dtype, full: bool
) -> None:
    kwargs = sample(op, device, dtype, index, full)
    variants = [kwargs]
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    if 'out_acc' in kwargs:
        bias = None if kwargs['bias'] is None else kwargs['bias'].to(acc)
        variants += [{**kwargs, 'out_acc': True, 'bias': bias}]
    if 'value' in kwargs and 'max' not in op:
        value = None if kwargs['value'] is None else kwargs['value'].to(acc)
        variants += [{**kwargs, 'value': value}]
    for kwargs in variants:
        actual = getattr(ops, op)(*kwargs.values())
        expected = getattr(reference, op)(*kwargs.values())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = (mode.from_tensor(v) if isinstance(v, Tensor) else v for v in kwargs.values())
            fake = getattr(ops, op)(*fakes)
        absolute = {
            k: v.abs() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in kwargs.items()
        }
        magnitude = getattr(reference, op)(*absolute.values())
        if isinstance(actual, Tensor):
            actual, expected, fake, magnitude = (actual,), (expected,), (fake,), (magnitude,)
        for a, e, f, m in zip(actual, expected, fake, magnitude, strict=True):
            assert (a.shape, a.dtype, a.device) == (f.shape, f.dtype, f.device)
            assert a.stride() == f.stride()
            if op == 'maxk':  # whose kernel has an order of its own
                a = a.gather(1, actual[1].long().argsort(1))
            if a.is_floating_point():
                assert_near(a, e, m, 200)
            else:
                assert torch.equal(a, e)


@pytest.mark.parametrize('value', [False, True])
@pytest.mark.parametrize('name', ['square', 'in_hubs'])
def test_backward_of_max_is_that_of_autograd(value: bool, name: str) -> None:
    edges = GRAPHS[name]
    graph = edges.graph()
    x = exact(edges.num_src, 7, dtype=torch.float64).requires_grad_()
    w = exact(graph.num_edges, dtype=torch.float64).requires_grad_() if value else None
    out, arg = reference.spmm_max(*graph[:3], w, x, False)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, w) if value else (x,), grad)
    expected = reference.spmm_max_backward_x(*graph[:3], w, arg, grad, edges.num_src)
    torch.testing.assert_close(grads[0], expected)
    if value:
        expected = reference.spmm_max_backward_value(*graph[:3], arg, grad, x, graph.num_edges)
        torch.testing.assert_close(grads[1], expected)


SORTS = ('to_csr', 'to_csr_csc', 'to_csr_unweighted')
CBSR_BACKWARD = ('cbsr_spmm_backward', 'cbsr_spmm_backward_ordered')
# These make another graph, or features of another width.
STILL_FITS = {
    *(('spmm_max', 'rowptr', kind) for kind in ('shorter', 'longer')),
    *(('spmm_max', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'narrower')),
    *(('spmm_var', 'rowptr', kind) for kind in ('shorter', 'longer', 'other type')),
    *(('spmm_var', 'col', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('spmm_var', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'narrower', 'other type')),
    *(('spmm_max_backward_value', 'x', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('spmm_max_backward_x_ordered', 't_rowptr', kind) for kind in ('shorter', 'longer')),
    *(
        (op, 'edge_index', 'other type')
        for op in (*SORTS, 'spmm_coo', 'sddmm_coo', 'gcn_degree', 'gcn_weight')
    ),
    *(('gcn_weight_backward', 'edge_index', kind) for kind in ('other type', 'narrower')),
    *(('gcn_scale', 'perm', kind) for kind in ('shorter', 'empty')),  # of fewer edges
    ('gcn_scale', 'value', 'other type'),
    # Fewer or more edges of all that are no loops.
    *(('gcn_weight_backward', 'grad', kind) for kind in ('shorter', 'longer', 'other type')),
    *((op, 'edge_index', 'narrower') for op in SORTS),
    *(('spmm_coo', 'x', 'narrower'), ('spmm_coo', 'x', 'other type')),
    *(('sddmm_coo', 'edge_index', 'narrower'), ('gcn_degree', 'edge_weight', 'other type')),
    *(('maxk', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'narrower', 'other device')),
    *(('maxk', 'x', 'other type'), ('cbsr_to_dense', 'values', 'other type')),
    *(
        ('cbsr_sample', 'dense', 'other type'),
        *((op, 'grad', 'other type') for op in CBSR_BACKWARD),
    ),
    # Fewer entries of each row, or columns out of range, which these ops do not check.
    *((op, 'columns', 'narrower') for op in ('cbsr_sample', *CBSR_BACKWARD)),
    *((op, 'grad', 'narrower') for op in (*CBSR_BACKWARD, 'cbsr_sddmm')),
    ('cbsr_sample', 'dense', 'narrower'),
    *(('attention_scores', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'other type')),
    ('attention_scores_backward', 'x', 'other type'),
    *(('expand_rows', 'x', kind) for kind in ('shorter', 'longer', 'narrower', 'other type')),
    *(('expand_rows', 'x', 'empty'), ('expand_rows', 'position', 'other type')),
    *(('expand_rows', 'position', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('node_dropout', 'x', kind) for kind in ('narrower', 'other type')),
    *(('quantize_rows', 'x', kind) for kind in ('shorter', 'longer', 'narrower', 'other type')),
    *(('quantize_rows', 'x', kind) for kind in ('empty', 'other device')),
    *(('column_sums', 'x', kind) for kind in ('shorter', 'longer', 'narrower', 'other type')),
    *(('column_sums', 'x', kind) for kind in ('empty', 'other device')),
    *((op, 'edge_index', 'other device') for op in SORTS),
    *(
        (op, 'rowptr', kind)
        for op in ('transpose_csr', 'csr_rows')
        for kind in ('shorter', 'longer', 'other type')
    ),
    ('csr_rows', 'rowptr', 'other device'),
    *(('transpose_csr', 'col', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('count_groups', 'rowptr', kind) for kind in ('shorter', 'longer', 'other type')),
    *(('count_groups', 'rowptr', 'other device'), ('group_edges', 'rowptr', 'other type')),
}
OF_INTEGERS = (
    'sample_edges',
    'count_groups',
    'group_edges',
    'order_groups',
    'transpose_csr',
    'csr_rows',
)


def spoiled(name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield 'more dimensions', t[None]
    yield 'no dimensions', t.flatten()[0]
    yield 'empty', t[:0]
    yield 'complex', t.to(torch.complex64)
    yield 'bool', t.bool()
    yield 'other type', t.to(torch.int64 if t.dtype == torch.int32 else torch.float16)
    yield 'shorter', t[:-1]
    if name != 'value':  # which may hold weights of no edge
        yield 'longer', torch.cat([t, t[-1:]])
    if t.dim() == 2:
        yield 'narrower', t[:, 1:]
    if t.is_cuda:
        yield 'other device', t.cpu()


@pytest.mark.parametrize('op', OPS)
def test_tensors_that_do_not_fit(device: torch.device, op: str) -> None:
    run, good = getattr(ops, op), sample(op, device)
    run(*good.values())
    bad = [
        (name, kind, tensor)
        for name, value in good.items()
        if isinstance(value, Tensor)
        for kind, tensor in spoiled(name, value)
        if (op, name, kind) not in STILL_FITS
    ]
    fours = ('maxk', 'expand_rows', *SORTS, 'count_groups', 'csr_rows')
    few = {'quantize_rows': 3, 'column_sums': 3, **dict.fromkeys(fours, 4)}
    assert len(bad) >= few.get(op, 10)
    for name, kind, tensor in bad:
        try:
            run(*{**good, name: tensor}.values())
        except RuntimeError:
            continue
        pytest.fail(f'{op} took {name!r} with {kind}')


@pytest.mark.parametrize('op', [op for op in OPS if op not in OF_INTEGERS])
def test_types_of_values_that_are_not_supported(device: torch.device, op: str) -> None:
    good = sample(op, device)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2):
        bad = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in good.items()
        }
        if op.startswith('to_csr'):
            bad['edge_index'] = good['edge_index'].to(torch.float32)
        with pytest.raises(RuntimeError):
            getattr(ops, op)(*bad.values())


@pytest.mark.parametrize(
    ('op', 'name', 'number'),
    [
        *(
            (op, name, number)
            for op in SORTS
            for name in ('num_src', 'num_dst')
            for number in (-1, 2**31, 2**33)  # more than int32 counts
        ),
        ('transpose_csr', 'num_cols', -1),
        ('transpose_csr', 'num_cols', 2**31),
        ('csr_rows', 'begin', -1),
        ('csr_rows', 'end', -1),
        ('spmm_max_backward_x', 'num_cols', -1),
        ('spmm_max_backward_value', 'num_values', 199),
        ('spmm_max_backward_value', 'num_values', -1),
        ('spmm_groups', 'group_size', 0),
        ('spmm_groups', 'num_partials', -1),
        ('spmm_groups', 'num_partials', 10_000),
        *(
            (op, name, number)
            for op in ('sampled_spmm', 'sample_edges')
            for name, number in (('num_samples', 0), ('num_samples', 4097), ('strategy', 5))
        ),
        ('sample_edges', 'num_slots', -1),
        ('sddmm', 'num_values', 199),
        ('sddmm', 'num_values', -1),
        ('cbsr_sddmm', 'num_values', 199),
        ('cbsr_sddmm', 'num_values', -1),
        ('spmm_coo', 'num_dst', -1),
        ('gcn_degree', 'num_nodes', -1),
        *(('gcn_weight', 'num_kept', number) for number in (-1, 5000)),
        ('maxk', 'k', 0),
        ('maxk', 'k', -1),
        ('maxk', 'k', 10),
        ('maxk', 'k', 2**62),
        *(
            (op, 'dim', number)
            for op in ('cbsr_to_dense', 'cbsr_spmm')
            for number in (-1, 3, 257, 65537)  # below k, or of wider columns
        ),
    ],
)
@pytest.mark.parametrize('full', [False, True])
def test_numbers_that_do_not_fit(
    device: torch.device, op: str, name: str, number: int, full: bool
) -> None:
    kwargs = {**sample(op, device, full=full), name: number}
    with pytest.raises(RuntimeError):
        getattr(ops, op)(*kwargs.values())


@pytest.mark.parametrize('op', [op for op in OPS if 'mm' in op and 'coo' not in op])
def test_graph_must_be_contiguous(device: torch.device, op: str) -> None:
    good = sample(op, device)
    t = '' if 'rowptr' in good else 't_'
    for name in good.keys() & {f'{t}rowptr', f'{t}col', f'{t}perm'}:
        strided = good[name].repeat_interleave(2)[::2]
        with pytest.raises(RuntimeError, match='contiguous'):
            getattr(ops, op)(*{**good, name: strided}.values())


def test_diag_needs_a_square_graph(device: torch.device) -> None:
    graph = GRAPHS['tall'].graph(device=device)
    x, grad = torch.rand(9, 4, device=device), torch.rand(70, 4, device=device)
    columns = random_columns(9, 4, 4, device)
    none, csr, t_csr = (None, None), graph[:3], graph[3:6]
    diag = grad[:, 0].contiguous()
    t_diag = x[:, 0].contiguous()
    for run in (
        lambda: ops.spmm(*csr, None, x, *none, diag, None, False, False),
        lambda: raw_product(SparseOperator(graph.with_groups(3), diag=diag), x),
        lambda: ops.sampled_spmm(*csr, None, x, *none, diag, None, False, False, 4, 1, None),
        lambda: ops.cbsr_spmm(*csr, None, x, columns, 4, *none, diag, None, False, False),
        lambda: ops.cbsr_spmm_backward(*csr, None, grad, columns, *none, diag, False),
        lambda: ops.cbsr_spmm_backward_ordered(*t_csr, None, grad, columns, *none, t_diag),
    ):
        with pytest.raises(RuntimeError, match='square'):
            run()


def test_counts_of_invalid_edges(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 0, 9, 0, 2, 1], [0, 5, 1, -1, 2, 2]], device=device)
    for drop in (False, True):
        for reverse in (False, True):
            actual = ops.to_csr(edge_index, 3, 3, reverse, False, drop)
            expected = reference.to_csr(edge_index, 3, 3, reverse, False, drop)
            assert all(map(torch.equal, actual, expected))
            assert int(actual[3]) == 3
        actual = ops.to_csr_csc(edge_index, 3, 3, False, drop)
        expected = reference.to_csr_csc(edge_index, 3, 3, False, drop)
        assert all(map(torch.equal, actual, expected))
        assert int(actual[6]) == 3


@pytest.mark.parametrize('op', ['cbsr_to_dense', 'cbsr_sample', 'cbsr_spmm', 'cbsr_sddmm'])
def test_rows_without_entries_are_refused(device: torch.device, op: str) -> None:
    kwargs = sample(op, device)
    cut = {k: v[:, :0] for k, v in kwargs.items() if k in ('values', 'columns')}
    with pytest.raises(RuntimeError, match='columns must be 1 to'):
        getattr(ops, op)(*{**kwargs, **cut}.values())
