"""What is remarkable about a row that training accepts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.check.looks import BLANK_SPREAD, SOFT_DETAIL
from qwen_edit_zero.edit_data.check.pairs import lies_elsewhere, shows_the_same
from qwen_edit_zero.edit_data.check.rules import RowRules
from qwen_edit_zero.edit_data.check.texts import LANGUAGES, TOKEN_LIMIT, estimated_tokens, language_of
from qwen_edit_zero.edit_data.instructions.safety import Finding
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.alignment import Frames, Size
from qwen_edit_zero.edit_data.pictures.draws import names_a_side

_ENLARGED = 4.0  # by so much over its own pixels a picture is small
_OTHER_SCALE = 4.0  # ratio of pixels

Remark = tuple[str, str]  # (kind, what)
Measure = npt.NDArray[np.void]


@dataclass
class Row:
    """A row with all that is known of it; lists begin with the target, then come the references.

    Attributes:
        digests: of the contents; that of the mask comes last.
        sizes: upright (width, height).
        texts: all that it may be trained on.
        looks: see `looks.LOOK`.
        pairs: see `pairs.PAIR`, of references that show the target's frame, by number from 1.
        mask: see `looks.LOOK`.
        length: of the instruction as it is encoded, in tokens or characters.
        verdict: what the user's classifier finds.
    """

    sample: Sample
    digests: list[bytes]
    sizes: list[Size]
    texts: tuple[str, ...]
    frames: Frames = field(default_factory=lambda: Frames((), (), (), ()))
    looks: list[Measure] = field(default_factory=list)
    pairs: dict[int, Measure] = field(default_factory=dict)
    mask: Measure | None = None
    length: int = 0
    verdict: Finding | None = None

    def name(self, slot: int) -> str:
        """What texts call a picture."""
        if slot == 0:
            return "the target"
        return "the source" if len(self.sizes) == 2 else f"reference {slot}"


def remarks_on(row: Row, rules: RowRules) -> list[Remark]:
    """Everything about one row; a kind at most once."""
    remarks = [*_of_frames(row), *_of_pictures(row, rules.making.areas.vae), *_of_texts(row, rules)]
    augment = rules.making.augment
    if rules.making.variants > 1:
        if augment.flip and names_a_side(row.texts):
            remarks.append(("never-mirrored", "its instruction, or a paraphrase, names a side or writing"))
        if augment.crop < 1 and not row.frames.aligned[0]:
            remarks.append(("never-cropped", "no reference shows the target's frame"))
    return remarks


def _of_frames(row: Row) -> list[Remark]:
    remarks = []
    width, height = row.sizes[0]
    for slot, pair in row.pairs.items():
        if row.digests[slot] == row.digests[0]:
            remarks.append(("no-change", f"the target is {row.name(slot)}, byte for byte"))
            break
        if lies_elsewhere(pair):
            remarks.append(
                ("moved", f"against {row.name(slot)} the target's content lies {_moved(pair, row.sizes[0])}")
            )
            break
        if shows_the_same(pair):
            difference = f"{float(pair['difference']):.1f} of 255 levels"
            remarks.append(("no-change", f"the target differs from {row.name(slot)} by {difference} on average"))
            break
    nearly = [slot for slot, near in enumerate(row.frames.nearly) if near]
    if nearly:
        other = row.sizes[nearly[0]]
        text = f"{row.name(nearly[0])} has {other[0]} x {other[1]} pixels, the target {width} x {height}"
        remarks.append(("nearly-aligned", text))
    elif len(row.sizes) == 2 and not row.frames.aligned[1]:
        other = row.sizes[1]
        text = f"the source has {other[0]} x {other[1]} pixels, the target {width} x {height}"
        remarks.append(("other-aspect", text))
    for slot in row.pairs:
        other = row.sizes[slot]
        ratio = other[0] * other[1] / (width * height)
        if not 1 / _OTHER_SCALE <= ratio <= _OTHER_SCALE:
            text = f"{row.name(slot)} has {other[0]} x {other[1]} pixels, the target {width} x {height}"
            remarks.append(("other-scale", text))
            break
    return remarks


def _moved(pair: Measure, size: Size) -> str:
    longest = max(size)
    across, down, zoom = (float(pair[key]) for key in ("across", "down", "zoom"))
    parts = []
    if across:
        parts.append(f"{abs(across) * longest:.1f} pixels to the {'right' if across > 0 else 'left'}")
    if down:
        parts.append(f"{abs(down) * longest:.1f} pixels {'down' if down > 0 else 'up'}")
    moved = " and ".join(parts) or "in the same place"
    return f"{moved}, and is {abs(zoom):.1%} {'larger' if zoom > 0 else 'smaller'}" if zoom else moved


def _of_pictures(row: Row, area: int) -> list[Remark]:
    remarks = []
    small = [slot for slot, (width, height) in enumerate(row.sizes) if width * height * _ENLARGED < area]
    if small:
        width, height = row.sizes[small[0]]
        text = f"{row.name(small[0])} has {width} x {height} pixels and is enlarged to an area of {area:,} pixels"
        remarks.append(("small", text))
    if 0 <= float(row.looks[0]["detail"]) < SOFT_DETAIL:
        remarks.append(("soft", "the target has no fine detail for its size"))
    blank = [slot for slot, look in enumerate(row.looks) if float(look["spread"]) < BLANK_SPREAD]
    if blank:
        remarks.append(("blank", f"{row.name(blank[0])} is of one colour"))
    if row.mask is not None:
        if int(row.mask["lightest"]) == 0:
            remarks.append(("empty-mask", "its mask is black everywhere"))
        elif int(row.mask["darkest"]) == 255:
            remarks.append(("full-mask", "its mask is white everywhere"))
    return remarks


def _of_texts(row: Row, rules: RowRules) -> list[Remark]:
    remarks = []
    prepared = rules.prepared(row.sample)
    if LANGUAGES[language_of(row.sample.instruction)] == "none":
        remarks.append(("no-words", "its instruction has no letters"))
    if rules.check_text is None:
        longest = max(row.texts, key=len)
        tokens = estimated_tokens(longest)
        if tokens > TOKEN_LIMIT:
            remarks.append(("long", f"its instruction has {len(longest):,} characters, about {tokens:,} tokens"))
    findings = (*(() if row.verdict is None else (row.verdict,)), *prepared.findings)
    if findings:
        kind = "word-filter" if rules.safety == "off" else "flagged"
        remarks.append((kind, "; ".join(str(finding) for finding in findings[:3])))
    if prepared.text != prepared.original:
        names = ", ".join(dict.fromkeys(change.rule for change in prepared.changes))
        remarks.append(("rewritten", f"by {names}" if names else "before it is encoded"))
    return remarks
