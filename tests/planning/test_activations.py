"""What the planner says of activations against what PyTorch really keeps, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.passes.activations import Activations, activations
from tests.planning.transformers import MIDDLE, RELEASED, SAMPLE, SMALL, Measured, job, measure
from tests.ranks import run_ranks

_EDGES = ["img_in.*", "txt_in.*", "txt_norm.*", "time_text_embed.*"]
_BLOCK = {"activation_checkpointing": "block"}


def both(config: dict[str, Any] = SMALL, *, masked: bool = False, **options: Any) -> tuple[Measured, Activations]:
    one = job(config, **options)
    return measure(one, config, masked=masked), activations(one, on_gpu=False, masked=masked)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("fsdp2", "fp32"), ("fsdp2", "bf16"), ("fsdp2", "fp16"), ("ddp", "fp32"), ("ddp", "bf16"), ("ddp", "fp16"),
     ("zero2", "bf16"), ("zero3", "bf16")],
)  # fmt: skip
@pytest.mark.parametrize("micro", [1, 3])
def test_saved_tensors_are_exactly_those_of_autograd(engine: str, precision: str, micro: int) -> None:
    """Storages that saved-tensor hooks see, each once, without parameters and the batch. Batches of 3 have a mask."""
    measured, planned = both(engine=engine, precision=precision, micro=micro, masked=micro > 1)
    assert planned.kept == measured.saved == measured.kept
    assert planned.backward_peak == pytest.approx(measured.backward_peak, rel=0.03)
    assert planned.forward_peak == pytest.approx(measured.forward_peak, rel=0.01)


_CHANGES: list[dict[str, Any]] = [
    _BLOCK,
    _BLOCK | {"checkpoint_every": 2},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "selective", "attention": "_native_math"},
    {"lora": {"rank": 4}},
    {"lora": {"rank": 4}, **_BLOCK},
    {"lora": {"rank": 2, "targets": ["to_q", "img_mod.1"]}},
    {"freeze": ["*_mod.*"]},
    {"freeze": ["*.weight"], **_BLOCK},
    {"freeze": [*_EDGES, "transformer_blocks.[01].*"]},
    {"freeze": [*_EDGES, "transformer_blocks.[01].*"], **_BLOCK},
    {"freeze": [*_EDGES, "*mlp*", "*mod*", "proj_out.*", "norm_out.*"]},
]


_CASES = [  # ZeRO-3 refuses selective checkpointing
    (engine, changes)
    for engine in ("ddp", "fsdp2", "zero3")
    for changes in _CHANGES
    if engine != "zero3" or changes.get("activation_checkpointing") != "selective"
]


@pytest.mark.parametrize(("engine", "changes"), _CASES, ids=str)
def test_what_is_alive_between_forward_and_backward_is_exact(engine: str, changes: dict[str, Any]) -> None:
    """Checkpointed, frozen and adapted in all ways; peaks, which depend on PyTorch's temporaries, to some percent."""
    measured, planned = both(MIDDLE, engine=engine, **changes)
    assert planned.kept == measured.kept
    assert planned.forward_peak == pytest.approx(measured.forward_peak, rel=0.04)
    assert 0.97 * measured.backward_peak <= planned.backward_peak <= 1.06 * measured.backward_peak


@pytest.mark.parametrize("changes", [{}, _BLOCK], ids=str)
def test_models_with_two_times_keep_conditions_and_chosen_modulations(changes: dict[str, Any]) -> None:
    measured, planned = both(MIDDLE | {"zero_cond_t": True}, micro=2, masked=True, **changes)
    assert planned.kept == measured.kept


def test_weighted_losses_and_attention_in_single_products_are_exact() -> None:
    measured, planned = both(mask_weight=2.0, attention="_native_math", micro=2, masked=True)
    assert planned.kept == measured.kept


