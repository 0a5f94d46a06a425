"""The tables and figures of the five papers: their figures, and the benchmarks that rerun them.

python -m benchmarks papers                       all five, a record each
python -m benchmarks papers maxk paths            two of them
python -m benchmarks papers maxk --only Kernels   one exhibit of one
python -m benchmarks papers --quick               small graphs: some minutes
python -m benchmarks papers --list                all exhibits

An exhibit is a command line of another benchmark. Graphs in the sizes of the papers are generated
(benchmarks/_graphs.py), or fractions of them where they would be too large (--max-edges).
"""
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import re
import shlex
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_fast.nn import MaxK

from . import _harness
from ._harness import Cell, Section

MAX_EDGES = {('cuda', False): 200_000_000, ('cuda', True): 2_000_000,
             ('cpu', False): 4_000_000, ('cpu', True): 100_000}
UNITS = (4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A table or figure of a paper, or a topic where its number is unknown.

    ``commands`` of benchmarks, or a function, rerun it; ``quick`` has further arguments in a quick
    run, of all commands or of each. ``sections`` is a regular expression for those to show.
    """

    title: str
    shows: str
    commands: Sequence[str] | Callable[[bool], tuple[list[str], list[Cell]]]
    quick: str | Sequence[str] = ''
    sections: str = ''
    paper: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    differs: str = ''
    notes: bool = False

    @property
    def name(self) -> str:
        return self.title.split(':')[0]


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper: its title, publication and hardware, what is rerun, and what is not and why."""

    title: str
    where: str
    hardware: str
    exhibits: Sequence[Exhibit]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ''


# MaxK-GNN ---------------------------------------------------------------------------------------

def error_of_square(
    hidden: int, nonlinearity: Callable[[Tensor], Tensor], device: torch.device | str = 'cpu',
) -> float:
    """The error of trained networks with one hidden layer on a parabola: median of nine."""
    generator = torch.Generator().manual_seed(0)

    def draw(bound: float, *size: int) -> Tensor:
        uniform = torch.rand(9, *size, generator=generator, dtype=torch.float64)
        return ((2 * uniform - 1) * bound).to(device).requires_grad_()

    first, shift, second, end = (
        draw(1, 1, hidden), draw(1, 1, hidden), draw(hidden**-0.5, hidden, 1),
        draw(hidden**-0.5, 1, 1))

    def errors(points: int) -> Tensor:
        x = torch.linspace(-1, 1, points, dtype=torch.float64, device=device).view(-1, 1)
        out = nonlinearity(x * first + shift) @ second + end
        return (out - x.square()).square().mean((1, 2))

    optimizer = torch.optim.Adam([first, shift, second, end], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        errors(200).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(errors(999).sqrt().median())


def parabola(quick: bool) -> tuple[list[str], list[Cell]]:
    """Root mean square errors over the number of hidden units."""
    rows = {units: {'MaxK': error_of_square(units, MaxK(units // 4)),
                    'ReLU': error_of_square(units, torch.relu)}
            for units in (UNITS[:2] if quick else UNITS)}
    lines = _harness.table(['hidden units', 'MaxK, error', 'ReLU, error'], [
        [str(units), *(f'{error:.3g}' for error in found.values())]
        for units, found in rows.items()])
    return lines, [Cell('parabola', units, {name: {'error': error} for name, error in  # type: ignore
                                            found.items()}) for units, found in rows.items()]


MAXK = Paper(
    'MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks Training',
    'ASPLOS 2024, https://arxiv.org/abs/2312.08656', 'one NVIDIA A100 (80 GB)', [
        Exhibit('Parabola: approximated by networks with one hidden layer',
                'MaxK approximates any continuous function: the more hidden units, the closer a '
                'network with one hidden layer is to y = x².', parabola,
                differs='k is a quarter of the hidden units; medians of nine networks.'),
        Exhibit('Memory traffic: k = 32',
                'The kernels move about a tenth of the bytes of a product with all columns.',
                ['roofline --parts sums,maxk --graphs reddit-like'],
                '--widths 64 --tables 1 --buffer 2', '^(Sums|MaxK)',
                differs='Bytes that the kernels gather, not those that a profiler counts.'),
        Exhibit('Kernels: over k, 256 columns',
                'The smaller k, the faster are both kernels than a product with all columns. The '
                'figures are averages of the backward kernel over graphs of mean degree above 50.',
                ['maxk --parts kernels --graphs arxiv-like,ddi,reddit-like --k 8,16,32,64,128'],
                '--k 8,32 --graphs arxiv-like,reddit-like', paper={
                    f'backward over {rival}, k = {k}': figure for rival, figures in (
                        ('cuSPARSE', (6.93, 5.39, 2.55, 1.46)),
                        ('GNNAdvisor', (9.57, 7.46, 3.55, 2.04)))
                    for k, figure in zip((8, 16, 32, 64), figures, strict=True)},
                differs='Fewer graphs, no GNNAdvisor.'),
        Exhibit('Selection: of 256 columns',
                'The time to select the k largest entries, beside the time that it saves.',
                ['maxk --parts select --graphs reddit-like --select-widths 256 '
                 '--k 8,16,32,64,128'], '--k 8,32'),
        Exhibit('Training: steps of four layers',
                "The speed-up of whole training on Reddit is close to the limit of Amdahl's law.",
                ['maxk --parts training --graphs reddit-like --models sage,gcn,gin --layers 4 '
                 '--training-k 8,32,128 --scatter-limit 2'],
                '--models sage --layers 2 --training-k 8,32', notes=True, paper={
                    'over DGL': 3.22, 'limit, DGL': 5.52, 'over GNNAdvisor': 4.24,
                    'limit, GNNAdvisor': 7.27},
                differs='Random features; PyG, and ours with ReLU, instead of DGL and GNNAdvisor.'),
        Exhibit('Convergence: test scores over epochs, %',
                'Training with MaxK converges like training with ReLU.',
                ['accuracy --graphs Cora,Computers,CS,planted --runs 2 --k 8,32'],
                '--graphs planted --runs 1 --hidden 32', 'over epochs', differs='Other graphs.'),
        Exhibit('Accuracy: test scores and time per epoch',
                'Accuracy is comparable with that of ReLU in a fraction of the time.',
                ['accuracy --graphs Cora,Computers,CS,planted --runs 2 --k 8,32'],
                '--graphs planted --runs 1 --hidden 32', 'Test [^ ]*, %|Time', notes=True,
                differs='Other graphs, most of them small.')],
    note='Figures of the paper: its abstract and the README of '
    'https://github.com/harveyp123/MaxK-GNN.')


# ES-SpMM ----------------------------------------------------------------------------------------

_SCORES = 'accuracy --system sampled --graphs PubMed,Computers,tolokers,planted --runs 2'
_DENSE = 'sampled --parts kernels --graphs proteins-like,reddit-like --widths 128,256'

SAMPLED = Paper(
    'Accelerating SpMM Kernel with Cache-First Edge Sampling for Graph Neural Networks (ES-SpMM)',
    'https://arxiv.org/abs/2104.10716', 'one NVIDIA V100', [
        Exhibit('Sampling rates: edges that a sample reads',
                'A limit S for each row cuts dense graphs down, sparse ones stay whole.',
                ['sampled --parts kernels --graphs arxiv-like,ddi,proteins-like,reddit-like '
                 '--samples 16,32,64,128,256,512,1024 --widths 128'],
                '--samples 4,16 --graphs arxiv-like --widths 16', notes=True),
        Exhibit('Scores: points lost over S',
                'Networks that are trained on all edges keep their scores when inference samples, '
                "down to some S. The authors' code: GCN on Reddit, all edges, 94.45 %.",
                [_SCORES], '--graphs planted --runs 1', differs='Other graphs.'),
        Exhibit('Kernels: over S',
                'The fewer edges are read, the faster is the kernel.',
                [f'{_DENSE} --samples 16,32,64,128,256,512,1024'],
                '--samples 4,16 --widths 128 --graphs reddit-like',
                paper={'over cuSPARSE on all edges': 'up to 45.3'}),
        Exhibit('Inference: of a GCN of two layers',
                'Aggregation takes up to 95 % of an inference.',
                ['sampled --parts inference --graphs reddit-like --model-samples 16,64,256'],
                '--model-samples 4,16 --hidden 16', paper={'share of aggregations': 0.95},
                differs='Random features in the width of Reddit; PyG instead of DGL.'),
        Exhibit('Figure 11: kernels on the sample as a graph',
                'Sampling inside of the kernel, beside kernels that read a sampled graph.',
                [f'{_DENSE} --samples 16,64,256'],
                '--samples 4,16 --widths 128 --graphs reddit-like', differs='No GE-SpMM.'),
        Exhibit('Kernels at a loss: S that loses at most a point, and the times at this S',
                'The highest speed-ups over cuSPARSE of the abstract.',
                [_SCORES, 'sampled --parts kernels --graphs PubMed,Computers,tolokers '
                 '--widths 64 --samples 2,4,8,16,32,64,128,256,512'],
                ('--graphs planted --runs 1', '--graphs small --samples 2,16'),
                'loses at most|Aggregation',
                {'no loss': 4.35, 'less than a point': 45.3},
                'Small graphs leave most of a GPU idle, and sparse ones have few edges to omit.')],
    note='Figures of the paper: its abstract and https://github.com/cylinbao/CacheSample.')


# fuseGNN ----------------------------------------------------------------------------------------

_ATTENTION = "'GCN,GAT 8 heads'"
_CITATION = 'Cora,CiteSeer,PubMed,reddit-like'

GAT = Paper(
    'fuseGNN: Accelerating Graph Convolutional Neural Network Training on GPGPU',
    'ICCAD 2020, https://doi.org/10.1145/3400302.3415610', 'a GPU without a name in the abstract', [
        Exhibit('Attention: scores, softmax and aggregation in one kernel each way',
                'The paper fuses the edge operations of GAT, which otherwise launch many kernels.',
                [f'gat --models gat --graphs {_CITATION} --configs 8x8,1x64 --scatter-limit 40'],
                '--graphs Cora-sized --configs 8x8'),
        Exhibit('Aggregation: gather-apply-scatter and gather-apply-reduce',
                'Scatter takes edges in any order; reduce needs sorted edges and no atomics.',
                [f'aggregate --graphs {_CITATION}'], '--graphs Cora-sized'),
        Exhibit('Figure 10: training, transductive and inductive',
                'GCN and GAT on a graph that stays, and on a graph that is new at each step.',
                [f'layers --parts model --model-graphs {_CITATION} --layers {_ATTENTION}',
                 f'layers --parts fresh --layers {_ATTENTION}'],
                '--model-graphs Cora-sized --graphs tiny',
                paper={'over other frameworks': 'up to 5.3'}),
        Exhibit('GCN on Reddit: beside cuSPARSE',
                'The paper is slower than DGL, which calls cuSPARSE. The documentation of DGL 0.5: '
                '28.6 s and 11.7 GB for 200 epochs.',
                ['layers --parts model --model-graphs reddit-like --layers GCN'],
                differs='A GCN layer on cuSPARSE, prepared once, instead of DGL.'),
        Exhibit('Accuracy: GAT', 'Fusing changes nothing but the order of sums.',
                ['accuracy --system gat --epochs 200 --runs 2'],
                '--graphs planted --epochs 4 --runs 1'),
        Exhibit('Graph processing: normalized weights, and launches of steps',
                'Degrees, normalized weights and attention launch many small kernels.',
                ['reorder --parts sort', f'layers --parts launches --layers {_ATTENTION}'], '',
                'Normalized|launches', differs='Launches are counted on a GPU only.')],
    {"DGL and the authors' kernels": 'they do not run here'},
    'Figures of the paper: its abstract.')


# Execution paths --------------------------------------------------------------------------------

_GENERATED = 'Cora,CiteSeer,PubMed,BlogCatalog-like,YouTube-like'
_TINY = '--graphs YouTube-like'

PATHS = Paper(
    'Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on GPUs',
    'IEEE TPDS 2022, https://arxiv.org/abs/2204.02662',
    'one NVIDIA Tesla P100, or V100S where it says so', [
        Exhibit('Backward aggregation: of two layers',
                'Backward aggregations along execution paths, beside all edges by GNNAdvisor.',
                [f'paths --parts kernels --shares 0.1 --graphs {_GENERATED}'], _TINY,
                paper={'over all edges, P100': 'up to 5.68', 'over all edges, V100S': 'up to 6.57'},
                differs='All edges by our kernels; if-else reads all edges and skips some.'),
        Exhibit('Shares of training nodes: 10 to 80 %',
                'The more nodes train, the more edges are on the paths.',
                ['paths --parts kernels --shares 0.1,0.3,0.5,0.8 --graphs YouTube-like'],
                '--shares 0.1,0.8'),
        Exhibit('Table IV: execution paths through cuSPARSE',
                'The paper also multiplies its paths by cuSPARSE.',
                [f'paths --parts kernels --shares 0.1 --graphs {_GENERATED}'], _TINY, 'last layer',
                differs='cuSPARSE on a GPU only, the fastest algorithm, preprocessed once.'),
        Exhibit('Group sizes: choices and the best',
                'A path has other degrees than its graph, so that another group size is best.',
                [f'paths --parts groups --graphs {_GENERATED}'], _TINY, notes=True,
                differs='On a CPU groups change nothing.'),
        Exhibit('Training: steps, paths prepared before or on the fly',
                'Whole trainings with paths beside GNNAdvisor.',
                [f'paths --parts models,prepare --shares 0.1 --hidden 16 --graphs {_GENERATED}'],
                _TINY, notes=True,
                paper={'prepared before': '1.05 to 1.37', 'on the fly': '1.03 to 1.35'},
                differs='Our layers with all nodes active instead of GNNAdvisor.'),
        Exhibit('Figure 11: depth, on a sparse and on a dense graph',
                'With each layer the paths hold more of the graph.',
                ['paths --parts depth --graphs YouTube-like,BlogCatalog-like,ddi '
                 '--depths 1,2,3,4,5,6'], f'{_TINY} --depths 2,4'),
        Exhibit('Accuracy: with and without paths', 'Paths omit only zeros.',
                ['paths --parts accuracy'], paper={'difference, points': 0.0})],
    {"GNNAdvisor, DGL and the authors' kernels": 'they do not run here'},
    "Figures of the paper: its abstracts and the authors' code.")


# FastGL -----------------------------------------------------------------------------------------

_BATCHES = '--graphs products-like --nodes 128000 --hidden 64'
_PRODUCTS = f'--width 100 {_BATCHES}'
_SMALL = ('--rows 200 --nodes 200 --width 8 --hidden 8 --batch-size 64 --batch-sizes 64 '
          '--rival-batches 2 --workers 0')
_NO_FIGURES = 'The figures of the paper are not public.'

FASTGL = Paper(
    'FastGL: A GPU-Efficient Framework for Accelerating Sampling-Based GNN Training at Large Scale',
    'ASPLOS 2024, https://arxiv.org/abs/2409.14939',
    "NVIDIA GeForce RTX 3090 (24 GB; two of eight by the authors' scripts)", [
        Exhibit('Figure 9: epochs of training, ms per batch',
                'GCN, GIN and GAT of three layers and 64 channels in batches of 8,000 nodes with '
                '5, 10 and 15 neighbours, on two GPUs; means over all graphs and networks.', [
                    f'loader --parts epoch,ablation --models GCN,GIN,GAT {_PRODUCTS}',
                    'loader --parts ablation --models GCN,GIN,GAT --width 602 --graphs '
                    'reddit-like --nodes 128000',
                    'loader --parts ablation --width 128 --graphs papers100M-like --nodes 128000 '
                    '--max-edges 64000000',
                    'loader --parts ablation --width 256 --graphs IGB-like --nodes 128000 '
                    '--max-edges 64000000'],
                f'{_SMALL} --max-edges 20000', 'training|Training',
                {'over PyG': 11.8, 'over DGL': 2.2, 'over GNNLab': 1.5},
                'One device, features in host memory; fractions of the two largest graphs.'),
        Exhibit('Figure 15: batch size, channels, fan-out, and width of the features',
                f'The scripts of the authors sweep these on ogbn-products. {_NO_FIGURES}',
                [f'loader --parts sweep {_PRODUCTS}'], _SMALL),
        Exhibit('Table 7: random walks', f'Samples by random walks of length 3. {_NO_FIGURES}',
                [f'loader --parts walks {_PRODUCTS}'], _SMALL, differs='Loading only.'),
        Exhibit("Loading: beside PyG's NeighborLoader", 'Sampling and fetching, no training.',
                [f'loader --parts epoch {_PRODUCTS}'], _SMALL, 'loading'),
        Exhibit('Ablation: the parts of the system', 'Match-Reorder, Memory-Aware and Fused-Map '
                f'one after the other. {_NO_FIGURES}',
                [f'loader --parts ablation {_PRODUCTS}'], _SMALL),
        Exhibit('Match and Reorder: bytes over the bus', 'The order of the batches increases the '
                f'number of shared nodes. {_NO_FIGURES}',
                [f'loader --parts match {_PRODUCTS}'], _SMALL),
        Exhibit('Sampling: and the id map', f'Fused-Map is one pass. {_NO_FIGURES}',
                [f'loader --parts sample {_PRODUCTS}'], _SMALL),
        Exhibit('Aggregation: on new blocks', 'Partial sums in shared memory, no preparation. '
                f'{_NO_FIGURES}', [f'loader --parts aggregate --widths 64,256 {_PRODUCTS}'],
                f'{_SMALL} --widths 8'),
        Exhibit('Loss curves: with and without Match-Reorder',
                'Whether another order of the batches changes what the network learns.',
                ['accuracy --system loader --models gcn --graphs Computers --runs 1'],
                '--graphs planted --epochs 3')],
    {'Figure 15a, over GPUs': 'python -m benchmarks loader --parts gpus runs it',
     "DGL, GNNLab, GNNAdvisor and the authors' code": 'they do not run here'},
    "Speed-ups: the paper's abstract; settings: https://github.com/a1bc2def6g/fastgl-ae.")

PAPERS = {'maxk': MAXK, 'sampled': SAMPLED, 'gat': GAT, 'paths': PATHS, 'fastgl': FASTGL}


# Runs -------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Rerun(Section):
    """An exhibit in a record: tables of other records below the figures of the paper."""

    lines: list[str] = dataclasses.field(default_factory=list)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def summary(self) -> list[dict[str, Any]]:
        return [self.about]

    def markdown(self) -> str:
        return '\n'.join([f'## {self.title}', '', *self.lines])


@functools.cache
def run(command: str, common: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """The record of a command and its Markdown."""
    name, *line = shlex.split(command)
    limits = [int(value) for option, value in itertools.pairwise((*common, *line))
              if option == '--max-edges']
    line += ['--max-edges', str(min(limits))] if limits else []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f'benchmarks.{name}').main([*common, *line, '--out', folder])
        (record,) = Path(folder).glob('*.json')
        return json.loads(record.read_text()), record.with_suffix('.md').read_text()


def rerun(exhibit: Exhibit, common: tuple[str, ...], report: _harness.Report, quick: bool) -> Rerun:
    lines: list[str] = [exhibit.shows, '']
    cells: list[Cell] = []
    if exhibit.paper:
        lines += ['The paper: ' + '; '.join(
            f'{name} {figure}' for name, figure in exhibit.paper.items()) + '.', '']
    if callable(exhibit.commands):
        made, cells = exhibit.commands(quick)
        lines += [*made, '']
    else:
        for command, line in lines_of(exhibit, quick):
            data, markdown = run(shlex.join(line), common)
            report.graphs.update(data['graphs'])
            report.left_out.update(data['left_out'])
            cells += [
                Cell(f"{section['title']}: {cell['graph']}", cell['width'], cell['results'])
                for section in data['sections'] for cell in section['cells']
                if re.search(exhibit.sections, section['title'])]
            lines += [f'`python -m benchmarks {command}`', '']
            for title, body in _harness.sections_of(markdown).items():
                if re.search(exhibit.sections, title):
                    lines += [f'**{title}**', '', *body, '']
            lines += [line for note in data['notes'][1:] if note for line in (note, '')
                      ] * exhibit.notes
    about = {'shows': exhibit.shows, 'differs': exhibit.differs, 'paper': dict(exhibit.paper)}
    return Rerun(exhibit.title, cells=cells, lines=[*lines, exhibit.differs], about=about)


def lines_of(exhibit: Exhibit, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """The commands of an exhibit; each with its words and, in a quick run, those of the further
    options that its benchmark has."""
    assert not callable(exhibit.commands)
    further = itertools.repeat(exhibit.quick) if isinstance(exhibit.quick, str) else exhibit.quick
    for command, options in zip(exhibit.commands, further, strict=False):
        line, more = shlex.split(command), shlex.split(options) if quick else []
        text = (_harness.ROOT / 'benchmarks' / f'{line[0]}.py').read_text()
        for option, value in zip(more[::2], more[1::2], strict=True):
            if option == '--max-edges' or re.search(
                    rf"\b{option[2:].replace('-', '_')}=", text):
                line += [option, value]
        yield command, line


def reported(
    key: str, exhibits: Sequence[Exhibit], args: Any, common: tuple[str, ...],
) -> list[str]:
    """Reruns the exhibits of a paper, writes the record and returns those that failed."""
    paper = PAPERS[key]
    report = _harness.Report(f'papers-{key}', args, [
        f'{paper.title} ({paper.where}). Its figures come from {paper.hardware}. Graphs that end '
        'in "-like" or "-sized" are generated and have only the size of the graph in their name; '
        '1/n: an nth of its nodes and edges.', *['', paper.note] * bool(paper.note)])
    report.left_out.update(paper.left_out)
    failed = []
    for exhibit in exhibits:
        try:
            report.sections.append(rerun(exhibit, common, report, args.quick))
        except (Exception, SystemExit) as error:  # the other exhibits must run
            traceback.print_exc()
            failed.append(f'{key}, {exhibit.name}')
            report.left_out[exhibit.name] = f'it failed: {error}'
        report.save()
    report.finish()
    return failed


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser(__doc__ or '')
    parser.add_argument('papers', nargs='*', metavar='PAPER', help=f"of {', '.join(PAPERS)}")
    parser.add_argument('--only', metavar='NAMES', help='exhibits between commas')
    parser.add_argument('--list', action='store_true', help='list the exhibits and do nothing')
    args = parser.parse_args(argv)
    unknown = [name for name in args.papers if name not in PAPERS]
    if unknown:
        parser.error(f"got paper '{unknown[0]}', expected some of {', '.join(PAPERS)}")
    papers = {name: PAPERS[name] for name in args.papers or PAPERS}
    names = [name.strip() for name in args.only.split(',')] if args.only else None
    known = {each.name for paper in papers.values() for each in paper.exhibits}
    if names and not known.issuperset(names):
        parser.error(f'--only: got {args.only!r}, expected some of {", ".join(sorted(known))}')
    if args.list:
        for paper in papers.values():
            print(f'{paper.title}: {", ".join(each.name for each in paper.exhibits)}')
        return
    _harness.start(args)
    args.max_edges = args.max_edges or MAX_EDGES[args.device, args.quick]
    common = tuple(str(word) for key in ('device', 'threads', 'repeats', 'budget', 'max_edges')
                   for word in (f"--{key.replace('_', '-')}", getattr(args, key)))
    common += ('--rival-limit', str(args.rival_limit), *['--quick'] * args.quick)
    failed = []
    for key, paper in papers.items():
        chosen = [each for each in paper.exhibits if names is None or each.name in names]
        if chosen:
            args.papers = [key]
            failed += reported(key, chosen, args, common)
    if failed:
        parser.exit(1, f"failed: {'; '.join(failed)}\n")


if __name__ == '__main__':
    main()
