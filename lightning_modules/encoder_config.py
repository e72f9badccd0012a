"""The encoder's options: one frozen dataclass of plain types, validated when it is built.

Every option is one line of YAML. What each scheme, norm and attention option computes is documented where it is
implemented (``blocks``, ``norms``, ``attention``, ``positions``, ``heads``, ``init``) and summarised in docs/norms.md.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

__all__ = ["SCHEME_TITLES", "EncoderConfig"]

Scheme = Literal[
    "pre",
    "post",
    "deepnorm",
    "sub_ln",
    "peri",
    "sandwich",
    "olmo2",
    "hybrid",
    "hybrid_star",
    "residual_dual",
    "mix_ln",
    "ln_scaling",
    "layerscale",
    "keel",
]
Norm = Literal["layernorm", "rmsnorm", "dyt"]
Init = Literal["bert", "xavier", "megatron"]
Position = Literal["conv", "rope", "none"]
Head = Literal["linear", "cosine"]
Gate = Literal["none", "headwise", "elementwise"]

SCHEME_TITLES: dict[str, str] = {
    "pre": "Pre-Norm",
    "post": "Post-Norm",
    "deepnorm": "DeepNorm",
    "sub_ln": "Sub-LN",
    "peri": "Peri-LN",
    "sandwich": "Sandwich-LN",
    "olmo2": "OLMo-2 output norm",
    "hybrid": "HybridNorm",
    "hybrid_star": "HybridNorm*",
    "residual_dual": "ResiDual",
    "mix_ln": "Mix-LN",
    "ln_scaling": "LayerNorm-Scaling",
    "layerscale": "LayerScale",
    "keel": "KEEL",
}


@dataclass(frozen=True)
class EncoderConfig:
    """Size and options of an :class:`~lightning_modules.encoder.Encoder` and its heads.

    Args:
        num_codebooks: K, codebooks per frame of the tokens.
        codebook_size: V, codes per codebook.
        dim: D, width of the residual stream.
        num_layers: N, number of blocks (two sublayers each).
        num_heads: H, attention heads; D must be a multiple of H.
        ffn_dim: F, width of the feed-forward layer.
        scheme: where norms and scales sit around each sublayer.
        norm: which normalization all of them use.
        init: base standard deviation of the block's matrices; the scheme's own gain is applied on top.
        norm_eps: epsilon of LayerNorm and RMSNorm.
        relax: attention relaxation constant c (the published value is 32), or null for off.
        qk_norm: normalize queries and keys per head.
        soft_cap: cap t on attention logits, t*tanh(s/t), or null for off.
        gate: sigmoid gate on the attention output, one per head or one per channel.
        sigma_reparam: divide every block matrix by its spectral norm and learn the scale.
        qk_clip: largest attention logit tolerated; above it, query and key weights are scaled down after the step.
        position: grouped convolution (MERT), rotary, or none.
        conv_kernel: kernel of the positional convolution, in frames.
        conv_groups: groups of the positional convolution.
        rope_theta: base wavelength of the rotary position embedding, in frames.
        head: linear logits, or cosine similarity over a temperature.
        head_dim: width of the cosine head's code vectors.
        temperature: temperature of the cosine head.
        z_loss: weight of the squared log-normalizer (linear head only).
        embedding_std: standard deviation of the SUM of the K code embeddings at initialization.
        layerscale_init: first value of LayerScale; null picks it by depth as CaiT does.
        mix_ln_post: share of Mix-LN's blocks that are Post-Norm.
        dropout: dropout after the position layer and after each sublayer.
        attention_dropout: dropout on attention weights.
        activation_dropout: dropout after the GELU.
        layerdrop: chance to skip a block in training; the seed is shared by all ranks.
        activation_checkpointing: recompute each block in the backward pass instead of storing its activations.

    Raises:
        ValueError: An option is out of range, or two options make no sense together.
    """

    num_codebooks: int = 8
    codebook_size: int = 1024
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_dim: int = 3072
    scheme: Scheme = "pre"
    norm: Norm = "layernorm"
    init: Init = "bert"
    norm_eps: float = 1e-5
    relax: float | None = None
    qk_norm: bool = False
    soft_cap: float | None = None
    gate: Gate = "none"
    sigma_reparam: bool = False
    qk_clip: float | None = None
    position: Position = "conv"
    conv_kernel: int = 128
    conv_groups: int = 16
    rope_theta: float = 10_000.0
    head: Head = "linear"
    head_dim: int = 64
    temperature: float = 0.1
    z_loss: float = 0.0
    embedding_std: float = 1.0
    layerscale_init: float | None = None
    mix_ln_post: float = 0.25
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layerdrop: float = 0.0
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        for refused, reason in _refusals(self):
            if refused:
                raise ValueError(f"encoder options cannot be combined: {reason}")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


def _check_choices(config: EncoderConfig) -> None:
    literals = {"scheme": Scheme, "norm": Norm, "init": Init, "position": Position, "head": Head, "gate": Gate}
    for name, literal in literals.items():
        value, choices = getattr(config, name), get_args(literal)
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")


def _check_ranges(config: EncoderConfig) -> None:
    for name in (
        "num_codebooks",
        "dim",
        "num_layers",
        "num_heads",
        "ffn_dim",
        "conv_kernel",
        "conv_groups",
        "head_dim",
    ):
        _require(config, name, getattr(config, name) >= 1, "at least 1")
    _require(config, "codebook_size", config.codebook_size >= 2, "at least 2")
    for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
        _require(config, name, 0.0 <= getattr(config, name) < 1.0, "in [0, 1)")
    for name in ("relax", "soft_cap", "qk_clip", "layerscale_init"):
        _require(config, name, getattr(config, name) is None or getattr(config, name) > 0.0, "null or above 0")
    for name in ("norm_eps", "temperature", "embedding_std", "rope_theta"):
        _require(config, name, getattr(config, name) > 0.0, "above 0")
    _require(config, "z_loss", config.z_loss >= 0.0, "0 or above")
    _require(config, "mix_ln_post", 0.0 <= config.mix_ln_post <= 1.0, "in [0, 1]")
    if config.scheme == "mix_ln":
        post = int(config.mix_ln_post * config.num_layers)
        _require(
            config,
            "mix_ln_post",
            1 <= post < config.num_layers,
            f"such that some but not all of num_layers={config.num_layers} blocks are Post-Norm (it makes {post})",
        )
    _require(config, "num_heads", config.dim % config.num_heads == 0, f"a divisor of dim={config.dim}")
    if config.position == "conv":
        _require(config, "conv_groups", config.dim % config.conv_groups == 0, f"a divisor of dim={config.dim}")
    if config.position == "rope":
        _require(config, "num_heads", config.head_width % 2 == 0, "such that dim/num_heads is even, as rope needs")


def _require(config: EncoderConfig, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(config, name)!r} is out of range; it must be {what}")


def _refusals(config: EncoderConfig) -> list[tuple[bool, str]]:
    """Pairs of (this combination is present, why it is refused)."""
    scaled = config.scheme in ("deepnorm", "sub_ln", "ln_scaling")
    normalizing = config.scheme in ("deepnorm", "keel", "residual_dual")
    hybrid = config.scheme in ("hybrid", "hybrid_star")
    moved = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    return [
        (
            config.init == "megatron" and scaled,
            f"init=megatron with scheme={config.scheme}, which already scales the residual branches by depth; "
            "use init=bert or xavier",
        ),
        (
            config.norm == "dyt" and normalizing,
            f"norm=dyt with scheme={config.scheme}, whose constants need a norm that fixes the scale of the residual "
            "stream; tanh does not. Use layernorm or rmsnorm",
        ),
        (
            config.qk_norm and hybrid,
            f"qk_norm=true with scheme={config.scheme}, which already normalizes queries, keys and values",
        ),
        (
            config.qk_clip is not None and (config.qk_norm or hybrid),
            "qk_clip with normalized queries and keys: the norm undoes any scaling of the query and key weights",
        ),
        (
            config.qk_clip is not None and config.sigma_reparam,
            "qk_clip with sigma_reparam=true: the division by the spectral norm undoes the scaling of the weights",
        ),
        (
            config.head == "cosine" and config.z_loss > 0.0,
            f"z_loss={config.z_loss} with head=cosine, whose log-normalizer its temperature bounds; set z_loss=0",
        ),
        (
            "layerscale_init" in moved and config.scheme != "layerscale",
            f"layerscale_init={config.layerscale_init} with scheme={config.scheme}; only scheme=layerscale reads it",
        ),
        (
            "mix_ln_post" in moved and config.scheme != "mix_ln",
            f"mix_ln_post={config.mix_ln_post} with scheme={config.scheme}; only scheme=mix_ln reads it",
        ),
    ]


def describe(config: EncoderConfig) -> dict[str, Any]:
    """Options that differ from the defaults, for labels and logs."""
    return {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
