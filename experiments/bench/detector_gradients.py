"""What the gradient-norm limit refuses: on healthy updates, before synthetic jumps, and in the published BLOOM logs.

The BLOOM numbers are those of the training chronicles (bigscience-workshop/bigscience, 176B iterations 31214-31222 and
104B iterations 11446-11448); what surrounds them is noise of our own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from callbacks.detector import Detector
from experiments.bench.detector_synthetic import MARGIN, Trace

FloatN = npt.NDArray[np.float64]
WARM_UP = 100  # updates at the start that are not counted
PRECURSOR = 4  # rows before a synthetic jump in which the norm may rise

BLOOM = {  # name -> (iteration of the loss jump, loss, gradient norm, index of the jump)
    "BLOOM-176B": (
        31219,
        (2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805),
        (0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0),
        5,
    ),
    "BLOOM-104B": (11448, (3.063, 3.114, 7.712), (12953.0, 262623.0, 254699.0), 2),
}


@dataclass
class GradientScore:
    """Counts of refused updates."""

    healthy: int = 0
    refused: int = 0
    jumps: int = 0
    warned: int = 0

    def add_healthy(self, grad_norm: FloatN, limits: FloatN, clean: bool) -> None:
        """Count a run without events (one that has some is not counted)."""
        if clean and np.isfinite(grad_norm).any():
            self.healthy += len(grad_norm) - WARM_UP
            self.refused += int((grad_norm > limits)[WARM_UP:].sum())

    def add_synthetic(self, trace: Trace, limits: FloatN) -> None:
        """Count a synthetic trace up to its event, and whether a raised norm before a jump was refused."""
        over = trace.grad_norm > limits
        end = trace.start - MARGIN if trace.has_event and trace.start is not None else len(over)
        if trace.shape == "lr_drop" and trace.start is not None:
            end = trace.start
        self.healthy += end - WARM_UP
        self.refused += int(over[WARM_UP:end].sum())
        if trace.shape == "exp_recovery" and trace.start is not None:
            before = slice(trace.start - PRECURSOR, trace.start)
            raised = trace.grad_norm[before][-1] > 10 * np.median(trace.grad_norm[trace.start - 200 : trace.start - 10])
            self.jumps += int(raised)
            self.warned += int(raised and over[before].any())

    def row(self) -> dict[str, Any]:
        """Return the table's numbers."""
        return {
            "healthy_updates": self.healthy,
            "refused": self.refused,
            "refused_per_100k": 1e5 * self.refused / max(1, self.healthy),
            "jumps_with_precursor": self.jumps,
            "refused_before_jump": self.warned,
        }


def bloom_rows(name: str, rows: int = 3000, seed: int = 0) -> tuple[FloatN, FloatN, int]:
    """Return loss and gradient norm `[rows + M]` around a published spike, and the row of its loss jump."""
    _, losses, norms, jump = BLOOM[name]
    draw = np.random.default_rng(seed)
    fall = 0.15 * np.exp(-np.arange(rows) / 1500.0)
    loss = losses[0] + fall + 0.02 * draw.standard_normal(rows)
    norm = norms[0] * np.exp(0.15 * draw.standard_normal(rows))
    return np.concatenate([loss, losses]), np.concatenate([norm, norms]), rows + jump


def bloom_replays() -> dict[str, Any]:
    """Replay the published spikes; rows are relative to the loss jump."""
    out = {}
    for name in BLOOM:
        loss, norm, jump = bloom_rows(name)
        detector = Detector()
        vetoed, acted, early = [], [], 0
        for row, (value, grad) in enumerate(zip(loss.tolist(), norm.tolist(), strict=True)):
            if row >= WARM_UP and not grad <= detector.veto_limit():
                vetoed.append(row - jump)
            if detector.update(row, {"loss": value, "grad_norm": grad}).act:
                acted.append(row - jump)
            early = sum(row < -10 for row in vetoed + acted)
        out[name] = {
            "first_veto": vetoed[0] if vetoed else None,
            "first_act": acted[0] if acted else None,
            "false": early,
        }
    return out
