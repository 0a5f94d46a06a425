"""`--skipped` runs the tests that the last run skipped: .ci/run relies on it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def package(): pytest.importorskip('late', reason='not installed')

def test_plain(): pass
@pytest.mark.optional
def test_more(): pass
@pytest.mark.xfail
def test_known(): assert False
@pytest.mark.parametrize('i', [1, 11])
def test_late(i, request):
    if i == 1: request.getfixturevalue('package')
def test_fixture(package): pass
"""
WHOLE = """
import pytest
pytest.importorskip('late', reason='not installed')
def test_it(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / 'tests').mkdir()
    shutil.copy(ROOT / 'tests/_skipped.py', tmp_path / 'tests/conftest.py')
    shutil.copy(ROOT / 'setup.cfg', tmp_path / 'setup.cfg')
    (tmp_path / 'tests/test_some.py').write_text(TESTS)
    (tmp_path / 'tests/test_whole.py').write_text(WHOLE)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'xdist', *arguments, 'tests']
    env = {name: value for name, value in os.environ.items() if name != 'PYTEST_ADDOPTS'}
    env['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # Others take longer to import than the tests.
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_skipped(folder: Path) -> None:
    # Both processes of the next run know the tests that either one skipped.
    code, said = run(folder, '-n', '2')
    assert code == 0, said
    assert '3 passed' in said
    (folder / 'late.py').touch()
    code, said = run(folder, '--skipped', '-rA')
    assert code == 0, said
    assert '4 passed' in said
    for name in ('test_more', 'test_late[1]', 'test_fixture', 'test_it'):
        assert f'PASSED tests/test_{"whole" if name == "test_it" else "some"}.py::{name}' in said


def test_skipped_needs_a_run_before(folder: Path) -> None:
    code, said = run(folder, '--skipped')
    assert code == 4
    assert '--skipped: the cache holds no run before this one' in said
