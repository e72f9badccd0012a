"""Broken logs of every format: the scan ends with an exit status and one line each, never with a traceback."""

import io
import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import scan
from experiments.log_readers import discover, read_series
from experiments.readers import wandb_offline
from experiments.readers.columns import ColumnRequest
from experiments.readers.table import LogError

COUNT = 60
LOSS = [9.0 - i / 10 if i != 40 else math.nan for i in range(COUNT)]


def csv_log() -> bytes:
    rows = [f'{i},{i // 20},{x},1.5,"note, {i}"\n{i},,,,\n' for i, x in enumerate(LOSS)]
    return ("step,epoch,train/loss,grad_norm,note\n" + "".join(rows)).encode()


def jsonl_log() -> bytes:
    return "".join(json.dumps({"step": i, "loss": x, "gnorm": "1.5"}) + "\n" for i, x in enumerate(LOSS)).encode()


def trainer_state() -> bytes:
    history = [{"loss": x, "step": i, "epoch": i / 10} for i, x in enumerate(LOSS)]
    return json.dumps({"epoch": 1.0, "log_history": history}, indent=2).encode()


def fairseq_log() -> bytes:
    line = (
        '2021-03-08 12:31:36 | INFO | train_inner | {{"epoch": 1, "loss": "{}", "num_updates": "{}", "gnorm": "1.5"}}\n'
    )
    return "".join(line.format(x, i) for i, x in enumerate(LOSS)).encode()


def megatron_log() -> bytes:
    line = " iteration {:8d}/    1000 | lm loss: {:.6E} | grad norm: 1.500 | number of nan iterations:   0 |\n"
    return "".join(line.format(i, x) for i, x in enumerate(LOSS)).encode()


def event_log() -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    writer = RecordWriter(stream)
    writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    for i, x in enumerate(LOSS):
        values = [Summary.Value(tag="loss", simple_value=x), Summary.Value(tag="grad_norm", simple_value=1.5)]
        writer.write(Event(step=i, wall_time=1.0, summary=Summary(value=values)).SerializeToString())
    return stream.getvalue()


def wandb_log(pad: int = 0) -> bytes:
    """Write the block format independently of the reader: ``pad`` bytes of other records make it span blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    out = bytearray(b":W&B\xe1\xbe\x00")
    for i, x in enumerate(LOSS):
        record = Record(num=i)
        for name, value in (("train/loss", x), ("_step", i), ("note", "x" * pad)):
            item = record.history.item.add()
            item.nested_key.append(name)
            item.value_json = json.dumps(value)
        data, kind = record.SerializeToString(), 0
        while kind not in (1, 4):
            room = 32768 - len(out) % 32768
            if room < 7:
                out += b"\0" * room
                continue
            part, data = data[: room - 7], data[room - 7 :]
            kind = {(0, True): 2, (0, False): 1}.get((kind, bool(data)), 3 if data else 4)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
    return bytes(out)


LOGS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "csv": ("metrics.csv", csv_log),
    "jsonl": ("log.jsonl", jsonl_log),
    "huggingface": ("trainer_state.json", trainer_state),
    "fairseq": ("train.log", fairseq_log),
    "megatron": ("out.txt", megatron_log),
    "tensorboard": ("events.out.tfevents.1.host", event_log),
    "wandb": ("run-x.wandb", wandb_log),
}


def loss_of(path: Path) -> list[float] | None:
    """Read a log the way scan does; None where it is refused."""
    (source,) = discover([path], pytest.fail)
    try:
        return read_series(source, ColumnRequest()).loss
    except LogError:
        return None


@pytest.mark.parametrize("format", LOGS)
def test_the_undamaged_samples_are_read_whole(tmp_path: Path, format: str) -> None:
    name, make = LOGS[format]
    (tmp_path / name).write_bytes(make())
    found = loss_of(tmp_path / name)
    assert found is not None
    assert str([float(f"{x:.4g}") for x in found]) == str([float(f"{x:.4g}") for x in LOSS])


@pytest.mark.parametrize("pad", [500, 5000, 40_000, 32_661])
def test_wandb_records_across_blocks(tmp_path: Path, pad: int) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(wandb_log(pad))
    assert str(loss_of(path)) == str(LOSS)


@pytest.mark.parametrize("format", ["tensorboard", "wandb"])
def test_a_binary_log_cut_at_any_byte_keeps_its_whole_records(tmp_path: Path, format: str) -> None:
    name, make = LOGS[format]
    data = make()
    path = tmp_path / name
    best = 0
    for size in range(8, len(data), 19):
        path.write_bytes(data[:size])
        found = loss_of(path)
        if found is None:  # nothing but a piece of the first record
            assert size < 200
            continue
        assert str(found) == str([struct.unpack("f", struct.pack("f", x))[0] for x in LOSS[: len(found)]]) or str(
            found
        ) == str(LOSS[: len(found)])
        assert len(found) >= best
        best = len(found)
    assert best >= COUNT - 2


@pytest.mark.parametrize("format", ["csv", "jsonl", "fairseq", "megatron"])
def test_a_text_log_cut_at_any_byte_keeps_its_whole_rows(tmp_path: Path, format: str) -> None:
    name, make = LOGS[format]
    data = make()
    path = tmp_path / name
    begin = data.index(b"\n", data.index(b"\n", 300) + 1)
    for size in range(begin, len(data), 23):
        path.write_bytes(data[:size])
        whole = data[:size].count(b"1.5")  # gradient norms: the loss before them is complete
        found = loss_of(path)
        assert found is not None, data[size - 40 : size]
        assert whole - 1 <= len(found) <= whole + 1
        assert str([round(x, 3) for x in found[: whole - 1]]) == str([round(x, 3) for x in LOSS[: whole - 1]])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a log the way disks, editors and crashes do."""
    at, end = sorted(rng.randrange(len(data)) for _ in range(2))
    junk = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
    return rng.choice(
        [
            data[:at],
            data[at:],
            data[:at] + data[end:],
            data[:at] + junk + data[at:],
            data[:at] + junk + data[at + len(junk) :],
            data[:at] + bytes(min(end - at, 600)) + data[end:],
            data + data[at:],
            data[:end] + data[at:],
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"", 3),
            b"\xef\xbb\xbf" + data,
            b"\xff\xfe" + data,
            data[:at] + b'"' + data[at:],
            data[:at] + "é".encode("latin-1") + data[at:],
            data[:at] + b"9" * 200_000 + data[at:],
            data[:at] + b"[" * 100_000 + data[at:],
        ]
    )


