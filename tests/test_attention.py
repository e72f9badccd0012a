"""Attention's options: relaxation is reached and is the identity, fp16 overflow, probes, QK-clip, sigma-reparam."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_modules import attention as attention_module
from lightning_modules.attention import Attention, AttentionContext, explicit_attention
from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.reparam import SigmaLinear, clip_query_key_


def qkv(clips: int = 2, heads: int = 3, frames: int = 7, width: int = 8, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(clips, heads, frames, width, generator=generator) * scale for _ in range(3)]


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    return Attention(EncoderConfig(dim=16, num_heads=2, num_layers=2, ffn_dim=16, **options))


KEEP = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("keep", [None, KEEP], ids=["full", "padded"])
def test_relaxation_is_the_identity_in_fp32(scale: float, keep: torch.Tensor | None) -> None:
    """Outputs and gradients equal those of ``scaled_dot_product_attention``, also with logits in the thousands."""
    ours = [x.clone().requires_grad_() for x in qkv(scale=scale)]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    upstream = torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(1))
    relaxed, _ = explicit_attention(*ours, keep, relax=32.0)
    mask = None if keep is None else keep[:, None, None, :]
    plain = F.scaled_dot_product_attention(*theirs, attn_mask=mask)
    torch.testing.assert_close(relaxed.double(), plain, rtol=1e-4, atol=2e-4)
    relaxed.backward(upstream)
    plain.backward(upstream.double())
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=2e-3, atol=2e-3)


def test_relaxation_and_plain_attention_agree_bit_for_bit_on_the_argmax_scale() -> None:
    """c is a power of two, so dividing by it and multiplying again changes no bit of the shifted logits."""
    q, k, v = qkv()
    relaxed, _ = explicit_attention(q, k, v, None, relax=32.0)
    plain, _ = explicit_attention(q, k, v, None)
    torch.testing.assert_close(relaxed, plain, rtol=0, atol=1e-6)


def test_fp16_logits_above_65504() -> None:
    """Plain attention gives NaN, q divided before the product does not, and is right."""
    q, k, v = (x.half() for x in qkv(scale=1.0))
    q, k = q * 0 + 140.0, k * 0 + 140.0
    k[:, :, 3] = 143.0
    largest = 8 * 140 * 143 / math.sqrt(8)
    assert 65504 / 32 < largest < 65504
    q, k = q * 2, k * 2
    plain, _ = explicit_attention(q, k, v, None)
    assert plain.isnan().any()
    relaxed, seen = explicit_attention(q, k, v, None, relax=32.0)
    assert float(seen.max()) > 65504
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(relaxed.double(), expected, rtol=1e-2, atol=1e-2)


def test_the_relaxed_path_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float | None] = []
    original = attention_module.explicit_attention

    def spy(*args: Any, **options: Any) -> Any:
        calls.append(options["relax"])
        return original(*args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("scaled_dot_product_attention has no relaxation")

    monkeypatch.setattr(attention_module, "explicit_attention", spy)
    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    relaxed = layer(relax=32.0)
    x = torch.randn(1, 5, 16)
    for training in (True, False):
        relaxed.train(training)
        relaxed(x, AttentionContext())
    assert calls == [32.0, 32.0]
    with pytest.raises(AssertionError, match="no relaxation"):
        layer()(x, AttentionContext())


@pytest.mark.parametrize("options", [{}, {"relax": 32.0}, {"qk_norm": True}])
def test_probing_changes_no_output_and_sees_the_largest_logit(options: dict[str, Any]) -> None:
    attention, x = layer(**options), torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    context = AttentionContext(keep_BJ=KEEP, mask_B11J=KEEP[:, None, None, :])
    quiet = attention(x, context)
    assert torch.isinf(attention.max_logit_H).all()
    attention.probe = True
    assert torch.equal(attention(x, context), quiet)
    q, k, _ = attention.project(x, context)
    logits = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~KEEP[:, None, None, :], -math.inf)
    torch.testing.assert_close(attention.max_logit_H, logits.amax(dim=(0, 2, 3)))
    first = attention.max_logit_H.clone()
    attention(x * 0.01, context)
    assert torch.equal(attention.max_logit_H, first), "the maximum is kept over micro-batches"


def test_qk_clip_brings_the_largest_logit_to_the_limit_and_spares_other_heads() -> None:
    attention, x = layer(qk_clip=2.0), torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention.qkv.weight.mul_(20)
        attention.qkv.weight[:8].mul_(4)
        attention.qkv.bias.normal_()
    attention(x, AttentionContext())
    before, weight = attention.max_logit_H.clone(), attention.qkv.weight.detach().clone()
    limit = float(before.min()) * 1.5
    assert before[0] > limit > before[1]
    factor = clip_query_key_(attention.qkv, before, limit)
    assert factor[0] < 1.0
    assert factor[1] == 1.0
    attention.reset_max_logit()
    attention(x, AttentionContext())
    assert float(attention.max_logit_H[0]) == pytest.approx(limit, rel=1e-4)
    assert torch.equal(attention.qkv.weight[8:16], weight[8:16])
    assert torch.equal(attention.qkv.weight[32:], weight[32:]), "values are not clipped"


def test_sigma_linear_starts_as_the_plain_linear_and_keeps_its_spectral_norm() -> None:
    torch.manual_seed(0)
    linear = SigmaLinear(24, 36, parts=3)
    linear.start_at_sigma(200)
    x = torch.randn(5, 24)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))
    for part, sigma in zip(linear.weight.chunk(3), linear.sigma_P(), strict=True):
        assert float(sigma) == pytest.approx(float(torch.linalg.matrix_norm(part, 2)), rel=1e-4)
    with torch.no_grad():
        linear.weight.mul_(7.0)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight / 7.0, linear.bias))


def test_power_iteration_follows_a_moving_weight() -> None:
    torch.manual_seed(0)
    linear = SigmaLinear(16, 16)
    linear.start_at_sigma()
    for _ in range(200):
        with torch.no_grad():
            linear.weight.add_(0.02 * torch.randn_like(linear.weight))
        linear.advance()
    for _ in range(100):
        linear.advance()
    assert float(linear.sigma_P()) == pytest.approx(float(torch.linalg.matrix_norm(linear.weight, 2)), rel=1e-3)


def test_qk_norm_bounds_logits_whatever_the_weights() -> None:
    attention, x = layer(qk_norm=True), torch.randn(2, 7, 16)
    attention.probe = True
    with torch.no_grad():
        attention.qkv.weight.mul_(1e4)
    attention(x, AttentionContext())
    assert float(attention.max_logit_H.max()) <= math.sqrt(8) + 1e-3
