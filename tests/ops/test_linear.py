"""Linear maps with biases against torch's."""

import pytest
import torch
import torch.nn.functional as F

from pyg_fast.ops.linear import Linears, linear, linears


def test_are_the_linear_maps_of_torch(device: torch.device) -> None:
    x = torch.randn(7, 5, dtype=torch.double, device=device, requires_grad=True)
    params = [torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)
              for size in ((3, 5), (4, 5), (3,), (4,))]  # fmt: skip
    outs = Linears.apply(x, *params)
    expected = [F.linear(x, params[k], params[2 + k]) for k in (0, 1)]
    torch.testing.assert_close(list(outs), expected)
    torch.testing.assert_close(linear(x, params[0], params[2]), expected[0])
    given, grads = [x, *params], [torch.randn_like(out) for out in outs]
    torch.testing.assert_close(
        torch.autograd.grad(outs, given, grads), torch.autograd.grad(expected, given, grads)
    )
    assert torch.autograd.gradcheck(Linears.apply, given, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(Linears.apply, given)


@pytest.mark.parametrize('joined', [False, True])
def test_several_maps(device: torch.device, joined: bool) -> None:
    x = torch.randn(7, 5, dtype=torch.double, device=device, requires_grad=True)
    params = [torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)
              for size in ((3, 5), (4, 5), (3,), (4,))]  # fmt: skip
    outs = linears(x, tuple(params[:2]), tuple(params[2:]), joined)
    expected = [F.linear(x, params[k], params[2 + k]) for k in (0, 1)]
    torch.testing.assert_close(list(outs), expected)
    assert (outs[0].stride(0) == 7) == (joined and x.is_cuda)
    given, grads = [x, *params], [torch.randn_like(out) for out in outs]
    torch.testing.assert_close(
        torch.autograd.grad(outs, given, grads), torch.autograd.grad(expected, given, grads)
    )


def test_gradients_that_are_not_needed(device: torch.device) -> None:
    x, weights = torch.randn(7, 5, device=device), torch.randn(2, 3, 5, device=device)
    biases = torch.zeros(2, 3, device=device, requires_grad=True).unbind()
    out, _ = Linears.apply(x, *weights, *biases)
    one, other = torch.autograd.grad(out.sum(), biases, allow_unused=True)
    assert other is None
    assert torch.equal(one, torch.full_like(one, 7))


def test_large_maps(cuda: torch.device) -> None:
    given = [torch.randn(*size, device=cuda, requires_grad=True)
             for size in ((1 << 16, 16), (64, 16), (64,))]  # fmt: skip
    out = linear(*given)
    assert type(out.grad_fn).__name__ == 'LinearsBackward'
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, given, grad)
    expected = torch.autograd.grad(F.linear(*given), given, grad)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-2)
