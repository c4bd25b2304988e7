"""DDP under torchrun with a snapshot: the loop of torch's tutorial "Fault-tolerant Distributed Training with torchrun".

The tutorial's snapshot holds model and epoch; here it also holds optimizer and step, and a resumed epoch skips what
was done of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from problem import JobSettings, Log, Samples, loss_of, make_model  # type: ignore[import-not-found]


def main(folder: Path, settings: JobSettings) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = Log(folder, rank)
    model, optimizer = make_model(settings)
    snapshot = folder / "checkpoints" / "snapshot.pt"
    snapshot.parent.mkdir(exist_ok=True)
    step = 0
    if snapshot.exists():
        state = torch.load(snapshot, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"Resuming training from snapshot at step {step}", flush=True)
    ddp = DistributedDataParallel(model)
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
            loss = loss_of(ddp, batch, step, settings)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.step(step, loss, batch["id"])
            if step % settings.every == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, snapshot)
                print(f"step {step} | Training snapshot saved", flush=True)
            if step == settings.steps:
                break
    log.end(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), JobSettings.read(sys.argv[2]))
