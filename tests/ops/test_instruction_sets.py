"""The tests of widths on CPU kernels of narrower instruction sets, in one process for each set."""

import os
from pathlib import Path

import _forks
import pytest

FOLDER = Path(__file__).parent
FILES = ('spmm', 'aggregate', 'cbsr_spmm', 'maxk', 'gat', 'gatv2')
# Every type and width; with weights, of which the kernels without them are a part, and one index.
CASES = 'cpu and (True or maxk or index0) and not (cbsr and sum)'


@pytest.mark.parametrize('isa', ['baseline', 'avx2'])
def test_instruction_sets(isa: str) -> None:
    tests = [f'{FOLDER}/test_{name}.py::test_widths' for name in FILES]
    result = _forks.run(
        *('-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests, '-k', CASES),
        env={**os.environ, 'PYG_FAST_CPU_ISA': isa, 'OMP_NUM_THREADS': '1'},
        cwd=FOLDER.parents[1],
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert '40 passed' in result.stdout
