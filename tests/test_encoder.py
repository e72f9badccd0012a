"""The encoder as a whole: shapes, every scheme trains every parameter, wrong input is refused."""

from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch

from lightning_modules import health
from lightning_modules.encoder import Encoder, EncoderConfig, check_codes, compile_blocks
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


def run(
    encoder: Encoder, heads: torch.nn.Module, codes: torch.Tensor, mask: torch.Tensor, num_frames: torch.Tensor | None
) -> torch.Tensor:
    """Summed loss of a batch; gradients are left in the parameters."""
    index = masked_indices(mask)
    encoder.zero_grad()
    heads.zero_grad()
    nats, _ = masked_cross_entropy(
        heads(gather_frames(encoder(codes, mask, num_frames), index)), gather_targets(codes, index)
    )
    nats.sum().backward()
    return nats.detach()


def gradients(*modules: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{i}.{n}": p.grad.clone() for i, m in enumerate(modules) for n, p in m.named_parameters()}


PADDING_OPTIONS = [
    *({"scheme": scheme} for scheme in SCHEMES),
    {"relax": 32.0},
    {"position": "rope"},
    {"soft_cap": 5.0, "gate": "headwise"},
    {"relax": 32.0, "qk_norm": True, "scheme": "deepnorm"},
]


@pytest.mark.parametrize("options", PADDING_OPTIONS, ids=str)
def test_loss_and_gradients_do_not_change_with_the_padding(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = small(**options)
    encoder, heads = Encoder(config), build_heads(config)
    num_frames = torch.tensor([20, 11, 5])
    codes, mask = codes_of(config, 3, 20), span_mask([1, 2, 3], [20, 11, 5], 20)
    losses, expected = [], None
    for clip, frames in enumerate(num_frames.tolist()):
        part = slice(clip, clip + 1)
        losses.append(run(encoder, heads, codes[part, :, :frames], mask[part, :frames], None))
        grads = gradients(encoder, heads)
        expected = grads if expected is None else {name: expected[name] + grads[name] for name in grads}
    assert expected is not None
    for extra in (0, 9):
        filler = torch.zeros(3, config.num_codebooks, extra, dtype=torch.int16)
        padded = torch.cat([codes, filler], dim=2)
        padded_mask = torch.cat([mask, torch.zeros(3, extra, dtype=torch.bool)], dim=1)
        loss = run(encoder, heads, padded, padded_mask, num_frames)
        torch.testing.assert_close(loss, sum(losses[1:], start=losses[0]), rtol=1e-5, atol=1e-4)
        for name, gradient in gradients(encoder, heads).items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("options", [{}, {"relax": 32.0}, {"soft_cap": 30.0}, {"scheme": "post"}], ids=str)
def test_a_clip_without_frames_harms_nobody(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = small(**options)
    encoder, heads = Encoder(config), build_heads(config)
    codes = codes_of(config, 2, 12)
    alone = run(encoder, heads, codes[:1], span_mask([1], [12], 12), None)
    expected = gradients(encoder, heads)
    loss = run(encoder, heads, codes, span_mask([1, 2], [12, 0], 12), torch.tensor([12, 0]))
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(encoder, heads).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_all_codes_of_a_masked_frame_are_hidden() -> None:
    torch.manual_seed(0)
    config = small()
    encoder = Encoder(config)
    codes, mask = codes_of(config, 1, 10), torch.zeros(1, 10, dtype=torch.bool)
    mask[0, 4] = True
    changed = codes.clone()
    changed[0, :, 4] = (changed[0, :, 4] + 1) % config.codebook_size
    assert torch.equal(encoder(codes, mask), encoder(changed, mask))
    unmasked = torch.zeros_like(mask)
    assert not torch.equal(encoder(codes, unmasked), encoder(changed, unmasked))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_code_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder = Encoder(small())
    codes, mask = codes_of(small(), 1, 10), torch.zeros(1, 10, dtype=torch.bool)
    assert torch.equal(encoder(codes.to(dtype), mask), encoder(codes, mask))


def test_position_information_is_there() -> None:
    """Reversing the frames does not merely reverse the hidden states, except without positions."""
    for position, moves in (("conv", True), ("rope", True), ("none", False)):
        torch.manual_seed(0)
        encoder = Encoder(small(position=position)).double()
        codes, mask = codes_of(small(), 1, 12), torch.zeros(1, 12, dtype=torch.bool)
        there, back = encoder(codes, mask), encoder(codes.flip(2), mask).flip(1)
        assert torch.allclose(there, back, atol=1e-9) is not moves, position


def test_hidden_states_of_every_layer() -> None:
    torch.manual_seed(0)
    for scheme in ("pre", "post", "residual_dual"):
        encoder = Encoder(small(scheme=scheme)).eval()
        codes, mask = codes_of(small(), 2, 10), torch.zeros(2, 10, dtype=torch.bool)
        states = encoder(codes, mask, return_layers=True)
        assert len(states) == encoder.config.num_layers + 1
        assert torch.equal(states[-1], encoder(codes, mask))
        assert all(not torch.equal(a, b) for a, b in pairwise(states))


def test_activation_checkpointing_changes_memory_only() -> None:
    config = small(attention_dropout=0.1, dropout=0.1)
    results = []
    for switch in (False, True):
        torch.manual_seed(0)
        encoder, heads = Encoder(config), build_heads(config)
        object.__setattr__(encoder.config, "activation_checkpointing", switch)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            torch.manual_seed(1)
            loss = run(encoder, heads, codes_of(config, 2, 20), span_mask([1, 2], [20, 20], 20), None)
        results.append((loss, gradients(encoder, heads), sum(saved)))
    (loss, grads, much), (loss_again, grads_again, little) = results
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert little < much / 2


def test_dropout_is_off_in_eval_and_on_in_training() -> None:
    torch.manual_seed(0)
    encoder = Encoder(small(dropout=0.2, attention_dropout=0.2, activation_dropout=0.2))
    codes, mask = codes_of(small(), 2, 10), torch.zeros(2, 10, dtype=torch.bool)
    assert not torch.equal(encoder(codes, mask), encoder(codes, mask))
    encoder.eval()
    assert torch.equal(encoder(codes, mask), encoder(codes, mask))


def test_layerdrop_follows_the_shared_seed_and_uses_every_parameter() -> None:
    torch.manual_seed(0)
    config = small(layerdrop=0.5, num_layers=6)
    encoder = Encoder(config)
    codes, mask = codes_of(config, 2, 10), torch.zeros(2, 10, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"layerdrop=0\.5 needs a layerdrop_seed"):
        encoder(codes, mask)
    outputs = [encoder(codes, mask, layerdrop_seed=seed) for seed in (1, 1, 2, 3)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    outputs[0].square().sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())
    assert any(float(p.grad.abs().sum()) == 0.0 for p in encoder.blocks.parameters() if p.grad is not None)
    encoder.eval()
    assert torch.equal(encoder(codes, mask), encoder(codes, mask))


def test_a_checkpoint_of_another_scheme_is_refused_with_both_names(tmp_path: Path) -> None:
    torch.save(Encoder(small(scheme="pre")).state_dict(), tmp_path / "pre.pt")
    state = torch.load(tmp_path / "pre.pt", weights_only=True)
    Encoder(small(scheme="pre")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"Pre-Norm encoder \(scheme=pre\).*DeepNorm \(scheme=deepnorm\)"):
        Encoder(small(scheme="deepnorm")).load_state_dict(state)
    with pytest.raises(ValueError, match="Post-Norm"):
        Encoder(small(scheme="deepnorm")).load_state_dict(Encoder(small(scheme="post")).state_dict(), strict=False)
    nested = torch.nn.ModuleDict({"encoder": Encoder(small(scheme="keel"))})
    with pytest.raises(ValueError, match=r"Pre-Norm.*KEEL"):
        nested.load_state_dict({f"encoder.{name}": value for name, value in state.items()})


@pytest.mark.parametrize("options", [{}, {"relax": 32.0}, {"sigma_reparam": True}, {"head": "cosine"}], ids=str)
def test_bf16_autocast_is_close_to_fp32(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = small(**options)
    encoder, heads = Encoder(config), build_heads(config)
    codes, mask = codes_of(config, 2, 20), span_mask([1, 2], [20, 13], 20)
    exact = run(encoder, heads, codes, mask, torch.tensor([20, 13]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = run(encoder, heads, codes, mask, torch.tensor([20, 13]))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=0.2)
    assert all(torch.isfinite(g).all() for g in gradients(encoder, heads).values())


def test_fp16_with_large_logits_trains_only_with_relaxation() -> None:
    """Logits of 65504 to 32 * 65504: c = 1 (no relaxation) gives NaN, c = 32 gives finite states and gradients."""
    for relax, finite in ((1.0, False), (32.0, True)):
        torch.manual_seed(0)
        encoder = Encoder(small(relax=relax, position="none")).half()
        with torch.no_grad():
            for block in encoder.blocks:
                block.attention.qkv.weight[:32].mul_(5_000.0)
        with health.probing(encoder):
            hidden = encoder(codes_of(small(), 2, 10), torch.zeros(2, 10, dtype=torch.bool))
        assert bool(torch.isfinite(hidden).all()) is finite
    assert 65504 < float(health.max_logits(encoder).max()) < 32 * 65504
    hidden.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "prenorm"}, "scheme='prenorm' is unknown; choose from pre, post, deepnorm"),
        ({"norm": "batchnorm"}, "norm='batchnorm' is unknown; choose from layernorm, rmsnorm, dyt"),
        ({"num_heads": 3}, "num_heads=3 is out of range; it must be a divisor of dim=16"),
        ({"conv_groups": 3}, "conv_groups=3"),
        ({"relax": 0.0}, "relax=0.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"codebook_size": 1}, "codebook_size=1"),
        ({"num_heads": 16, "position": "rope"}, "even"),
        ({"scheme": "deepnorm", "init": "megatron"}, "init=megatron with scheme=deepnorm"),
        ({"scheme": "deepnorm", "norm": "dyt"}, "norm=dyt with scheme=deepnorm"),
        ({"scheme": "hybrid", "qk_norm": True}, "already normalizes queries, keys and values"),
        ({"qk_norm": True, "qk_clip": 100.0}, "qk_clip with normalized queries and keys"),
        ({"sigma_reparam": True, "qk_clip": 100.0}, "qk_clip with sigma_reparam"),
        ({"head": "cosine", "z_loss": 1e-4}, "z_loss=0.0001 with head=cosine"),
        ({"layerscale_init": 0.1}, "only scheme=layerscale reads it"),
        ({"mix_ln_post": 0.5}, "only scheme=mix_ln reads it"),
        ({"scheme": "mix_ln", "mix_ln_post": 0.1}, "some but not all of num_layers=4"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_compiled_blocks_keep_the_state_dict_and_are_shared() -> None:
    encoder = Encoder(small())
    names = list(encoder.state_dict())
    compile_blocks(encoder, backend="eager")
    assert list(encoder.state_dict()) == names
    codes, mask = codes_of(small(), 2, 10), torch.zeros(2, 10, dtype=torch.bool)
    torch.manual_seed(0)
    plain = Encoder(small())
    plain.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(codes, mask), plain(codes, mask))
    assert all(block._compiled_call_impl is not None for block in encoder.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scheme": "deepnorm", "relax": 32.0, "gate": "headwise"}], ids=str)
def test_compiled_training_step_equals_the_plain_one(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = small(**options)
    encoder, heads = Encoder(config), build_heads(config)
    codes, mask = codes_of(config, 2, 20), span_mask([1, 2], [20, 13], 20)
    loss = run(encoder, heads, codes, mask, torch.tensor([20, 13]))
    expected = gradients(encoder, heads)
    compile_blocks(encoder, fullgraph=True)
    torch.testing.assert_close(run(encoder, heads, codes, mask, torch.tensor([20, 13])), loss, rtol=1e-5, atol=1e-4)
    for name, gradient in gradients(encoder, heads).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
