"""The variable-normalization transformer: codec tokens in, hidden states out.

Legend: B clips, K codebooks, T frames, V codes per codebook, D width, N blocks, L = N + 1 hidden states.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.attention import Attention, AttentionContext
from lightning_modules.blocks import STACKS, Block, FeedForward, LayerScale, build_blocks
from lightning_modules.encoder_config import SCHEME_TITLES, EncoderConfig
from lightning_modules.init import weight_stds
from lightning_modules.norms import build_norm
from lightning_modules.positions import ConvPosition, rotary_tables
from lightning_modules.reparam import SigmaLinear, advance_power_iterations

__all__ = ["CodeEmbedding", "Encoder", "EncoderConfig", "check_codes", "compile_blocks", "count_parameters"]

SCHEME_BYTES = 32


def check_codes(codes_BKT: Tensor, config: EncoderConfig) -> None:
    """Refuse token batches the encoder would misread. Call it on the CPU, before the batch goes to the device.

    Raises:
        ValueError: Wrong number of axes or codebooks, or a code outside [0, V): in the fused table such a code would
            silently be another codebook's.
    """
    if codes_BKT.dim() != 3 or codes_BKT.shape[1] != config.num_codebooks:
        raise ValueError(
            f"codes have shape {list(codes_BKT.shape)}; the encoder has num_codebooks={config.num_codebooks} "
            f"and needs [clips, {config.num_codebooks}, frames]"
        )
    if codes_BKT.numel() == 0:
        return
    low, high = int(codes_BKT.min()), int(codes_BKT.max())
    if low < 0 or high >= config.codebook_size:
        raise ValueError(
            f"codes span {low}..{high}; codebook_size={config.codebook_size} allows 0..{config.codebook_size - 1}"
        )


class CodeEmbedding(nn.Module):
    """Sum of K code embeddings per frame, from one fused table ``[K * V, D]``, with one learned mask vector.

    The table starts at N(0, std^2 / K), so the sum has standard deviation ``std`` per channel whatever K is; the mask
    vector starts at N(0, std^2), so masked and unmasked frames start at one scale. All K codes of a masked frame are
    replaced together: the codes of a residual quantizer would otherwise give one another away.

    Args:
        config: Options.
    """

    offset_K: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.std = config.embedding_std
        self.table = nn.Parameter(torch.empty(config.num_codebooks * config.codebook_size, config.dim))
        self.mask_vector = nn.Parameter(torch.empty(config.dim))
        offset_K = torch.arange(config.num_codebooks) * config.codebook_size
        self.register_buffer("offset_K", offset_K, persistent=False)

    def reset_parameters(self) -> None:
        """Draw table and mask vector."""
        num_codebooks = self.offset_K.numel()
        self.offset_K.copy_(torch.arange(num_codebooks) * (self.table.shape[0] // num_codebooks))
        nn.init.normal_(self.table, std=self.std / self.offset_K.numel() ** 0.5)
        nn.init.normal_(self.mask_vector, std=self.std)

    def forward(self, codes_BKT: Tensor, mask_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        """Embed frames; masked ones hold the mask vector, frames outside ``valid_BT`` hold zero."""
        rows = codes_BKT.transpose(1, 2).to(torch.int64) + self.offset_K
        x_BTD = F.embedding_bag(rows.flatten(0, 1), self.table, mode="sum").view(*mask_BT.shape, -1)
        x_BTD = torch.where(mask_BT.unsqueeze(-1), self.mask_vector, x_BTD)
        if valid_BT is not None:
            x_BTD = x_BTD.masked_fill(~valid_BT.unsqueeze(-1), 0.0)
        return x_BTD


class Encoder(nn.Module):
    """Embedding, position, N blocks of the configured scheme.

    Args:
        config: Options; initialization draws from torch's global generator.

    Attributes:
        block_rms_N: Residual-stream RMS after each block over valid frames, filled while ``probing``.
    """

    scheme_mark: Tensor
    block_rms_N: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        stack = STACKS[config.scheme]
        self.embedding = CodeEmbedding(config)
        conv = config.position == "conv"
        self.position = ConvPosition(config.dim, config.conv_kernel, config.conv_groups) if conv else None
        self.input_norm = build_norm(config.norm, config.dim, config.norm_eps) if stack.input_norm else None
        self.blocks = build_blocks(config)
        self.final_norm = build_norm(config.norm, config.dim, config.norm_eps) if stack.final_norm else None
        self.probing = False
        self.register_buffer("block_rms_N", torch.zeros(config.num_layers), persistent=False)
        # Floating point, since weight averaging truncates integer buffers and the mark would rot.
        self.register_buffer("scheme_mark", torch.zeros(SCHEME_BYTES, dtype=torch.float32))
        self.register_load_state_dict_pre_hook(_refuse_other_scheme)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize every parameter by the configuration; also what a model built on the meta device needs."""
        config, stds = self.config, weight_stds(self.config)
        for module in self.modules():
            if isinstance(module, Attention):
                _draw_attention(module, stds)
            elif isinstance(module, FeedForward):
                _draw_linear(module.fc1, stds["fc1"])
                _draw_linear(module.fc2, stds["fc2"])
            elif isinstance(module, LayerScale):
                nn.init.constant_(module.attention_scale, module.first)
                nn.init.constant_(module.ffn_scale, module.first)
            elif module is not self and not isinstance(module, nn.Linear | Block):
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    reset()
        for module in self.modules():
            if isinstance(module, SigmaLinear):
                module.start_at_sigma()
        mark = config.scheme.encode().ljust(SCHEME_BYTES, b"\0")
        self.block_rms_N.zero_()
        self.scheme_mark.copy_(torch.tensor(list(mark), dtype=torch.float32))

    def forward(
        self,
        codes_BKT: Tensor,
        mask_BT: Tensor,
        num_frames_B: Tensor | None = None,
        *,
        return_layers: bool = False,
        layerdrop_seed: int | None = None,
    ) -> Any:
        """Encode a batch of tokens.

        Args:
            codes_BKT: int16, int32 or int64 codes; padded frames may hold any valid code.
            mask_BT: bool, true where the frame's codes are hidden.
            num_frames_B: Valid frames per clip, or None when every clip is full. On a CPU tensor a full batch is
                noticed here; for a device tensor it is not looked at (that would wait for the device), so pass None.
            return_layers: Return the hidden states as well.
            layerdrop_seed: Seed of the dropped blocks, the same on every rank (the global batch number).

        Returns:
            ``hidden_BTD``, or with ``return_layers`` the list of L = N + 1 hidden states: block input, then each
            block's output, the last one as the heads see it. Padded frames hold numbers without meaning.

        Raises:
            ValueError: The number of codebooks is not the configured one, or layerdrop has no seed.
        """
        if codes_BKT.shape[1] != self.config.num_codebooks:
            check_codes(codes_BKT, self.config)
        valid_BT = _valid_frames(num_frames_B, codes_BKT.shape[2])
        x_BTD = self._embed(codes_BKT, mask_BT, valid_BT)
        context = self._context(x_BTD, valid_BT, num_frames_B)
        if self.training and self.config.sigma_reparam:
            advance_power_iterations(self.modules())
        streams, states = self._open(x_BTD), [x_BTD]
        keep_N = self._kept_blocks(layerdrop_seed)
        for index, block in enumerate(self.blocks):
            streams = self._run(block, streams, context) if keep_N[index] else _skip(block, streams)
            if self.probing:
                self._record_rms(index, streams[-1], valid_BT)
            if return_layers:
                states.append(streams[0])
        states[-1] = hidden_BTD = self._close(streams)
        return states if return_layers else hidden_BTD

    def _embed(self, codes_BKT: Tensor, mask_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        x_BTD: Tensor = self.embedding(codes_BKT, mask_BT, valid_BT)
        if self.position is not None:
            x_BTD = self.position(x_BTD)
        if self.input_norm is not None:
            x_BTD = self.input_norm(x_BTD)
        if self.config.dropout > 0.0 and self.training:
            x_BTD = F.dropout(x_BTD, self.config.dropout)
        return x_BTD

    def _context(self, x_BTD: Tensor, valid_BT: Tensor | None, num_frames_B: Tensor | None) -> AttentionContext:
        rotary = None
        if self.config.position == "rope":
            rotary = rotary_tables(x_BTD.shape[1], self.config.head_width, self.config.rope_theta, x_BTD)
        if valid_BT is None or num_frames_B is None:
            return AttentionContext(rotary=rotary)
        # A clip without frames attends its own zeros: a row with every key masked would be NaN in the softmax.
        keep_BJ = valid_BT | (num_frames_B == 0).unsqueeze(1)
        return AttentionContext(keep_BJ=keep_BJ, mask_B11J=keep_BJ[:, None, None, :], rotary=rotary)

    def _open(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return (x_BTD, x_BTD) if self.config.scheme == "residual_dual" else (x_BTD,)

    def _close(self, streams: tuple[Tensor, ...]) -> Tensor:
        if self.final_norm is None:
            return streams[0]
        normed: Tensor = self.final_norm(streams[-1])
        return streams[0] + normed if self.config.scheme == "residual_dual" else normed

    def _run(self, block: nn.Module, streams: tuple[Tensor, ...], context: AttentionContext) -> tuple[Tensor, ...]:
        if not (self.config.activation_checkpointing and self.training and torch.is_grad_enabled()):
            return block(streams, context)  # type: ignore[no-any-return]
        config = self.config
        random = max(config.dropout, config.attention_dropout, config.activation_dropout) > 0.0
        return checkpoint(  # type: ignore[no-any-return]
            block, streams, context, use_reentrant=False, preserve_rng_state=random
        )

    def _kept_blocks(self, seed: int | None) -> list[bool]:
        if self.config.layerdrop == 0.0 or not self.training:
            return [True] * len(self.blocks)
        if seed is None:
            raise ValueError(f"layerdrop={self.config.layerdrop} needs a layerdrop_seed that all ranks share")
        draw_N = np.random.default_rng(seed).random(len(self.blocks))
        return [bool(draw >= self.config.layerdrop) for draw in draw_N]

    @torch.no_grad()
    def _record_rms(self, index: int, x_BTD: Tensor, valid_BT: Tensor | None) -> None:
        square_BT = x_BTD.float().square().mean(dim=-1)
        mean = square_BT.mean() if valid_BT is None else (square_BT * valid_BT).sum() / valid_BT.sum().clamp(min=1)
        self.block_rms_N[index] = mean.sqrt()


def _valid_frames(num_frames_B: Tensor | None, num_frames_max: int) -> Tensor | None:
    if num_frames_B is None:
        return None
    if num_frames_B.device.type == "cpu" and bool((num_frames_B >= num_frames_max).all()):
        return None
    return torch.arange(num_frames_max, device=num_frames_B.device) < num_frames_B.unsqueeze(1)


def _skip(block: nn.Module, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Leave the streams as they are, with zero gradients for the block so that DDP finds every parameter used."""
    zero = sum((parameter.flatten()[0] * 0.0 for parameter in block.parameters()), start=streams[0].new_zeros(()))
    return (streams[0] + zero, *streams[1:])


def _draw_linear(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)


def _draw_attention(attention: Attention, stds: Mapping[str, float]) -> None:
    """Draw query, key and value by their own class: a rule for ``v`` must not miss the last third of a fused matrix."""
    dim = attention.qkv.in_features
    nn.init.normal_(attention.qkv.weight[: 2 * dim], std=stds["qk"])
    nn.init.normal_(attention.qkv.weight[2 * dim :], std=stds["v"])
    nn.init.zeros_(attention.qkv.bias)
    _draw_linear(attention.out, stds["out"])
    if attention.gate is not None:
        _draw_linear(attention.gate, stds["gate"])
    attention.reset_max_logit()


def _refuse_other_scheme(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse weights trained under another scheme before torch lists their missing keys."""
    assert isinstance(module, Encoder)
    mark, own = state.get(f"{prefix}scheme_mark"), module.config.scheme
    if mark is None:
        return
    other = bytes(round(c) for c in mark.tolist()).rstrip(b"\0").decode(errors="replace")
    if other != own:
        raise ValueError(
            f"the checkpoint holds a {SCHEME_TITLES.get(other, other)} encoder (scheme={other}) and this model is "
            f"{SCHEME_TITLES[own]} (scheme={own}); the weights of one scheme mean nothing in another"
        )


def compile_blocks(encoder: Encoder, **options: Any) -> None:
    """Compile each block in place with ``torch.compile``; the blocks share one graph and state dict keys stay."""
    for block in encoder.blocks:
        block.compile(**options)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
