"""The tables and figures of the five papers: what they report, and what comes out here.

python -m benchmarks.papers                       all five, a report each
python -m benchmarks.papers maxk paths            two of them
python -m benchmarks.papers maxk --only Kernels   one exhibit of one
python -m benchmarks.papers --quick               small graphs: a minute or two
python -m benchmarks.papers --list                what there is

Graphs of the papers are drawn anew in their sizes (pyg_fast/datasets.py) unless they are at hand,
and smaller ones where they would be too large (--max-edges); their names say both.
"""
import argparse
import importlib
from collections.abc import Sequence

from .. import _harness
from ._exhibit import Run, reported

PAPERS = ('maxk', 'sampled', 'gat', 'paths', 'fastgl')
MAX_EDGES = {('cuda', False): 200_000_000, ('cuda', True): 2_000_000,
             ('cpu', False): 4_000_000, ('cpu', True): 100_000}


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('The tables and figures of the papers.')
    parser.add_argument('papers', nargs='*', metavar='PAPER', help=f"of {', '.join(PAPERS)}")
    parser.add_argument(
        '--only', metavar='NAMES', help='exhibits between commas, as --list names them')
    parser.add_argument('--max-edges', type=int, help='of a generated graph')
    parser.add_argument('--list', action='store_true', help='what there is, and nothing else')
    args = parser.parse_args(argv)
    unknown = [name for name in args.papers if name not in PAPERS]
    if unknown:
        parser.error(f"got paper '{unknown[0]}', expected some of {', '.join(PAPERS)}")
    modules = {
        name: importlib.import_module(f'.{name}', __package__) for name in args.papers or PAPERS}
    names = [name.strip() for name in args.only.split(',')] if args.only else None
    known = {made.name for module in modules.values() for made in module.PAPER.exhibits}
    if names and not known.issuperset(names):
        parser.error(f'--only: got {args.only!r}, expected some of {", ".join(sorted(known))}')
    if args.list:
        for module in modules.values():
            print(f'{module.PAPER.title}: {", ".join(made.name for made in module.PAPER.exhibits)}')
        return
    wall = _harness.start(args)
    if args.max_edges is None:
        args.max_edges = MAX_EDGES[args.device, args.quick]
    failed: list[str] = []
    for name, module in modules.items():
        chosen = [
            made for made in module.PAPER.exhibits if names is None or made.name in names]
        if chosen:
            arguments = argparse.Namespace(**{**vars(args), 'papers': [name]})
            failed += [
                f'{name}, {made}'
                for made in reported(module.PAPER, chosen, Run(arguments, wall))]
    if failed:
        parser.exit(1, f"failed: {'; '.join(failed)}\n")


if __name__ == '__main__':
    main()
