"""What must be the same on all nodes, and how bad a difference is."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.doctor.agreement import NodeFacts, compare, differing, package_level
from qwen_edit_zero.doctor.facts import code_facts, data_facts, environment_facts, package_facts, settings_facts
from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.models import Settings


def settings(*overrides: str) -> Settings:
    return load_settings(None, overrides=overrides).settings


@pytest.mark.parametrize(
    ("name", "versions", "level"),
    [
        ("torch", ("2.13.0", "2.13.1"), Level.FAILURE),
        ("python", ("3.11.2", "3.11.9"), Level.FAILURE),
        ("nvidia-nccl-cu12", ("2.27.3", "2.27.5"), Level.FAILURE),
        ("pyarrow", ("21.0.0", "21.0.1"), Level.WARNING),
        ("pyarrow", ("21.0.0", "22.0.0"), Level.FAILURE),
        ("pytest", ("8.1", "9.0"), Level.WARNING),
        ("matplotlib", ("3.10.0", "not there"), Level.WARNING),
    ],
)
def test_versions_that_decide_the_result_must_agree(name: str, versions: tuple[str, str], level: Level) -> None:
    assert package_level(name, versions) is level


def test_the_odd_package_is_named_with_both_versions_and_the_worst_comes_first() -> None:
    usual = {"torch": "2.13.0", "pytest": "8.1", "idna": "3.1"}
    details = {"node1": usual, "node2": usual, "node3": {"torch": "2.12.0", "pytest": "8.1"}}
    first, second = compare("packages", details)
    assert first.level is Level.FAILURE
    assert first.text == "torch is 2.12.0 on node3, 2.13.0 on the 2 others"
    assert (second.level, second.text) == (Level.WARNING, "idna is not there on node3, 3.1 on the 2 others")


def test_many_differences_are_counted_and_their_nodes_named() -> None:
    details = {
        "node1": {f"f{n}.py": "a" for n in range(20)},
        "node2": {f"f{n}.py": "b" for n in range(20)},
        "node3": {f"f{n}.py": "a" for n in range(20)},
    }
    (finding,) = compare("code", details)
    assert finding.text.count(" on node2") == 5
    assert finding.text.endswith("; and 16 more files, on node2")


def test_only_variables_that_stop_ranks_from_meeting_are_fatal() -> None:
    details = {"a": {"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO"}, "b": {}}
    levels = {finding.level: finding.text for finding in compare("environment", details)}
    assert levels == {
        Level.FAILURE: "NCCL_PROTO is not there on b, LL on a",
        Level.WARNING: "NCCL_DEBUG is not there on b, INFO on a",
    }


def test_variables_and_settings_of_a_single_node_do_not_count() -> None:
    environ = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "TORCH_EXTENSIONS_DIR": "/a", "SECRET": "x"}
    assert environment_facts(environ) == {"NCCL_DEBUG": "INFO"}
    one, other = (settings_facts(settings(f"data.storage.cache_dir=/{name}")) for name in "ab")
    assert one == other
    assert settings_facts(settings("run.seed=3"))["run.seed"] == "3"


def test_the_package_itself_and_its_dependencies_are_among_the_facts() -> None:
    assert "qwen_edit_zero/doctor/facts.py" in code_facts()
    assert package_facts().keys() >= {"python", "torch", "qwen-edit-zero", "pyyaml"}


def test_manifests_are_told_apart_by_their_bytes_folders_by_names_and_sizes(tmp_path: Path) -> None:
    manifest, folder = tmp_path / "a.jsonl", tmp_path / "folder"
    manifest.write_text("{}\n")
    folder.mkdir()
    (folder / "x").write_text("1")

    def found(location: Path | str) -> str:
        return data_facts(settings(f"data.manifest={location}"))["data.manifest"]

    before = found(manifest), found(folder), found(f"{tmp_path}/*.jsonl")
    assert before == (found(manifest), found(folder), found(f"{tmp_path}/*.jsonl"))
    manifest.write_text("[]\n")
    (folder / "x").write_text("12")
    (tmp_path / "b.jsonl").write_text("")
    assert not set(before) & {found(manifest), found(folder), found(f"{tmp_path}/*.jsonl")}
    assert found(tmp_path / "gone.jsonl") == "not there"
    assert data_facts(settings("data.manifest=s3://bucket/train.jsonl")) == {}


def test_digests_differ_where_facts_do() -> None:
    folder = open_model_folder("tiny")
    same = NodeFacts(settings(), folder, {}).digests()
    other = NodeFacts(settings("run.seed=7"), folder, {"NCCL_ALGO": "Ring"}).digests()
    assert differing({"node1": same, "node2": NodeFacts(settings(), folder, {}).digests()}) == []
    assert differing({"node1": same, "node2": other}) == ["environment", "settings"]
