"""`qwen-edit-zero cache`: filling without training, and looking after the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen_edit_zero.cli import main
from qwen_edit_zero.commands import cache as cache_command
from qwen_edit_zero.edit_data.cache.locks import CacheLock
from qwen_edit_zero.edit_data.cache.shard import read_records, strike
from qwen_edit_zero.edit_model import encoders
from qwen_edit_zero.errors import UserError
from tests.edit_data.builders import row, save_pictures, write_manifest

ROWS = [row(i, references=1 + i % 2) for i in range(6)]  # 15 pictures


@pytest.fixture(scope="module", autouse=True)
def pictures_are_old() -> Iterator[None]:
    """What is known of a file that was written just now is not remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen_edit_zero.edit_data.storage.files._TOO_YOUNG_NS", -1)
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a manifest, a recipe and its filled cache."""
    folder = tmp_path_factory.mktemp("cache-command")
    save_pictures(folder, ROWS)
    settings = {
        "run": {"name": "r", "dir": str(folder / "runs"), "max_steps": 2},
        "model": {"path": "tiny", "activation_checkpointing": "none"},
        "data": {
            "manifest": str(write_manifest(folder, ROWS)),
            "cache_dir": str(folder / "cache"),
            "vae_area": 64 * 64,
            "condition_area": 56 * 56,
        },
        "precision": "fp32",
        "engine": {"backend": "ddp"},
        "sampling": {"count": 0},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(["cache", str(folder / "r.yaml")]) == 0
    return folder


@pytest.fixture
def place(filled: Path, tmp_path: Path) -> Path:
    """A copy whose cache may be spoilt."""
    import shutil

    shutil.copytree(filled / "cache", tmp_path / "cache")
    settings = yaml.safe_load((filled / "r.yaml").read_text(encoding="utf-8"))
    settings["data"]["cache_dir"] = str(tmp_path / "cache")
    settings["run"]["dir"] = str(tmp_path / "runs")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return tmp_path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the frozen models that are loaded."""
    names: list[str] = []
    for name in ("load_vae", "load_text_encoder"):
        real = getattr(encoders, name)
        monkeypatch.setattr(encoders, name, lambda *a, n=name, r=real, **k: names.append(n) or r(*a, **k))
    return names


def cache(*words: object) -> int:
    return main(["cache", *map(str, words)])


def refused(*words: object) -> str:
    """What a command says that cannot work; as a process it would end there."""
    with pytest.raises(UserError) as caught:
        cache_command.run([str(word) for word in words], lambda: nullcontext())
    return str(caught.value)


def test_a_filled_cache_is_found_whole_and_complete(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache("status", filled / "r.yaml") == 0
    out = capsys.readouterr().out
    assert "15 needed, 15 there, 0 missing" in out
    assert "6 needed, 6 there, 0 missing" in out
    assert cache("status", "--dir", filled / "cache") == 0
    assert "needed" not in capsys.readouterr().out
    assert cache("verify", "--dir", filled / "cache") == 0


def test_training_with_a_warm_cache_loads_neither_model(place: Path, loaded: list[str]) -> None:
    assert main(["train", str(place / "r.yaml")]) == 0
    assert loaded == []
    assert (place / "runs" / "r" / "checkpoints" / "step-00000002").is_dir()
    assert not (place / "runs" / "r" / ".columns").exists()


@pytest.mark.parametrize(
    ("missing", "model"), [("latent", ["load_vae"]), ("prompt", ["load_text_encoder"])], ids=["latents", "embeddings"]
)
def test_only_the_model_whose_entries_are_missing_is_loaded(
    missing: str, model: list[str], place: Path, loaded: list[str]
) -> None:
    for shard in (place / "cache").glob(f"{missing}-*/shards/*"):
        shard.unlink()
    assert cache(place / "r.yaml") == 0
    assert loaded == model


def test_status_tells_what_is_missing_without_reading_a_picture(
    filled: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_edit_zero.edit_data.storage.local import LocalFile

    monkeypatch.setattr(LocalFile, "read", lambda self, limit: pytest.fail(f"{self.name} was read"))
    for shard in (place / "cache").glob("prompt-*/shards/*"):
        shard.unlink()
    assert cache("status", place / "r.yaml", "data.vae_area=4225") == 0
    out = capsys.readouterr().out
    assert "6 needed, 0 there, 6 missing" in out


def test_status_counts_samples_whose_pictures_changed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**r, "source": r["source"][:1]} for r in ROWS]
    save_pictures(place, rows)
    manifest = write_manifest(place, rows)
    assert cache("status", place / "r.yaml", f"data.manifest={manifest}") == 0
    assert "6 samples besides, of which a picture is new or has changed" in capsys.readouterr().out


