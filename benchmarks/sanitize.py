"""NVIDIA's compute-sanitizer over CUDA tests: memcheck, racecheck, initcheck.

python -m benchmarks sanitize                             every op, forward and backward, all tools
python -m benchmarks sanitize --tools memcheck --tests tests/ops --match 'cuda and hub'
python -m benchmarks sanitize --seconds 420 --jobs 15     begin nothing after seven minutes
python -m benchmarks sanitize --kernels pyg_fast          without torch's kernels, in less time

The benchmark takes one test of each test function in turns and runs them in separate processes.
Tests that are left at the end of the time count as not run: all of tests/ops takes hours. Torch
caches no memory, so that a read past the end of a tensor is past the end of an allocation.
"""
import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path

from . import _harness
from ._harness import Cell

TOOLS = ('memcheck', 'racecheck', 'initcheck')
TESTS = ('tests/robustness/test_same_bits.py', 'tests/ops/test_gcn_norm.py')
# Compiled code runs the same kernels, long after; a profiler and the sanitizer exclude each other,
# and so do captures and allocations that are not cached.
MATCH = (
    'cuda and (test_op or loops) and not compile and not opcheck and not profile '
    'and not cuda_graph and not capture')
_LINES = 24  # of a process that found something
_PYTHON = re.compile(r'Host Frame:.* in (lib)?(python|torch_python)')
_TOLD = re.compile(r'=========.*|^(?:FAILED|E  ).*', re.MULTILINE)  # also after pytest's dots
GRACE = 120.0  # seconds that what has begun may take when the time is over
_SUMMARY = re.compile(r'(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)')


@dataclasses.dataclass
class Outcome:
    """Of one process: outcome of each test that ended, errors that the tool counted (None if
    it did not come to an end), and the lines that tell an error.
    """

    tests: dict[str, str]
    errors: int | None
    output: str = ''


def collected(tests: Sequence[str], match: str) -> list[str]:
    """The chosen tests, one of each test function before the second of any."""
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-k', match, *tests]
    done = subprocess.run(
        [*command, '-p', 'no:cacheprovider'], capture_output=True, text=True, cwd=_harness.ROOT)
    names = [line for line in done.stdout.splitlines() if '::' in line and ' ' not in line[:1]]
    if done.returncode or not names:
        raise SystemExit(f'no test collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}')
    functions = collections.defaultdict(list)
    for name in names:
        functions[name.split('[')[0]].append(name)
    for some in functions.values():
        random.Random(0).shuffle(some)
    turns = itertools.zip_longest(*functions.values())
    return [name for turn in turns for name in turn if name is not None]


def file_of(name: str) -> str:
    return name.split('::')[0]


def check(tool: str, names: Sequence[str], timeout: float, kernels: str = '') -> Outcome:
    """Runs some tests under a tool, which looks at kernels whose mangled names have a part."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / 'found.xml'
        command = [
            'compute-sanitizer', '--tool', tool, '--error-exitcode', '9',
            *(['--kernel-name', f'kns={kernels}'] if kernels else []),
            sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist',
            '--hypothesis-profile=few', f'--junit-xml={found}', '-o', 'junit_family=xunit1',
            *names]
        env = os.environ | {'PYTORCH_NO_CUDA_MEMORY_CACHING': '1', 'OMP_NUM_THREADS': '1'}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=_harness.ROOT, env=env,
                timeout=timeout)
        except subprocess.TimeoutExpired:
            return Outcome({}, None, 'stopped: no time left')
        tests = outcomes(found.read_text()) if found.exists() else {}
    errors = counted(done.stdout)
    quiet = done.returncode == 0 and errors == 0
    return Outcome(tests, errors, '' if quiet else told(done.stdout) or done.stdout[-2000:])


def told(output: str) -> str:
    """The first lines about errors, without the Python stack."""
    lines = [line for line in _TOLD.findall(output) if not _PYTHON.search(line)]
    return '\n'.join(lines[:_LINES])


def counted(output: str) -> int | None:
    """The errors of all summaries, None if there is no summary."""
    counts = [int(a or b) for a, b in _SUMMARY.findall(output)]
    return sum(counts) if counts else None


def outcomes(xml_text: str) -> dict[str, str]:
    """Outcomes by file and name, as pytest writes them."""
    found = {}
    for case in xml.etree.ElementTree.fromstring(xml_text).iter('testcase'):
        kinds = {child.tag for child in case}
        outcome = (
            'failed' if kinds & {'failure', 'error'} else
            'skipped' if 'skipped' in kinds else 'passed')
        found[f"{case.get('file')}::{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.sanitize', description='compute-sanitizer over CUDA tests.')
    parser.add_argument(
        '--tools', type=_harness.choice('tool', TOOLS), default=TOOLS)
    parser.add_argument('--tests', nargs='+', default=TESTS)
    parser.add_argument('--match', default=MATCH, help="as pytest's -k")
    parser.add_argument(
        '--kernels', default='', metavar='PART', help='only kernels with this in their names')
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    parser.add_argument(
        '--piece', type=int, default=24, metavar='TESTS',
        help='of a process, which takes seconds to start; one that is stopped counts none')
    parser.add_argument('--seconds', type=float, default=3600.0)
    parser.add_argument(
        '--out', type=Path, metavar='DIR', default=_harness.ROOT / 'benchmarks' / 'results')
    args = parser.parse_args(argv)
    args.device = 'cuda'
    start = time.monotonic()
    names = collected(args.tests, args.match)
    pieces = [names[k:k + args.piece] for k in range(0, len(names), args.piece)]
    report = _harness.Report('sanitize', args, [
        f"compute-sanitizer over the CUDA tests of {', '.join(args.tests)} that match "
        f'"{args.match}", hypothesis drawing five examples each, torch caching no memory.'
        + f' Only kernels with "{args.kernels}" in their name.' * bool(args.kernels)])

    def piece(tool: str, some: list[str]) -> tuple[str, list[str], Outcome]:
        left = args.seconds - (time.monotonic() - start)
        if left <= 0:
            return tool, some, Outcome({}, None, 'stopped: no time left')
        return tool, some, check(tool, some, left + GRACE, args.kernels)

    ran: dict[str, dict[str, collections.Counter[str]]] = {
        tool: collections.defaultdict(collections.Counter) for tool in args.tools}
    errors: collections.Counter[str] = collections.Counter()
    troubles = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(piece, tool, some) for some in pieces for tool in args.tools]
        for future in concurrent.futures.as_completed(futures):
            tool, some, outcome = future.result()
            for name in some:
                ran[tool][file_of(name)]['chosen'] += 1
            for name, kind in outcome.tests.items():
                ran[tool][file_of(name)][kind] += 1
            errors[tool] += outcome.errors or 0
            if outcome.output and not outcome.output.startswith('stopped'):
                troubles.append(f'{tool}, from {some[0]}:\n{outcome.output}')
                _harness.log(troubles[-1])
    for tool in args.tools:
        section = report.section(f'{tool}: {errors[tool]} errors', width='tests')
        ran[tool]['all'] = sum(ran[tool].values(), collections.Counter())
        for file, counts in sorted(ran[tool].items()):
            done = {kind: counts[kind] for kind in ('passed', 'failed', 'skipped')}
            section.cells.append(Cell(file, counts['chosen'], {}, facts={
                **done, 'not run': counts['chosen'] - sum(done.values())}))
    report.notes += [f'```\n{trouble}\n```' for trouble in troubles]
    report.finish()
    if troubles:
        raise SystemExit(1)


if __name__ == '__main__':
    main()
