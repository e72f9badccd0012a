"""Positions: the matrix-product convolution against ``conv1d``, and rotary angles."""

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.convolution import grouped_convolution
from lightning_modules.positions import ConvPosition, apply_rotary, rotary_tables


@pytest.mark.parametrize("kernel", [1, 2, 5, 16])
@pytest.mark.parametrize("frames", [1, 5, 6, 17, 40])
def test_convolution_by_products_equals_conv1d(kernel: int, frames: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).double() for shape in ((2, frames, 8), (8, 4, kernel), (8,))]
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    y = grouped_convolution(*ours, groups=2)
    direct = F.conv1d(theirs[0].transpose(1, 2), theirs[1], theirs[2], padding=kernel // 2, groups=2)
    direct = direct[..., :frames].transpose(1, 2)
    torch.testing.assert_close(y, direct)
    upstream = torch.randn(y.shape, generator=generator).double()
    y.backward(upstream)
    direct.backward(upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("width", [4, 16], ids=["narrow groups", "wide groups"])
def test_convolution_rounding_is_that_of_its_precision(width: int) -> None:
    torch.manual_seed(0)
    position = ConvPosition(4 * width, 128, 4)
    x = torch.randn(2, 200, 4 * width)
    exact = position.double().convolve(x.double())
    torch.testing.assert_close(position.float().convolve(x).double(), exact, rtol=1e-4, atol=2e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(position.convolve(x).double(), exact, rtol=0.05, atol=0.05)


def test_weight_norm_starts_at_the_drawn_weights() -> None:
    torch.manual_seed(0)
    position = ConvPosition(64, 128, 16)
    torch.testing.assert_close(position.weight(), position.direction)
    assert float(position.direction.detach().std()) == pytest.approx((4 / (128 * 64)) ** 0.5, rel=0.05)


def test_rotary_products_depend_on_distance_only() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    cos, sin = rotary_tables(20, 8, 10_000.0, like)
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 20, 8) for _ in range(2))
    products = apply_rotary(q, cos, sin) @ apply_rotary(k, cos, sin).transpose(-1, -2)
    for distance in (0, 3, 7):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
