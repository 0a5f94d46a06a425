"""Execution path preparing (IEEE TPDS 2022), rerun."""
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import ToCSR
from pyg_fast.transforms.group_sizes import SIZES, choose_group_size

from .. import _graphs, _harness, paths
from .._graphs import Graph
from .._harness import Contender, Result
from ._exhibit import Figure, Maker, Paper, Run, fastest, ratio

REAL = ('Cora', 'CiteSeer', 'PubMed')
GENERATED = ('BlogCatalog', 'YouTube')
HIDDEN, CLASSES = 16, paths.NUM_CLASSES
LAYERS, SHARE, EPOCHS, QUICK_EPOCHS = 2, 0.1, 100, 10
SHARES, DEPTHS = (0.1, 0.3, 0.5, 0.8), (1, 2, 3, 4, 5, 6)
FIXED = 32
WAYS = (paths.PLAIN, paths.BACKWARD, paths.FORWARD, paths.CACHED)
PREPARING = 'preparing'
CUSPARSE = [f'{paths.CUSPARSE} {name}' for name in paths._cusparse.ALGORITHMS]


def graphs(run: Run) -> Iterator[Graph]:
    """The small ones of the paper, and two of its large ones' sizes."""
    if not run.quick:
        yield from run.real(REAL)
    for name in GENERATED[-1:] if run.quick else GENERATED:
        yield run.like(name)


# Aggregations -----------------------------------------------------------------------------------

def aggregated(
    run: Run, graph: Graph, share: float, num_layers: int, names: Sequence[str],
) -> tuple[dict[str, Figure], dict[str, Result]]:
    """The time of all backward aggregations of a GCN, by contender, and what it is the sum of."""
    problem = paths.Problem(graph, share)
    found: dict[str, Result] = {}
    sums: dict[str, Figure] = {}
    for above in range(num_layers):
        case = paths.Aggregation(problem, CLASSES if above == 0 else HIDDEN, above)
        chosen = [contender for contender in case.contenders() if contender.name in names]
        results = _harness.measure(chosen, run.kernel)
        found.update({
            f'layer {num_layers - above}, {name}': result for name, result in results.items()})
        for name in names:
            time, so_far = fastest(results, name), sums.get(name, 0.0)
            sums[name] = '–' if isinstance(time, str) or isinstance(so_far, str) else (
                so_far + time)
        del case
    return sums, found


def aggregation_figures(sums: Mapping[str, Figure]) -> dict[str, Figure]:
    ours, every, if_else = (sums[name] for name in (paths.PATH, paths.ACTIVE, paths.IF_ELSE))
    return {
        'path, ms': ours, 'all edges, ms': every, 'if-else, ms': if_else,
        'over all edges': ratio(every, ours), 'over if-else': ratio(if_else, ours)}


def backward(run: Run) -> None:
    exhibit = run.exhibit(
        'Backward aggregation', width='layers',
        shows="By the paper's abstract the backward aggregations of a GCN are up to 5.68 times as "
        'fast along execution paths on a P100, and up to 6.57 times on a V100S, as those of '
        'GNNAdvisor over all edges.',
        differs=f'{SHARE:.0%} of the nodes train, {HIDDEN} hidden channels, {CLASSES} classes; the '
        "sum over all layers. All edges: our own kernels, since GNNAdvisor's cannot be had here; "
        'if-else: a kernel that reads every edge and skips those of no use, on a GPU.')
    names = (paths.PATH, paths.ACTIVE, paths.IF_ELSE)
    for graph in graphs(run):
        sums, results = aggregated(run, graph, SHARE, LAYERS, names)
        exhibit.line(graph.name, LAYERS, results=results, here=aggregation_figures(sums))
    ratios = [figure for line in exhibit.lines()
              if not isinstance(figure := line.here['over all edges'], str)]
    exhibit.line('the largest', 0, here={'over all edges': max(ratios)}, paper={
        'over all edges': 'up to 5.68 (P100), 6.57 (V100S)'})


def training_shares(run: Run) -> None:
    exhibit = run.exhibit(
        'Shares of training nodes', width='% training',
        shows="The authors' benchmark sweeps the share of training nodes from 10 to 80 %. The more "
        'nodes train, the more of the graph the paths hold.',
        differs=f'{LAYERS} layers, where theirs has 3 to 6.')
    names = (paths.PATH, paths.ACTIVE, paths.IF_ELSE)
    graph = run.like('YouTube')
    for share in SHARES[::3] if run.quick else SHARES:
        sums, results = aggregated(run, graph, share, LAYERS, names)
        exhibit.line(
            graph.name, round(100 * share), results=results, here=aggregation_figures(sums))


