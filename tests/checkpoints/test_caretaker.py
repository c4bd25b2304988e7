"""What becomes of checkpoints once they are whole, when copies are slow, fail or meet damage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from qwen_edit_zero.checkpoints.backup import FolderBackup
from qwen_edit_zero.checkpoints.caretaker import Caretaker
from qwen_edit_zero.checkpoints.retention import Retention
from qwen_edit_zero.errors import StorageError
from tests.checkpoints.states import save


class Place(FolderBackup):
    """A backup whose copies wait for a permit each, and which fails while `broken`."""

    def __init__(self, path: Path, *, permits: int = 1000) -> None:
        super().__init__(path)
        self.permits, self.begun, self.broken = threading.Semaphore(permits), threading.Semaphore(0), False
        self.niceness: int | None = None

    def copy(self, checkpoint: Path) -> str:
        self.begun.release()
        self.permits.acquire()
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if self.broken:
            raise StorageError("the other disk is full")
        return super().copy(checkpoint)


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def _damage(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_newest_stays_when_copies_are_slower_than_saves(tmp_path: Path) -> None:
    run, place = tmp_path / "run", Place(tmp_path / "backup", permits=0)
    caretaker = Caretaker(run, Retention(keep=1), place)
    caretaker.look_after(save(run, 2))
    place.begun.acquire()
    for step in (4, 6):
        caretaker.look_after(save(run, step))
    place.permits.release()  # of step 2
    place.begun.acquire()
    assert _names(run) == ["step-00000002", "step-00000004", "step-00000006"]
    place.permits.release()  # of step 6, the newest
    place.begun.acquire()
    assert _names(run) == ["step-00000004", "step-00000006"]
    place.permits.release()
    caretaker.finish()
    assert caretaker.messages() == []
    assert _names(run) == ["step-00000006"]
    assert _names(tmp_path / "backup") == ["step-00000002", "step-00000004", "step-00000006"]


def test_one_that_became_whole_a_moment_ago_is_not_deleted_for_an_older_one(tmp_path: Path) -> None:
    caretaker = Caretaker(tmp_path, Retention(keep=1))
    for step in (5, 6, 7, 8):  # later ones were renamed by the writing thread and are not handed over yet
        save(tmp_path, step)
    caretaker.look_after(tmp_path / "step-00000006")
    caretaker.finish()
    assert _names(tmp_path) == ["step-00000006", "step-00000007", "step-00000008"]


def test_a_damaged_one_that_waits_for_its_copy_does_not_count_and_is_told_once(tmp_path: Path) -> None:
    run, place = tmp_path / "run", Place(tmp_path / "backup")
    caretaker = Caretaker(run, Retention(keep=2), place)
    for step in (2, 4, 6, 8):
        path = save(run, step)
        if step == 4:
            _damage(path)
        caretaker.look_after(path)
        caretaker.wait()
        if step == 6:
            assert _names(run) == ["step-00000002", "step-00000004", "step-00000006"]
    caretaker.finish()
    assert _names(run) == ["step-00000004", "step-00000006", "step-00000008"]
    (message,) = caretaker.messages()
    assert "step-00000004 is not copied" in message
    assert "rank-00000.safetensors is damaged" in message


def test_what_waits_for_its_copy_is_not_deleted_and_the_end_promises_nothing(tmp_path: Path) -> None:
    run, place = tmp_path / "run", Place(tmp_path / "backup")
    caretaker = Caretaker(run, Retention(keep=1), place)
    caretaker.look_after(save(run, 2))
    caretaker.wait()
    place.broken = True
    for step in (4, 6):
        caretaker.look_after(save(run, step))
        caretaker.wait()
    caretaker.finish()
    assert _names(run) == ["step-00000002", "step-00000004", "step-00000006"]
    *told, last = caretaker.messages()
    assert len(told) == 3
    assert all("tried again if there is another save" in message for message in told)
    assert "without a copy" in last
    assert "step-00000004, step-00000006. Copy what you need yourself" in last


def test_copies_that_an_earlier_process_did_not_make_are_made_before_anything_is_deleted(tmp_path: Path) -> None:
    run, place = tmp_path / "run", Place(tmp_path / "backup", permits=0)
    for step in (2, 4):
        save(run, step)
    save(run, 6).rename(run / ".step-00000006.replaced")  # by a process that died between two renames
    caretaker = Caretaker(run, Retention(keep=1), place)
    caretaker.catch_up()
    place.begun.acquire()
    caretaker.look_after(save(run, 8))
    for _ in range(2):
        place.permits.release()
        place.begun.acquire()
    assert {"step-00000002", "step-00000004"} <= set(_names(run))
    for _ in range(2):
        place.permits.release()
    caretaker.finish()
    assert _names(run) == ["step-00000008"]
    assert _names(tmp_path / "backup") == [f"step-0000000{step}" for step in (2, 4, 6, 8)]


def test_catching_up_deletes_no_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path / "run", step)
    caretaker = Caretaker(tmp_path / "run", Retention(keep=1), Place(tmp_path / "backup"))
    caretaker.catch_up()
    caretaker.finish()
    assert _names(tmp_path / "run") == ["step-00000002", "step-00000004"]


_ABANDONED = """
import sys, threading
from pathlib import Path
from qwen_edit_zero.checkpoints.caretaker import Caretaker
from qwen_edit_zero.checkpoints.retention import Retention

class Endless:
    name, begun = "endless", threading.Event()
    def copy(self, checkpoint):
        self.begun.set()
        threading.Event().wait(60)

caretaker = Caretaker(Path(sys.argv[1]), Retention(), Endless())
caretaker.look_after(Path(sys.argv[1]))
Endless.begun.wait()
caretaker.abandon()
"""


def test_a_copy_that_was_abandoned_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _ABANDONED, str(tmp_path)], check=True, timeout=40)


def test_copies_are_made_at_low_priority(tmp_path: Path) -> None:
    place = Place(tmp_path / "backup")
    caretaker = Caretaker(tmp_path / "run", Retention(), place)
    caretaker.look_after(save(tmp_path / "run", 1))
    caretaker.finish()
    assert place.niceness is not None
    assert place.niceness >= 10
