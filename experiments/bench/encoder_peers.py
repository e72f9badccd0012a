"""The contenders of ``bench encoder``: block stacks of equal size, and the whole training step done twice.

Legend: B clips, T frames, D width, N blocks, H heads, F feed-forward width, K codebooks, V codes, M masked frames.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.attention import AttentionContext
from lightning_modules.encoder import Encoder, EncoderConfig, compile_blocks
from lightning_modules.heads import build_heads, gather_frames, gather_targets
from lightning_modules.losses import mean_loss
from lightning_modules.masking import masked_indices, span_mask

Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """Shape of a training step."""

    name: str
    num_layers: int
    dim: int
    num_heads: int
    ffn_dim: int
    clips: int
    frames: int

    @property
    def tokens(self) -> int:
        """Frames per step."""
        return self.clips * self.frames

    @property
    def flops(self) -> float:
        """Floating-point operations of the blocks' matrix products, forward and backward."""
        linear = 6.0 * self.tokens * (4 * self.dim**2 + 2 * self.dim * self.ffn_dim)
        attention = 12.0 * self.clips * self.frames**2 * self.dim
        return self.num_layers * (linear + attention)

    def config(self, **options: Any) -> EncoderConfig:
        """The encoder's configuration at this size."""
        return EncoderConfig(
            dim=self.dim, num_layers=self.num_layers, num_heads=self.num_heads, ffn_dim=self.ffn_dim, **options
        )


SIZES = {
    size.name: size
    for size in (
        Size("95m", 12, 768, 12, 3072, 2, 374),
        Size("d256n12", 12, 256, 4, 1024, 8, 256),
        Size("d256n6", 6, 256, 4, 1024, 8, 256),
        Size("d128n4", 4, 128, 4, 512, 8, 128),
        Size("330m", 24, 1024, 16, 4096, 8, 384),
    )
}


class Bench:
    """Where and in which precision the steps run."""

    def __init__(self, device: torch.device, bf16: bool) -> None:
        self.device, self.bf16 = device, bf16

    def autocast(self) -> torch.autocast:
        """Autocast to bf16, or nothing."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def step(self, modules: list[nn.Module], loss: Callable[[], Tensor], clip: float | None = None) -> Step:
        """Forward, backward, clipping if asked, fused AdamW."""
        parameters = [p for module in modules for p in module.to(self.device).train().parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True)

        def run() -> None:
            with self.autocast():
                value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def noise(self, *shape: int) -> Tensor:
        """Standard normal numbers on the device."""
        return torch.randn(*shape, device=self.device)


class BallastBlocks(nn.Module):
    """The encoder's blocks alone, ``x_BTD -> x_BTD``."""

    def __init__(self, config: EncoderConfig, compiled: bool = False) -> None:
        super().__init__()
        self.blocks = (encoder := Encoder(config)).blocks
        self.two_streams = config.scheme == "residual_dual"
        if compiled:
            compile_blocks(encoder)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Run the blocks on full clips."""
        streams = (x_BTD, x_BTD) if self.two_streams else (x_BTD,)
        context = AttentionContext()
        for block in self.blocks:
            streams = block(streams, context)
        total: Tensor = sum(streams[1:], start=streams[0])
        return total


class HubertLayers(nn.Module):
    """The layers of transformers' HuBERT encoder alone."""

    def __init__(self, size: Size, stable: bool) -> None:
        super().__init__()
        self.layers = hubert_encoder(size, stable).layers

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Run the layers on full clips."""
        for layer in self.layers:
            output = layer(x_BTD)
            x_BTD = output if isinstance(output, Tensor) else output[0]  # a tuple before transformers 5
        return x_BTD


def hubert_encoder(size: Size, stable: bool) -> Any:
    """transformers' HuBERT encoder with its positional convolution, SDPA attention and no dropout."""
    from transformers import HubertConfig
    from transformers.models.hubert.modeling_hubert import HubertEncoder, HubertEncoderStableLayerNorm

    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    config = HubertConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        intermediate_size=size.ffn_dim,
        do_stable_layer_norm=stable,
        attn_implementation="sdpa",
        **dropouts,
    )
    return HubertEncoderStableLayerNorm(config) if stable else HubertEncoder(config)


