"""The rules for names of pictures in manifests: taken literally, and nothing outside the root unless allowed."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from qwen_edit_zero.edit_data.storage.names import is_url, split_member
from qwen_edit_zero.edit_data.wording import shown

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class RowError(ValueError):
    """What is wrong with a row, without its place."""


def are_plain(names: str) -> bool:
    """Whether names, each with a `/` in front, are certainly fine as they are, as most are.

    No empty part, none that begins with a dot, a blank or `~`, no colon, nothing that is not printable.
    """
    return (
        "//" not in names
        and "/." not in names
        and ":" not in names
        and "/~" not in names
        and "/ " not in names
        and names[-1] != "/"
        and names.isprintable()
    )


@dataclass(frozen=True)
class NameRules:
    """Where the pictures of a manifest may lie.

    Attributes:
        root: folder or URL that names are relative to, absolute and normalised; "" where it does not matter.
        outside: folders (absolute) and URLs outside the root that names may lead to; each with everything under it.
        root_is: what messages call the root.
    """

    root: str = ""
    outside: tuple[str, ...] = ()
    root_is: str = "the manifest's folder"

    def check(self, name: str, key: str) -> str:
        """The name normalised (`.` and `..` resolved). Names outside the root come back absolute. Raises RowError.

        Names are taken literally, without URL decoding. `shard.tar//a/b.png` and `part.parquet//17/image` are members
        of archives (see `storage`): only the part before `//` is normalised.
        """
        if are_plain(f"/{name}"):
            return name
        if "\0" in name:
            raise RowError(f"{shown(key)} {shown(name)}: it holds a NUL character")
        member = split_member(name)
        if member:
            return f"{self._checked(member[0], key, name)}//{member[1]}"
        return self._checked(name, key, name)

    def _checked(self, name: str, key: str, whole: str) -> str:
        absolute = None
        if is_url(name):
            absolute = name
            problem = "it is a URL, and nothing is fetched; download the file and give its relative path"
        elif _DRIVE.match(name):
            problem = f"it is a Windows path with a drive; paths are relative to {self.root_is}"
        elif name.startswith("/"):
            absolute = posixpath.normpath(name)
            problem = f"it is an absolute path; paths are relative to {self.root_is}"
        elif name == "~" or name.startswith("~/"):
            problem = f"it is in a home folder; paths are relative to {self.root_is}"
        else:
            normal = posixpath.normpath(name)
            if normal != ".." and not normal.startswith("../"):
                return normal
            if self.root and not is_url(self.root):
                absolute = posixpath.normpath(posixpath.join(self.root, normal))
            problem = f"it leads out of {self.root_is}; put the manifest above all of its pictures"
        if absolute is None:
            raise RowError(f"{shown(key)} {shown(whole)}: {problem}")
        if any(_is_under(absolute, folder) for folder in self.outside):
            return absolute
        raise RowError(f"{shown(key)} {shown(whole)}: {problem}, or allow its folder with data.outside")


def _is_under(name: str, folder: str) -> bool:
    if is_url(name):
        inside = name.removeprefix(folder.rstrip("/") + "/")
        return inside != name and ".." not in inside.split("/")
    return name.startswith(folder.rstrip("/") + "/")
