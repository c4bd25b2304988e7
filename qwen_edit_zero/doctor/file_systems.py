"""On which file system a path lies, and what that means for a folder that nodes share."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# Buckets that look like folders: a rename is a copy, file by file, and others see it half done
_BUCKETS = re.compile(r"fuse\.(s3fs|goofys|gcsfuse|mount-s3|ossfs2?|rclone|blobfuse2?|cosfs|obsfs|tosfs)")


@dataclass(frozen=True)
class FileSystem:
    """`kind` as the kernel calls it (nfs4, lustre, ext4), `source` what is mounted, `mount` where."""

    kind: str
    source: str
    mount: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.source} on {self.mount})"

    @property
    def renames_whole(self) -> bool:
        """Whether a folder gets its name at once, on which whole-or-not-there checkpoints rest."""
        return not _BUCKETS.fullmatch(self.kind)


def file_system_of(path: Path, mounts: Iterable[str] | None = None) -> FileSystem:
    """The file system of `path`, or of the nearest folder above it that exists."""
    real = os.path.realpath(nearest_existing(path))
    found = FileSystem("unknown", "?", "/")
    longest = -1
    for line in mounts if mounts is not None else _mount_lines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = mount == "/" or real == mount or real.startswith(f"{mount}/")
        if inside and len(mount) >= longest:  # of two mounts on one place the later one counts
            longest, found = len(mount), FileSystem(rest[0], rest[1], mount)
    return found


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int | None:
    """Free bytes where `path` lies or would lie; None if the file system does not tell."""
    try:
        usage = shutil.disk_usage(nearest_existing(path))
    except OSError:
        return None
    return usage.free if usage.total else None


def _mount_lines() -> list[str]:
    try:
        return MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
