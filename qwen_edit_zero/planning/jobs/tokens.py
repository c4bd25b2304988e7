"""How many tokens a sample has, from areas and aspects."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.jobs.model import PATCH, VAE_FACTOR

CONDITION_AREA = 384 * 384
VISION_SIDE = 28  # pixels of a token of the vision-language model, each way
INSTRUCTION_TOKENS = 65  # assumed: an instruction of about 50 English words, 1.3 tokens each
# What the pipeline's template leaves behind the 64 tokens that it drops: "Picture 1: " and two marks a picture; and
# the end of the user's turn with the beginning of the assistant's.
TOKENS_A_PICTURE, TOKENS_OF_TURNS = 7, 5
_PIXELS = PATCH * VAE_FACTOR
# Of a sample, which the planner computes with; no model was trained on as much.
MOST_REFERENCES, MOST_TEXT_TOKENS = 16, 100_000


@dataclass(frozen=True)
class SampleShape:
    """A sample as the transformer sees it.

    Attributes:
        target, references: (rows, columns) of tokens; a token is 16 x 16 pixels.
        text_tokens: of the prompt embedding, vision tokens of the references included.
    """

    target: tuple[int, int]
    references: tuple[tuple[int, int], ...]
    text_tokens: int

    @classmethod
    def of(
        cls,
        area: int,
        aspect: float = 1.0,
        references: int = 1,
        text_tokens: int | None = None,
        condition_area: int = CONDITION_AREA,
    ) -> SampleShape:
        """A target and `references` pictures of the same aspect (width / height), all of `area` pixels.

        Without `text_tokens` the prompt is an instruction of assumed length (`INSTRUCTION_TOKENS`), and for each
        reference the vision tokens of a picture of `condition_area` pixels, 28 x 28 each, and the text around it.
        Raises SettingsError if nothing would be left of a side.
        """
        width, height = calculate_dimensions(area, aspect)
        if min(width, height) < 1:
            raise SettingsError(f"a picture of {area} pixels and aspect {aspect} would be {width} x {height} pixels")
        grid = (height // _PIXELS, width // _PIXELS)
        if text_tokens is None:
            pictures = references * (vision_tokens(condition_area, aspect) + TOKENS_A_PICTURE)
            text_tokens = pictures + INSTRUCTION_TOKENS + TOKENS_OF_TURNS
        return cls(grid, (grid,) * references, text_tokens)

    @property
    def target_tokens(self) -> int:
        """Tokens of the target."""
        return math.prod(self.target)

    @property
    def image_tokens(self) -> int:
        """Tokens of the target and the references."""
        return self.target_tokens + sum(map(math.prod, self.references))

    @property
    def tokens(self) -> int:
        """All tokens that attention sees."""
        return self.image_tokens + self.text_tokens


def calculate_dimensions(area: int, aspect: float) -> tuple[int, int]:
    """(width, height) of a picture of about `area` pixels, each rounded to 32: the pipeline's own rule."""
    width = math.sqrt(area * aspect)
    height = width / aspect
    return round(width / 32) * 32, round(height / 32) * 32


def vision_tokens(area: int, aspect: float) -> int:
    """Tokens that the vision-language model makes of a picture resized to `area`: its sides rounded to 28 pixels."""
    width, height = calculate_dimensions(area, aspect)
    return max(1, round(width / VISION_SIDE)) * max(1, round(height / VISION_SIDE))
