"""Training with raw DeepSpeed and raw FSDP2, as somebody without this package does it, and what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from qwen_edit_zero.edit_model.shards import Shards
from qwen_edit_zero.safetensors_file import StoredTensor, read_header
from tests.engines import harness, problem


def make_model(*, frozen: bool) -> problem.OddModel:
    """The tests' problem with a buffer; raw DeepSpeed cannot broadcast its 0-d parameter, so that it is 1-D here."""
    model = problem.make_model(frozen=frozen)
    model.gain = torch.nn.Parameter(model.gain.detach().view(1))
    model.register_buffer("places", torch.arange(5.0))
    return model


def _losses(forward: Any, optimizer_step: Any, backward: Any, steps: range, rank: int, world: int) -> list[float]:
    """The loss of every step, over all ranks; gradients are those of the mean, since both raw engines average."""
    losses = []
    for step in steps:
        drawn = problem.samples(step, problem.COUNTS[step])
        loss = problem.loss_sum(forward, drawn[rank::world]) * world / len(drawn)
        total = loss.detach().clone() / world
        dist.all_reduce(total)
        losses.append(total.item())
        backward(loss)
        optimizer_step(problem.lr_at(step))
    return losses


def train_deepspeed(
    rank: int,
    world: int,
    out: Path,
    stage: int,
    steps: int,
    more: int,
    zero: dict[str, Any],
    bf16: bool = False,
    second: dict[str, Any] | None = None,
) -> list[float]:
    """Train `steps` steps, save with DeepSpeed's own method, and return the losses of `more` further steps.

    `second` are options of the second of two optimizer groups.
    """
    import deepspeed

    model = make_model(frozen=True)
    optimizer = problem.OPTIMIZER
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.clip_norm,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
    }
    groups = [{"params": trained[:7]}, {"params": trained[7:], **(second or {})}]
    adamw = torch.optim.AdamW(
        groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)

    def step(lr: float) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        engine.step()

    def forward(**inputs: Any) -> torch.Tensor:
        if bf16:
            inputs = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return engine(**inputs)

    _losses(forward, step, engine.backward, range(steps), rank, world)
    engine.save_checkpoint(str(out))
    losses = _losses(forward, step, engine.backward, range(steps, steps + more), rank, world)
    engine.destroy()
    return losses


def train_fsdp2(rank: int, world: int, out: Path, style: str, steps: int, more: int) -> list[float]:
    """The same with fully_shard and torch.distributed.checkpoint, laid out as in torchtitan, Lightning, accelerate."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    model = make_model(frozen=True)
    fully_shard(model)
    optimizer = problem.OPTIMIZER
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )

    def step(lr: float) -> None:
        torch.nn.utils.clip_grad_norm_(trained, optimizer.clip_norm or float("inf"))
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        adamw.zero_grad()

    _losses(model, step, torch.Tensor.backward, range(steps), rank, world)
    weights = get_model_state_dict(model)
    moments = get_optimizer_state_dict(
        model, adamw, options=StateDictOptions(flatten_optimizer_state_dict=style == "torchtitan")
    )
    if style == "torchtitan":
        dcp.save({**weights, "optimizer": moments, "train_state": {"step": torch.tensor(steps)}}, checkpoint_id=out)
    elif style == "lightning":
        dcp.save({"model": weights, "optimizer_0": moments}, checkpoint_id=out)
    elif style == "numbered":
        dcp.save({"model": weights, "optim": adamw.state_dict()}, checkpoint_id=out)
    else:
        assert style == "accelerate"
        dcp.save({"model": weights}, checkpoint_id=out / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": moments}, checkpoint_id=out / "optimizer_0")
    return _losses(model, step, torch.Tensor.backward, range(steps, steps + more), rank, world)


def save_fsdp1(rank: int, world: int, out: Path) -> bytes:
    """Two steps under FSDP1, saved in its sharded form; returns the whole weights."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module = make_model(frozen=False)
    wrapped = ModuleWrapPolicy({type(module.transformer.transformer_blocks[0])})
    model = Fsdp(module, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=wrapped)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(lr: float) -> None:
        adamw.step()
        adamw.zero_grad()

    _losses(model, step, torch.Tensor.backward, range(2), rank, world)
    Fsdp.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"model": model.state_dict(), "optim": Fsdp.optim_state_dict(model, adamw)}, checkpoint_id=out)
    Fsdp.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    return harness.packed(model.state_dict())


@dataclass(frozen=True)
class Base:
    """A stand-in for the model folder that was trained from."""

    path: Path
    shards: Mapping[str, Shards]
    fingerprint: str = "f" * 32
    transformer_config: Mapping[str, Any] = None  # type: ignore[assignment]


def base_of(model: torch.nn.Module, folder: Path, prefix: str = "") -> Base:
    """The initial weights as a model folder whose transformer is the part of the model below `prefix`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n.removeprefix(prefix): p.detach() for n, p in model.named_parameters() if n.startswith(prefix)}
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(weights, path)
    tensors: dict[str, StoredTensor] = read_header(path)
    return Base(folder, {"transformer": Shards((path,), tensors)}, transformer_config={"num_layers": 2})
