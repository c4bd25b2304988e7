"""Folders that DeepSpeed and torch really write: every bit is what their own tools give, and damage is never silent."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_edit_zero.checkpoints import consolidation_writer
from qwen_edit_zero.checkpoints.consolidate import consolidate
from qwen_edit_zero.checkpoints.describe import verify_text
from qwen_edit_zero.checkpoints.foreign.recognise import open_foreign
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.errors import CheckpointError
from tests.checkpoints import foreign_runs
from tests.engines import harness
from tests.ranks import run_ranks

STAGES = {
    "zero1": (1, 2, {}, False),
    "zero2": (2, 3, {"round_robin_gradients": True}, True),
    "zero3": (3, 3, {"sub_group_size": 3000, "stage3_param_persistence_threshold": 100}, True),
}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, after two steps."""
    root = tmp_path_factory.mktemp("foreign")
    for name, (stage, world, zero, bf16) in STAGES.items():
        run_ranks(foreign_runs.train_deepspeed, world, root / name, stage, 2, 0, zero, bf16)
    run_ranks(foreign_runs.train_fsdp2, 3, root / "dcp", "lightning", 2, 0)
    return {path.name: path for path in root.iterdir()}


def _right(folder: Path) -> Weights:
    """What the tool that comes with the writer makes of it, without what it repeats."""
    if folder.name.startswith("zero"):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = {n: t.contiguous() for n, t in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}
        weights.pop("after.weight", None)  # shared, and stored once
        return weights
    weights = _dcp_as_saved(folder)["model"]
    assert isinstance(weights, dict)
    return weights


