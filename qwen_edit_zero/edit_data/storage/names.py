"""What names of a manifest's row may mean besides a file under the root: members of archives, and URLs."""

from __future__ import annotations

import re
from typing import Protocol

from qwen_edit_zero.edit_data.storage.files import NotThereError, PictureFile, Place, RangedFile
from qwen_edit_zero.edit_data.storage.options import StorageOptions

_MEMBER = re.compile(r"(?s)(.*?\.(?:tar|parquet))//(.+)")
_URL = re.compile(r"(?s)([A-Za-z][A-Za-z0-9+.-]*://[^/]*)/(.*)")


def split_member(name: str) -> tuple[str, str] | None:
    """Archive and member of a name such as `shard.tar//a/b.png`; None of a file's own name."""
    match = _MEMBER.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_url(location: str) -> bool:
    """Whether a location is a URL and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", location) is not None  # also chains of them, which are refused


class RootedPlace(Place, Protocol):
    """What both kinds of places offer to this module."""

    @property
    def options(self) -> StorageOptions:
        """How stores are asked."""

    def plain(self, name: str, what: str) -> RangedFile:
        """The file of a name that names no member and is no URL; `what` messages call it."""


def resolve(name: str, place: RootedPlace) -> PictureFile:
    """The file of a name that may name a member of an archive, or be a URL."""
    member = split_member(name)
    if member is None:
        return _whole(name, "picture", place)
    archive, inside = member
    if archive.endswith(".tar"):
        from qwen_edit_zero.edit_data.storage.tar import TarMember

        return TarMember(_whole(archive, "archive", place), inside, place.options.index_dir)
    from qwen_edit_zero.edit_data.storage.parquet import ParquetCell

    return ParquetCell(_whole(archive, "archive", place), inside)


def _whole(name: str, what: str, place: RootedPlace) -> RangedFile:
    match = _URL.fullmatch(name)
    if match is None:
        return place.plain(name, what)
    from qwen_edit_zero.edit_data.storage.place import place_of_url

    return place_of_url(match[1], place.options).plain(match[2], what)


def why_not_there(name: str, place: Place) -> str:
    """As `Place.why_missing`, for members of archives and names outside the root."""
    member = split_member(name)
    if member is None:
        return "it cannot be read"
    try:
        place.file(name).stamp()
    except NotThereError as error:
        try:
            place.file(member[0]).stamp()
        except NotThereError:
            return place.why_missing(member[0])
        return str(error)
    return "it cannot be read"
