"""Lightning's Trainer: `ModelCheckpoint` every few steps and on an exception, `ckpt_path="last"` to resume."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from problem import JobSettings, Log, Samples, loss_of, make_model  # type: ignore[import-not-found]


class Training(lightning.LightningModule):
    """The training step."""

    def __init__(self, settings: JobSettings, log: Log) -> None:
        super().__init__()
        self.model, self._optimizer = make_model(settings)
        self._settings, self._log = settings, log

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._loss = loss_of(self.model, batch, self.global_step + 1, self._settings)
        return self._loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, torch.Tensor], index: int) -> None:
        self._log.step(self.global_step, self._loss, batch["id"])


def main(folder: Path, settings: JobSettings) -> None:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    lightning.seed_everything(0)
    training = Training(settings, Log(folder, rank))
    saving = ModelCheckpoint(
        dirpath=folder / "checkpoints", filename="{step}", every_n_train_steps=settings.every, save_top_k=-1,
        save_last=True, save_on_exception=True,
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", num_nodes=world, devices=1, max_steps=settings.steps, callbacks=[saving],
        logger=False, enable_progress_bar=False, default_root_dir=folder,
    )  # fmt: skip
    loader = DataLoader(Samples(), batch_size=settings.global_batch // world, shuffle=True)
    trainer.fit(training, loader, ckpt_path="last", weights_only=False)
    training._log.end(training.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), JobSettings.read(sys.argv[2]))
