"""How names from disk and from manifests are shown in messages, and the nearest name to a wrong one."""

from __future__ import annotations

import difflib
import json
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path


def shown(name: str | os.PathLike[str]) -> str:
    """A name in double quotes on one line: control characters and undecodable bytes escaped, other Unicode as it is."""
    text = os.fspath(name).encode("utf-8", "backslashreplace").decode("utf-8")
    return json.dumps(text, ensure_ascii=False)


def code_points(name: str) -> str:
    """A name with everything outside ASCII as `\\uXXXX`, for telling apart spellings that look the same."""
    return json.dumps(name, ensure_ascii=True)


def byte_count(count: float) -> str:
    """`1.5 GB`: a number of bytes in the decimal unit that fits."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, first disregarding letter case and Unicode composition; None if none is near."""
    names = list(choices)
    folded = _fold(name)
    for choice in names:
        if _fold(choice) == folded:
            return choice
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


def why_missing(root: Path, name: str) -> str:
    """Says at which part the relative path `name` leaves what exists under `root`, and the nearest name there is."""
    folder = root
    parts = name.split("/")
    for i, part in enumerate(parts):
        try:
            entries = os.listdir(folder)
        except OSError:
            break
        if part not in entries:
            if "\\" in part and (root / name.replace("\\", "/")).is_file():
                return "a backslash is no separator here; write " + shown(name.replace("\\", "/"))
            where = "the manifest's folder" if i == 0 else shown("/".join(parts[:i]))
            near = nearest(part, entries)
            if near is None:
                return f"{where} has no {shown(part)} and nothing like it"
            if unicodedata.normalize("NFC", near) == unicodedata.normalize("NFC", part):
                return (
                    f"{where} has a name that looks the same but is other Unicode: the manifest says "
                    f"{code_points(part)}, the disk {code_points(near)}"
                )
            if near.casefold() == part.casefold():
                return f"{where} has {shown(near)}; letter case counts"
            return f"{where} has no {shown(part)}; the nearest name there is {shown(near)}"
        folder = folder / part
    return "it cannot be read"


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
