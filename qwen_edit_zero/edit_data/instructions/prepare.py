"""What becomes of a sample's instruction before it is encoded; the same at check, cache, training and serving.

    instruction -> chat markup made harmless (always) -> normalised -> filtered
    its paraphrases, or variants by templates, likewise; and "" for caption dropout

`prepare` and `candidates` are functions of the text and the settings alone. What they make is what is encoded, so the
cache's keys, which cover the text, cover the rules too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from qwen_edit_zero.edit_data.instructions.changes import Change
from qwen_edit_zero.edit_data.instructions.choice import choose
from qwen_edit_zero.edit_data.instructions.classifier import Classifier
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.instructions.normalise import Normaliser
from qwen_edit_zero.edit_data.instructions.paraphrase import Paraphraser
from qwen_edit_zero.edit_data.instructions.safety import Finding, SafetyFilter, blocked_by
from qwen_edit_zero.edit_data.instructions.tokens import neutralise
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import DataSettings


class Instructed(Protocol):
    """What is needed of a sample."""

    @property
    def instruction(self) -> str: ...

    @property
    def paraphrases(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Prepared:
    """An instruction as it is encoded, and how it came to be.

    Attributes:
        text: what is encoded.
        original: what the user wrote; `undo(text, changes)`.
        changes: what was done, in order, each by the name of its rule.
        withheld: normalisation rules that would have changed a quotation or a number, and so did not apply.
        findings: of the safety filter, in the original and in the prepared text.
        refusal: why the row or request is refused; None if it is not.
    """

    text: str
    original: str
    changes: tuple[Change, ...] = ()
    withheld: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True)
class Candidates:
    """All texts that a sample may be trained with, the prepared instruction first, "" last under caption dropout.

    `prepared` are those that came from the row, the instruction first; `refusal` is that of the first refused one.
    """

    texts: tuple[str, ...]
    prepared: tuple[Prepared, ...]
    refusal: str | None = None


@dataclass
class Tally:
    """Counts over many instructions. Small, whatever their number; `+=` adds another rank's."""

    instructions: int = 0
    changed: int = 0
    refused: int = 0
    changes: Counter[str] = field(default_factory=Counter)  # by rule, each text counted once
    withheld: Counter[str] = field(default_factory=Counter)
    findings: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by (category, rule, level)

    def add(self, prepared: Prepared) -> None:
        """Count one instruction."""
        self.instructions += 1
        self.changed += prepared.text != prepared.original
        self.refused += prepared.refusal is not None
        self.changes.update({change.rule for change in prepared.changes})
        self.withheld.update(prepared.withheld)
        self.findings.update((found.category, found.rule, found.level) for found in prepared.findings)

    def add_verdict(self, found: Finding, *, refused: bool) -> None:
        """Count what the classifier found in the row of an instruction that is counted."""
        self.findings[found.category, found.rule, found.level] += 1
        self.refused += refused

    def __iadd__(self, other: Tally) -> Tally:
        self.instructions += other.instructions
        self.changed += other.changed
        self.refused += other.refused
        self.changes += other.changes
        self.withheld += other.withheld
        self.findings += other.findings
        return self

    def lines(self) -> list[str]:
        """The counts in words, a rule a line."""
        of = f"of {self.instructions:,} instructions"
        lines = [f"{self.changed:,} {of} changed" + (", by rule:" if self.changes else "")]
        lines += [f"  {count:>9,}  {rule}" for rule, count in _most_first(self.changes)]
        if self.withheld:
            lines.append("rules that would have changed a quotation or a number, and did not apply:")
            lines += [f"  {count:>9,}  {rule}" for rule, count in _most_first(self.withheld)]
        if self.findings:
            lines.append("found by the safety filter:")
            lines += [
                f"  {count:>9,}  {category}: {rule}{' (only flagged)' if level == 'flag' else ''}"
                for (category, rule, level), count in _most_first(self.findings)
            ]
        if self.refused:
            lines.append(f"{self.refused:,} {of} refused")
        return lines


