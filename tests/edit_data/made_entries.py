"""Entries as a cache gives them, made up."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MadeEntry:
    target_latent: torch.Tensor
    reference_latents: tuple[torch.Tensor, ...]
    prompt_embeds: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Named:
    id: str


class MadeEntries:
    """A cache in memory."""

    def __init__(self, entries: dict[Hashable, MadeEntry]) -> None:
        self.entries = entries

    def get(self, key: Hashable, /) -> MadeEntry:
        return self.entries[key]


def made_entry(seed: int, tokens: int = 5, references: int = 1) -> MadeEntry:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return MadeEntry(draw(16, 4, 6), tuple(draw(16, 4, 4 + 2 * i) for i in range(references)), draw(tokens, 8))
