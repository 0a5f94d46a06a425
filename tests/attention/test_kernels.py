"""The CUDA kernels of attention within graphs, where no GPU is: by numpy, and compiled."""

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_fast.attention import _composed, _cuda
from pyg_fast.attention._triton import CONSTANTS, FORWARD, OF_KEYS, OF_QUERIES
from pyg_fast.message._cuda import jit_function
from tests.message import _by_numpy

from .test_segment_attention import rows_of

pytest.importorskip('triton')

KERNELS = {
    'segment_attention': FORWARD, 'segment_attention_queries': OF_QUERIES,
    'segment_attention_keys': OF_KEYS,
}  # fmt: skip
SEED = torch.tensor([-1234567890123456789])


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run by numpy, which also checks that they stay inside of tensors."""
    monkeypatch.setattr(_cuda, 'launch_kernel', _by_numpy._launch)
    monkeypatch.setattr(_cuda, 'on_device', lambda device: nullcontext())
    monkeypatch.setattr(_cuda, 'processors', lambda device: 3)


def run(inputs: list[Tensor], grad: Tensor, *args: Any) -> list[Tensor]:
    out, lse = _cuda.run_forward(*inputs, *args)
    batch, seed, *numbers = args
    return [out, *_cuda.run_backward(grad, *inputs, batch, seed, out, lse, *numbers)]


def expected(inputs: list[Tensor], grad: Tensor, *args: Any) -> list[Tensor]:
    exact = [x.double() for x in inputs]
    return [_composed.attend(*exact, *args), *_composed.gradients(grad.double(), *exact, *args)]


@pytest.mark.parametrize(
    ('sizes', 'heads', 'channels', 'dtype', 'dropout_p'),
    [
        ([3, 1, 0, 20, 1, 70], 2, 8, torch.float64, 0.3),
        ([3, 1, 0, 20, 1, 70], 2, 8, torch.float32, 0.4),
        ([1] * 40 + [30], 3, 16, torch.float32, 0.1),
        ([100, 64, 64, 1], 1, 64, torch.float32, 0.0),
        ([300], 1, 24, torch.float32, 0.0),
        ([20, 20], 1, 130, torch.float32, 0.9),
        ([26] * 40, 1, 16, torch.float32, 0.0),
    ],
)
def test_by_numpy(
    numpy: None, sizes: list[int], heads: int, channels: int, dtype: torch.dtype, dropout_p: float
) -> None:
    inputs, batch = rows_of(sizes, heads, channels, dtype)
    args = batch * 3 + 1, SEED if dropout_p else None, dropout_p, 0.3
    if len(sizes) == 1:
        args = (None, *args[1:])
    grad = torch.randn(inputs[0].shape, dtype=dtype)
    for a, b in zip(run(inputs, grad, *args), expected(inputs, grad, *args), strict=True):
        assert (a - b).abs().max() <= (1e-12 if dtype == torch.float64 else 2e-6) * b.abs().max()


def test_rounded_products_by_numpy(numpy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch allows TF32 their error is less than that of TF32."""
    monkeypatch.setattr(_cuda, 'may_round', lambda: True)
    inputs, batch = rows_of([30, 5], 1, 16, torch.float32)
    grad, args = torch.randn(inputs[0].shape), (batch, None, 0.0, 0.3)
    pairs = zip(run(inputs, grad, *args), expected(inputs, grad, *args), strict=True)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    assert 1e-7 < max(errors) < 1e-4


@pytest.mark.parametrize('wrong', [float('nan'), float('inf')])
def test_numbers_that_are_not_finite_stay_in_their_graph(numpy: None, wrong: float) -> None:
    inputs, batch = rows_of([5, 4, 30], 1, 8, torch.float32)
    grad = torch.randn(inputs[0].shape)
    args = batch, None, 0.0, 0.3
    plain = run(inputs, grad, *args)
    for k in range(4):
        changed = [x.clone() for x in (*inputs, grad)]
        changed[k][6] = wrong
        got = run(changed[:3], changed[3], *args)
        for a, b in zip(got, plain, strict=True):
            torch.testing.assert_close(a[batch != 1], b[batch != 1], rtol=1e-5, atol=1e-6)
        assert not torch.cat(got)[torch.cat([batch] * 4) == 1].isfinite().all()


