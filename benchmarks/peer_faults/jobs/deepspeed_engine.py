"""DeepSpeed's engine, ZeRO-2: `save_checkpoint` and `load_checkpoint` with `client_state`: its documentation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from problem import JobSettings, Log, Samples, loss_of, make_model  # type: ignore[import-not-found]


def main(folder: Path, settings: JobSettings) -> None:
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = Log(folder, rank)
    model, optimizer = make_model(settings)
    config = {
        "train_micro_batch_size_per_gpu": settings.global_batch // world, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    found, client = engine.load_checkpoint(str(folder / "checkpoints"))
    step = client["step"] if found else 0
    data = Samples()
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=settings.global_batch // world, sampler=sampler, drop_last=True)
    while step < settings.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            if i < done:
                continue
            step += 1
            loss = loss_of(engine, batch, step, settings)
            engine.backward(loss)
            engine.step()
            log.step(step, loss, batch["id"])
            if step % settings.every == 0:
                engine.save_checkpoint(str(folder / "checkpoints"), client_state={"step": step})
            if step == settings.steps:
                break
    log.end(engine.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings")
    parser.add_argument("--local_rank", type=int)  # the launcher gives it
    given = parser.parse_args()
    torch.set_num_threads(1)
    main(given.folder, JobSettings.read(given.settings))
