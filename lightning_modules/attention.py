"""Multi-head self-attention with its options: relaxation, QK-norm, soft-cap, gate, sigma-reparam, QK-clip.

Legend: B clips, T frames, D width, H heads, E head width, J keys (= T), N blocks, M = B * T.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.norms import build_norm
from lightning_modules.positions import apply_rotary
from lightning_modules.reparam import SigmaLinear

__all__ = ["Attention", "AttentionContext", "build_linear", "explicit_attention"]


class AttentionContext(NamedTuple):
    """What all blocks of one forward pass share.

    Attributes:
        keep_BJ: bool ``[B, J]``, true for keys that may be attended; None when every clip is full.
        mask_B11J: the same, shaped for ``scaled_dot_product_attention``.
        rotary: cosine and sine tables ``[T, E/2]``, or None.
    """

    keep_BJ: Tensor | None = None
    mask_B11J: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None


def build_linear(config: EncoderConfig, width_in: int, width_out: int, parts: int = 1) -> nn.Linear:
    """A Linear, or with ``sigma_reparam`` a :class:`SigmaLinear` of ``parts`` stacked matrices."""
    if config.sigma_reparam:
        return SigmaLinear(width_in, width_out, parts=parts)
    return nn.Linear(width_in, width_out)


def explicit_attention(
    q_BHTE: Tensor,
    k_BHJE: Tensor,
    v_BHJE: Tensor,
    keep_BJ: Tensor | None,
    *,
    relax: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention with the logits written out, for what ``scaled_dot_product_attention`` cannot express.

    Relaxation with constant c computes ``softmax_j(c * (s_j / c - max_j' s_j' / c))`` for ``s = q.k / sqrt(E)``,
    with q divided by ``c * sqrt(E)`` BEFORE the product, the row maximum taken over valid keys, and the padding mask
    last (BEATs ``backbone.py``; constant 32 there, in MERT and in WavLM, arXiv 2110.13900, section 3.2). Softmax is
    shift-invariant and c cancels, so in fp32 and bf16 this is the identity; in fp16 it keeps products up to
    c * 65504 finite. Soft-capping with t replaces s by ``t * tanh(s / t)`` (Gemma 2, arXiv 2408.00118, section 2).

    Args:
        q_BHTE: Queries.
        k_BHJE: Keys.
        v_BHJE: Values.
        keep_BJ: Keys that may be attended, or None for all of them.
        relax: c, or None.
        soft_cap: t, or None.
        dropout: Dropout on the attention weights.

    Returns:
        The output ``[B, H, T, E]`` and the largest logit per head ``[H]`` in fp32, without gradient.
    """
    c = 1.0 if relax is None else relax
    logits = (q_BHTE * (1.0 / (c * math.sqrt(q_BHTE.shape[-1])))) @ k_BHJE.transpose(-2, -1)
    if soft_cap is not None:
        logits = torch.tanh(logits * (c / soft_cap)) * (soft_cap / c)
    valid = logits if keep_BJ is None else logits.masked_fill(~keep_BJ[:, None, None, :], -math.inf)
    row_max = valid.detach().amax(dim=-1, keepdim=True)
    if relax is not None:
        logits = (logits - row_max) * c
        valid = logits if keep_BJ is None else logits.masked_fill(~keep_BJ[:, None, None, :], -math.inf)
    weights = F.softmax(valid, dim=-1).to(v_BHJE.dtype)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ v_BHJE, row_max.float().amax(dim=(0, 2, 3)) * c


@torch.no_grad()
def largest_logit_per_head(q_BHTE: Tensor, k_BHJE: Tensor, keep_BJ: Tensor | None) -> Tensor:
    """Largest attention logit of each head ``[H]`` over valid keys, in fp32, one clip at a time to bound memory."""
    largest = q_BHTE.new_full((q_BHTE.shape[1],), -math.inf, dtype=torch.float32)
    scale = 1.0 / math.sqrt(q_BHTE.shape[-1])
    for index in range(q_BHTE.shape[0]):
        logits_HTJ = (q_BHTE[index].float() * scale) @ k_BHJE[index].float().transpose(-2, -1)
        if keep_BJ is not None:
            logits_HTJ = logits_HTJ.masked_fill(~keep_BJ[index], -math.inf)
        largest = torch.maximum(largest, logits_HTJ.amax(dim=(1, 2)))
    return largest


