"""Losses per codebook, as sums and counts: the mean over the global number of masked frames is the caller's.

Under DDP and accumulation the mean of means is only right when all counts agree; sums and counts always add up.

Legend: K codebooks, M masked frames, V codes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["correct_codes", "masked_cross_entropy", "mean_loss", "nats_to_bits", "z_loss"]


def nats_to_bits(nats: Tensor) -> Tensor:
    """Nats / ln 2."""
    return nats / math.log(2.0)


def masked_cross_entropy(logits_KMV: Tensor, targets_KM: Tensor) -> tuple[Tensor, int]:
    """Cross entropy summed over frames, in fp32.

    Args:
        logits_KMV: Logits of the masked frames.
        targets_KM: Their codes, int64.

    Returns:
        ``nats_K``, the sum over the M frames for each codebook (0, still differentiable, when M is 0), and M.
    """
    num_codebooks, num_frames, num_codes = logits_KMV.shape
    # The linear heads' logits are a view of a contiguous [M, K, V]: flattening in that order copies nothing.
    logits = logits_KMV.transpose(0, 1).reshape(-1, num_codes).float()
    nats = F.cross_entropy(logits, targets_KM.t().reshape(-1), reduction="none")
    return nats.view(num_frames, num_codebooks).sum(dim=0), num_frames


@torch.no_grad()
def correct_codes(logits_KMV: Tensor, targets_KM: Tensor) -> Tensor:
    """Number of frames whose most likely code is the target, int64 ``[K]``."""
    return (logits_KMV.argmax(dim=-1) == targets_KM).sum(dim=1)


def z_loss(logits_KMV: Tensor) -> Tensor:
    """Squared log-normalizer summed over frames, ``[K]`` (ST-MoE, arXiv 2202.08906, eq. 5; weight 1e-4 there)."""
    return torch.logsumexp(logits_KMV.float(), dim=-1).square().sum(dim=1)


def mean_loss(nats_K: Tensor, global_count: Tensor | int, world_size: int = 1) -> Tensor:
    """Training loss in nats: summed over codebooks with weight 1, divided by the global number of masked frames.

    Args:
        nats_K: This rank's sums over this micro-batch.
        global_count: Masked frames of the whole optimizer step, over ranks and micro-batches. Where each micro-batch
            has the same count, that is world size x accumulation x count.
        world_size: Ranks whose gradients DDP averages; the average is undone here.

    Returns:
        A scalar whose gradients, averaged by DDP and summed over micro-batches, are those of one big batch.
    """
    count = torch.as_tensor(global_count, dtype=torch.float32, device=nats_K.device)
    return nats_K.sum() * world_size / count.clamp(min=1.0)