def _dcp_as_saved(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    saved: dict[str, Any] = torch.load(folder.parent / "whole.pt")
    (folder.parent / "whole.pt").unlink()
    return saved


def _consolidated(source: Path, out: Path, **options: Any) -> Weights:
    arguments: dict[str, Any] = {"dtype": "fp32", "open_model": open_model_folder, "say": lambda _: None}
    consolidate(source, out, **(arguments | options))
    return load_file(next(out.glob("**/*.safetensors")))


@pytest.mark.parametrize("name", [*STAGES, "dcp"])
def test_every_bit_is_what_the_writers_own_tool_gives(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    found, right = _consolidated(folders[name], tmp_path / "out"), _right(folders[name])
    assert set(right) <= set(found)  # zero_to_fp32 leaves the frozen weights of ZeRO-1 out
    assert len(found) == 83 - (name != "dcp")
    for key, tensor in right.items():
        assert torch.equal(found[key].to(tensor.dtype), tensor), key
    assert torch.equal(found["places"], torch.arange(5.0))
    assert verify_text(folders[name])[1]


@pytest.mark.parametrize("name", [*STAGES, "dcp"])
def test_moments_are_read_in_any_cut(name: str, folders: dict[str, Path]) -> None:
    state = open_foreign(folders[name])
    assert (state.step, state.optimizer_steps) == (2, 2)
    draw = random.Random(1)
    with ForeignSource(state) as source:
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            for key in source.names(kind):
                count = torch.Size(source.shape(key, kind)).numel()
                whole = source.read(key, 0, count, kind)
                start = draw.randrange(count)
                length = draw.randint(0, count - start)
                assert torch.equal(source.read(key, start, length, kind), whole[start : start + length])
                assert kind != "exp_avg_sq" or bool((whole >= 0).all())
        source.finish()


def test_fsdp1_folders_hold_what_fsdp1_gathers(tmp_path: Path) -> None:
    weights = harness.unpacked(run_ranks(foreign_runs.save_fsdp1, 2, tmp_path / "dcp")[0])
    found = _consolidated(tmp_path / "dcp", tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    moments = _dcp_as_saved(tmp_path / "dcp")["optim"]["state"]
    with ForeignSource(open_foreign(tmp_path / "dcp")) as source:
        assert source.state.optimizer_steps == 2
        assert len(list(source.names("exp_avg"))) > 60
        for kind in ("exp_avg", "exp_avg_sq"):
            for name in source.names(kind):
                expected = moments[name.removeprefix("model.")][kind].reshape(-1)
                assert torch.equal(source.read(name, 0, expected.numel(), kind), expected)


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _lose(path: Path, draw: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["zero2", "zero3", "dcp"])
def test_damage_is_refused_or_harmless_but_never_silent(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    base = foreign_runs.base_of(foreign_runs.make_model(frozen=True), tmp_path / "base")
    options: dict[str, Any] = {
        "open_model": lambda _: base, "base_model": tmp_path / "base", "components": "none", "fill": name == "zero3",
    }  # fmt: skip
    right = _consolidated(folders[name], tmp_path / "right", **options)
    draw = random.Random(name)
    files = [p for p in folders[name].rglob("*") if p.suffix in (".pt", ".distcp") or p.name == ".metadata"]
    refused = 0
    for attempt, (path, damage) in enumerate([(p, d) for p in files for d in (*[_flip] * 12, _cut, _cut, _lose)]):
        copy = tmp_path / f"copy{attempt}"
        shutil.copytree(folders[name], copy)
        damage(copy / path.relative_to(folders[name]), draw)
        try:
            found = _consolidated(copy, tmp_path / f"out{attempt}", **options)
        except CheckpointError:
            refused += 1
            assert not (tmp_path / f"out{attempt}").exists()
        else:
            assert damage is _flip
            assert all(torch.equal(found[key], tensor) for key, tensor in right.items()), path
        shutil.rmtree(copy)
    assert refused > len(files) * 3


def test_files_of_another_save_are_refused_with_rank_and_file(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(foreign_runs.train_deepspeed, 3, tmp_path / "later", 3, 3, 0, STAGES["zero3"][2], True)
    mixed = shutil.copytree(folders["zero3"], tmp_path / "mixed")
    later, name = tmp_path / "later" / "global_step3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(later / name, mixed / "global_step2" / name)
    with pytest.raises(CheckpointError, match=rf"{name} \(rank 1\) is of step 3, but .* of step 2"):
        open_foreign(mixed)
    shutil.copytree(folders["zero3"], mixed, dirs_exist_ok=True)
    name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copy(later / name, mixed / "global_step2" / name)
    with pytest.raises(CheckpointError, match=rf"{name} \(rank 2\) is not of the same save .*: global_steps differs"):
        open_foreign(mixed)


def test_what_the_folder_lacks_is_filled_in_only_when_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    model = foreign_runs.make_model(frozen=True)
    model.extra = torch.nn.Parameter(torch.arange(3.0))
    base = foreign_runs.base_of(model, tmp_path / "base")
    options: dict[str, Any] = {"open_model": lambda _: base, "base_model": base.path, "components": "none"}
    with pytest.raises(CheckpointError, match=r"lacks 1 of the \d+ parameters of .*: extra\. .* use --fill"):
        _consolidated(folders["zero2"], tmp_path / "out", **options)
    found = _consolidated(folders["zero2"], tmp_path / "out", fill=True, **options)
    assert torch.equal(found["extra"], model.extra)


@pytest.mark.parametrize("name", ["zero2", "dcp"])
def test_an_interrupted_consolidation_goes_on_where_it_was(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidation_writer, "_NOTED_EVERY", -1.0)
    right = _consolidated(folders[name], tmp_path / "right")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _consolidated(folders[name], tmp_path / "out", threads=1, progress=interrupt)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial" / ".journal").exists()
    seen: list[int] = []
    found = _consolidated(folders[name], tmp_path / "out", threads=1, progress=lambda done, _: seen.append(done))
    assert seen[0] > sum(t.nbytes for t in right.values()) // 3  # what was there counts at once
    assert found.keys() == right.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in right.items())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "consolidated.json",
        "diffusion_pytorch_model.safetensors",
    ]


@pytest.fixture
def child(folders: dict[str, Path], tmp_path: Path) -> str:
    return f"""
import sys
from qwen_edit_zero.cli import main
for number, source in enumerate({[str(p) for p in folders.values()]}):
    assert main(["consolidate", source, {str(tmp_path)!r} + f"/{{number}}"]) == 0
    assert main(["checkpoint", "verify", source]) == 0
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
"""


def test_neither_torch_nor_deepspeed_is_imported(child: str) -> None:
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
