"""Every scheme, norm and option against the naive float64 encoder, with padding; and gradient profiles at init."""

from typing import Any, get_args

import pytest
import torch
from naive_encoder import NaiveEncoder

from lightning_modules.blocks import build_blocks
from lightning_modules.encoder import Encoder, EncoderConfig
from lightning_modules.encoder_config import Scheme
from lightning_modules.heads import build_heads
from lightning_modules.masking import span_mask

SCHEMES = get_args(Scheme)
OPTIONS: list[dict[str, Any]] = [
    {"norm": "rmsnorm"},
    {"norm": "dyt"},
    {"relax": 32.0},
    {"qk_norm": True},
    {"qk_norm": True, "norm": "rmsnorm", "position": "rope"},
    {"soft_cap": 2.0},
    {"relax": 32.0, "soft_cap": 2.0},
    {"gate": "headwise"},
    {"gate": "elementwise", "relax": 32.0},
    {"sigma_reparam": True},
    {"qk_clip": 1.0},
    {"position": "rope"},
    {"position": "none"},
    {"sigma_reparam": True, "gate": "headwise", "soft_cap": 3.0, "qk_norm": True, "position": "rope", "relax": 8.0},
]


def tiny(**options: Any) -> EncoderConfig:
    base = {"num_codebooks": 3, "codebook_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "ffn_dim": 12}
    return EncoderConfig(**{**base, "conv_kernel": 4, "conv_groups": 2, **options})


def perturbed(config: EncoderConfig) -> Encoder:
    """An encoder in float64 whose gains, biases and matrices are all away from their neutral first values."""
    torch.manual_seed(1)
    encoder = Encoder(config).double().eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def check_against_naive(config: EncoderConfig) -> None:
    encoder = perturbed(config)
    num_frames = torch.tensor([9, 6])
    codes = torch.randint(config.codebook_size, (2, 3, 9), dtype=torch.int16)
    mask = span_mask([5, 6], num_frames, 9)
    hidden = encoder(codes, mask, num_frames)
    naive = NaiveEncoder(encoder)
    for clip, frames in enumerate(num_frames.tolist()):
        expected = naive(codes[clip, :, :frames], mask[clip, :frames])
        torch.testing.assert_close(hidden[clip, :frames], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_equals_its_formula(scheme: str) -> None:
    check_against_naive(tiny(scheme=scheme))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_option_equals_its_formula(options: dict[str, Any]) -> None:
    check_against_naive(tiny(**options))


@pytest.mark.parametrize("scheme", ["deepnorm", "sub_ln", "hybrid_star", "keel", "residual_dual"])
def test_option_set_under_other_schemes(scheme: str) -> None:
    check_against_naive(tiny(scheme=scheme, norm="rmsnorm", relax=32.0, gate="headwise", position="rope"))


def gradient_profile(scheme: str) -> list[float]:
    """Gradient norm of each block at init: 12 blocks, mean square loss against noise of the output's scale."""
    torch.manual_seed(0)
    base = {"num_codebooks": 2, "codebook_size": 64, "dim": 96, "num_layers": 12, "num_heads": 4, "ffn_dim": 384}
    encoder = Encoder(EncoderConfig(**base, scheme=scheme, init="xavier", position="rope"))  # type: ignore[arg-type]
    hidden = encoder(torch.randint(64, (4, 2, 32)), torch.zeros(4, 32, dtype=torch.bool))
    (hidden * torch.randn(hidden.shape)).sum(-1).square().mean().backward()
    return [sum(float(p.grad.square().sum()) for p in block.parameters()) ** 0.5 for block in encoder.blocks]


def test_gradient_profiles_at_init_tell_the_schemes_apart() -> None:
    profile = {scheme: gradient_profile(scheme) for scheme in ("pre", "post", "deepnorm", "keel", "ln_scaling")}
    ratio = {scheme: norms[0] / norms[-1] for scheme, norms in profile.items()}
    assert 1.8 < ratio["pre"] < 4.0
    assert 0.5 < ratio["post"] < 1.7
    assert 0.8 < ratio["deepnorm"] < 1.1
    assert 0.7 < ratio["keel"] < 1.1
    assert ratio["ln_scaling"] > ratio["pre"]
    assert max(profile["deepnorm"]) < 0.6 * min(profile["pre"])


@pytest.mark.slow
def test_gradient_profiles_of_the_24_layer_encoder() -> None:
    """Cross entropy on random codes, N=24, D=1024: first over last block about 2.4 (pre), 0.75 (post), 1 (deepnorm)."""
    ratio = {}
    for scheme in ("pre", "post", "deepnorm"):
        torch.manual_seed(0)
        config = EncoderConfig(dim=1024, num_layers=24, num_heads=16, ffn_dim=4096, scheme=scheme, num_codebooks=1)
        encoder, heads = Encoder(config), build_heads(config)
        codes = torch.randint(1024, (2, 1, 48))
        hidden = encoder(codes, torch.zeros(2, 48, dtype=torch.bool)).flatten(0, 1)
        torch.nn.functional.cross_entropy(heads(hidden)[0], codes.flatten()).backward()
        norms = [sum(float(p.grad.square().sum()) for p in block.parameters()) ** 0.5 for block in encoder.blocks]
        ratio[scheme] = norms[0] / norms[-1]
        print(scheme, norms[0], norms[-1])
    assert 1.5 < ratio["pre"] < 4.0
    assert 0.5 < ratio["post"] < 1.0
    assert 0.85 < ratio["deepnorm"] < 1.15


def test_mix_ln_puts_post_norm_blocks_at_the_bottom() -> None:
    kinds = [type(block).__name__ for block in build_blocks(tiny(scheme="mix_ln", num_layers=8, mix_ln_post=0.25))]
    assert kinds == ["PostNorm"] * 2 + ["PreNorm"] * 6
