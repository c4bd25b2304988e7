"""Checkpoints copied to anything that fsspec reaches: object stores (`s3://`, `gs://`, `oss://`), `memory://`, ..."""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.backup import PROBE, aside_name, probe_failed, whole_checkpoint
from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES
from qwen_edit_zero.checkpoints.manifest import ManifestHead, parse_head
from qwen_edit_zero.errors import CheckpointError, QwenEditError, SettingsError, StorageError


class RemoteBackup:
    """Copies into a folder of an fsspec file system: `run` in the place that the URL means.

    Object stores cannot rename a folder, so the manifest is written last and a folder without one is no checkpoint.
    Everything written is read back and compared with the checksums of the manifest.

    Raises SettingsError on construction if the URL's scheme is unknown or its package is not installed, or if it is
    a roundabout name for a folder of this machine.
    """

    def __init__(self, url: str, run: str = "") -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.name = f"{url.rstrip('/')}/{run}".rstrip("/")
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"checkpoint.backup {url} cannot be reached: {error}. Install the fsspec package of this kind of place "
                "(s3fs for s3://, ossfs for oss://, gcsfs for gs://), or give a folder"
            ) from error
        if isinstance(_innermost(self._fs), LocalFileSystem):
            raise SettingsError(f"checkpoint.backup {url} is on this machine; give its folder, {root}, without a URL")
        self._root = f"{str(root).rstrip('/')}/{run}".rstrip("/")

    def probe(self) -> None:
        """See `BackupPlace`."""
        path = f"{self._root}/.probe-{uuid.uuid4().hex}"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(path, PROBE)
            same = self._fs.cat_file(path) == PROBE
            self._fs.rm_file(path)
        except Exception as error:  # every kind of place raises its own
            raise probe_failed(self.name, f"{type(error).__name__}: {error}") from error
        if not same:
            raise probe_failed(self.name, "what was written reads back differently")

    def copy(self, checkpoint: Path) -> str:
        """See `BackupPlace`; returns the copy's URL."""
        manifest, content = whole_checkpoint(checkpoint)
        name = layout.checkpoint_name(manifest.step)
        try:
            for place in (name, f"{aside_name(manifest.save_id)}/{name}"):
                there = self._whole(f"{self._root}/{place}")
                if there is not None and there.save_id == manifest.save_id:
                    return f"{self.name}/{place}"
            self._set_aside(name)
            self._write(checkpoint, f"{self._root}/{name}", manifest, content)
        except QwenEditError:
            raise
        except Exception as error:  # every kind of place raises its own
            raise StorageError(
                f"copying {checkpoint} to {self.name} failed: {type(error).__name__}: {error}"
            ) from error
        return f"{self.name}/{name}"

    def _set_aside(self, name: str) -> None:
        """Copy a whole copy of another save, inside the place, to where it is not overwritten; its manifest last."""
        source = f"{self._root}/{name}"
        there = self._whole(source)
        if there is None:
            return
        aside = f"{self._root}/{aside_name(there.save_id)}/{name}"
        self._fs.makedirs(aside, exist_ok=True)
        for file in (*(record.name for record in there.files), layout.MANIFEST):
            self._fs.cp_file(f"{source}/{file}", f"{aside}/{file}")
        if self._whole(aside) is None:
            raise StorageError(f"{source} in {self.name}, of another save, could not be set aside as {aside}")

    def _write(self, checkpoint: Path, target: str, manifest: ManifestHead, content: bytes) -> None:
        self._fs.makedirs(target, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{target}/{layout.MANIFEST}")  # first: what is there is no checkpoint from now on
        wanted = {record.name for record in manifest.files}
        for old in self._list(target):
            old_name = old.rsplit("/", 1)[-1]
            if layout.is_own_file(old_name) and old_name not in wanted:
                self._fs.rm_file(f"{target}/{old_name}")
        for record in manifest.files:
            with (checkpoint / record.name).open("rb", buffering=0) as read:
                self._copy_file(read, checkpoint / record.name, f"{target}/{record.name}", record.xxh3_64)
        source, checksum = checkpoint / layout.MANIFEST, xxhash.xxh3_64_hexdigest(content)
        self._copy_file(io.BytesIO(content), source, f"{target}/{layout.MANIFEST}", checksum)

    def _list(self, target: str) -> list[str]:
        try:
            return [str(path) for path in self._fs.ls(target, detail=False)]
        except FileNotFoundError:  # an object store has no empty folders
            return []

    def _copy_file(self, read: IO[bytes], source: Path, target: str, checksum: str) -> None:
        digest = xxhash.xxh3_64()
        with self._fs.open(target, "wb", block_size=CHUNK_BYTES) as written:
            for chunk in _chunks(read):
                digest.update(chunk)
                written.write(chunk)
        if digest.hexdigest() != checksum:
            self._fs.rm_file(target)
            raise CheckpointError(f"{source} is damaged: it does not match the checksum taken while it was written")
        back = xxhash.xxh3_64()
        with self._fs.open(target, "rb", block_size=CHUNK_BYTES) as read:
            for chunk in _chunks(read):
                back.update(chunk)
        if back.hexdigest() != checksum:
            self._fs.rm_file(target)
            raise StorageError(f"{target} in {self.name} reads back differently from what was written")

    def _whole(self, target: str) -> ManifestHead | None:
        """The manifest of the copy there, if all its files are there with their sizes."""
        self._fs.invalidate_cache()
        try:
            there = parse_head(self._fs.cat_file(f"{target}/{layout.MANIFEST}"))
            whole = all(self._fs.size(f"{target}/{record.name}") == record.size for record in there.files)
        except (FileNotFoundError, CheckpointError):
            return None
        return there if whole else None


def _innermost(fs: Any) -> Any:
    """What a chained URL (`dir::...`, `simplecache::...`) leads to."""
    while (inner := getattr(fs, "fs", None)) is not None:
        fs = inner
    return fs


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
