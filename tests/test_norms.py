"""Norms against their formulas in float64."""

import pytest
import torch

from lightning_modules.norms import build_norm


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)) * 3 + 2


def randomize(norm: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


def test_layernorm(x: torch.Tensor) -> None:
    norm = randomize(build_norm("layernorm", 16, 1e-5))
    d = x.double()
    centred = d - d.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).double(), expected * norm.weight + norm.bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rmsnorm_and_its_gradients(x: torch.Tensor, dtype: torch.dtype) -> None:
    norm = randomize(build_norm("rmsnorm", 16, 1e-5)).to(dtype)
    ours = x.to(dtype, copy=True).requires_grad_()
    theirs = x.to(torch.float64, copy=True).requires_grad_()
    gain = norm.weight.detach().double().requires_grad_()
    expected = gain * theirs / (theirs.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    got = norm(ours)
    got.backward(upstream.to(dtype))
    expected.backward(upstream.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for a, b in ((got, expected), (ours.grad, theirs.grad), (norm.weight.grad, gain.grad)):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_rmsnorm_of_a_strided_view_equals_that_of_its_copy() -> None:
    norm = randomize(build_norm("rmsnorm", 4, 1e-5))
    packed = torch.randn(2, 5, 3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    view, copy = packed.unbind(2)[1], packed.detach().unbind(2)[1].contiguous().requires_grad_()
    norm(view).square().sum().backward()
    norm(copy).square().sum().backward()
    torch.testing.assert_close(packed.grad[:, :, 1], copy.grad)


def test_dyt(x: torch.Tensor) -> None:
    norm = randomize(build_norm("dyt", 16, 1e-5))
    expected = norm.weight * torch.tanh(norm.alpha.double() * x.double()) + norm.bias
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert float(build_norm("dyt", 16, 1e-5).alpha.detach()) == 0.5


def test_unknown_norm_names_the_choices() -> None:
    with pytest.raises(ValueError, match="norm='batchnorm' is unknown; choose from layernorm, rmsnorm, dyt"):
        build_norm("batchnorm", 16, 1e-5)
