"""The quick part, on two ranks that take themselves for two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.doctor import quick, sharing
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.errors import ClusterError
from qwen_edit_zero.settings.load import load_settings
from tests.ranks import run_ranks


def checked(rank: int, world: int, run_dir: str, override: str, environ: dict[str, str], elsewhere: str) -> str:
    """What the check raises on this rank; rank 1 has `override`, `environ`, and, if given, its folders elsewhere."""
    quick.node_key = lambda: f"node{rank + 1}||0"  # type: ignore[assignment]
    if rank and elsewhere:
        real = quick.answer
        sharing.PATIENCE_SECONDS = 0.0
        quick.answer = lambda question, number: real(  # type: ignore[assignment]
            sharing.Question(question.folder.replace(run_dir, elsewhere), question.token), number, patience=0.0
        )
    overrides = (f"run.dir={run_dir}", *((override,) if rank and override else ()))
    settings = load_settings(None, overrides=overrides).settings
    identity = Identity(rank, 0, 2, 1, "torchrun", "127.0.0.1", 1)
    try:
        quick.QuickCheck(settings, identity, environ if rank else {"OMP_NUM_THREADS": "1"})(open_model_folder("tiny"))
    except ClusterError as error:
        return str(error)
    return ""


def test_nodes_that_are_alike_go_on_and_leave_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert run_ranks(checked, 2, str(runs), "", {"OMP_NUM_THREADS": "4"}, "") == ["", ""]
    assert not runs.exists()


def test_rank_0_names_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = run_ranks(checked, 2, str(tmp_path / "a"), "run.seed=5", {"NCCL_ALGO": "Ring"}, str(tmp_path / "b"))
    assert second == ""
    assert "\n  settings: run.seed is 5 on node2, 0 on node1; start all nodes with the same recipe" in first
    assert "\n  environment: NCCL_ALGO is Ring on node2, not there on node1; " in first
    assert f"\n  shared: run.dir {tmp_path}/a/demo is not there, on node2: " in first


def checked_on_one_node(rank: int, world: int, run_dir: str) -> str:
    """What the check raises on this rank; all are on this machine, and rank 1 has another learning rate."""
    overrides = (f"run.dir={run_dir}", *(("optimizer.lr=0.5",) if rank == 1 else ()))
    settings = load_settings(None, overrides=overrides).settings
    identity = Identity(rank, rank, world, world, "torchrun", "127.0.0.1", 1)
    try:
        quick.QuickCheck(settings, identity, {})(open_model_folder("tiny"))
    except ClusterError as error:
        return str(error)
    return ""


def test_a_rank_with_other_settings_than_its_node_is_named(tmp_path: Path) -> None:
    first, *others = run_ranks(checked_on_one_node, 3, str(tmp_path / "runs"))
    assert others == ["", ""]
    assert "\n  settings: optimizer.lr is 0.5 on rank 1, 0.003 on the 2 others; start all" in first


def test_warnings_do_not_stop(capsys: pytest.CaptureFixture[str]) -> None:
    quick.tell([Finding("software", "packages", Level.WARNING, "idna differs"), Finding("a", "b", Level.OK, "c")])
    assert capsys.readouterr().out == "warning: packages: idna differs\n"
