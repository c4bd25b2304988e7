"""A sample of a data set, and a row that is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qwen_edit_zero.edit_data.storage.files import PictureFile, Place
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

OnError = Literal["stop", "skip"]

SKIP_HINT = "Correct them, or leave them out with data.on_error=skip"
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One edit: reference pictures in order, what to do, and the wanted picture.

    Attributes:
        id: unique in its manifest; noise and sigma are drawn from it.
        place: what the names are relative to.
        source_names: 1 to 3 reference pictures as written in the manifest, normalised, order kept.
        instruction: what to do, verbatim.
        target_name: the wanted picture.
        category: kind of edit, or None.
        weight: factor of this sample's loss, over 0.
        line: line (or row) of the manifest, from 1.
        mask_name: picture that says where the edit is, or None.
        split: the part of the data set that it belongs to, or None.
        paraphrases: other texts for the same instruction.
    """

    id: str
    place: Place
    source_names: tuple[str, ...]
    instruction: str
    target_name: str
    category: str | None = None
    weight: float = 1.0
    line: int = 0
    mask_name: str | None = None
    split: str | None = None
    paraphrases: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[PictureFile, ...]:
        """The reference pictures, in order."""
        return tuple(self.place.file(name) for name in self.source_names)

    @property
    def target(self) -> PictureFile:
        """The wanted picture."""
        return self.place.file(self.target_name)

    @property
    def mask(self) -> PictureFile | None:
        """The picture that says where the edit is."""
        return None if self.mask_name is None else self.place.file(self.mask_name)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is left out, and why.

    Attributes:
        where: what messages say instead of `line N`, for manifests of several files or without lines.
    """

    line: int
    id: str | None
    reason: str
    where: str | None = None

    def __str__(self) -> str:
        return f"{self.where or f'line {self.line}'}{f' ({shown(self.id)})' if self.id else ''}: {self.reason}"


def refuse_or_raise(refused: Sequence[Refusal], *, left: int, path: object, on_error: OnError) -> None:
    """Settle refused rows: raise under "stop", or if none are `left`; `path` is what messages call the manifest.

    Raises:
        DataError: as said; its message counts all and lists the first ten.
    """
    if refused and on_error == "stop":
        raise DataError(f"manifest {shown(str(path))}: {listed(refused)}\n{SKIP_HINT}")
    if not left:
        raise DataError(f"manifest {shown(str(path))}: no row can be used: {listed(refused)}")


def listed(refused: Sequence[Refusal]) -> str:
    """The number of refused rows, and the first ten of them, a line each."""
    lines = [f"{len(refused):,} row{'s' if len(refused) > 1 else ''} cannot be used"]
    lines += [f"  {refused[i]}" for i in range(min(_MOST_SHOWN, len(refused)))]
    if len(refused) > _MOST_SHOWN:
        lines.append(f"  and {len(refused) - _MOST_SHOWN:,} more")
    return "\n".join(lines)
