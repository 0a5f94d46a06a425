"""Products of matrices with many rows, in blocks."""

import pytest
import torch

from pyg_fast.ops import tall_product as module
from pyg_fast.ops.tall_product import has_blocks, tall_product


@pytest.mark.parametrize('rows', [0, 1, 4, 8, 23])
def test_blocks_of_rows(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, 'has_blocks', lambda a, columns: True)
    monkeypatch.setattr(module, '_BLOCK_ROWS', 4)
    a, b = (torch.randn(rows, size, dtype=torch.double, device=device, requires_grad=True)
            for size in (3, 5))  # fmt: skip
    out = tall_product(a, b)
    torch.testing.assert_close(out, a.t() @ b)
    assert torch.equal(out, tall_product(a, b))
    strided = b.detach().t().contiguous().t()
    torch.testing.assert_close(tall_product(a, strided), out)
    if rows:
        assert torch.autograd.gradcheck(tall_product, (a, b), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(tall_product, (a, b))


def test_many_rows(cuda: torch.device) -> None:
    rows = module._FEW_BLOCKS * module._BLOCK_ROWS + 77
    a, b = (torch.randn(rows, size, device=cuda) for size in (8, 16))
    assert has_blocks(a, 16)
    assert not has_blocks(a, 1 << 10)
    assert not has_blocks(a[:1000], 16)
    assert not has_blocks(a.half(), 16)
    out = tall_product(a, b)
    assert torch.equal(out, tall_product(a, b))
    expected, size = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    assert ((out.double() - expected).abs() <= 1e-5 * size).all()


def test_on_a_cpu() -> None:
    assert not has_blocks(torch.empty(1, 8).expand(1 << 24, 8), 16)
