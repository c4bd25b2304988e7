"""A run begun with raw DeepSpeed or raw FSDP2 goes on here, under another engine, as if it had not been moved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen_edit_zero import cli
from qwen_edit_zero.checkpoints.foreign.recognise import open_foreign
from qwen_edit_zero.checkpoints.importing import import_checkpoint
from qwen_edit_zero.checkpoints.optimizer_groups import OptimizerGroup, group_changes, groups_of, saved_groups
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.same_as_base import compare_frozen
from qwen_edit_zero.cli import main
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.errors import CheckpointError, SettingsError
from qwen_edit_zero.training.run_folder import take
from tests.checkpoints import foreign_runs
from tests.checkpoints.states import save
from tests.end_to_end.commands import metrics, run
from tests.engines import harness, problem
from tests.ranks import run_ranks

STEPS, MORE = 3, 4


def _go_on(rank: int, world: int, kind: str, checkpoint: Path) -> list[float]:
    """Resume under an engine of this package; this rank's share of the next losses."""
    engine = make_engine(harness.engine_settings(kind), device=torch.device("cpu"))
    weights = problem.weights_of(foreign_runs.make_model(frozen=True))
    module = problem.make_engine_model(engine, frozen=True)
    with engine.init_context():
        module.gain = torch.nn.Parameter(torch.empty(1))
    engine.setup(module, optimizer=problem.OPTIMIZER, weights=harness.MemorySource.of_weights(weights))
    with CheckpointReader(checkpoint) as reader:
        engine.load_state(reader, reader.run_state["engine"])
    losses, _ = problem.train_with(engine, micro=2, steps=range(STEPS, STEPS + MORE))
    engine.close()
    return losses


def _imported(source: Path, tmp_path: Path, said: list[str]) -> Path:
    base = foreign_runs.base_of(foreign_runs.make_model(frozen=True), tmp_path / "base")
    return import_checkpoint(source, tmp_path / "run", base=base, say=said.append)


def _check(uninterrupted: list[float], engine: str, checkpoint: Path) -> None:
    shares = run_ranks(_go_on, 2, engine, checkpoint)
    for found, expected in zip(map(sum, zip(*shares, strict=True)), uninterrupted, strict=True):
        assert problem.relative(found, expected) < 2e-5


@pytest.mark.parametrize(
    ("stage", "world", "zero", "engine"),
    [
        pytest.param(1, 2, {}, "fsdp2", marks=pytest.mark.slow),
        (2, 3, {"round_robin_gradients": True}, "zero3"),
        (3, 2, {"sub_group_size": 3000, "stage3_param_persistence_threshold": 100}, "ddp"),
    ],
)
def test_deepspeed_runs_go_on(stage: int, world: int, zero: dict[str, Any], engine: str, tmp_path: Path) -> None:
    source = tmp_path / "ds"
    losses = run_ranks(foreign_runs.train_deepspeed, world, source, stage, STEPS, MORE, zero)[0]
    said: list[str] = []
    checkpoint = _imported(source, tmp_path, said)
    assert checkpoint == tmp_path / "run" / "checkpoints" / "step-00000003"
    with CheckpointReader(checkpoint) as reader:
        assert reader.run_state["engine"]["optimizer_steps"] == STEPS
        assert "parameter_steps" not in reader.run_state["engine"]
        assert saved_groups(reader.run_state) == (OptimizerGroup(0.1, 1.0, tuple(reader.names())),)
        assert reader.manifest.engine.startswith("DeepSpeed ")
        assert "transformer.img_in.weight" in reader.manifest.model.frozen
    _check(losses, engine, checkpoint)
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        _imported(source, tmp_path, [])
    other = foreign_runs.make_model(frozen=True)
    other.transformer.img_in.weight.data[-1, -1] += 1
    base = foreign_runs.base_of(other, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"img_in\.weight did not train, but is not what .* another base model"):
        import_checkpoint(source, tmp_path / "second", base=base)
    assert not (tmp_path / "second").exists()
    assert any("frozen parameters are those of" in line and "every element compared" in line for line in said)
    told: list[str] = []
    import_checkpoint(source, tmp_path / "second", base=base, trust_frozen=True, say=told.append)
    assert any("without a look at them" in line for line in told)


