"""The raw ops: schemas, fake kernels, references, and refusal of whatever does not fit together."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import pad

from pyg_fast.ops._library import fake, fakes, ops, reference
from pyg_fast.ops.groups import groups_of
from pyg_fast.ops.operator import SparseOperator
from pyg_fast.ops.product import raw_product

from ._graphs import DTYPES, GRAPHS, assert_near, exact, random_columns

OPS = [
    'to_csr',
    'to_csr_csc',
    'spmm',
    'spmm_groups',
    'sampled_spmm',
    'sample_edges',
    'quantize_rows',
    'spmm_max',
    'spmm_max_backward_x',
    'spmm_max_backward_x_ordered',
    'spmm_max_backward_value',
    'sddmm',
    'scatter',
    'edge_dot',
    'gcn_degree',
    'gcn_weight',
    'gcn_weight_backward',
    'gcn_scale',
    'maxk',
    'cbsr_to_dense',
    'cbsr_sample',
    'cbsr_spmm',
    'cbsr_spmm_backward',
    'cbsr_spmm_backward_ordered',
    'cbsr_sddmm',
    'expand_rows',
    'node_dropout',
    'head_scores',
    'head_scores_backward',
]
INDEX = [torch.int32, torch.int64]


def sample(
    op: str,
    device: torch.device | str = 'cpu',
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    full: bool = True,
) -> dict[str, object]:
    """Arguments of an op on a square graph of 30 nodes; `full` gives the optional ones too."""
    edges = GRAPHS['square']
    if op.startswith('to_csr'):
        first = dict(edge_index=edges.edge_index.to(device, index), num_src=30, num_dst=30)
        last = dict(index64=index == torch.int64, drop_loops=not full, report=False)
        return {**first, **({'reverse': full} if op == 'to_csr' else {}), **last}
    graph = edges.graph(index, device)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    n, num_edges = 30, graph.num_edges
    perm = graph.perm if full else None
    value = exact(num_edges, dtype=dtype, device=device) if full else None
    a, b = (exact(n, 9, dtype=dtype, device=device) for _ in range(2))
    scales = [torch.rand(n, dtype=acc, device=device) if full else None for _ in range(3)]
    csr = {'rowptr': graph.rowptr, 'col': graph.col, 'perm': perm}
    scaled = dict(zip(('row_scale', 'col_scale', 'diag'), scales, strict=True))
    bias = exact(9, dtype=dtype, device=device) if full else None
    edge_index = edges.edge_index.to(device, index)
    if op == 'scatter':
        return dict(
            edge_index=edge_index, value=value, x=a, **scaled, num_dst=n, reverse=full,
            drop_loops=full, count=full, report=False,
        )  # fmt: skip
    if op == 'edge_dot':
        return dict(
            edge_index=edge_index, a=a, b=b, row_scale=scales[0], col_scale=scales[1],
            drop_loops=full,
        )  # fmt: skip
    if op == 'gcn_scale':
        last = torch.randint(-1, num_edges, (n,), device=device) if full else None
        value = exact(num_edges, dtype=dtype, device=device).abs() + 1
        return dict(
            rowptr=graph.rowptr, perm=perm, value=value, last_loop=last, fill_value=2.0, loops=full
        )  # fmt: skip
    if op.startswith('gcn'):
        positive = None if value is None else value.abs() + 1
        first = dict(
            edge_index=edge_index, edge_weight=positive, num_nodes=n, drop_loops=full, reverse=full
        )  # fmt: skip
        if op == 'gcn_degree':
            return first
        degree, last, _, chunk_loops = reference.gcn_degree(**first)
        before = chunk_loops.cumsum(0) if full else None
        num_kept = int((edge_index[0] != edge_index[1]).sum()) if full else num_edges
        if op == 'gcn_weight_backward':
            grad = exact(num_kept + n if full else num_edges, dtype=dtype, device=device)
            scale, grad_degree = (torch.rand(n, dtype=acc, device=device) for _ in range(2))
            return dict(
                edge_index=edge_index, grad=grad, scale=scale, grad_degree=grad_degree,
                before=before, reverse=full,
            )  # fmt: skip
        return dict(
            edge_index=edge_index, edge_weight=positive, degree=degree.to(acc) if full else degree,
            last=last if full else None, before=before, num_kept=num_kept, loops=full,
            fill_value=2.0, dtype=dtype,
        )  # fmt: skip
    if op.startswith('head_scores'):
        x = exact(n, 3, 5, dtype=dtype, device=device)
        att, grads = (
            [exact(*size, dtype=acc, device=device) if full or k == 0 else None for k in range(2)]
            for size in ((3, 5), (n, 3))
        )
        first = dict(x=x, att_src=att[0], att_dst=att[1])
        if op == 'head_scores':
            return first
        return dict(**first, grad_alpha_src=grads[0], grad_alpha_dst=grads[1])
    if op == 'expand_rows':
        return dict(x=a, position=torch.randint(-1, n, (50,), device=device).to(index), fill=0.5)
    if op == 'node_dropout':
        nodes = torch.randint(1 << 40, (n,), device=device) if full else None
        return dict(x=a, nodes=nodes, seed=torch.tensor([2**40 + 3], device=device), dropout=0.5)
    if op == 'maxk':
        return dict(x=a, k=4, balanced=full)
    if op.startswith('cbsr'):
        values = exact(n, 4, dtype=dtype, device=device)
        columns = random_columns(n, 9, 4, device)
        if op == 'cbsr_to_dense':
            return dict(values=values, columns=columns, dim=9)
        if op == 'cbsr_sample':
            return dict(dense=a, columns=columns)
        if op == 'cbsr_spmm':
            return dict(
                **csr, value=value, values=values, columns=columns, dim=9, **scaled, bias=bias,
                mean=full, out_acc=False,
            )  # fmt: skip
        if op == 'cbsr_spmm_backward':
            return dict(**csr, value=value, grad=a, columns=columns, **scaled, mean=full)
        if op == 'cbsr_spmm_backward_ordered':
            return dict(
                t_rowptr=graph.t_rowptr, t_col=graph.t_col, t_perm=graph.t_perm if full else None,
                value=value, grad=a, columns=columns, **scaled,
            )  # fmt: skip
        return dict(
            **csr, grad=a, values=values, columns=columns, row_scale=scales[0],
            col_scale=scales[1], mean=full, num_values=num_edges,
        )  # fmt: skip
    if op in ('spmm', 'spmm_groups'):
        own = torch.randint(-1, n, (n,), dtype=index, device=device) if full else None
        first = dict(
            **csr, value=value, x=a, **scaled, bias=bias, mean=full, out_acc=False, self_row=own
        )  # fmt: skip
        if op == 'spmm':
            return first
        *parts, atomic = groups_of(graph.rowptr, 3, atomic=full)
        names = ('group_ptr', 'group_row', 'long_row', 'long_ptr', 'long_shift', 'num_partials')
        groups = dict(zip((*names, 'group_size'), parts, strict=True))
        return dict(**first, **groups, atomic=atomic)
    seed = torch.tensor([2**40 + 3], device=device) if full else None
    sampling = dict(num_samples=4, strategy=2 if full else 1, seed=seed)
    if op == 'sampled_spmm':
        return dict(
            **csr, value=value, x=a, **scaled, bias=bias, mean=not full, out_acc=False, **sampling
        )  # fmt: skip
    if op == 'sample_edges':
        sampled_rowptr = pad(graph.rowptr.diff().clamp(max=4).cumsum(0), (1, 0)).to(index)
        return dict(**csr, sampled_rowptr=sampled_rowptr, num_slots=4 * n, **sampling)
    if op == 'quantize_rows':
        return dict(x=a)
    if op == 'spmm_max':
        return dict(**csr, value=value, x=a, minimum=not full)
    if op == 'sddmm':
        return dict(
            **csr, a=a, b=b, row_scale=scales[0], col_scale=scales[1], mean=full,
            num_values=num_edges,
        )  # fmt: skip
    arg = reference.spmm_max(*csr.values(), value, a, False)[1]
    if op == 'spmm_max_backward_value':
        return dict(**csr, arg=arg, grad=b, x=a, num_values=num_edges)
    common = dict(**csr, value=value, arg=arg, grad=b)
    if op == 'spmm_max_backward_x':
        return dict(**common, num_cols=n)
    position = torch.empty_like(graph.perm)  # of each edge of the transpose in `col`
    position[graph.perm.long()] = torch.arange(num_edges, dtype=index, device=device)
    position = position[graph.t_perm.long()]
    return dict(**common, t_rowptr=graph.t_rowptr, t_col=graph.t_col, t_position=position)


@pytest.mark.parametrize('op', OPS)
def test_signature_is_that_of_the_reference(op: str) -> None:
    schema = getattr(torch.ops.pyg_fast, op).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == list(inspect.signature(getattr(reference, op)).parameters) == list(sample(op))


def test_every_op_is_here() -> None:
    names = {name.split('::')[1] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith('pyg_fast::')}  # fmt: skip
    in_files_of_their_own = {
        'gat', 'gat_backward', 'gatv2', 'gatv2_backward', 'count_outside', 'rabbit_order',
        'sample_transposed', 'begin_sample', 'sample_counts', 'sample_neighbors', 'append_nodes',
        'take_sample', 'count_induced', 'induced_edges', 'relabel',
        'match', 'match_degree', 'fetch_rows', 'random_walk', 'visited_neighbors',
    }  # fmt: skip
    assert names == {*OPS, 'with_cuda', 'error_record', *in_files_of_their_own}


def test_every_op_has_a_fake_kernel() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in vars(ops):
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


CBSR_BACKWARD = ('cbsr_spmm_backward', 'cbsr_spmm_backward_ordered')
# These make another graph, or features of another width.
STILL_FITS = {
    *(('spmm_max', 'rowptr', kind) for kind in ('shorter', 'longer')),
    *(('spmm_max', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'narrower')),
    *(('spmm_max_backward_value', 'x', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('spmm_max_backward_x_ordered', 't_rowptr', kind) for kind in ('shorter', 'longer')),
    *(
        (op, 'edge_index', 'other type')
        for op in ('to_csr', 'to_csr_csc', 'scatter', 'edge_dot', 'gcn_degree', 'gcn_weight')
    ),
    *(('gcn_weight_backward', 'edge_index', kind) for kind in ('other type', 'narrower')),
    *(('gcn_scale', 'perm', kind) for kind in ('shorter', 'empty')),  # of fewer edges
    ('gcn_scale', 'value', 'other type'),
    # Fewer or more edges of all that are no loops.
    *(('gcn_weight_backward', 'grad', kind) for kind in ('shorter', 'longer', 'other type')),
    *((op, 'edge_index', 'narrower') for op in ('to_csr', 'to_csr_csc')),
    *(('scatter', 'x', 'narrower'), ('scatter', 'x', 'other type')),
    *(('edge_dot', 'edge_index', 'narrower'), ('gcn_degree', 'edge_weight', 'other type')),
    *(('maxk', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'narrower', 'other device')),
    *(('maxk', 'x', 'other type'), ('cbsr_to_dense', 'values', 'other type')),
    *(
        ('cbsr_sample', 'dense', 'other type'),
        *((op, 'grad', 'other type') for op in CBSR_BACKWARD),
    ),
    # Fewer entries of each row, or columns that are out of range, which nobody looks for here.
    *((op, 'columns', 'narrower') for op in ('cbsr_sample', *CBSR_BACKWARD)),
    *((op, 'grad', 'narrower') for op in (*CBSR_BACKWARD, 'cbsr_sddmm')),
    ('cbsr_sample', 'dense', 'narrower'),
    *(('head_scores', 'x', kind) for kind in ('shorter', 'longer', 'empty', 'other type')),
    ('head_scores_backward', 'x', 'other type'),
    *(('expand_rows', 'x', kind) for kind in ('shorter', 'longer', 'narrower', 'other type')),
    *(('expand_rows', 'x', 'empty'), ('expand_rows', 'position', 'other type')),
    *(('expand_rows', 'position', kind) for kind in ('shorter', 'longer', 'empty')),
    *(('node_dropout', 'x', kind) for kind in ('narrower', 'other type')),
    *(('quantize_rows', 'x', kind) for kind in ('shorter', 'longer', 'narrower', 'other type')),
    *(('quantize_rows', 'x', kind) for kind in ('empty', 'other device')),
    *((op, 'edge_index', 'other device') for op in ('to_csr', 'to_csr_csc')),
}


def spoiled(name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield 'more dimensions', t[None]
    yield 'no dimensions', t.flatten()[0]
    yield 'empty', t[:0]
    yield 'complex', t.to(torch.complex64)
    yield 'bool', t.bool()
    yield 'other type', t.to(torch.int64 if t.dtype == torch.int32 else torch.float16)
    yield 'shorter', t[:-1]
    if name != 'value':  # which may hold what no edge names
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
    few = {'quantize_rows': 3, **dict.fromkeys(('maxk', 'expand_rows', 'to_csr', 'to_csr_csc'), 4)}
    assert len(bad) >= few.get(op, 10)
    for name, kind, tensor in bad:
        try:
            run(*{**good, name: tensor}.values())
        except RuntimeError:
            continue
        pytest.fail(f'{op} took {name!r} with {kind}')


@pytest.mark.parametrize('op', [op for op in OPS if op != 'sample_edges'])  # which has none
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
            for op in ('to_csr', 'to_csr_csc')
            for name in ('num_src', 'num_dst')
            for number in (-1, 2**31, 2**33)  # more than int32 counts
        ),
        ('spmm_max_backward_x', 'num_cols', -1),
        ('spmm_max_backward_value', 'num_values', 199),
        ('spmm_max_backward_value', 'num_values', -1),
        ('spmm_groups', 'group_size', 0),
        ('spmm_groups', 'num_partials', -1),
        ('spmm_groups', 'num_partials', 10_000),
        *(
            (op, name, number)
            for op in ('sampled_spmm', 'sample_edges')
            for name, number in (('num_samples', 0), ('num_samples', 4097), ('strategy', 4))
        ),
        ('sample_edges', 'num_slots', -1),
        ('sddmm', 'num_values', 199),
        ('sddmm', 'num_values', -1),
        ('cbsr_sddmm', 'num_values', 199),
        ('cbsr_sddmm', 'num_values', -1),
        ('scatter', 'num_dst', -1),
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


@pytest.mark.parametrize('op', [op for op in OPS if 'mm' in op])
def test_graph_must_be_contiguous(device: torch.device, op: str) -> None:
    good = sample(op, device)
    t = '' if 'rowptr' in good else 't_'
    for name in (f'{t}rowptr', f'{t}col', f'{t}perm'):
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
        lambda: ops.sampled_spmm(
            *csr, None, x, *none, diag, None, False, False, 4, 1, None
        ),
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
