"""Maps of several heads as one matrix of blocks."""

import pytest
import torch

from pyg_fast.ops.block_matrix import BlockMatrix


@pytest.mark.parametrize('heads', [2, 3])
@pytest.mark.parametrize('transposed', [False, True])
def test_block_matrix(heads: int, transposed: bool, device: torch.device) -> None:
    weight = torch.randn(4, heads * 5, dtype=torch.float64, device=device)
    weight = weight.t().contiguous().t() if transposed else weight
    weight.requires_grad_()
    out = BlockMatrix.apply(weight, heads)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.block_diag(*weight.split(5, dim=1)))
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, weight, grad)
    expected = [grad[4 * h : 4 * h + 4, 5 * h : 5 * h + 5] for h in range(heads)]
    torch.testing.assert_close(found, torch.cat(expected, 1))
    assert found.t().is_contiguous()  # as the weight of a linear map
    assert torch.autograd.gradcheck(lambda w: BlockMatrix.apply(w, heads), weight)
    assert torch.autograd.gradgradcheck(lambda w: BlockMatrix.apply(w, heads), weight)


def test_several_gradients_at_once(device: torch.device) -> None:
    weight = torch.randn(3, 8, device=device, requires_grad=True)
    out = BlockMatrix.apply(weight, 2)
    grads = torch.randn(4, *out.shape, device=device)
    (found,) = torch.autograd.grad(out, weight, grads, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, weight, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(found, torch.stack(each))
