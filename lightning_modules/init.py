"""Initialization: the standard deviation of every weight class, as pure functions of the configuration.

Weight classes of a block: ``qk`` (query and key), ``v``, ``out`` (attention output), ``fc1``, ``fc2``, ``gate``.

Legend: N blocks, D width, F feed-forward width.
"""

import math

from lightning_modules.encoder_config import EncoderConfig

__all__ = ["deepnorm_alpha", "deepnorm_beta", "layerscale_first_value", "sub_ln_gamma", "weight_stds"]

BERT_STD = 0.02


def deepnorm_alpha(num_layers: int) -> float:
    """Residual scale of an N-layer encoder, (2N)^(1/4) (Wang et al. 2022, arXiv 2203.00555, figure 2)."""
    return float((2 * num_layers) ** 0.25)


def deepnorm_beta(num_layers: int) -> float:
    """Gain on v, out, fc1 and fc2 of an N-layer encoder, (8N)^(-1/4) (arXiv 2203.00555, figure 2)."""
    return float((8 * num_layers) ** -0.25)


def sub_ln_gamma(num_layers: int) -> float:
    """Gain on v, out, fc1 and fc2 of an N-layer Sub-LN encoder, sqrt(ln 2N) (Magneto, arXiv 2210.06423)."""
    return math.sqrt(math.log(2 * num_layers))


def layerscale_first_value(num_layers: int) -> float:
    """First value of LayerScale: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 deeper (CaiT, arXiv 2103.17239, 2.1)."""
    if num_layers <= 18:
        return 0.1
    return 1e-5 if num_layers <= 24 else 1e-6


def base_stds(config: EncoderConfig) -> dict[str, float]:
    """Standard deviation of each weight class before the scheme's gain.

    ``bert``: N(0, 0.02) everywhere (fairseq ``init_bert_params``, used by HuBERT and MERT). ``xavier``: Xavier-normal,
    sqrt(2 / (fan_in + fan_out)), each of query, key and value counted as its own D x D matrix (BEATs). ``megatron``:
    bert with out and fc2 divided by sqrt(2N) (arXiv 1909.08053, section 4).
    """
    if config.init == "xavier":
        square = math.sqrt(2.0 / (config.dim + config.dim))
        ffn = math.sqrt(2.0 / (config.dim + config.ffn_dim))
        gate_rows = config.num_heads if config.gate == "headwise" else config.dim
        gate = math.sqrt(2.0 / (config.dim + gate_rows))
        return {"qk": square, "v": square, "out": square, "fc1": ffn, "fc2": ffn, "gate": gate}
    stds = dict.fromkeys(("qk", "v", "out", "fc1", "fc2", "gate"), BERT_STD)
    if config.init == "megatron":
        for name in ("out", "fc2"):
            stds[name] /= math.sqrt(2 * config.num_layers)
    return stds


def weight_stds(config: EncoderConfig) -> dict[str, float]:
    """Standard deviation of each weight class, scheme's gain included.

    DeepNorm multiplies v, out, fc1 and fc2 by beta (with ``init=xavier`` this is BEATs, with ``bert`` it is MERT);
    Sub-LN multiplies the same four by gamma.
    """
    gain = {"deepnorm": deepnorm_beta, "sub_ln": sub_ln_gamma}.get(config.scheme)
    stds = base_stds(config)
    if gain is not None:
        for name in ("v", "out", "fc1", "fc2"):
            stds[name] *= gain(config.num_layers)
    return stds
