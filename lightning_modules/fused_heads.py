"""Linear heads and their cross entropy in one pass over the codebooks, never holding all logits at once.

The logits of 8 codebooks are the largest tensor of a training step ([K, M, V], three times with log-probabilities and
gradient). Here one codebook's ``[M, V]`` is computed, turned into its loss and at once into its gradient, and dropped.
The idea is that of fused linear cross entropy kernels (Liger, arXiv 2410.10989, section 3.2).

Legend: M masked frames, D width, K codebooks, V codes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["HeadLosses", "fused_linear_losses"]


class HeadLosses(NamedTuple):
    """Losses of a batch, as sums over its masked frames.

    Attributes:
        objective_K: What to train on, differentiable: cross entropy plus weighted z-loss, in nats.
        nats_KM: Cross entropy of every frame, for logging and for the loss of each clip.
        correct_K: Frames whose most likely code is the target, int64.
        frames: M.
    """

    objective_K: Tensor
    nats_KM: Tensor
    correct_K: Tensor
    frames: int

    @property
    def nats_K(self) -> Tensor:
        """Cross entropy summed over frames, for logging."""
        return self.nats_KM.sum(dim=1)


class _FusedLinearLosses(torch.autograd.Function):
    """Forward computes the gradients as well, up to the upstream factor of each codebook."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight_KVD: Tensor,
        bias_KV: Tensor,
        targets_KM: Tensor,
        z_weight: float,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        x, weight = x_MD.to(dtype), weight_KVD.to(dtype)
        nats, objective, correct = [], [], []
        needed = with_gradients and any(ctx.needs_input_grad[:3])
        dx_KMD = x_MD.new_empty((len(weight), *x_MD.shape), dtype=wide) if needed else None
        dw_KVD = torch.empty_like(weight_KVD, dtype=wide) if needed else None
        db_KV = torch.empty_like(bias_KV, dtype=wide) if needed else None
        for k, target_M in enumerate(targets_KM):
            logits_MV = (x @ weight[k].t()).to(wide).add_(bias_KV[k])
            log_p_MV = torch.log_softmax(logits_MV, dim=-1)
            picked_M1 = target_M.unsqueeze(1)
            nats.append(log_p_MV.gather(1, picked_M1).squeeze(1).neg_())
            correct.append((log_p_MV.max(dim=-1).indices == target_M).sum())
            objective.append(nats[-1].sum())
            slope_M1 = torch.ones_like(log_p_MV[:, :1])
            if z_weight > 0.0:
                log_z_M1 = logits_MV[:, :1] - log_p_MV[:, :1]
                objective[-1] += z_weight * log_z_M1.square().sum()
                slope_M1 = 1.0 + 2.0 * z_weight * log_z_M1
            if dx_KMD is not None and dw_KVD is not None and db_KV is not None:
                grad_MV = log_p_MV.exp_()
                if z_weight > 0.0:
                    grad_MV.mul_(slope_M1)
                grad_MV.scatter_add_(1, picked_M1, -torch.ones_like(slope_M1))
                db_KV[k] = grad_MV.sum(dim=0)
                grad = grad_MV.to(dtype)
                dx_KMD[k] = grad @ weight[k]
                dw_KVD[k] = grad.t() @ x
        ctx.save_for_backward(dx_KMD, dw_KVD, db_KV)
        ctx.dtypes = (x_MD.dtype, weight_KVD.dtype, bias_KV.dtype)
        outputs = torch.stack(objective), torch.stack(nats), torch.stack(correct)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx_KMD, dw_KVD, db_KV = ctx.saved_tensors
        scale_K = upstream[0]
        dx = torch.einsum("k,kmd->md", scale_K.to(dx_KMD.dtype), dx_KMD)
        dw, db = dw_KVD.mul_(scale_K.view(-1, 1, 1)), db_KV.mul_(scale_K.view(-1, 1))
        kinds = ctx.dtypes
        return dx.to(kinds[0]), dw.to(kinds[1]), db.to(kinds[2]), None, None, None, None


def fused_linear_losses(
    x_MD: Tensor, weight_KVD: Tensor, bias_KV: Tensor, targets_KM: Tensor, z_weight: float = 0.0
) -> HeadLosses:
    """Losses of ``logits_k = x W_k^T + b_k``, summed over frames, in fp32 whatever the precision of the products.

    Args:
        x_MD: Hidden states of the masked frames.
        weight_KVD: Head matrices.
        bias_KV: Head biases.
        targets_KM: Codes, int64.
        z_weight: Weight of the squared log-normalizer in the objective.

    Returns:
        The losses. A second backward pass through the same graph raises torch's error about a modified saved tensor.
    """
    device = x_MD.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x_MD.dtype
    # Inside a Function gradients are always off, so whether they are wanted is asked here.
    inputs = (x_MD, weight_KVD, bias_KV, targets_KM, z_weight, dtype, torch.is_grad_enabled())
    objective_K, nats_KM, correct_K = _FusedLinearLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return HeadLosses(objective_K, nats_KM, correct_K, targets_KM.shape[1])
