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
        parser.add_lightning_class_args(HiddenStateWriter, "hidden_states")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with the random states kept as well."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.insert(0, RandomStates())  # type: ignore[attr-defined]
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Take the model's options from the checkpoint, except when training goes on: there a change is reported."""
        if self.config.get("subcommand") != "fit":
            super()._parse_ckpt_path()

    def before_instantiate_classes(self) -> None:
        """Say what a resumed run will not take from its configuration."""
        if self.subcommand != "fit":
            return
        config = self.config["fit"]
        path = config.get("ckpt_path")
        if path and Path(path).is_file():
            report_changes(path, config["model"].as_dict())


def report_changes(path: str, model: dict[str, Any]) -> None:
    """Warn of every model or optimizer option that differs between a checkpoint and the configuration."""
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("hyper_parameters", {})
    for section in ("optimizer", "encoder"):
        theirs, mine = saved.get(section), model.get(section)
        for key in sorted(set(theirs or {}) & set(mine or {})):
            assert theirs is not None
            assert mine is not None
            old, new = theirs[key], mine[key]
            if (list(old) if isinstance(old, tuple) else old) != (list(new) if isinstance(new, tuple) else new):
                wins = "the optimizer goes on with the checkpoint's" if section == "optimizer" else "the latter is used"
                rank_zero_warn(
                    f"resuming {path}: model.{section}.{key} is {old} in the checkpoint, {new} in the configuration; "
                    + wins
                )


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
    except USER_ERRORS as error:
        if os.environ.get("BALLAST_DEBUG"):
            raise
        first = str(error).strip().splitlines()
        print(f"error: {first[0] if first else type(error).__name__}", file=sys.stderr)
        return 1
    return 0
