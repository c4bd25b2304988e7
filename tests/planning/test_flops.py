"""The count of arithmetic against what PyTorch counts while it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.known import RELEASED as CONFIGS
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.passes.activations import trace_of
from qwen_edit_zero.planning.passes.flops import forward_flops, step_flops, training_flops
from tests.planning.transformers import MIDDLE, SMALL, given_of, inputs_of, job, loss_of, module_of

_ATEN: Any = torch.ops.aten
_EDGES = ["img_in.*", "txt_in.*", "txt_norm.*", "time_text_embed.*"]


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop(query, key, value)


def _backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop(gradient, query, key, value)


CPU_ATTENTION = {  # which PyTorch's own table lacks
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counted(one: Job, config: Mapping[str, Any], *, masked: bool = False) -> tuple[int, int]:
    """FLOP of forward, and of all, by PyTorch."""
    module, inputs, given = module_of(one, config), inputs_of(one, masked=masked), given_of(one)
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        loss = loss_of(one, module, inputs, given)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": "block"},
        {"activation_checkpointing": "block", "checkpoint_every": 2},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "block", "attention": "_native_math"},
        {"lora": {"rank": 4}, "activation_checkpointing": "block"},
        {"lora": {"rank": 2, "targets": ["to_q", "img_mod.1"]}, "activation_checkpointing": "block"},
        {"freeze": ["*.weight"], "activation_checkpointing": "block"},
        {"freeze": [*_EDGES, "*mlp*", "*mod*", "proj_out.*", "norm_out.*"], "activation_checkpointing": "block"},
        {"freeze": [*_EDGES, "transformer_blocks.[01].*"], "activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_flops_of_a_micro_batch_are_exactly_those_that_pytorch_counts(engine: str, changes: dict[str, Any]) -> None:
    """Frozen weights, the first blocks without gradients, and the last one's unused text output included."""
    if engine == "zero3" and changes.get("activation_checkpointing") == "selective":
        changes = changes | {"activation_checkpointing": "block"}
    one = job(SMALL, engine=engine, **changes)
    found = trace_of(one, on_gpu=False)
    forward, total = counted(one, SMALL)
    assert found.forward_flops == forward
    assert found.forward_flops + found.recomputed_flops + found.backward_flops == total


@pytest.mark.parametrize("config", [MIDDLE, SMALL | {"zero_cond_t": True}, SMALL | {"num_layers": 1}], ids=str)
@pytest.mark.parametrize(
    "sample", [SampleShape((6, 4), ((4, 4), (2, 6)), 10), SampleShape((4, 4), ((6, 2),), 1)], ids=str
)
def test_flops_are_exact_for_other_models_and_samples(config: dict[str, Any], sample: SampleShape) -> None:
    one = job(config, sample=sample, micro=2, activation_checkpointing="block")
    found = trace_of(one, on_gpu=False)
    assert found.forward_flops + found.recomputed_flops + found.backward_flops == counted(one, config, masked=True)[1]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, {"rank": 1}])
def test_flops_of_any_sample_follow_from_four(checkpointing: bool, lora: dict[str, Any] | None) -> None:
    """What training counts in every step is a polynomial; scores computed again by kernels are in neither."""
    sample = SampleShape((31, 17), ((5, 7),), 43)
    one = job(SMALL, sample=sample, lora=lora, activation_checkpointing="block" if checkpointing else "none")
    found = trace_of(one)
    polynomial = training_flops(
        SMALL,
        image_tokens=sample.image_tokens,
        text_tokens=sample.text_tokens,
        checkpointing=checkpointing,
        adapters_only=lora is not None,
    )
    assert polynomial == found.forward_flops + found.recomputed_flops + found.backward_flops - found.scores_again
    assert forward_flops(TransformerShape.from_config(SMALL), sample) == (
        trace_of(job(SMALL, sample=sample)).forward_flops
    )


def test_a_step_has_the_flops_of_its_samples_however_it_is_split() -> None:
    whole = step_flops(job(SMALL, micro=4))
    assert step_flops(job(SMALL, micro=2, world=2)) == whole
    assert step_flops(job(SMALL, engine="ddp", micro=1, world=4)) == whole
    assert whole.all == whole.useful + whole.recomputed
    recomputed = step_flops(job(SMALL, micro=4, activation_checkpointing="block"))
    assert recomputed.useful == whole.useful
    assert recomputed.recomputed > whole.recomputed > 0


@pytest.mark.parametrize("name", ["Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"])
def test_the_released_models_at_1024_with_one_reference(name: str) -> None:
    """The closed form of the docstring, to the share that its small terms have."""
    width, blocks, tokens = 3072, 60, 2 * 4096 + 250
    closed = 24 * width**2 * tokens * blocks + 4 * tokens**2 * width * blocks
    four = training_flops(CONFIGS[name], image_tokens=8192, text_tokens=250, checkpointing=True)
    three = training_flops(CONFIGS[name], image_tokens=8192, text_tokens=250, checkpointing=False)
    assert four == pytest.approx(4 * closed, rel=1e-3)
    assert three == pytest.approx(3 * closed, rel=1e-3)
