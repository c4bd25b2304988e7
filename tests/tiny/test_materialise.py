"""Writing the tiny model's folder: atomic, repeatable, quick the second time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero.edit_model.tiny import materialise_tiny_model

ROOT = Path(__file__).parents[2]
CALL = "import sys; from pathlib import Path; from qwen_edit_zero.edit_model.tiny import materialise_tiny_model as m; "


def digests(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_processes_that_write_it_at_once_end_with_one_whole_folder(tmp_path: Path, tiny_path: Path) -> None:
    code = CALL + "print(m(Path(sys.argv[1])))"
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {racer.communicate(timeout=240)[0].strip().splitlines()[-1] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers == {str(tmp_path / tiny_path.name)}
    assert list(tmp_path.iterdir()) == [tmp_path / tiny_path.name]
    assert digests(tmp_path / tiny_path.name) == digests(tiny_path)


def test_an_existing_folder_is_found_without_torch(tiny_path: Path) -> None:
    code = CALL + (
        "import time; t = time.perf_counter(); m(Path(sys.argv[1])); "
        "print(time.perf_counter() - t, 'torch' in sys.modules, 'diffusers' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tiny_path.parent)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, torch_loaded, diffusers_loaded = out.stdout.split()
    assert float(seconds) < 0.5  # 10 ms on an idle machine
    assert (torch_loaded, diffusers_loaded) == ("False", "False")


def test_the_environment_chooses_the_cache(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_EDIT_ZERO_CACHE", str(tiny_path.parent))
    assert materialise_tiny_model() == tiny_path


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setattr("qwen_edit_zero.edit_model.tiny._write", fail)
    with pytest.raises(OSError, match="No space left"):
        materialise_tiny_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_transformer_is_sharded_like_the_real_one(tiny_path: Path) -> None:
    index = json.loads((tiny_path / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    assert shards == {p.name for p in (tiny_path / "transformer").glob("*.safetensors")}
