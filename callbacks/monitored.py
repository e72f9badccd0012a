"""Find the monitored value of a step in whatever a LightningModule returns or logs, and keep what a report needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

IDENTITY = ("sample_id", "track_id", "start", "position")


def monitored(name: str, outputs: Any, trainer: Trainer) -> tuple[Tensor, Tensor] | None:
    """Return ``(sum, count)`` of the monitored metric for one micro-batch on this rank, or None where it is absent.

    Looked for in this order: ``outputs["sums"][name]`` (a pair, pooled exactly), ``outputs[name]``, the loss itself if
    ``name`` is ``loss`` (Lightning divides it by the accumulation count; that is undone), and the logged metrics.

    A logged metric is read as it stands: log it at every step, or what is judged is an old value.
    """
    logged: Mapping[str, Any] = trainer.callback_metrics
    returned: Mapping[str, Any] = outputs if isinstance(outputs, Mapping) else {}
    if outputs is None or (isinstance(outputs, Mapping) and not outputs):
        return torch.zeros(()), torch.zeros(())  # training_step returned None: there was no step to judge
    pair = returned.get("sums", {}).get(name)
    if pair is not None:
        return pair[0], pair[1]
    value: Any = None
    if name in returned and name != "loss":
        value = returned[name]
    elif name == "loss":
        value = (returned["loss"] if returned else outputs) * trainer.accumulate_grad_batches
    elif name in logged:
        value = logged[name]
    if value is None:
        return None
    value = torch.as_tensor(value).detach().float().mean()
    return value, torch.ones_like(value)


def missing(outputs: Any, trainer: Trainer) -> str:
    """Return what to tell a user whose metric is nowhere to be found."""
    returned: Mapping[str, Any] = outputs if isinstance(outputs, Mapping) else {}
    there = sorted({*returned.get("sums", {}), *(k for k in returned if k != "sums"), *trainer.callback_metrics})
    return f"the step neither returned nor logged it. There is: {', '.join(there)}"


@dataclass
class StepRecord:
    """One micro-batch as a report needs it: numbers on the host, and references to small device tensors.

    Attributes:
        batch_number: global batch number where the stream gives one, else the batch's index in the epoch.
        identity: which samples these were, `[B]` each.
        details: per-sample and per-codebook values that the step returned, on their device.
    """

    batch_number: int
    identity: dict[str, Tensor]
    details: dict[str, Tensor]


def step_record(batch: Any, batch_idx: int, outputs: Any) -> StepRecord:
    """Keep what identifies a batch and what the step said of it. Reads nothing from the device."""
    fields: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    returned: Mapping[str, Any] = outputs if isinstance(outputs, Mapping) else {}
    details = {
        k: v.detach() for k, v in returned.items() if k in ("sample_bits", "codebook_bits") and isinstance(v, Tensor)
    }
    number = fields.get("batch_number", batch_idx)
    return StepRecord(int(number), {k: fields[k] for k in IDENTITY if isinstance(fields.get(k), Tensor)}, details)
