"""The log readers: each format's files become the same series, row for row."""

import bz2
import gzip
import json
import lzma
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.log_readers import discover, read_series
from experiments.readers.columns import ColumnRequest, choose, grad_rank, loss_rank, step_rank
from experiments.readers.series import Series
from experiments.readers.table import LogError, LogTable, NotALogError, parse_number


def read(path: Path, **columns: str) -> Series:
    """Read one log that was named on the command line."""
    (source,) = discover([path], pytest.fail)
    return read_series(source, ColumnRequest(**columns))


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def same(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, expected, strict=True)
    )


# --- numbers and names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5.9", 5.9), (" 5.9 ", 5.9), ("-1e-3", -1e-3), ("inf", math.inf), ("-Infinity", -math.inf),
        ("1e999", math.inf),
        ("5,9", 5.9), ("-0,25", -0.25), ("tensor(5.9, device='cuda:0')", 5.9), ("tensor(nan)", math.nan),
        ("NaN", math.nan), ("nan", math.nan), ("null", math.nan), ("1.#INF", math.inf), ("-1.#IND", math.nan),
        ("\0\0 7", 7.0), ('"6.5"', 6.5),
    ],
)  # fmt: skip
def test_numbers_in_every_usual_spelling(text: str, value: float) -> None:
    number = parse_number(text)
    assert number is not None
    assert same([number], [value])


