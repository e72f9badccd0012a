"""Text logs whose records are lines among other lines: fairseq, Megatron-LM, and ``name: value`` prints.

Row i is the i-th training record of the file. Broken records are left out with a note: output of several processes
runs into one another in such files.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from experiments.readers.columns import ColumnRequest, loss_rank, normalise, step_rank
from experiments.readers.json_logs import to_numbers
from experiments.readers.opening import Tick, open_text
from experiments.readers.table import RecordTable, parse_number

Record = Mapping[str, float]

# fairseq writes `... | INFO | train_inner | {...}`, under hydra `[time][train_inner][INFO] - {...}`, and with
# `--log-format simple` `train_inner | epoch 001:    100 / 487 loss=4.655, ..., gnorm=1.2, ...`.
# Its values are strings, its losses are in base 2 (bits) already.
FAIRSEQ_MARK = "train_inner"
# All patterns are linear in the length of a line: no two neighbouring parts can match the same characters.
FAIRSEQ_SIMPLE = re.compile(r"epoch\s+\d+:\s*\d+\s*/\s*\d+\s+(.*=.*)")
# Megatron-LM: ` iteration      200/    1000 | consumed samples: ... | lm loss: 7.399415E+00 | ... | grad norm: 2.918 |`
MEGATRON = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
NUMBER = r"[-+]?(?:\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])"
STEP_PRINT = re.compile(
    r"\b(s(?=:\d)|global_?step|steps?|iterations?|iters?|it|num_updates|updates?)['\"]?\s*(?:[:=#\[(]+\s*)?(\d+)\b",
    re.I,
)
FEWEST_PRINTS = 3  # lines with a step and a loss among the first ones; fewer is prose about training
LONGEST_LINE = 20_000  # a longer line is a dump, not a record


def fairseq_record(line: str) -> Record | None:
    """Parse one fairseq training record; None for another line.

    Raises:
        ValueError: The line is a training record, but broken.
    """
    at = line.find(FAIRSEQ_MARK)
    if at < 0:
        return None
    begin = line.find("{", at)
    if begin >= 0:
        record = json.loads(line[begin : line.rfind("}") + 1])
        if not isinstance(record, dict):
            raise ValueError("not an object")
        return to_numbers(record)
    if found := FAIRSEQ_SIMPLE.search(line, at):
        return _pairs(found.group(1), ",", "=")
    return None


def megatron_record(line: str) -> Record | None:
    """Parse one Megatron-LM iteration line; None for another line.

    Megatron leaves NaN iterations out of the mean it prints and counts them beside it, so a record that counts some is
    a NaN loss here.

    Raises:
        ValueError: The line is an iteration record, but broken.
    """
    found = MEGATRON.search(line)
    if not found:
        return None
    pairs = {"iteration": float(found.group(1)), **_pairs(found.group(2), "|", ":")}
    if pairs.get("number of nan iterations", 0.0) > 0:
        losses = [name for name in pairs if loss_rank(name) is not None]
        pairs.update(dict.fromkeys(losses or ["lm loss"], math.nan))
    return pairs


def printed_record(line: str) -> Record | None:
    """Parse a line of ``name: value`` prints that has a training loss: ``step 12/500 | loss 5.91 | norm 1.2``,
    ``iter 100: loss 3.2, time 12ms``, ``{'loss': 2.3, 'learning_rate': 1e-4, 'epoch': 0.1}``; None for another line.
    """
    pairs: dict[str, float] = {}
    for name, text in PRINTED.findall(line):
        if (loss_rank(name) is not None or "norm" in name.lower()) and name not in pairs:
            pairs["grad_norm" if normalise(name) == "norm" else name] = float(text.replace("_", ""))
    if not any(loss_rank(name) is not None for name in pairs) or HELD_OUT_LINE.search(line):
        return None
    if step := STEP_PRINT.search(line):
        pairs.setdefault("step", float(step.group(2)))
    return pairs


PRINTED = re.compile(rf"(?<![\w./])([A-Za-z][\w./]*(?:[ -](?:loss|norm))?)['\"]?\s*(?:[:=]\s*)?({NUMBER})", re.I)
HELD_OUT_LINE = re.compile(r"\b(val|valid|validation|eval|evaluation|test|dev|train_runtime)(?:[_ /]?loss)?\b", re.I)


def _pairs(text: str, separator: str, joint: str) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for part in text.split(separator):
        name, found, value = part.partition(joint)
        if not found:
            continue
        try:
            number = parse_number(value.strip())
        except ValueError:
            continue  # a text, a time, a ratio
        if number is not None:
            pairs[name.strip()] = number
    return pairs


PARSERS: dict[str, Callable[[str], Record | None]] = {
    "fairseq": fairseq_record,
    "megatron": megatron_record,
    "text": printed_record,
}


def sniff(head: str) -> str | None:
    """Name the text format of which the beginning of a file shows a training record, or None."""
    prints = 0
    for line in head.splitlines():
        for name, parse in PARSERS.items():
            record = _try(parse, line)
            if record and any(loss_rank(key) is not None for key in record):
                if name != "text":
                    return name
                prints += "'loss'" in line or any(step_rank(key) is not None for key in record)
    return "text" if prints >= FEWEST_PRINTS else None


def _try(parse: Callable[[str], Record | None], line: str) -> Record | None:
    try:
        return parse(line) if len(line) < LONGEST_LINE else None
    except (ValueError, RecursionError):
        return None


def read(path: Path, format: str, request: ColumnRequest, tick: Tick) -> RecordTable:
    """Read the training records of a text log.

    Args:
        path: The file, compressed or not.
        format: One of ``PARSERS``.
        request: Columns to keep.
        tick: Progress, in bytes.
    """
    table = RecordTable(format, request.wants)
    broken: list[int] = []
    with open_text(path, tick) as stream:
        for record in _records(stream, PARSERS[format], broken):
            table.append(record)
    if broken:
        table.notes.append(f"{len(broken)} broken records were left out, the first in line {broken[0]}")
    return table


def _records(lines: Iterator[str], parse: Callable[[str], Record | None], broken: list[int]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            continue
        try:
            record = parse(line)
        except (ValueError, RecursionError):
            broken.append(number)
            continue
        if record:
            yield record
