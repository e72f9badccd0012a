"""Health signals: right numbers, no change to the outputs, nothing computed when off."""

import math

import pytest
import torch

from lightning_modules import attention as attention_module
from lightning_modules import health
from lightning_modules.encoder import Encoder, EncoderConfig


def config(**options: object) -> EncoderConfig:
    base = {"num_codebooks": 2, "codebook_size": 7, "dim": 16, "num_layers": 3, "num_heads": 2, "ffn_dim": 32}
    return EncoderConfig(**{**base, "conv_kernel": 4, "conv_groups": 4, **options})  # type: ignore[arg-type]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(7, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    return codes, torch.zeros(2, 9, dtype=torch.bool), torch.tensor([9, 5])


def test_probing_reads_logits_and_residual_rms_of_every_block() -> None:
    torch.manual_seed(0)
    encoder = Encoder(config())
    quiet = encoder(*batch())
    with health.probing(encoder):
        assert torch.equal(encoder(*batch()), quiet)
    assert health.max_logits(encoder).shape == (3, 2)
    assert torch.isfinite(health.max_logits(encoder)).all()
    states = encoder(*batch(), return_layers=True)
    for block in (0, 1):
        valid = torch.cat([states[block + 1][0], states[block + 1][1, :5]])
        torch.testing.assert_close(encoder.block_rms_N[block], valid.square().mean().sqrt())


def test_off_means_off(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(config())

    def refuse(*_: object) -> None:
        raise AssertionError("probed")

    monkeypatch.setattr(attention_module, "largest_logit_per_head", refuse)
    monkeypatch.setattr(encoder, "_record_rms", refuse)
    encoder(*batch())
    with health.probing(encoder, enabled=False):
        encoder(*batch())
    with pytest.raises(AssertionError, match="probed"), health.probing(encoder):
        encoder(*batch())
    encoder(*batch())


def test_a_blown_up_block_is_named_by_its_signals() -> None:
    torch.manual_seed(0)
    encoder = Encoder(config())
    with torch.no_grad():
        encoder.blocks[1].attention.qkv.weight[:32].mul_(100.0)
        encoder.blocks[2].ffn.fc2.weight.mul_(10_000.0)
    with health.probing(encoder):
        encoder(*batch())
    assert int(health.max_logits(encoder).amax(dim=1).argmax()) == 1
    assert float(encoder.block_rms_N[2] / encoder.block_rms_N[1]) > 10


def test_qk_clip_over_the_encoder() -> None:
    torch.manual_seed(0)
    encoder = Encoder(config(qk_clip=0.05))
    encoder(*batch())
    before = health.max_logits(encoder)
    limit = float(before.flatten().sort().values[2:4].mean())
    assert int(health.apply_qk_clip(encoder, before, limit)) == 3
    assert torch.isinf(health.max_logits(encoder)).all()
    encoder(*batch())
    after = health.max_logits(encoder)
    assert float(after[0].max()) <= limit * 1.0001
    assert float(after.max()) <= limit * 1.05, "later blocks see slightly other inputs"


def test_prediction_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 30, 7, generator=generator) * 3 + 5
    targets = torch.randint(7, (2, 30), generator=generator)
    sums = health.prediction_sums(logits, targets)
    p = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(sums.entropy_K.double(), -(p * p.log()).sum((1, 2)), rtol=1e-5, atol=1e-5)
    assert torch.equal(sums.correct_K, (logits.argmax(-1) == targets).sum(1))
    centred = logits - logits.mean(-1, keepdim=True)
    torch.testing.assert_close(sums.logit_norm_K, centred.norm(dim=-1).sum(1))
    assert sums.frames == 30


def test_collapse_shows_as_entropy_near_zero_and_dead_codes() -> None:
    targets = torch.randint(7, (2, 50), generator=torch.Generator().manual_seed(0))
    uniform = health.prediction_sums(torch.zeros(2, 50, 7), targets)
    assert float(uniform.entropy_K[0]) / 50 == pytest.approx(math.log(7))
    collapsed = torch.zeros(2, 50, 7)
    collapsed[..., 3] = 1e4
    sums = health.prediction_sums(collapsed, targets)
    assert float(sums.entropy_K.max()) == 0.0
    assert torch.isfinite(sums.entropy_K).all()
    predicted = health.code_counts(collapsed.argmax(-1), 7)
    assert health.dead_codes(health.code_counts(targets, 7), predicted).tolist() == [6, 6]
    assert health.dead_codes(health.code_counts(targets, 7), health.code_counts(targets, 7)).tolist() == [0, 0]


def test_code_counts_are_bincounts() -> None:
    codes = torch.tensor([[0, 0, 6], [1, 2, 2]], dtype=torch.int16)
    assert health.code_counts(codes, 7).tolist() == [[2, 0, 0, 0, 0, 0, 1], [0, 1, 2, 0, 0, 0, 0]]


def test_update_ratios_by_group() -> None:
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"encoder": Encoder(config()), "heads": torch.nn.Linear(4, 4)})
    before = health.weight_copies(module)
    with torch.no_grad():
        for parameter in module["encoder"].blocks[1].parameters():
            parameter.mul_(1.01)
    ratios = health.update_ratios(module, before)
    assert set(ratios) == {"block_00", "block_01", "block_02", "embedding", "position", "heads", "norms"}
    assert float(ratios["block_01"]) == pytest.approx(0.01, rel=1e-3)
    assert all(float(value) == 0.0 for group, value in ratios.items() if group != "block_01")
