"""Only the adapter of a LoRA run, under the same rules as whole models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen_edit_zero.checkpoints.manifest import LoraReference
from qwen_edit_zero.cli import _parser
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.errors import CheckpointError, SettingsError, UserError
from tests.checkpoints.states import State, owned_ranges, save
from tests.checkpoints.trained_run import Weights, reference, save_weights

A, B = (f"transformer_blocks.0.attn.to_q.lora_{half}.default.weight" for half in "AB")
FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def weights(base_weights: Weights) -> Weights:
    rows, columns = base_weights["transformer_blocks.0.attn.to_q.weight"].shape
    g = torch.Generator().manual_seed(2)
    return {A: torch.randn(4, columns, generator=g), B: torch.randn(rows, 4, generator=g)}


@pytest.fixture
def adapter_run(base: ModelFolder, weights: Weights, tmp_path: Path) -> Path:
    """A run with weights and their average (larger by 1) at step 3, and a damaged checkpoint at step 5."""
    model = reference(base, frozen=(), lora=LoraReference(rank=4, alpha=2.0, targets=("attn.to_q",)))
    state: State = {(name, "param"): w for name, w in weights.items()}
    state |= {(name, "ema"): w + 1 for name, w in weights.items()}
    path = save(tmp_path / "run" / "checkpoints", 3, ranges=lambda: owned_ranges(state, 0, 1, 3), model=model)
    (shutil.copytree(path, path.with_name("step-00000005")) / "rank-00000.safetensors").unlink()
    return tmp_path / "run"


def _export(run: Path, out: Path, *options: str, ask: str = "--lora=export") -> None:
    consolidate = _parser().parse_args(["consolidate", str(run), str(out), ask, *options])
    assert consolidate.verb(consolidate) == 0


@pytest.mark.parametrize(
    ("options", "dtype", "more"),
    [([], torch.float32, 0), (["--weights", "ema"], torch.float32, 1), (["--dtype", "bf16"], torch.bfloat16, 0)],
)
def test_weights_and_dtype_are_as_asked_for(
    options: list[str], dtype: torch.dtype, more: int, adapter_run: Path, weights: Weights, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _export(adapter_run, tmp_path / "out", *options)
    assert "passing over step-00000005" in capsys.readouterr().out
    loaded = load_file(tmp_path / "out" / FILE)
    for name, weight in weights.items():
        assert torch.equal(loaded["transformer." + name.replace(".default", "")], (weight + more).to(dtype))
    assert json.loads((tmp_path / "out" / "consolidated.json").read_text())["files"] == [FILE]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_what_is_there_is_not_overwritten_by_accident(adapter_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _export(adapter_run, out)
    with pytest.raises(CheckpointError, match="use --overwrite"):
        _export(adapter_run, out)
    _export(adapter_run, out, "--overwrite")
    (out / "consolidated.json").unlink()
    (out / FILE).write_text("mine")
    with pytest.raises(CheckpointError, match="was not written by this command"):
        _export(adapter_run, out, "--overwrite")
    assert (out / FILE).read_text() == "mine"
    checkpoint = adapter_run / "checkpoints" / "step-00000003"
    before = sorted(checkpoint.iterdir())
    with pytest.raises(CheckpointError, match="lies inside the checkpoint"):
        _export(adapter_run, checkpoint)
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.parametrize("option", ["--adapter", "--lora=export"])
def test_a_run_without_adapter_is_told_with_the_option_that_was_typed(option: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"had no model.lora. Leave out {option.replace('=', ' ')}"):
        _export(run, tmp_path / "out", ask=option)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["--fill", "--shard-size=1GB", "--components=none", "--base=x", "--threads=2"])
def test_options_that_do_nothing_are_refused(given: str, adapter_run: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{given.split('=')[0]} is of no use with --lora export"):
        _export(adapter_run, tmp_path / "out", given)


def test_values_beyond_fp16_are_refused_by_name(base: ModelFolder, weights: Weights, tmp_path: Path) -> None:
    model = reference(base, frozen=(), lora=LoraReference(rank=4, alpha=2.0, targets=("attn.to_q",)))
    path = save_weights(tmp_path / "run", weights | {B: torch.full_like(weights[B], 70000.0)}, model)
    with pytest.raises(
        CheckpointError, match=r"lora_B\.default\.weight holds 70000, which is beyond the range of fp16"
    ):
        _export(path, tmp_path / "out", "--dtype=fp16")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    with pytest.raises(CheckpointError, match="do not store the alpha of an adapter") as caught:
        _export(tmp_path / "dcp", tmp_path / "out")
    assert "import" not in str(caught.value)


def test_zero_threads_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'0' is no whole number of 1 or more"):
        _export(run, tmp_path / "out", "--threads=0", ask="--lora=merge")
