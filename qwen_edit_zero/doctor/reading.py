"""Whether a node can read what training reads: the model's files, and pictures of the data."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from qwen_edit_zero.edit_data.storage.names import is_url
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_place
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.errors import QwenEditError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.datasets import (
    DEMO,
    held_out_manifest,
    training_table,
    wants_held_out,
    whole_held_out_table,
)

_SECONDS, _MOST = 1.0, 256 << 20  # that a model file is read for, and bytes
_PIECE = 8 << 20
_SAMPLES = 3
_MANIFEST = 64 << 20  # bytes of a manifest that is opened; reading a larger one takes its time
_PICTURE = 256 << 20
Picture = tuple[str, str]  # its place, by name, and its own name there


def read_rate(folder: ModelFolder) -> float:
    """Bytes a second at which this node reads the model's largest file, past its own cache where the system lets it."""
    files = [path for shards in folder.shards.values() for path in shards.files]
    path = max(files, key=lambda file: file.stat().st_size)
    done, began = 0, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while done < _MOST and time.perf_counter() - began < _SECONDS:
            piece = file.read(_PIECE)
            if not piece:
                break
            done += len(piece)
    return done / max(time.perf_counter() - began, 1e-9)


def sample_pictures(settings: Settings, most_references: int) -> tuple[list[Picture], list[str]]:
    """The pictures of a few samples of the training set and the held-out set; and of a set that is not opened, why.

    Raises DataError if a manifest cannot be read, or has no sample to train on or to hold out.
    """
    found: list[Picture] = []
    unopened = []
    held_out = held_out_manifest(settings) if wants_held_out(settings) else None
    with tempfile.TemporaryDirectory(prefix="doctor-") as work:
        for title, location in (("", str(settings.data.manifest)), ("held-out set: ", held_out)):
            if location is None:
                continue
            if why := _unopened(location):
                unopened.append(title + why)
                continue
            opened = whole_held_out_table if title else training_table
            table = opened(settings, most_references, index_folder=Path(work))
            assert table is not None
            samples = [table[n] for n in sorted({len(table) * i // _SAMPLES for i in range(_SAMPLES)})]
            found += [(s.place.name, name) for s in samples for name in (*s.source_names, s.target_name)]
    return found, unopened


def _unopened(location: str) -> str:
    """Why a manifest is not opened now; empty if it is."""
    if location == DEMO:
        return ""
    if is_url(location):
        return "the manifest is on an object store; `qwen-edit-zero data check` looks at it"
    path = Path(location).expanduser()
    if (path.exists() and not path.is_file()) or any(mark in location for mark in "*?{"):
        return "a set of files is only read when training starts; `qwen-edit-zero data check` looks at it"
    if path.is_file() and path.stat().st_size > _MANIFEST:
        return "the manifest is large, and only read when training starts; see `qwen-edit-zero data check`"
    return ""


def unreadable(pictures: Sequence[Picture], settings: Settings) -> str:
    """What is wrong with the first of these pictures that this node cannot read; empty if it reads all of them."""
    options = StorageOptions.of(settings.data.storage)
    for root, name in pictures:
        try:
            open_place(root, options).file(name).read(_PICTURE)
        except (OSError, QwenEditError) as error:
            return str(error)
    return ""
