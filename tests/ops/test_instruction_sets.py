"""The tests of widths, and of messages by heads, on CPU kernels of narrower instruction sets, in
one process for each set."""

import os
from pathlib import Path

import _forks
import pytest

FOLDER = Path(__file__).parents[1]
FILES = (
    'ops/test_spmm', 'ops/test_aggregate', 'ops/test_cbsr_spmm', 'papers/maxk/test_op',
    'ops/test_gat', 'ops/test_gatv2',
)  # fmt: skip
# Every type and width; with weights, of which the kernels without them are a part, and one index.
MESSAGES = ('test_heads', 'test_joint_softmax', 'test_reductions_of_heads')
CASES = ' or '.join(['cpu and (True or maxk or index0) and not (cbsr and sum)', *MESSAGES])


@pytest.mark.parametrize('isa', ['baseline', 'avx2'])
def test_instruction_sets(isa: str) -> None:
    tests = [f'{FOLDER}/{name}.py::test_widths' for name in FILES]
    tests += [f'{FOLDER}/message/test_cpu.py::{name}' for name in MESSAGES]
    result = _forks.run(
        *('-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--assert', 'plain', *tests, '-k', CASES),
        env={**os.environ, 'PYG_FAST_CPU_ISA': isa, 'OMP_NUM_THREADS': '1'},
        cwd=FOLDER.parent,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert '134 passed' in result.stdout
