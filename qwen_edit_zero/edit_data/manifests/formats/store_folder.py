"""A folder of an object store, as readers of manifests see it."""

from __future__ import annotations

from typing import BinaryIO

from qwen_edit_zero.edit_data.manifests.formats.base import Entry, Progress, bytes_key, is_left_alone
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_file
from qwen_edit_zero.edit_data.storage.store import Store, Target, store_of
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

_MOST_LISTED = 100_000_000


class StoreFolder:
    """Everything under a URL; see `Folder`. Names that are URLs themselves are those of other objects."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self._url, self._options = url.rstrip("/"), options

    @property
    def location(self) -> str:
        return self._url

    def entries(self, name: str = "") -> list[Entry]:
        store, target = self._target(name)
        found = store.listed(target, most=_MOST_LISTED)
        if not found:
            raise DataError(f"folder {shown(target.url)}: there is nothing under it")
        entries = (Entry(entry.name, entry.is_folder) for entry in found)
        return sorted(entry for entry in entries if not is_left_alone(entry.name))

    def open(self, name: str) -> BinaryIO:
        return open_file(self._whole(name), self._options, what="manifest").open()

    def size(self, name: str) -> int:
        return open_file(self._whole(name), self._options, what="manifest").stamp().size

    def stamp(self, name: str) -> str:
        stamp = open_file(self._whole(name), self._options, what="manifest").stamp()
        return f"{stamp.size}-{stamp.version}"

    def content_key(self, name: str, on_progress: Progress) -> str:
        """By the store's own mark of the content where it has one, so that nothing is read to know it."""
        stamp = open_file(self._whole(name), self._options, what="manifest").stamp()
        if stamp.version and not stamp.changed_ns:
            return f"{stamp.size}-{stamp.version}"
        return bytes_key(self, name, on_progress)

    def is_file(self, name: str) -> bool:
        if not name:
            return False
        try:
            self.size(name)
        except DataError:
            return False
        return True

    def is_folder(self, name: str) -> bool:
        store, target = self._target(name)
        return not self.is_file(name) and bool(store.listed(target, most=1))

    def _whole(self, name: str) -> str:
        return name if "://" in name else f"{self._url}/{name}"

    def _target(self, name: str) -> tuple[Store, Target]:
        url = self._whole(name).rstrip("/")
        store = store_of(url, self._options)
        return store, store.target(url, what="folder")
