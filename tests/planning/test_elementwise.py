"""The bytes a block's elementwise operations move are those of the operators that PyTorch dispatches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.passes.elementwise import elementwise_bytes, moved
from qwen_edit_zero.settings.models import LoraSettings, Settings

WIDTH, SMALL_IMAGE, SMALL_TEXT = 256, 64, 16
CONFIG = {
    "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 128, "joint_attention_dim": 64, "in_channels": 64,
    "out_channels": 16, "patch_size": 2, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip


class Moving(TorchDispatchMode):
    """Sums up the bytes of inputs and outputs of operators that are neither products nor views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if "attention" in name or name in ("mm", "addmm", "bmm") or name.startswith("empty"):
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if all(any(t.untyped_storage().data_ptr() == i.untyped_storage().data_ptr() for i in inputs) for t in outputs):
            return out  # a view
        self.bytes += sum(_bytes(t) for t in inputs + outputs)
        return out


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def counted(job: Job, scale: int) -> tuple[int, int]:
    """Bytes of a block's forward and backward passes with `scale` times as many tokens."""
    config = CONFIG | {"zero_cond_t": job.model.zero_cond_t}
    module = QwenImageTransformer2DModel.from_config(config)
    low, autocasts = job.settings.precision.mode == "bf16", job.kind == "ddp"
    dtype = torch.bfloat16 if low else torch.float32
    if job.settings.model.lora is not None:
        add_lora(module, job.settings.model.lora)
    if not autocasts:
        module = module.to(dtype)
    image, text = SMALL_IMAGE * scale, SMALL_TEXT * scale
    hidden, prompt = (torch.randn(1, n, WIDTH, dtype=dtype, requires_grad=True) for n in (image, text))
    time = torch.randn(2 if job.model.zero_cond_t else 1, WIDTH, dtype=dtype, requires_grad=True)
    positions = module.pos_embed([(1, image // 8, 8)], max_txt_seq_len=text, device="cpu")
    index = torch.zeros(1, image, dtype=torch.int) if job.model.zero_cond_t else None
    context = torch.autocast("cpu", dtype) if autocasts and low else contextlib.nullcontext()
    with Moving() as forward, context:
        outputs = module.transformer_blocks[0](hidden, prompt, None, time, positions, None, modulate_index=index)
    with Moving() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    return forward.bytes, backward.bytes


def job_of(**settings: Any) -> Job:
    zero_cond_t = settings.pop("zero_cond_t", False)
    sample = SampleShape((8, 8), (), 16)
    config = CONFIG | {"zero_cond_t": zero_cond_t}
    return make_job(Settings(**settings), cluster_world=1, gpus_per_node=1, sample=sample, config=config)


DDP, FSDP2 = {"backend": "ddp"}, {"backend": "fsdp2"}
RUN = {"max_steps": 1}


@pytest.mark.parametrize(
    "job",
    [
        job_of(run=RUN, engine=FSDP2),
        job_of(run=RUN, engine=DDP),
        job_of(run=RUN, engine=FSDP2, precision="fp32"),
        job_of(run=RUN, engine=FSDP2, zero_cond_t=True),
        job_of(run=RUN, engine=FSDP2, model={"lora": LoraSettings(rank=2)}),
        job_of(run=RUN, engine=DDP, model={"lora": LoraSettings(rank=2)}),
        job_of(run=RUN, engine=FSDP2, precision="fp32", model={"lora": LoraSettings(rank=2)}),
    ],
    ids=["bf16", "autocast", "fp32", "two times", "adapters", "adapters, autocast", "adapters, fp32"],
)
def test_bytes_of_an_element_are_those_counted(job: Job) -> None:
    few, many = counted(job, 2), counted(job, 6)
    elements = 4 * (SMALL_IMAGE + SMALL_TEXT) * WIDTH
    by_element = [(after - before) / elements for before, after in zip(few, many, strict=True)]  # without the weights
    assert by_element == pytest.approx(list(moved(job)), rel=0.03)


def test_a_step_has_as_many_passes_as_it_has() -> None:
    def of(**settings: Any) -> float:
        return elementwise_bytes(job_of(run=RUN, engine=FSDP2, batch={"global_size": 4}, **settings))

    plain = of(model={"activation_checkpointing": "none"})
    forward, backward = moved(job_of(run=RUN))
    assert plain == pytest.approx(4 * 80 * WIDTH * (forward + backward))
    assert of() == pytest.approx(4 * 80 * WIDTH * (2 * forward + backward))
    assert of(model={"activation_checkpointing": "none", "compile": True}) == pytest.approx(plain / 3)
