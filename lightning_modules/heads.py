"""Prediction heads: logits over V codes for each of K codebooks, on masked frames only.

Legend: M masked frames, D width, K codebooks, V codes, C width of the cosine head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.fused_heads import HeadLosses, fused_linear_losses
from lightning_modules.losses import correct_codes, cross_entropy_per_frame
from lightning_modules.precision import full_precision

__all__ = ["CosineHeads", "LinearHeads", "build_heads", "gather_frames", "gather_targets"]


def gather_frames(hidden_BTD: Tensor, index_M: Tensor) -> Tensor:
    """Pick frames ``[M, D]`` by their index in the flattened ``[B * T]`` axis; static in shape, no device sync."""
    return hidden_BTD.flatten(0, 1).index_select(0, index_M)


def gather_targets(codes_BKT: Tensor, index_M: Tensor) -> Tensor:
    """Codes of the picked frames, int64 ``[K, M]``."""
    return codes_BKT.transpose(0, 1).flatten(1).index_select(1, index_M).to(torch.int64)


class LinearHeads(nn.Module):
    """``logits = x W_k + b_k``, the K matrices fused into one; N(0, 0.02), biases 0."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_codebooks, self.num_codes = config.num_codebooks, config.codebook_size
        self.z_loss = config.z_loss
        self.projection = nn.Linear(config.dim, config.num_codebooks * config.codebook_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.projection.weight, std=0.02)
        nn.init.zeros_(self.projection.bias)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Logits ``[K, M, V]``, a view of one contiguous ``[M, K, V]`` product."""
        return self.projection(hidden_MD).view(-1, self.num_codebooks, self.num_codes).transpose(0, 1)  # type: ignore[no-any-return]

    def losses(self, hidden_MD: Tensor, targets_KM: Tensor) -> HeadLosses:
        """Losses without holding the logits, see :mod:`lightning_modules.fused_heads`; what a training step calls."""
        weight_KVD = self.projection.weight.view(self.num_codebooks, self.num_codes, -1)
        bias_KV = self.projection.bias.view(self.num_codebooks, self.num_codes)
        return fused_linear_losses(hidden_MD, weight_KVD, bias_KV, targets_KM, self.z_loss)


class CosineHeads(nn.Module):
    """``logits = cos(P_k x, e_kv) / temperature`` (MERT ``compute_nce``; HuBERT, arXiv 2106.07447, eq. 3).

    MERT writes it as noise-contrastive estimation with every other code as a negative, which is plain cross entropy
    over these logits. P is torch's default Linear, the code vectors start at U(0, 1), as in MERT. Cosine and division
    are done in fp32.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.projection = nn.Linear(config.dim, config.num_codebooks * config.head_dim)
        self.code_KVC = nn.Parameter(torch.empty(config.num_codebooks, config.codebook_size, config.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        bound = 1.0 / math.sqrt(self.projection.in_features)
        nn.init.uniform_(self.projection.weight, -bound, bound)
        nn.init.uniform_(self.projection.bias, -bound, bound)
        nn.init.uniform_(self.code_KVC)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Logits ``[K, M, V]`` in [-1/temperature, 1/temperature], fp32."""
        num_codebooks, _, width = self.code_KVC.shape
        projected_MKC = self.projection(hidden_MD).view(-1, num_codebooks, width)
        with full_precision(hidden_MD.device):
            unit_KMC = F.normalize(projected_MKC.float(), dim=-1).transpose(0, 1)
            unit_KVC = F.normalize(self.code_KVC.float(), dim=-1)
            return torch.bmm(unit_KMC, unit_KVC.transpose(1, 2)) / self.temperature

    def losses(self, hidden_MD: Tensor, targets_KM: Tensor) -> HeadLosses:
        """Losses of the masked frames; what a training step calls."""
        logits_KMV: Tensor = self(hidden_MD)
        nats_KM = cross_entropy_per_frame(logits_KMV, targets_KM)
        correct_K = correct_codes(logits_KMV, targets_KM)
        return HeadLosses(nats_KM.sum(dim=1), nats_KM.detach(), correct_K, targets_KM.shape[1])


def build_heads(config: EncoderConfig) -> LinearHeads | CosineHeads:
    """Build the configured heads, ``hidden_MD -> logits_KMV``."""
    return CosineHeads(config) if config.head == "cosine" else LinearHeads(config)