class Attention(nn.Module):
    """Multi-head self-attention, ``out(softmax(q k^T / sqrt(E)) v)`` with fused query, key and value projection.

    Options of the configuration, in the order they act:

    - ``qk_norm``: q and k are normalized over each head's E channels with a gain shared by the heads (Henry et al.
      2020, arXiv 2010.04245; in this form Wortsman et al., arXiv 2309.14322). Logits are bounded by sqrt(E) * gain^2.
    - scheme ``hybrid``: q, k and v are normalized like that (arXiv 2503.04598).
    - ``position: rope``: q and k are rotated.
    - ``relax``, ``soft_cap``: see :func:`explicit_attention`.
    - ``gate``: the heads' output is multiplied by ``sigmoid(x W_g + b_g)`` before the output projection, one gate per
      head or per channel (arXiv 2505.06708, position G1).
    - scheme ``sub_ln``: a norm before the output projection (Magneto, arXiv 2210.06423).

    ``scaled_dot_product_attention`` runs whenever neither relaxation nor soft-cap needs the logits themselves. When
    ``probe`` is on, the largest logit of each head is kept in ``max_logit_H`` (maximum since it was last reset); the
    output does not change by it.

    Args:
        config: Options.
        normalize_qkv: Normalize q, k and v (HybridNorm).
        inner_norm: Norm before the output projection (Sub-LN).
    """

    max_logit_H: Tensor

    def __init__(self, config: EncoderConfig, *, normalize_qkv: bool = False, inner_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_width = config.num_heads, config.head_width
        self.relax, self.soft_cap, self.dropout = config.relax, config.soft_cap, config.attention_dropout
        self.qkv = build_linear(config, config.dim, 3 * config.dim, parts=3)
        self.out = build_linear(config, config.dim, config.dim)
        norm_qk = config.qk_norm or normalize_qkv
        self.q_norm = build_norm(config.norm, self.head_width, config.norm_eps) if norm_qk else None
        self.k_norm = build_norm(config.norm, self.head_width, config.norm_eps) if norm_qk else None
        self.v_norm = build_norm(config.norm, self.head_width, config.norm_eps) if normalize_qkv else None
        gate_width = {"none": 0, "headwise": config.num_heads, "elementwise": config.dim}[config.gate]
        self.gate = nn.Linear(config.dim, gate_width) if gate_width else None
        self.inner_norm = build_norm(config.norm, config.dim, config.norm_eps) if inner_norm else None
        self.probe = config.qk_clip is not None
        self.register_buffer("max_logit_H", torch.full((config.num_heads,), -math.inf), persistent=False)

    @property
    def explicit(self) -> bool:
        """Whether the logits are written out instead of handed to ``scaled_dot_product_attention``."""
        return self.relax is not None or self.soft_cap is not None

    def reset_max_logit(self) -> None:
        """Forget the largest logits seen so far."""
        self.max_logit_H.fill_(-math.inf)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> Tensor:
        """Map ``x_BTD`` to the attention output of the same shape."""
        q_BHTE, k_BHTE, v_BHTE = self.project(x_BTD, context)
        mixed_BHTE = self._mix(q_BHTE, k_BHTE, v_BHTE, context)
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(x_BTD)).view(*x_BTD.shape[:2], self.num_heads, -1)
            mixed_BHTE = mixed_BHTE * gate.transpose(1, 2)
        mixed_BTD = mixed_BHTE.transpose(1, 2).flatten(2)
        if self.inner_norm is not None:
            mixed_BTD = self.inner_norm(mixed_BTD)
        return self.out(mixed_BTD)  # type: ignore[no-any-return]

    def project(self, x_BTD: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, H, T, E]``, normalized and rotated as configured."""
        q_BTHE, k_BTHE, v_BTHE = self.qkv(x_BTD).view(*x_BTD.shape[:2], 3, self.num_heads, self.head_width).unbind(2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTHE = self.q_norm(q_BTHE), self.k_norm(k_BTHE)
        if self.v_norm is not None:
            v_BTHE = self.v_norm(v_BTHE)
        q_BHTE, k_BHTE, v_BHTE = (part.transpose(1, 2) for part in (q_BTHE, k_BTHE, v_BTHE))
        if context.rotary is not None:
            q_BHTE, k_BHTE = apply_rotary(q_BHTE, *context.rotary), apply_rotary(k_BHTE, *context.rotary)
        return q_BHTE, k_BHTE, v_BHTE

    def _mix(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, context: AttentionContext) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.explicit:
            mixed_BHTE, largest_H = explicit_attention(
                q_BHTE, k_BHTE, v_BHTE, context.keep_BJ, relax=self.relax, soft_cap=self.soft_cap, dropout=dropout
            )
            if self.probe:
                self._record(largest_H)
            return mixed_BHTE
        if self.probe:
            self._record(largest_logit_per_head(q_BHTE, k_BHTE, context.keep_BJ))
        return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=context.mask_B11J, dropout_p=dropout)

    def _record(self, largest_H: Tensor) -> None:
        # Assigned, not written in place: a model cast to fp16 keeps its largest logits in fp32.
        self.max_logit_H = torch.maximum(self.max_logit_H.float(), largest_H)
