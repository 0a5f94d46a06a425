"""The times of two built checkouts on one machine: the cost or the gain of a change.

python -m benchmarks before_after BEFORE [AFTER]          folders with a built pyg_fast
python -m benchmarks before_after BEFORE --rounds 3 --sizes cora arxiv

A process of each tree times every cell; the trees take turns for `rounds` rounds, and the least
median of a tree counts. Cells use names that both trees have.
"""
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Nodes, edges, whether sources are skewed.
SIZES = {
    'tiny': (300, 1_500, False),  # for the tests
    'cora': (2_708, 10_556, False), 'arxiv': (169_343, 2_315_598, False),
    'reddit': (232_965, 60_000_000, True),
}


def main(argv: Sequence[str] | None = None) -> None:
    from benchmarks import _harness  # of this tree: a process of cells has another one

    parser = _harness.parser('Two built checkouts in turns.')
    parser.add_argument('before', type=Path)
    parser.add_argument('after', type=Path, nargs='?', default=ROOT)
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--sizes', nargs='+', default=list(SIZES)[1:], choices=list(SIZES))
    args = parser.parse_args(argv)
    _harness.start(args)
    trees = {'before': args.before, 'after': args.after}
    times: dict[str, dict[str, float]] = {name: {} for name in trees}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            command = [sys.executable, __file__, '--cells', str(tree), args.device, *args.sizes]
            run = subprocess.run(command, capture_output=True, text=True, cwd=tree)
            if run.returncode != 0:
                sys.exit(f'{tree}: {run.stderr[-3000:]}')
            for cell, value in json.loads(run.stdout.splitlines()[-1]).items():
                times[name][cell] = min(value, times[name].get(cell, value))
    report = _harness.Report('before-after', args, [
        f'Before: {args.before}, after: {args.after}. Milliseconds a call; of {args.rounds} '
        "processes of each tree the least median. Calls run on end, so that the host's time counts "
        'where kernels are short.'])
    for size in args.sizes:
        section = report.section(
            size, width='cell', versus=[_harness.Versus('before', 'after', ['before'])])
        cells = [cell for cell in times['before'] if cell.startswith(f'{size}: ')]
        for number, cell in enumerate(cells, 1):
            section.cells.append(_harness.Cell(cell, number, {
                name: _harness.Result(median_ms=times[name][cell], count=args.rounds)
                for name in trees}))
    report.finish()


def cells(pyg_fast: Any, device: Any, size: str) -> Iterator[tuple[str, Callable]]:
    """Names, and the functions to time."""
    import torch
    from torch_geometric.data import Data

    nn, ops = pyg_fast.nn, pyg_fast.ops
    num_nodes, num_edges, skewed = SIZES[size]
    torch.manual_seed(0)
    src = torch.rand(num_edges, device=device).pow(3 if skewed else 1)
    src = (src * num_nodes).long().clamp_(max=num_nodes - 1)
    edge_index = torch.stack([src, torch.randint(num_nodes, (num_edges,), device=device)])
    mask = torch.rand(num_nodes, device=device) < 0.01
    prepared = pyg_fast.transforms.ToCSR()(Data(edge_index=edge_index, num_nodes=num_nodes))
    prepared = prepared.edge_index
    paths = pyg_fast.graph.execution_paths(prepared, mask, 1)
    weight = torch.rand(num_edges, device=device)
    still = torch.randn(num_nodes, 64, device=device)
    x = still.clone().requires_grad_()
    grad = torch.randn(num_nodes, 64, device=device)

    def step(conv: Any, *args: Any, grad: Any = grad, **kwargs: Any) -> Callable:
        def run() -> None:
            torch.autograd.grad(conv(x, *args, **kwargs), [x, *conv.parameters()], grad)

        conv.to(device)
        return run

    def forward(conv: Any) -> Callable:
        conv.to(device)
        return torch.no_grad()(lambda: conv(x, prepared))

    layers = {
        'GCN': partial(nn.PathPreparedGCNConv, 64, 64),
        'SAGE': partial(nn.PathPreparedSAGEConv, 64, 64),
        'SAGE max': partial(nn.PathPreparedSAGEConv, 64, 64, aggr='max'),
        'GIN': lambda: nn.PathPreparedGINConv(torch.nn.Linear(64, 64)),
        'MaxK': partial(nn.MaxKGCNConv, 64, 64, k=16),
        'Sampled': partial(nn.SampledGCNConv, 64, 64, num_samples=16, sample='always'),
        'GAT': partial(nn.FusedGATConv, 64, 8, heads=8),
        'GAT, dropout': partial(nn.FusedGATConv, 64, 8, heads=8, dropout=0.5),
        'GATv2': partial(nn.FusedGATv2Conv, 64, 8, heads=8),
    }
    for name, make in layers.items():
        yield f'{name} step, prepared', step(make(), prepared)
        yield f'{name} forward', forward(make())
    for name in ('GCN', 'SAGE', 'GAT'):
        yield f'{name} step, plain', step(layers[name](), edge_index)
    for name in ('GCN', 'SAGE'):
        masked = grad * mask.view(-1, 1)
        yield f'{name} step on a path', step(layers[name](), prepared, grad=masked, path=paths[0])
    yield 'GCN step, weighted', step(layers['GCN'](), prepared, weight)
    for dim in (16, 64, 256):
        wide = torch.randn(num_nodes, dim, device=device)
        yield f'spmm {dim}', partial(ops.spmm, prepared, wide)
        yield f'spmm {dim}, bf16', partial(ops.spmm, prepared, wide.bfloat16())
    yield 'spmm 64, weighted', partial(ops.spmm, prepared, still, weight)
    yield 'to_csr', partial(ops.to_csr, edge_index, num_nodes, num_nodes)
    yield 'aggregate, scatter', partial(ops.aggregate, edge_index, still, mode='scatter')


def time_of(run: Callable, seconds: float) -> float:
    """The median of many calls, in milliseconds."""
    import torch
    from torch.utils.benchmark import Timer

    run()
    timer = Timer('run()', globals={'run': run}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=seconds).median


def child(tree: str, device: str, sizes: list[str]) -> None:
    sys.path[0] = tree  # not the folder of this file
    import torch

    import pyg_fast

    assert Path(pyg_fast.__file__).is_relative_to(Path(tree).resolve()), pyg_fast.__file__
    where = torch.device(device)
    results = {
        f'{size}: {name}': time_of(run, 0.001 if size == 'tiny' else 0.15)
        for size in sizes for name, run in cells(pyg_fast, where, size)}
    print(json.dumps(results))


if __name__ == '__main__':
    if sys.argv[1:2] == ['--cells']:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
