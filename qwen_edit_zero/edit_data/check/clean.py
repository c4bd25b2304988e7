"""The clean manifest: ours, with the rows that are accepted, under the same ids."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import orjson

from qwen_edit_zero.edit_data.check.columns import ACCEPTED, WARNED, RowColumns
from qwen_edit_zero.edit_data.manifests.convert import values_of
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.storage.names import is_url, split_member

Advance = Callable[[int], None]
_TOLD = 1024  # rows between two reports of progress


def write_clean(
    table: SampleTable, columns: RowColumns, out: Path, *, strict: bool, advance: Advance = lambda rows: None
) -> tuple[int, list[str]]:
    """Write `out` from the rows of a table that training accepts, in their order; it appears whole or not at all.

    Names become relative to the folder of `out`; pictures in archives stay there, under `ARCHIVE//MEMBER`.

    Args:
        strict: leave out rows that something is to be warned of, too.

    Returns:
        Rows written, and what `data.outside` must allow for it to be read where it is.

    Raises:
        OSError: it cannot be written.
    """
    taken = (ACCEPTED,) if strict else (ACCEPTED, WARNED)
    root = table.place.name
    base = os.path.abspath(out.parent)
    outside: set[str] = set()

    def named(name: str, role: str) -> str:
        member = split_member(name)
        if member:
            return f"{named(member[0], role)}//{member[1]}"
        if is_url(name) or is_url(root):
            outside.add(root if not is_url(name) else os.path.dirname(name))
            return name if is_url(name) else f"{root.rstrip('/')}/{name}"
        absolute = os.path.abspath(os.path.join(root, name))
        relative = os.path.relpath(absolute, base)
        if relative.startswith("../"):
            outside.add(os.path.dirname(absolute) if os.path.isabs(name) else os.path.abspath(root))
        return relative

    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    written = 0
    try:
        with temporary.open("wb") as file:
            for row in range(len(table)):
                if row % _TOLD == 0:
                    advance(min(_TOLD, len(table) - row))
                if columns.state[row] in taken:
                    file.write(orjson.dumps(values_of(table[row], named)) + b"\n")
                    written += 1
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return written, _without_nested(outside)


def _without_nested(folders: set[str]) -> list[str]:
    """Without those that lie in another one of them."""
    return sorted(
        f for f in folders if not any(f != other and f.startswith(other.rstrip("/") + "/") for other in folders)
    )
