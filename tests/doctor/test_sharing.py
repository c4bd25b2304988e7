"""Whether two nodes see one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwen_edit_zero.doctor.file_systems import FileSystem, file_system_of, free_bytes
from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.doctor.places import Place, Seen, judge_sharing
from qwen_edit_zero.doctor.sharing import Answer, Asked, Question, answer

NODES = [Node("node1", (0,)), Node("node2", (1,)), Node("node3", (2,))]
PLACE = Place("run.dir", Path("/runs/a"), 1)
NFS, LOCAL = FileSystem("nfs4", "server:/x", "/runs"), FileSystem("ext4", "/dev/sda1", "/")


def test_one_folder_is_seen_by_all_and_nothing_is_left(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "runs" / "a")
    answers = [answer(asked.question, number) for number in range(3)]
    assert [told.error for told in answers] == ["", "", ""]
    assert asked.missing([0, 1, 2]) == []
    asked.clean()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    asked = Asked(tmp_path)
    asked.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_another_folder_under_the_same_path_is_found(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "a")
    inside = Path(asked.question.folder).name
    (tmp_path / "b").mkdir()
    elsewhere = replace(asked.question, folder=str(tmp_path / "b" / inside))
    assert answer(elsewhere, 1, patience=0.0).error == "is another folder there"
    nowhere = replace(asked.question, folder=str(tmp_path / "c" / inside))
    assert answer(nowhere, 1, patience=0.0).error == "is not there"
    assert answer(replace(asked.question, token="other"), 1, patience=0.0).error == "shows other bytes there"
    assert asked.missing([1], patience=0.0) == [1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = Asked(tmp_path / "file" / "runs")
    assert asked.question.error == "cannot be written: Not a directory"
    assert answer(asked.question, 1, patience=0.0) == Answer()
    asked.clean()


def judged(answers: list[Answer], systems: list[FileSystem], unseen: list[int] | None = None) -> tuple[Level, str]:
    seen = [Seen(system, 1) for system in systems]
    finding = judge_sharing(PLACE, NODES, Question("", ""), answers, unseen or [], seen)
    return finding.level, finding.text


def test_the_nodes_apart_are_named_with_their_file_systems() -> None:
    level, text = judged([Answer(), Answer(9, "is not there"), Answer(9, "is not there")], [NFS, LOCAL, LOCAL])
    assert level is Level.FAILURE
    assert text == (
        "run.dir /runs/a is not there, on node[2-3]: ext4 (/dev/sda1 on /); on node1: nfs4 (server:/x on /runs)"
    )
    level, text = judged([Answer(), Answer(), Answer()], [NFS] * 3, unseen=[2])
    assert (level, text) == (Level.FAILURE, "run.dir /runs/a: node1 does not see what node3 wrote")


def test_slow_folders_and_buckets_are_warned_of() -> None:
    assert judged([Answer(), Answer(0.2), Answer()], [NFS] * 3)[0] is Level.OK
    level, text = judged([Answer(), Answer(4.0), Answer()], [NFS] * 3)
    assert level is Level.WARNING
    assert "within 4.0 s (slowest: node2)" in text
    level, text = judged([Answer()] * 3, [FileSystem("fuse.s3fs", "s3fs", "/runs")] * 3)
    assert level is Level.WARNING
    assert "fuse.s3fs renames file by file" in text


def test_the_innermost_mount_counts_and_blanks_are_read(tmp_path: Path) -> None:
    lines = [
        "22 1 254:0 / / rw - ext4 /dev/vda rw",
        rf"30 22 0:40 / {tmp_path}/a\040b rw shared:1 - nfs4 server:/export rw,vers=4",
    ]
    (tmp_path / "a b").mkdir()
    assert file_system_of(tmp_path / "a b" / "not" / "yet", lines).kind == "nfs4"
    assert file_system_of(tmp_path, lines) == FileSystem("ext4", "/dev/vda", "/")
    assert file_system_of(tmp_path).kind != "unknown"
    assert free_bytes(tmp_path / "not" / "yet")
