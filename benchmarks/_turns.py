"""A second built checkout, whose figures stand beside ours: a process with its package measures the
same cells in turns with this one.

The other process runs the benchmark of this tree, of each cell only what is ours and against
nothing. It waits for a line before each cell, and answers with one line of JSON.
"""
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
BEFORE = 'before, '  # and what a column is called


class Before:
    """The process of another tree, asked cell by cell."""

    def __init__(self, tree: Path, bench: str, argv: Sequence[str]) -> None:
        self.tree = tree
        self.process = Popen(
            [sys.executable, __file__, str(tree), bench, *argv, '--in-turns'], text=True,
            stdin=PIPE, stdout=PIPE)

    def cell(self, *key: Any) -> dict[str, Any]:
        """What the other process says of the cell that this one has just measured."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write('\n')
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ''
        if not line:
            sys.exit(f'{self.tree}: the benchmark failed there, see above')
        found: dict[str, Any] = json.loads(line)
        if found['key'] != list(key):
            sys.exit(f"{self.tree}: measured {found['key']}, expected {list(key)}")
        return found

    def end(self) -> None:
        self.process.communicate()


class Turns:
    """The other end: says what was measured, and waits for its next turn."""

    def __init__(self, asks: TextIO, answers: TextIO) -> None:
        self.asks, self.answers = asks, answers
        self._wait()

    def _wait(self) -> None:
        if not self.asks.readline():
            sys.exit()

    def say(self, key: Sequence[Any], results: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        print(json.dumps({'key': list(key), 'results': results, 'facts': facts}),
              file=self.answers, flush=True)
        self._wait()


def beside(ours: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Ours, each followed by what it was before."""
    out: dict[str, Any] = {}
    for name, value in ours.items():
        out[name] = value
        if name in before:
            out[BEFORE + name] = before[name]
    return out


def child(tree: str, bench: str, *argv: str) -> None:
    sys.path[0] = tree  # not the folder of this file
    import pyg_fast

    if not Path(pyg_fast.__file__).is_relative_to(Path(tree).resolve()):
        sys.exit(f'{tree} has no pyg_fast: {pyg_fast.__file__} was imported')
    sys.path[0] = str(ROOT)
    importlib.import_module(f'benchmarks.{bench}').main(argv)


if __name__ == '__main__':
    child(*sys.argv[1:])
