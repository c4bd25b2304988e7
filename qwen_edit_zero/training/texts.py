"""The texts that a sample is trained or pictured with, as `needs.Making` wants them. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from qwen_edit_zero.edit_data.instructions.prepare import Candidates, Instructions, Prepared, Tally
from qwen_edit_zero.edit_data.instructions.safety import Finding
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.errors import DataError


class TrainingTexts:
    """The texts that a training sample may be trained on, as `needs.Making` wants them.

    Attributes:
        tally: counts over the samples that were given to `count`, and what the judge finds.
        judge: the classifier of rows, if there is one.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.tally = Tally()
        self._instructions = instructions
        self.judge = instructions.row_judge(self._count_verdict)
        self._candidates = lru_cache(maxsize=1 << 14)(self._made)  # asked for several times while a row is looked at

    def __call__(self, sample: Sample) -> tuple[str, ...]:
        """All texts of a sample, in order. Raises DataError if the row is refused."""
        made = self._candidates(sample.instruction, sample.paraphrases)
        if made.refusal:
            raise DataError(made.refusal)
        return made.texts

    def prepared(self, sample: Sample) -> Prepared:
        """A sample's instruction as it is encoded, and how it came to be."""
        return self._candidates(sample.instruction, sample.paraphrases).prepared[0]

    def count(self, sample: Sample) -> None:
        """Count what was done to a sample's instruction."""
        self.tally.add(self.prepared(sample))

    def _count_verdict(self, found: Finding) -> None:
        assert self.judge is not None
        self.tally.add_verdict(found, refused=self.judge.refusal(found) is not None)

    def _made(self, instruction: str, paraphrases: tuple[str, ...]) -> Candidates:
        return self._instructions.candidates(_Texts(instruction, paraphrases))


class _Texts:
    """What of a sample decides its texts."""

    def __init__(self, instruction: str, paraphrases: tuple[str, ...]) -> None:
        self.instruction, self.paraphrases = instruction, paraphrases


class HeldOutTexts:
    """A held-out sample's instruction, and for guidance what leads away from it.

    Args:
        negative: of samples that are pictured; None: without guidance.
        pictured: ids of these.
    """

    def __init__(self, instructions: Instructions, negative: str | None, pictured: Collection[str]) -> None:
        self._instructions, self._pictured = instructions, pictured
        self._negative = () if negative is None else (negative,)

    def __call__(self, sample: Sample) -> tuple[str, ...]:
        """The texts. Raises DataError if the row is refused."""
        prepared = self._instructions.prepare(sample.instruction)
        if prepared.refusal:
            raise DataError(prepared.refusal)
        return (prepared.text, *(self._negative if sample.id in self._pictured else ()))
