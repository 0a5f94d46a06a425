"""The tests of widths on CPU kernels of narrower instruction sets, in one process for each set."""

import os
from pathlib import Path

import _forks
import pytest

FOLDER = Path(__file__).parent
FILES = ('spmm', 'aggregate', 'cbsr_spmm', 'maxk', 'gat', 'gatv2')


@pytest.mark.parametrize('isa', ['baseline', 'avx2'])
def test_instruction_sets(isa: str) -> None:
    files = [str(FOLDER / f'test_{name}.py') for name in FILES]
    command = ['-m', 'pytest', '-q', '-p', 'no:cacheprovider', *files]
    result = _forks.run(
        *(*command, '-k', 'cpu and test_widths and not (cbsr and sum)'),
        env={**os.environ, 'PYG_FAST_CPU_ISA': isa, 'OMP_NUM_THREADS': '1'},
        cwd=FOLDER.parents[1],
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert '72 passed' in result.stdout