@pytest.mark.parametrize("text", ["", "  ", "None", "N/A", "-"])
def test_blank_words_mean_not_logged(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["oops", "5.9.1", "1,2,3", "tensor()", "12/100"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_number(text)


@pytest.mark.parametrize(
    "name", ["loss", "Train Loss", "train/loss", "train_loss_step", "lm loss", "Loss/train", "loss (nats)", "nll_loss"]
)
def test_loss_names(name: str) -> None:
    assert loss_rank(name) is not None


@pytest.mark.parametrize(
    "name",
    ["val/loss", "eval_loss", "valid_loss", "test_loss", "loss_scale", "loss scale", "best_loss", "accuracy", "lr"],
)
def test_names_that_are_no_training_loss(name: str) -> None:
    assert loss_rank(name) is None


def test_names_of_gradient_norms_and_steps() -> None:
    for name in ("grad_norm/total", "grad norm", "gnorm", "train/grad_norm", "gradient norm", "grad_2.0_norm_total"):
        assert grad_rank(name) is not None, name
    for name in ("grad_norm/clipped", "grad_norm/block_03", "lr", "loss", "param_norm"):
        assert grad_rank(name) is None, name
    for name in ("step", "_step", "Step", "trainer/global_step", "iteration", "num_updates"):
        assert step_rank(name) is not None, name
    assert step_rank("epoch") is None


def test_codebook_0_is_preferred_but_not_when_nearly_empty() -> None:
    table = LogTable("csv", 100)
    for row in range(100):
        table.add(row, "train/loss", 1.0)
        table.add(row, "train/bits_codebook_0", 2.0)
    table.add(0, "train_loss_step", 3.0)
    assert choose(table, ColumnRequest(), "loss") == "train/bits_codebook_0"
    del table.columns["train/bits_codebook_0"]
    assert choose(table, ColumnRequest(), "loss") == "train/loss"


# --- delimited tables


def test_plain_csv_rows_are_lines_after_the_header(tmp_path: Path) -> None:
    series = read(write(tmp_path / "a.csv", "step,loss,grad_norm\n10,5.5,1\n20,nan,\n30,inf,inf\n40,-2,0.5"))
    assert series.rows == [0, 1, 2, 3]
    assert series.steps == [10, 20, 30, 40]
    assert same(series.loss, [5.5, math.nan, math.inf, -2.0])
    assert series.grad_norm == [1.0, None, math.inf, 0.5]
    assert (series.format, series.num_rows, series.column, series.grad_column) == ("csv", 4, "loss", "grad_norm")


def test_sparse_interleaved_rows_and_float_steps(tmp_path: Path) -> None:
    text = (
        "epoch,grad_norm/total,step,train/bits_codebook_0,train/loss,val/loss\n"
        "0,,0.0,9.5,6.6,\n0,,1.0,9.4,6.5,\n0,,1,,,9.0\n0,1.5,1,,,\n1,,2,,,\n1,,2,9.3,6.4,\n"
    )
    series = read(write(tmp_path / "metrics.csv", text))
    assert series.column == "train/bits_codebook_0"
    assert series.rows == [0, 1, 5]
    assert series.steps == [0, 1, 2]
    assert all(isinstance(step, int) for step in series.steps)
    assert series.grad_norm == [None, 1.5, None]  # logged in a row of its own, of the same step
    assert series.num_rows == 6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tabs.tsv", "step\tloss\n1\t5.5\n2\t5.25\n"),
        ("semicolons.csv", "step;loss\n1;5,5\n2;5,25\n"),
        ("pipes.txt", "step|loss\n1|5.5\n2|5.25\n"),
        ("blanks.txt", "  step   loss\n     1    5.5\n     2   5.25\n"),
        ("crlf.csv", "step,loss\r\n1,5.5\r\n2,5.25\r\n"),
        ("cr.csv", "step,loss\r1,5.5\r2,5.25\r"),
        ("bom.csv", "\ufeffstep,loss\n1,5.5\n2,5.25\n"),
        ("quoted.csv", '"step","loss"\n"1","5.5"\n"2","5.25"\n'),
        ("spaces.csv", "step, loss\n1, 5.5\n2, 5.25\n"),
        ("headless.csv", "1,5.5\n2,5.25\n"),
        ("savetxt.txt", "# step loss\n1.0 5.5\n2.0 5.25\n"),
        ("one.csv", "loss\n5.5\n5.25\n"),
        ("trailing.csv", "step,loss,\n1,5.5,\n2,5.25,\n"),
        ("export.csv", "Step,run - train/loss,run - train/loss__MIN\n1,5.5,0\n2,5.25,0\n"),
        ("blank_lines.csv", "\nstep,loss\n\n1,5.5\n\n2,5.25\n\n"),
        ("text_columns.csv", 'loss_fn,step,note,loss\nce,1,"a, b",5.5\nce,2,\'x,5.25\n'),
    ],
)
def test_delimited_dialects(tmp_path: Path, name: str, text: str) -> None:
    series = read(write(tmp_path / name, text))
    assert (series.rows, series.loss) == ([0, 1], [5.5, 5.25])
    assert series.steps == ([0, 1] if name == "one.csv" else [1, 2])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_encodings_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    series = read(write(tmp_path / "a.csv", "step,loss\n1,5.5\n2,5.25\n".encode(encoding)))
    assert series.loss == [5.5, 5.25]


def test_foreign_bytes_outside_the_numbers_do_no_harm(tmp_path: Path) -> None:
    series = read(write(tmp_path / "a.csv", b"step,loss,note\n1,5.5,caf\xe9\n2,5.25,\xff\xfe\n"))
    assert series.loss == [5.5, 5.25]


