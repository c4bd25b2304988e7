"""The command: options, exit statuses, what is shown and written."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from qwen_edit_zero import cli
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.links import Measured, Speed
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.doctor.report import Report, write_json
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.command_line import parse_train_arguments
from tests.ranks import run_ranks

PROBLEM = Finding("folders", "shared", Level.FAILURE, "run.dir is not shared", "share it")
NODES = [Node("node1", (0, 1)), Node("node2", (2, 3))]


def report(*findings: Finding) -> Report:
    return Report(NODES, "srun", 4.0, findings, Measured(None, None, {}, {(0, 1): Speed(1e-4, 1e9)}))


def test_problems_come_last_and_decide_the_status() -> None:
    good, odd = Finding("software", "code", Level.OK, "the same"), Finding("speed", "device", Level.WARNING, "slow")
    assert report(good, odd).exit_status == 0
    bad = report(PROBLEM, good, odd)
    assert bad.exit_status == 2
    text = bad.text(100)
    assert text.startswith("doctor: 4 ranks on 2 nodes (node[1-2]), started by srun\n")
    assert text.index("the same") < text.index("WARNING  speed, device: slow") < text.index("FAILURE  folders, shared")
    assert text.endswith(
        "    -> share it\n\nmend the failures before training: 1 well, 1 warning, 1 failure, 0 not checked; 4 s"
    )


def test_json_has_findings_and_measurements(tmp_path: Path) -> None:
    write_json(report(PROBLEM), tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["status"], told["exit_status"]) == ("failure", 2)
    assert told["findings"][0]["advice"] == "share it"
    assert told["pairs"] == [{"a": "node1", "b": "node2", "latency": 1e-4, "rate": 1e9}]
    with pytest.raises(SettingsError, match=r"--json .* cannot be written: No such file"):
        write_json(report(), tmp_path / "no" / "told.json")


def test_options_of_the_doctor_need_it() -> None:
    with pytest.raises(SettingsError, match="--json goes with --doctor"):
        parse_train_arguments(["--json", "a"])
    with pytest.raises(SettingsError, match="no number of seconds from 1 to 3600"):
        parse_train_arguments(["--doctor", "--timeout", "never"])
    assert parse_train_arguments(["--doctor", "--timeout", "60"]).doctor_seconds == 60.0


def test_help_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: qwen-edit-zero doctor [RECIPE.yaml]")


def doctor(rank: int, world: int, *arguments: str) -> tuple[int, str]:
    from qwen_edit_zero import train

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return train.main([*arguments, "--doctor"]), out.getvalue()


def test_two_ranks_of_this_machine_are_ready(recipe: str, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    backup = f"checkpoint.backup={tmp_path}/backup"
    arguments = (recipe, f"run.dir={tmp_path}", backup, "--engine", "ddp", "--json", str(told))
    (status, text), (other, silence) = run_ranks(doctor, 2, *arguments, init_process_group=False)
    assert (status, other, silence) == (0, 0, "")
    assert "ready to train: " in text
    assert f" backup checkpoint.backup {tmp_path}/backup/small can be written (" in " ".join(text.split())
    found = json.loads(told.read_text())
    assert {f["name"] for f in found["findings"]} >= {"code", "packages", "settings", "samples", "space", "all-reduce"}
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


def test_the_held_out_set_is_looked_at_as_well(small_data: Path, tmp_path: Path) -> None:
    row = json.loads(small_data.read_text().splitlines()[0]) | {"target": "images/gone.png"}
    (tmp_path / "images").symlink_to(small_data.parent / "images")
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    given = (f"run.dir={tmp_path}/runs", f"data.manifest={small_data}", f"data.validation={tmp_path}/held_out.jsonl")
    for more, expected in (((), 2), (("sampling.count=0",), 0)):
        ((status, text),) = run_ranks(doctor, 1, *given, *more, init_process_group=False)
        assert status == expected
        assert ("gone.png" in text) == (expected == 2)


def test_what_cannot_be_read_is_told_with_the_rest(small_data: Path, tmp_path: Path) -> None:
    """One start with three mistakes: a manifest with a picture that is not there, a model, a folder."""
    (tmp_path / "runs").write_text("a file")
    row = json.loads(small_data.read_text().splitlines()[0]) | {"target": "images/gone.png"}
    (tmp_path / "images").symlink_to(small_data.parent / "images")
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    wrong = (f"data.manifest={tmp_path}/a.jsonl", "model.path=/nowhere", f"run.dir={tmp_path}/runs")
    ((status, text),) = run_ranks(doctor, 1, *wrong, init_process_group=False)
    assert status == 2
    flat = " ".join(text.split())
    assert "FAILURE data, model folder: model.path: there is no folder /nowhere" in flat
    assert "FAILURE data, samples: " in flat
    assert "gone.png" in flat
    assert f"FAILURE folders, shared: run.dir {tmp_path}/runs/demo cannot be written: Not a directory" in flat
    assert "all-reduce not checked: there is one rank alone" in flat
