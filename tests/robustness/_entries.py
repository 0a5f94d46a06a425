"""Every public op: valid input, and a reference for its result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from _raw_ops import reference
from torch import Tensor

from pyg_fast import ops
from pyg_fast.attention import _composed

NUM_NODES, NUM_EDGES, WIDTH, HEADS = 12, 50, 5, 2
SEED = 2**40 + 3
# In `ops.__all__`, but no ops with arguments; the layer stands for `message_passing`.
WITHOUT_INPUT = {'SampledSubgraph', 'with_cuda', 'message_passing'}


class Entry(NamedTuple):
    """Keyword arguments that `run` takes, and the same by its `reference`: lists of tensors.

    `run` changes nothing of its input but what `changes` names. Without `differentiable` gradients
    are none, or not those that autograd finds for `reference`.
    """

    op: str
    run: Callable[..., list[Tensor]]
    reference: Callable[..., list[Tensor]]
    make: Callable[[], dict[str, Any]]
    changes: str | None = None
    differentiable: bool = True


def on(device: torch.device, value: Any) -> Any:
    """An argument on another device."""
    if isinstance(value, ops.NodeMap):
        return ops.NodeMap(value.num_nodes, device)
    if isinstance(value, list):
        return [on(device, v) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value


def compare(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises unless both are equal but for rounding, NaN where NaN is."""
    assert actual.shape == expected.shape, f'{what}: {actual.shape}, not {expected.shape}'
    actual, expected = actual.detach(), expected.detach()
    if not actual.is_floating_point():
        assert torch.equal(actual.to(expected.dtype), expected), what
        return
    # fp16 and bf16 are rounded once, at the end.
    eps = torch.finfo(actual.dtype).eps if actual.dtype.itemsize < 4 else 0.0
    expected, actual = expected.to(actual.dtype).double(), actual.double()
    finite = expected.isfinite()
    size = expected.abs().where(finite, 0)
    allowed = (2e-5 + 2 * eps) * (size + size.amax() if size.numel() else size) + 1e-6
    near = torch.where(finite, (actual - expected).abs() <= allowed, actual == expected)
    near |= actual.isnan() & expected.isnan()
    assert near.all(), f'{what} is {actual[~near][:4]}, not {expected[~near][:4]}'


def edges() -> Tensor:
    """Random ones, with loops, some twice there; the last node has none."""
    return torch.randint(NUM_NODES - 1, (2, NUM_EDGES))


@contextmanager
def on_edges(edge_index: Tensor, num_nodes: int, width: int = WIDTH) -> Iterator[list[Tensor]]:
    """Makes input of these edges in place of random ones. Yields a list that gets an entry each
    time an op takes them."""
    taken: list[Tensor] = []

    def edges() -> Tensor:
        taken.append(edge_index)
        return edge_index

    own = globals()
    changes = {
        'NUM_NODES': num_nodes, 'NUM_EDGES': edge_index.size(1), 'WIDTH': width, 'edges': edges,
    }  # fmt: skip
    before = {name: own[name] for name in changes}
    own.update(changes)
    try:
        yield taken
    finally:
        own.update(before)


def numbers(*size: int) -> Tensor:
    """Numbers that every type holds, with ties."""
    return torch.randint(-8, 9, size) / 8


