"""Which columns of a foreign table are target, references, instruction ...: fixed, told, or by usual names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.manifests.rows import KEYS, OWN_NAMES
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError

Columns = Mapping[str, str | Sequence[str]]

# In order of preference; the first that a table has is taken. `image` comes last: it may be the source, too.
_USUAL: dict[str, tuple[str, ...]] = {
    "target": (
        "target", "target_image", "target_img", "edited_image", "edited", "output_image", "output", "after", "image",
    ),
    "source": (
        "source", "source_image", "source_img", "source_images", "input_image", "input_images", "input_img", "input",
        "original_image", "original", "before", "edit_image", "edit_images", "control_image", "control_images",
        "control", "conditioning_image", "reference_image", "reference_images", "reference", "references", "image",
    ),
    "instruction": ("instruction", "edit_instruction", "edit_prompt", "edit", "prompt", "caption", "text"),
    "mask": ("mask", "mask_image"),
    "category": ("category", "edit_type", "task"),
    "id": ("id",),
    "weight": ("weight",),
    "split": ("split",),
    "paraphrases": ("paraphrases",),
}  # fmt: skip
_NUMBERED = re.compile(r"(.+?)_?(\d+)")


@dataclass(frozen=True)
class ColumnMap:
    """Where the values of our keys stand in a table.

    Attributes:
        of: the column of each key of ours that is there, but for `source`.
        sources: the columns of the references in order; one may hold a list.
        called: what messages call each key of ours.
        stem: what the columns of the references are called but for their numbers, where they go by usual names.
    """

    of: Mapping[str, str]
    sources: tuple[str, ...]
    called: Mapping[str, str]
    stem: str | None = None

    def used(self) -> set[str]:
        """The columns that are read."""
        return {*self.of.values(), *self.sources}

    def for_row(self, names: Iterable[str]) -> ColumnMap:
        """The map of a row with these columns: it may have more numbered references than the first row had."""
        if self.stem is None:
            return self
        there = set(names) - set(self.of.values())
        found = numbered({*there, *self.sources}, self.stem)
        if len(found) > 1 and found[0] == self.stem and self.stem not in there:
            del found[0]  # `source_0` and `source_1` where the first row has `source`
        return self if set(found) <= set(self.sources) else replace(self, sources=tuple(found))

    def values(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """A row under our keys. Empty cells count as absent, but for an empty instruction, which is named so.

        Raises RowError if a reference is empty and a later one is not.
        """
        values = {key: cells.get(column) for key, column in self.of.items()}
        values = {key: value for key, value in values.items() if key == "instruction" or value not in (None, "")}
        if len(self.sources) == 1:
            source = cells.get(self.sources[0])
            if source not in (None, ""):
                values["source"] = list(source) if isinstance(source, tuple) else source
            return values
        sources: list[Any] = []
        empty = None
        for column in self.sources:
            cell = cells.get(column)
            if cell is None or cell == "":
                empty = empty or column
            elif empty:
                raise RowError(f"{shown(empty)} is empty, but {shown(column)} is not; references have no gaps")
            else:
                sources.extend(cell if isinstance(cell, list | tuple) else [cell])
        if sources:
            values["source"] = sources
        return values


def fixed_map(target: str, sources: Sequence[str], instruction: str, names: Iterable[str] = ()) -> ColumnMap:
    """The map of a format that says how its columns are called; `names` adds those that are called as ours are."""
    of = {"target": target, "instruction": instruction}
    taken = {target, instruction, *sources}
    for key in ("id", "mask", "category", "weight", "split", "paraphrases"):
        if key in names and key not in taken:
            of[key] = key
    return ColumnMap(of, tuple(sources), _called(of, sources))


def find_map(names: Sequence[str], *, told: Columns | None, table: str) -> ColumnMap:
    """The map for a table of which only the names of its columns are known.

    Args:
        told: `data.columns`: the column (for `source` also several) of keys of ours; the rest goes by usual names.
        table: what messages call the table.

    Raises:
        DataError: a told column is not there, or target, source or instruction cannot be found.
    """
    of: dict[str, str] = {}
    sources: tuple[str, ...] = ()
    for key, column in (told or {}).items():
        if key not in KEYS:
            near = nearest(key, KEYS)
            raise DataError(
                f"data.columns: {shown(key)} is no key of ours{f'; did you mean {shown(near)}?' if near else ''}"
            )
        for name in [column] if isinstance(column, str) else column:
            if name not in names:
                near = nearest(name, names)
                hint = f"; the nearest is {shown(near)}" if near else ""
                raise DataError(f"{table}: data.columns names {shown(name)}, and there is no such column{hint}")
        if key == "source":
            sources = (column,) if isinstance(column, str) else tuple(column)
        elif isinstance(column, str):
            of[key] = column
        else:
            raise DataError(f"data.columns: {key} has several columns; only source can have them")
    taken = {*of.values(), *sources}
    if "target" not in of and (found := _first(names, "target", taken)):
        of["target"] = found
        taken.add(found)
    stem: str | None = None
    if not sources:
        stem, sources = _sources(names, taken)
        taken.update(sources)
    for key in _USUAL:
        if key not in of and key not in ("source", "target") and (found := _first(names, key, taken)):
            of[key] = found
            taken.add(found)
    missing = [key for key in ("source", "target", "instruction") if not (sources if key == "source" else of.get(key))]
    if missing:
        raise DataError(
            f"{table}: its columns are {', '.join(map(shown, names))}, and it cannot be told which of them is "
            f"{' and '.join(missing)}; say it with data.columns, as in data.columns='{{{missing[0]}: NAME}}'"
        )
    return ColumnMap(of, sources, _called(of, sources), stem)


def unused_note(unused: Iterable[str]) -> list[str]:
    """What to tell about columns that nothing reads."""
    names = sorted(set(unused))
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return [f"not used: {', '.join(map(shown, names[:10]))}{more}"] if names else []


def numbered(names: Iterable[str], stem: str) -> list[str]:
    """The names `stem`, then `stem_0`, `stem_1` ... or `stem1` ..., by their numbers."""
    found = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if name == stem:
            found.append((-1, name))
        elif match and match[1] == stem:
            found.append((int(match[2]), name))
    return [name for _, name in sorted(found)]


def _first(names: Sequence[str], key: str, taken: set[str]) -> str | None:
    return next((name for name in _USUAL[key] if name in names and name not in taken), None)


def _sources(names: Sequence[str], taken: set[str]) -> tuple[str | None, tuple[str, ...]]:
    free = [name for name in names if name not in taken]
    for stem in _USUAL["source"]:
        if found := numbered(free, stem):
            return stem, tuple(found)
    return None, ()


def _called(of: Mapping[str, str], sources: Sequence[str]) -> dict[str, str]:
    return {**OWN_NAMES, **of, "source": sources[0] if sources else "source"}