class Instructions:
    """Everything that the settings say about instructions, read and checked once.

    Raises SettingsError if a file of rules or the classifier cannot be used.
    """

    def __init__(self, data: DataSettings) -> None:
        self._data = data
        self._normaliser = Normaliser(_file(data.normalise)) if data.normalise is not False else None
        self._filter = SafetyFilter(data.safety_rules) if data.safety != "off" else None
        self._classifier = Classifier(data.safety_classifier) if self._filter and data.safety_classifier else None
        self._paraphraser: Paraphraser | None = None
        if data.paraphrases and data.paraphrase_templates is not False:
            self._paraphraser = Paraphraser(_file(data.paraphrase_templates))
        # Templates are written for canonical forms, whether or not the instruction itself is normalised
        self._canonical = (self._normaliser or Normaliser()) if self._paraphraser else None

    def prepare(self, text: str) -> Prepared:
        """Make chat markup harmless, normalise and filter one instruction. A function of `text` and the settings."""
        harmless, changes = neutralise(text)
        current = harmless
        withheld: tuple[str, ...] = ()
        if self._normaliser is not None:
            current, more, withheld = self._normalised(self._normaliser, harmless)
            changes += more
        findings = self._findings(text, current)
        return Prepared(current, text, tuple(changes), withheld, findings, self._refusal(findings))

    def _normalised(self, normaliser: Normaliser, text: str) -> tuple[str, list[Change], tuple[str, ...]]:
        """The fixed point of normalising and making harmless, so that preparing again changes nothing."""
        current = text
        changes: list[Change] = []
        withheld: dict[str, None] = {}
        for _ in range(4):
            made = normaliser.normalise(current)
            harmless, more = neutralise(made.text)  # full-width markup is narrow now
            changes += [*made.changes, *more]
            withheld |= dict.fromkeys(made.withheld)
            if harmless == current:
                return current, changes, tuple(withheld)
            current = harmless
        return text, [], tuple(dict.fromkeys(change.rule for change in changes))

    def row_judge(self, note: Callable[[Finding], None]) -> RowJudge | None:
        """`data.safety_classifier`, to be asked about rows, if there is one; `note` is given what it finds."""
        if self._classifier is None:
            return None
        return RowJudge(self._classifier, self._data.safety == "block", note)

    def classify(self, prepared: Prepared, pictures: Sequence[Any]) -> Prepared:
        """A request to a server with the verdict of `data.safety_classifier` on it and its pictures, if there is one.

        Raises RunError if the classifier fails.
        """
        found = self._classifier.judge(prepared.original, pictures) if self._classifier else None
        if found is None:
            return prepared
        findings = (*prepared.findings, found)
        return Prepared(
            prepared.text, prepared.original, prepared.changes, prepared.withheld, findings, self._refusal(findings)
        )

    def accepted(self, text: str, pictures: Sequence[Any] = ()) -> Prepared:
        """Prepare and classify one request to a server. Raises DataError if it is refused."""
        prepared = self.classify(self.prepare(text), pictures)
        if prepared.refusal:
            raise DataError(f"the instruction is refused: {prepared.refusal}")
        return prepared

    def candidates(self, sample: Instructed) -> Candidates:
        """All texts that `sample` may be trained with; `index` says which one a draw takes.

        Each paraphrase is prepared as the instruction is; equal texts are one. Variants by templates are made for
        samples without paraphrases.
        """
        prepared = [self.prepare(sample.instruction)]
        if self._data.paraphrases:
            prepared += [self.prepare(text) for text in sample.paraphrases]
        texts = [one.text for one in prepared]
        if self._paraphraser is not None and self._canonical is not None and len(prepared) == 1:
            canonical, _, _ = self._normalised(self._canonical, texts[0])
            texts += [neutralise(variant)[0] for variant in (canonical, *self._paraphraser.variants(canonical))]
        unique = list(dict.fromkeys(text for text in texts if text))
        if self._data.caption_dropout > 0:
            unique.append("")
        return Candidates(tuple(unique), tuple(prepared), next((one.refusal for one in prepared if one.refusal), None))

    def index(self, seed: int, sample_id: str, epoch: int, draw: int, n_candidates: int) -> int:
        """Which of a sample's candidates one draw is trained with; see `choose`."""
        return choose(seed, sample_id, epoch, draw, n_candidates, self._data.caption_dropout)

    def _findings(self, original: str, prepared: str) -> tuple[Finding, ...]:
        if self._filter is None:
            return ()
        found = {finding.rule: finding for finding in self._filter.find(original)}
        if prepared != original:
            found = {finding.rule: finding for finding in self._filter.find(prepared)} | found
        return tuple(found.values())

    def _refusal(self, findings: Iterable[Finding]) -> str | None:
        return blocked_by(findings) if self._data.safety == "block" else None


def _file(setting: bool | Path) -> Path | None:
    return setting if isinstance(setting, Path) else None


def _most_first(counts: Counter[Any]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