def table4(run: Run) -> None:
    exhibit = run.exhibit(
        'Table IV: execution paths through cuSPARSE', width='F',
        shows='The paper hands its paths to cuSPARSE, too: a smaller graph serves any kernel.',
        differs='The last layer; the fastest algorithm of cuSPARSE, preprocessed once, on a GPU; '
        'rows are taken out and put back on both sides.')
    for graph in graphs(run):
        problem = paths.Problem(graph, SHARE)
        for width in paths.WIDTHS[:1] if run.quick else paths.WIDTHS:
            case = paths.Aggregation(problem, width)
            names = (paths.PATH, paths.ACTIVE, *CUSPARSE)
            results = _harness.measure(
                [c for c in case.contenders() if c.name in names], run.kernel)
            ours, theirs = fastest(results, paths.PATH), fastest(results, *CUSPARSE)
            exhibit.line(graph.name, width, results=results, here={
                'path, ms': ours, 'cuSPARSE on the path, ms': theirs,
                'all edges, ms': fastest(results, paths.ACTIVE),
                'over cuSPARSE': ratio(theirs, ours)})
            del case


def group_sizes(run: Run) -> None:
    exhibit = run.exhibit(
        'Group sizes', width='F',
        shows='A path has other degrees than its graph, so that another group size is best. The '
        "authors' code chooses it by a regression, by a graph classifier, or takes 32.",
        differs="The last layer's path. Times of a choice over the fastest of "
        f'{", ".join(map(str, SIZES))} and of rows without groups. The paper: its own regression, '
        'of other GPUs; fitted, learned: ours, on other graphs. On a CPU groups change nothing.')
    for graph in graphs(run):
        case = paths.Aggregation(paths.Problem(graph, SHARE), HIDDEN)
        t = case.path.graph.t()
        choose = functools.partial(
            choose_group_size, t.rowptr, t.num_src, HIDDEN, col=t.col)
        choices: dict[str, int | None] = {
            f'{FIXED} always': FIXED,
            'regression, of the paper': choose(strategy='regression', coefficients='paper'),
            'regression, fitted': choose(strategy='regression'),
            'learned': choose(strategy='learned')}
        candidates = dict.fromkeys([0, *((FIXED,) if run.quick else SIZES), *(
            size for size in choices.values() if size)])
        results = _harness.measure([
            Contender(paths.grouped(size), functools.partial(case.on_path, size), True, case.check)
            for size in candidates], run.kernel)
        times = {size: fastest(results, paths.grouped(size)) for size in candidates}
        best = min(time for time in times.values() if not isinstance(time, str))
        exhibit.line(graph.name, HIDDEN, results=results, here={
            'best, ms': best,
            'best size': str(next(size for size, time in times.items() if time == best) or 'rows'),
            **{f'{how}, over the best': ratio(times[size or 0], best)
               for how, size in choices.items()},
            'the slowest, over the best': max(
                time for time in times.values() if not isinstance(time, str)) / best})
        del case


# Training ---------------------------------------------------------------------------------------

def timed(
    run: Run, problem: paths.Problem, num_layers: int, names: Sequence[str] = WAYS,
    prepare: bool = False,
) -> dict[str, Result]:
    """Steps of a GCN, and what preparing its paths takes."""
    model = paths.Model(problem, HIDDEN, num_layers)
    contenders = model.contenders(names, False)
    if prepare:
        contenders.append(Contender(
            PREPARING, lambda: lambda: problem.paths(num_layers), True))
    return _harness.measure(contenders, run.wall if prepare else run.kernel)



def training(run: Run) -> None:
    exhibit = run.exhibit(
        'Training', width='layers',
        shows='By the abstract of its first version the paper makes whole trainings 1.05 to 1.37 '
        'times as fast as GNNAdvisor with paths that are prepared before, and 1.03 to 1.35 times '
        'with paths that are prepared on the fly.',
        differs=f'Steps without an optimizer, {SHARE:.0%} training, by wall time, launches '
        f'included, which small graphs wait for; on the fly: preparing counts once in {EPOCHS} '
        'epochs. In place of GNNAdvisor our own layers with all nodes active. Beyond the paper: '
        'the forward pass on the paths too, and the input aggregated once.')
    for graph in graphs(run):
        problem = paths.Problem(graph, SHARE)
        results = timed(run, problem, LAYERS, prepare=True)
        plain, path, preparing = (
            fastest(results, name) for name in (paths.PLAIN, paths.BACKWARD, PREPARING))
        on_the_fly: Figure = '–'
        if not isinstance(path, str) and not isinstance(preparing, str):
            on_the_fly = ratio(plain, path + preparing / EPOCHS)
        num_bytes = sum(path.num_bytes for path in problem.paths(LAYERS))
        exhibit.line(graph.name, LAYERS, results=results, here={
            'all active, ms': plain, 'path, ms': path, 'prepared before': ratio(plain, path),
            'on the fly': on_the_fly,
            'forward too': ratio(plain, fastest(results, paths.FORWARD)),
            'input cached besides': ratio(plain, fastest(results, paths.CACHED)),
            'preparing, ms': preparing, 'paths, MB': num_bytes / 1e6})
    exhibit.line('all', 0, paper={
        'prepared before': '1.05 to 1.37', 'on the fly': '1.03 to 1.35'}, here={
            head: span([line.here[head] for line in exhibit.lines()])
            for head in ('prepared before', 'on the fly')})


