"""The encoder's benchmarks: equal work, interleaved rounds, memory that is really the step's."""

import math

import pytest
import torch

from experiments.bench import encoder as bench_encoder
from experiments.bench import encoder_peers as peers
from experiments.bench.encoder_peers import Bench, Size
from experiments.bench.norms import sensitivity

TINY = Size("tiny", 2, 32, 2, 64, 2, 12)
CPU = Bench(torch.device("cpu"), bf16=False)


def test_contenders_have_the_same_number_of_parameters() -> None:
    counts = {}
    for name, build in peers.block_contenders(TINY, compiled=False).items():
        counts[name] = sum(p.numel() for p in build().parameters())
        peers.block_step(CPU, TINY, build())()
    ours = counts["Ballast pre"]
    assert all(abs(count / ours - 1) < 0.05 for count in counts.values()), counts


def test_every_priced_option_makes_a_step() -> None:
    for options in peers.PRICED.values():
        peers.priced_step(CPU, TINY, options)()


def test_rounds_are_interleaved_and_the_first_is_not_counted() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    medians = bench_encoder.interleaved_medians(steps, 3, torch.device("cpu"), "test")
    assert sorted(calls) == sorted("abc" * 4)
    assert calls[3:] == list("abcbcacab")
    assert set(medians) == set("abc")


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            held = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]
            del held

    assert 2 << 20 <= bench_encoder.peak_bytes(step, torch.device("cpu")) < 3 << 20


def test_wrong_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_encoder.main(["--repeats", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --repeats=0")


def test_sensitivity_counts_a_diverged_run_as_a_uniform_guess() -> None:
    assert sensitivity([8.0, math.nan, 30.0], 8.0) == pytest.approx(4.0 / 3)