def test_rows_out_of_order(numpy: None) -> None:
    """They are NaN, as a GPU is not asked."""
    inputs, _ = rows_of([4], 1, 8, torch.float32)
    for batch in ([1, 0, 0, 1], [5, 5, 5, 4], [0, 1, 0, 1]):
        out, _ = _cuda.run_forward(*inputs, torch.tensor(batch), None, 0.0, 0.3)
        assert out.isnan().all()


def test_products_are_rounded_where_torch_rounds() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        found = {}
        for setting in ('highest', 'high'):
            torch.set_float32_matmul_precision(setting)
            found[setting] = _cuda.precision_of(torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == {'highest': 'highest', 'high': 'high'}


def test_gpus_without_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, 'shared_memory', lambda: 0)
    assert not _cuda.has_products()
    monkeypatch.setattr(_cuda, 'shared_memory', lambda: 2**16)
    assert _cuda.has_products()


def compiled(
    name: str, channels: int, dtype: torch.dtype, precision: str, drops: bool, capability: int
) -> Any:
    """A kernel, for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tl = triton.language
    function = jit_function(KERNELS[name], name)
    form = _cuda.choose_form(channels, dtype, name != 'segment_attention', capability == 80)
    width = max(16, _cuda.next_power_of_two(channels))
    acc = tl.float64 if dtype == torch.float64 else tl.float32
    steps = (3 * 4 * channels,) * 3
    values = (
        0.25, 4, channels, *steps, form.rows, form.block, width, form.stages, precision, True,
        drops, acc,
    )  # fmt: skip
    constants = dict(zip(CONSTANTS, values, strict=True))
    names = {torch.float32: 'fp32', torch.float64: 'fp64', torch.bfloat16: 'bf16'}
    kinds = {'num_rows': 'i32', 'threshold': 'i32', 'batch': '*i64', 'seed': '*i64'}
    kinds |= dict.fromkeys(('lse', 'delta'), '*fp64' if dtype == torch.float64 else '*fp32')
    kinds |= dict.fromkeys(constants, 'constexpr')
    parameters = function.arg_names
    signature = {each: kinds.get(each, f'*{names[dtype]}') for each in parameters}
    aligned = {
        (k,): [['tt.divisibility', 16]] for k, p in enumerate(parameters) if signature[p][0] == '*'
    }
    source = ASTSource(
        function, signature, {(parameters.index(n),): v for n, v in constants.items()}, aligned
    )
    return triton.compile(
        source, target=GPUTarget('cuda', capability, 32), options={'num_warps': form.warps}
    )


GPS = 16, torch.float32, 'highest', False, 90
WIDE = 64, torch.bfloat16, 'half', True, 90


@pytest.mark.parametrize(
    ('name', 'channels', 'dtype', 'precision', 'drops', 'capability'),
    [
        *((name, *each) for each in (GPS, WIDE) for name in KERNELS),
        # The kernel with most in registers.
        ('segment_attention_keys', 64, torch.float32, 'high', True, 80),
        ('segment_attention_keys', 16, torch.float64, 'float64', False, 80),
    ],
)
def test_compiles(
    name: str, channels: int, dtype: torch.dtype, precision: str, drops: bool, capability: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Within the registers and the shared memory of all GPUs of compute capability 8.0 and more."""
    kernel = compiled(name, channels, dtype, precision, drops, capability)
    assert kernel.metadata.shared <= 99 * 2**10
    ptx = kernel.asm['ptx']
    assert 'mma' in ptx
    assert 'atom' not in ptx
    import triton

    assembler = Path(triton.__file__).parent / 'backends/nvidia/bin/ptxas'
    if not assembler.exists():
        pytest.skip('Triton has no ptxas of its own')
    (tmp_path / 'kernel.ptx').write_text(ptx)
    target = 'sm_90a' if capability == 90 else f'sm_{capability}'
    done = subprocess.run(
        [assembler, '-v', '--gpu-name', target, 'kernel.ptx', '-o', 'kernel.o'], cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sum(map(int, re.findall(r'(\d+) bytes spill', done.stderr))) <= 256
