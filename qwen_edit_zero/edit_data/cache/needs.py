"""Which entries samples need: keys of latents, masks and embeddings, from contents, sizes and settings alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.cache.keys import latent_key, prompt_key
from qwen_edit_zero.edit_data.cache.survey import Chunk
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.alignment import CROP_LIMIT, Align, prepared_sizes
from qwen_edit_zero.edit_data.pictures.draws import PLAIN, Draw, draw_for, names_a_side
from qwen_edit_zero.edit_data.pictures.prepare import Areas, Plan, Preparation, plan
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import AugmentSettings

MAX_SHOWN_ASPECT = 200  # the limit of the vision-language model's own resizing

Texts = Callable[[Sample], tuple[str, ...]]


def instruction_alone(sample: Sample) -> tuple[str, ...]:
    """The texts of a sample that is trained on its instruction as it stands."""
    return (sample.instruction,)


@dataclass(frozen=True)
class Making:
    """What of the settings decides which pictures and texts the encoders see of a sample.

    Attributes:
        areas: in pixels; of the first variant, whose text encoder sees what the VAE sees, both are the VAE's.
        variants: versions of a sample's pictures; the first is plain, the others by `augment`, drawn by `seed`.
        texts: all that a sample may be trained on, in an order that depends on the sample alone; raises DataError if
            its row is refused.
        judge: is asked about each row whose pictures and texts can be used (`verdicts`).
    """

    areas: Areas
    align: Align = "none"
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    variants: int = 1
    seed: int = 0
    texts: Texts = instruction_alone
    judge: RowJudge | None = None

    def draws(self, sample: Sample, texts: tuple[str, ...]) -> tuple[Draw, ...]:
        """The draw of each variant of a sample with these texts."""
        if self.variants == 1:
            return (PLAIN,)
        may_flip = not (self.augment.flip and names_a_side(texts))
        return tuple(
            draw_for(self.augment, seed=self.seed, sample_id=sample.id, variant=v, may_flip=may_flip)
            for v in range(self.variants)
        )

    def plan(self, sizes: npt.NDArray[np.int32], references: int, draw: Draw) -> Plan:
        """What is done with a sample's pictures. `sizes` as a row of `Chunk.sizes`. Raises DataError."""
        target, *others = [(int(width), int(height)) for width, height in sizes]
        mask = others[-1] if others[-1] != (0, 0) else None
        made = plan(target, others[:references], areas=self.areas, draw=draw, align=self.align, mask=mask)
        for size, prepared in zip(others, made.shown, strict=False):
            if max(prepared.size) > MAX_SHOWN_ASPECT * min(prepared.size):
                raise DataError(
                    f"a reference of {size[0]} x {size[1]} pixels would be shown to the text encoder at "
                    f"{prepared.size[0]} x {prepared.size[1]}; it takes sides of at most {MAX_SHOWN_ASPECT}:1. Crop it"
                )
        return made


@dataclass
class Needs:
    """The keys of a chunk of n samples; zeros where there is nothing.

    Attributes:
        latents: (n, variants, 1 + references, 16), the target's first.
        masks: (n, variants, 16).
        texts: (n,) int32, texts of each sample.
        prompts: (sum of texts * variants, 16): sample after sample, variant after variant, text after text.
        prepared: (n, 1 + references, 2) int32, (width, height) for the VAE.
        reasons: why samples cannot be used, by number in the chunk: those of the chunk, and those found now.
    """

    latents: npt.NDArray[np.uint8]
    masks: npt.NDArray[np.uint8]
    texts: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.uint8]
    prepared: npt.NDArray[np.int32]
    reasons: dict[int, str]

    def refuse(self, reasons: Mapping[int, str]) -> None:
        """These samples, by number in the chunk, cannot be used either, and need nothing."""
        if not reasons:
            return
        gone = np.zeros(len(self.texts), bool)
        gone[list(reasons)] = True
        self.prompts = self.prompts[~np.repeat(gone, self.texts.astype(np.int64) * self.masks.shape[1])]
        self.latents[gone] = self.masks[gone] = self.texts[gone] = 0
        self.reasons.update(reasons)


def needs_of(chunk: Chunk, making: Making) -> Needs:
    """The keys of a chunk that has been surveyed."""
    n, slots = chunk.sizes.shape[:2]
    pictures = slots - 1
    sizes = chunk.sizes[:, :pictures]
    found = Needs(
        np.zeros((n, making.variants, pictures, 16), np.uint8),
        np.zeros((n, making.variants, 16), np.uint8),
        np.zeros(n, np.int32),
        np.zeros((0, 16), np.uint8),
        prepared_sizes(sizes, area=making.areas.vae, align=making.align),
        dict(chunk.reasons),
    )
    shown = prepared_sizes(sizes.reshape(-1, 1, 2), area=making.areas.condition).reshape(sizes.shape)
    there = sizes.min(-1) > 0
    fine = (found.prepared.min(-1) > 0) & (shown.min(-1) > 0) & (shown.max(-1) <= MAX_SHOWN_ASPECT * shown.min(-1))
    # Plain pictures, taken whole, need no plan each: most rows of most sets, for which this takes microseconds.
    is_plain = (fine | ~there).all(1) & (chunk.sizes[:, -1].min(-1) == 0)
    if making.align != "none":  # a part is taken of pictures that are nearly of the target's size
        near = (np.abs(sizes - sizes[:, :1]) < CROP_LIMIT).all(-1) & (sizes != sizes[:, :1]).any(-1)
        is_plain &= ~(near & there).any(1)
    prompts: list[bytes] = []
    for row, sample in enumerate(chunk.samples):
        if row in found.reasons or (len(chunk.unread) and chunk.unread[row]):
            continue
        digests = [d.tobytes() for d in chunk.digests[row]]
        references = len(sample.source_names)
        before = len(prompts)
        try:
            texts = making.texts(sample)
            for variant, draw in enumerate(making.draws(sample, texts)):
                if draw is PLAIN and is_plain[row]:
                    keys = [_plain_key(*size) for size in found.prepared[row, : 1 + references].tolist()]
                    seen = [_plain_key(*size) for size in shown[row, 1 : 1 + references].tolist()]
                else:
                    made = making.plan(chunk.sizes[row], references, draw)
                    keys = [p.key().encode() for p in (made.target, *made.references)]
                    seen = [p.key().encode() for p in made.shown]
                    if made.mask is not None:
                        mask = latent_key(digests[-1], made.mask.key().encode())
                        found.masks[row, variant] = np.frombuffer(mask, np.uint8)
                joined = b"".join(map(latent_key, digests, keys))
                found.latents[row, variant, : 1 + references] = np.frombuffer(joined, np.uint8).reshape(-1, 16)
                seen = [latent_key(digest, key) for digest, key in zip(digests[1:], seen, strict=False)]
                prompts += [prompt_key(text, seen) for text in texts]
        except DataError as error:
            found.reasons[row] = str(error)
            del prompts[before:]
            found.latents[row] = found.masks[row] = 0
            continue
        found.texts[row] = len(texts)
    found.prompts = np.frombuffer(b"".join(prompts), np.uint8).reshape(-1, 16)
    return found


@functools.lru_cache(maxsize=1 << 16)
def _plain_key(width: int, height: int) -> bytes:
    return Preparation(None, (width, height)).key().encode()