@pytest.mark.parametrize("packer", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files(tmp_path: Path, packer: object) -> None:
    assert callable(packer)
    series = read(write(tmp_path / "a.csv.gz", packer(b"step,loss\n1,5.5\n2,5.25\n")))
    assert series.loss == [5.5, 5.25]


def test_a_resumed_file_repeats_its_header_and_steps_back(tmp_path: Path) -> None:
    text = "step,loss\n1,5\n2,4\n3,3\nstep,loss\n2,4.5\n3,3.5\nstep,grad_norm,loss\n4,1.5,3\n"
    series = read(write(tmp_path / "a.csv", text))
    assert series.rows == [0, 1, 2, 4, 5, 7]  # a header is a line of the file, but holds no data
    assert series.steps == [1, 2, 3, 2, 3, 4]
    assert series.loss == [5, 4, 3, 4.5, 3.5, 3]
    assert series.grad_norm[-1] == 1.5


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("step,loss\n1,5\n2,oops\n3,4\n", "row 1 (line 3): column 'loss' holds 'oops', not a number"),
        ("step,loss\n1,5\n2,4,9\n3,4\n", "row 1 (line 3): 3 cells, but the header has 2"),
        ('step,loss,note\n1,5,a\n2,4,"b\n3,4,c\n', "row 1 (line 3): malformed record"),
        ("step,loss\n1,5\nx,4\n", "row 1 (line 3): column 'step' holds 'x', not a number"),
        ('{"loss": 1}\n{"loss": 2\n{"loss": 3}\n', "row 1 (line 2): not JSON"),
        ('{"loss": 1}\n[1, 2]\n{"loss": 3}\n', "row 1 (line 2): not a JSON object"),
        ('{"loss": 1}\n{"loss": "oops"}\n{"loss": 3}\n', "row 1 (line 2): column 'loss' holds 'oops'"),
    ],
)
def test_a_bad_cell_is_an_error_that_names_file_and_row(tmp_path: Path, text: str, place: str) -> None:
    path = write(tmp_path / "a.log", text)
    with pytest.raises(LogError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {place}")


@pytest.mark.parametrize("tail", ["3,4.2e", "3,-", "3,na", '3,"4.', "3", "3,"])
def test_a_last_row_that_was_cut_is_left_out(tmp_path: Path, tail: str) -> None:
    assert read(write(tmp_path / "a.csv", f"step,loss\n1,5\n2,4\n{tail}")).loss == [5, 4]


def test_columns_by_name_and_the_error_for_a_wrong_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "it,objective,train_loss,g\n1,7,5,0.1\n2,8,4,0.2\n")
    series = read(path, loss="objective", grad_norm="g", step="it")
    assert (series.loss, series.grad_norm, series.steps) == ([7, 8], [0.1, 0.2], [1, 2])
    with pytest.raises(
        LogError, match=r"no such column. Did you mean 'objective'\? It has: it, objective, train_loss, g"
    ):
        read(path, loss="objectve")
    with pytest.raises(LogError, match=r"--grad-column 'gg': no such column"):
        read(path, grad_norm="gg")


def test_a_file_without_a_loss_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(NotALogError, match=r"no loss column found; name one with --column\. It has: step, reward"):
        read(write(tmp_path / "a.csv", "step,reward\n1,2\n2,3\n"))


def test_rows_of_held_out_splits_are_passed_over(tmp_path: Path) -> None:
    text = "step,split,loss\n1,train,5\n1,val,9\n2,train,4\n2,TEST,8\n3,,3\n"
    series = read(write(tmp_path / "a.csv", text))
    assert (series.rows, series.loss) == ([0, 2, 4], [5, 4, 3])
    records = [{"mode": "train", "iter": 1, "loss": 5}, {"mode": "val", "iter": 1, "loss": 9}, {"iter": 2, "loss": 4}]
    series = read(write(tmp_path / "a.json", "\n".join(map(json.dumps, records))))
    assert (series.rows, series.steps, series.loss) == ([0, 2], [1, 2], [5, 4])


# --- JSON


def test_json_lines_with_nulls_nested_names_and_mixed_rows(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "train": {"loss": 5.5, "grad_norm": 2}, "text": "hello"}',
        '{"step": 1, "train": {"loss": null}, "val": {"loss": 5.0}}',
        '{"step": 2, "train": {"loss": null}}',
        '{"step": 3, "train": {"loss": NaN, "grad_norm": "inf"}}',
        '{"step": 4, "train": {"loss": "-Infinity"}}',
        '{"step": 5, "train": {"lo',
    ]
    series = read(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert series.rows == [0, 2, 3, 4]  # the null in the validation row says: not logged
    assert same(series.loss, [5.5, math.nan, math.nan, -math.inf])
    assert series.grad_norm == [2.0, None, math.inf, None]
    assert "cut" in series.notes[0]


def test_json_documents(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]
    for text in (json.dumps(rows), json.dumps(rows, indent=2), json.dumps({"step": [1, 2], "loss": [5.5, 5.25]})):
        series = read(write(tmp_path / "a.json", text))
        assert (series.rows, series.steps, series.loss) == ([0, 1], [1, 2], [5.5, 5.25])


def test_records_of_which_the_first_is_very_long(tmp_path: Path) -> None:
    lines = [{"config": "x" * 100_000, "loss": 5.5}, {"loss": 5.25}]
    series = read(write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))
    assert (series.rows, series.loss) == ([0, 1], [5.5, 5.25])


