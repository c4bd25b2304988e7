"""What a check may find, how bad each is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["refused", "warning", "note"]
LEVELS: tuple[Level, ...] = ("refused", "warning", "note")


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        name: short, stable; what files hold.
        level: "refused": training leaves such a row out, or stops; "warning": it is trained on, and probably should
            not be as it is; "note": only worth knowing.
        title: in a table.
        advice: what it means and what to do.
    """

    name: str
    level: Level
    title: str
    advice: str


_ALL = (
    Kind(
        "row", "refused", "rows of the manifest that are wrong",
        "The row itself cannot be used: a key is missing, of a wrong type, or its id is that of another row.",
    ),
    Kind(
        "missing", "refused", "pictures that are not there",
        "The name leads to no file. The nearest name is given where there is one: letter case and accents count.",
    ),
    Kind(
        "picture", "refused", "pictures that cannot be used",
        "Damaged, cut short, no picture, or outside the limits of size and aspect.",
    ),
    Kind(
        "sizes", "refused", "pictures whose sizes do not go together",
        "A mask must have its target's aspect, and no picture may be so long that nothing is left of it at the areas "
        "of this run.",
    ),
    Kind(
        "instruction", "refused", "instructions that are refused",
        "Blocked by data.safety, or longer than the model takes.",
    ),
    Kind(
        "contradiction", "warning", "same pictures and instruction, other target",
        "Two rows ask for one edit of one picture and show different results; the model learns their average. Keep "
        "one, or say in the instructions how they differ.",
    ),
    Kind(
        "no-change", "warning", "target shows what its source shows",
        "The two are the same, or differ by no more than compression does: such a row teaches to do nothing.",
    ),
    Kind(
        "moved", "warning", "target is shifted or zoomed against its source",
        "What the edit leaves alone lies elsewhere in the target, so the model learns to shift and zoom. Cut or resize "
        "both alike; if the move is the edit, all is well.",
    ),
    Kind(
        "nearly-aligned", "warning", "source and target of nearly one size",
        "One of them was cut by a few pixels, or stretched. Trained as it is, each is stretched to one grid; "
        "data.align=crop takes the middle of both instead. Look at some before you choose (docs/data.md).",
    ),
    Kind(
        "other-aspect", "warning", "the only source has another aspect than the target",
        "Source and target cannot show one frame. Fine where the edit is to recompose; else cut them alike.",
    ),
    Kind(
        "other-scale", "warning", "source and target of very different resolution",
        "One has over four times the pixels of the other: the model learns to sharpen or to blur.",
    ),
    Kind(
        "small", "warning", "pictures enlarged to over twice their sides",
        "The picture has under a quarter of data.vae_area. A small target teaches blur; use larger originals, or a "
        "smaller data.vae_area.",
    ),
    Kind(
        "soft", "warning", "pictures without fine detail",
        "Nothing of the finest detail that its size could hold: enlarged before, or out of focus. As a target it "
        "teaches blur.",
    ),
    Kind(
        "blank", "warning", "pictures of one colour",
        "All pixels are of one colour but for a level or so: often a failed download or an empty layer.",
    ),
    Kind(
        "empty-mask", "warning", "masks that are black everywhere",
        "Nothing is marked, so the mask changes nothing. White marks where the target is changed.",
    ),
    Kind(
        "long", "warning", "instructions that are probably too long",
        "The model takes 1,024 tokens, and this is likely more. Counted exactly if model.path names the model.",
    ),
    Kind(
        "no-words", "warning", "instructions without words",
        "No letter and no character of a word in it: a number, a file name's rest, punctuation.",
    ),
    Kind(
        "flagged", "warning", "instructions that the word filter finds",
        "Found by data.safety and trained on all the same; data.safety=block leaves such rows out.",
    ),
    Kind(
        "twice", "warning", "the same sample again",
        "References, instruction and target are those of an earlier row: it is trained on twice as often.",
    ),
    Kind(
        "trained-on", "warning", "held-out rows whose pictures are trained on",
        "What is measured and pictured on them says nothing about new edits: take them out of one of the sets, or keep "
        "the sets apart by data.split and data.validation_split.",
    ),
    Kind(
        "id-trained-on", "warning", "held-out rows with the id of a training row",
        "If they are the same edits in other files, take them out of one of the sets.",
    ),
    Kind(
        "same-target", "note", "one target in several rows",
        "Right for sets of several ways to one result; else a copy.",
    ),
    Kind(
        "target-is-source", "note", "targets that are sources of other rows",
        "Right for edits that are made and undone. Keep such rows on one side of a split.",
    ),
    Kind(
        "word-filter", "note", "instructions that the word filter would find",
        "data.safety is off, so nothing is done about them; data.safety=flag counts them in a run, block leaves them "
        "out.",
    ),
    Kind(
        "rewritten", "note", "instructions that are changed before they are encoded",
        "By data.normalise, or because they hold the marks of a chat. `qwen-edit-zero data normalise` shows how.",
    ),
    Kind(
        "full-mask", "note", "masks that are white everywhere",
        "All of the target is marked: the same as no mask.",
    ),
    Kind(
        "never-mirrored", "note", "samples that are never mirrored",
        "Their instruction names a side, a sense of turning or writing, so data.augment.flip leaves them alone.",
    ),
    Kind(
        "never-cropped", "note", "samples that are never cropped",
        "No reference shows the target's frame, so data.augment.crop leaves them alone.",
    ),
    Kind(
        "rare-bucket", "note", "samples of sizes that few others have",
        "Fewer of one bucket than batch.global_size: they fill only a part of an optimizer step, once an epoch.",
    ),
)  # fmt: skip

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
ORDER: dict[str, int] = {name: number for number, name in enumerate(KINDS)}  # worst first
