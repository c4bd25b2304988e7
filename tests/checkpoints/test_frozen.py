"""Checkpoints that have the frozen parameters, too: every bit of the model folder's, which is then not needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.checkpoints import frozen as frozen_parameters
from qwen_edit_zero.checkpoints.consolidate import consolidate
from qwen_edit_zero.checkpoints.describe import show_checkpoint
from qwen_edit_zero.checkpoints.frozen import FrozenInCheckpoint, FrozenInFolder, FrozenSource, share_of_frozen
from qwen_edit_zero.checkpoints.manifest import LoraReference, ModelReference
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import verify_checkpoint
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import CheckpointError, ModelFolderError, StorageError
from qwen_edit_zero.flat_state import FROZEN, PARAM
from tests.checkpoints.states import State, owned_ranges, save
from tests.checkpoints.trained_run import FROZEN as STILL
from tests.checkpoints.trained_run import Weights, reference
from tests.engines import harness, problem
from tests.ranks import run_ranks


class Sizes:
    """Parameters of these sizes and types, without values."""

    def __init__(self, sizes: dict[str, tuple[int, str]]) -> None:
        self._sizes = sizes

    def dtype(self, name: str) -> str:
        return self._sizes[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        return (self._sizes[name][0],)

    def stream(self, name: str, start: int, length: int) -> Any:
        raise AssertionError


@pytest.mark.parametrize("world", [1, 2, 3, 7, 100])
def test_ranks_share_frozen_parameters_evenly_and_without_overlap(world: int) -> None:
    source = Sizes({"a": (101, "BF16"), "b": (1, "F32"), "none": (0, "F32"), "c": (57, "F32"), "d": (3, "U8")})
    shares = [share_of_frozen(source, "ab", rank=0, world_size=1)]
    assert shares[0].pieces == (("a", 0, 101), ("b", 0, 1))
    shares = [share_of_frozen(source, ["a", "b", "none", "c", "d"], rank=r, world_size=world) for r in range(world)]
    seen = [(name, i) for share in shares for name, start, length in share.pieces for i in range(start, start + length)]
    assert seen == [(name, i) for name in ("a", "b", "c", "d") for i in range(source.shape(name)[0])]
    total = 2 * 101 + 4 + 4 * 57 + 3
    for share in shares:
        size = sum(r.values.numel() * r.values.element_size() for r in share.ranges())
        assert abs(size - total / world) <= 8


def folder_source(base: ModelFolder, names: dict[str, str]) -> FrozenInFolder:
    """`names` leads from a module's names to those in the folder."""
    return FrozenInFolder({name: base.shards["transformer"].tensors[there] for name, there in names.items()})


def save_in_full(
    rank: int, world: int, folder: Path, source: FrozenSource, state: State, model: ModelReference
) -> Path:
    names = sorted(model.frozen)
    return save(
        folder, 3, rank=rank, world=world, ranges=lambda: owned_ranges(state, rank, world, 3), model=model,
        frozen=share_of_frozen(source, names, rank=rank, world_size=world),
    )  # fmt: skip


def _on_rank(rank: int, world: int, folder: Path, state: State, model: ModelReference) -> Path:
    source = folder_source(open_model_folder("tiny"), {n: n.replace(".base_layer.", ".") for n in model.frozen})
    return save_in_full(rank, world, folder, source, state, model)


def trained_state(trained: Weights) -> State:
    return {(name, PARAM): w for name, w in trained.items() if name not in STILL}


@pytest.mark.parametrize("world", [1, 3])
def test_every_bit_of_the_folder_is_in_the_checkpoint(
    world: int, base: ModelFolder, trained: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_parameters, "_WINDOW", 1000)
    model = reference(base, frozen_stored=True)
    run_ranks(_on_rank, world, tmp_path, trained_state(trained), model)
    path = tmp_path / "step-00000003"
    assert verify_checkpoint(path) == ()
    with CheckpointReader(path) as reader:
        assert set(reader.names(FROZEN)) == set(STILL)
        assert reader.manifest.model.all_stored
        for name in STILL:
            tensor = base.shards["transformer"].tensors[name]
            stored = reader.read_bytes(name, 0, torch.Size(tensor.shape).numel(), FROZEN)
            with tensor.path.open("rb") as file:
                file.seek(tensor.offset)
                assert stored.tobytes() == file.read(tensor.nbytes)
    assert f"frozen          {len(STILL)} tensors, in the model folder and here" in show_checkpoint(path)


def _weights(out: Path) -> Weights:
    model = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture
def without_weights(base: ModelFolder, tmp_path: Path) -> Path:
    """The base model's folder without the transformer's weights."""
    folder = tmp_path / "without"
    shutil.copytree(base.path, folder)
    for file in (folder / "transformer").glob("*.safetensors*"):
        file.unlink()
    return folder


def test_consolidation_needs_no_weights_of_the_model_folder(
    base: ModelFolder, trained: Weights, without_weights: Path, tmp_path: Path
) -> None:
    model = reference(base, frozen_stored=True, path=str(tmp_path / "gone"))
    path = save_in_full(0, 1, tmp_path / "c", folder_source(base, {n: n for n in STILL}), trained_state(trained), model)
    options: Any = {"dtype": "fp32", "open_model": lambda p: open_model_folder(p, without_weights=True)}
    outs = [
        consolidate(path, tmp_path / "alone", components="none", **options),
        consolidate(path, tmp_path / "beside", base_model=without_weights, **options),
        consolidate(path, tmp_path / "as ever", base_model=base.path, **options),
    ]
    for out in outs:
        found = _weights(out)
        assert set(found) == set(trained)
        assert all(found[name].equal(weight) for name, weight in trained.items())
    assert (outs[1] / "vae").is_dir()
    assert sorted(p.name for p in outs[0].iterdir()) == ["consolidated.json", "transformer"]
    with pytest.raises(ModelFolderError, match="with --components none they are written alone"):
        consolidate(path, tmp_path / "no", **options)
    (without_weights / "transformer" / "config.json").write_text('{"_class_name": "QwenImageTransformer2DModel"}')
    with pytest.raises(CheckpointError, match=r"transformer/config\.json differs"):
        consolidate(path, tmp_path / "no", base_model=without_weights, **options)


