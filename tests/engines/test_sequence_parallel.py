"""Sequence parallelism: ranks that split the tokens of a sample train as one rank does, under every engine.

The contract's problem has 12 image and 3 text tokens, so that two ranks never have equal shares of both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.edit_model.sequence_parallel import check_heads, split_sequences
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.ranks import keep_inside_nodes
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import LoraSettings
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.engines.problem import OPTIMIZER, POISONED_STEP
from tests.ranks import run_ranks

STEPS = range(5)  # with a short batch, a skipped step and clipped ones
CASES = [
    ("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2),
    ("fsdp2", 4), ("fsdp2-hybrid", 4), ("zero3", 4), ("ddp", 4), ("zero2", 4),
]  # fmt: skip


def build(kind: str, source: MemorySource, *, size: int = 2, frozen: bool = False, **settings: Any) -> ParallelEngine:
    engine = make_engine(harness.engine_settings(kind, sequence_parallel=size, **settings), device=harness.CPU)
    module = problem.make_engine_model(engine, frozen=frozen)
    if engine.ranks.sequence_group is not None:
        split_sequences(module.transformer, engine.ranks.sequence_group)
    engine.setup(module, optimizer=OPTIMIZER, weights=source)
    return engine


def train(rank: int, world: int, kind: str, frozen: bool, checkpointing: str) -> bytes:
    source = MemorySource.of_weights(problem.weights_of(problem.make_model(frozen=frozen)))
    engine = build(kind, source, frozen=frozen, checkpointing=checkpointing)
    report: dict[str, Any] = {"names": [name for name, _ in engine.module.named_parameters()]}
    report["losses"], report["results"] = problem.train_with(
        engine, micro=2, steps=STEPS, poisoned_rank=engine.dp_size - 1
    )
    report["same"] = harness.same_on_all_ranks([r.grad_norm for r in report["results"] if r.applied])
    report["weights"] = dict(engine.full_weights())
    state, scalars = harness.whole_state(engine), engine.scalars()
    with engine.eval_mode():
        report["evaluation"] = problem.loss_sum(engine.forward, problem.samples(99, 2)).item()
    report["place"] = (engine.dp_rank, engine.dp_size, engine.ranks.sequence_rank)
    engine.close()

    if not frozen:  # the state is that of any other engine: it goes on without sequence parallelism, to the bit
        other = build("ddp", MemorySource.of_weights({n: t + 1 for n, t in source.tensors["param"].items()}), size=1)
        other.load_state(state, scalars)
        report["holds what it loaded"] = harness.whole_state(other) == state and other.scalars() == scalars
        other.close()
    return harness.packed(report)


@pytest.fixture(scope="module")
def plain() -> dict[bool, dict[str, Any]]:
    outcome = {}
    for frozen in (False, True):
        model = problem.make_model(frozen=frozen)
        losses, norms = problem.train_plainly(model, OPTIMIZER, steps=range(5))
        weights = problem.weights_of(model)
        outcome[frozen] = {"losses": losses, "norms": norms, "weights": weights}
        with torch.no_grad():
            outcome[frozen]["evaluation"] = problem.loss_sum(model.eval(), problem.samples(99, 2)).item()
    return outcome


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_ranks_that_split_sequences_train_as_one_rank(kind: str, world: int, plain: dict[bool, dict[str, Any]]) -> None:
    frozen = kind in ("ddp", "zero1")
    checkpointing = "selective" if (kind, world) == ("fsdp2", 4) else "none" if kind == "zero2" else "block"
    reports = [harness.unpacked(r) for r in run_ranks(train, world, kind, frozen, checkpointing)]
    expected = plain[frozen]
    assert [r["place"] for r in reports] == [(rank // 2, world // 2, rank % 2) for rank in range(world)]
    losses = [sum(r["losses"][step] for r in reports[::2]) for step in STEPS]
    results = reports[0]["results"]
    deviations = {
        "loss": max(map(problem.relative, losses, expected["losses"])),
        "norm": max(
            problem.relative(results[step].grad_norm, expected["norms"][step])
            for step in STEPS
            if step != POISONED_STEP
        ),
        "weights": problem.largest_deviation(reports[0]["weights"], expected["weights"]),
        "evaluation": problem.relative(reports[0]["evaluation"], expected["evaluation"]),
    }
    print(kind, world, "  ".join(f"{name} {value:.1e}" for name, value in deviations.items()))
    assert max(deviations.values()) < 1e-5, deviations
    for report in reports:
        assert report["names"] == list(expected["weights"])
        assert report["same"]
        assert [r.applied for r in report["results"]] == [step != POISONED_STEP for step in STEPS]
        assert frozen or report["holds what it loaded"]


def one_sample_in_parts(rank: int, world: int, variant: dict[str, Any]) -> bytes:
    """Output, and gradients summed over ranks, of the bare transformer; with `world` 1 not split at all."""
    torch.manual_seed(3)
    model = QwenImageTransformer2DModel(
        in_channels=8, out_channels=2, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=12, axes_dims_rope=(2, 2, 4), zero_cond_t=variant["zero_cond_t"],
    )  # fmt: skip
    if variant["lora"]:
        add_lora(model, LoraSettings(rank=2, targets=("attn.to_q", "attn.add_v_proj")))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    if variant["compile"]:
        for block in model.transformer_blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")  # traced, without the slow last stage
    if world > 1:
        split_sequences(model, dist.group.WORLD)
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    output = model(
        hidden_states=torch.randn(2, 11, 8, generator=generator),
        encoder_hidden_states=torch.randn(2, 5, 12, generator=generator)[:, : variant["text"]],
        encoder_hidden_states_mask=mask[:, : variant["text"]] if variant["masked"] else None,
        timestep=torch.tensor([0.3, 0.9]),
        img_shapes=[[(1, 1, 3), (1, 2, 4)]] * 2,
        return_dict=False,
    )[0]
    (output[:, :3].square().sum() / world).backward()
    for parameter in model.parameters():
        if world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    gradients = {  # a parameter without a part in it may have none or zero
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return harness.packed({"output": output.detach(), **gradients})


DEFAULT = {"masked": False, "zero_cond_t": False, "lora": False, "compile": False, "text": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "padded text": {"masked": True},
    "no conditioning noise on references": {"zero_cond_t": True},
    "adapters": {"lora": True, "masked": True},
    "compiled": {"compile": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_input_of_the_model_is_split_rightly(name: str) -> None:
    variant = DEFAULT | VARIANTS[name]
    plain = harness.unpacked(one_sample_in_parts(0, 1, variant | {"compile": False}))
    world = 2 if variant["compile"] else 4
    for part in map(harness.unpacked, run_ranks(one_sample_in_parts, world, variant)):
        assert part.keys() == plain.keys()
        assert problem.largest_deviation(part, plain) < 1e-5


def test_sizes_that_heads_or_ranks_cannot_be_split_into_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"24 attention heads.*Sizes that fit: 1, 2, 3, 4, 6, 8, 12, 24"):
        check_heads(5, 24)


def refusals(rank: int, world: int) -> tuple[str, str]:
    with pytest.raises(SettingsError) as too_short:
        one_sample_in_parts(rank, world, DEFAULT | {"text": 3})
    with pytest.raises(SettingsError) as uneven:
        make_engine(harness.engine_settings("ddp", sequence_parallel=3), device=harness.CPU)
    return str(too_short.value), str(uneven.value)


def test_what_cannot_be_split_over_the_ranks_is_refused_on_all_of_them() -> None:
    for too_short, uneven in run_ranks(refusals, 4):
        assert "11 image and 3 text tokens" in too_short
        assert "does not divide the 4 ranks" in uneven
        assert "Sizes that do: 1, 2, 4." in uneven


@pytest.mark.parametrize(("on_node", "size", "refused"), [(8, 4, False), (8, 16, False), (8, 3, True), (6, 4, True)])
def test_groups_that_would_cross_nodes_are_refused(
    on_node: int, size: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))
    if refused:
        with pytest.raises(SettingsError, match=rf"{size} with {on_node} ranks on a node"):
            keep_inside_nodes(size)
    else:
        keep_inside_nodes(size)
