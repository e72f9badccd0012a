"""One class per residual scheme: where the norms and scales sit around attention (A) and feed-forward (F).

A block maps a tuple of streams to a tuple of streams of the same shapes: one stream ``[B, T, D]``, except ResiDual,
which carries two. Formulas write ``LN`` for the configured norm. What surrounds the stack (a norm on the input, a
norm at the end) is in :data:`STACKS`.

Legend: B clips, T frames, D width, N blocks.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.attention import Attention, AttentionContext, build_linear
from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.init import deepnorm_alpha, layerscale_first_value
from lightning_modules.norms import build_norm

__all__ = ["STACKS", "Block", "FeedForward", "Stack", "build_blocks"]

Streams = tuple[Tensor, ...]


class FeedForward(nn.Module):
    """``fc2(LN?(GELU(fc1(x))))``; the inner norm only for Sub-LN."""

    def __init__(self, config: EncoderConfig, *, inner_norm: bool = False) -> None:
        super().__init__()
        self.fc1 = build_linear(config, config.dim, config.ffn_dim)
        self.fc2 = build_linear(config, config.ffn_dim, config.dim)
        self.inner_norm = build_norm(config.norm, config.ffn_dim, config.norm_eps) if inner_norm else None
        self.dropout = config.activation_dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``x_BTD`` to the same shape."""
        hidden = F.gelu(self.fc1(x_BTD))
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        if self.dropout > 0.0 and self.training:
            hidden = F.dropout(hidden, self.dropout)
        return self.fc2(hidden)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two sublayers and the tools every scheme uses; subclasses say how the residual stream goes.

    Args:
        config: Options.
        index: Which block this is, from 0.
    """

    sub_ln = False
    normalize_qkv = False

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.config_dropout = config.dropout
        self.attention = Attention(config, normalize_qkv=self.normalize_qkv, inner_norm=self.sub_ln)
        self.ffn = FeedForward(config, inner_norm=self.sub_ln)
        self.build(config, index)

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create the scheme's norms and scales; by default one norm per sublayer."""
        self.attention_norm = build_norm(config.norm, config.dim, config.norm_eps)
        self.ffn_norm = build_norm(config.norm, config.dim, config.norm_eps)

    def attend(self, x_BTD: Tensor, context: AttentionContext) -> Tensor:
        """A(x), dropped out."""
        return self._drop(self.attention(x_BTD, context))

    def feed(self, x_BTD: Tensor) -> Tensor:
        """F(x), dropped out."""
        return self._drop(self.ffn(x_BTD))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        if self.config_dropout > 0.0 and self.training:
            return F.dropout(x_BTD, self.config_dropout)
        return x_BTD

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block on its streams."""
        raise NotImplementedError


class PreNorm(Block):
    """``a = x + A(LN(x)); y = a + F(LN(a))`` (Xiong et al. 2020, arXiv 2002.04745; fairseq ``layer_norm_first``)."""

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = x + self.attend(self.attention_norm(x), context)
        return (x + self.feed(self.ffn_norm(x)),)


class PostNorm(Block):
    """``a = LN(x + A(x)); y = LN(a + F(a))`` (Vaswani et al. 2017, arXiv 1706.03762)."""

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = self.attention_norm(x + self.attend(x, context))
        return (self.ffn_norm(x + self.feed(x)),)


class DeepNorm(Block):
    """``a = LN(alpha x + A(x)); y = LN(alpha a + F(a))``, alpha = (2N)^(1/4) (arXiv 2203.00555, figure 2)."""

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create the norms and alpha."""
        super().build(config, index)
        self.alpha = deepnorm_alpha(config.num_layers)

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = self.attention_norm(torch.add(self.attend(x, context), x, alpha=self.alpha))
        return (self.ffn_norm(torch.add(self.feed(x), x, alpha=self.alpha)),)


class SubLN(PreNorm):
    """Pre-Norm with a second norm inside each sublayer, before its output matrix (Magneto, arXiv 2210.06423, 3.1)."""

    sub_ln = True


class Sandwich(Block):
    """``a = x + LN(A(LN(x))); y = a + LN(F(LN(a)))`` (Sandwich-LN, arXiv 2105.13290; Peri-LN, arXiv 2502.02732)."""

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create input and output norms."""
        super().build(config, index)
        self.attention_out_norm = build_norm(config.norm, config.dim, config.norm_eps)
        self.ffn_out_norm = build_norm(config.norm, config.dim, config.norm_eps)

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = x + self.attention_out_norm(self.attend(self.attention_norm(x), context))
        return (x + self.ffn_out_norm(self.feed(self.ffn_norm(x))),)


class OutputNorm(Block):
    """``a = x + LN(A(x)); y = a + LN(F(a))`` (OLMo 2, arXiv 2501.00656, section 3)."""

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = x + self.attention_norm(self.attend(x, context))
        return (x + self.ffn_norm(self.feed(x)),)


class Hybrid(Block):
    """``h = x + A_qkv(x); z = LN(h); y = z + F(z)``, A_qkv normalizing q, k and v (HybridNorm, arXiv 2503.04598)."""

    normalize_qkv = True

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create the one norm between the sublayers."""
        self.ffn_norm = build_norm(config.norm, config.dim, config.norm_eps)

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        z = self.ffn_norm(x + self.attend(x, context))
        return (z + self.feed(z),)


