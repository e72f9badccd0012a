"""``python -m experiments bench norms``: gradients at initialization and sensitivity to the learning rate, by scheme.

Left: gradient norm of every block before the first step, for every scheme, on bundled tokens. Right: bits on codebook 0
at the end of a short training, over a sweep of peak learning rates. A flat curve is a scheme that
forgives a wrong learning rate (Wortsman et al., arXiv 2309.14322, measure sensitivity like this). Both are small
models: they rank schemes, they do not predict a 330M run.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from datamodules.codec_tokens import CodecTokens
from experiments.bench.norms_plot import draw
from experiments.progress import WorkProgress
from lightning_modules.encoder import Encoder, EncoderConfig
from lightning_modules.encoder_config import Scheme
from lightning_modules.fused_heads import HeadLosses
from lightning_modules.heads import build_heads, gather_frames, gather_targets
from lightning_modules.losses import mean_loss
from lightning_modules.masking import masked_indices, span_mask
from lightning_modules.schedules import schedule_factor

SWEPT: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"scheme": "post"},
    "deepnorm": {"scheme": "deepnorm"},
    "peri": {"scheme": "peri"},
    "pre + qk_norm": {"qk_norm": True},
}
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
NUM_CODEBOOKS = 2


def small_config(**options: Any) -> EncoderConfig:
    """The model of the sweep: 4 blocks of width 128 on the first two codebooks."""
    base = {"num_codebooks": NUM_CODEBOOKS, "dim": 128, "num_layers": 4, "num_heads": 4, "ffn_dim": 512}
    return EncoderConfig(**{**base, "conv_kernel": 16, "conv_groups": 8, **options})


class Model(torch.nn.Module):
    """Encoder and heads drawn from one seed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.heads = Encoder(config), build_heads(config)

    def losses(self, batch: dict[str, Any]) -> HeadLosses:
        """Losses of a batch on its masked frames."""
        codes_BKT, num_frames_B = batch["codes"], batch["num_frames"]
        mask_BT = span_mask(batch["mask_seed"], num_frames_B, codes_BKT.shape[2])
        index_M = masked_indices(mask_BT)
        hidden_MD = gather_frames(self.encoder(codes_BKT, mask_BT, num_frames_B), index_M)
        return self.heads.losses(hidden_MD, gather_targets(codes_BKT, index_M))


class Tokens:
    """Batches of bundled tokens, read once and the same for every run."""

    def __init__(self, clips: int, frames: int, steps: int) -> None:
        data = CodecTokens(use_codebooks=NUM_CODEBOOKS, num_frames=frames, global_batch=clips, seed=1)
        data.setup("fit")
        loader = data.train_dataloader()
        self.training = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps))


def unigram_bits(tokens: Tokens) -> float:
    """Entropy of codebook 0 over the training batches, what guessing without context costs."""
    counts = torch.bincount(torch.cat([batch["codes"][:, 0].flatten() for batch in tokens.training]).long())
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


def gradient_norms(tokens: Tokens, scheme: str, layers: int) -> list[float]:
    """Gradient norm of each block at initialization, width 256, over one batch."""
    sizes = {"dim": 256, "num_layers": layers, "num_heads": 4, "ffn_dim": 1024}
    config = replace(small_config(), scheme=scheme, **sizes)  # type: ignore[arg-type]
    model = Model(config)
    losses = model.losses(tokens.training[0])
    mean_loss(losses.objective_K, losses.frames).backward()  # type: ignore[no-untyped-call]
    return [
        math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters() if p.grad is not None))
        for block in model.encoder.blocks
    ]


def train(tokens: Tokens, options: dict[str, Any], rate: float) -> float:
    """Bits on codebook 0 over the last tenth of a short run; nan when the loss stops being finite."""
    model = Model(small_config(**options))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True)
    steps, bits = len(tokens.training), []
    for step, batch in enumerate(tokens.training):
        optimizer.param_groups[0]["lr"] = rate * schedule_factor(
            step + 1, warmup_steps=max(1, steps // 10), total_steps=steps + 1
        )
        losses = model.losses(batch)
        loss = mean_loss(losses.objective_K, losses.frames)
        if not math.isfinite(float(loss.detach())):
            return math.nan
        bits.append(float(losses.nats_K[0]) / losses.frames / math.log(2.0))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return statistics.fmean(bits[-max(1, steps // 10) :])


def sweep(tokens: Tokens, rates: list[float]) -> dict[str, list[float]]:
    """Final bits of every swept variant at every peak learning rate."""
    bits: dict[str, list[float]] = {}
    with WorkProgress("learning-rate sweep", len(SWEPT) * len(rates), "runs") as progress:
        for name, options in SWEPT.items():
            bits[name] = []
            for rate in rates:
                bits[name].append(train(tokens, options, rate))
                progress.advance(1, f"{name} at {rate:g}: {bits[name][-1]:.2f} bits")
    return bits


def sensitivity(bits: list[float], best: float) -> float:
    """Mean bits above the best of all runs, a diverged run counting as 10 bits (a uniform guess)."""
    return sum(min(10.0, 10.0 if math.isnan(value) else value) - best for value in bits) / len(bits)


def main(argv: list[str]) -> int:
    """Run both measurements; draw the picture and write the numbers beside it."""
    parser = argparse.ArgumentParser(prog="python -m experiments bench norms", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/norms/norms.png"), help="picture; numbers go beside it")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run of the sweep")
    parser.add_argument("--rates", type=float, nargs="+", default=list(LEARNING_RATES), help="peak learning rates")
    parser.add_argument("--layers", type=int, default=24, help="blocks of the gradient measurement")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.layers < 4:
        print("error: --steps must be at least 2 and --layers at least 4", file=sys.stderr)
        return 2
    console = Console()
    tokens = Tokens(clips=8, frames=64, steps=options.steps)
    schemes, norms = get_args(Scheme), {}
    with WorkProgress("gradients at initialization", len(schemes), "schemes") as progress:
        for scheme in schemes:
            norms[scheme] = gradient_norms(tokens, scheme, options.layers)
            progress.advance(1, scheme)
    bits = sweep(tokens, options.rates)
    best = min(value for values in bits.values() for value in values if not math.isnan(value))
    table = {name: {"bits": values, "sensitivity": sensitivity(values, best)} for name, values in bits.items()}
    unigram = unigram_bits(tokens)
    numbers: dict[str, Any] = {
        "gradient_norms": norms,
        "rates": options.rates,
        "steps": options.steps,
        "unigram_bits": unigram,
    }
    numbers["sweep"] = table
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(numbers, indent=1))
    draw(norms, options.rates, bits, unigram, options.out)
    for name, row in table.items():
        console.print(f"{name:<16} sensitivity {row['sensitivity']:.2f}  bits {[round(b, 2) for b in bits[name]]}")
    console.print(f"picture: {options.out}")
    return 0
