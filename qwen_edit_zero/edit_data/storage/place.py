"""From what a user writes, a path or a URL, to a place or a stream."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_edit_zero.edit_data.storage.files import RangedFile
from qwen_edit_zero.edit_data.storage.kinds import kind_of
from qwen_edit_zero.edit_data.storage.local import LocalFile, LocalPlace
from qwen_edit_zero.edit_data.storage.names import is_url
from qwen_edit_zero.edit_data.storage.options import DEFAULTS, StorageOptions
from qwen_edit_zero.edit_data.storage.remote import RemotePlace
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import SettingsError

_URL = re.compile(r"(?s)([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)")


def open_place(location: str | Path, options: StorageOptions = DEFAULTS) -> LocalPlace | RemotePlace:
    """The place of a folder, by path or URL. Nothing is looked at yet.

    Raises:
        SettingsError: the URL is of no store, names none, or holds credentials.
    """
    if isinstance(location, str) and is_url(location):
        return place_of_url(location, options)
    return LocalPlace(Path(location).expanduser(), options)


def place_of_url(url: str, options: StorageOptions = DEFAULTS) -> LocalPlace | RemotePlace:
    """As `open_place`, of a URL. `file://` is a local folder."""
    if "::" in url:
        raise SettingsError(f"{shown(url.split('://')[0])}://... is a chain of URLs (::); name the store itself")
    match = _URL.fullmatch(url)
    if match is None:
        raise SettingsError(f"{shown(url)} is no URL of a folder or file")
    scheme, host, path = match[1].lower(), match[2], match[3]
    if "@" in host and scheme not in ("az", "abfs", "abfss"):  # there it parts a container and its account
        raise SettingsError(
            f"a URL with {scheme}:// has an @ before its first /, as one with credentials has; they are taken from the "
            "environment, so that no file or message holds them"
        )
    if scheme in ("file", "local"):
        if host not in ("", "localhost"):
            raise SettingsError(f"{shown(url)} names the machine {host}; write file:///FOLDER, or the path alone")
        return LocalPlace(Path(path or "/"), options)
    kind_of(scheme, url)
    if not host:
        raise SettingsError(f"{shown(url)} names no bucket; write {scheme}://BUCKET/FOLDER")
    return RemotePlace(url.rstrip("/"), options)


def open_file(location: str | Path, options: StorageOptions = DEFAULTS, *, what: str = "file") -> RangedFile:
    """One file by path or URL; `what` messages call it. Raises SettingsError as `open_place`."""
    if isinstance(location, str) and is_url(location):
        root, _, name = location.rpartition("/")
        return place_of_url(root, options).plain(name, what)
    return LocalFile(Path(location).expanduser(), what)