@pytest.mark.parametrize(
    ("style", "engine"),
    [("torchtitan", "zero2"), pytest.param("lightning", "ddp", marks=pytest.mark.slow), ("accelerate", "zero1")],
)
def test_fsdp2_runs_go_on(style: str, engine: str, tmp_path: Path) -> None:
    source = tmp_path / "dcp"
    losses = run_ranks(foreign_runs.train_fsdp2, 2, source, style, STEPS, MORE)[0]
    said: list[str] = []
    checkpoint = _imported(source, tmp_path, said)
    assert any("never had a gradient and get moments of zero: " in line for line in said)
    with CheckpointReader(checkpoint) as reader:
        counts = reader.run_state["engine"]
        assert counts["optimizer_steps"] == STEPS
        assert counts["parameter_steps"] == dict.fromkeys(counts["parameter_steps"], 0)
        assert "unused" in counts["parameter_steps"]
        assert "before.weight" not in counts["parameter_steps"]
        (group,) = saved_groups(reader.run_state)
        assert (group.weight_decay, set(group.parameters or ())) == (0.1, set(reader.names()))
    _check(losses, engine, checkpoint)


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_of_the_optimizer_are_known_and_changes_are_told(stage: int, tmp_path: Path) -> None:
    zero = {"sub_group_size": 3000} if stage == 3 else {}
    second = {"weight_decay": 0.0, "lr": problem.OPTIMIZER.lr / 4}
    run_ranks(foreign_runs.train_deepspeed, 2, tmp_path / "ds", stage, 0, 0, zero, False, second)
    state = open_foreign(tmp_path / "ds")
    trained = [n for n, p in foreign_runs.make_model(frozen=True).named_parameters() if p.requires_grad]
    assert {(g.weight_decay, g.lr): set(g.names) for g in state.groups} == {
        (0.1, problem.OPTIMIZER.lr): set(trained[:7]), (0.0, problem.OPTIMIZER.lr / 4): set(trained[7:])
    }  # fmt: skip
    there = [OptimizerGroup(0.1, 1.0, tuple(trained[:7])), OptimizerGroup(0.0, 0.25, tuple(trained[7:]))]
    told = group_changes(there, groups_of(problem.OPTIMIZER), trained)
    shown = f"of {len(trained) - 7} parameters ({', '.join(trained[7:10])} ...): "
    assert told == [
        f"optimizer.weight_decay {shown}0 there, 0.1 here",
        f"learning rate, times that of the schedule, {shown}0.25 there, 1 here",
    ]
    assert group_changes((), groups_of(problem.OPTIMIZER), trained) == []


def test_numbered_optimizer_state_with_frozen_parameters_is_refused(tmp_path: Path) -> None:
    run_ranks(foreign_runs.train_fsdp2, 2, tmp_path / "dcp", "numbered", 1, 0)
    with pytest.raises(CheckpointError, match="numbers 76 parameters without naming them"):
        _imported(tmp_path / "dcp", tmp_path, [])
    assert not (tmp_path / "run").exists()


def test_a_run_of_ours_needs_no_import(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1)
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000001"):
        with pytest.raises(CheckpointError, match=f"needs no import: train with --resume {source}"):
            import_checkpoint(source, tmp_path / "other", base=open_model_folder("tiny"))


def test_nothing_is_imported_into_a_run_that_is_going_on(tmp_path: Path) -> None:
    source, mine = tmp_path / "dcp", tmp_path / "mine"
    source.mkdir()
    (source / ".metadata").touch()
    with take(mine), pytest.raises(SettingsError) as refused:
        cli._run(["checkpoint", "import", str(source), str(mine), "--base", "tiny"])
    assert f"the run folder {mine} is in use by process {os.getpid()} on " in str(refused.value)
    assert not (mine / "checkpoints").exists()


class _Stored:
    """One frozen tensor as another program stored it."""

    path = Path("their")

    def __init__(self, values: torch.Tensor, dtype: str) -> None:
        self._bytes, self._dtype = values.view(torch.uint8).numpy(), dtype

    def dtype(self, name: str) -> str:
        return self._dtype

    def stream(self, name: str, start: int, length: int, *, window: int) -> Iterator[Any]:
        for done in range(0, len(self._bytes), window):
            yield self._bytes[done : done + window]


@pytest.mark.parametrize(("theirs", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_every_element_of_a_frozen_parameter_is_compared(theirs: torch.dtype, name: str, tmp_path: Path) -> None:
    count = 2 * 2**20 + 11  # three windows
    ours = torch.randn(count, generator=torch.Generator().manual_seed(0))
    (tmp_path / "base").write_bytes(bytes(24) + ours.numpy().tobytes())
    base: Any = {"w": SimpleNamespace(path=tmp_path / "base", dtype="F32", shape=(count,), offset=24)}
    passed: list[int] = []
    source: Any = _Stored(ours.to(theirs), name)
    compare_frozen(source, {"w": "module.w"}, base, passed.append)
    assert sum(passed) == count * theirs.itemsize
    for element in (0, 2**17, 2**20 - 1, 2**20, count - 1):
        changed = ours.to(theirs, copy=True)
        changed[element] += 1
        source = _Stored(changed, name)
        with pytest.raises(CheckpointError, match=rf"w did not train, but is not what .* element {element}: another"):
            compare_frozen(source, {"w": "module.w"}, base, passed.append)


def _save_tiny(rank: int, world: int, out: Path) -> None:
    """Two steps of the tiny model's transformer with raw DeepSpeed, wrapped as a trainer would wrap it."""
    import deepspeed
    from diffusers import QwenImageTransformer2DModel

    base = open_model_folder("tiny")
    transformer = QwenImageTransformer2DModel.from_pretrained(base.path / "transformer", torch_dtype=torch.float32)
    model = torch.nn.ModuleDict({"transformer": transformer})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for _ in range(2):
        engine.backward(torch.stack([p.square().sum() for p in engine.module.parameters()]).sum() * 1e-3)
        engine.step()
    engine.save_checkpoint(str(out))


@pytest.mark.slow
def test_the_training_command_goes_on_from_what_was_imported(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_save_tiny, 2, tmp_path / "ds")
    assert main(["checkpoint", "import", str(tmp_path / "ds"), str(tmp_path / "mine"), "--base", "tiny"]) == 0
    assert "taken off the front of the names: transformer." in capsys.readouterr().out
    ended = run("python", recipe, "--engine", "fsdp2", f"run.dir={tmp_path}", "run.name=mine", cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert "(step 2, written by DeepSpeed " in ended.text
    assert [m["step"] for m in metrics(tmp_path / "mine")] == [3, 4]
