"""Checkpoints of a course that a run has left: who goes back to an earlier one does not want the later ones again.

They stay where they are. `RUN/checkpoints/.given-up.json` lists their saves, so that the newest one is looked for among
the others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import sync_folder, write_file
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.errors import CheckpointError

FILE = ".given-up.json"


def given_up(folder: Path) -> frozenset[str]:
    """The save ids of a `checkpoints` folder that do not count as the newest. Raises CheckpointError."""
    file = folder / FILE
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found, list) or not all(isinstance(save_id, str) for save_id in found):
            raise ValueError("it is no list of save ids")
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}). It lists checkpoints that the run has left by going back to an earlier "
            "one; delete it if the newest one is to count again"
        ) from None
    return frozenset(found)


def go_back(folder: Path, chosen: Path) -> list[Path]:
    """Let a run go on from `chosen`: later checkpoints of its `checkpoints` folder are given up, and `chosen` is not.

    If `chosen` lies elsewhere, all are given up. Returns those that count no more from now on, the oldest first.
    For the only writer of the folder. Raises CheckpointError and OSError.
    """
    before, head = given_up(folder), load_head(chosen)
    here = chosen.resolve().parent == folder.resolve()
    left, there = [], set()
    for path in layout.checkpoint_folders(folder):
        try:
            other = load_head(path)
        except CheckpointError:  # passed over anyway
            continue
        there.add(other.save_id)
        if other.save_id != head.save_id and not (here and other.step <= head.step) and other.save_id not in before:
            left.append((path, other.save_id))
    after = ((before & there) | {save_id for _, save_id in left}) - {head.save_id}
    if after != before:
        temporary = folder / f"{FILE}.partial"
        write_file(temporary, json.dumps(sorted(after), indent=1).encode())
        os.replace(temporary, folder / FILE)
        sync_folder(folder)
    return [path for path, _ in left]
