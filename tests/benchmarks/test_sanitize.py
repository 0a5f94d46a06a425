"""benchmarks.sanitize, with a script in place of compute-sanitizer."""

import os
from pathlib import Path

import pytest

from benchmarks import sanitize

SANITIZER = """#!/bin/sh
while [ "$1" != 9 ]; do shift; done
shift
"$@"
status=$?
echo "========= Invalid __global__ read of size 4 bytes"
echo "========= {summary}"
[ $status = 0 ] && exit {status} || exit $status
"""
TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip('not here')
@pytest.mark.parametrize('k', range(3))
def test_each(k): pass
def test_other(): pass
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    few = {'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1', 'PYTEST_PLUGINS': '_hypothesis_pytestplugin'}
    for name, value in few.items():  # The imports of other plugins take seconds.
        monkeypatch.setenv(name, value)
    (tmp_path / 'conftest.py').write_text(
        'import hypothesis\nhypothesis.settings.register_profile("few")\n'
    )
    (tmp_path / 'test_it.py').write_text(TESTS)
    return tmp_path / 'test_it.py'


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, summary: str, status: int = 0) -> None:
    (folder / 'bin').mkdir()
    program = folder / 'bin' / 'compute-sanitizer'
    program.write_text(SANITIZER.format(summary=summary, status=status))
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{folder / "bin"}{os.pathsep}{os.environ["PATH"]}')


def test_functions_take_turns(tests: Path) -> None:
    names = [name.split('::')[1] for name in sanitize.collected([str(tests)], 'each or other')]
    assert sorted(names) == ['test_each[0]', 'test_each[1]', 'test_each[2]', 'test_other']
    assert names.index('test_other') == 1
    with pytest.raises(SystemExit, match='no test collected'):
        sanitize.collected([str(tests)], 'nothing_is_called_so')


@pytest.mark.parametrize(
    ('output', 'errors'),
    [
        ('========= ERROR SUMMARY: 0 errors', 0),
        ('========= ERROR SUMMARY: 1 error\n========= ERROR SUMMARY: 12 errors', 13),
        ('========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)', 3),
        ('killed before its summary', None),
    ],
)
def test_errors_are_counted(output: str, errors: int | None) -> None:
    assert sanitize.counted(output) == errors


def test_errors_behind_the_dots_of_pytest_are_told() -> None:
    output = (
        '.s..========= Invalid read\n.... [100%]\nE   assert\n.=========     Host Frame: in python3'
    )
    assert sanitize.told(output) == '========= Invalid read\nE   assert'


def test_what_was_found_is_told(monkeypatch: pytest.MonkeyPatch, tests: Path) -> None:
    stand_in(monkeypatch, tests.parent, 'ERROR SUMMARY: 2 errors', 9)
    outcome = sanitize.check('memcheck', [f'{tests}::test_passes'], 60)
    assert outcome.errors == 2
    assert list(outcome.tests.values()) == ['passed']
    assert 'Invalid __global__ read' in outcome.output


def test_outcomes_are_told_apart(monkeypatch: pytest.MonkeyPatch, tests: Path) -> None:
    stand_in(monkeypatch, tests.parent, 'ERROR SUMMARY: 0 errors')
    outcome = sanitize.check('memcheck', [str(tests)], 60)
    assert sorted(outcome.tests.values()) == ['failed', *['passed'] * 5, 'skipped']
    files = {sanitize.file_of(name) for name in outcome.tests}
    assert [Path(file).name for file in files] == [tests.name]
    assert 'assert 1 == 2' in outcome.output
    assert sanitize.check('memcheck', [str(tests)], 0.01).errors is None
