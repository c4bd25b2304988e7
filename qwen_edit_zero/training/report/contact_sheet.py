"""One picture of what a model does: a row a held-out sample, with references, instruction, output and target."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from qwen_edit_zero.training.report.samples import SampleRecord, read_samples
from qwen_edit_zero.training.report.typesetting import Font

MAX_REFERENCES = 3

_CELL, _SMALL_CELL = 192, 128  # longest side of a picture, and where three references share a row: multiples of 64
_GAP, _MARGIN, _PAD = 10, 36, 18
_TEXT_WIDTH = 264
_PAPER, _INK, _QUIET, _RULE, _EMPTY = "#ffffff", "#1c1f24", "#6d7681", "#dfe3e8", "#f1f3f5"
_TAGS = ("#e3ecfa", "#e4f4e8", "#fbeedb", "#f3e6f7", "#fce4e6", "#e0f3f5", "#eeeedd", "#e8e8f0")
_TITLE, _HEADER, _TEXT, _SMALL = Font(27), Font(15), Font(18), Font(13)
_LINE = 26


@dataclass(frozen=True)
class _Columns:
    """Left edges and the width of the sheet."""

    references: int
    text: int
    output: int
    target: int
    width: int


def contact_sheet(folder: Path, out: Path, *, title: str, max_rows: int = 24) -> Path:
    """Draw the samples of a step's folder into the PNG `out` and return it.

    All pictures are brought to one size: those that fit a whole number of times are enlarged without smoothing, so that
    each pixel of a small model shows. A picture that is gone or damaged leaves an empty cell that says so.

    Args:
        folder: `RUN/samples/step-...`, written by `save_sample`.
        title: stands on top; a line break begins the smaller second line.
        max_rows: at most so many samples, evenly spread over all of them.

    Raises:
        FileNotFoundError: the folder holds no sample.
    """
    records, unreadable = read_samples(folder)
    if not records:
        raise FileNotFoundError(f"{folder} holds no sample pictures")
    total = len(records)
    if total > max_rows:
        records = [records[i * total // max_rows] for i in range(max_rows)]
    colours = {c: _TAGS[i % len(_TAGS)] for i, c in enumerate(sorted({r.category for r in records if r.category}))}
    columns = _columns(max(min(len(r.references), MAX_REFERENCES) for r in records))
    rows = [_row(record, columns, colours) for record in records]
    head = _head(title, columns)
    notes = []
    if total > len(records):
        notes.append(f"{len(records)} of {total} samples, evenly spread")
    if unreadable:
        notes.append(f"unreadable: {', '.join(path.name for path in unreadable[:5])}")
    foot = _foot("  ·  ".join(notes), columns)

    parts = [head, *rows, foot]
    sheet = Image.new("RGB", (columns.width, sum(part.height for part in parts)), _PAPER)
    y = 0
    for part in parts:
        sheet.paste(part, (0, y))
        y += part.height
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    temporary = out.with_name(f".{out.name}.partial")
    temporary.write_bytes(buffer.getvalue())
    os.replace(temporary, out)
    return out


def _columns(references: int) -> _Columns:
    text = _MARGIN + (_CELL, _CELL, 2 * _CELL + _GAP, 3 * _SMALL_CELL + 2 * _GAP)[references] + 2 * _PAD
    output = text + _TEXT_WIDTH + 2 * _PAD
    target = output + _CELL + _PAD
    return _Columns(_MARGIN, text, output, target, target + _CELL + _MARGIN)


def _head(title: str, columns: _Columns) -> Image.Image:
    width = columns.width - 2 * _MARGIN
    first, _, second = title.partition("\n")
    lines = _TITLE.wrap(first, width)
    below = _HEADER.wrap(second, width) if second else []
    names = 30 + 38 * len(lines) + 24 * len(below) + 26
    image = Image.new("RGB", (columns.width, names + 14), _PAPER)
    draw = ImageDraw.Draw(image)
    y = 30.0
    for line in lines:
        _TITLE.draw(draw, (_MARGIN, y + 24), line, _INK)
        y += 38
    for line in below:
        _HEADER.draw(draw, (_MARGIN, y + 12), line, _QUIET)
        y += 24
    references = "Reference" if columns.text < _MARGIN + 2 * _SMALL_CELL else "References"
    for x, name in (
        (columns.references, references), (columns.text, "Instruction"),
        (columns.output, "Output"), (columns.target, "Target"),
    ):  # fmt: skip
        _HEADER.draw(draw, (x, names), name, _QUIET)
    draw.rectangle((_MARGIN, names + 12, columns.width - _MARGIN, names + 13), fill=_INK)
    return image


def _row(record: SampleRecord, columns: _Columns, colours: dict[str, str]) -> Image.Image:
    lines = _TEXT.wrap(record.instruction, _TEXT_WIDTH, most=9)
    ids = _SMALL.wrap(record.id, _TEXT_WIDTH, most=2)
    tag = _SMALL.wrap(record.category, _TEXT_WIDTH - 20, most=1)[0] if record.category else None
    cell = _CELL if len(record.references) < MAX_REFERENCES else _SMALL_CELL
    references = [_picture(path, cell) for path in record.references[:MAX_REFERENCES]]
    output = _picture(record.output, _CELL)
    target = _picture(record.target, _CELL) if record.target else None
    caption = _distance(record)
    shown = [*references, output, *([target] if target else [])]
    pictures_height = max(p.height for p in shown) + (22 if caption else 0)
    text_height = (34 if tag else 0) + _LINE * len(lines) + 4 + 18 * len(ids)
    height = max(pictures_height, text_height) + 2 * _PAD
    image = Image.new("RGB", (columns.width, height), _PAPER)
    draw = ImageDraw.Draw(image)

    for i, picture in enumerate(references):
        x = columns.references + i * (cell + _GAP)
        _place(image, picture, x)
        if len(record.references) > 1:
            draw.rectangle((x, _PAD, x + 21, _PAD + 21), fill=_INK)
            _SMALL.draw(draw, (x + 11 - _SMALL.length(str(i + 1)) / 2, _PAD + 16), str(i + 1), _PAPER)
    _place(image, output, columns.output)
    if caption:
        _SMALL.draw(draw, (columns.output, _PAD + output.height + 18), caption, _QUIET)
    if target:
        _place(image, target, columns.target)

    y = float(_PAD)
    if tag:
        draw.rounded_rectangle(
            (columns.text, y, columns.text + _SMALL.length(tag) + 20, y + 23),
            radius=11,
            fill=colours[record.category or ""],
        )
        _SMALL.draw(draw, (columns.text + 10, y + 16), tag, _INK)
        y += 34
    for line in lines:
        _TEXT.draw(draw, (columns.text, y + 19), line, _INK)
        y += _LINE
    y += 4
    for line in ids:
        _SMALL.draw(draw, (columns.text, y + 13), line, _QUIET)
        y += 18
    draw.rectangle((_MARGIN, height - 1, columns.width - _MARGIN, height - 1), fill=_RULE)
    return image


def _place(row: Image.Image, picture: Image.Image, x: int) -> None:
    """Put a picture in its column, with a hairline round it so that white ones have an edge."""
    ImageDraw.Draw(row).rectangle((x - 1, _PAD - 1, x + picture.width, _PAD + picture.height), outline=_RULE)
    row.paste(picture, (x, _PAD))


def _foot(text: str, columns: _Columns) -> Image.Image:
    lines = _SMALL.wrap(text, columns.width - 2 * _MARGIN) if text else []
    image = Image.new("RGB", (columns.width, 28 + 20 * len(lines)), _PAPER)
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        _SMALL.draw(draw, (_MARGIN, 26 + 20 * i), line, _QUIET)
    return image


def _picture(path: Path, side: int) -> Image.Image:
    """The picture with a longest side of `side` pixels, or an empty cell that says what became of it."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        cell = Image.new("RGB", (side, side), _EMPTY)
        word = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
        _SMALL.draw(ImageDraw.Draw(cell), (side / 2 - _SMALL.length(word) / 2, side / 2 + 4), word, _QUIET)
        return cell
    scale = side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.NEAREST if scale == int(scale) else Image.Resampling.LANCZOS)


def _distance(record: SampleRecord) -> str | None:
    """Peak signal-to-noise ratio of output against target, for the caption; None where they cannot be compared."""
    if record.target is None:
        return None
    try:
        with Image.open(record.output) as output, Image.open(record.target) as target:
            if output.size != target.size:
                return None
            error = np.asarray(output.convert("RGB"), np.float64) - np.asarray(target.convert("RGB"), np.float64)
    except (OSError, ValueError, SyntaxError):
        return None
    square = float((error**2).mean())
    return "equals the target" if square == 0 else f"PSNR {10 * math.log10(255**2 / square):.1f} dB to target"
