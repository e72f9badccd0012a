"""Sigma-reparametrization of Linear layers, and QK-clip: two ways to bound attention logits by the weights.

Legend: O outputs, I inputs, P stacked matrices in one weight, N blocks, H heads, E head width.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.precision import full_precision

__all__ = ["SigmaLinear", "advance_power_iterations", "clip_query_key_"]


class SigmaLinear(nn.Linear):
    """Linear with weight ``gain * W / sigma(W)``, sigma the largest singular value (Zhai et al., arXiv 2303.06296).

    sigma is ``u^T W v`` in fp32 with u and v kept by power iteration, one iteration per training step, treated as
    constants in the backward pass. The gain starts at sigma(W), so the layer starts equal to the plain Linear and
    the initialization rules of the scheme hold.

    Args:
        in_features: I.
        out_features: O, a multiple of ``parts``.
        parts: P matrices stacked in the weight (3 for query, key and value), each with its own sigma and gain.
    """

    u_PO: Tensor
    v_PI: Tensor

    def __init__(self, in_features: int, out_features: int, parts: int = 1) -> None:
        super().__init__(in_features, out_features)
        self.parts = parts
        self.gain_P = nn.Parameter(torch.ones(parts))
        self.register_buffer("u_PO", torch.zeros(parts, out_features // parts))
        self.register_buffer("v_PI", torch.zeros(parts, in_features))

    def weight_POI(self) -> Tensor:
        """The raw weight as its stacked matrices, in fp32 at least."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return weight.view(self.parts, -1, self.in_features)

    @torch.no_grad()
    def start_at_sigma(self, iterations: int = 30) -> None:
        """Converge u and v for the present weight and set the gain to sigma."""
        nn.init.normal_(self.u_PO)
        for _ in range(iterations):
            self.advance()
        self.gain_P.copy_(self.sigma_P())

    @torch.no_grad()
    def advance(self) -> None:
        """One power iteration: v = normalize(W^T u), u = normalize(W v)."""
        weight_POI = self.weight_POI()
        self.v_PI.copy_(F.normalize(torch.einsum("poi,po->pi", weight_POI, self.u_PO), dim=1))
        self.u_PO.copy_(F.normalize(torch.einsum("poi,pi->po", weight_POI, self.v_PI), dim=1))

    def sigma_P(self) -> Tensor:
        """Largest singular value of each stacked matrix, fp32, differentiable in the weight."""
        with full_precision(self.weight.device):
            right = torch.einsum("poi,pi->po", self.weight_POI(), self.v_PI.clone())
            return (right * self.u_PO.clone()).sum(dim=1)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        scale_P = self.gain_P / self.sigma_P()
        weight = (self.weight_POI() * scale_P[:, None, None]).flatten(0, 1).to(self.weight.dtype)
        return F.linear(input, weight, self.bias)


def advance_power_iterations(modules: Iterable[nn.Module]) -> None:
    """Advance every :class:`SigmaLinear` among the modules by one power iteration."""
    for module in modules:
        if isinstance(module, SigmaLinear):
            module.advance()


@torch.no_grad()
def clip_query_key_(qkv: nn.Linear, max_logit_H: Tensor, limit: float) -> Tensor:
    """QK-clip: after the optimizer step, shrink the query and key weights of heads whose logits passed the limit.

    For a head whose largest logit S exceeds the limit t, query and key weights and biases are multiplied by
    sqrt(t / S), so the same input would now give t (MuonClip, Kimi K2, arXiv 2507.20534, section 2.1).

    Args:
        qkv: The fused projection, rows ordered query, key, value, each head by head.
        max_logit_H: Largest logit of each head since the last step (reduced over ranks by the caller).
        limit: t (100 in the source).

    Returns:
        The factor applied to each head, ``[H]``; 1 where nothing was clipped.
    """
    above_H = torch.isfinite(max_logit_H) & (max_logit_H > limit)
    factor_H = torch.where(above_H, (limit / max_logit_H).sqrt(), 1.0).to(qkv.weight.dtype)
    heads = max_logit_H.numel()
    rows = 2 * qkv.weight.shape[0] // 3
    qkv.weight[:rows].view(2, heads, -1, qkv.in_features).mul_(factor_H.view(1, heads, 1, 1))
    qkv.bias[:rows].view(2, heads, -1).mul_(factor_H.view(1, heads, 1))
    return factor_H
