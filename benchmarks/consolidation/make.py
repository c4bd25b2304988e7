"""Write checkpoints with DeepSpeed (ZeRO-1, 2, 3) and with torch (DCP of FSDP2), as a run on two ranks leaves them.

    python -m benchmarks.consolidation.make FOLDER zero1|zero2|zero3|dcp LAYERS

A layer is a linear one of 2048 x 2048: 4.2 million parameters. Weights in bf16 with fp32 masters, Adam's moments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WIDTH, RANKS = 2048, 2


def _model(layers: int) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _save(rank: int, folder: Path, kind: str, layers: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    if kind == "dcp":
        _save_dcp(folder, layers)
    else:
        _save_deepspeed(folder, int(kind[-1]), layers)
    dist.destroy_process_group()


def _save_deepspeed(folder: Path, stage: int, layers: int) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):  # never whole: memory is scarce
        model = _model(layers)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(folder))


def _save_dcp(folder: Path, layers: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = _model(layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)


if __name__ == "__main__":
    mp.spawn(_save, args=(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])), nprocs=RANKS)
