"""Folders as they come from the field: right ones give exactly the weights, wrong ones are refused in words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qwen_edit_zero.checkpoints.consolidate import consolidate
from qwen_edit_zero.checkpoints.describe import list_checkpoints, show_checkpoint, verify_text
from qwen_edit_zero.checkpoints.foreign.prefixes import resolve
from qwen_edit_zero.checkpoints.foreign.torch_files import read_torch_file
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.errors import CheckpointError

CASES = Path(__file__).parent / "cases"
DEEPSPEED = CASES / "deepspeed"
EXPECTED = load_file(DEEPSPEED / "EXPECTED_weights.safetensors")
OTHERS = {"vae.scale": torch.full((2, 2), 0.5), "pos_buffer": torch.arange(4.0)}

REFUSED = {
    "missing_rank": r"misses the optim_states\.pt of rank 2: it was saved by 4 ranks",
    "extra_stale_rank": r"bf16_zero_pp_rank_4_mp_rank_00_optim_states\.pt \(rank 4\) does not belong to .* 4 ranks",
    "count_right_but_wrong": r"old_bf16_zero_pp_rank_9_mp_rank_00_optim_states\.pt does not belong",
    "mixed_steps": r"rank_1_mp_rank_00_optim_states\.pt \(rank 1\) is not of the same save .* part of img_in\.weight",
    "zero_byte_rank": r"bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt has 0 bytes",
    "latest_points_nowhere": r"names the tag 'global_step20', but .* \(there are: global_step10\)",
    "latest_empty": r"latest is empty and should name a tag",
    "newer_incomplete": r"global_step20 misses .* of rank 0, 3: .* Beside it there is global_step10",
}
RIGHT = {p.name for p in DEEPSPEED.iterdir() if p.is_dir()} - set(REFUSED)


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_wrong_folders_are_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[case]):
        consolidate(DEEPSPEED / case, tmp_path / "out", dtype="fp32", open_model=open_model_folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", sorted(RIGHT))
def test_right_folders_give_exactly_the_weights(case: str, tmp_path: Path) -> None:
    out = consolidate(DEEPSPEED / case, tmp_path / "out", dtype="fp32", open_model=open_model_folder)
    found = load_file(out / "diffusion_pytorch_model.safetensors")
    others = OTHERS if case != "no_frozen" else {"pos_buffer": OTHERS["pos_buffer"]}
    assert found.keys() == (EXPECTED | others).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in (EXPECTED | others).items())


def test_the_newer_tag_is_taken_by_number_and_named_by_latest(tmp_path: Path) -> None:
    said: list[str] = []
    consolidate(DEEPSPEED / "two_tags", tmp_path / "o", dtype="bf16", open_model=open_model_folder, say=said.append)
    assert "two_tags/global_step10: DeepSpeed 0.19.8, ZeRO-2, 4 ranks, step 10" in said[0]
    listed = list_checkpoints(DEEPSPEED / "two_tags").splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["global_step9", "global_step10"]


def test_a_tag_beside_an_incomplete_one_can_be_given_itself(tmp_path: Path) -> None:
    source = DEEPSPEED / "newer_incomplete"
    assert "global_step20  not usable: " in list_checkpoints(source)
    out = consolidate(source / "global_step10", tmp_path / "o", dtype="fp32", open_model=open_model_folder)
    assert torch.equal(load_file(out / "diffusion_pytorch_model.safetensors")["embed.weight"], EXPECTED["embed.weight"])


def test_what_a_folder_holds_is_shown_in_lines() -> None:
    lines = show_checkpoint(DEEPSPEED / "zero2_4ranks_ok").splitlines()
    assert "step            10" in lines
    assert "by              DeepSpeed 0.19.8, ZeRO-2, 4 ranks" in lines
    assert "trained         4 tensors, 75 elements, F32, 300 bytes" in lines
    assert "frozen          1 tensors, 4 elements, F32, 16 bytes" in lines
    assert verify_text(DEEPSPEED / "zero2_4ranks_ok")[1]


@pytest.mark.parametrize(
    ("file", "taken"),
    [("plain", set()), ("orig_mod", {"_orig_mod"}), ("ddp_compile", {"_orig_mod"}), ("fsdp_inner", {"_orig_mod"})],
)
def test_wrappers_are_taken_out_of_names_and_nothing_else_is(file: str, taken: set[str]) -> None:
    def names(path: str) -> list[str]:
        with safe_open(CASES / "names" / f"keys_{path}.safetensors", "pt") as opened:
            return list(opened.keys())

    plain = names("plain")
    assert any("module" in name for name in plain)
    for expected in (None, plain):  # whether the model is known or not
        renaming = resolve(names(file), expected)
        assert sorted(renaming.names.values()) == sorted(plain)
        assert all(word in " ".join(renaming.notes) for word in taken)


def test_names_that_become_one_are_refused_with_both() -> None:
    with safe_open(CASES / "names" / "keys_collide.safetensors", "pt") as opened:
        stored = list(opened.keys())
    with pytest.raises(CheckpointError, match="are both the model's") as refused:
        resolve(stored)
    assert sum(name in str(refused.value) for name in stored) >= 2


def test_a_model_inside_a_larger_one_is_found_by_its_names() -> None:
    model = ["img_in.weight", "model.weight"]
    stored = [*(f"module.transformer.{n}" for n in model), "module.vae.scale"]
    renaming = resolve(stored, model)
    assert renaming.names == {f"module.transformer.{n}": n for n in model}
    assert renaming.left_out == ("module.vae.scale",)
    assert resolve(["model.img_in.weight", "modelling.x"]).names["modelling.x"] == "modelling.x"


def test_numpy_objects_in_a_torch_file_do_no_harm() -> None:
    value = read_torch_file(CASES / "rng_with_numpy.pt").value
    assert isinstance(value, dict)
    assert math.isfinite(len(value))
