"""A filter of words and patterns for instructions. It is no moderation: docs/instructions.md says what it cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_edit_zero.edit_data.instructions.disguises import Traces, Word, latin_word, word_with_han
from qwen_edit_zero.edit_data.instructions.fold import HAN, View, compact, folded, plain
from qwen_edit_zero.edit_data.instructions.rule_files import Entry, read_rules
from qwen_edit_zero.edit_data.wording import shown

Level = Literal["block", "flag"]
_KEYS = ("name", "category", "level", "words", "pinyin", "patterns", "except", "caught", "passed")
_PIECE, _OVERLAP = 4000, 200  # characters of a text that are looked at together
_HAS_HAN = re.compile(f"[{HAN}]")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: `found` is the part of the instruction, at character `start`."""

    rule: str
    category: str
    level: Level
    found: str
    start: int

    def __str__(self) -> str:
        return f"rule {self.rule} ({self.category}) at {shown(self.found)}"


def blocked_by(findings: Iterable[Finding]) -> str | None:
    """Why a row or request with these findings is refused under data.safety=block; None if it is not."""
    blocking = [finding for finding in findings if finding.level == "block"]
    if not blocking:
        return None
    more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    return f"the instruction is blocked by {blocking[0]}{more} of data.safety"


class _Views:
    """The views of one instruction, made when first asked for."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.folded = folded(text)
        self.compact = compact(self.folded)
        self.plain = plain(self.folded)
        self.traces = Traces(self.folded.text, self.compact.text)
        self.all = tuple({view.text: view for view in (self.folded, self.compact, self.plain)}.values())


@dataclass(frozen=True)
class Rule:
    """A rule of a file. `find` gives matches as (view, start, end)."""

    name: str
    category: str
    level: Level
    words: tuple[Word, ...]
    patterns: tuple[re.Pattern[str], ...]
    exceptions: tuple[re.Pattern[str], ...]

    def find(self, views: _Views) -> Iterator[tuple[View, int, int]]:
        """Matches that no exception covers."""
        for word in self.words:
            if word.may_be_in(views.traces):
                yield from self._matches(word.pattern, (views.compact,) if word.han else (views.folded, views.compact))
        for pattern in self.patterns:
            yield from self._matches(pattern, views.all)

    def _matches(self, pattern: re.Pattern[str], views: tuple[View, ...]) -> Iterator[tuple[View, int, int]]:
        for view in views:
            excepted: list[tuple[int, int]] | None = None
            for found in pattern.finditer(view.text):
                if excepted is None:
                    excepted = [cover.span() for one in self.exceptions for cover in one.finditer(view.text)]
                start, end = found.span()
                if end > start and not any(first <= start and end <= last for first, last in excepted):
                    yield view, start, end


class SafetyFilter:
    """The rules of a file; None: the shipped ones. Raises SettingsError with file, line and rule."""

    def __init__(self, source: Path | None = None) -> None:
        entries = read_rules(source, default="safety.yaml")
        self.rules = tuple(_rule(entry) for entry in entries)
        for entry, rule in zip(entries, self.rules, strict=True):
            _check_examples(entry, rule)

    def find(self, text: str) -> tuple[Finding, ...]:
        """The first match of every rule that matches, in the order of the rules."""
        found: dict[str, Finding] = {}
        for at in range(0, max(len(text), 1), _PIECE - _OVERLAP):  # so that the time grows no faster than the text
            views = _Views(text[at : at + _PIECE])
            for rule in self.rules:
                match = None if rule.name in found else next(rule.find(views), None)
                if match is not None:
                    view, start, end = match
                    first, last = (at + i for i in view.span(start, end))
                    found[rule.name] = Finding(rule.name, rule.category, rule.level, text[first:last], first)
            if at + _PIECE >= len(text):
                break
        return tuple(found[rule.name] for rule in self.rules if rule.name in found)


def _rule(entry: Entry) -> Rule:
    entry.check_keys(_KEYS)
    level: Level = "flag" if entry.choice("level", ("block", "flag")) == "flag" else "block"
    pinyin = _pinyin(entry)
    words = []
    for text in entry.texts("words"):
        if _HAS_HAN.search(text):
            words.append(word_with_han(folded(text).text, pinyin.pop(text, None)))
        else:
            word = latin_word(folded(text).text)
            if not word.letters:
                entry.fail("words", f"{shown(text)} has no letters")
            words.append(word)
    if pinyin:
        entry.fail("pinyin", f"{shown(next(iter(pinyin)))} is none of the rule's words")
    patterns = tuple(entry.regex("patterns", text) for text in entry.texts("patterns"))
    for pattern in patterns:
        if pattern.search(""):
            entry.fail("patterns", f"{shown(pattern.pattern)} matches everything")
    if not words and not patterns:
        entry.fail(None, "it has neither words nor patterns")
    exceptions = tuple(entry.regex("except", text) for text in entry.texts("except"))
    return Rule(entry.name, entry.text("category"), level, tuple(words), patterns, exceptions)


def _pinyin(entry: Entry) -> dict[str, str]:
    given = entry.values.get("pinyin", {})
    if not isinstance(given, dict):
        entry.fail("pinyin", "pinyin is no mapping of words to syllables")
    for word, spelling in given.items():
        if not isinstance(spelling, str) or len(spelling.split()) != len(word) or not re.fullmatch("[a-z ]+", spelling):
            entry.fail(
                "pinyin", f"{spelling!r} for {shown(word)}: write one syllable a character, with blanks, without tones"
            )
    return dict(given)


def _check_examples(entry: Entry, rule: Rule) -> None:
    for key, wanted in (("caught", True), ("passed", False)):
        for text in entry.texts(key):
            if any(True for _ in rule.find(_Views(text))) != wanted:
                entry.fail(key, f"{shown(text)} is {'not ' if wanted else ''}found by the rule")
