"""Losses per codebook, as sums and counts: the mean over the global number of masked frames is the caller's.

Under DDP and accumulation the mean of means is only right when all counts agree; sums and counts always add up.

Legend: K codebooks, M masked frames, V codes, X = K * M.
"""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["correct_codes", "cross_entropy_per_frame", "masked_cross_entropy", "mean_loss", "nats_to_bits", "z_loss"]


def nats_to_bits(nats: Tensor) -> Tensor:
    """Nats / ln 2."""
    return nats / math.log(2.0)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy with one buffer of the size of the logits, which the backward pass turns into their gradient.

    ``F.cross_entropy`` holds three. A second backward pass through the same graph raises torch's own error about a
    saved tensor modified in place.
    """

    @staticmethod
    def forward(ctx: Any, logits_XV: Tensor, targets_X: Tensor) -> Tensor:
        log_p_XV = torch.log_softmax(logits_XV, dim=-1, dtype=torch.promote_types(logits_XV.dtype, torch.float32))
        ctx.save_for_backward(log_p_XV, targets_X)
        ctx.logits_dtype = logits_XV.dtype
        return log_p_XV.gather(1, targets_X.unsqueeze(1)).squeeze(1).neg_()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        log_p_XV, targets_X = ctx.saved_tensors
        scale_X1 = upstream[0].to(log_p_XV.dtype).unsqueeze(1)
        gradient_XV = log_p_XV.exp_().mul_(scale_X1)
        gradient_XV.scatter_add_(1, targets_X.unsqueeze(1), -scale_X1)
        return gradient_XV.to(ctx.logits_dtype), None


def cross_entropy_per_frame(logits_KMV: Tensor, targets_KM: Tensor) -> Tensor:
    """Cross entropy of every frame in fp32, ``[K, M]``; differentiable once."""
    num_codebooks, num_frames, num_codes = logits_KMV.shape
    if logits_KMV.is_contiguous():
        nats: Tensor = _CrossEntropy.apply(logits_KMV.view(-1, num_codes), targets_KM.flatten())  # type: ignore[no-untyped-call]
        return nats.view(num_codebooks, num_frames)
    # The linear heads' logits are a view of a contiguous [M, K, V]: in that order nothing is copied.
    flat_XV = logits_KMV.transpose(0, 1).reshape(-1, num_codes)
    nats = _CrossEntropy.apply(flat_XV, targets_KM.t().flatten())  # type: ignore[no-untyped-call]
    return nats.view(num_frames, num_codebooks).t()


def masked_cross_entropy(logits_KMV: Tensor, targets_KM: Tensor) -> tuple[Tensor, int]:
    """Cross entropy summed over frames, in fp32.

    Args:
        logits_KMV: Logits of the masked frames.
        targets_KM: Their codes, int64.

    Returns:
        ``nats_K``, the sum over the M frames for each codebook (0, still differentiable, when M is 0), and M.
    """
    return cross_entropy_per_frame(logits_KMV, targets_KM).sum(dim=1), targets_KM.shape[1]


@torch.no_grad()
def correct_codes(logits_KMV: Tensor, targets_KM: Tensor) -> Tensor:
    """Number of frames whose most likely code is the target, int64 ``[K]``."""
    # On CPUs ``max`` with its indices takes a third of the time of ``argmax``.
    return (logits_KMV.max(dim=-1).indices == targets_KM).sum(dim=1)


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
