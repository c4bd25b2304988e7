"""Real transformers that compute as each engine lets them, and a count of what their tensors take."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.inputs import transformer_inputs
from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.edit_model.sequence_parallel import split_sequences
from qwen_edit_zero.edit_model.transformer import restore_position_tables, set_attention
from qwen_edit_zero.engines.blocks import prepare_blocks
from qwen_edit_zero.engines.parameters import replace_parameters
from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.settings.models import Settings

SMALL: dict[str, Any] = {
    "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "joint_attention_dim": 48,
    "in_channels": 64, "out_channels": 16, "axes_dims_rope": [8, 12, 12],
}  # fmt: skip
MIDDLE = SMALL | {"num_layers": 5, "num_attention_heads": 3, "attention_head_dim": 64, "axes_dims_rope": [16, 24, 24]}
RELEASED = SMALL | {
    "num_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584,
    "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
SAMPLE = SampleShape((6, 4), ((4, 4), (2, 6)), 10)
_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def job(
    config: Mapping[str, Any] = SMALL,
    *,
    engine: str = "fsdp2",
    precision: str = "bf16",
    micro: int = 1,
    sample: SampleShape = SAMPLE,
    mask_weight: float = 1.0,
    world: int = 1,
    sequence: int = 1,
    **model: Any,
) -> Job:
    """A job of one step over one micro-batch."""
    zero = engine in _STAGES
    deepspeed = {"zero_optimization": {"stage": _STAGES[engine]}} if zero else None
    return make_job(
        Settings.model_validate({
            "run": {"max_steps": 1},
            "model": {"activation_checkpointing": "none", **model},
            "data": {"mask_weight": mask_weight},
            "batch": {"global_size": micro * world // sequence, "micro_size": micro},
            "precision": precision,
            "engine": {"backend": "deepspeed" if zero else engine, "deepspeed": deepspeed,
                       "sequence_parallel": sequence},
        }),
        cluster_world=world,
        gpus_per_node=world,
        sample=sample,
        config=config,
    )  # fmt: skip


def module_of(job: Job, config: Mapping[str, Any], *, device: str = "cpu") -> QwenImageTransformer2DModel:
    """The transformer with dtypes, adapters, frozen parameters and checkpointed blocks as the job's engine has them."""
    settings, dtype = job.settings.model, DTYPES[job.settings.precision.mode]
    with torch.device(device):
        module = QwenImageTransformer2DModel.from_config(dict(config))
    restore_position_tables(module)
    set_attention(module, "native" if settings.attention == "auto" else settings.attention)
    if settings.lora is not None:
        add_lora(module, settings.lora)
    freeze(module, settings.freeze)
    if job.sequence > 1:
        assert dist.group.WORLD is not None
        split_sequences(module, dist.group.WORLD)
    prepare_blocks(module, settings, torch.device("cpu"), early_stop=job.kind != "zero3")
    keeps_fp32 = job.kind == "ddp"
    replace_parameters(
        module, lambda _, p: torch.zeros(p.shape, dtype=torch.float32 if keeps_fp32 and p.requires_grad else dtype,
                                         device=p.device)
    )  # fmt: skip
    if job.kind == "zero3":
        from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

        def linear(layer: torch.nn.Linear, hidden: torch.Tensor) -> Any:
            return LinearFunctionForZeroStage3.apply(hidden, layer.weight, layer.bias)

        for layer in module.modules():
            if type(layer) is torch.nn.Linear:
                layer.forward = functools.partial(linear, layer)  # type: ignore[method-assign]
    return module.train()


def inputs_of(job: Job, *, masked: bool) -> dict[str, Any]:
    """The transformer's arguments for one micro-batch of the job's samples, as training makes them."""
    sample, batch = job.sample, job.micro
    latents = [torch.zeros(batch, 16, 2 * rows, 2 * columns) for rows, columns in (sample.target, *sample.references)]
    mask = torch.ones(batch, sample.text_tokens, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[0, -1] = False
    prompt = torch.zeros(batch, sample.text_tokens, job.model.text_width)
    return transformer_inputs(latents[0], latents[1:], prompt, mask, torch.full((batch,), 0.5))


def loss_of(job: Job, module: torch.nn.Module, inputs: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> Any:
    """As `engines/*.forward`, `edit_model/loss.py` and `training/trainer.py`."""
    dtype = DTYPES[job.settings.precision.mode]
    autocast: Any = nullcontext()
    cast: Callable[[Any], Any] = lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
    if job.kind == "ddp":
        autocast, cast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32), lambda v: v
    with autocast:
        output = module(**{name: cast(value) for name, value in inputs.items()})[0]
    error = output[:, : job.sample.target_tokens].float() - given["velocity"]
    del output
    square = error.square().mean(dim=2)
    if "token_weights" in given:
        square = square * given["token_weights"].clone()
    losses = square.mean(dim=1) * given["weight"]
    return (losses * given["weight"]).sum() / 3.0


def given_of(job: Job) -> dict[str, torch.Tensor]:
    """What the loss is made of beside the prediction."""
    batch, tokens = job.micro, job.sample.target_tokens
    given = {"velocity": torch.zeros(batch, tokens, job.model.patch_size**2 * job.model.out_channels),
             "weight": torch.ones(batch)}  # fmt: skip
    if job.settings.data.mask_weight != 1.0:
        given["token_weights"] = torch.ones(batch, tokens)
    return given


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made inside, but those of `apart`: now, and at most."""

    def __init__(self, apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._apart = {tensor.untyped_storage()._cdata for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._apart:
            return
        self._sizes[key] = size
        self.live += size
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@dataclass
class Measured:
    """What one forward and backward pass took, in bytes: kept between the two, and at most in each of them."""

    kept: int
    saved: int
    forward_peak: int
    backward_peak: int
    by_shape: dict[tuple[Any, ...], int] = field(default_factory=dict)


def measure(job: Job, config: Mapping[str, Any], *, masked: bool = False) -> Measured:
    """Run one micro-batch on the CPU. Gradients of parameters are dropped as soon as they are there."""
    module = module_of(job, config)
    inputs, given = inputs_of(job, masked=masked), given_of(job)
    loss_of(job, module, inputs, given)  # position tables are kept from now on
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    apart = [*module.parameters(), *(v for v in inputs.values() if isinstance(v, torch.Tensor)), *given.values(),
             module.pos_embed.pos_freqs, module.pos_embed.neg_freqs]  # fmt: skip
    known = {tensor.untyped_storage()._cdata for tensor in apart}
    packed: list[weakref.ref[_Packed]] = []

    def pack(tensor: torch.Tensor) -> _Packed:
        held = _Packed(tensor)
        packed.append(weakref.ref(held))
        return held

    with LiveBytes(apart) as tracker:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss = loss_of(job, module, inputs, given)
        storages, shapes = {}, {}
        for reference in packed:
            if (held := reference()) is not None:
                storage = held.tensor.untyped_storage()
                if storage._cdata not in known:
                    storages[storage._cdata] = storage.nbytes()
                    shapes[(tuple(held.tensor.shape), held.tensor.dtype, storage._cdata)] = storage.nbytes()
                del storage
        held = None
        kept, forward_peak = tracker.live, tracker.peak
        tracker.peak = tracker.live
        loss.backward()
        own = loss.untyped_storage().nbytes()
    return Measured(kept - own, sum(storages.values()), forward_peak, tracker.peak, shapes)


class _Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor
