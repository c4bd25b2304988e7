"""Folders of pictures that belong together by their names: targets with captions beside them, and control folders.

The layout of ai-toolkit (a control folder a reference, the same stem in each) and of musubi-tuner (one control folder,
`stem` or `stem_0`, `stem_1` ... a reference). Stems are compared whole: what is before the last dot.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import xxhash

from qwen_edit_zero.edit_data.manifests.formats.base import Content, Folder, Progress, Reader, name_of
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".jp2", ".jfif")
_NUMBERED = re.compile(r"(?s)(.+)_(\d+)")
_MOST_CAPTION = 1 << 20


@dataclass(frozen=True)
class PairedFolders:
    """One data set of paired folders.

    Attributes:
        targets: folder of the wanted pictures and of the captions.
        controls: folders of the references, one a reference in order; with `is_numbered` one folder for all of them.
        caption_ending: of the files beside the targets that hold the instructions, such as ".txt".
        default_caption: the instruction of a target without such a file; None: it is refused.
        trigger: what `[trigger]` in a caption stands for.
        masks: folder of the masks, by the same stem; None: there are none.
        weight: of each sample.
    """

    targets: str
    controls: tuple[str, ...]
    caption_ending: str = ".txt"
    is_numbered: bool = False
    default_caption: str | None = None
    trigger: str | None = None
    masks: str | None = None
    weight: float = 1.0


class PairedPictures(Reader):
    """The samples of paired folders, by the names of their targets. All names are held in memory."""

    unit = "picture"

    def __init__(self, folder: Folder, title: str, sets: Sequence[PairedFolders]) -> None:
        super().__init__()
        self.title = title
        self._folder, self._sets = folder, sets

    def records(self) -> Iterator[tuple[int, Content]]:
        listed = [(one, _listing(self._folder, one)) for one in self._sets]
        self.total = sum(len(targets) for _, (targets, *_) in listed)
        for one, (targets, captions, controls, masks) in listed:
            stems = _by_stem(targets)
            lone = sum(len(names) for names in controls)
            matched = masked = 0
            owners = _owners(controls[0], set(stems)) if one.is_numbered else {}
            caption_of = _by_stem(captions)
            by_stem = [_by_stem(names) for names in controls]
            mask_of = _by_stem(masks)
            for name in targets:
                self.lines += 1
                self.done = self.lines
                stem = posixpath.splitext(name)[0]
                try:
                    values, used = self._values(one, name, stem, stems, caption_of, by_stem, owners, mask_of)
                    matched += used
                    masked += "mask" in values
                except RowError as error:
                    yield self.lines, RowError(f"{shown(posixpath.join(one.targets, name))}: {error}")
                    continue
                yield self.lines, values
            inner = [entry.name for entry in self._folder.entries(one.targets) if entry.is_folder]
            if inner:
                more = f" and {len(inner) - 1} more" if len(inner) > 1 else ""
                self.notes.append(f"left alone: {shown(inner[0])}{more} in {shown(one.targets)}, which is a folder")
            if lone > matched:
                self.notes.append(f"{lone - matched} control pictures of {shown(one.targets)} have no target")
            if one.masks is not None and masked < len(targets):
                self.notes.append(f"{len(targets) - masked} targets of {shown(one.targets)} have no mask")
            if idle := sorted(set(mask_of) - set(stems)):
                self.notes.append(f"{len(idle)} masks have no target, such as {shown(mask_of[idle[0]][0])}")

    def content_key(self, on_progress: Progress) -> str:
        digest = xxhash.xxh3_128()
        for one in self._sets:
            targets, captions, controls, masks = _listing(self._folder, one)
            digest.update(repr((one, targets, captions, controls, masks)).encode("utf-8", "surrogateescape"))
            for done, name in enumerate(captions):
                digest.update(self._folder.stamp(posixpath.join(one.targets, name)).encode())
                on_progress(done, len(captions))
        return digest.hexdigest()

    def _values(
        self,
        one: PairedFolders,
        name: str,
        stem: str,
        stems: dict[str, list[str]],
        captions: dict[str, list[str]],
        by_stem: list[dict[str, list[str]]],
        owners: dict[str, list[tuple[int, str]]],
        masks: dict[str, list[str]],
    ) -> tuple[dict[str, Any], int]:
        if len(stems[stem]) > 1:
            raise RowError(
                f"{' and '.join(map(shown, stems[stem]))} have one stem, so captions and controls cannot be told "
                "apart; rename one of them"
            )
        sources = []
        if one.is_numbered:
            numbered = owners.get(stem, [])
            if not numbered:
                raise RowError(_no_control(stem, one.controls[0], by_stem[0]))
            for (number, name_), (next_, other) in pairwise(numbered):
                if number == next_:
                    raise RowError(
                        f"{shown(one.controls[0])} has {shown(name_)} and {shown(other)} for it, which are one "
                        "reference by their names; delete one of them"
                    )
            sources = [posixpath.join(one.controls[0], control) for _, control in numbered]
        else:
            for folder, found in zip(one.controls, by_stem, strict=True):
                names = found.get(stem, [])
                if len(names) > 1:
                    raise RowError(f"{shown(folder)} has {' and '.join(map(shown, names))} for it; delete one of them")
                if not names:
                    raise RowError(_no_control(stem, folder, found))
                sources.append(posixpath.join(folder, names[0]))
        values: dict[str, Any] = {
            "source": sources,
            "target": posixpath.join(one.targets, name),
            "instruction": self._caption(one, stem, captions),
        }
        if one.weight != 1.0:
            values["weight"] = one.weight
        if one.masks is not None and (found_masks := masks.get(stem)):
            if len(found_masks) > 1:
                raise RowError(
                    f"{shown(one.masks)} has {' and '.join(map(shown, found_masks))} for it; delete one of them"
                )
            values["mask"] = posixpath.join(one.masks, found_masks[0])
        return values, len(sources)

    def _caption(self, one: PairedFolders, stem: str, captions: dict[str, list[str]]) -> str:
        found = captions.get(stem)
        if not found:
            if one.default_caption is None:
                raise RowError(f"there is no caption {shown(stem + one.caption_ending)} beside it")
            text = one.default_caption
        else:
            with self._folder.open(posixpath.join(one.targets, found[0])) as file:
                raw = file.read(_MOST_CAPTION + 1)
            if len(raw) > _MOST_CAPTION:
                raise RowError(f"its caption {shown(found[0])} has over {_MOST_CAPTION:,} bytes")
            try:
                text = raw.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise RowError(
                    f"its caption {shown(found[0])} is not UTF-8 (byte {error.start + 1}); save it as UTF-8"
                ) from None
        return text.replace("[trigger]", one.trigger) if one.trigger else text


def _listing(folder: Folder, one: PairedFolders) -> tuple[list[str], list[str], list[list[str]], list[str]]:
    """Targets, captions, controls of each folder, masks. Raises DataError where a folder is not there."""

    def names(where: str, endings: tuple[str, ...]) -> list[str]:
        if not folder.is_folder(where):
            raise DataError(f"folder {shown(name_of(folder, where))} is not there")
        return [e.name for e in folder.entries(where) if not e.is_folder and e.name.lower().endswith(endings)]

    targets = names(one.targets, PICTURES)
    captions = names(one.targets, (one.caption_ending.lower(),))
    if not targets:
        raise DataError(f"folder {shown(name_of(folder, one.targets))} holds no picture ({', '.join(PICTURES)})")
    masks = names(one.masks, PICTURES) if one.masks is not None else []
    return targets, captions, [names(where, PICTURES) for where in one.controls], masks


def _by_stem(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(posixpath.splitext(name)[0], []).append(name)
    return found


def _owners(controls: Sequence[str], stems: set[str]) -> dict[str, list[tuple[int, str]]]:
    """Numbers (-1: none) and names of each stem's controls; `a_1.png` is of a target `a_1` if there is one, else of
    `a`."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in controls:
        stem = posixpath.splitext(name)[0]
        match = _NUMBERED.fullmatch(stem)
        if stem in stems:
            found.setdefault(stem, []).append((-1, name))
        elif match and match[1] in stems:
            found.setdefault(match[1], []).append((int(match[2]), name))
    return {stem: sorted(names) for stem, names in found.items()}


def _no_control(stem: str, folder: str, found: dict[str, list[str]]) -> str:
    near = nearest(stem, found) if len(found) <= 10_000 else None
    hint = f"; the nearest name there is {shown(found[near][0])}" if near else ""
    return f"{shown(folder)} has no picture of the stem {shown(stem)}{hint}"