def test_without_them_the_folder_is_needed(base: ModelFolder, run: Path, without_weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"has no weights, which are needed here"):
        consolidate(
            run, tmp_path / "out", dtype="bf16", base_model=without_weights,
            open_model=lambda p: open_model_folder(p, without_weights=True),
        )  # fmt: skip
    with pytest.raises(ModelFolderError, match=r"not there: transformer/diffusion_pytorch_model\*\.safetensors"):
        open_model_folder(without_weights)


@pytest.mark.parametrize("kind", [PARAM, "ema"])
def test_adapters_are_merged_into_weights_of_the_checkpoint(
    kind: str, base: ModelFolder, base_weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_edit_zero.checkpoints.consolidation_plan.WINDOW", 1000)  # no whole number of rows
    target = "transformer_blocks.0.attn.to_q"
    shape = base_weights[f"{target}.weight"].shape
    a, b = torch.randn(4, shape[1]), torch.randn(shape[0], 4)
    names = {n.replace(f"{target}.", f"{target}.base_layer."): n for n in base_weights}
    lora = LoraReference(rank=4, alpha=2.0, targets=("attn.to_q",))
    model = reference(base, frozen=tuple(names), lora=lora, frozen_stored=True)
    state: State = {}
    for stored, factor in (("ema", 1.0 if kind == "ema" else 3.0), (PARAM, 1.0 if kind == PARAM else 3.0)):
        state[f"{target}.lora_A.default.weight", stored] = a * factor
        state[f"{target}.lora_B.default.weight", stored] = b
    path = save_in_full(0, 1, tmp_path / "c", folder_source(base, names), state, model)
    weights: Any = "ema" if kind == "ema" else "model"
    out = consolidate(
        path, tmp_path / "out", dtype="fp32", open_model=open_model_folder, components="none", weights=weights
    )
    for name, weight in _weights(out).items():
        right = base_weights[name] + (0.5 * b @ a if name == f"{target}.weight" else 0)
        torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-6)


def test_a_model_folder_that_changes_while_training_spoils_no_checkpoint(
    base: ModelFolder, trained: Weights, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base.path, moved)
    source = folder_source(open_model_folder(moved), {n: n for n in STILL})
    model = reference(base, frozen_stored=True)
    file = next((moved / "transformer").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content + b" ")
    with pytest.raises(StorageError, match="has changed since the run began"):
        save_in_full(0, 1, tmp_path / "c", source, trained_state(trained), model)
    file.unlink()
    with pytest.raises(StorageError, match=r"cannot read .*checkpoint\.frozen=full copies frozen parameters from it"):
        save_in_full(0, 1, tmp_path / "c", source, trained_state(trained), model)
    assert list((tmp_path / "c").iterdir()) == []


def save_and_load(rank: int, world: int, kind: str, folder: Path) -> bytes:
    """Save with frozen parameters; load into an engine that has zeros; save once more from that checkpoint."""
    start = problem.weights_of(problem.make_model(frozen=True))
    engine = harness.build(kind, harness.MemorySource.of_weights(start), frozen=True)
    still = tuple(n for n, p in problem.make_model(frozen=True).named_parameters() if not p.requires_grad)
    model = ModelReference(path="tiny", fingerprint="f", config={}, frozen=still, frozen_stored=True)
    options: dict[str, Any] = {"run_state": {}, "settings": {}, "model": model, "engine": kind}

    class Memory(Sizes):
        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(start[name].shape)

        def stream(self, name: str, first: int, length: int) -> Any:
            yield start[name].flatten()[first : first + length].numpy().view("u1").data

    source: FrozenSource = Memory(dict.fromkeys(still, (0, "F32")))
    paths = []
    for step in (1, 2):
        share = share_of_frozen(source, still, rank=rank, world_size=world)
        paths.append(save_checkpoint(folder, step=step, ranges=engine.local_state, frozen=share, **options))
        source = FrozenInCheckpoint(paths[-1])
    scalars = engine.scalars()
    engine.close()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    other = harness.build(kind, harness.MemorySource.of_weights(zeros), frozen=True)
    with CheckpointReader(paths[-1]) as reader:
        other.load_state(reader, scalars, frozen=True)
    weights = dict(other.full_weights())
    losses, _ = problem.train_with(other, micro=2, steps=range(2))
    other.close()
    return harness.packed((all(weights[n].equal(w) for n, w in start.items()), losses))


@pytest.mark.parametrize("kind", harness.EVERY_ENGINE)
def test_every_engine_takes_them_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    found = [harness.unpacked(r) for r in run_ranks(save_and_load, 2, kind, tmp_path)]
    assert all(is_equal for is_equal, _ in found)
    expected, _ = problem.train_plainly(problem.make_model(frozen=True), problem.OPTIMIZER, steps=range(2))
    losses = [sum(step) for step in zip(*(losses for _, losses in found), strict=True)]
    assert max(map(problem.relative, losses, expected)) < 1e-5
