"""Health signals: why a run spiked. Computed on the steps that log them, and costing nothing on the others.

Attention logits grow before attention entropy collapses; residual RMS shows which block grows; entropy near zero with
low accuracy is a collapsed head; unmasked accuracy below masked accuracy is a broken mask. Everything here is a sum, a
count, a maximum or a ratio of local weights, so ranks can be reduced by sum and max.

Legend: N blocks, H heads, K codebooks, M frames, V codes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_modules.attention import Attention
from lightning_modules.encoder import Encoder
from lightning_modules.reparam import clip_query_key_

__all__ = [
    "PredictionSums",
    "apply_qk_clip",
    "code_counts",
    "dead_codes",
    "max_logits",
    "parameter_group",
    "prediction_sums",
    "probing",
    "update_ratios",
    "weight_copies",
]


def attentions(encoder: Encoder) -> list[Attention]:
    """The N attention layers in order."""
    return [module for module in encoder.modules() if isinstance(module, Attention)]


@contextmanager
def probing(encoder: Encoder, enabled: bool = True) -> Iterator[None]:
    """Record largest attention logits and residual RMS in the forward passes inside; outputs do not change.

    Read them afterwards from :func:`max_logits` and ``encoder.block_rms_N``. With ``enabled`` false this does nothing.
    """
    layers = attentions(encoder) if enabled else []
    before = [layer.probe for layer in layers]
    encoder.probing = enabled
    for layer in layers:
        if not layer.probe:
            layer.reset_max_logit()
        layer.probe = True
    try:
        yield
    finally:
        encoder.probing = False
        for layer, probe in zip(layers, before, strict=True):
            layer.probe = probe


def max_logits(encoder: Encoder) -> Tensor:
    """Largest attention logit of every head since it was last reset, fp32 ``[N, H]``; -inf where none was seen."""
    return torch.stack([layer.max_logit_H for layer in attentions(encoder)])


def apply_qk_clip(encoder: Encoder, max_logit_NH: Tensor, limit: float) -> Tensor:
    """QK-clip every head whose largest logit passed the limit, then forget the logits. Call after the optimizer step.

    Args:
        encoder: Encoder with ``qk_clip`` set (its attention records logits at every step).
        max_logit_NH: :func:`max_logits`, reduced over ranks by maximum, so that all ranks clip alike.
        limit: Largest logit tolerated.

    Returns:
        Number of heads clipped, a device scalar.
    """
    clipped = max_logit_NH.new_zeros((), dtype=torch.int64)
    for layer, largest_H in zip(attentions(encoder), max_logit_NH, strict=True):
        factor_H = clip_query_key_(layer.qkv, largest_H, limit)
        clipped += (factor_H < 1.0).sum()
        layer.reset_max_logit()
    return clipped


class PredictionSums(NamedTuple):
    """Sums over frames for each codebook; divide by ``frames``.

    Attributes:
        entropy_K: Entropy of the predicted distribution in nats.
        correct_K: Frames whose most likely code is the target.
        logit_norm_K: L2 norm of the logit vector with its mean removed (softmax ignores the mean).
        frames: M.
    """

    entropy_K: Tensor
    correct_K: Tensor
    logit_norm_K: Tensor
    frames: int


@torch.no_grad()
def prediction_sums(logits_KMV: Tensor, targets_KM: Tensor) -> PredictionSums:
    """Entropy, accuracy and logit norm of predictions, one codebook at a time to bound memory."""
    entropy, correct, norm = [], [], []
    for logits_MV, targets_M in zip(logits_KMV, targets_KM, strict=True):
        log_p_MV = torch.log_softmax(logits_MV.float(), dim=-1)
        entropy.append(-(log_p_MV.exp() * log_p_MV).sum())
        correct.append((log_p_MV.max(dim=-1).indices == targets_M).sum())
        norm.append((log_p_MV - log_p_MV.mean(dim=-1, keepdim=True)).norm(dim=-1).sum())
    return PredictionSums(torch.stack(entropy), torch.stack(correct), torch.stack(norm), targets_KM.shape[1])


@torch.no_grad()
def code_counts(codes_KM: Tensor, codebook_size: int) -> Tensor:
    """How often each code occurs in each codebook, int64 ``[K, V]``; counts of several steps and ranks add up."""
    counts_KV = codes_KM.new_zeros((codes_KM.shape[0], codebook_size), dtype=torch.int64)
    return counts_KV.scatter_add_(1, codes_KM.long(), torch.ones_like(codes_KM, dtype=torch.int64))


def dead_codes(target_KV: Tensor, predicted_KV: Tensor) -> Tensor:
    """Codes the data holds and the model never predicts, ``[K]``, from counts over the same frames.

    A few are normal (rare codes lose to frequent ones); nearly all of them is a collapsed head.
    """
    return ((target_KV > 0) & (predicted_KV == 0)).sum(dim=1)


def parameter_group(name: str) -> str:
    """Group of a parameter by its dotted name: ``block_03``, ``embedding``, ``position``, ``heads`` or ``norms``."""
    parts = name.split(".")
    if "blocks" in parts:
        return f"block_{int(parts[parts.index('blocks') + 1]):02d}"
    for group in ("embedding", "position", "heads"):
        if group in parts:
            return group
    return "norms"


@torch.no_grad()
def weight_copies(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable weights, to be taken before the optimizer step of a step that logs update ratios."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def update_ratios(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Update-to-weight ratio ``||w - w_before|| / ||w_before||`` of each parameter group, as device scalars.

    Healthy Adam runs sit around 1e-3 at peak learning rate; 0 means that the step was skipped.
    """
    update: dict[str, list[Tensor]] = {}
    weight: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if name in before:
            group = parameter_group(name)
            update.setdefault(group, []).append(torch.linalg.vector_norm(parameter - before[name]))
            weight.setdefault(group, []).append(torch.linalg.vector_norm(before[name]))
    norm = {group: torch.linalg.vector_norm(torch.stack(parts)) for group, parts in update.items()}
    scale = {group: torch.linalg.vector_norm(torch.stack(parts)) for group, parts in weight.items()}
    return {group: norm[group] / scale[group].clamp(min=1e-12) for group in norm}
