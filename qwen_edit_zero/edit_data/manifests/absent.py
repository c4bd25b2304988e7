"""Pictures that rows name and that are not there, asked of the file system alone: nothing is read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.wording import shown

MOST_TOLD = 5
_THREADS = 16  # network file systems answer many questions at once
_PICTURES = 4096  # asked about together


class AbsentPictures:
    """Counts rows whose pictures on disk are not there. A context manager; the counts are whole when it is left.

    Attributes:
        rows: that name a picture which is not there.
        first: which pictures of the first such rows, in words; `MOST_TOLD` at most.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.first: list[str] = []
        self._waiting: list[tuple[str, Sample, list[tuple[str, str]]]] = []
        self._pictures = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="absent")

    def __enter__(self) -> AbsentPictures:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._ask()
        self._pool.shutdown(cancel_futures=True)

    def look(self, where: str, sample: Sample, pictures: list[tuple[str, str]]) -> None:
        """Look at one row.

        Args:
            where: what messages call it.
            pictures: (name as in the source's manifest, path) of each picture that is a file of its own.
        """
        self._waiting.append((where, sample, pictures))
        self._pictures += len(pictures)
        if self._pictures >= _PICTURES:
            self._ask()

    def _ask(self) -> None:
        paths = list({path: None for _, _, pictures in self._waiting for _, path in pictures})
        pieces = [paths[i::_THREADS] for i in range(_THREADS)]
        there = {path for found in self._pool.map(_files_of, pieces) for path in found}
        for where, sample, pictures in self._waiting:
            name = next((name for name, path in pictures if path not in there), None)
            if name is not None:
                self.rows += 1
                if len(self.first) < MOST_TOLD:
                    why = sample.place.why_missing(name)
                    self.first.append(f"{where} ({shown(sample.id)}): picture {shown(name)} is not there: {why}")
        self._waiting.clear()
        self._pictures = 0


def _files_of(paths: list[str]) -> list[str]:
    """Those that are files."""
    return [path for path in paths if os.path.isfile(path)]
