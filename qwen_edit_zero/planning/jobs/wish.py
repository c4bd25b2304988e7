"""What is to be planned: a recipe, what is said beside it, the GPUs, and the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.hardware.clusters import Cluster
from qwen_edit_zero.planning.jobs.dataset import DataFacts, data_facts, why_unread
from qwen_edit_zero.planning.jobs.known import known_config, takes_several_references
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.tokens import (
    MOST_REFERENCES,
    MOST_TEXT_TOKENS,
    TOKENS_A_PICTURE,
    TOKENS_OF_TURNS,
    SampleShape,
    vision_tokens,
)
from qwen_edit_zero.settings.load import LoadedSettings, load_settings
from qwen_edit_zero.settings.models import Settings


@dataclass(frozen=True)
class Shape:
    """What is said of the samples; None: it is taken from the data, or from the settings."""

    references: int | None = None
    text_tokens: int | None = None
    aspect: float = 1.0


@dataclass(frozen=True)
class Wish:
    """A recipe on GPUs, with what the user said beside it, which stays as it is.

    Attributes:
        cluster: None if the GPUs are not known.
        config: the transformer's configuration; None: that of `model.path`.
        samples, price: as of `Plan`.
    """

    recipe: Path | None
    overrides: tuple[str, ...]
    engine: str | None
    ds: Path | None
    cluster: Cluster | None
    shape: Shape = Shape()
    config: Mapping[str, Any] | None = None
    samples: int | None = None
    price: float | None = None

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Names of the settings that the user said."""
        return frozenset(override.partition("=")[0] for override in self.overrides)

    @cached_property
    def base(self) -> LoadedSettings:
        """The recipe as it is, on no number of GPUs in particular. Raises SettingsError."""
        return load_settings(self.recipe, overrides=self.overrides, engine=self.engine, ds=self.ds)

    @cached_property
    def model(self) -> TransformerShape:
        """The model's sizes. Raises SettingsError, ModelFolderError."""
        return TransformerShape.from_config(
            known_config(self.base.settings.model.path) if self.config is None else self.config
        )

    @cached_property
    def facts(self) -> DataFacts | None:
        """What the manifest says of its samples, if it is there."""
        return data_facts(self.base.settings.data)

    @property
    def gpus(self) -> Cluster:
        """The cluster, where one is needed."""
        assert self.cluster is not None, "the command asks for GPUs first"
        return self.cluster

    @property
    def known_samples(self) -> int | None:
        """Samples of the data set: as said, or as many as the manifest has."""
        facts = self.facts
        return self.samples if self.samples is not None or facts is None or not facts.is_all else facts.rows

    @cached_property
    def sample(self) -> SampleShape:
        """The largest sample."""
        return sample_of(self.base.settings, self.shape, self.facts)

    @property
    def sample_is_from(self) -> str:
        """In words, on what `sample` stands; empty where the user said all of it."""
        return _where_from(self.base.settings, self.shape, self.facts)


def sample_of(settings: Settings, shape: Shape, facts: DataFacts | None) -> SampleShape:
    """The largest sample that these settings and what is known of the data make. Raises SettingsError."""
    data = settings.data
    several = takes_several_references(settings.model.path)
    condition_area = data.condition_area if several else data.vae_area
    references = shape.references
    if references is None:
        references = data.max_references if facts is None else facts.references
        references = references if several else 1
    text = shape.text_tokens
    if references > MOST_REFERENCES:
        what = "--references" if shape.references is not None else "data.max_references"
        raise SettingsError(f"{what} is {references:,}; the planner is meant for up to {MOST_REFERENCES}")
    if text is None and facts is not None:
        pictures = references * (vision_tokens(condition_area, shape.aspect) + TOKENS_A_PICTURE)
        text = pictures + facts.instruction_tokens + TOKENS_OF_TURNS
    if text is not None and text > MOST_TEXT_TOKENS:
        said = f"--text-tokens is {text:,}"
        if shape.text_tokens is None:
            said = f"the longest prompt of {data.manifest} has about {text:,} tokens"
        raise SettingsError(f"{said}; the planner is meant for up to {MOST_TEXT_TOKENS:,}")
    return SampleShape.of(data.vae_area, shape.aspect, references, text, condition_area)


def _where_from(settings: Settings, shape: Shape, facts: DataFacts | None) -> str:
    parts = []
    if shape.references is None:
        parts.append("data.max_references" if facts is None else "the most references of a row")
    if shape.text_tokens is None:
        parts.append("an instruction of about 50 words" if facts is None else "the longest instruction, by its words")
    if facts is None:
        return f"assumed: {' and '.join(parts)}, since {why_unread(settings.data)}" if parts else ""
    rows = f"{'' if facts.is_all else 'the first '}{facts.rows:,} {'row' if facts.rows == 1 else 'rows'}"
    rows += f" of {settings.data.manifest}"
    return f"from {rows}: {' and '.join(parts)}" if parts else ""