def test_hugging_face_trainer_state(tmp_path: Path) -> None:
    history = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 5.5, "step": 10},
        {"epoch": 0.1, "eval_loss": 5.4, "eval_runtime": 1.0, "step": 10},
        {"epoch": 0.2, "grad_norm": math.nan, "learning_rate": 1e-4, "loss": math.nan, "step": 20},
        {"epoch": 0.2, "step": 20, "total_flos": 1e9, "train_loss": 5.3, "train_runtime": 9.0},
    ]
    state = {"best_metric": None, "epoch": 0.2, "global_step": 20, "log_history": history, "max_steps": 20}
    series = read(write(tmp_path / "trainer_state.json", json.dumps(state, indent=2, sort_keys=True)))
    assert (series.format, series.column, series.rows, series.steps) == ("huggingface", "loss", [0, 2], [10, 20])
    assert same(series.loss, [5.5, math.nan])
    assert series.num_rows == 4


# --- text logs

FAIRSEQ_JSON = """\
2021-03-08 12:29:51 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2021-03-08 12:31:36 | INFO | train_inner | {"epoch": 1, "update": 0.0, "loss": "16.475", "ppl": "91120.8", "wps": "0", \
"num_updates": "1", "lr": "2e-05", "gnorm": "20.751", "loss_scale": "4", "train_wall": "99", "wall": "105"}
2021-03-08 12:33:12 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient
2021-03-08 12:32:33 | INFO | train_inner | {"epoch": 1, "update": 0.0, "loss": "nan", "ppl": "nan", "wps": "288.7", \
"num_updates": "2", "lr": "4e-05", "gnorm": "inf", "loss_scale": "4", "train_wall": "57", "wall": "161"}
2021-03-08 12:34:00 | INFO | valid | {"epoch": 1, "valid_loss": "15.1", "valid_num_updates": "2"}
2021-03-08 12:32:40 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "16.1", "num_upd
2021-03-08 12:32:43 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "16.0", "num_updates": "4", "gnorm": "9"}
"""


def test_fairseq_json_lines(tmp_path: Path) -> None:
    hydra = FAIRSEQ_JSON.replace("| INFO | train_inner | ", "[train_inner][INFO] - ")
    for text in (FAIRSEQ_JSON, hydra, "[" + hydra.replace("\n", "\n[")):
        series = read(write(tmp_path / "train.log", text))
        assert (series.format, series.column, series.grad_column) == ("fairseq", "loss", "gnorm")
        assert (series.rows, series.steps) == ([0, 1, 2], [1, 2, 4])
        assert same(series.loss, [16.475, math.nan, 16.0])
        assert series.grad_norm == [20.751, math.inf, 9.0]
        assert series.notes == ["1 broken records were left out, the first in line 6"]


def test_fairseq_simple_lines(tmp_path: Path) -> None:
    text = (
        "2025-10-15 11:33:32 | INFO | train_inner | epoch 001:    100 / 487 loss=4.655, nll_loss=4.1, ppl=17.2, "
        "num_updates=100, lr=1e-05, gnorm=1.25, train_wall=9, wall=10\n"
        "2025-10-15 11:33:44 | INFO | train | epoch 001 | loss 3.663 | nll_loss 3 | num_updates 487\n"
    )
    series = read(write(tmp_path / "train.log", text))
    assert (series.steps, series.loss, series.grad_norm) == ([100], [4.655], [1.25])


