"""``python -m experiments bench encoder``: a training step of the encoder beside the libraries people use.

Three tables per size and precision: stacks of blocks (forward, backward, fused AdamW) with each peer's time over
Ballast's and the share of the matrix-product ceiling; the whole training step (embedding, position, heads, loss,
clipping) against the same job with HuBERT's encoder and heads on all frames; the price of each option over plain
Pre-Norm. Contenders are run interleaved, one step each per round; times are medians, memory is the peak of what a step
allocates on top of weights and optimizer state. The ceiling is the time of the step's own matrix products alone,
measured in the same rounds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experiments.bench import encoder_peers as peers
from experiments.bench.encoder_peers import SIZES, Bench, Size, Step
from experiments.progress import WorkProgress

Row = dict[str, Any]
CEILING = "matrix products alone"
TABLE_WIDTH = 130


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_medians(steps: Mapping[str, Step], rounds: int, device: torch.device, title: str) -> dict[str, float]:
    """Median seconds of each step over rounds in which every step runs once, starting at another one each round."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with WorkProgress(title, (rounds + 1) * len(names), "steps") as progress:
        for index in range(-1, rounds):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                synchronize(device)
                start = time.perf_counter()
                steps[name]()
                synchronize(device)
                if index >= 0:
                    seconds[name].append(time.perf_counter() - start)
                progress.advance(1, name)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes(step: Step, device: torch.device) -> int:
    """Most bytes allocated at once during a step, over what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)


def blocks_table(bench: Bench, size: Size, options: argparse.Namespace) -> list[Row]:
    """Stacks of blocks against the peers and the ceiling."""
    steps: dict[str, Step] = {CEILING: peers.products_step(bench, size)}
    parameters: dict[str, int] = {}
    for name, build in peers.block_contenders(size, options.compile).items():
        torch.manual_seed(0)
        module = build()
        parameters[name] = sum(p.numel() for p in module.parameters())
        steps[name] = peers.block_step(bench, size, module)
    memory = {name: peak_bytes(step, bench.device) for name, step in steps.items() if name != CEILING}
    seconds = interleaved_medians(steps, options.repeats, bench.device, f"{size.name}: blocks")
    ours = seconds["Ballast pre"]
    return [
        {
            "contender": name,
            "seconds": value,
            "tokens_per_second": size.tokens / value,
            "time_over_ballast": value / ours,
            "share_of_ceiling": seconds[CEILING] / value,
            "gflops": size.flops / value / 1e9,
            "peak_mib": memory[name] / 2**20 if name in memory else None,
            "parameters": parameters.get(name),
        }
        for name, value in seconds.items()
    ]


def whole_table(bench: Bench, size: Size, options: argparse.Namespace) -> list[Row]:
    """The whole training step, Ballast and the same job with HuBERT's encoder."""
    torch.manual_seed(0)
    steps = {"Ballast, heads on masked frames": peers.whole_ballast(bench, size)}
    if not any(sentence.startswith("HuBERT") for sentence in peers.missing_peers()):
        steps["HuBERT encoder, heads on all frames"] = peers.whole_hubert(bench, size)
    memory = {name: peak_bytes(step, bench.device) for name, step in steps.items()}
    seconds = interleaved_medians(steps, options.repeats, bench.device, f"{size.name}: whole step")
    ours = next(iter(seconds.values()))
    return [
        {
            "contender": name,
            "seconds": value,
            "tokens_per_second": size.tokens / value,
            "time_over_ballast": value / ours,
            "peak_mib": memory[name] / 2**20,
        }
        for name, value in seconds.items()
    ]


def price_table(bench: Bench, size: Size, options: argparse.Namespace) -> list[Row]:
    """Each option over plain Pre-Norm, whole training step."""
    steps: dict[str, Step] = {}
    for name, changed in {"plain Pre-Norm": {}, **peers.PRICED}.items():
        torch.manual_seed(0)
        steps[name] = peers.priced_step(bench, size, changed)
    memory = {name: peak_bytes(step, bench.device) for name, step in steps.items()}
    seconds = interleaved_medians(steps, options.repeats, bench.device, f"{size.name}: price of options")
    plain = seconds["plain Pre-Norm"]
    return [
        {"option": name, "seconds": value, "price": value / plain - 1.0, "peak_mib": memory[name] / 2**20}
        for name, value in seconds.items()
    ]


