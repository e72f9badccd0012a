"""What to do about a verdict: a pure function of the kind of episode, the action allowed, and what was tried before.

The rule of design: outlier -> note; jump, rise, divergence -> rollback; shift -> report and rebase; non-finite -> veto
the update, and rollback when the weights were hit. `action` caps what may be done; it never adds anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["log", "veto", "rollback", "stop"]
Decision = Literal["none", "note", "rollback", "stop"]
ACTIONS: tuple[Action, ...] = ("log", "veto", "rollback", "stop")
ROLLED_BACK_KINDS = frozenset({"jump", "rise", "divergence", "non_finite"})

PATIENCE = 3  # non-finite steps in a row after which refusing their updates is not enough


class TrainingStopped(RuntimeError):
    """The guard gave the run up: the message says why and which checkpoint is good."""


def check_action(action: str) -> Action:
    """Return ``action`` if it is one of the four.

    Raises:
        ValueError: naming the key, the value and the choices.
    """
    for choice in ACTIONS:
        if action == choice:
            return choice
    raise ValueError(f"spike_guard.action={action!r}: choose from {', '.join(ACTIONS)}")


def decide(kind: str, act: bool, action: Action, *, refused: bool = False, bad_run: int = 1) -> Decision:
    """Return what a guard capped at ``action`` does about a verdict.

    Args:
        kind: the verdict's kind.
        act: whether the detector says that a guard should act now.
        action: the cap. ``stop`` ends the run where ``rollback`` would have rolled it back.
        refused: whether this step's update did not happen, so that it cannot have hit the weights.
        bad_run: non-finite steps in a row, this one included.
    """
    if kind == "ok":
        return "none"
    if not act or kind not in ROLLED_BACK_KINDS:
        return "note"
    if kind == "non_finite" and refused and bad_run < PATIENCE:
        return "note"
    if action == "rollback":
        return "rollback"
    return "stop" if action == "stop" else "note"


@dataclass
class Retries:
    """Bounded retries at one place: every further rollback goes further back and skips more; then the run stops.

    Two rollbacks belong to one place when the run has not yet got ``clear_steps`` accepted steps beyond the step at
    which the earlier one was decided.

    Attributes:
        max_retries: rollbacks allowed at one place.
        clear_steps: accepted steps beyond the trouble after which it counts as overcome.
        count: rollbacks done at the present place.
        barrier: accepted step that must be passed by ``clear_steps`` to leave the place.
    """

    max_retries: int = 3
    clear_steps: int = 100
    count: int = 0
    barrier: int = -1

    def passed(self, step: int) -> None:
        """Tell that accepted step ``step`` was healthy; forgets the place once it lies behind."""
        if self.count and step > self.barrier + self.clear_steps:
            self.count = 0
            self.barrier = -1

    def allow(self, step: int) -> bool:
        """Count a rollback decided at accepted step ``step``; False when the bound is reached and the run must stop."""
        if self.count >= self.max_retries:
            return False
        self.count += 1
        self.barrier = max(self.barrier, step)
        return True

    def widened(self, margin: int) -> int:
        """Return the onset margin in attempted steps for the present try: doubled with each retry."""
        return int(margin * 2 ** max(0, self.count - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the two counters."""
        return {"count": self.count, "barrier": self.barrier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the two counters."""
        self.count, self.barrier = int(state["count"]), int(state["barrier"])