def test_blocks_that_do_the_same_are_run_once_and_counted_all() -> None:
    sample = SampleShape((4, 4), ((4, 4),), 6)
    short, long = (activations(job(SMALL | {"num_layers": n}, sample=sample)) for n in (3, 30))
    next_one = activations(job(SMALL | {"num_layers": 4}, sample=sample))
    assert long.kept == short.kept + 27 * (next_one.kept - short.kept)
    assert sum(long.by_operation.values()) == long.saved + long.outside
    measured, planned = both(SMALL | {"num_layers": 9}, sample=sample, checkpoint_every=3, **_BLOCK)
    assert planned.kept == measured.kept


def test_inputs_of_blocks_in_host_memory_leave_the_device() -> None:
    kept, moved = (activations(job(MIDDLE, offload_activations=on, **_BLOCK)) for on in (False, True))
    tokens, text, width = 52, 10, 192  # of the sample's pictures and prompt
    streams = 2 * width * tokens, 2 * width * text, 2 * width
    assert kept.host == 0
    # Page-locked memory comes in powers of two.
    assert moved.host == MIDDLE["num_layers"] * sum(1 << (size - 1).bit_length() for size in streams)
    assert kept.saved - moved.saved == MIDDLE["num_layers"] * sum(streams[:2])


def test_gpus_compute_norms_under_autocast_in_fp32() -> None:
    """Which makes DDP keep more on a GPU than where it can be measured here; engines with bf16 weights do not."""
    cpu, gpu = (activations(job(engine="ddp"), on_gpu=on) for on in (False, True))
    assert gpu.saved > 1.1 * cpu.saved
    cpu, gpu = (activations(job(engine="fsdp2"), on_gpu=on) for on in (False, True))
    assert cpu.saved < gpu.saved < 1.01 * cpu.saved  # means and deviations of norms in fp32


@pytest.mark.parametrize("changes", [{}, _BLOCK], ids=str)
def test_a_block_of_the_released_model_keeps_what_is_said_at_1024(changes: dict[str, Any]) -> None:
    """With tensors that have no values. Bytes between forward and backward exactly, peaks to 1 %."""
    one = job(RELEASED, sample=SampleShape.of(1024 * 1024), **changes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        measured = measure(one, RELEASED)
    planned = activations(one, on_gpu=False)
    assert planned.kept == measured.kept
    assert planned.forward_peak == pytest.approx(measured.forward_peak, rel=0.01)
    assert planned.backward_peak == pytest.approx(measured.backward_peak, rel=0.01)


_SPLIT: list[dict[str, Any]] = [
    {"engine": "fsdp2"},
    {"engine": "ddp", "micro": 2},
    {"engine": "fsdp2", "micro": 2, "activation_checkpointing": "block"},
    {"engine": "fsdp2", "activation_checkpointing": "selective"},
]


def _measure_split(rank: int, world: int) -> list[tuple[int, ...]]:
    """Least of several tries: gloo's thread may hold what it has sent a moment longer."""
    found = []
    for options in _SPLIT:
        one = job(SMALL, sample=_ODD, world=world, sequence=world, **options)
        tries = [measure(one, SMALL, masked=one.micro > 1) for _ in range(4)]
        found.append(tuple(min(getattr(t, name) for t in tries) for name in ("kept", "forward_peak", "backward_peak")))
    return found


_ODD = SampleShape(SAMPLE.target, ((3, 3),), 9)  # the first rank has one token of each stream more than the second


def test_the_first_of_the_ranks_that_split_sequences_keeps_what_is_said() -> None:
    """Exactly, and as much as any of them."""
    ranks = run_ranks(_measure_split, 2)
    for options, first, second in zip(_SPLIT, *ranks, strict=True):
        one = job(SMALL, sample=_ODD, world=2, sequence=2, **options)
        planned = activations(one, on_gpu=False, masked=one.micro > 1)
        assert planned.kept == first[0] >= second[0], options
        assert planned.forward_peak == pytest.approx(first[1], rel=0.06), options
        assert planned.backward_peak == pytest.approx(first[2], rel=0.06), options