def peak_gflops(bench: Bench) -> float:
    """Speed of one large square matrix product, the best of five."""
    kind = torch.bfloat16 if bench.bf16 else torch.float32
    width = 8192 if bench.device.type == "cuda" else 2048
    a = bench.noise(width, width).to(kind)
    best = float("inf")
    for _ in range(5):
        synchronize(bench.device)
        start = time.perf_counter()
        a @ a
        synchronize(bench.device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * width**3 / best / 1e9


FORMATS: dict[str, Callable[[Any], str]] = {
    "seconds": lambda value: f"{1e3 * value:.1f} ms",
    "tokens_per_second": lambda value: f"{value:,.0f}",
    "time_over_ballast": lambda value: f"{value:.2f}",
    "share_of_ceiling": lambda value: f"{value:.2f}",
    "gflops": lambda value: f"{value:,.0f}",
    "peak_mib": lambda value: f"{value:,.0f} MiB",
    "parameters": lambda value: f"{value:,}",
    "price": lambda value: f"{100 * value:+.1f}%",
}


def show(console: Console, title: str, rows: list[Row]) -> None:
    """Print rows as a table."""
    table = Table(title=title, title_justify="left")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="left" if key in ("contender", "option") else "right")
    for row in rows:
        table.add_row(*("" if value is None else FORMATS.get(key, str)(value) for key, value in row.items()))
    console.print(table)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments bench encoder", description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--sizes", nargs="+", choices=list(SIZES), default=list(SIZES) if cuda else list(SIZES)[:4], help="sizes to run"
    )
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--tables", nargs="+", choices=["blocks", "whole", "price"], default=["blocks", "whole", "price"]
    )
    parser.add_argument("--price-size", choices=list(SIZES), default="d256n6", help="size of the price table")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; every contender runs once a round")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--compile", action="store_true", help="also run the blocks under torch.compile")
    parser.add_argument("--quick", action="store_true", help="smallest size, fp32, 2 rounds: does it run?")
    parser.add_argument("--peak-tflops", type=float, default=None, help="the GPU's peak, for the MFU")
    parser.add_argument("--out", type=Path, default=None, help="write the numbers as JSON here")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.precisions, options.repeats, options.price_size = ["d128n4"], ["fp32"], 2, "d128n4"
    return options


TABLES = {"blocks": blocks_table, "whole": whole_table, "price": price_table}


def main(argv: list[str]) -> int:
    """Run the benchmark and print its tables."""
    options = parse(argv)
    if options.repeats < 1:
        print(f"error: --repeats={options.repeats} is out of range; it must be at least 1", file=sys.stderr)
        return 2
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=max(Console().width, TABLE_WIDTH))
    results: dict[str, list[Row]] = {}
    for sentence in peers.missing_peers():
        console.print(sentence)
    for precision in options.precisions:
        bench = Bench(device, precision == "bf16")
        peak = peak_gflops(bench)
        console.print(f"{precision} on {device}, {torch.get_num_threads()} threads, large product {peak:,.0f} GFLOP/s")
        for name, kind in ((name, kind) for name in options.sizes for kind in options.tables):
            if kind == "price" and (name != options.price_size or precision != options.precisions[0]):
                continue
            rows = TABLES[kind](bench, SIZES[name], options)
            if kind == "blocks" and device.type == "cuda":
                attainable = options.peak_tflops * 1e3 if options.peak_tflops else peak
                rows = [{**row, "mfu": f"{row['gflops'] / attainable:.2f}"} for row in rows]
            show(console, f"{name} {precision}: {kind}", rows)
            results[f"{name}/{precision}/{kind}"] = rows
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"torch": torch.__version__, "device": str(device), "tables": results}, indent=2)
        )
        console.print(f"numbers: {options.out}")
    return 0
