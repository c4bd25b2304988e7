"""A model folder is whole and of this family, or the message says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen_edit_zero.edit_model.folder import Variant, open_model_folder
from qwen_edit_zero.errors import ModelFolderError


@pytest.fixture
def copy(plus_path: Path, tmp_path: Path) -> Path:
    """A folder of one's own to damage; large files are links until replaced."""
    return Path(shutil.copytree(plus_path, tmp_path / "model", copy_function=os.link))


def replace(path: Path, content: bytes | str | dict) -> None:
    """Write a new file where a link to the shared one was."""
    path.unlink(missing_ok=True)
    content = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def change_json(path: Path, **changes: object) -> None:
    replace(path, json.loads(path.read_text()) | changes)


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "transformer").glob("*.safetensors"))


def test_the_three_variants_are_told_apart(plus_path: Path, edit_path: Path, path_2511: Path) -> None:
    assert open_model_folder(edit_path).variant is Variant.EDIT
    assert open_model_folder(plus_path).variant is Variant.EDIT_2509
    assert open_model_folder(path_2511).variant is Variant.EDIT_2511


def test_checking_needs_no_torch(plus_path: Path) -> None:
    code = (
        "import sys; from qwen_edit_zero.edit_model.folder import open_model_folder; "
        f"open_model_folder({str(plus_path)!r}).fingerprint; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _remove_everything_of(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            for path in folder.glob(name):
                path.unlink()

    return damage


def _truncate(folder: Path) -> None:
    replace(shards(folder)[1], shards(folder)[1].read_bytes()[:-100])


def _cut_in_header(folder: Path) -> None:
    replace(shards(folder)[1], shards(folder)[1].read_bytes()[:300])


def _empty_tensor(folder: Path) -> None:
    for shard in shards(folder):
        shard.unlink()
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    tensors = {"img_in.weight": torch.zeros(0), "proj_out.bias": torch.zeros(3)}
    save_file(tensors, folder / "transformer" / "diffusion_pytorch_model.safetensors")


def _index(folder: Path) -> Path:
    return folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"


def _escape(folder: Path) -> None:
    weight_map = json.loads(_index(folder).read_text())["weight_map"]
    change_json(_index(folder), weight_map=weight_map | {"img_in.bias": "../../secret.safetensors"})


def _wrong_shard(folder: Path) -> None:
    weight_map = json.loads(_index(folder).read_text())["weight_map"]
    other = next(shard.name for shard in shards(folder) if shard.name != weight_map["img_in.bias"])
    change_json(_index(folder), weight_map=weight_map | {"img_in.bias": other})


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "several files missing": (
        _remove_everything_of("vae/config.json", "tokenizer/*", "scheduler/*"),
        ["vae/config.json", "tokenizer/tokenizer.json", "scheduler/scheduler_config.json", "Download"],
    ),
    "no model_index": (_remove_everything_of("model_index.json"), ["model_index.json", "diffusers layout"]),
    "no weights": (_remove_everything_of("transformer/diff*"), ["transformer/diffusion_pytorch_model*.safetensors"]),
    "a shard missing": (
        lambda folder: shards(folder)[1].unlink(),
        ["diffusion_pytorch_model-00002-of-", "not there", "random"],
    ),
    "text to image": (
        lambda f: change_json(f / "model_index.json", _class_name="QwenImagePipeline"),
        ["QwenImagePipeline", "another family", "Qwen-Image-Edit-2509"],
    ),
    "Flux": (lambda f: change_json(f / "model_index.json", _class_name="FluxPipeline"), ["FluxPipeline"]),
    "another transformer": (
        lambda f: change_json(f / "transformer" / "config.json", _class_name="SD3Transformer2DModel"),
        ["SD3Transformer2DModel", "QwenImageTransformer2DModel"],
    ),
    "a guidance-distilled relative": (
        lambda f: change_json(f / "transformer" / "config.json", guidance_embeds=True),
        ["guidance_embeds", "cannot train"],
    ),
    "not JSON": (lambda f: replace(f / "vae" / "config.json", "{"), ["vae/config.json", "JSON"]),
    "truncated shard": (_truncate, ["-00002-of-", "cut off"]),
    "shard cut in its header": (_cut_in_header, ["-00002-of-", "header"]),
    "Git LFS pointer": (lambda f: replace(shards(f)[0], LFS), ["Git LFS pointer", "git lfs pull"]),
    "pickle": (lambda f: replace(shards(f)[0], pickle.dumps([1] * 99)), ["pickle", "never read"]),
    "zip of torch.save": (lambda f: replace(shards(f)[0], b"PK\x03\x04" + bytes(99)), ["pickle", "never read"]),
    "empty file": (lambda f: replace(shards(f)[0], b""), ["no safetensors file"]),
    "index leads out": (_escape, ["../../secret.safetensors", "out of its folder"]),
    "index lies": (_wrong_shard, ["img_in.bias", "not there"]),
    "tensor without elements": (_empty_tensor, ["img_in.weight", "no elements", "ZeRO-3"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_refused_in_words_that_help(copy: Path, damage: str) -> None:
    harm, expected = DAMAGES[damage]
    harm(copy)
    with pytest.raises(ModelFolderError) as error:
        open_model_folder(copy)
    for word in [str(copy), *expected]:
        assert word in str(error.value)


def test_a_path_that_is_no_folder_gets_the_right_hint(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    hints = {
        "Qwen/Qwen-Image-Edit-2509": "hf download Qwen/Qwen-Image-Edit-2509",
        "transformer": "folder above",
        "model_index.json": "is a file",
        "..": f"did you mean {copy}",
    }
    for path, hint in hints.items():
        with pytest.raises(ModelFolderError, match=hint):
            open_model_folder(path)


def test_the_built_in_model_says_where_it_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWEN_EDIT_ZERO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFolderError, match=r"tiny.*QWEN_EDIT_ZERO_CACHE"):
        open_model_folder("tiny")


def test_download_caches_with_linked_files_work(plus_path: Path, tmp_path: Path) -> None:
    linked = Path(shutil.copytree(plus_path, tmp_path / "snapshot", copy_function=os.symlink))
    assert open_model_folder(linked).fingerprint == open_model_folder(plus_path).fingerprint


def test_the_fingerprint_is_of_the_content_and_nothing_else(plus_path: Path, copy: Path) -> None:
    original = open_model_folder(plus_path).fingerprint
    moved = copy.rename(copy.with_name("elsewhere"))
    os.utime(shards(moved)[0], (0, 0))
    (moved / "README.md").write_text("mine")
    assert open_model_folder(moved).fingerprint == original

    data = bytearray(shards(moved)[0].read_bytes())
    data[-1] ^= 1
    replace(shards(moved)[0], bytes(data))
    changed = open_model_folder(moved)
    assert changed.fingerprint != original
    assert changed.fingerprint_of("vae") == open_model_folder(plus_path).fingerprint_of("vae")