def torch_encoder(size: Size) -> nn.Module:
    """``torch.nn.TransformerEncoder``, Pre-Norm with GELU and no dropout."""
    layer = nn.TransformerEncoderLayer(
        size.dim, size.num_heads, size.ffn_dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, size.num_layers, enable_nested_tensor=False)


def x_transformers_encoder(size: Size) -> nn.Module:
    """x-transformers' encoder: Pre-Norm, flash attention (SDPA), head width and feed-forward width as the others."""
    from x_transformers import Encoder as XEncoder

    return XEncoder(  # type: ignore[no-any-return]
        dim=size.dim,
        depth=size.num_layers,
        heads=size.num_heads,
        attn_dim_head=size.dim // size.num_heads,
        ff_mult=size.ffn_dim / size.dim,
        attn_flash=True,
    )


def missing_peers() -> list[str]:
    """Sentences about peers that are not installed."""
    names = {"transformers": "HuBERT", "x_transformers": "x-transformers"}
    return [
        f"{title} is left out: install it with `pip install {module.replace('_', '-')}`."
        for module, title in names.items()
        if find_spec(module) is None
    ]


def block_contenders(size: Size, compiled: bool) -> dict[str, Callable[[], nn.Module]]:
    """Builders of the block stacks, Ballast first."""
    builders: dict[str, Callable[[], nn.Module]] = {"Ballast pre": lambda: BallastBlocks(size.config())}
    builders["Ballast post"] = lambda: BallastBlocks(size.config(scheme="post"))
    if compiled:
        builders["Ballast pre, compiled"] = lambda: BallastBlocks(size.config(), compiled=True)
    if find_spec("transformers") is not None:
        builders["HuBERT stable layer norm"] = lambda: HubertLayers(size, stable=True)
        builders["HuBERT post-norm"] = lambda: HubertLayers(size, stable=False)
    builders["nn.TransformerEncoder"] = lambda: torch_encoder(size)
    if find_spec("x_transformers") is not None:
        builders["x-transformers"] = lambda: x_transformers_encoder(size)
    return builders


def block_step(bench: Bench, size: Size, module: nn.Module) -> Step:
    """A training step of a block stack on random input with a fixed upstream gradient."""
    x_BTD, upstream_BTD = (bench.noise(size.clips, size.frames, size.dim) for _ in range(2))
    return bench.step([module], lambda: (module(x_BTD).float() * upstream_BTD).mean())


