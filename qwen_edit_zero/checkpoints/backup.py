"""A second copy of a checkpoint, verified while it is made."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
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
from qwen_edit_zero.checkpoints.manifest import ManifestHead, parse_head
from qwen_edit_zero.checkpoints.placement import clean_leftovers, make_folder, put_in_place
from qwen_edit_zero.checkpoints.validity import check_checkpoint
from qwen_edit_zero.errors import CheckpointError, QwenEditError, SettingsError, StorageError

PROBE = b"written by qwen-edit-zero to see whether it can be; may be deleted\n"


class BackupPlace(Protocol):
    """Where verified copies of the checkpoints of one run go."""

    name: str

    def probe(self) -> None:
        """Write, read and delete a small file there. Raises SettingsError if that fails."""
        ...

    def copy(self, checkpoint: Path) -> str:
        """Copy one checkpoint, unless the same save is there already; returns where to.

        A whole copy of another save of that step is set aside, not overwritten.
        Raises StorageError, or CheckpointError if it is the checkpoint that cannot be used.
        """
        ...


class FolderBackup:
    """A folder of this machine's file system. Once it was there, it must stay: it is not made anew for a copy."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._was_there = path.is_dir()

    def probe(self) -> None:
        """See `BackupPlace`."""
        path = self._path / f".probe-{uuid.uuid4().hex}"
        try:
            make_folder(self._path)
            try:
                write_file(path, PROBE)
                if path.read_bytes() != PROBE:
                    raise OSError(errno.EIO, "what was written reads back differently", str(path))
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise probe_failed(self.name, f"{error.strerror} ({error.filename})") from error

    def copy(self, checkpoint: Path) -> str:
        """See `backup_checkpoint`."""
        if self._was_there and not self._path.is_dir():  # an empty mount point would fill another disk
            raise StorageError(
                f"{self._path} is no longer there: it was deleted or moved, or its file system is not mounted any more"
            )
        copy = str(backup_checkpoint(checkpoint, self._path))
        self._was_there = True
        return copy


def probe_failed(name: str, why: str) -> SettingsError:
    """The error for a place to which nothing can be written."""
    return SettingsError(
        f"a small file could not be written to {name}, where checkpoint.backup puts copies of this run, and read again:"
        f" {why}. Make it writable, give another place, or leave checkpoint.backup out"
    )


def backup_of_run(destination: str, checkpoints: Path) -> BackupPlace:
    """Where `checkpoint.backup` puts copies of the checkpoints in RUN/checkpoints: DESTINATION/RUN.

    Raises SettingsError as `open_backup` does, if destination and `checkpoints` are not apart, and for `memory://`.
    """
    if urlsplit(destination.rpartition("::")[2]).scheme == "memory":
        raise SettingsError(
            f"checkpoint.backup {destination} is the memory of this process, which ends with it, so it keeps no copy. "
            "Give a folder on another disk, or the URL of an object store"
        )
    folder = _as_folder(destination)
    if folder is not None:
        there, here = folder.resolve(), checkpoints.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            how = "is" if there == here else "lies in" if there.is_relative_to(here) else "contains"
            raise SettingsError(
                f"checkpoint.backup {destination} {how} {checkpoints}, where the checkpoints themselves are. Give a "
                "folder apart from it, best on another disk"
            )
    return open_backup(destination, checkpoints.absolute().parent.name)


def open_backup(destination: str, run: str = "") -> BackupPlace:
    """The folder `run` in the place meant by `checkpoint.backup`: a folder, `file://...`, or any URL that fsspec knows.

    Raises SettingsError if it is a URL of an unknown kind or if the package for it is not installed.
    """
    folder = _as_folder(destination)
    if folder is not None:
        return FolderBackup(folder / run)
    from qwen_edit_zero.checkpoints.remote import RemoteBackup

    return RemoteBackup(destination, run)


