"""Which column is the loss, which the gradient norm, which the step: names as training frameworks write them."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from experiments.readers.table import LogTable

# Normalised names, best first. A log seldom has two of them; where it does, the per-step training value wins.
LOSS_NAMES = (
    "train_bits_codebook_0", "bits_codebook_0", "train_loss_step", "training_loss_step", "train_loss", "training_loss",
    "loss_train", "loss_training", "lm_loss", "train_lm_loss", "lm_loss_training", "loss_step", "loss",
    "train_step_loss", "train_batch_loss", "batch_loss", "step_loss", "train_total_loss", "total_loss", "loss_total",
    "trl", "train_loss_epoch", "training_loss_epoch", "loss_epoch",
)  # fmt: skip
GRAD_NAMES = (
    "grad_norm_total", "grad_norm", "gradient_norm", "train_grad_norm", "train_gradient_norm", "gnorm", "train_gnorm",
    "global_grad_norm", "global_gradient_norm", "train_global_grad_norm", "total_grad_norm", "grad_norm_global",
    "gradnorm", "grad_norm_step", "grad_norm_pre_clip", "grad_2_0_norm_total", "grad_2_norm_total",
)  # fmt: skip
STEP_NAMES = (
    "global_step", "trainer_global_step", "train_global_step", "step", "steps", "iteration", "iterations",
    "num_updates", "train_num_updates", "iter", "iters", "global_steps", "train_step", "training_step",
    "optimizer_step", "current_step", "step_num", "update_step", "n_iter", "it", "updates", "update", "batch",
    "batch_idx",
)  # fmt: skip
HELD_OUT = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"})
SPLIT_NAMES = frozenset({"split", "mode", "phase", "stage", "subset"})  # of logs in long form, one row per split
NOT_A_LOSS = HELD_OUT | {"scale", "scaler", "best", "min", "max", "weight", "weights", "std", "lr", "aux", "count"}
NOT_TOTAL_NORM = HELD_OUT | {"clip", "clipped", "post", "block", "blocks", "layer", "layers", "min", "max", "threshold"}
PREFERRED_SHARE = 0.1  # a better-named column must hold at least this share of the values of the fullest candidate
FAR_RANK = 1000


@lru_cache(maxsize=4096)
def normalise(name: str) -> str:
    """Bring a column name to one form: ``"Train/Loss" -> "train_loss"``, ``"lm loss" -> "lm_loss"``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@lru_cache(maxsize=4096)
def loss_rank(name: str) -> int | None:
    """Return how good a loss column this name is (smaller is better), or None if it is none."""
    plain = normalise(name)
    if plain in LOSS_NAMES:
        return LOSS_NAMES.index(plain)
    words = set(plain.split("_"))
    if ("loss" not in plain and "nll" not in words and "bits" not in words) or words & NOT_A_LOSS:
        return None
    return FAR_RANK + (0 if plain.endswith("train_loss") else len(plain)) + (500 if "epoch" in words else 0)


def grad_rank(name: str) -> int | None:
    """Return how good a column of total gradient norms this name is, or None if it is none."""
    plain = normalise(name)
    if plain in GRAD_NAMES:
        return GRAD_NAMES.index(plain)
    words = set(plain.split("_"))
    if not ("gnorm" in plain or ("grad" in plain and "norm" in plain)) or words & NOT_TOTAL_NORM:
        return None
    return FAR_RANK + len(plain)


def step_rank(name: str) -> int | None:
    """Return how good a step column this name is, or None if it is none."""
    plain = normalise(name)
    return STEP_NAMES.index(plain) if plain in STEP_NAMES else None


def says_held_out(name: str, value: str) -> bool:
    """Whether a cell says that its row is no training row: ``mode=val``."""
    return normalise(name) in SPLIT_NAMES and bool(HELD_OUT & set(normalise(value).split("_")))


RANKS: dict[str, Callable[[str], int | None]] = {"loss": loss_rank, "grad_norm": grad_rank, "step": step_rank}
OPTIONS = {"loss": "--column", "grad_norm": "--grad-column", "step": "--step-column"}


class ColumnError(ValueError):
    """A column that was asked for, or any loss column at all, is not in the log."""


@dataclass(frozen=True)
class ColumnRequest:
    """The columns to read; None leaves the choice to the known names.

    Args:
        loss: Series to judge.
        grad_norm: Gradient norm beside it.
        step: Training step of a row.
    """

    loss: str | None = None
    grad_norm: str | None = None
    step: str | None = None

    def wants(self, name: str) -> bool:
        """Whether a reader has to keep this column."""
        return any(self.rank(role, name) is not None for role in RANKS)

    def rank(self, role: str, name: str) -> int | None:
        """Rank ``name`` for a role: by the user's word where given, by the known names otherwise."""
        asked: str | None = getattr(self, role)
        if asked is None:
            return RANKS[role](name)
        if name == asked:
            return 0
        return 1 if normalise(name) == normalise(asked) else None

    def names_a_loss(self, names: Iterable[str]) -> bool:
        """Whether one of the names can serve as the loss."""
        return any(self.rank("loss", name) is not None for name in names)


def choose(table: LogTable, request: ColumnRequest, role: str, at_least: int = 0) -> str | None:
    """Pick the column of ``table`` for a role: best name first, among those that hold enough values.

    Args:
        table: A log.
        request: What the user asked for.
        role: ``"loss"``, ``"grad_norm"`` or ``"step"``.
        at_least: Fewest values of a column that was not asked for.

    Returns:
        The column's name; None where the log has none and none was asked for.

    Raises:
        ColumnError: The user named a column that the log does not have.
    """
    ranked = [(rank, name) for name in table.columns if (rank := request.rank(role, name)) is not None]
    asked: str | None = getattr(request, role)
    if asked is not None and not ranked:
        raise ColumnError(missing_column(asked, role, list(table.names)))
    if asked is None:
        ranked = [(rank, name) for rank, name in ranked if len(table.columns[name].rows) >= at_least]
    if not ranked:
        return None
    enough = PREFERRED_SHARE * max(len(table.columns[name].rows) for _, name in ranked)
    return min((rank, name) for rank, name in ranked if len(table.columns[name].rows) >= enough)[1]


def missing_column(asked: str, role: str, names: Sequence[str]) -> str:
    """Word the error for a column that is not there."""
    by_plain = {normalise(name): name for name in names}
    near = difflib.get_close_matches(normalise(asked), by_plain, n=1, cutoff=0.6)
    hint = f" Did you mean '{by_plain[near[0]]}'?" if near else ""
    return f"{OPTIONS[role]} '{asked}': no such column.{hint} It has: {listed(names)}"


def listed(names: Sequence[str], limit: int = 30) -> str:
    """Join column names for an error message, cut to a readable length."""
    if not names:
        return "no columns"
    more = f", ... ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(name if len(name) <= 60 else name[:57] + "..." for name in names[:limit]) + more