def products_step(bench: Bench, size: Size) -> Step:
    """The ceiling: the matrix products of such a step and nothing else, every block with its own weights."""
    shapes = [(size.dim, 3 * size.dim), (size.dim, size.dim), (size.dim, size.ffn_dim), (size.ffn_dim, size.dim)]
    kind = torch.bfloat16 if bench.bf16 else torch.float32
    inputs = [bench.noise(size.tokens, width).to(kind) for width, _ in shapes]
    grads = [bench.noise(size.tokens, width).to(kind) for _, width in shapes]
    weights = [[bench.noise(o, i).to(kind) for i, o in shapes] for _ in range(size.num_layers)]
    heads = size.clips * size.num_heads
    q_XTE = bench.noise(heads, size.frames, size.dim // size.num_heads).to(kind)
    a_XTJ = bench.noise(heads, size.frames, size.frames).to(kind)

    def run() -> None:
        for layer in weights:
            for x, w in zip(inputs, layer, strict=True):
                x @ w.t()
            torch.bmm(q_XTE, q_XTE.transpose(1, 2))
            torch.bmm(a_XTJ, q_XTE)
        for layer in weights:
            for x, w, g in zip(inputs, layer, grads, strict=True):
                g @ w
                g.t() @ x
            torch.bmm(q_XTE, q_XTE.transpose(1, 2))
            for _ in range(3):
                torch.bmm(a_XTJ, q_XTE)

    return run


def _tokens(bench: Bench, size: Size, config: EncoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, their mask and the indices of masked frames, on the device."""
    codes_BKT = torch.randint(config.codebook_size, (size.clips, config.num_codebooks, size.frames))
    mask_BT = span_mask(range(size.clips), [size.frames] * size.clips, size.frames)
    parts = (codes_BKT, mask_BT, masked_indices(mask_BT))
    return parts[0].to(bench.device), parts[1].to(bench.device), parts[2].to(bench.device)


def whole_ballast(bench: Bench, size: Size, **options: Any) -> Step:
    """Embedding, position, blocks, 8 heads and loss on masked frames only, clipping, optimizer."""
    config = size.config(**options)
    encoder, heads = Encoder(config), build_heads(config)
    codes_BKT, mask_BT, index_M = _tokens(bench, size, config)

    def loss() -> Tensor:
        hidden_MD = gather_frames(encoder(codes_BKT, mask_BT), index_M)
        losses = heads.losses(hidden_MD, gather_targets(codes_BKT, index_M))
        value: Tensor = mean_loss(losses.objective_K, losses.frames)
        return value

    return bench.step([encoder, heads], loss, clip=1.0)


class HubertJob(nn.Module):
    """The same job with HuBERT's encoder: K embedding tables, its own convolution, K heads on all frames."""

    def __init__(self, size: Size, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = hubert_encoder(size, stable=True)
        sizes = (config.codebook_size, size.dim)
        self.embeddings = nn.ModuleList(nn.Embedding(*sizes) for _ in range(config.num_codebooks))
        self.heads = nn.ModuleList(nn.Linear(*sizes[::-1]) for _ in range(config.num_codebooks))
        self.mask_vector = nn.Parameter(torch.randn(size.dim))

    def forward(self, codes_BKT: Tensor, mask_BT: Tensor) -> Tensor:
        """Mean loss over masked frames, summed over codebooks."""
        parts = [table(codes_BKT[:, k]) for k, table in enumerate(self.embeddings)]
        x_BTD = torch.where(mask_BT.unsqueeze(-1), self.mask_vector, torch.stack(parts).sum(dim=0))
        hidden_BTD = self.encoder(x_BTD).last_hidden_state
        total = hidden_BTD.new_zeros((), dtype=torch.float32)
        for k, head in enumerate(self.heads):
            target = codes_BKT[:, k].masked_fill(~mask_BT, -100)
            total = total + F.cross_entropy(head(hidden_BTD).flatten(0, 1).float(), target.flatten())
        summed: Tensor = total
        return summed


def whole_hubert(bench: Bench, size: Size) -> Step:
    """The whole step with HuBERT's encoder and heads on all frames."""
    config = size.config()
    job = HubertJob(size, config)
    codes_BKT, mask_BT, _ = _tokens(bench, size, config)

    def loss() -> Tensor:
        total: Tensor = job(codes_BKT, mask_BT)
        return total

    return bench.step([job], loss, clip=1.0)


# Options priced against plain Pre-Norm; position "rope" acts in attention and is priced there.
PRICED: dict[str, dict[str, Any]] = {
    "scheme=post": {"scheme": "post"},
    "scheme=deepnorm": {"scheme": "deepnorm"},
    "scheme=sub_ln": {"scheme": "sub_ln"},
    "scheme=peri": {"scheme": "peri"},
    "scheme=olmo2": {"scheme": "olmo2"},
    "scheme=hybrid": {"scheme": "hybrid"},
    "scheme=residual_dual": {"scheme": "residual_dual"},
    "scheme=ln_scaling": {"scheme": "ln_scaling"},
    "scheme=layerscale": {"scheme": "layerscale"},
    "scheme=keel": {"scheme": "keel"},
    "norm=rmsnorm": {"norm": "rmsnorm"},
    "norm=dyt": {"norm": "dyt"},
    "qk_norm": {"qk_norm": True},
    "qk_norm, norm=rmsnorm": {"qk_norm": True, "norm": "rmsnorm"},
    "gate=headwise": {"gate": "headwise"},
    "gate=elementwise": {"gate": "elementwise"},
    "relax=32": {"relax": 32.0},
    "soft_cap=50": {"soft_cap": 50.0},
    "sigma_reparam": {"sigma_reparam": True},
    "qk_clip=100": {"qk_clip": 100.0},
    "position=rope": {"position": "rope"},
    "activation_checkpointing": {"activation_checkpointing": True},
}


def priced_step(bench: Bench, size: Size, options: dict[str, Any]) -> Step:
    """A whole training step with the option; without the head's cost it would look dearer than it is."""
    return whole_ballast(bench, replace(size), **options)
