"""Losses as sums and counts: exact, empty-safe, and equal to one big batch however the batch is split."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.heads import build_heads
from lightning_modules.losses import correct_codes, masked_cross_entropy, mean_loss, nats_to_bits, z_loss


def batch(frames: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, frames, 11, generator=generator), torch.randint(11, (3, frames), generator=generator)


def test_cross_entropy_per_codebook() -> None:
    logits, targets = batch()
    nats, count = masked_cross_entropy(logits, targets)
    assert count == 20
    for k in range(3):
        p = torch.softmax(logits[k].double(), dim=-1)
        expected = -p[torch.arange(20), targets[k]].log().sum()
        torch.testing.assert_close(nats[k].double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_cross_entropy_in_both_layouts() -> None:
    logits, targets = batch()
    weight = torch.tensor([1.0, -2.0, 0.5])
    theirs = logits.clone().requires_grad_()
    nats = F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="none").view(3, 20).sum(1)
    (nats * weight).sum().backward()
    for ours in (logits.clone(), logits.transpose(0, 1).contiguous().transpose(0, 1)):
        ours.requires_grad_()
        (masked_cross_entropy(ours, targets)[0] * weight).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient() -> None:
    logits, targets = batch()
    nats, _ = masked_cross_entropy(logits.requires_grad_(), targets)
    nats.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nats.sum().backward()


def test_sums_are_fp32_from_half_precision_logits() -> None:
    logits, targets = batch()
    nats, _ = masked_cross_entropy(logits.bfloat16(), targets)
    expected, _ = masked_cross_entropy(logits.bfloat16().float(), targets)
    assert nats.dtype == torch.float32
    assert torch.equal(nats, expected)


def test_accuracy_and_z_loss() -> None:
    logits, targets = batch()
    assert correct_codes(logits, targets).tolist() == [
        sum(int(logits[k, m].argmax()) == int(targets[k, m]) for m in range(20)) for k in range(3)
    ]
    expected = torch.stack([torch.logsumexp(logits[k].double(), -1).square().sum() for k in range(3)])
    torch.testing.assert_close(z_loss(logits).double(), expected, rtol=1e-5, atol=1e-4)


def test_bits() -> None:
    assert float(nats_to_bits(torch.tensor(math.log(1024)))) == pytest.approx(10.0)
    assert 9.4 * math.log(2) == pytest.approx(6.5156, abs=1e-4)


def test_a_batch_without_masked_frames_has_zero_loss_and_zero_gradients() -> None:
    config = EncoderConfig(num_codebooks=2, codebook_size=5, dim=4, num_heads=1, num_layers=1, ffn_dim=4, conv_groups=1)
    heads = build_heads(config)
    nats, count = masked_cross_entropy(heads(torch.zeros(0, 4)), torch.zeros(2, 0, dtype=torch.int64))
    assert count == 0
    loss = mean_loss(nats, count)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0.0 for p in heads.parameters())


def test_ranks_and_micro_batches_give_the_gradient_of_one_big_batch() -> None:
    """2 ranks x 2 micro-batches with 3, 4, 6 and 7 frames; DDP averages over ranks, accumulation adds."""
    logits, targets = batch(20)
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum").div(20).backward()
    parts, gradients = ((0, 3), (3, 7), (7, 13), (13, 20)), []
    for start, stop in parts:
        piece = logits[:, start:stop].clone().requires_grad_()
        nats, _ = masked_cross_entropy(piece, targets[:, start:stop])
        mean_loss(nats, torch.tensor(20), world_size=2).backward()
        gradients.append(piece.grad)
    averaged = torch.cat(gradients, dim=1) / 2
    torch.testing.assert_close(averaged, whole.grad)
