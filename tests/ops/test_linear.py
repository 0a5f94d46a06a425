"""A linear map with a bias against torch's."""

import torch
import torch.nn.functional as F

from pyg_fast.ops.linear import Linear, linear


def test_is_the_linear_map_of_torch(device: torch.device) -> None:
    sizes = ((7, 5), (3, 5), (3,))
    given = [torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)
             for size in sizes]  # fmt: skip
    for run in (linear, Linear.apply):
        torch.testing.assert_close(run(*given), F.linear(*given))
    assert torch.autograd.gradcheck(Linear.apply, given)
    assert torch.autograd.gradgradcheck(Linear.apply, given)


def test_gradients_that_are_not_needed(device: torch.device) -> None:
    x, weight = torch.randn(7, 5, device=device), torch.randn(3, 5, device=device)
    bias = torch.zeros(3, device=device, requires_grad=True)
    Linear.apply(x, weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 7))


def test_large_maps(cuda: torch.device) -> None:
    given = [torch.randn(*size, device=cuda, requires_grad=True)
             for size in ((1 << 16, 16), (64, 16), (64,))]  # fmt: skip
    out = linear(*given)
    assert type(out.grad_fn).__name__ == 'LinearBackward'
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, given, grad)
    expected = torch.autograd.grad(F.linear(*given), given, grad)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-2)
