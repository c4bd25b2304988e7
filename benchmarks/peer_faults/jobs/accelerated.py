"""Accelerate: `save_state` with automatic names, `load_state`, `skip_first_batches`: its page on checkpointing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from problem import JobSettings, Log, Samples, loss_of, make_model  # type: ignore[import-not-found]


class Progress:
    """The number of steps done, registered so that it is part of what is saved."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main(folder: Path, settings: JobSettings) -> None:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=3)
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)  # else a resumed epoch has another order
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=order)
    log = Log(folder, accelerator.process_index)
    model, optimizer = make_model(settings)
    set_seed(0, device_specific=True)  # else every rank draws the same noise
    data = Samples()
    loader = DataLoader(data, batch_size=settings.global_batch // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        project.iteration = progress.step // settings.every  # the next name; see the same page
        accelerator.print(f"Resumed from checkpoint at step {progress.step}", flush=True)
    while progress.step < settings.steps:
        epoch, done = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            progress.step += 1
            loss = loss_of(model, batch, progress.step, settings)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log.step(progress.step, loss, batch["id"])
            if progress.step % settings.every == 0:
                accelerator.save_state()
                accelerator.print(f"step {progress.step}: saved", flush=True)
            if progress.step == settings.steps:
                break
    log.end(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), JobSettings.read(sys.argv[2]))