def span(figures: Sequence[Figure]) -> str:
    """The least and the largest."""
    numbers = [figure for figure in figures if not isinstance(figure, str)]
    return f'{min(numbers):.2f} to {max(numbers):.2f}' if numbers else '–'


def figure11(run: Run) -> None:
    exhibit = run.exhibit(
        'Figure 11: depth, on a sparse and on a dense graph', width='layers',
        shows='With each layer a path holds more of the graph: the denser the graph and the deeper '
        'the model, the less there is to gain.',
        differs=f'Whole steps, {SHARE:.0%} training, launches hidden on a GPU. Edges of the paths: '
        'their mean share of the graph over the layers.')
    graphs = [run.like('YouTube'), run.like('BlogCatalog')]
    graphs += list(run.real(('ddi',))) if not run.quick else []
    for graph in graphs:
        problem = paths.Problem(graph, SHARE)
        for depth in DEPTHS[1:4:2] if run.quick else DEPTHS:
            results = timed(run, problem, depth, WAYS[:3])
            edges = [path.num_path_edges / path.num_edges for path in problem.paths(depth)]
            plain = fastest(results, paths.PLAIN)
            exhibit.line(graph.name, depth, results=results, here={
                'mean degree': graph.num_edges / graph.num_nodes,
                'edges of the paths, %': 100 * sum(edges) / depth, 'all active, ms': plain,
                'path': ratio(plain, fastest(results, paths.BACKWARD)),
                'forward too': ratio(plain, fastest(results, paths.FORWARD))})


# Accuracy ---------------------------------------------------------------------------------------

def datasets(run: Run) -> Iterator[tuple[str, Data]]:
    if run.quick:
        yield 'planted', PlantedGraph('small')[0].to(run.device)
        return
    for name in REAL:
        try:
            yield name, _graphs.dataset(name).to(run.device)
        except _graphs.Missing as reason:
            run.report.left_out[name] = str(reason)


def accuracy(run: Run) -> None:
    epochs = QUICK_EPOCHS if run.quick else EPOCHS
    exhibit = run.exhibit(
        'Accuracy', width='epochs',
        shows='Paths leave out zeros only: others who read the paper report a difference in '
        'accuracy of 0.000.',
        differs=f'{SHARE:.0%} of the nodes train, all others are tested; dropout 0.5, Adam, one '
        'seed. Sums run in another order, so that last bits differ.')
    for name, data in datasets(run):
        generator = torch.Generator().manual_seed(0)
        mask = (torch.rand(data.num_nodes, generator=generator) < SHARE).to(run.device)
        data = ToCSR()(Data(
            x=data.x, y=data.y, edge_index=data.edge_index, num_nodes=data.num_nodes))
        plain, path = (trained(data, mask, with_paths, epochs) for with_paths in (False, True))
        exhibit.line(
            name, epochs, paper={'difference, points': 0.0}, here={
                'all active, %': plain[0], 'path, %': path[0],
                'difference, points': path[0] - plain[0],
                'difference of the last losses': abs(path[1] - plain[1])})


def trained(data: Data, mask: Tensor, with_paths: bool, epochs: int) -> tuple[float, float]:
    """The test accuracy, in percent, and the last loss."""
    torch.manual_seed(0)
    model = PathPreparedGNN(
        'gcn', data.x.size(1), HIDDEN, int(data.y.max()) + 1, num_layers=LAYERS, dropout=0.5)
    model.to(mask.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    kwargs: dict[str, Any] = {}
    if with_paths:
        kwargs['paths'] = paths.execution_paths(data.edge_index, mask, LAYERS)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        out = model(data.x, data.edge_index, **kwargs)
        loss = F.cross_entropy(out[mask], data.y[mask])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    return 100 * float(right[~mask].float().mean()), float(loss.detach())


PAPER = Paper(
    'paths', 'Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on '
    'GPUs', 'IEEE TPDS 2022, https://arxiv.org/abs/2204.02662',
    'one NVIDIA Tesla P100, or V100S where it says so',
    [Maker('Backward aggregation', backward), Maker('Shares of training nodes', training_shares),
     Maker('Table IV', table4), Maker('Group sizes', group_sizes), Maker('Training', training),
     Maker('Figure 11', figure11), Maker('Accuracy', accuracy)],
    {"GNNAdvisor, DGL and the authors' kernels": 'they could not be had here'},
    note="The paper's text could not be had here. What its abstracts, the authors' code and others "
    'tell of its evaluation is rerun by subject; which of Figures 6 to 10 and Table V shows what '
    'is not known, nor are their figures.')
