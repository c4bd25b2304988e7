"""What chance decides about a sample's pictures: one draw for all of them, a function of seed, sample and variant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen_edit_zero.settings.models import AugmentSettings

_STEPS = 10_000  # drawn shares are whole numbers of 1 / 10,000, so that they are written exactly


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of every augmentation; the same for source, references, mask and target.

    Attributes:
        flip: mirror all pictures left to right.
        keep: share of each side that stays of the pictures of the target's frame, in 1 / 10,000.
        left, top: where the kept window lies, in 1 / 10,000 of what is cut: 0 at the left (top), 10,000 at the right.
        brightness, contrast: factors, in 1 / 10,000.
    """

    flip: bool = False
    keep: int = _STEPS
    left: int = 0
    top: int = 0
    brightness: int = _STEPS
    contrast: int = _STEPS

    def key(self) -> str:
        """The draw as a short text: equal texts, equal pictures. `plain` where nothing is changed."""
        parts = []
        if self.keep != _STEPS:
            parts.append(f"crop {self.keep} {self.left} {self.top}")
        if self.flip:
            parts.append("flip")
        if (self.brightness, self.contrast) != (_STEPS, _STEPS):
            parts.append(f"tone {self.brightness} {self.contrast}")
        return ", ".join(parts) or "plain"

    def window(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of what is kept, as shares of the sides."""
        keep, rest = self.keep / _STEPS, (1 - self.keep / _STEPS) / _STEPS
        left, top = self.left * rest, self.top * rest
        return left, top, left + keep, top + keep

    def tones(self) -> NDArray[np.uint8] | None:
        """What becomes of each of the 256 levels: (127.5 + contrast (v - 127.5)) brightness; None if nothing."""
        if (self.brightness, self.contrast) == (_STEPS, _STEPS):
            return None
        levels = 127.5 + self.contrast / _STEPS * (np.arange(256) - 127.5)
        tones: NDArray[np.uint8] = np.clip(np.rint(levels * (self.brightness / _STEPS)), 0, 255).astype(np.uint8)
        return tones


PLAIN = Draw()


def draw_for(augment: AugmentSettings, *, seed: int, sample_id: str, variant: int, may_flip: bool = True) -> Draw:
    """The draw of a sample's variant. Variant 0 is always the plain one.

    Args:
        may_flip: False for a sample whose instruction names a side (`names_a_side`); nothing else of the draw changes.
    """
    if variant == 0:
        return PLAIN
    coin, share, left, top, brightness, contrast = _uniform(f"augment {seed} {variant} {sample_id}", 6)
    lowest = round(augment.crop * _STEPS)
    spread = round(augment.colour * _STEPS)
    keep = lowest + round(share * (_STEPS - lowest))
    return Draw(
        flip=augment.flip and may_flip and coin < 0.5,
        keep=keep,
        left=round(left * _STEPS) if keep < _STEPS else 0,
        top=round(top * _STEPS) if keep < _STEPS else 0,
        brightness=_STEPS + round((2 * brightness - 1) * spread),
        contrast=_STEPS + round((2 * contrast - 1) * spread),
    )


def variant_for(*, seed: int, sample_id: str, epoch: int, draw: int, variants: int) -> int:
    """Which of a sample's cached variants, 0 to `variants` - 1, is trained on at its `draw`-th time in an epoch."""
    if variants == 1:
        return 0
    return int(_uniform(f"variant {seed} {epoch} {draw} {sample_id}", 1)[0] * variants)


_SIDES = re.compile(
    r"[左右字文写寫标標题題顺逆順读讀拼]|[东西東](?:边|邊|侧|側|面|方)|时针|時針|数字|數字|号码|號碼|二维码|二維碼|水印|商标|商標|品牌|车牌|車牌"
    r"|\b(?:left|right|leftmost|rightmost|left-hand|right-hand|leftwards?|rightwards?|(?:counter|anti)?-?clockwise"
    r"|east|west|eastern|western|texts?|words?|wording|letters?|lettering|captions?|titles?|logos?|fonts?|slogans?"
    r"|subtitles?|headlines?|watermarks?|numbers?|digits?|numerals?|alphabets?|spell(?:ed|ing)?|writ(?:e|es|ing|ten)"
    r"|say(?:s|ing)?|reads?|reading|labels?|signs?|qr|barcodes?|typography|handwriting|calligraphy|inscriptions?)\b",
    re.IGNORECASE,
)


def names_a_side(texts: Iterable[str]) -> bool:
    """Whether one of the texts names left or right, a sense of turning, or writing: such pictures are never mirrored.

    Chinese and English. Wide on purpose: a picture that could have been mirrored and is not costs nothing.
    """
    return any(_SIDES.search(text) is not None for text in texts)


def _uniform(purpose: str, count: int) -> list[float]:
    """Numbers in [0, 1) from a BLAKE2b hash of `purpose`, 53 bits each: the same in every library version."""
    digest = hashlib.blake2b(purpose.encode("utf-8", "surrogatepass"), digest_size=8 * count).digest()
    return [(int.from_bytes(digest[8 * i : 8 * i + 8], "little") >> 11) / 2**53 for i in range(count)]
