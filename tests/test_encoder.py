"""The encoder as a whole: shapes, every scheme trains every parameter, wrong input is refused."""

from typing import get_args

import pytest
import torch

from lightning_modules.encoder import Encoder, EncoderConfig, check_codes
from lightning_modules.encoder_config import Scheme
from lightning_modules.heads import build_heads, gather_frames, gather_targets
from lightning_modules.losses import masked_cross_entropy, mean_loss
from lightning_modules.masking import masked_indices, span_mask

SCHEMES = get_args(Scheme)


def small(**options: object) -> EncoderConfig:
    base = {"num_codebooks": 3, "codebook_size": 17, "dim": 16, "num_layers": 4, "num_heads": 2, "ffn_dim": 32}
    return EncoderConfig(**{**base, "conv_kernel": 8, "conv_groups": 4, **options})


def codes_of(config: EncoderConfig, clips: int, frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (clips, config.num_codebooks, frames)
    return torch.randint(config.codebook_size, shape, generator=generator, dtype=torch.int16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_gets_a_finite_gradient(scheme: str) -> None:
    torch.manual_seed(0)
    config = small(scheme=scheme)
    encoder, heads = Encoder(config), build_heads(config)
    codes, num_frames = codes_of(config, 2, 20), torch.tensor([20, 13])
    mask = span_mask([1, 2], num_frames, 20)
    index = masked_indices(mask)
    hidden = encoder(codes, mask, num_frames)
    assert hidden.shape == (2, 20, config.dim)
    nats, count = masked_cross_entropy(heads(gather_frames(hidden, index)), gather_targets(codes, index))
    mean_loss(nats, count).backward()
    for name, parameter in [*encoder.named_parameters(), *heads.named_parameters()]:
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_codes_of_another_codebook_are_refused() -> None:
    config = small()
    codes = codes_of(config, 2, 5)
    check_codes(codes, config)
    codes[1, 1, 3] = 17
    with pytest.raises(ValueError, match=r"codes span 0\.\.\d+; codebook_size=17"):
        check_codes(codes, config)
    with pytest.raises(ValueError, match="num_codebooks=3"):
        Encoder(config)(codes[:, :2], torch.zeros(2, 5, dtype=torch.bool))
