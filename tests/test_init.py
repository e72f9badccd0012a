"""Initialization constants and the standard deviation of every weight class."""

import math

import pytest
import torch

from lightning_modules.encoder import Encoder, EncoderConfig, count_parameters
from lightning_modules.init import (
    deepnorm_alpha,
    deepnorm_beta,
    layerscale_first_value,
    sub_ln_gamma,
    weight_stds,
)

LARGE = {"dim": 1024, "num_layers": 24, "num_heads": 16, "ffn_dim": 4096}


@pytest.mark.parametrize(("num_layers", "alpha", "beta"), [(12, 2.213364, 0.319472), (24, 2.632148, 0.268642)])
def test_deepnorm_constants(num_layers: int, alpha: float, beta: float) -> None:
    assert deepnorm_alpha(num_layers) == pytest.approx(alpha, abs=1e-6)
    assert deepnorm_beta(num_layers) == pytest.approx(beta, abs=1e-6)


def test_sub_ln_and_layerscale_constants() -> None:
    assert sub_ln_gamma(24) == pytest.approx(1.967537, abs=1e-6)
    assert sub_ln_gamma(12) == pytest.approx(1.783, abs=1e-3)
    assert [layerscale_first_value(n) for n in (12, 18, 24, 36)] == [0.1, 0.1, 1e-5, 1e-6]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scheme": "deepnorm", "init": "xavier"}, {"qk": 0.03125, "v": 0.0084, "out": 0.0084, "fc1": 0.00531}),
        ({"scheme": "deepnorm", "init": "bert"}, {"qk": 0.02, "v": 0.00537, "out": 0.00537, "fc2": 0.00537}),
        ({"scheme": "pre"}, {"qk": 0.02, "v": 0.02, "out": 0.02, "fc1": 0.02, "fc2": 0.02}),
        ({"scheme": "sub_ln"}, {"qk": 0.02, "v": 0.03935, "out": 0.03935, "fc1": 0.03935, "fc2": 0.03935}),
        ({"init": "megatron"}, {"qk": 0.02, "v": 0.02, "out": 0.002887, "fc1": 0.02, "fc2": 0.002887}),
    ],
)
def test_standard_deviations_of_the_330m_encoder(options: dict[str, str], expected: dict[str, float]) -> None:
    stds = weight_stds(EncoderConfig(**LARGE, **options))  # type: ignore[arg-type]
    assert {name: stds[name] for name in expected} == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("init", ["bert", "xavier"])
@pytest.mark.parametrize("scheme", ["pre", "deepnorm", "sub_ln"])
@pytest.mark.parametrize("sigma_reparam", [False, True])
def test_weights_are_drawn_with_those_deviations(scheme: str, init: str, sigma_reparam: bool) -> None:
    torch.manual_seed(0)
    config = EncoderConfig(
        dim=128, num_layers=3, num_heads=4, ffn_dim=512, scheme=scheme, init=init, sigma_reparam=sigma_reparam
    )  # type: ignore[arg-type]
    stds = weight_stds(config)
    for block in Encoder(config).blocks:
        qkv = block.attention.qkv.weight
        drawn = {"qk": qkv[:256], "v": qkv[256:], "out": block.attention.out.weight}
        drawn |= {"fc1": block.ffn.fc1.weight, "fc2": block.ffn.fc2.weight}
        assert {name: float(w.std()) for name, w in drawn.items()} == pytest.approx(
            {name: stds[name] for name in drawn}, rel=0.05
        )
        assert all(float(linear.bias.abs().max()) == 0.0 for linear in (block.attention.qkv, block.ffn.fc2))


def test_embedding_sum_and_mask_vector_have_the_configured_scale() -> None:
    torch.manual_seed(0)
    config = EncoderConfig(dim=64, num_layers=1, num_heads=2, ffn_dim=64, embedding_std=0.7, position="none")
    embedding = Encoder(config).embedding
    codes = torch.randint(1024, (4, 8, 50))
    x = embedding(codes, torch.zeros(4, 50, dtype=torch.bool), None)
    assert float(x.std()) == pytest.approx(0.7, rel=0.05)
    masked = embedding(codes, torch.ones(4, 50, dtype=torch.bool), None)
    assert torch.equal(masked[1, 7], embedding.mask_vector)
    assert float(embedding.mask_vector.std()) == pytest.approx(0.7, rel=0.3)


# The published encoders read a waveform: 7 convolutions of 512 channels, a group norm, a norm of 512, a projection.
CONV_FRONT_END = 512 * 10 + 1024 + 4 * 512 * 512 * 3 + 2 * 512 * 512 * 2 + 1024


@pytest.mark.parametrize(
    ("options", "scheme", "published"),
    [({}, "post", 94_371_712), (LARGE, "pre", 315_428_992)],
)
def test_parameters_of_the_published_sizes(options: dict[str, int], scheme: str, published: int) -> None:
    config = EncoderConfig(**options, scheme=scheme)  # type: ignore[arg-type]
    with torch.device("meta"):
        encoder = Encoder(config)
    front_end = CONV_FRONT_END + 512 * config.dim + config.dim
    assert count_parameters(encoder) - encoder.embedding.table.numel() + front_end == published


def test_a_model_built_without_memory_initializes_like_any_other() -> None:
    config = EncoderConfig(dim=32, num_layers=2, num_heads=2, ffn_dim=64, sigma_reparam=True, scheme="layerscale")
    with torch.device("meta"):
        encoder = Encoder(config)
    encoder = encoder.to_empty(device="cpu")
    for tensor in [*encoder.parameters(), *encoder.buffers()]:
        tensor.data.fill_(77)
    torch.manual_seed(3)
    encoder.reset_parameters()
    fresh = Encoder(config)
    torch.manual_seed(3)
    fresh.reset_parameters()
    for ours, theirs in (
        (encoder.named_parameters(), fresh.named_parameters()),
        (encoder.named_buffers(), fresh.named_buffers()),
    ):
        for (name, tensor), (_, expected) in zip(ours, theirs, strict=True):
            assert torch.equal(tensor, expected), name
    assert math.isfinite(float(encoder.blocks[0].attention.qkv.gain_P.sum()))
