"""A check of every op on one device against plain torch, in a few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from . import ops
from .attention import _composed
from .graph.graph import graph_of
from .ops._library import reference
from .ops.spmm_var import reduce_var
from .sparse.operator import SparseOperator, inverse_degree

NUM_NODES, WIDTH, HEADS, SEED = 120, 24, 3, 7
# bfloat16 also covers float16: both sum in float32 and round at the end.
DTYPES = (torch.float32, torch.bfloat16)


class Outcome(NamedTuple):
    """The result of the check of one op; :obj:`error` is :obj:`None` if it passed."""

    op: str
    error: str | None


def self_test(device: torch.device | str) -> Iterator[Outcome]:
    """Checks the results and gradients of each op on a device."""
    for name, check in CHECKS.items():
        error = None
        try:
            check(torch.device(device))
        except Exception as e:
            error = ' '.join(f'{type(e).__name__}: {e}'.split())
        yield Outcome(name, error)


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _edges() -> Tensor:
    """Random edges with self-loops, duplicates, and a node with so many edges that kernels split
    its row; the last nodes have no edges."""
    edges = torch.randint(NUM_NODES - 5, (2, 900), generator=_random())
    hub = torch.randint(NUM_NODES - 5, (600,), generator=_random())
    return torch.cat([edges, torch.stack([hub, torch.full_like(hub, 3)])], 1)


def _csr() -> tuple[Tensor, Tensor, Tensor]:
    return reference.to_csr(_edges(), NUM_NODES, NUM_NODES, False, False, False)[:3]


def _numbers(*size: int, seed: int = SEED) -> Tensor:
    """Numbers that every dtype represents exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, size, generator=generator) / 16


