"""The scan verb: what it reports, how it fails, and what it must not import."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from callbacks.detector import Detector, DetectorConfig
from experiments import scan, scan_detect, scan_report

ROOT = Path(__file__).resolve().parent.parent


def healthy(count: int, seed: int = 0) -> list[float]:
    """A falling loss with noise."""
    rng = random.Random(seed)
    return [5.9 + 3.6 * (1 + i / 50) ** -0.7 + rng.gauss(0, 0.05) for i in range(count)]


def with_jump(count: int, onset: int, length: int = 400, size: float = 3.0, seed: int = 0) -> list[float]:
    """A jump that recovers slowly."""
    loss = healthy(count, seed)
    for i in range(onset, min(count, onset + length)):
        loss[i] += size * (1 - (i - onset) / length)
    return loss


def write_csv(path: Path, loss: list[float], interval: int = 1, grad: list[float] | None = None) -> Path:
    rows = [f"{i * interval},{x!r}" + (f",{grad[i]!r}" if grad else "") for i, x in enumerate(loss)]
    path.write_text("\n".join(["step,loss" + (",grad_norm" if grad else ""), *rows]) + "\n")
    return path


def strict_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def run(*args: object) -> int:
    return scan.main([str(arg) for arg in args])


def test_a_jump_is_reported_by_row_and_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_csv(tmp_path / "run.csv", with_jump(3000, onset=2000, length=150), interval=10)
    out = tmp_path / "out.json"
    assert run(log, "--json", out) == 0
    (record,) = strict_json(out)
    assert record["path"] == str(log)
    assert (record["rows"], record["values"], record["steps"], record["log_interval"]) == (3000, 3000, 29990, 10)
    assert (record["format"], record["column"], record["grad_column"]) == ("csv", "loss", None)
    assert record["alarms"]
    assert 2000 <= record["alarms"][0] <= 2002
    (episode,) = [e for e in record["episodes"] if e["actionable"]]
    assert episode["kind"] in ("jump", "rise")
    assert 1998 <= episode["onset_row"] <= 2001
    assert 2000 <= episode["peak_row"] <= 2100
    for name in ("onset", "peak", "end", "detected", "acted", "recovered"):
        assert episode[f"{name}_step"] == 10 * episode[f"{name}_row"]
    assert episode["severity"] > 10
    assert 2.5 < episode["excess"] < 3.5
    text = capsys.readouterr().out
    assert episode["kind"] in text
    assert str(episode["onset_step"]) in text
    assert "0-29990 by 10" in text


def test_a_healthy_run_has_no_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run(write_csv(tmp_path / "run.csv", healthy(5000)), "--json", out) == 0
    assert strict_json(out)[0]["alarms"] == []
    assert "a guard would have acted on 0" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_an_alarm_at_its_own_row(tmp_path: Path, bad: float) -> None:
    loss = healthy(600)
    loss[432] = bad
    out = tmp_path / "out.json"
    assert run(write_csv(tmp_path / "run.csv", loss), "--json", out) == 0
    (record,) = strict_json(out)
    assert record["alarms"][0] == 432
    assert record["episodes"][0]["kind"] == "non_finite"
    assert record["episodes"][0]["onset_row"] == 432


def test_every_loss_row_is_judged_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    class Spy(Detector):
        def update(self, step: int, values: Mapping[str, float]) -> Any:
            seen.append((step, dict(values)))
            return super().update(step, values)

    monkeypatch.setattr(scan_detect, "Detector", Spy)
    text = "step,loss,grad_norm\n1,5,1\n2,nan,\n2,,3\n1,4,2\n1,inf,nan\nstep,loss,grad_norm\n2,3,\n"
    log = tmp_path / "run.csv"
    log.write_text(text)
    assert run(log) == 0
    assert [row for row, _ in seen] == [0, 1, 3, 4, 6]
    assert str([values for _, values in seen]) == str(
        [
            {"loss": 5.0, "grad_norm": 1.0},
            {"loss": math.nan, "grad_norm": 3.0},
            {"loss": 4.0, "grad_norm": 2.0},
            {"loss": math.inf, "grad_norm": math.nan},
            {"loss": 3.0},
        ]
    )


def test_alarms_are_exactly_what_the_detector_says(tmp_path: Path) -> None:
    loss = with_jump(2500, onset=1500)
    grad = [1.0 + 0.1 * math.sin(i) for i in range(2500)]
    out = tmp_path / "out.json"
    assert run(write_csv(tmp_path / "run.csv", loss, grad=grad), "--json", out) == 0
    detector = Detector(DetectorConfig())
    acts = [i for i in range(2500) if detector.update(i, {"loss": loss[i], "grad_norm": grad[i]}).act]
    assert strict_json(out)[0]["alarms"] == acts != []


def test_a_run_the_detector_fails_on_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Detector):
        def update(self, step: int, values: Mapping[str, float]) -> Any:
            if values["loss"] == 13.0:
                raise OverflowError("too large")
            return super().update(step, values)

    monkeypatch.setattr(scan_detect, "Detector", Failing)
    bad = write_csv(tmp_path / "bad.csv", [5.0, 13.0])
    good = write_csv(tmp_path / "good.csv", healthy(50))
    assert run(bad, good, "--json", tmp_path / "out.json") == 1
    assert capsys.readouterr().err == f"error: {bad}: row 1: the detector fails on {{'loss': 13.0}} (too large)\n"
    assert [record["path"] for record in strict_json(tmp_path / "out.json")] == [str(good)]


def test_detector_options_reach_the_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_csv(tmp_path / "run.csv", healthy(50))
    assert run(log, "--warmup", 3) == 2
    assert capsys.readouterr().err.startswith("error: warmup=3")


def test_unreadable_input_is_one_line_and_the_others_are_scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_csv(tmp_path / "good.csv", healthy(100))
    bad = tmp_path / "bad.csv"
    bad.write_text("step,loss\n1,5\n2,4\n3,what\n4,3\n")
    out = tmp_path / "out.json"
    assert run(bad, good, tmp_path / "absent.csv", "--json", out) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: {tmp_path}/absent.csv: no such file or folder",
        f"error: {bad}: row 2 (line 4): column 'loss' holds 'what', not a number",
    ]
    assert [record["path"] for record in strict_json(out)] == [str(good)]
    assert run(tmp_path) == 1  # the same from the folder


def test_a_wrong_column_names_the_columns_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("epoch,step,train/loss,val/loss\n0,1,5,\n0,2,4,\n0,3,3,\n")
    for path in (log, tmp_path):
        assert run(path, "--column", "train/los") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "--column 'train/los': no such column. Did you mean 'train/loss'?" in line
        assert "epoch, step, train/loss, val/loss" in line


def test_a_folder_without_logs_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    assert run(tmp_path) == 2
    assert capsys.readouterr().err == f"error: no training logs found in {tmp_path} (1 files looked at)\n"


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_csv(tmp_path / "run.csv", healthy(50))
    assert run(log, option, tmp_path / "absent" / "out") == 2
    assert run(log, option, tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == len(captured.err.splitlines()) == 2
    assert captured.out == ""


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_csv(tmp_path / "run.csv", healthy(50))
    assert run(log, "--plot", tmp_path / "out.jpg") == 2
    assert "cannot draw a '.jpg'; choose from .png, .pdf, .svg" in capsys.readouterr().err
    assert run(log, "--plot", tmp_path / "out.svg") == 0
    assert b"<svg" in (tmp_path / "out.svg").read_bytes()


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--jsn", "x")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_interrupted_scan_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scan, "detect", interrupt)
    out = tmp_path / "out.json"
    assert run(write_csv(tmp_path / "run.csv", healthy(50)), "--json", out) == 130
    assert not out.exists()
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    log = write_csv(tmp_path / "run.csv", healthy(50))
    with monkeypatch.context() as patch:
        patch.setattr(scan_report.os, "fsync", fail)
        assert run(log, "--json", out) == 1
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "run.csv"]
    assert run(log, "--json", out) == 0
    assert strict_json(out)[0]["rows"] == 50


def test_many_harmless_episodes_are_counted_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = healthy(4000)
    for i in range(300, 4000, 150):
        loss[i] += 1.5
    log = write_csv(tmp_path / "run.csv", loss)
    assert run(log) == 0
    short = capsys.readouterr().out
    assert run(log, "--all") == 0
    full = capsys.readouterr().out
    assert "more (" in short
    assert "more (" not in full
    assert len(short.splitlines()) < len(full.splitlines())


def test_a_log_with_no_values_or_one(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("step,loss\n")
    (tmp_path / "one.csv").write_text("step,loss\n7,nan\n")
    out = tmp_path / "out.json"
    assert run(tmp_path / "none.csv", tmp_path / "one.csv", "--json", out, "--plot", tmp_path / "out.png") == 0
    none, one = strict_json(out)
    assert (none["rows"], none["alarms"], none["episodes"]) == (0, [], [])
    assert (one["rows"], one["alarms"]) == (1, [0])
    assert one["episodes"][0]["peak"] is None
    assert one["episodes"][0]["severity"] == "inf"


def test_strange_names_stay_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a[red]\n$x_{.csv"
    odd.write_text("step,loss\n1,\x1b[31moops\n2,3\n")
    assert run(odd) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err
    write_csv(odd, healthy(30))
    assert run(odd, "--plot", tmp_path / "out.png") == 0
    assert "a[red]" in "".join(capsys.readouterr().out.split())
    undecodable = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.csv"))
    write_csv(undecodable, healthy(30))
    assert run(undecodable, "--plot", tmp_path / "out.png", "--json", tmp_path / "out.json") == 0
    assert strict_json(tmp_path / "out.json")[0]["path"] == str(undecodable)
    printed = "".join(capsys.readouterr().out.split())  # a long path is folded over lines, between the other columns
    assert "udce9" in printed or "caf" in printed
    assert "\udce9" not in printed


def test_the_verb_end_to_end_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    write_csv(tmp_path / "run.csv", with_jump(1200, onset=800))
    history = [{"loss": 5.0 - i / 10, "step": i} for i in range(9)]
    (tmp_path / "state.json").write_text(json.dumps({"log_history": history}))
    args = ["scan", str(tmp_path), "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "o.png")]
    code = (
        "import sys\n"
        "from experiments.__main__ import main\n"
        f"rc = main({args!r})\n"
        "bad = {'torch', 'lightning', 'pytorch_lightning', 'wandb', 'tensorboard', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "import wandb.proto.wandb_internal_pb2, tensorboard.compat.proto.event_pb2, tensorboard.util.tensor_util\n"
        "bad = {'torch', 'lightning', 'tensorflow'} & set(sys.modules)  # nor do the binary readers\n"
        "assert not bad, bad\n"
        "sys.exit(rc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(strict_json(tmp_path / "out.json")) == 2
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"\0" * 40)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    assert run(path) == 1
    assert "needs tensorboard: pip install 'ballast[scan]'" in capsys.readouterr().err
