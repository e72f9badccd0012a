"""fit, validate, test and predict: the LightningCLI in which model, data, guard and loggers meet."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.checkpoint_files import GuardedCheckpoint
from callbacks.fault_injection import FaultInjection
from callbacks.gradient_norms import GradientNorms
from callbacks.hidden_states import HiddenStateWriter
from callbacks.policy import TrainingStopped
from callbacks.random_states import RandomStates
from callbacks.rank_checksums import RankChecksums
from callbacks.spike_guard import SpikeGuard
from datamodules.codec_tokens import CodecTokens
from experiments.run_config import SaveRunConfig
from lightning_modules.acoustic_mlm import AcousticMLM

CONFIGS = Path(__file__).parent / "configs"
USAGE = "python -m experiments {verb} [-c CONFIG.yaml ...] [--KEY VALUE ...]   (see {verb} --help)"
USER_ERRORS = (ValueError, FileNotFoundError, MisconfigurationException, TrainingStopped)

# Late, relative interpolation: with the plain mode a value overridden on the command line leaves stale copies behind.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)


class OneLineParser(LightningArgumentParser):
    """Says what is wrong in one line, below a short usage; ``JSONARGPARSE_DEBUG=true`` gives a stack trace instead."""

    def error(self, message: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Print one line and exit with status 2."""
        if os.environ.get("JSONARGPARSE_DEBUG"):
            super().error(message, *args, **kwargs)
        print(f"usage: {self.usage}" if self.usage else "", file=sys.stderr)
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        sys.exit(2)


class ExperimentCLI(LightningCLI):
    """The command line. The guard, its companions and the checkpoint have sections of their own that no list drops."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``run_name`` and the callbacks that are always there."""
        parser.add_argument("--run_name", type=str, default="run", help="Names the run and its folder below runs/.")
        parser.add_lightning_class_args(FaultInjection, "fault_injection")
        parser.add_lightning_class_args(GradientNorms, "gradient_norms")
        parser.add_lightning_class_args(SpikeGuard, "spike_guard")
        parser.add_lightning_class_args(GuardedCheckpoint, "checkpoint")
        parser.add_lightning_class_args(RankChecksums, "rank_checksums")
        parser.add_lightning_class_args(HiddenStateWriter, "hidden_states")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with the random states kept as well."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.insert(0, RandomStates())  # type: ignore[attr-defined]
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Take the model's options from the checkpoint, except when training goes on: there a change is reported."""
        verb = self.config.get("subcommand")
        path = self.config[verb].get("ckpt_path") if verb else None
        if path and Path(path).exists():
            read_hyperparameters(path)  # an unreadable file is refused here, in one line
        if verb != "fit":
            super()._parse_ckpt_path()

    def before_instantiate_classes(self) -> None:
        """Say what a resumed run will not take from its configuration, and what a run without a checkpoint means."""
        config, path = self.config[self.subcommand], self.config[self.subcommand].get("ckpt_path")
        last = Path(config["checkpoint"]["dirpath"] or ".") / "last.ckpt"
        if path and Path(path).is_file() and self.subcommand == "fit":
            report_changes(path, config["model"].as_dict())
        elif not path and self.subcommand == "fit" and last.is_file():
            rank_zero_warn(
                f"{last} is from an earlier run: this one starts from nothing in the same folder. "
                f"To go on: --ckpt_path {last}; to keep the two apart: another --run_name"
            )
        elif not path and self.subcommand == "predict":
            raise ValueError("predict needs --ckpt_path FILE: without it the weights would be random")
        elif not path and self.subcommand in ("validate", "test"):
            rank_zero_warn(f"{self.subcommand} without --ckpt_path: the weights are random")


def read_hyperparameters(path: str) -> dict[str, Any]:
    """Return a checkpoint's hyperparameters.

    Raises:
        ValueError: if the file is not a readable checkpoint.
    """
    if Path(path).is_dir():
        return {}  # a sharded checkpoint
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found: dict[str, Any] = checkpoint.get("hyper_parameters", {})
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path}: not a readable checkpoint: {reason[0]}") from error
    return found


def plain(value: Any) -> Any:
    """Return tuples as lists, as YAML has them."""
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def report_changes(path: str, model: dict[str, Any]) -> None:
    """Warn of every option of the model that differs between a checkpoint and the configuration, and say which wins."""
    saved = read_hyperparameters(path)
    for section in (None, "optimizer", "encoder"):
        theirs: dict[str, Any] = saved if section is None else saved.get(section) or {}
        mine = model if section is None else model.get(section) or {}
        for key in sorted(set(theirs) & set(mine)):
            old, new = plain(theirs[key]), plain(mine[key])
            if isinstance(old, dict) or old == new:
                continue
            # Rates and moments are the optimizer's state; the shape of the schedule is code and configuration.
            kept = section == "optimizer" and key in ("lr", "betas", "eps", "weight_decay", "fused")
            wins = "the optimizer goes on with the checkpoint's" if kept else "the configuration's is used from here on"
            name = ".".join(part for part in ("model", section, key) if part)
            rank_zero_warn(f"resuming {path}: {name} is {old} in the checkpoint, {new} in the configuration; {wins}")


def run(args: list[str]) -> ExperimentCLI:
    """Run one verb of the trainer in this process and return the command line object.

    Args:
        args: the command line, verb first, as in ``["fit", "-c", "smoke.yaml"]``.
    """
    verbs = ("fit", "validate", "test", "predict")
    per_verb = {
        verb: {
            "default_config_files": [str(CONFIGS / "base.yaml")],
            "usage": USAGE.format(verb=verb),
            "parser_mode": "omegaconf+",
            "allow_abbrev": False,
        }
        for verb in verbs
    }
    return ExperimentCLI(
        AcousticMLM,
        CodecTokens,
        parser_class=OneLineParser,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_callback=SaveRunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        parser_kwargs={"prog": "python -m experiments", "parser_mode": "omegaconf+", "allow_abbrev": False, **per_verb},
        args=None if args == sys.argv[1:] else args,  # further ranks are started with this process's own arguments
    )


def main(args: list[str]) -> int:
    """Run one verb; a mistake of the user's, or a run given up, is one line on stderr and a non-zero status."""
    try:
        run(args)
    except SIGTERMException:  # a preempted job: the checkpoint is written, and the scheduler must see what happened
        return 143
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):  # Lightning has saved and closed down
            return 130
        raise
    except (*USER_ERRORS, RuntimeError) as error:
        # Of torch's own errors only a checkpoint that does not fit is the user's to mend.
        if os.environ.get("BALLAST_DEBUG") or not (
            isinstance(error, USER_ERRORS) or "loading state_dict" in str(error)
        ):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {text if len(text) < 600 else text[:600] + ' ...'}", file=sys.stderr)
        return 1
    return 0
