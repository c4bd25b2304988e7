"""One rank of a starting training run, timed: `start_rank.py ours|hand fsdp2|zero2 FOLDER`. Rank 0 prints JSON.

Its environment says which rank it is, and when it was started (BEGAN).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])


class Stopwatch:
    """Seconds from one mark to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = float(os.environ["BEGAN"])

    def mark(self, stage: str) -> None:
        """`stage` ends now."""
        now = time.time()
        self.seconds[stage] = now - self._last
        self._last = now


def ours(engine_kind: str, folder_path: str, watch: Stopwatch) -> None:
    """As `qwen_edit_zero/train.py` and `training/run.py` do it."""
    import qwen_edit_zero.train
    import qwen_edit_zero.training.run  # noqa: F401  (what the command imports, whether used here or not)
    from benchmarks.engines import problem
    from qwen_edit_zero.cluster import process_group
    from qwen_edit_zero.cluster.identity import discover
    from qwen_edit_zero.edit_model.folder import open_model_folder
    from qwen_edit_zero.edit_model.initial import initial_source
    from qwen_edit_zero.edit_model.transformer import build_transformer
    from qwen_edit_zero.engines.factory import make_engine
    from qwen_edit_zero.training.task import EditTask

    watch.mark("import")
    run = problem.settings(engine_kind)
    identity = discover()
    device = process_group.start(identity, timeout_seconds=300, device="cpu")
    watch.mark("meet")
    folder = open_model_folder(folder_path)
    engine = make_engine(run, device=device)
    with engine.init_context():
        module = build_transformer(folder)
    watch.mark("build")
    source = initial_source(folder, module, seed=0)
    engine.setup(module, optimizer=run.optimizer, weights=source)
    watch.mark("load")
    task = EditTask(folder, run)
    problem.run_backward(engine, task, problem.batches(0, identity.rank, 1)[0], is_last=True)
    engine.step(lr=1e-4)
    watch.mark("first step")
    engine.close()
    process_group.stop()


def by_hand(engine_kind: str, folder_path: str, watch: Stopwatch) -> None:
    """As one writes it: `from_pretrained`, then `fully_shard` or `deepspeed.initialize`."""
    import torch
    import torch.distributed as dist
    from diffusers import QwenImageTransformer2DModel
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if engine_kind == "zero2":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for minutes
    watch.mark("import")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    watch.mark("meet")
    module: Any = QwenImageTransformer2DModel.from_pretrained(
        Path(folder_path) / "transformer", torch_dtype=torch.float32
    ).train()
    watch.mark("load")
    forward: Callable[..., Any]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    if engine_kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in module.transformer_blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(module, mp_policy=policy)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        forward = module
    else:
        from benchmarks.engines import peers, problem

        config = peers.plain_deepspeed_config(problem.deepspeed_config("zero2"), dist.get_world_size(), 1)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        forward = peers.in_bf16(engine)
    watch.mark("build")
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(1, 128, 64, generator=generator)
    output = forward(
        hidden_states=tokens,
        timestep=torch.rand(1, generator=generator),
        encoder_hidden_states=torch.randn(1, 16, 192, generator=generator),
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, 8, 8), (1, 8, 8)]],
        return_dict=False,
    )[0]
    loss = output[:, :64].float().square().mean()
    if engine_kind == "fsdp2":
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    else:
        engine.backward(loss)
        engine.step()
    watch.mark("first step")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start, and say how long each stage took."""
    loop, engine_kind, folder = sys.argv[1:]
    watch = Stopwatch()
    (ours if loop == "ours" else by_hand)(engine_kind, folder, watch)
    if os.environ["RANK"] == "0":
        print(json.dumps(watch.seconds))


if __name__ == "__main__":
    main()
