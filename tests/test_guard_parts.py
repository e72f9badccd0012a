"""The guard's pure parts, each without a trainer."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import veto
from callbacks.episode_report import finite_or_text, write_json
from callbacks.forensics import blame, first_to_rise, in_words
from callbacks.gradient_norms import GroupedNorms, group_of
from callbacks.learning_rate import scale_next_step
from callbacks.policy import ACTIONS, Retries, check_action, decide
from callbacks.rollback import AfterRollback
from callbacks.snapshots import SnapshotRing, host_memory_needed
from callbacks.step_sums import StepSums
from callbacks.stream_protocol import merge_ranges


def test_policy_follows_the_table() -> None:
    rolled = ("jump", "rise", "divergence", "non_finite")
    for action, kind, act in itertools.product(ACTIONS, ("ok", "outlier", "shift", *rolled), (False, True)):
        expected = "none" if kind == "ok" else "note"
        if kind in rolled and act and action in ("rollback", "stop"):
            expected = action
        assert decide(kind, act, action) == expected
    for bad_run, expected in ((1, "note"), (2, "note"), (3, "rollback")):
        assert decide("non_finite", True, "rollback", refused=True, bad_run=bad_run) == expected
    assert decide("jump", True, "rollback", refused=True) == "rollback"
    with pytest.raises(ValueError, match=r"action='explode'.*log, veto, rollback, stop"):
        check_action("explode")


def test_retries_are_bounded_and_forgotten_once_the_place_is_passed() -> None:
    retries = Retries(max_retries=2, clear_steps=10)
    assert retries.allow(100)
    assert retries.allow(101)
    assert retries.widened(4) == 8
    assert not retries.allow(102)
    retries.passed(111)
    assert not retries.allow(103)
    retries.passed(112)
    assert retries.allow(112)
    copy = Retries(max_retries=2, clear_steps=10)
    copy.load_state_dict(json.loads(json.dumps(retries.state_dict())))
    assert copy == retries


def test_a_snapshot_is_a_copy_and_restores_in_place() -> None:
    ring = SnapshotRing(2)
    live = {"w": torch.arange(4.0), "n": torch.tensor(3)}
    alias = live["w"]
    snapshot = ring.take(live, 1, 0, {})
    live["w"].add_(5)
    live["n"].add_(1)
    assert not torch.equal(snapshot.buffers["w"], live["w"])
    ring.restore(snapshot, live)
    assert torch.equal(alias, torch.arange(4.0))
    assert int(live["n"]) == 3
    with pytest.raises(ValueError, match="missing \\['n'\\]"):
        ring.restore(snapshot, {"w": live["w"]})


def test_the_ring_reuses_its_buffers_and_keeps_the_last_proven_snapshot() -> None:
    ring = SnapshotRing(3)
    live = {"w": torch.zeros(8)}
    addresses = set()
    for attempt in range(3):
        addresses.add(ring.take(live, attempt, attempt, {}).buffers["w"].data_ptr())
    ring.mark_good(0)
    for attempt in range(3, 9):
        assert ring.take(live, attempt, attempt, {}).buffers["w"].data_ptr() in addresses
    assert [s.attempt for s in ring.snapshots] == [0, 1, 8]  # the proven one stays, and an unproven one can age
    assert ring.newest_good(100).attempt == 0
    ring.mark_good(8)
    assert ring.newest_good(8).attempt == 1
    ring.drop_newer(7)
    assert [s.attempt for s in ring.snapshots] == [0, 1]
    with pytest.raises(ValueError, match="ring_slots=1"):
        SnapshotRing(1)


def test_memory_needed_counts_moments_slots_and_ranks() -> None:
    assert host_memory_needed([torch.zeros(10), torch.zeros(6)], slots=3, ranks_on_host=2) == 16 * 4 * 3 * 3 * 2


def test_grouped_norms_are_those_of_torch() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "embedding": nn.Linear(3, 4),
            "blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            "heads": nn.Linear(4, 2),
        }
    )
    x = net["embedding"](torch.randn(5, 3))
    for block in net["blocks"]:
        x = block(x)
    net["heads"](x).square().sum().backward()
    norms = GroupedNorms(net.named_parameters())
    values = norms()
    assert norms.names == ["block_00", "block_01", "embedding", "heads"]
    assert values[0] == pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])), rel=1e-6
    )
    block = torch.nn.utils.get_total_norm([p.grad for p in net["blocks"][1].parameters()])
    assert float(values[2]) == pytest.approx(float(block), rel=1e-6)
    assert group_of("final_norm.weight") == "other"


def test_sums_are_pooled_over_micro_batches_by_their_counts() -> None:
    sums = StepSums()
    sums.add(torch.tensor(10.0), torch.tensor(2))
    sums.add(torch.tensor(2.0), torch.tensor(4))
    report = sums.push([1.5, 0.0, 0.1, 0.2], {"attempt": 3, "step": 4})
    assert report is not None
    assert report.value == pytest.approx(2.0)
    assert (report.attempt, report.step, report.gradient_norm, report.vetoed) == (3, 4, 1.5, False)


def test_reading_late_hands_reports_out_in_order() -> None:
    sums = StepSums(lag=1)
    values = []
    for attempt in range(4):
        sums.add(torch.tensor(float(attempt)), torch.tensor(1.0))
        report = sums.push([0.0, 0.0, 0.0, 0.0], {"attempt": attempt, "step": attempt})
        values.append(None if report is None else (report.attempt, report.value))
    assert values == [None, (0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("norm", "limit", "refused"),
    [
        (math.nan, math.inf, True),
        (math.inf, math.inf, True),
        (5.0, 4.0, True),
        (3.0, 4.0, False),
        (3.0, math.inf, False),
    ],
)
def test_a_refused_update_touches_nothing(fused: bool, norm: float, limit: float, refused: bool) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    weight.grad = torch.full((4,), 0.5)
    optimizer.step()
    before = [weight.detach().clone(), *(v.clone() for v in optimizer.state[weight].values())]
    weight.grad = torch.full((4,), 0.7)
    assert bool(veto.refuse(optimizer, torch.tensor(norm), limit)) is refused
    optimizer.step()
    after = [weight.detach(), *optimizer.state[weight].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) is refused


def test_an_overflow_is_left_to_the_gradient_scaler() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.tensor([math.inf])
    assert not bool(veto.refuse(optimizer, torch.tensor(math.inf), 1.0, scaler=object()))
    assert bool(veto.refuse(optimizer, torch.tensor(2.0), 1.0, scaler=object()))


def test_a_scaled_learning_rate_lasts_one_step() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for expected in (1 - 0.5, 1 - 0.6):
        weight.grad = torch.ones(1)
        if expected == 0.5:
            scale_next_step(optimizer, 5.0)
        optimizer.step()
        assert float(weight) == pytest.approx(expected)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_ranges_are_merged() -> None:
    assert merge_ranges([[3, 5], [0, 1], [4, 9], [9, 9], [1, 2]]) == [[0, 2], [3, 9]]


@pytest.mark.parametrize(
    "options", [{"data": "rewind"}, {"lr_factor": 0.0}, {"lr_factor": 2.0}, {"clip_factor": -1.0}, {"rewarm_steps": -1}]
)
def test_wrong_options_after_a_rollback_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AfterRollback(**options)


def report_of(
    rank_values: list[float], samples: list[list[float]], norms: list[list[float]] | None = None
) -> dict[str, Any]:
    steps = list(range(30))
    return {
        "verdict": {
            "kind": "jump",
            "series": "bits",
            "onset": 29,
            "baseline": 5.0,
            "score": 20.0,
            "excess": 3.0,
            "scale": 0.1,
        },
        "series": [{"attempt": 29, "rank_values": rank_values}],
        "batches": [
            {
                "attempt": 29,
                "rank": r,
                "batch_number": 7,
                "sample_id": [10 * r + i for i in range(len(s))],
                "sample_bits": s,
            }
            for r, s in enumerate(samples)
        ],
        "gradient_norms": {"groups": ["block_00", "block_01"], "attempts": steps, "norms": norms or [[1.0, 1.0]] * 30},
    }


@pytest.mark.parametrize(
    ("rank_values", "samples", "who", "words"),
    [
        ([5.1, 9.0], [[5.0, 5.2], [5.1, 12.9]], "sample", "sample 11 of batch 7 on rank 1"),
        ([5.1, 9.0], [[5.0, 5.2], [9.0, 9.1]], "rank", "rank 1 at 9.00, the others at 5.10"),
        ([9.0, 9.1], [[9.0, 8.9], [9.1, 9.2]], "batch", "whole batch"),
        ([math.nan, 5.0], [[math.nan, math.nan], [5.0, 5.1]], "rank", "rank 0"),
        ([9.0], [[5.0, 5.1, 21.0, 5.0]], "sample", "sample 2 of batch 7"),
        ([9.0], [[9.0, 9.2, 9.1, 9.0]], "batch", "whole batch"),
    ],
)
def test_who_is_to_blame(rank_values: list[float], samples: list[list[float]], who: str, words: str) -> None:
    report = json.loads(json.dumps(finite_or_text(report_of(rank_values, samples))))
    found = blame(report)
    assert found["who"] == who
    assert words in found["words"]


def test_the_block_that_rose_first_is_named() -> None:
    norms = [[1.0, 1.0] for _ in range(30)]
    norms[26][1], norms[27][1], norms[28][0] = 9.0, 20.0, 30.0
    report = report_of([9.0], [[9.0, 9.1]], norms)
    assert first_to_rise(report) == {"group": "block_01", "attempt": 26, "times": 9.0}
    assert "block_01 rose first, at step 26" in in_words(report)
    assert first_to_rise(report_of([9.0], [[9.0, 9.1]])) is None


def test_a_report_is_strict_json_and_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (1, 2)})
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["nan", "inf", "-inf", 1.5], "b": [1, 2]}
    with pytest.raises(TypeError):
        write_json(tmp_path / "r.json", {"a": object()})
    assert (tmp_path / "r.json").read_text() == text
