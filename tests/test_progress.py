"""Progress bars: shown in a terminal, of work that takes long, and leaving nothing else changed."""

import io
import sys
import time

import pytest

from pyg_fast._progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ('terminal', 'passed', 'shown', 'expected'),
    [(True, 3, True, True), (True, 0.8, True, False), (True, 3, False, False),
     (False, 3, True, False)],
)  # fmt: skip
def test_bar(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, passed: float, shown: bool, expected: bool
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, 'stderr', stderr)
    start, now = time.time(), [0.0]
    monkeypatch.setattr('tqdm.std.time', lambda: start + now[0])
    seen = []
    for item in progress(range(4), 'work', shown=shown):
        seen.append(item)
        now[0] += passed / 2
    assert seen == [0, 1, 2, 3]
    assert ('work' in stderr.getvalue()) == expected