def damage(folder: Path, kind: str = "latent") -> Path:
    (shard,) = (folder / "cache").glob(f"{kind}-*/shards/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return shard


def test_verify_names_damage_and_repair_takes_it_out(
    place: Path, capsys: pytest.CaptureFixture[str], loaded: list[str]
) -> None:
    shard = damage(place)
    cut = next((place / "cache").glob("prompt-*/shards/*.safetensors"))
    strike(cut, read_records(cut)[0]["key"].tobytes())  # as a run did that met damage
    cut.write_bytes(cut.read_bytes()[:-1])
    for _ in range(2):
        assert cache("verify", place / "r.yaml") == 2
        out = capsys.readouterr().out
        assert f"{shard.name}: entry " in out
        assert f"{cut.name}: it is cut short, and 1 of its entries are gone" in out
    assert cache("verify", place / "r.yaml", "--repair") == 2
    assert cache("verify", place / "r.yaml") == 0
    capsys.readouterr()
    assert cache(place / "r.yaml") == 0
    assert "3 entries were made now" in capsys.readouterr().out
    assert sorted(loaded) == ["load_text_encoder", "load_vae"]


def test_a_shard_whose_header_is_gone_is_deleted_by_repair(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard,) = (place / "cache").glob("latent-*/shards/*.safetensors")
    shard.with_suffix(".index").unlink()
    shard.write_bytes(b"\0" * shard.stat().st_size)
    assert cache("verify", place / "r.yaml", "--repair") == 2
    assert f"{shard.name}: it cannot be read" in capsys.readouterr().out
    assert not shard.exists()
    assert cache("verify", place / "r.yaml") == 0


def test_prune_says_first_and_deletes_exactly_what_no_recipe_uses(
    place: Path, capsys: pytest.CaptureFixture[str], loaded: list[str]
) -> None:
    source = yaml.safe_load((place / "r.yaml").read_text(encoding="utf-8"))
    paths: list[Path] = []
    for name, count in (("a", 2), ("b", 3)):
        recipe: dict[str, Any] = json.loads(json.dumps(source))
        recipe["data"]["max_samples"] = count
        paths.append(place / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(recipe), encoding="utf-8")
    before = sorted((place / "cache").rglob("*"))
    assert cache("prune", "--recipe", *paths) == 0
    assert "11 entries would be deleted" in capsys.readouterr().out  # of 21, 3 samples need 3 texts and 7 pictures
    assert sorted((place / "cache").rglob("*")) == before
    assert cache("prune", *paths, "--delete") == 0
    assert "11 entries deleted" in capsys.readouterr().out
    assert cache(paths[1]) == 0
    assert loaded == [], "what the recipes use is still there"
    assert cache("verify", paths[0]) == 0
    assert cache("prune", *paths, "data.vae_area=4225", "--delete") == 0
    assert cache("status", paths[0]) == 0


def test_entries_of_another_precision_are_not_deleted_on_a_machine_without_gpus(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from qwen_edit_zero.edit_data.cache.entries import Entries
    from qwen_edit_zero.edit_model.folder import open_model_folder
    from qwen_edit_zero.training.conditioning import entry_kinds

    kinds = entry_kinds(open_model_folder("tiny"), torch.bfloat16)
    known = next((place / "cache").glob("latent-*/shards/*.index")).read_bytes()[:16]
    with Entries(place / "cache", kinds[0]).writer() as writer:
        writer.put(known, torch.zeros(2, dtype=torch.bfloat16))
        writer.put(b"x" * 16, torch.zeros(2, dtype=torch.bfloat16))
    assert cache("prune", place / "r.yaml", "precision=bf16", "--delete") == 0
    assert "1 entries deleted" in capsys.readouterr().out


def test_nothing_is_deleted_while_a_job_uses_the_cache(place: Path) -> None:
    recipe = [place / "r.yaml", "data.max_samples=1"]
    with CacheLock(place / "cache", exclusive=False) as lock:
        lock.share()
        assert "a job is using it" in refused("prune", *recipe, "--delete")
        assert cache("verify", *recipe) == 0
    assert cache("prune", *recipe, "--delete") == 0


def test_mistakes_are_said(place: Path) -> None:
    assert "name all recipes" in refused("prune", "--delete")
    assert "there is no such folder" in refused("status", "--dir", place / "nowhere")
    assert "its cache is" in refused("prune", place / "r.yaml", "--dir", place / "other")
    assert "there is one recipe" in refused("status", place / "r.yaml", place / "r.yaml")
    assert "did you mean data.cache_dir?" in refused("verify", "data.cache_dirr=x")
    assert cache("--help") == 0
