"""Checkpoints copied to anything that fsspec reaches: object stores (`s3://`, `gs://`, `oss://`), `memory://`, ..."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES
from qwen_edit_zero.checkpoints.manifest import ManifestHead, parse_head
from qwen_edit_zero.checkpoints.validity import check_checkpoint
from qwen_edit_zero.errors import CheckpointError, QwenEditError, SettingsError, StorageError


class RemoteBackup:
    """Copies into a folder of an fsspec file system.

    Object stores cannot rename a folder, so the manifest is written last and a folder without one is no checkpoint.
    Everything written is read back and compared with the checksums of the manifest.

    Raises SettingsError on construction if the URL's scheme is unknown or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.name = url.rstrip("/")
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"checkpoint.backup {url} cannot be reached: {error}. Install the fsspec package of this kind of place "
                "(s3fs for s3://, ossfs for oss://, gcsfs for gs://), or give a folder"
            ) from error
        self._root = str(root).rstrip("/")

    def copy(self, checkpoint: Path) -> str:
        """Copy one checkpoint, unless the same save is there already; returns the copy's URL.

        Raises StorageError, or CheckpointError if it is the checkpoint that cannot be used.
        """
        manifest = check_checkpoint(checkpoint)
        name = layout.checkpoint_name(manifest.step)
        target = f"{self._root}/{name}"
        try:
            if not self._has(target, manifest):
                self._write(checkpoint, target, manifest)
        except QwenEditError:
            raise
        except Exception as error:  # every kind of place raises its own
            raise StorageError(
                f"copying {checkpoint} to {self.name} failed: {type(error).__name__}: {error}"
            ) from error
        return f"{self.name}/{name}"

    def _write(self, checkpoint: Path, target: str, manifest: ManifestHead) -> None:
        self._fs.makedirs(target, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{target}/{layout.MANIFEST}")  # first: what is there is no checkpoint from now on
        wanted = {record.name for record in manifest.files}
        for old in self._list(target):
            old_name = old.rsplit("/", 1)[-1]
            if layout.is_own_file(old_name) and old_name not in wanted:
                self._fs.rm_file(f"{target}/{old_name}")
        for record in manifest.files:
            self._copy_file(checkpoint / record.name, f"{target}/{record.name}", record.xxh3_64)
        content = checkpoint / layout.MANIFEST
        self._copy_file(content, f"{target}/{layout.MANIFEST}", xxhash.xxh3_64_hexdigest(content.read_bytes()))

    def _list(self, target: str) -> list[str]:
        try:
            return [str(path) for path in self._fs.ls(target, detail=False)]
        except FileNotFoundError:  # an object store has no empty folders
            return []

    def _copy_file(self, source: Path, target: str, checksum: str) -> None:
        digest = xxhash.xxh3_64()
        with source.open("rb", buffering=0) as read, self._fs.open(target, "wb", block_size=CHUNK_BYTES) as written:
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

    def _has(self, target: str, manifest: ManifestHead) -> bool:
        """Whether this very save is there, by its manifest and the sizes of its files."""
        self._fs.invalidate_cache()
        try:
            there = parse_head(self._fs.cat_file(f"{target}/{layout.MANIFEST}"))
            return there.save_id == manifest.save_id and all(
                self._fs.size(f"{target}/{record.name}") == record.size for record in manifest.files
            )
        except (FileNotFoundError, CheckpointError):
            return False


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
