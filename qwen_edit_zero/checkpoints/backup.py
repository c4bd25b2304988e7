"""A second copy of a checkpoint, verified while it is made."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import (
    CHUNK_BYTES,
    ChecksummedFile,
    advice,
    bytes_text,
    checksum_of,
    sync_folder,
    write_file,
)
from qwen_edit_zero.checkpoints.manifest import ManifestHead
from qwen_edit_zero.checkpoints.placement import clean_leftovers, put_in_place
from qwen_edit_zero.checkpoints.validity import check_checkpoint
from qwen_edit_zero.errors import CheckpointError, QwenEditError, StorageError


class BackupPlace(Protocol):
    """Where verified copies of checkpoints go."""

    name: str

    def copy(self, checkpoint: Path) -> str:
        """Copy one checkpoint, unless the same save is there already; returns where to.

        Raises StorageError, or CheckpointError if it is the checkpoint that cannot be used.
        """
        ...


class FolderBackup:
    """A folder of this machine's file system."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path

    def copy(self, checkpoint: Path) -> str:
        """See `backup_checkpoint`."""
        return str(backup_checkpoint(checkpoint, self._path))


def open_backup(destination: str) -> BackupPlace:
    """The place meant by `checkpoint.backup`: a folder, `file://...`, or any URL that fsspec knows.

    Raises SettingsError if it is a URL of an unknown kind or if the package for it is not installed.
    """
    if "://" not in destination:
        return FolderBackup(Path(destination).expanduser().absolute())
    parts = urlsplit(destination)
    if parts.scheme == "file":
        return FolderBackup(Path(unquote(parts.path)))
    from qwen_edit_zero.checkpoints.remote import RemoteBackup

    return RemoteBackup(destination)


def backup_checkpoint(checkpoint: Path, destination: Path) -> Path:
    """Copy a checkpoint into another `checkpoints` folder; whole there, or not there.

    What is read is compared with the checksums of the manifest, and what was written is read again and compared too.
    A copy of the same save that is there already is left as it is. Returns the copy's folder.
    Raises StorageError naming the file, CheckpointError if the checkpoint is damaged.
    """
    manifest = check_checkpoint(checkpoint)
    final = destination / layout.checkpoint_name(manifest.step)
    if _same_save(final, manifest):
        return final
    partial = layout.partial_folder(destination, manifest.step)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        clean_leftovers(destination)
        _check_space(destination, manifest.size)
        partial.mkdir()
        for record in manifest.files:
            _copy(checkpoint / record.name, partial / record.name, record.xxh3_64)
        write_file(partial / layout.MANIFEST, (checkpoint / layout.MANIFEST).read_bytes())
        sync_folder(partial)
        put_in_place(partial, final, manifest.step)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = f"{error.strerror} ({error.filename}){advice(error)}"
        raise StorageError(f"copying {checkpoint} to {destination} failed: {why}") from error
    except QwenEditError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _check_space(destination: Path, size: int) -> None:
    free = shutil.disk_usage(destination)
    if free.total and free.free < size:
        raise StorageError(f"the copy needs {bytes_text(size)}, and {destination} has {bytes_text(free.free)} free")


def _same_save(path: Path, manifest: ManifestHead) -> bool:
    try:
        return check_checkpoint(path).save_id == manifest.save_id
    except CheckpointError:
        return False


def _copy(source: Path, target: Path, checksum: str) -> None:
    with source.open("rb", buffering=0) as read, ChecksummedFile(target) as written:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := read.readinto(buffer):
            written.write(buffer[:count])
    if written.checksum != checksum:
        raise CheckpointError(f"{source} is damaged: it does not match the checksum taken while it was written")
    if checksum_of(target) != checksum:
        raise OSError(errno.EIO, "what was written reads back differently", str(target))