MEGATRON = (
    "{prefix}iteration {step:8d}/  500000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): 430.0 | "
    "learning rate: 1.342E-04 | global batch size:     4 |{loss} loss scale: 16384.0 |{norm} number of skipped "
    "iterations:   {skipped} | number of nan iterations:   {nan} |\n"
)


def megatron_line(step: int, loss: float | None, norm: float | None, nan: int = 0, prefix: str = " ") -> str:
    losses = "" if loss is None else f" lm loss: {loss:.6E} |"
    norms = "" if norm is None else f" grad norm: {norm:.3f} |"
    return MEGATRON.format(
        prefix=prefix, step=step, samples=4 * step, loss=losses, norm=norms, skipped=int(loss is None), nan=nan
    )


def test_megatron_lines(tmp_path: Path) -> None:
    text = (
        "training ...\n[before the start of training step] datetime: 2025-04-13 23:41:00\n"
        + megatron_line(10, None, None)  # every update of the interval was skipped: no loss is printed
        + megatron_line(20, 7.5, 2.5)
        + "time (ms) | forward-compute: 53.79 | backward-compute: 138.84\n"
        + megatron_line(30, 7.25, None, prefix="[default7]: [2026-09-14 15:08:27.273656] ")
        + " validation loss at iteration 30 | lm loss value: 7.1E+00 | lm loss PPL: 1.2E+03 |\n"
        + megatron_line(40, 7.0, 2.25, nan=1)
    )
    series = read(write(tmp_path / "log.out", text))
    assert (series.format, series.column, series.grad_column) == ("megatron", "lm loss", "grad norm")
    assert (series.rows, series.steps) == ([1, 2, 3], [20, 30, 40])
    assert same(series.loss, [7.5, 7.25, math.nan])  # a NaN iteration is left out of Megatron's mean
    assert series.grad_norm == [2.5, None, 2.25]


@pytest.mark.parametrize(
    "line",
    [
        "step {step:6d}/19560 | loss {loss:.6f} (+nanz)| norm {norm:.4f} (+nanz)| lr 8.57e-07 | 2853.77 ms",
        "step {step} | loss {loss:.2f} | norm {norm:.2f}",
        "step: {step}, loss: {loss}, grad_norm: {norm}",
        "{{'step': {step}, 'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05}}",
        "s:{step} trl:{loss:.4f} lr:0.000600 norm:{norm:.2f}",
        "step:{step}/5100 train_loss:{loss:.4f} grad_norm:{norm:.4f} train_time:12ms step_avg:3.1ms",
        "iter {step}: loss {loss:.4f}, norm {norm:.4f}, time 12.00ms, mfu 12.0%",
        "step={step}, loss={loss}, grad_norm={norm}",
    ],
)
def test_printed_lines_of_other_trainers(tmp_path: Path, line: str) -> None:
    text = "".join(line.format(step=i, loss=5 - i / 4, norm=1.5) + "\n" for i in range(1, 6))
    series = read(write(tmp_path / "out.txt", "hello\n" + text + "step 5: train loss 3.1, val loss 3.2\n"))
    assert (series.format, series.steps, series.loss) == ("text", [1, 2, 3, 4, 5], [4.75, 4.5, 4.25, 4.0, 3.75])
    assert series.grad_norm == [1.5] * 5


# --- written by the real libraries


