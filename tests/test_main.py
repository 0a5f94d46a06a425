"""The report of `python -m pyg_fast`, and its self-test, which finds a wrong op."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _forks
import pytest
import torch
from _raw_ops import OF_PYTHON, op_names
from torch import Tensor

import pyg_fast
import pyg_fast.__main__ as report
from pyg_fast import _self_test, ops

CONTAINERS = {'Graph', 'NodeMap', 'SampledSubgraph'}


def spoiled(out: Any) -> Any:
    """A wrong result."""
    if isinstance(out, ops.CBSR):
        return ops.CBSR(-out.values, out.columns, out.num_columns)
    if isinstance(out, tuple):
        parts = [out[0] + 1, *out[1:]]
        return type(out)(*parts) if hasattr(out, '_fields') else tuple(parts)
    return out + 1


class SpoiledCBSR(ops.CBSR):
    """Loses the first column."""

    def to_dense(self) -> Tensor:
        out = super().to_dense()
        return torch.cat([out[:, 1:], torch.zeros_like(out[:, :1])], 1)


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces an op; by one with wrong results, unless another one is given."""

    def by(op: str, wrong: Any = None) -> None:
        right = getattr(ops, op)
        if wrong is None:
            wrong = SpoiledCBSR if op == 'CBSR' else lambda *args, **kwargs: spoiled(
                right(*args, **kwargs))  # fmt: skip
        monkeypatch.setattr(ops, op, wrong)

    return by


def test_every_op_is_checked() -> None:
    assert set(_self_test.CHECKS) == set(ops.__all__) - CONTAINERS - {'with_cuda'}


def test_all_ops_pass(device: torch.device) -> None:
    outcomes = list(_self_test.self_test(device))
    assert {op: error for op, error in outcomes if error is not None} == {}
    assert [op for op, _ in outcomes] == list(_self_test.CHECKS)


@pytest.mark.parametrize('op', _self_test.CHECKS)
def test_wrong_result_is_found(op: str, device: torch.device, replace: Callable[..., None]) -> None:
    replace(op)
    with pytest.raises(AssertionError):
        _self_test.CHECKS[op](device)


def test_wrong_gradient_is_found(device: torch.device, replace: Callable[..., None]) -> None:
    right = ops.spmm

    def wrong(graph: Any, x: Tensor, *args: Any) -> Tensor:
        out = right(graph, x, *args)
        return out + (x - x.detach()).sum()

    replace('spmm', wrong)
    with pytest.raises(AssertionError, match='gradient of x, sum'):
        _self_test.CHECKS['spmm'](device)


def test_nan_and_wrong_shape_are_found() -> None:
    nan = torch.tensor([float('nan')])
    with pytest.raises(AssertionError, match='off by nan'):
        _self_test._near('it', nan, torch.zeros(1, dtype=torch.double))
    for check in (_self_test._near, _self_test._same):
        with pytest.raises(AssertionError, match=r'it has shape \[2\], not \[1\]'):
            check('it', torch.zeros(2), torch.zeros(1))


def test_failure_is_told(replace: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    replace('to_csr')

    def crash(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError('no kernel\nfor this')

    replace('maxk', crash)
    assert report.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = next(line for line in lines if line.startswith('  to_csr'))
    assert wrong.split('FAILED: ')[1].startswith('AssertionError: rowptr by dst is wrong in')
    assert '  maxk               FAILED: RuntimeError: no kernel for this' in lines
    assert '  spmm               ok' in lines
    assert 'checks failed.' in lines[-1]


def test_command() -> None:
    root = Path(report.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')])
    env = {**os.environ, 'PYTHONPATH': path, 'PYG_FAST_CPU_ISA': 'baseline'}
    run = _forks.run('-m', 'pyg_fast', env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    facts = {line[:15].strip(): line[15:].strip() for line in run.stdout.splitlines()}
    assert facts['pyg_fast'].startswith(pyg_fast.__version__)
    assert facts['torch'] == torch.__version__
    assert facts['CPU kernels'] == 'baseline (PYG_FAST_CPU_ISA=baseline)'
    assert 'All is well.' in run.stdout


def test_table_of_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(['ops']) == 0
    file, place = '', {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(' '):
            place[line.split('(')[0].strip()] = file
        else:
            file = line
    assert set(place) == op_names() - OF_PYTHON
    root = Path(report.__file__).parents[1]
    for op, file in place.items():
        assert op in (root / file).read_text() or op == 'error_record'
    order = [(file, op) for op, file in place.items()]
    assert order == sorted(order)
    assert place['spmm_groups'] == 'pyg_fast/ops/spmm.py'


@pytest.mark.parametrize(
    ('flags', 'cap', 'expected'),
    [
        (report._AVX512, None, 'avx512'),
        (report._AVX512, 'avx512', 'avx512'),
        (report._AVX512, 'avx2', 'avx2'),
        (report._AVX512, 'baseline', 'baseline'),
        (report._AVX512 - {'avx512vl'}, None, 'avx2'),
        (report._AVX2, None, 'avx2'),
        (report._AVX2, 'baseline', 'baseline'),
        ({'avx2', 'avx512f'}, None, 'baseline'),
        (set(), None, 'baseline'),
    ],
)
def test_instruction_set(flags: set[str], cap: str | None, expected: str) -> None:
    assert report.instruction_set(flags, cap) == expected


@pytest.mark.parametrize('module', [pyg_fast.nn, pyg_fast.ops, pyg_fast.transforms])
def test_python_may_correct_unknown_names(module: Any) -> None:
    """It then looks for what is alike among the names of the object."""
    with pytest.raises(AttributeError, match='no attribute') as error:
        getattr(module, name := 'FusedSageConv')
    assert (error.value.name, error.value.obj) == (name, module)
    assert set(module.__all__) <= set(dir(module))
