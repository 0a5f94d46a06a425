"""The times of two built checkouts on one machine: the cost or the gain of a change.

python -m benchmarks before_after BEFORE [AFTER]          folders with a built pyg_fast
python -m benchmarks before_after BEFORE --rounds 15 --sizes cora arxiv

A process of each tree makes every cell; the two take turns to time it, for `rounds` rounds, and
the least mean of a tree counts. Cells use names that both trees have.
"""
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

NAMES = ('before', 'after')
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
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--sizes', nargs='+', default=list(SIZES)[1:], choices=list(SIZES))
    args = parser.parse_args(argv)
    _harness.start(args)
    trees = {name: Tree(getattr(args, name), args.device, args.sizes) for name in NAMES}
    report = _harness.Report('before-after', args, [
        f'Before: {args.before}, after: {args.after}. Milliseconds a call: of {args.rounds} turns '
        "of each tree the least mean. Calls run on end, so that the host's time counts where "
        'kernels are short.'])
    while cell := trees['before'].next_cell():
        if (other := trees['after'].next_cell()) != cell:
            sys.exit(f'after has {other} where before has {cell}')
        times: dict[str, list[float]] = {name: [] for name in NAMES}
        for turn in range(args.rounds):
            for name in NAMES if turn % 2 == 0 else NAMES[::-1]:
                times[name].append(trees[name].time())
        size, _ = cell.split(': ')
        section = report.section(
            size, width='cell', versus=[_harness.Versus('before', 'after', ['before'])])
        section.cells.append(_harness.Cell(cell, len(section.cells) + 1, {
            name: _harness.Result(median_ms=min(each), count=args.rounds)
            for name, each in times.items()}))
        report.save()
    report.finish()


class Tree:
    """The process of a tree: it says the name of a cell, and a time of it whenever asked."""

    def __init__(self, tree: Path, device: str, sizes: Sequence[str]) -> None:
        self.tree = tree
        self.process = Popen(
            [sys.executable, __file__, '--cells', str(tree), device, *sizes], text=True,
            stdin=PIPE, stdout=PIPE, cwd=tree)

    def next_cell(self) -> str | None:
        """The name of the cell that this process has made, `None` after the last one."""
        return self._ask('next')

    def time(self) -> float:
        """Milliseconds a call of the cell."""
        return self._ask('time')

    def _ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(what, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ''
        if not line:
            sys.exit(f'{self.tree}: its process failed, see above')
        return json.loads(line)


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


def timer_of(run: Callable, seconds: float) -> Callable[[], float]:
    """A function that takes about `seconds`, and returns the milliseconds of a call."""
    import torch
    from torch.utils.benchmark import Timer

    run()
    timer = Timer('run()', globals={'run': run}, num_threads=torch.get_num_threads())
    number = max(1, int(seconds / timer.timeit(2).mean))
    return lambda: 1e3 * timer.timeit(number).mean


def child(tree: str, device: str, sizes: Sequence[str]) -> None:
    """The other end of :class:`Tree`."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path[0] = tree  # not the folder of this file
    found = importlib.util.find_spec('pyg_fast')
    if not found or not found.origin or not Path(found.origin).is_relative_to(Path(tree).resolve()):
        sys.exit(f'{tree} has no pyg_fast: {found and found.origin} would be imported')
    import torch

    import pyg_fast

    timers = (
        (f'{size}: {name}', timer_of(run, 0.001 if size == 'tiny' else 0.02))
        for size in sizes for name, run in cells(pyg_fast, torch.device(device), size))
    name, time = None, None
    for line in sys.stdin:
        if line == 'next\n':
            name, time = next(timers, (None, None))
        answer = name if line == 'next\n' else time and time()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
    if sys.argv[1:2] == ['--cells']:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
