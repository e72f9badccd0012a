"""What the guard asks of a loader: to tell its position in the data and to be put to another one.

A position-addressed loader has ``state_dict()`` with a ``batch_number`` (the next global batch to be trained) and
``skip`` (ranges ``[a, b)`` of global batch numbers that are never served), and ``load_state_dict()`` that takes effect
at the next batch, also while it is being iterated. Any other loader is left alone: its data moves on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer


def find_stream(trainer: Trainer) -> Any | None:
    """Return the training loader if it is position-addressed, else None."""
    loader: Any = trainer.train_dataloader
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return None
    state = loader.state_dict()
    return loader if isinstance(state, dict) and {"batch_number", "skip"} <= state.keys() else None


def merge_ranges(ranges: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return sorted, disjoint, non-empty ranges that cover the same numbers.

    >>> merge_ranges([[5, 7], [1, 3], [2, 4], [9, 9]])
    [[1, 4], [5, 7]]
    """
    merged: list[list[int]] = []
    for low, high in sorted((int(a), int(b)) for a, b in ranges):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged
