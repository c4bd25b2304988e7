"""Content hashes of model files: cheap for tens of gigabytes, and the same for every copy. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_WHOLE_BELOW = 4 << 20  # files up to this size are hashed whole
_WINDOW, _WINDOWS = 16 << 10, 64  # of larger ones: this many evenly spaced windows, first and last bytes included


def fingerprint_file(path: Path) -> str:
    """Hex digest of the file's size and bytes; of a large file, of sampled bytes.

    Names, dates and owners do not count. Two large files of equal size that differ only outside the sampled windows
    (a megabyte of each file) collide: different trainings never do, a single flipped byte may.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(path, "rb", buffering=0) as f:
        if size <= _WHOLE_BELOW:
            digest.update(f.read())
        else:
            for i in range(_WINDOWS):
                digest.update(os.pread(f.fileno(), _WINDOW, (size - _WINDOW) * i // (_WINDOWS - 1)))
    return digest.hexdigest()


def fingerprint_files(root: Path, files: Iterable[Path]) -> str:
    """Hex digest of several files and their paths relative to `root`; their order does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        digest.update(f"{name}\0{fingerprint_file(path)}\0".encode())
    return digest.hexdigest()