def _as_folder(destination: str) -> Path | None:
    """None if it is no folder of this machine."""
    if "://" not in destination:
        return Path(destination).expanduser().absolute()
    parts = urlsplit(destination)
    if parts.scheme not in ("file", "local"):
        return None
    if parts.netloc not in ("", "localhost"):
        raise SettingsError(
            f"checkpoint.backup {destination} names the host {parts.netloc}, but {parts.scheme}:// is for this "
            f"machine; three slashes make a path of it: {parts.scheme}:///{parts.netloc}{parts.path}"
        )
    return Path(unquote(parts.path))


def aside_name(save_id: str) -> str:
    """The folder beside the copies where the copy of that save goes when another save takes its place."""
    return f"replaced-{save_id[:8]}"


def backup_checkpoint(checkpoint: Path, destination: Path) -> Path:
    """Copy a checkpoint into another `checkpoints` folder; whole there, or not there.

    What is read is compared with the checksums of the manifest, and what was written is read again and compared too.
    A copy of the same save that is there already is left as it is. One of another save of that step, of a run that was
    begun anew or is called the same, moves to a folder `replaced-...` beside it. Returns the copy's folder.
    Raises StorageError naming the file, CheckpointError if the checkpoint is damaged.
    """
    manifest, content = whole_checkpoint(checkpoint)
    name = layout.checkpoint_name(manifest.step)
    final, partial = destination / name, layout.partial_folder(destination, manifest.step, manifest.save_id)
    for there in (final, destination / aside_name(manifest.save_id) / name):
        if _save_in(there) == manifest.save_id:
            return there
    try:
        make_folder(destination)
        clean_leftovers(destination)
        _check_space(destination, manifest.size)
        partial.mkdir()
        for record in manifest.files:
            _copy(checkpoint / record.name, partial / record.name, record.xxh3_64)
        write_file(partial / layout.MANIFEST, content)
        sync_folder(partial)
        _set_aside(final)
        put_in_place(partial, final, manifest.step)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = f"{error.strerror} ({error.filename}){advice(error)}"
        raise StorageError(f"copying {checkpoint} to {destination} failed: {why}") from error
    except QwenEditError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def whole_checkpoint(checkpoint: Path) -> tuple[ManifestHead, bytes]:
    """The head of a checkpoint's manifest, and all its bytes.

    Raises CheckpointError if it is not valid, StorageError if it changes meanwhile.
    """
    manifest = check_checkpoint(checkpoint)
    try:
        content = (checkpoint / layout.MANIFEST).read_bytes()
    except OSError as error:
        raise StorageError(f"{checkpoint} was deleted while it was looked at, or its disk failed") from error
    if parse_head(content).save_id != manifest.save_id:
        raise StorageError(f"{checkpoint} was replaced while it was looked at")
    return manifest, content


def _set_aside(copy: Path) -> None:
    """Let a whole copy make room; what is not whole, or set aside already, may be replaced."""
    save_id = _save_in(copy)
    if save_id is None or copy.is_symlink():
        return
    aside = copy.parent / aside_name(save_id) / copy.name
    if not aside.exists():
        make_folder(aside.parent)
        copy.rename(aside)
        sync_folder(aside.parent)


def _save_in(path: Path) -> str | None:
    """Which save the checkpoint is, if it is a valid one."""
    try:
        return check_checkpoint(path).save_id
    except CheckpointError:
        return None


def _check_space(destination: Path, size: int) -> None:
    free = shutil.disk_usage(destination)
    if free.total and free.free < size:
        raise StorageError(f"the copy needs {bytes_text(size)}, and {destination} has {bytes_text(free.free)} free")


def _copy(source: Path, target: Path, checksum: str) -> None:
    with source.open("rb", buffering=0) as read, ChecksummedFile(target) as written:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := read.readinto(buffer):
            written.write(buffer[:count])
    if written.checksum != checksum:
        raise CheckpointError(f"{source} is damaged: it does not match the checksum taken while it was written")
    _drop_from_cache(target)  # so that the disk is asked, and no room taken that others use
    if checksum_of(target) != checksum:
        raise OSError(errno.EIO, "what was written reads back differently", str(target))
    _drop_from_cache(target)


def _drop_from_cache(path: Path) -> None:
    """Let the system forget the pages of a synced file, where it can."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