def _same(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raises unless both are equal."""
    actual, expected = actual.cpu(), expected.cpu()
    if actual.shape != expected.shape:
        raise AssertionError(f'{what} has shape {list(actual.shape)}, not {list(expected.shape)}')
    if not torch.equal(actual.long(), expected.long()):
        wrong = int((actual.long() != expected.long()).sum())
        raise AssertionError(f'{what} is wrong in {wrong} of {expected.numel()} places')


def _near(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raises unless both are equal up to rounding."""
    if actual.shape != expected.shape:
        raise AssertionError(f'{what} has shape {list(actual.shape)}, not {list(expected.shape)}')
    scale = 1 + expected.abs().max()
    error = float((actual.detach().cpu().double() - expected).abs().max() / scale)
    allowed = 2 * torch.finfo(actual.dtype).eps + 64 * torch.finfo(torch.float32).eps
    if not error <= allowed:  # also for NaN
        raise AssertionError(f'{what} is off by {error:.1e}, allowed are {allowed:.1e}')


def _compare(
    device: torch.device,
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    what: str = 'result',
    **inputs: Tensor,
) -> None:
    """Compares result and gradients of an op with those of its reference in float64."""
    for dtype in DTYPES:
        theirs = {name: t.double().requires_grad_() for name, t in inputs.items()}
        ours = {name: t.clone().to(device, dtype).requires_grad_() for name, t in inputs.items()}
        expected, out = reference(**theirs), fast(**ours)
        name = f'{what} ({str(dtype).removeprefix("torch.")})'
        _near(name, out, expected.detach())
        grad = _numbers(*expected.shape, seed=SEED + 1)
        grads = torch.autograd.grad(out, list(ours.values()), grad.to(device, out.dtype))
        wanted = torch.autograd.grad(expected, list(theirs.values()), grad.double())
        for of, actual, g in zip(inputs, grads, wanted, strict=True):
            _near(f'gradient of {of}, {name}', actual, g)


def _check_to_csr(device: torch.device) -> None:
    edges = _edges()
    for by in ('dst', 'src'):
        actual = ops.to_csr(edges.to(device), NUM_NODES, NUM_NODES, by=by)
        expected = reference.to_csr(edges, NUM_NODES, NUM_NODES, by == 'src', False, False)
        for name, a, e in zip(('rowptr', 'col', 'perm'), actual, expected, strict=False):
            _same(f'{name} by {by}', a, e)


def _check_spmm(device: torch.device) -> None:
    graph, csr = graph_of(_edges().to(device), NUM_NODES, NUM_NODES), _csr()
    x, weight = _numbers(NUM_NODES, WIDTH), _numbers(csr[1].size(0))
    for reduce in ('sum', 'mean'):
        _compare(
            device,
            lambda x, weight, reduce=reduce: ops.spmm(graph, x, weight, reduce),
            lambda x, weight, reduce=reduce: reference.spmm(
                *csr, weight, x, mean=reduce == 'mean'
            ),
            reduce, x=x, weight=weight,
        )  # fmt: skip
    for reduce in ('max', 'min'):
        _compare(
            device,
            lambda x, weight, reduce=reduce: ops.spmm(graph, x, weight, reduce),
            lambda x, weight, reduce=reduce: reference.spmm_max(
                *csr, weight, x, reduce == 'min'
            )[0],
            reduce, x=x, weight=weight,
        )  # fmt: skip
    means = SparseOperator(graph, row_scale=inverse_degree(graph.rowptr, torch.float32))
    _compare(
        device, lambda x: reduce_var(means, x)[0], lambda x: reference.spmm_var(*csr[:2], x)[0],
        'variance', x=x,
    )  # fmt: skip


def _check_message_passing(device: torch.device) -> None:
    edges = _edges()
    graph = graph_of(edges.to(device), NUM_NODES, NUM_NODES)

    def gate(q: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(q + k) * q

    def expected(q: Tensor, k: Tensor) -> Tensor:
        message = gate(q[edges[0]], k[edges[1]])
        return q.new_zeros(NUM_NODES, WIDTH).index_add(0, edges[1], message)

    _compare(
        device,
        lambda q, k: ops.message_passing(graph, gate, src={'q': q}, dst={'k': k}, strict=True),
        expected, 'sum', q=_numbers(NUM_NODES, WIDTH), k=_numbers(NUM_NODES, WIDTH, seed=1),
    )  # fmt: skip


def _check_aggregate(device: torch.device) -> None:
    edges, csr = _edges(), _csr()
    for mode in ('scatter', 'reduce'):
        _compare(
            device,
            lambda x, weight, mode=mode: ops.aggregate(edges.to(device), x, weight, mode),
            lambda x, weight: reference.spmm(*csr, weight, x),
            mode, x=_numbers(NUM_NODES, WIDTH), weight=_numbers(edges.size(1)),
        )  # fmt: skip


def _check_gcn_norm(device: torch.device) -> None:
    edges = _edges()
    index, _ = ops.gcn_norm(edges.to(device), num_nodes=NUM_NODES)
    _same('edge_index', index, pyg_gcn_norm(edges, None, NUM_NODES)[0])
    _compare(
        device,
        lambda weight: ops.gcn_norm(edges.to(device), weight, NUM_NODES)[1],
        lambda weight: pyg_gcn_norm(edges, weight, NUM_NODES)[1],
        'edge_weight', weight=_numbers(edges.size(1)).abs() + 0.5,
    )  # fmt: skip


def _check_gat(device: torch.device) -> None:
    graph, csr = graph_of(_edges().to(device), NUM_NODES, NUM_NODES), _csr()
    seed = torch.tensor([SEED])
    scores = {
        name: _numbers(size, HEADS, seed=k)
        for k, (name, size) in enumerate(
            [('alpha_src', NUM_NODES), ('alpha_dst', NUM_NODES), ('alpha_edge', csr[1].size(0))]
        )
    }
    for dropout in (0.0, 0.5):
        _compare(
            device,
            lambda dropout=dropout, **t: ops.gat(
                graph, **t, dropout=dropout, seed=seed.to(device)
            ),
            lambda x, alpha_src, alpha_dst, alpha_edge, dropout=dropout: reference.gat(
                *csr, x, alpha_src, alpha_dst, alpha_edge, None, None, seed, 0, 0.2, dropout,
                True, False,
            )[0],
            f'dropout {dropout}', x=_numbers(NUM_NODES, HEADS, 8), **scores,
        )  # fmt: skip


def _check_gatv2(device: torch.device) -> None:
    graph, csr = graph_of(_edges().to(device), NUM_NODES, NUM_NODES), _csr()
    seed = torch.tensor([SEED])
    for dropout in (0.0, 0.5):
        _compare(
            device,
            lambda dropout=dropout, **t: ops.gatv2(
                graph, **t, dropout=dropout, seed=seed.to(device)
            ),
            lambda x_src, x_dst, att, dropout=dropout: reference.gatv2(
                *csr, x_src, x_dst, att, None, seed, 0, 0.2, dropout, True, False
            )[0],
            f'dropout {dropout}', x_src=_numbers(NUM_NODES, HEADS, 8),
            # No sum of both is zero, where the leaky ReLU is not differentiable.
            x_dst=_numbers(NUM_NODES, HEADS, 8, seed=1) + 1 / 32, att=_numbers(HEADS, 8),
        )  # fmt: skip


def _check_segment_attention(device: torch.device) -> None:
    batch = torch.arange(NUM_NODES).square() // 600  # Graphs of 3 to 25 nodes.
    seed = torch.tensor([SEED])
    for dropout in (0.0, 0.5):
        _compare(
            device,
            lambda dropout=dropout, **t: ops.segment_attention(
                **t, batch=batch.to(device), dropout_p=dropout, seed=seed.to(device)
            ),
            lambda query, key, value, dropout=dropout: _composed.attend(
                query, key, value, batch, seed if dropout else None, dropout, 8**-0.5
            ),
            f'dropout {dropout}',
            **{name: _numbers(NUM_NODES, HEADS, 8, seed=k)
               for k, name in enumerate(('query', 'key', 'value'))},
        )  # fmt: skip


def _check_maxk(device: torch.device) -> None:
    for balanced in (False, True):
        _compare(
            device,
            lambda x, balanced=balanced: ops.maxk(x, 5, balanced).to_dense(),
            lambda x, balanced=balanced: reference.cbsr_to_dense(
                *reference.maxk(x, 5, balanced), WIDTH
            ),
            f'balanced={balanced}', x=_numbers(NUM_NODES, WIDTH),
        )  # fmt: skip


def _check_cbsr(device: torch.device) -> None:
    columns = reference.maxk(_numbers(NUM_NODES, WIDTH), 5, False)[1]
    _compare(
        device,
        lambda values: ops.CBSR(values, columns.to(device), WIDTH).to_dense(),
        lambda values: reference.cbsr_to_dense(values, columns, WIDTH),
        'to_dense', values=_numbers(NUM_NODES, 5),
    )  # fmt: skip
    dense = _numbers(NUM_NODES, WIDTH)
    restored = ops.CBSR.from_dense(dense.to(device)).to_dense()
    _near('from_dense', restored, dense.double())


def _check_cbsr_spmm(device: torch.device) -> None:
    graph, csr = graph_of(_edges().to(device), NUM_NODES, NUM_NODES), _csr()
    columns = reference.maxk(_numbers(NUM_NODES, WIDTH), 5, False)[1]
    for reduce in ('sum', 'mean'):
        _compare(
            device,
            lambda values, weight, reduce=reduce: ops.cbsr_spmm(
                graph, ops.CBSR(values, columns.to(device), WIDTH), weight, reduce
            ),
            lambda values, weight, reduce=reduce: reference.cbsr_spmm(
                *csr, weight, values, columns, WIDTH, mean=reduce == 'mean'
            ),
            reduce, values=_numbers(NUM_NODES, 5), weight=_numbers(csr[1].size(0)),
        )  # fmt: skip


def _check_sampled_spmm(device: torch.device) -> None:
    graph, csr = graph_of(_edges().to(device), NUM_NODES, NUM_NODES), _csr()
    x, weight = _numbers(NUM_NODES, WIDTH), _numbers(csr[1].size(0))
    for code, strategy in enumerate(('bucket', 'fastrand', 'unbiased', 'paper', 'adaptive')):
        _compare(
            device,
            lambda x, weight, strategy=strategy: ops.sampled_spmm(
                graph, x, 6, strategy, weight, seed=SEED
            ),
            lambda x, weight, code=code: reference.sampled_spmm(
                *csr, weight, x, None, None, None, None, False, False, 6, code,
                torch.tensor([SEED]),
            ),
            strategy, x=x, weight=weight,
        )  # fmt: skip
    small, scale = reference.quantize_rows(x)
    rounded = small.double() * scale.view(-1, 1).double()
    expected = reference.sampled_spmm(
        *csr, weight, rounded, None, None, None, None, False, False, 6, 1, None
    )
    out = ops.sampled_spmm(graph, x.to(device), 6, edge_weight=weight.to(device), quantize=True)
    _near('quantized', out, expected)


def _check_neighbor_sample(device: torch.device) -> None:
    (rowptr, col, perm), seeds = _csr(), torch.tensor([3, 0, 50, 3])
    edge_weight = _numbers(col.size(0)).abs()
    for name, weight, replace, induced in (
        ('uniform', None, False, False), ('replace', None, True, False),
        ('weighted', edge_weight, False, False), ('induced', None, False, True),
    ):  # fmt: skip
        out = ops.neighbor_sample(
            rowptr.to(device), col.to(device), seeds.to(device), [4, 2], perm=perm.to(device),
            edge_weight=None if weight is None else weight.to(device), replace=replace,
            induced=induced, seed=SEED,
        )  # fmt: skip
        n_id, edge_index, at, nodes, edges = reference.neighbor_sample(
            rowptr, col, seeds, [4, 2], weight, replace, induced, SEED
        )
        _same(f'n_id ({name})', out.n_id, n_id)
        _same(f'edge_index ({name})', out.edge_index, edge_index)
        _same(f'e_id ({name})', out.e_id, perm[at])
        _same(f'num_sampled_nodes ({name})', *map(torch.tensor, (out.num_sampled_nodes, nodes)))
        if out.num_sampled_edges is not None:
            counts = torch.tensor(out.num_sampled_edges)
            _same(f'num_sampled_edges ({name})', counts, torch.tensor(edges))


def _check_relabel(device: torch.device) -> None:
    ids = torch.randint(NUM_NODES, (200,), generator=_random())
    actual, expected = ops.relabel(ids.to(device), NUM_NODES), reference.relabel(ids)
    for name, a, e in zip(('n_id', 'local'), actual, expected, strict=True):
        _same(name, a, e)


def _check_match(device: torch.device) -> None:
    n_id, previous = (torch.randperm(NUM_NODES, generator=_random())[k:][:70] for k in (0, 40))
    expected = reference.match(n_id, previous, torch.empty(0), 0, NUM_NODES)
    _same('result', ops.match(n_id.to(device), previous.to(device), NUM_NODES), expected)


def _check_match_degree(device: torch.device) -> None:
    order = torch.randperm(NUM_NODES, generator=_random())
    batches = [order[:70], order[40:], order[10:20]]
    out = ops.match_degree([batch.to(device) for batch in batches], NUM_NODES)
    sets = [set(batch.tolist()) for batch in batches]
    shared = torch.tensor([[len(a & b) for b in sets] for a in sets])
    least = torch.tensor([[min(len(a), len(b)) for b in sets] for a in sets])
    _near('result', out, shared / least.double())


def _check_gather_rows(device: torch.device) -> None:
    x, previous, cache = (_numbers(n, 9, seed=n) for n in (NUM_NODES, 20, 10))
    index = torch.randint(NUM_NODES, (80,), generator=_random())
    match = torch.randint(-20, 20, (80,), generator=_random())
    position = torch.randint(-10, 10, (NUM_NODES,), generator=_random())
    counter = torch.zeros(3, dtype=torch.long)
    args = index, match, previous, position, cache, counter
    expected = reference.gather_rows(x, *args)
    places = [x.to(device)] + ([x.pin_memory()] if device.type == 'cuda' else [])
    for place in places:
        counted = torch.zeros(3, dtype=torch.long, device=device)
        out = ops.gather_rows(
            place, index.to(device), match=match.to(device), previous=previous.to(device),
            cache_position=position.to(device), cache=cache.to(device), counter=counted,
        )  # fmt: skip
        _near('result', out, expected.double())
        _same('counter', counted, counter)


def _check_random_walk(device: torch.device) -> None:
    rowptr, col, _ = _csr()
    start = torch.arange(NUM_NODES)
    for restart in (0.0, 0.3):
        out = ops.random_walk(
            rowptr.to(device), col.to(device), start.to(device), 5, restart=restart, seed=SEED
        )
        _same('result', out, reference.random_walk(rowptr, col, start, 5, restart, SEED))


def _check_pinsage_neighbors(device: torch.device) -> None:
    rowptr, col, _ = _csr()
    nodes = torch.arange(0, NUM_NODES, 3)
    out = ops.pinsage_neighbors(
        rowptr.to(device), col.to(device), nodes.to(device), 4, num_walks=5, walk_length=3,
        seed=SEED,
    )  # fmt: skip
    expected = reference.pinsage_neighbors(rowptr, col, nodes, 4, 5, 3, 0.0, SEED)
    for name, a, e in zip(('neighbors', 'visits'), out, expected, strict=True):
        _same(name, a, e)


CHECKS: dict[str, Callable[[torch.device], None]] = {
    'to_csr': _check_to_csr,
    'spmm': _check_spmm,
    'message_passing': _check_message_passing,
    'aggregate': _check_aggregate,
    'gcn_norm': _check_gcn_norm,
    'maxk': _check_maxk,
    'CBSR': _check_cbsr,
    'cbsr_spmm': _check_cbsr_spmm,
    'gat': _check_gat,
    'gatv2': _check_gatv2,
    'segment_attention': _check_segment_attention,
    'sampled_spmm': _check_sampled_spmm,
    'neighbor_sample': _check_neighbor_sample,
    'relabel': _check_relabel,
    'match': _check_match,
    'match_degree': _check_match_degree,
    'gather_rows': _check_gather_rows,
    'random_walk': _check_random_walk,
    'pinsage_neighbors': _check_pinsage_neighbors,
}
