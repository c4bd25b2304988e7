"""Small JPEGs of the pictures of a row, as data URIs; few, however many rows there are."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.decode import load_mask, load_picture
from qwen_edit_zero.edit_data.storage.files import PictureFile
from qwen_edit_zero.errors import QwenEditError

MOST = 240  # on a page: about 1 MB
_SIDE = 128
_QUALITY = 70


@dataclass(frozen=True)
class Thumbnail:
    """A picture on the page.

    Attributes:
        label: target, source, reference 2, mask.
        name: as in the manifest.
        size: "640 x 480"; "" if it cannot be decoded.
        uri: None if it cannot be decoded, or no more are made.
        sides: of the thumbnail in pixels.
    """

    label: str
    name: str
    size: str
    uri: str | None
    sides: tuple[int, int] = (0, 0)


class Thumbnails:
    """Makes thumbnails of rows of a table, `MOST` in all; each picture once."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self._made: dict[tuple[str, bool], tuple[str, str | None, tuple[int, int]]] = {}

    def of_row(self, row: int) -> list[Thumbnail]:
        """Of all pictures of a row: the references in order, the target, the mask."""
        sample = self._table[row]
        several = len(sample.source_names) > 1
        thumbnails = [
            self._of(f"reference {i}" if several else "source", name, file)
            for i, (name, file) in enumerate(zip(sample.source_names, sample.sources, strict=True), 1)
        ]
        thumbnails.append(self._of("target", sample.target_name, sample.target))
        mask = self._mask_of(sample)
        return thumbnails if mask is None else [*thumbnails, mask]

    def _mask_of(self, sample: Sample) -> Thumbnail | None:
        if sample.mask is None or sample.mask_name is None:
            return None
        return self._of("mask", sample.mask_name, sample.mask, is_mask=True)

    def _of(self, label: str, name: str, file: PictureFile, *, is_mask: bool = False) -> Thumbnail:
        key = (file.location, is_mask)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST:
                return Thumbnail(label, name, "", None)
            found = self._made[key] = _made(file, is_mask)
        return Thumbnail(label, name, *found)


def _made(file: PictureFile, is_mask: bool) -> tuple[str, str | None, tuple[int, int]]:
    try:
        picture = load_mask(file) if is_mask else load_picture(file)
    except QwenEditError:
        return "", None, (0, 0)
    size = f"{picture.width} x {picture.height}"
    scale = min(1.0, _SIDE / max(picture.size))
    sides = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    out = io.BytesIO()
    picture.resize(sides, Image.Resampling.LANCZOS, reducing_gap=2.0).save(out, "JPEG", quality=_QUALITY, optimize=True)
    return size, f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}", sides