class HybridFirst(Block):
    """First block of HybridNorm*: ``h = x + A_qkv(LN(x)); y = h + F(LN(h))``, else as HybridNorm."""

    normalize_qkv = True

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = x + self.attend(self.attention_norm(x), context)
        return (x + self.feed(self.ffn_norm(x)),)


class ResiDual(Block):
    """Two streams: ``x' = LN(x + G(x)); r' = r + G(x)`` for G = A, then F (ResiDual, arXiv 2304.14802, eq. 3)."""

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        x, r = streams
        g = self.attend(x, context)
        x, r = self.attention_norm(x + g), r + g
        g = self.feed(x)
        return self.ffn_norm(x + g), r + g


class LayerNormScaling(Block):
    """Pre-Norm with each norm's output divided by sqrt(l), l = 1..N the block's number (arXiv 2502.05795, eq. 9)."""

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create the norms and the scale."""
        super().build(config, index)
        self.scale = 1.0 / math.sqrt(index + 1)

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = x + self.attend(self.attention_norm(x) * self.scale, context)
        return (x + self.feed(self.ffn_norm(x) * self.scale),)


class LayerScale(Block):
    """``a = x + lambda_1 * A(LN(x)); y = a + lambda_2 * F(LN(a))``, one lambda per channel (CaiT, arXiv 2103.17239)."""

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create the norms and the scales."""
        super().build(config, index)
        first = config.layerscale_init
        self.first = layerscale_first_value(config.num_layers) if first is None else first
        self.attention_scale = nn.Parameter(torch.full((config.dim,), self.first))
        self.ffn_scale = nn.Parameter(torch.full((config.dim,), self.first))

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        x = torch.addcmul(x, self.attention_scale, self.attend(self.attention_norm(x), context))
        return (torch.addcmul(x, self.ffn_scale, self.feed(self.ffn_norm(x))),)


class Keel(Block):
    """``a = LN(alpha x + A(LN(x))); y = LN(alpha a + F(LN(a)))``, alpha = 2N sublayers (KEEL, arXiv 2601.19895)."""

    def build(self, config: EncoderConfig, index: int) -> None:
        """Create inner and outer norms and alpha."""
        super().build(config, index)
        self.alpha = float(2 * config.num_layers)
        self.attention_out_norm = build_norm(config.norm, config.dim, config.norm_eps)
        self.ffn_out_norm = build_norm(config.norm, config.dim, config.norm_eps)

    def forward(self, streams: Streams, context: AttentionContext) -> Streams:
        """Run the block."""
        (x,) = streams
        branch = self.attend(self.attention_norm(x), context)
        x = self.attention_out_norm(torch.add(branch, x, alpha=self.alpha))
        branch = self.feed(self.ffn_norm(x))
        return (self.ffn_out_norm(torch.add(branch, x, alpha=self.alpha)),)


class Stack(NamedTuple):
    """What surrounds the blocks of a scheme.

    Attributes:
        block: Class of every block, unless :func:`build_blocks` says otherwise.
        input_norm: A norm after the position layer, before block 0.
        final_norm: A norm after the last block.
    """

    block: type[Block]
    input_norm: bool
    final_norm: bool


STACKS: dict[str, Stack] = {
    "pre": Stack(PreNorm, input_norm=False, final_norm=True),
    "post": Stack(PostNorm, input_norm=True, final_norm=False),
    "deepnorm": Stack(DeepNorm, input_norm=True, final_norm=False),
    "sub_ln": Stack(SubLN, input_norm=False, final_norm=True),
    "peri": Stack(Sandwich, input_norm=True, final_norm=True),
    "sandwich": Stack(Sandwich, input_norm=False, final_norm=True),
    "olmo2": Stack(OutputNorm, input_norm=False, final_norm=True),
    "hybrid": Stack(Hybrid, input_norm=False, final_norm=True),
    "hybrid_star": Stack(Hybrid, input_norm=False, final_norm=True),
    "residual_dual": Stack(ResiDual, input_norm=True, final_norm=True),
    "mix_ln": Stack(PreNorm, input_norm=False, final_norm=True),
    "ln_scaling": Stack(LayerNormScaling, input_norm=False, final_norm=True),
    "layerscale": Stack(LayerScale, input_norm=False, final_norm=True),
    "keel": Stack(Keel, input_norm=True, final_norm=False),
}


def mix_ln_post_layers(config: EncoderConfig) -> int:
    """Number of Post-Norm blocks at the bottom of Mix-LN, floor(share * N) (arXiv 2412.13795, eq. 8)."""
    return math.floor(config.mix_ln_post * config.num_layers)


def build_blocks(config: EncoderConfig) -> nn.ModuleList:
    """Build the N blocks; Mix-LN starts with Post-Norm blocks, HybridNorm* with its own first block."""
    kinds = [STACKS[config.scheme].block] * config.num_layers
    if config.scheme == "mix_ln":
        kinds[: mix_ln_post_layers(config)] = [PostNorm] * mix_ln_post_layers(config)
    if config.scheme == "hybrid_star":
        kinds[0] = HybridFirst
    return nn.ModuleList(kind(config, index) for index, kind in enumerate(kinds))