def test_lightning_csv_logger(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=7)
    for step in range(40):
        loss = math.nan if step == 30 else 9.0 - step / 8
        logger.log_metrics({"train/loss": 6.0, "train/bits_codebook_0": loss, "epoch": step // 10}, step=step)
        if step % 10 == 9:
            logger.log_metrics({"val/bits_codebook_0": 8.0, "epoch": step // 10}, step=step)
        if step > 20:
            logger.log_metrics({"grad_norm/total": 1.5, "grad_norm/clipped": 1.0}, step=step)
    logger.finalize("success")
    series = read(Path(logger.log_dir) / "metrics.csv")
    assert (series.column, series.grad_column, series.step_column) == (
        "train/bits_codebook_0", "grad_norm/total", "step",
    )  # fmt: skip
    assert series.steps == list(range(40))
    assert same(series.loss, [math.nan if step == 30 else 9.0 - step / 8 for step in range(40)])
    assert series.grad_norm == [None] * 21 + [1.5] * 19


def write_events(folder: Path, steps: range, suffix: str = "") -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for step in steps:
        for tag, value in (("grad_norm", 1.5), ("train/loss", math.nan if step == 7 else 9.0 - step / 8)):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=1e9 + step, summary=summary))
    writer.close()
    (path,) = folder.glob(f"events*{suffix}")
    return path


def test_tensorboard_events_and_a_cut_record(tmp_path: Path) -> None:
    path = write_events(tmp_path, range(20))
    series = read(path)
    assert (series.format, series.column, series.grad_column) == ("tensorboard", "train/loss", "grad_norm")
    assert (series.rows, series.steps) == (list(range(20)), list(range(20)))
    assert same(series.loss, [math.nan if step == 7 else 9.0 - step / 8 for step in range(20)])
    assert series.grad_norm == [1.5] * 20
    cut = write(tmp_path / "events.out.tfevents.2.cut", path.read_bytes()[:-10])
    assert len(read(cut).loss) == 19
    assert "cut" in read(cut).notes[0]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    with pytest.raises(LogError, match=r"record \d+ is damaged"):
        read(write(tmp_path / "events.out.tfevents.3.bad", bytes(damaged)))


def test_tensorboard_restarts_are_one_run(tmp_path: Path) -> None:
    write_events(tmp_path / "run", range(10), ".1")
    write_events(tmp_path / "run", range(8, 12), ".2")
    (source,) = discover([tmp_path], pytest.fail)
    series = read_series(source, ColumnRequest())
    assert series.path == tmp_path / "run"
    assert series.steps == [*range(10), *range(8, 12)]


def test_tensorboard_by_torch_writer_and_as_tensors(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "torch")) as torch_writer:
        for step in range(5):
            torch_writer.add_scalar("Loss/train", 5.0 - step, step)
            torch_writer.add_text("note", "words", step)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    writer = EventFileWriter(str(tmp_path / "tensors"))
    for step in range(5):
        proto = tensor_util.make_tensor_proto(5.0 - step)
        value = Summary.Value(tag="Loss/train", tensor=proto, metadata=metadata)
        writer.add_event(Event(step=step, wall_time=1.0, summary=Summary(value=[value])))
    writer.close()
    for folder in ("torch", "tensors"):
        (source,) = discover([tmp_path / folder], pytest.fail)
        assert read_series(source, ColumnRequest()).loss == [5.0, 4.0, 3.0, 2.0, 1.0]


WANDB_RUN = """
import glob, os, signal, sys, time, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True, console="off"))
for step in range(1500):
    loss = float("nan") if step == 900 else float("inf") if step == 901 else 9.0 - step / 1000
    run.log({"train/loss": loss, "trainer/global_step": step, "grad_norm": {"total": 1.5}, "note": "words"})
    if step % 100 == 0:
        run.log({"val/loss": 1.0, "trainer/global_step": step})
if sys.argv[2] == "kill":
    (log,) = glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb")
    while os.path.getsize(log) < 10 * 32768:  # wandb's own process writes whole blocks, in its own time
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
run.finish()
"""


@pytest.fixture(scope="module")
def wandb_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two offline runs: one that finished, one that was killed."""
    runs = {}
    for end in ("finish", "kill"):
        folder = tmp_path_factory.mktemp(f"wandb_{end}")
        env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder)}
        done = subprocess.run([sys.executable, "-c", WANDB_RUN, str(folder), end], env=env, timeout=120, check=False)
        assert done.returncode == (0 if end == "finish" else -signal.SIGKILL)
        runs[end] = folder
    return runs


def test_wandb_offline_runs_even_killed_ones(wandb_runs: dict[str, Path]) -> None:
    expected = [math.nan if i == 900 else math.inf if i == 901 else 9.0 - i / 1000 for i in range(1500)]
    for end, folder in wandb_runs.items():
        found = []
        for source in discover([folder], pytest.fail):  # the run folder also holds logs of wandb itself
            try:
                found.append(read_series(source, ColumnRequest()))
            except NotALogError:
                continue
        (series,) = found
        assert (series.format, series.column) == ("wandb", "train/loss")
        count = len(series.loss)
        assert count == 1500 if end == "finish" else count > 500
        assert same(series.loss, expected[:count])
        assert series.steps == list(range(count))
        assert series.grad_norm == [1.5] * count
        assert series.rows[:3] == [0, 2, 3]  # row 1 is a validation row


def test_wandb_files_cut_and_damaged(wandb_runs: dict[str, Path], tmp_path: Path) -> None:
    (path,) = wandb_runs["finish"].glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    for size in (len(data) // 3, 5 * 32768, 5 * 32768 + 3, len(data) - 1):
        series = read(write(tmp_path / "cut.wandb", data[:size]))
        assert series.steps == list(range(len(series.steps)))
        assert len(series.steps) > 1000 * size / len(data)
    damaged = data[:70_000] + b"\xff" + data[70_001:]
    with pytest.raises(LogError, match=r"damaged record in block 2"):
        read(write(tmp_path / "bad.wandb", damaged))
    with pytest.raises(LogError, match="not an offline W&B run"):
        read(write(tmp_path / "other.wandb", b"hello there"))


# --- folders


def test_a_folder_is_searched_and_what_is_no_log_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    log = "step,loss\n1,5\n2,4\n"
    write(tmp_path / "runs" / "a" / "metrics.csv", log)
    write(tmp_path / "runs" / "b.csv.gz", gzip.compress(log.encode()))
    write(tmp_path / ".git" / "hidden.csv", log)
    write(tmp_path / "notes.txt", "The loss, however, was step 3 of our plan.\nIt fell.\n")
    write(tmp_path / "prose", "loss, step\nand words, too\n")
    write(tmp_path / "labels.csv", "id,kind\na,b\n")
    write(tmp_path / "config.json", '{"loss_weight": 1.0, "model": "x"')
    write(tmp_path / "train_results.json", '{"train_loss": 1.0, "epoch": 3.0}')
    write(tmp_path / "wandb-summary.json", '{"train/loss": 1.0, "_step": 3, "ids": [1]}\n')
    write(tmp_path / "weights.bin", os.urandom(4096))
    write(tmp_path / "unknown", os.urandom(4096))
    write(tmp_path / "empty.csv", "")
    os.symlink(tmp_path / "runs", tmp_path / "latest")
    os.mkfifo(tmp_path / "pipe.csv")
    found = []
    for source in discover([tmp_path, tmp_path / "runs" / "b.csv.gz"], pytest.fail):
        try:
            found.append(read_series(source, ColumnRequest()).path.relative_to(tmp_path))
        except NotALogError:
            continue
    assert found == [Path("runs/b.csv.gz"), Path("runs/a/metrics.csv")]


def test_a_table_of_garbage_is_an_error_even_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "metrics.csv", bytes(range(256)) * 40)
    (source,) = discover([tmp_path], pytest.fail)
    with pytest.raises(LogError, match="binary file") as caught:
        read_series(source, ColumnRequest())
    assert not isinstance(caught.value, NotALogError)


def test_of_hugging_face_checkpoints_the_last_is_read(tmp_path: Path) -> None:
    state = json.dumps({"log_history": [{"loss": 5.0, "step": 1}]})
    for folder in ("run/checkpoint-500", "run/checkpoint-1000", "done/checkpoint-500", "done"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write(tmp_path / folder / "trainer_state.json", state)
    found = [str(source.path.parent.relative_to(tmp_path)) for source in discover([tmp_path], pytest.fail)]
    assert found == ["done", "run/checkpoint-1000"]
