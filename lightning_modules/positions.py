"""Position information: MERT's grouped convolution, and rotary embeddings.

Legend: B clips, T frames, D width, H heads, E head width, W kernel width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.convolution import grouped_convolution
from lightning_modules.precision import full_precision

__all__ = ["ConvPosition", "apply_rotary", "rotary_tables"]


class ConvPosition(nn.Module):
    """Convolutional position: ``x + GELU(conv(x))``, grouped, weight-normalized over the kernel axis.

    The weight is ``W[:, :, w] = gain[w] * V[:, :, w] / ||V[:, :, w]||`` with one gain per kernel tap (weight norm over
    axis 2), V drawn from N(0, 4 / (W * D)), gain its norm, bias 0; for an even kernel the last output frame is dropped
    (wav2vec 2.0, arXiv 2006.11477; fairseq ``make_conv_pos`` and ``SamePad``, used by HuBERT and MERT with W=128 and
    16 groups). Frames beyond a clip's end must be zero on entry; then the output at valid frames does not depend on
    how much padding follows.

    Args:
        dim: D.
        kernel: W.
        groups: Groups of the convolution.
    """

    def __init__(self, dim: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.kernel, self.groups = kernel, groups
        self.direction = nn.Parameter(torch.empty(dim, dim // groups, kernel))
        self.gain = nn.Parameter(torch.empty(1, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the direction, set the gain to its norm and the bias to 0."""
        nn.init.normal_(self.direction, std=math.sqrt(4.0 / (self.kernel * self.direction.shape[0])))
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.gain.copy_(torch.linalg.vector_norm(self.direction, dim=(0, 1), keepdim=True))

    def weight(self) -> Tensor:
        """The weight-normalized kernel, ``[D, D / groups, W]``."""
        return torch._weight_norm(self.direction, self.gain, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add the position signal to ``x_BTD``."""
        return x_BTD + F.gelu(self.convolve(x_BTD))

    def convolve(self, x_BTD: Tensor) -> Tensor:
        """The convolution alone.

        On a CPU it is done in fp32 by matrix products (:mod:`lightning_modules.convolution`), except where autocast
        can use the faster bf16 ``conv1d``. Below 16 channels per group it cannot: torch 2.13's is wrong there (even
        channels, even kernel, AVX-512 and AMX; errors of several standard deviations).
        """
        if x_BTD.device.type == "cpu" and x_BTD.dtype in (torch.float32, torch.float64):
            if not torch.is_autocast_enabled("cpu"):
                return grouped_convolution(x_BTD, self.weight(), self.bias, self.groups)
            if self.direction.shape[1] < 16:
                with full_precision(x_BTD.device):
                    return grouped_convolution(x_BTD, self.weight(), self.bias, self.groups)
        y_BDT = F.conv1d(x_BTD.transpose(1, 2), self.weight(), self.bias, padding=self.kernel // 2, groups=self.groups)
        return y_BDT[..., : x_BTD.shape[1]].transpose(1, 2)


def rotary_tables(num_frames: int, head_width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables ``[T, E/2]`` of the angles ``t * theta^(-2i/E)`` (RoFormer, arXiv 2104.09864, eq. 15).

    They are on the device of ``like`` and in its precision, but in fp32 at least.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    inverse = theta ** (-torch.arange(0, head_width, 2, device=like.device, dtype=dtype) / head_width)
    angle = torch.outer(torch.arange(num_frames, device=like.device, dtype=dtype), inverse)
    return angle.cos(), angle.sin()


def apply_rotary(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate channel i against channel i + E/2 by the frame's angle (arXiv 2104.09864, eq. 34, half-split pairing).

    Relative: the product of a rotated query and a rotated key depends on their positions only by the difference.
    """
    first, second = x_BHTE.chunk(2, dim=-1)
    cos, sin = cos_TE.to(x_BHTE.dtype), sin_TE.to(x_BHTE.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
