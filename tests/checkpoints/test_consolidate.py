"""The consolidated folder holds exactly the trained weights, and diffusers loads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel

from qwen_edit_zero.checkpoints import consolidation_plan, consolidation_writer
from qwen_edit_zero.checkpoints.components import LINKED_FROM
from qwen_edit_zero.checkpoints.consolidate import consolidate
from qwen_edit_zero.checkpoints.manifest import LoraReference
from qwen_edit_zero.edit_model.components import load_processor
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import CheckpointError, ModelFolderError
from tests.checkpoints.states import State, owned_ranges, save
from tests.checkpoints.trained_run import FROZEN, Weights, reference, save_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_diffusers_loads_the_trained_weights(dtype: Any, run: Path, trained: Weights, tmp_path: Path) -> None:
    said: list[str] = []
    seen: list[tuple[int, int]] = []
    out = consolidate(
        run, tmp_path / "out", dtype=dtype, open_model=open_model_folder, say=said.append,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert said == [f"using {run / 'checkpoints' / 'step-00000003'}, the newest valid checkpoint"]
    assert seen[-1] == (sum(w.numel() for w in trained.values()) * DTYPES[dtype].itemsize,) * 2
    model = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=DTYPES[dtype])
    loaded = dict(model.named_parameters())
    assert set(loaded) == set(trained)
    for name, weight in trained.items():
        assert torch.equal(loaded[name], weight.to(DTYPES[dtype])), name


def test_the_pipeline_loads_the_folder(run: Path, trained: Weights, tmp_path: Path) -> None:
    out = consolidate(run, tmp_path / "out", dtype="fp32", open_model=open_model_folder, shard_bytes=4 * 2**20)
    processor = load_processor(open_model_folder(out))  # diffusers itself loads one only where torchvision is installed
    pipeline = QwenImageEditPlusPipeline.from_pretrained(out, local_files_only=True, processor=processor)
    weights = dict(pipeline.transformer.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in trained.items())
    index = json.loads((out / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (out / "transformer").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    assert all((out / "transformer" / f).stat().st_size < 4 * 2**20 + 2**17 for f in files)
    provenance = json.loads((out / "consolidated.json").read_text())
    assert (provenance["step"], provenance["dtype"]) == (3, "fp32")


@pytest.mark.parametrize("window", [2**20, 1000])
def test_adapters_are_merged(
    window: int, base: ModelFolder, base_weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidation_plan, "WINDOW", window)
    monkeypatch.setattr(consolidation_plan, "PART", 3 * window)
    target = "transformer_blocks.0.attn.to_q"
    a, b = (
        torch.randn(4, base_weights[f"{target}.weight"].shape[1]),
        torch.randn(len(base_weights[f"{target}.weight"]), 4),
    )
    adapters = {f"{target}.lora_A.default.weight": a, f"{target}.lora_B.default.weight": b}
    names = tuple(n.replace(f"{target}.", f"{target}.base_layer.") for n in base_weights)
    lora = LoraReference(rank=4, alpha=2.0, targets=("attn.to_q",))
    path = save_weights(tmp_path, adapters, reference(base, frozen=names, lora=lora))
    out = consolidate(path, tmp_path / "out", dtype="fp32", open_model=open_model_folder, components="none")
    model = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=torch.float32)
    for name, weight in model.named_parameters():
        right = base_weights[name] + (0.5 * b @ a if name == f"{target}.weight" else 0)
        torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-6)
    assert not (out / "vae").exists()


def test_averaged_weights_are_written_on_request(base: ModelFolder, trained: Weights, tmp_path: Path) -> None:
    moved = {n: w for n, w in trained.items() if n not in FROZEN}
    state: State = {(name, "param"): w for name, w in moved.items()}
    state |= {(name, "ema"): w + 1 for name, w in moved.items()}
    path = save(tmp_path, 3, ranges=lambda: owned_ranges(state, 0, 1, 3), model=reference(base))
    options: Any = {"dtype": "fp32", "open_model": open_model_folder, "components": "none", "weights": "ema"}
    out = consolidate(path, tmp_path / "out", **options)
    model = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=torch.float32)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trained[name] if name in FROZEN else trained[name] + 1), name
    without = save_weights(tmp_path / "without", moved, reference(base))
    with pytest.raises(CheckpointError, match="holds no averaged weights: its run had no EMA"):
        consolidate(without, tmp_path / "out2", **options)


def test_a_model_that_was_moved_is_found_by_base_model(base: ModelFolder, run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base.path, moved)
    out = consolidate(run, tmp_path / "out", dtype="bf16", base_model=moved, open_model=open_model_folder)
    assert (out / "model_index.json").exists()


def test_another_base_model_is_refused(base: ModelFolder, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(base.path, other)
    weights = next((other / "transformer").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="was trained from another model than"):
        consolidate(run, tmp_path / "out", dtype="bf16", base_model=other, open_model=open_model_folder)
    with pytest.raises(ModelFolderError):
        consolidate(run, tmp_path / "out", dtype="bf16", base_model=tmp_path / "no", open_model=open_model_folder)
    assert not (tmp_path / "out").exists()


def _lose(weights: Weights) -> None:
    weights.pop("norm_out.linear.bias")


def _add(weights: Weights) -> None:
    weights["extra.weight"] = torch.zeros(3)


def _thaw(weights: Weights) -> None:
    weights["proj_out.weight"] = torch.zeros(3)


def _reshape(weights: Weights) -> None:
    weights["norm_out.linear.bias"] = weights["norm_out.linear.bias"].reshape(2, -1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lose, r"norm_out\.linear\.bias are neither in the checkpoint nor recorded as frozen"),
        (_add, r"extra\.weight are not parameters of the base model"),
        (_thaw, r"proj_out\.weight are in the checkpoint although recorded as frozen"),
        (_reshape, r"norm_out\.linear\.bias has shape \[2, \d+\], but \[\d+\]"),
    ],
)
def test_a_checkpoint_that_is_not_the_models_is_refused_before_writing(
    change: Callable[[Weights], None], words: str, base: ModelFolder, trained: Weights, tmp_path: Path
) -> None:
    weights = {n: w for n, w in trained.items() if n not in FROZEN}
    change(weights)
    path = save_weights(tmp_path / "checkpoints", weights, reference(base))
    with pytest.raises(CheckpointError, match=words):
        consolidate(path, tmp_path / "out", dtype="bf16", open_model=open_model_folder)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_damage_met_on_the_way_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(run / "checkpoints" / "step-00000003", tmp_path / "in" / "step-00000003")
    data = path / "rank-00000.safetensors"
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        consolidate(path, tmp_path / "out", dtype="bf16", open_model=open_model_folder)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_values_beyond_fp16_are_refused_by_name(base: ModelFolder, trained: Weights, tmp_path: Path) -> None:
    weights = {n: w for n, w in trained.items() if n not in FROZEN}
    weights["norm_out.linear.bias"] = torch.full_like(weights["norm_out.linear.bias"], 70000.0)
    path = save_weights(tmp_path / "checkpoints", weights, reference(base))
    with pytest.raises(CheckpointError, match=r"norm_out\.linear\.bias holds 70000, .* use --dtype bf16 or fp32"):
        consolidate(path, tmp_path / "out", dtype="fp16", open_model=open_model_folder)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def interrupted(run: Path, tmp_path: Path) -> Path:
    """An output folder whose consolidation was killed when half of it was written."""
    child = os.fork()
    if child == 0:
        try:
            consolidate(
                run, tmp_path / "out", dtype="fp32", open_model=open_model_folder,
                progress=lambda done, total: os.kill(os.getpid(), 9) if done > total / 2 else None,
            )  # fmt: skip
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 9
    return tmp_path / "out"


def test_killed_on_the_way_leaves_nothing_that_looks_finished(interrupted: Path, run: Path) -> None:
    assert not interrupted.exists()
    consolidate(run, interrupted, dtype="fp32", open_model=open_model_folder, components="none")
    assert [p.name for p in interrupted.parent.iterdir()] == ["out"]


def test_killed_on_the_way_goes_on_where_it_was(
    run: Path, trained: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidation_writer, "_NOTED_EVERY", -1.0)
    child = os.fork()
    options: Any = {"dtype": "fp32", "open_model": open_model_folder, "threads": 1, "shard_bytes": 4 * 2**20}
    if child == 0:
        consolidate(
            run, tmp_path / "out", **options,
            progress=lambda done, total: os.kill(os.getpid(), 9) if done > total / 2 else None,
        )  # fmt: skip
    assert os.waitpid(child, 0)[1] == 9
    with (tmp_path / ".out.partial" / "transformer" / ".journal").open("a") as journal:
        journal.write("7")  # cut off while it was written
    seen: list[int] = []
    out = consolidate(run, tmp_path / "out", **options, progress=lambda done, _: seen.append(done))
    assert seen[0] > sum(w.nbytes for w in trained.values()) // 4
    model = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=torch.float32)
    assert all(torch.equal(weight, trained[name]) for name, weight in model.named_parameters())
    assert not (out / "transformer" / ".journal").exists()


def test_large_files_are_linked_unless_copies_are_asked_for(base: ModelFolder, run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base.path, moved)
    with (moved / "text_encoder" / "large.bin").open("wb") as file:
        file.truncate(LINKED_FROM)
    (moved / "LICENSE.txt").write_text("free")
    for components, links in (("link", 2), ("copy", 1)):
        out = tmp_path / components
        consolidate(run, out, dtype="bf16", base_model=moved, open_model=open_model_folder, components=components)  # type: ignore[arg-type]
        large = out / "text_encoder" / "large.bin"
        assert large.stat().st_size == LINKED_FROM
        assert (large.stat().st_ino == (moved / "text_encoder" / "large.bin").stat().st_ino) == (links == 2)
        assert (out / "text_encoder" / "config.json").stat().st_nlink == 1
        assert (out / "LICENSE.txt").read_text() == "free"
