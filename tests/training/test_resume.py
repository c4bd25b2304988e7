"""A checkpoint is gone on from only by a run that means the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.training.resume import CheckpointChoice, RunIdentity, changed_settings, check_identity, run_state
from tests.checkpoints.states import save
from tests.ranks import run_ranks

IDENTITY = RunIdentity("model", "data", 8, 0, {"rank": 4, "alpha": 4.0, "targets": ["attn.to_q"]}, ["*_mod.*"])


def reader(identity: RunIdentity) -> Any:
    state = run_state(identity, step=3, epoch=0, samples_seen=24, engine={"optimizer_steps": 3})
    settings = {"optimizer": {"lr": 1e-3, "eps": 1e-8}, "batch": {"global_size": identity.global_size}}
    return SimpleNamespace(path=Path("step-00000003"), run_state=state, manifest=SimpleNamespace(settings=settings))


def test_the_same_run_goes_on() -> None:
    check_identity(reader(IDENTITY), IDENTITY)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"model_fingerprint": "other"}, "model.path"),
        ({"data_fingerprint": "other"}, "data.manifest"),
        ({"global_size": 16}, "batch.global_size: 8 there, 16 here"),
        ({"seed": 1}, "run.seed"),
        ({"lora": {"rank": 4, "alpha": 64.0, "targets": ["attn.to_q"]}}, "model.lora"),
        ({"lora": None}, "model.lora"),
        ({"frozen": []}, "model.freeze"),
        ({"order": {"rule": "2", "balance": "uniform", "weights": "loss"}}, "data.balance"),
    ],
)
def test_what_changes_the_meaning_is_named(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_identity(reader(IDENTITY), replace(IDENTITY, **changes))
    assert setting in str(caught.value)
    told: list[str] = []
    check_identity(reader(IDENTITY), replace(IDENTITY, **changes), accept=True, say=told.append)
    assert setting in told[0]
    assert str(caught.value).count(" there, ") == 1


def test_other_content_of_the_same_rows_is_told() -> None:
    before, told = replace(IDENTITY, content="one"), list[str]()
    check_identity(reader(before), before, say=told.append)
    older = reader(before)
    del older.run_state["identity"]["content"]  # as written before it was kept
    check_identity(older, before, say=told.append)
    assert not told
    check_identity(reader(before), replace(IDENTITY, content="two"), say=told.append)
    assert "are not as they were when step-00000003 was written" in told[0]


def test_other_changed_settings_are_listed() -> None:
    now = {"optimizer": {"lr": 5e-4, "eps": 1e-8}, "batch": {"global_size": 16}}
    assert changed_settings(reader(IDENTITY), now) == ["optimizer.lr: 0.001 there, 0.0005 here"]
    sharded = {"engine": {"deepspeed": None}}
    checkpoint = SimpleNamespace(manifest=SimpleNamespace(settings=sharded))
    assert changed_settings(checkpoint, {"engine": {"deepspeed": {"zero_optimization": {"stage": 2}}}}) == [  # type: ignore[arg-type]
        "engine.deepspeed: None there, given here"
    ]


def test_a_setting_that_is_newer_than_the_checkpoint_is_told_only_if_it_is_used() -> None:
    now = {"optimizer": {"lr": 1e-3, "eps": 1e-8, "ema": None}, "batch": {"global_size": 8}}
    assert changed_settings(reader(IDENTITY), now) == []
    now["optimizer"]["ema"] = 0.999
    assert changed_settings(reader(IDENTITY), now) == ["optimizer.ema: nothing there, 0.999 here"]


def choice_where_rank_1_does_not_see_the_newest(rank: int, world: int, folder: Path) -> tuple[Any, list[str]]:
    from qwen_edit_zero.training import resume

    load, told = resume.load_head, list[str]()

    def unseen(path: Path) -> Any:
        if rank == 1 and path.name == "step-00000008":
            raise CheckpointError("there is no manifest")
        return load(path)

    resume.load_head = unseen
    chosen = CheckpointChoice("auto", folder, told.append, rank=rank).next()
    return chosen, told


def test_all_ranks_go_on_from_the_same_checkpoint_though_one_does_not_see_the_newest(tmp_path: Path) -> None:
    for step in (6, 8):
        save(tmp_path, step)
    (first, told), (second, _) = run_ranks(choice_where_rank_1_does_not_see_the_newest, 2, tmp_path)
    assert first == second == tmp_path / "step-00000006"
    assert "step-00000008" in told[0]
    assert "rank 1: there is no manifest" in told[0]


def refusing_one_after_another(rank: int, world: int, folder: Path, resume: str) -> tuple[list[Path], list[str]]:
    told, found = list[str](), list[Path]()
    choice = CheckpointChoice(resume, folder, told.append, rank=rank)
    try:
        while True:
            path = choice.next()
            assert path is not None
            found.append(path)
            choice.refuse(path, f"{path.name} is damaged")
    except CheckpointError as error:
        return found, [*told, str(error)]


def test_what_was_found_damaged_while_it_was_read_is_passed_over_and_told_once(tmp_path: Path) -> None:
    for step in (4, 6, 8):
        save(tmp_path, step)
    one, other = run_ranks(refusing_one_after_another, 2, tmp_path, "auto")
    assert one == other
    found, told = one
    assert [path.name for path in found] == ["step-00000008", "step-00000006", "step-00000004"]
    assert [line.split(":")[0] for line in told[:3]] == [f"passing over checkpoint step-0000000{n}" for n in (8, 6, 4)]
    assert "none of the 3 checkpoints" in told[3]


def test_a_checkpoint_given_by_its_path_is_not_replaced_by_another(tmp_path: Path) -> None:
    for step in (4, 6):
        save(tmp_path, step)
    found, told = refusing_one_after_another(0, 1, tmp_path, str(tmp_path / "step-00000006"))
    assert found == [tmp_path / "step-00000006"]
    assert told == ["step-00000006 is damaged"]


def test_a_checkpoint_that_training_did_not_write_is_refused_in_words() -> None:
    foreign: Any = SimpleNamespace(path=Path("step-00000003"), run_state={"step": 3})
    with pytest.raises(CheckpointError, match="does not say of which run it is"):
        check_identity(foreign, IDENTITY)