def csr(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    return reference.to_csr(edge_index.long(), num_nodes, num_nodes, False, False, False)[:3]


def weighted_graph() -> dict[str, Tensor]:
    return {'graph': edges(), 'x': numbers(NUM_NODES, WIDTH), 'edge_weight': numbers(NUM_EDGES)}


def sums(graph: Tensor, x: Tensor, edge_weight: Tensor | None = None, **kwargs: Any) -> Tensor:
    return reference.spmm(*csr(graph, x.size(0)), edge_weight, x, **kwargs)


def spmm_reference(
    graph: Tensor, x: Tensor, edge_weight: Tensor | None = None, reduce: str = 'sum'
) -> list[Tensor]:
    if reduce in ('max', 'min'):
        rows = csr(graph, x.size(0))
        return [reference.spmm_max(*rows, edge_weight, x, reduce == 'min')[0]]
    return [sums(graph, x, edge_weight, mean=reduce == 'mean')]


def aggregate_reference(
    graph: Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    mode: str = 'auto',
    num_dst: int | None = None,
) -> list[Tensor]:
    num_dst = x.size(0) if num_dst is None else num_dst
    rows = reference.to_csr(graph.long(), x.size(0), num_dst, False, False, False)[:3]
    return [reference.spmm(*rows, edge_weight, x)]


def cbsr_spmm(values: Tensor, columns: Tensor, num_columns: int, **kwargs: Any) -> list[Tensor]:
    graph = kwargs.pop('graph')
    return [ops.cbsr_spmm(graph, ops.CBSR(values, columns, num_columns), **kwargs)]


def cbsr_spmm_reference(
    values: Tensor, columns: Tensor, num_columns: int, reduce: str = 'sum', **kwargs: Any
) -> list[Tensor]:
    # By entries: zeros that are not stored are not multiplied with weights that are not finite.
    rowptr, col, perm = csr(kwargs['graph'], values.size(0))
    degree, weight = rowptr.diff().long(), kwargs.get('edge_weight')
    row = torch.arange(degree.size(0), device=degree.device).repeat_interleave(degree)
    message = values.double()[col.long()]
    if weight is not None:
        message = message * weight.double()[perm.long(), None]
    at = row.view(-1, 1).expand_as(message), columns.long()[col.long()]
    out = message.new_zeros(values.size(0), num_columns).index_put(at, message, accumulate=True)
    return [out / degree.clamp(min=1).view(-1, 1) if reduce == 'mean' else out]


def gcn_norm_reference(
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = 'source_to_target',
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    index = edge_index.long()
    if num_nodes is None:
        num_nodes = int(index.max()) + 1 if index.numel() > 0 else 0
    reverse = flow == 'target_to_source'
    degree, last, _, chunk_loops = reference.gcn_degree(
        index, edge_weight, num_nodes, add_self_loops, reverse
    )  # fmt: skip
    before = chunk_loops.cumsum(0) if add_self_loops else None
    num_kept = index.size(1) - int(chunk_loops.sum())  # of no chunk where loops are not dropped
    fill = 2.0 if improved and edge_weight is not None else 1.0
    out, weight, _ = reference.gcn_weight(
        index, edge_weight, degree, last if last.size(0) else None, before, num_kept,
        add_self_loops, fill, torch.float64,
    )  # fmt: skip
    return [out if add_self_loops else index, weight]


def gat_reference(
    graph: Tensor,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    add_self_loops: bool = False,
    seed: Tensor | None = None,
) -> list[Tensor]:
    num_dst = alpha_dst.size(0)
    rows = reference.to_csr(graph.long(), x.size(0), num_dst, False, False, add_self_loops)[:3]
    loops = min(x.size(0), num_dst) if add_self_loops else 0
    return [
        reference.gat(
            *rows, x, alpha_src, alpha_dst, alpha_edge, None, None, seed, loops, negative_slope,
            dropout, False, False,
        )[0]
    ]  # fmt: skip


def gatv2_reference(
    graph: Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    add_self_loops: bool = False,
    seed: Tensor | None = None,
) -> list[Tensor]:
    size = x_src.size(0), x_dst.size(0)
    rows = reference.to_csr(graph.long(), *size, False, False, add_self_loops)[:3]
    return [
        reference.gatv2(
            *rows, x_src, x_dst, att, None, seed, min(size) if add_self_loops else 0,
            negative_slope, dropout, False, False,
        )[0]
    ]  # fmt: skip


def sampled_spmm_reference(
    graph: Tensor,
    x: Tensor,
    num_samples: int,
    strategy: str = 'fastrand',
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
    seed: int | Tensor = 0,
    step: int = 0,
    quantize: bool = False,
) -> list[Tensor]:
    if quantize:
        small, scale = reference.quantize_rows(x)
        x = small.double() * scale.view(-1, 1).double()
    code = ('bucket', 'fastrand', 'unbiased', 'paper', 'adaptive').index(strategy)
    rows = csr(graph, x.size(0))
    number = int(seed) + step * 0x9E3779B97F4A7C15
    seed = torch.tensor([(number + 2**63) % 2**64 - 2**63])
    if reduce in ('max', 'min'):
        degree = rows[0].diff().clamp(max=num_samples)
        pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        slots = int(degree.sum())
        (col, _), perm = reference.sample_edges(*rows, pointers, slots, num_samples, code, seed)
        return [reference.spmm_max(pointers, col, perm, edge_weight, x, reduce == 'min')[0]]
    return [
        reference.sampled_spmm(
            *rows, edge_weight, x, None, None, None, None, reduce == 'mean', False, num_samples,
            code, seed,
        )
    ]  # fmt: skip


def neighbor_sample(**kwargs: Any) -> list[Tensor]:
    *tensors, nodes, counts = ops.neighbor_sample(**kwargs)
    return [*tensors, *map(torch.tensor, (nodes, counts or []))]


def neighbor_sample_reference(
    rowptr: Tensor,
    col: Tensor,
    seeds: Tensor,
    num_neighbors: list[int],
    perm: Tensor | None = None,
    edge_weight: Tensor | None = None,
    replace: bool = False,
    induced: bool = False,
    seed: int = 0,
    node_map: ops.NodeMap | None = None,
) -> list[Tensor]:
    n_id, edge_index, e_id, nodes, counts = reference.neighbor_sample(
        rowptr, col, seeds, num_neighbors, edge_weight, replace, induced, seed
    )
    degree = torch.bincount(edge_index[1], minlength=n_id.size(0))
    pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    return [
        n_id, edge_index, pointers, edge_index[0], e_id if perm is None else perm[e_id],
        torch.tensor(nodes), torch.tensor([] if induced else counts),
    ]  # fmt: skip


def node_map() -> ops.NodeMap:
    return ops.NodeMap(NUM_NODES, 'cpu')


def match_degree_reference(
    n_ids: list[Tensor], num_nodes: int, node_map: ops.NodeMap | None = None
) -> list[Tensor]:
    sets = [set(ids.tolist()) for ids in n_ids]
    return [torch.tensor([[len(a & b) / max(1, min(len(a), len(b))) for b in sets] for a in sets])]


def pointers_and(*more: str) -> dict[str, Any]:
    """A sorted graph, and nodes of it by several names."""
    rowptr, col, perm = csr(edges(), NUM_NODES)
    return {
        'rowptr': rowptr, 'col': col,
        **{name: perm if name == 'perm' else torch.randint(NUM_NODES, (7,)) for name in more},
    }  # fmt: skip


def spmm_entry(reduce: str) -> Entry:
    return Entry(
        'spmm', lambda **k: [ops.spmm(**k)], spmm_reference,
        lambda: {**weighted_graph(), 'reduce': reduce},
    )  # fmt: skip


def aggregate_entry(mode: str) -> Entry:
    return Entry(
        'aggregate', lambda **k: [ops.aggregate(**k)], aggregate_reference,
        lambda: {**weighted_graph(), 'mode': mode, 'num_dst': NUM_NODES},
    )  # fmt: skip


def sampled_entry(strategy: str, **options: Any) -> Entry:
    return Entry(
        'sampled_spmm', lambda **k: [ops.sampled_spmm(**k)], sampled_spmm_reference,
        lambda: {
            **weighted_graph(), 'num_samples': 3, 'strategy': strategy, 'seed': SEED, 'step': 1,
            **options,
        },
    )  # fmt: skip


def neighbor_entry(**options: Any) -> Entry:
    return Entry(
        'neighbor_sample', neighbor_sample, neighbor_sample_reference,
        lambda: {
            **pointers_and('seeds', 'perm'), 'num_neighbors': [3, 2], 'seed': SEED,
            'edge_weight': numbers(NUM_EDGES).abs(), 'node_map': node_map(), **options,
        },
    )  # fmt: skip


def attention(**tensors: Tensor) -> dict[str, Any]:
    return {
        'graph': edges(), **tensors, 'negative_slope': 0.2, 'dropout': 0.5,
        'add_self_loops': True, 'seed': torch.tensor([SEED]),
    }  # fmt: skip


def segment_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, batch: Tensor | None = None,
    ptr: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    seed: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    if ptr is not None:
        batch = torch.repeat_interleave(torch.arange(ptr.numel() - 1), ptr.diff())
    scale = query.size(-1) ** -0.5 if scale is None else float(scale)
    wide = (query.double(), key.double(), value.double())
    if dropout_p == 1:
        return [wide[2] * 0]
    seed = seed if dropout_p > 0 else None
    return [_composed.attend(*wide, batch, seed, dropout_p, scale)]


def segment_attention_entry(name: str, graphs: Callable[[], Tensor]) -> Entry:
    return Entry(
        'segment_attention', lambda **k: [ops.segment_attention(**k)], segment_attention_reference,
        lambda: {
            'query': numbers(NUM_NODES, HEADS, WIDTH), 'key': numbers(NUM_NODES, HEADS, WIDTH),
            'value': numbers(NUM_NODES, HEADS, WIDTH), name: graphs(), 'dropout_p': 0.5,
            'scale': 0.5, 'seed': torch.tensor([SEED]),
        },
    )  # fmt: skip


# A name, or a name and a variant.
ENTRIES: dict[str, Entry] = {
    'to_csr': Entry(
        'to_csr',
        lambda **k: list(ops.to_csr(**k)),
        lambda edge_index, num_src, num_dst, by='dst', drop_loops=False, wait=False: list(
            reference.to_csr(edge_index.long(), num_src, num_dst, by == 'src', False, drop_loops)
        )[:3],
        lambda: {
            'edge_index': edges(), 'num_src': NUM_NODES, 'num_dst': NUM_NODES, 'by': 'src',
            'drop_loops': True, 'wait': True,
        },
    ),
    **{f'spmm {reduce}': spmm_entry(reduce) for reduce in ('sum', 'mean', 'max', 'min')},
    **{f'aggregate {mode}': aggregate_entry(mode) for mode in ('auto', 'reduce', 'scatter')},
    'gcn_norm': Entry(
        'gcn_norm', lambda **k: list(ops.gcn_norm(**k)), gcn_norm_reference,
        lambda: {
            'edge_index': edges(), 'edge_weight': numbers(NUM_EDGES).abs(),
            'num_nodes': NUM_NODES, 'improved': True, 'add_self_loops': True,
            'flow': 'source_to_target', 'dtype': torch.float32,
        },
        differentiable=False,
    ),
    'maxk': Entry(
        'maxk',
        lambda **k: [ops.maxk(**k).to_dense()],
        lambda x, k, balanced=False: [
            reference.cbsr_to_dense(*reference.maxk(x, k, balanced), x.size(1))
        ],
        lambda: {'x': numbers(NUM_NODES, WIDTH), 'k': 2, 'balanced': False},
    ),
    'CBSR': Entry(
        'CBSR',
        lambda **k: [ops.CBSR(**k).to_dense()],
        lambda values, columns, num_columns: [
            reference.cbsr_to_dense(values, columns, num_columns)
        ],
        lambda: {
            'values': numbers(NUM_NODES, 3),
            'columns': torch.rand(NUM_NODES, WIDTH).argsort(1)[:, :3], 'num_columns': WIDTH,
        },
    ),
    'CBSR from_dense': Entry(
        'CBSR',
        lambda **k: [ops.CBSR.from_dense(**k).to_dense()],
        lambda x, k=None: [x.double()],
        lambda: {'x': numbers(NUM_NODES, WIDTH), 'k': WIDTH},
        differentiable=False,
    ),
    'cbsr_spmm': Entry(
        'cbsr_spmm', cbsr_spmm, cbsr_spmm_reference,
        lambda: {
            'graph': edges(), 'values': numbers(NUM_NODES, 1),
            'columns': torch.randint(8, (NUM_NODES, 1)), 'num_columns': 8,
            'edge_weight': numbers(NUM_EDGES), 'reduce': 'sum',
        },
    ),
    'gat': Entry(
        'gat', lambda **k: [ops.gat(**k)], gat_reference,
        lambda: attention(
            x=numbers(NUM_NODES, HEADS, WIDTH), alpha_src=numbers(NUM_NODES, HEADS),
            alpha_dst=numbers(NUM_NODES, HEADS), alpha_edge=numbers(NUM_EDGES, HEADS),
        ),
    ),
    'gatv2': Entry(
        'gatv2', lambda **k: [ops.gatv2(**k)], gatv2_reference,
        lambda: attention(
            x_src=numbers(NUM_NODES, HEADS, WIDTH),
            # No sum of the two is zero, where the slope jumps.
            x_dst=numbers(NUM_NODES, HEADS, WIDTH) + 1 / 16,
            att=numbers(HEADS, WIDTH),
        ),
    ),
    'segment_attention': segment_attention_entry(
        'batch', lambda: torch.arange(NUM_NODES) * 3 // NUM_NODES
    ),
    'segment_attention ptr': segment_attention_entry(
        'ptr', lambda: torch.tensor([0, NUM_NODES // 3, NUM_NODES // 3, NUM_NODES])
    ),
    **{
        f'sampled_spmm {strategy}': sampled_entry(strategy, reduce='sum', quantize=False)
        for strategy in ('fastrand', 'adaptive', 'bucket', 'unbiased', 'paper')
    },
    'sampled_spmm max': sampled_entry('fastrand', reduce='max'),
    'sampled_spmm quantized': sampled_entry('fastrand', quantize=True),
    'neighbor_sample': neighbor_entry(edge_weight=None, replace=False, induced=False),
    'neighbor_sample replace': neighbor_entry(replace=True),
    'neighbor_sample weighted': neighbor_entry(),
    'neighbor_sample induced': neighbor_entry(edge_weight=None, induced=True),
    'relabel': Entry(
        'relabel',
        lambda **k: list(ops.relabel(**k)),
        lambda ids, num_ids=None, node_map=None: list(reference.relabel(ids)),
        lambda: {
            'ids': torch.randint(NUM_NODES, (20,)), 'num_ids': NUM_NODES, 'node_map': node_map(),
        },
    ),
    'NodeMap': Entry(
        'NodeMap',
        lambda **k: [ops.NodeMap(**k, device='cpu', hashed=True).table(9)[:, :1]],
        lambda num_nodes: [torch.full((2, 1), -1)],
        lambda: {'num_nodes': NUM_NODES},
    ),
    'match': Entry(
        'match',
        lambda **k: [ops.match(**k)],
        lambda n_id, previous, num_nodes, node_map=None: [
            reference.match(n_id.long(), previous, torch.empty(0), 0, num_nodes)
        ],
        lambda: {
            'n_id': torch.randint(NUM_NODES, (9,)), 'previous': torch.randint(NUM_NODES, (6,)),
            'num_nodes': NUM_NODES, 'node_map': node_map(),
        },
    ),
    'match_degree': Entry(
        'match_degree', lambda **k: [ops.match_degree(**k)], match_degree_reference,
        lambda: {
            'n_ids': [torch.randint(NUM_NODES, (n,)) for n in (5, 9, 4)], 'num_nodes': NUM_NODES,
            'node_map': node_map(),
        },
    ),
    'gather_rows': Entry(
        'gather_rows',
        lambda **k: [ops.gather_rows(**k), *filter(None.__ne__, [k.get('counter')])],
        lambda x, index, match=None, previous=None, cache_position=None, cache=None,
        counter=None: [
            reference.gather_rows(x, index, match, previous, cache_position, cache, counter),
            *([] if counter is None else [counter]),
        ],
        lambda: {
            'x': numbers(NUM_NODES, WIDTH), 'index': torch.randint(NUM_NODES, (20,)),
            'match': torch.randint(-4, 5, (20,)), 'previous': numbers(4, WIDTH),
            'cache_position': torch.randint(-3, 3, (NUM_NODES,)), 'cache': numbers(3, WIDTH),
            'counter': torch.zeros(3, dtype=torch.int64),
        },
        'counter',
    ),
    'random_walk': Entry(
        'random_walk',
        lambda **k: [ops.random_walk(**k)],
        lambda rowptr, col, start, walk_length, restart=0.0, seed=0: [
            reference.random_walk(rowptr, col, start.long(), walk_length, restart, seed)
        ],
        lambda: {**pointers_and('start'), 'walk_length': 4, 'restart': 0.3, 'seed': SEED},
    ),
    'pinsage_neighbors': Entry(
        'pinsage_neighbors',
        lambda **k: list(ops.pinsage_neighbors(**k)),
        lambda rowptr, col, nodes, num_neighbors, num_walks, walk_length, restart=0.0, seed=0: list(
            reference.pinsage_neighbors(
                rowptr, col, nodes.long(), num_neighbors, num_walks, walk_length, restart, seed
            )
        ),
        lambda: {
            **pointers_and('nodes'), 'num_neighbors': 3, 'num_walks': 4, 'walk_length': 3,
            'restart': 0.3, 'seed': SEED,
        },
    ),
}  # fmt: skip
