"""The copies of a run's checkpoints in a second place: tried at the start, caught up, waited for by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qwen_edit_zero.checkpoints.backup import backup_of_run
from qwen_edit_zero.checkpoints.caretaker import Caretaker
from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.retention import Retention
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import CheckpointSettings

_TURN_SECONDS = 5.0


def probe_backup(settings: CheckpointSettings, folder: Path) -> None:
    """See whether `checkpoint.backup`, if there is one, takes a small file. Collective, before anything costs time.

    `folder` is the run's `checkpoints` folder, which need not exist yet.
    Raises SettingsError on all ranks if it does not, or is not apart from `folder`.
    """
    if settings.backup is None:
        return
    ranks, fault = Coordinator(), None
    if ranks.rank == 0:
        try:
            backup_of_run(settings.backup, folder).probe()
        except SettingsError as error:
            fault = str(error)
    if (fault := ranks.gather(fault)[0]) is not None:
        raise SettingsError(fault)


def catch_up_backup(settings: CheckpointSettings, folder: Path, say: Callable[[str], None]) -> None:
    """Make the copies that an earlier process left to be made, and wait for them. Collective.

    Deletes no checkpoint. A copy that fails is a warning.
    """
    ranks, caretaker = Coordinator(), None
    if settings.backup is None:
        return
    place = backup_of_run(settings.backup, folder)
    with ranks.together(f"looking at {folder}"):
        if ranks.rank == 0 and folder.is_dir():
            caretaker = Caretaker(folder, Retention.of(settings), place)
            caretaker.catch_up()
    try:
        finish_copies(caretaker, ranks, say)
    finally:
        if caretaker is not None:
            caretaker.abandon()


def finish_copies(caretaker: Caretaker | None, ranks: Coordinator, say: Callable[[str], None]) -> None:
    """Wait for rank 0's copies on all ranks, in turns shorter than a collective may take. Collective."""
    if caretaker is not None and caretaker.copying:
        say(f"waiting for copies in {caretaker.place_name}")
    while ranks.gather(caretaker is not None and caretaker.copies_after(_TURN_SECONDS))[0]:
        pass
    if caretaker is not None:
        caretaker.finish()
        for message in caretaker.messages():
            say(message)
