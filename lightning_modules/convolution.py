"""The positional convolution on CPUs: block-wise discrete Fourier transforms written as matrix products.

A grouped convolution with a long kernel and few channels per group is far below a CPU's matrix-product speed. In the
frequency domain the kernel's length costs nothing, and with the transforms themselves written as products with a small
cosine and sine matrix there is nothing but matrix products left, forward and backward. ``bench encoder`` prints both.

Legend: B clips, T frames, D width, G groups, C = D / G channels per group, W kernel width, P transform length (2W),
S = P - W + 1 outputs per block, J blocks per clip, Q = P / 2 + 1 frequencies, R = B * J.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_convolution"]


@lru_cache(maxsize=8)
def _transforms(kernel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices of the transform of a block ``[2Q, P]``, of the kernel ``[2Q, W]``, and back ``[S, 2Q]``."""
    length = 2 * kernel
    frequency = torch.arange(kernel + 1, dtype=torch.float64)
    angle = 2.0 * math.pi * torch.outer(frequency, torch.arange(length, dtype=torch.float64)) / length
    forward = torch.cat([angle.cos(), -angle.sin()])
    share = torch.full((kernel + 1,), 2.0 / length, dtype=torch.float64)
    share[0] = share[-1] = 1.0 / length
    inverse = (forward * share.repeat(2).unsqueeze(1))[:, : kernel + 1].t()
    return forward.to(dtype), forward[:, :kernel].to(dtype).contiguous(), inverse.to(dtype).contiguous()


def grouped_convolution(x_BTD: Tensor, weight_DCW: Tensor, bias_D: Tensor, groups: int) -> Tensor:
    """Cross-correlation ``y[t] = bias + sum_w weight[..., w] x[t + w - W // 2]``, zeros outside the clip.

    Equals ``conv1d`` with padding W // 2 cut to T frames, up to rounding. Overlap-save: each block of P input frames
    gives S outputs; a correlation is a product with the conjugate of the kernel's transform.

    Args:
        x_BTD: Input.
        weight_DCW: Kernel.
        bias_D: Bias.
        groups: G.

    Returns:
        ``y_BTD``.
    """
    (clips, frames, dim), width, kernel = x_BTD.shape, weight_DCW.shape[1], weight_DCW.shape[2]
    length, step, frequencies = 2 * kernel, kernel + 1, kernel + 1
    blocks = -(-frames // step)
    rows = clips * blocks
    to_frequency, kernel_to_frequency, to_time = _transforms(kernel, x_BTD.dtype)

    after = (blocks - 1) * step + length - frames - kernel // 2
    block_BJPD = F.pad(x_BTD, (0, 0, kernel // 2, after)).unfold(1, length, step).transpose(2, 3)
    x_R2QGC = torch.matmul(to_frequency, block_BJPD).view(rows, 2, frequencies, groups, width)
    x_QGRC = x_R2QGC.permute(2, 3, 1, 0, 4).reshape(frequencies * groups, 2 * rows, width)
    w_2QGOC = torch.matmul(kernel_to_frequency, weight_DCW.reshape(-1, kernel).t())
    w_2QGOC = w_2QGOC.view(2, frequencies * groups, width, width)

    by_real = torch.bmm(x_QGRC, w_2QGOC[0].transpose(1, 2))
    by_imaginary = torch.bmm(x_QGRC, w_2QGOC[1].transpose(1, 2))
    real = by_real[:, :rows] + by_imaginary[:, rows:]
    imaginary = by_real[:, rows:] - by_imaginary[:, :rows]
    y_2QGRO = torch.stack([real, imaginary]).view(2 * frequencies, -1)
    y_SGBJO = torch.matmul(to_time, y_2QGRO).view(step, groups, clips, blocks, width)
    return y_SGBJO.permute(2, 3, 0, 1, 4).reshape(clips, blocks * step, dim)[:, :frames] + bias_D
