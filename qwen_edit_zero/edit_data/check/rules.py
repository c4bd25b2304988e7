"""What a run's settings say about rows: the same functions that training decides by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.instructions.prepare import Prepared
from qwen_edit_zero.edit_data.manifests.samples import Sample


@dataclass(frozen=True)
class RowRules:
    """How rows are judged.

    Attributes:
        making: which pictures and texts training would encode.
        prepared: a sample's instruction as it is encoded, with what the word filter finds in it.
        check_text: tokens of a text; raises DataError for one that the model does not take. None: the model is not
            known.
        safety: data.safety. With "off" the findings of `prepared` have no consequence.
    """

    making: Making
    prepared: Callable[[Sample], Prepared]
    check_text: Callable[[str], int] | None
    safety: Literal["off", "flag", "block"]


NewRules = Callable[[], RowRules]  # picklable; called once in every process
