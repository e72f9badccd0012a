"""The normalizations of the encoder: LayerNorm, RMSNorm and DyT, all over the last axis.

Legend: D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DyT", "build_norm"]


class DyT(nn.Module):
    """Dynamic tanh: ``y = gain * tanh(alpha * x) + bias`` with one learned alpha (Zhu et al. 2025, arXiv 2503.10622).

    Not a normalization: it squashes outliers elementwise and takes no statistics, so the scale of its output depends
    on the scale of its input.

    Args:
        dim: D.
        alpha: First value of alpha (0.5 in the paper).
    """

    def __init__(self, dim: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.first_alpha = alpha
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self) -> None:
        """Set alpha to its first value, gain to 1 and bias to 0."""
        nn.init.constant_(self.alpha, self.first_alpha)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D]``."""
        return torch.addcmul(self.bias, self.weight, torch.tanh(self.alpha * x))


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm forward and backward in few passes; ``F.rms_norm`` on CPUs is a chain of many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).sqrt_()
        scale = rms.reciprocal_()
        ctx.save_for_backward(x, weight, scale)
        y: Tensor = (x * scale).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (dy,) = upstream
        product = (dy * x).reshape(-1, x.shape[-1])
        along = torch.mv(product, weight).view_as(scale)
        d_weight = torch.mv(product.t(), scale.flatten())
        dx = (dy * weight).mul_(scale)
        dx.addcmul_(x, along.mul_(scale.pow(3)).div_(x.shape[-1]), value=-1.0)
        return dx, d_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square norm: ``y = gain * x / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D]``."""
        plain = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        if x.device.type == "cpu" and plain and not torch.compiler.is_compiling():
            return _RMSNormOnCPU.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """Build a norm over the last axis.

    LayerNorm is ``y = gain * (x - mean) / sqrt(var + eps) + bias`` with the biased variance (Ba et al. 2016,
    arXiv 1607.06450).

    Args:
        kind: ``layernorm``, ``rmsnorm`` or ``dyt``.
        dim: D.
        eps: Epsilon of LayerNorm and RMSNorm; DyT has none.

    Raises:
        ValueError: Unknown kind.
    """
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps)
    if kind == "rmsnorm":
        return RMSNorm(dim, eps=eps)
    if kind == "dyt":
        return DyT(dim)
    raise ValueError(f"norm={kind!r} is unknown; choose from layernorm, rmsnorm, dyt")
