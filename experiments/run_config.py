"""The run's configuration on disk and in the loggers, and a W&B logger that goes on with its run after a requeue."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

ID_FILE = "wandb_run_id"


class SaveRunConfig(SaveConfigCallback):
    """Write ``config.yaml`` into the run's folder and the whole configuration into every logger.

    The first file is never overwritten: a resumed or repeated run writes ``config_resume_N.yaml`` beside it.
    """

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save; Lightning calls this on rank 0 only."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / "config.yaml", 0
        while path.exists():
            number += 1
            path = folder / f"config_resume_{number}.yaml"
        try:
            text = self.parser.dump(self.config, skip_none=False)
        except yaml.YAMLError as error:  # some classes have default values that YAML cannot express
            rank_zero_warn(f"the configuration is not saved to {path}: {error}")
            return
        path.write_text(text)
        whole: dict[str, Any] = yaml.safe_load(text)
        for logger in trainer.loggers:
            logger.log_hyperparams(whole)


class RunWandbLogger(WandbLogger):
    """WandbLogger whose run id lives in its ``save_dir``, so that a requeued job continues the same run.

    Offline by default: an unreachable server would block a run for minutes and then kill it. ``wandb sync`` uploads
    what was written.

    Args:
        project: the W&B project.
        name: the run's name.
        save_dir: folder for the run's files and its id.
        offline: write to disk only.
        group: group of runs to compare.
        tags: free words.
        log_model: refused unless the run is online: it uploads every checkpoint.

    Raises:
        ValueError: for ``log_model`` with ``offline``.
    """

    def __init__(
        self,
        project: str = "ballast",
        name: str | None = None,
        save_dir: str = ".",
        offline: bool = True,
        group: str | None = None,
        tags: list[str] | None = None,
        log_model: bool = False,
    ) -> None:
        if log_model and offline:
            raise ValueError("log_model=true needs offline=false: an offline run cannot upload checkpoints")
        super().__init__(
            project=project,
            name=name,
            save_dir=save_dir,
            offline=offline,
            group=group,
            tags=tags,
            log_model=log_model,
            id=self._run_id(Path(save_dir)),
            resume="allow",
        )

    @staticmethod
    def _run_id(folder: Path) -> str:
        file = folder / ID_FILE
        if file.is_file():
            return file.read_text().strip()
        folder.mkdir(parents=True, exist_ok=True)
        run_id = secrets.token_hex(4)
        file.write_text(run_id + "\n")
        return run_id