@pytest.mark.parametrize("format", LOGS)
def test_damaged_logs_end_in_a_status_and_one_line(
    tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, make = LOGS[format]
    data, rng = make(), random.Random(f"damage {format}")
    path, out = tmp_path / name, tmp_path / "out.json"
    for i in range(32):
        path.write_bytes(damaged(data, rng))
        out.unlink(missing_ok=True)
        picture = ["--plot", str(tmp_path / "out.png")] if i % 16 == 0 else []
        status = scan.main([str(path), "--json", str(out), *picture])
        err = capsys.readouterr().err
        assert status in (0, 1)
        assert all(line.startswith(("error: ", "note: ")) and str(path) in line for line in err.splitlines())
        assert err.count("error: ") == status
        assert out.exists() == (status == 0)


@pytest.mark.parametrize(
    "prefix", ["", "step,loss\n1,2\n1,", '{"loss": 1}\n{"loss": ', "step 1 loss 2\n" * 3, "train_inner "]
)
@pytest.mark.parametrize(
    "dump", ["a", " ", "9", '"', "{", "step ", "iteration 1/", "epoch 1: ", "loss ", "a.", "1.", "[{"]
)
def test_long_dumps_do_not_stall_the_readers(tmp_path: Path, prefix: str, dump: str) -> None:
    """Patterns that backtrack would take hours here."""
    path = tmp_path / "train.log"
    long = dump * (19_000 // len(dump))
    lines = [f"{prefix}{long}x", f"step{long}=x", f"loss{long}", f"step 1 loss{long}"]
    for text in ("\n".join(lines), lines[0] * 20):
        path.write_text(text)
        loss_of(path)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.binary(max_size=300)
    | st.text(alphabet='step,loss\n\t;|"{}[]:#0123456789.-en \r\0', max_size=300).map(str.encode)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(["a.csv", "a.jsonl", "a.json", "a.log", "a.wandb", "a.tfevents.1", "a"]),
    st.sampled_from([None, "loss", "0", "1"]),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, column: str | None
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    for prefix in (b"", b"step,loss\n", b'{"step": 1, "loss": 2}\n', wandb_offline.MAGIC + b"\0\0\0"):
        path.write_bytes(prefix + data)
        (source,) = discover([path], pytest.fail)
        try:
            series = read_series(source, ColumnRequest(loss=column))
        except LogError:
            continue
        assert len(series.rows) == len(series.steps) == len(series.loss) == len(series.grad_norm)
        assert series.rows == sorted(set(series.rows))
        assert all(0 <= row < series.num_rows for row in series.rows)
        assert all(step == step for step in series.steps)
