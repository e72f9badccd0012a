"""Heads and what goes in and out of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.encoder_config import EncoderConfig
from lightning_modules.heads import CosineHeads, LinearHeads, build_heads, gather_frames, gather_targets
from lightning_modules.losses import correct_codes, masked_cross_entropy, z_loss


def config(head: str) -> EncoderConfig:
    sizes = {"num_codebooks": 3, "codebook_size": 13, "dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 8}
    return EncoderConfig(**sizes, conv_groups=2, head=head, head_dim=5)  # type: ignore[arg-type]


def test_linear_heads_equal_one_linear_per_codebook() -> None:
    torch.manual_seed(0)
    heads = build_heads(config("linear"))
    assert isinstance(heads, LinearHeads)
    x = torch.randn(6, 8)
    for k, logits in enumerate(heads(x)):
        rows = slice(13 * k, 13 * (k + 1))
        torch.testing.assert_close(logits, x @ heads.projection.weight[rows].T + heads.projection.bias[rows])


def nce_loss(projected_MC: torch.Tensor, table_VC: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
    """HuBERT's form: the positive first, then all codes with the positive's duplicates at -inf, over 0.1."""
    positive = table_VC[targets_M]
    candidates = torch.cat([positive.unsqueeze(0), table_VC.unsqueeze(1).expand(-1, len(targets_M), -1)])
    logits = F.cosine_similarity(projected_MC.unsqueeze(0), candidates, dim=-1) / 0.1
    duplicate = (candidates[1:] == positive).all(-1)
    logits = torch.cat([logits[:1], logits[1:].masked_fill(duplicate, -torch.inf)]).T
    return F.cross_entropy(logits, torch.zeros(len(targets_M), dtype=torch.int64), reduction="sum")


def test_cosine_heads_with_cross_entropy_equal_the_nce_form() -> None:
    torch.manual_seed(0)
    heads = build_heads(config("cosine"))
    assert isinstance(heads, CosineHeads)
    x, targets = torch.randn(6, 8), torch.randint(13, (3, 6))
    logits = heads(x)
    assert float(logits.abs().max()) <= 10.0 + 1e-5
    plain = sum(F.cross_entropy(logits[k], targets[k], reduction="sum") for k in range(3))
    gradient = torch.autograd.grad(plain, [heads.code_KVC, heads.projection.weight])
    projected = heads.projection(x).view(6, 3, 5)
    nce = sum(nce_loss(projected[:, k], heads.code_KVC[k], targets[k]) for k in range(3))
    torch.testing.assert_close(plain, nce)
    expected = torch.autograd.grad(nce, [heads.code_KVC, heads.projection.weight])
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_cosine_heads_stay_in_fp32_under_autocast() -> None:
    torch.manual_seed(0)
    heads, x = build_heads(config("cosine")), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert heads(x).dtype == torch.float32


def test_gather_picks_the_same_frames_of_states_and_codes() -> None:
    codes = torch.arange(2 * 3 * 4, dtype=torch.int16).view(2, 3, 4)
    hidden = torch.arange(8.0).view(2, 4, 1)
    index = torch.tensor([1, 6])
    assert gather_frames(hidden, index).flatten().tolist() == [1.0, 6.0]
    targets = gather_targets(codes, index)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [[codes[0, k, 1], codes[1, k, 2]] for k in range(3)]


def test_no_masked_frame_is_no_error() -> None:
    for head in ("linear", "cosine"):
        heads = build_heads(config(head))
        assert heads(torch.zeros(0, 8)).shape == (3, 0, 13)


@pytest.mark.parametrize("z_weight", [0.0, 1e-2])
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_losses_equal_those_of_the_logits_with_gradients(head: str, z_weight: float) -> None:
    if head == "cosine" and z_weight > 0.0:
        return
    torch.manual_seed(0)
    heads = build_heads(replace(config(head), z_loss=z_weight))
    targets, weight = torch.randint(13, (3, 6)), torch.tensor([1.0, -2.0, 0.5])
    x, x_again = (torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    losses = heads.losses(x, targets)
    (losses.objective_K * weight).sum().backward()
    got = [x.grad, *(p.grad.clone() for p in heads.parameters())]
    heads.zero_grad()
    logits = heads(x_again)
    nats, frames = masked_cross_entropy(logits, targets)
    objective = nats + z_weight * z_loss(logits)
    (objective * weight).sum().backward()
    torch.testing.assert_close(losses.objective_K, objective)
    torch.testing.assert_close(losses.nats_K, nats.detach())
    per_frame = torch.stack([F.cross_entropy(logits[k], targets[k], reduction="none") for k in range(3)])
    torch.testing.assert_close(losses.nats_KM, per_frame.detach())
    assert not losses.nats_KM.requires_grad
    assert torch.equal(losses.correct_K, correct_codes(logits, targets))
    assert losses.frames == frames == 6
    for ours, theirs in zip(got, [x_again.grad, *(p.grad for p in heads.parameters())], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_fused_losses_under_autocast_without_frames_and_without_gradients() -> None:
    torch.manual_seed(0)
    heads, x, targets = build_heads(config("linear")), torch.randn(6, 8), torch.randint(13, (3, 6))
    exact = heads.losses(x, targets)
    with torch.no_grad():
        assert torch.equal(heads.losses(x, targets).nats_K, exact.nats_K)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = heads.losses(x, targets)
    half.objective_K.sum().backward()
    assert half.nats_K.dtype == torch.float32
    torch.testing.assert_close(half.nats_K, exact.nats_K, rtol=1e-2, atol=1e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in [x, *heads.parameters()])
    empty = heads.losses(torch.zeros(0, 8, requires_grad=True), torch.zeros(3, 0, dtype=torch.int64))
    empty.objective_K.sum().backward()
    assert empty.objective_K.tolist() == [0.0, 0.0, 0.0]


def test_fused_losses_never_hold_all_logits() -> None:
    """The largest tensor they save for the backward pass has the size of the heads' weights or K x the states."""
    saved: list[int] = []
    heads = build_heads(config("linear"))
    x = torch.randn(500, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        heads.losses(x, torch.randint(13, (3, 500))).objective_K.sum().backward()
    assert max(saved) == 3 * 500 * 8 < 3 * 500 * 13


@pytest.mark.parametrize(("training", "products"), [(True, 9), (False, 3)])
def test_no_gradient_is_computed_where_none_is_wanted(training: bool, products: int) -> None:
    heads, x, targets = build_heads(config("linear")), torch.randn(6, 8), torch.randint(13, (3, 6))
    with CountProducts() as counted, torch.set_grad_enabled(training):
        heads.losses(x, targets)
    assert counted.products == products


class CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))
