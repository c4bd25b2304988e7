"""Bring the many ways of saying an edit to few: by rules, each change listed; what no rule understands stays as it is.

A round runs the rules of scope `text` over the whole instruction, then tries those of scope `clause` on each clause:
the first one that matches a clause from end to end rewrites it. Rounds go on until nothing changes, so the result of a
normalisation is its own normalisation.

What never changes: quotations and other protected parts (`protect`), and numbers. A rule whose result would lack one of
them does not apply, and is named in `Normalised.withheld`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.edit_data.instructions.changes import Change, difference
from qwen_edit_zero.edit_data.instructions.protect import MASK, masked, unmasked
from qwen_edit_zero.edit_data.instructions.rule_files import Entry, read_rules
from qwen_edit_zero.edit_data.instructions.simplified import simplified
from qwen_edit_zero.edit_data.wording import shown

_KEYS = ("name", "scope", "languages", "pattern", "replacement", "builtin", "examples")
_MOST_ROUNDS = 8
LONGEST = 4000  # characters; a longer text is no instruction that a model takes, and is left alone
_LONGEST_CLAUSE = 300  # characters; a longer one is no plain order, and patterns may take long over it
_HAN = re.compile(r"[\u3400-\u9fff\U00020000-\U0002a6df]")
_LATIN = re.compile(r"[A-Za-z]")
# Where one order ends and the next begins; what stands there stays. A point or comma inside of a number is neither.
_BETWEEN = re.compile(
    r"""(\s*(?:[，。！？；：\n（）|]+|[.,!?;()]+(?=\s|$|[\u3400-\u9fff])|\s/\s)\s*
    |\s*(?:然后|接着|同时|并且|(?<![合吞兼归一])并|再)(?=[把将去加添换移删改让在给变])
    |\s+(?:and\s+then|and|then)\s+(?=(?:change|turn|make|convert|remove|delete|erase|add|insert|replace|swap|put|keep|give)\b))""",
    re.VERBOSE | re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True)
class Normalised:
    """A normalised text, what was done to it in order (see `undo`), and names of rules that were kept from applying."""

    text: str
    changes: tuple[Change, ...] = ()
    withheld: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule of a file; `apply` takes and gives masked text, None where a clause does not match."""

    name: str
    scope: str
    languages: tuple[str, ...]
    apply: Callable[[str], str | None]
    examples: tuple[tuple[str, str], ...]

    def is_for(self, text: str) -> bool:
        """Whether `text` has letters of one of the rule's languages."""
        if not self.languages:
            return True
        return ("zh" in self.languages and bool(_HAN.search(text))) or (
            "en" in self.languages and bool(_LATIN.search(text))
        )


class Normaliser:
    """The rules of a file; None: the shipped ones. Raises SettingsError with file, line and rule."""

    def __init__(self, source: Path | None = None) -> None:
        entries = read_rules(source, default="normalise.yaml")
        self.rules = tuple(_rule(entry) for entry in entries)
        for entry, rule in zip(entries, self.rules, strict=True):
            _check_examples(entry, rule)
        self._text_rules = [rule for rule in self.rules if rule.scope == "text"]
        self._clause_rules = [rule for rule in self.rules if rule.scope == "clause"]

    def normalise(self, text: str) -> Normalised:
        """The canonical form of `text`; `text` itself if no rule understands it, or if rules undo each other."""
        if len(text) > LONGEST:
            return Normalised(text)
        changes: list[Change] = []
        withheld: dict[str, None] = {}
        current = text
        for _ in range(_MOST_ROUNDS):
            before = current
            for rule in self._text_rules:
                current = _step(rule, current, changes, withheld)
            current = self._clauses(current, changes, withheld)
            if current == before:
                return Normalised(current, tuple(changes), tuple(withheld))
        return Normalised(text, (), tuple(dict.fromkeys(change.rule for change in changes)))

    def _clauses(self, text: str, changes: list[Change], withheld: dict[str, None]) -> str:
        covered, parts = masked(text)
        pieces = _BETWEEN.split(covered)
        for i in range(0, len(pieces), 2):  # delimiters stand at odd places
            clause = pieces[i]
            if not clause.strip() or len(clause) > _LONGEST_CLAUSE:
                continue
            for rule in self._clause_rules:
                new = rule.apply(clause.strip()) if rule.is_for(clause) else None
                if new is None:
                    continue
                lead = clause[: len(clause) - len(clause.lstrip())]
                candidate = lead + _cased(new, first=_begins_sentence(pieces[:i])) + clause[len(clause.rstrip()) :]
                if candidate == clause:
                    break
                if not _keeps(clause, candidate):
                    withheld[rule.name] = None
                    continue
                old_text = unmasked("".join(pieces), parts)
                pieces[i] = candidate
                changes.append(difference(rule.name, old_text, unmasked("".join(pieces), parts)))
                break
        return unmasked("".join(pieces), parts)


def _step(rule: Rule, text: str, changes: list[Change], withheld: dict[str, None]) -> str:
    if not rule.is_for(text):
        return text
    covered, parts = masked(text)
    new = rule.apply(covered)
    if new is None or new == covered:
        return text
    if not _keeps(covered, new):
        withheld[rule.name] = None
        return text
    result = unmasked(new, parts)
    changes.append(difference(rule.name, text, result))
    return result


def _keeps(old: str, new: str) -> bool:
    """Whether all protected parts and all numbers of `old` are in `new`, and no others."""
    return sorted(re.findall(MASK, old)) == sorted(re.findall(MASK, new)) and _numbers(old) == _numbers(new)


def _numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+", unicodedata.normalize("NFKC", text)))


def _begins_sentence(before: list[str]) -> bool:
    lead = "".join(before).rstrip(" ")
    return not lead or lead[-1] in ".!?。！？\n/|(（"


def _cased(text: str, *, first: bool) -> str:
    """An English order in the middle of a sentence begins with a small letter."""
    return text if first or not text[:1].isascii() else text[:1].lower() + text[1:]


def _rule(entry: Entry) -> Rule:
    entry.check_keys(_KEYS)
    scope = entry.choice("scope", ("clause", "text"))
    examples = _examples(entry)
    if "builtin" in entry.values:
        for key in ("pattern", "replacement"):
            if key in entry.values:
                entry.fail(key, f"builtin and {key} do not go together")
        name = entry.text("builtin")
        if name not in _BUILTINS:
            entry.fail("builtin", f"builtin is {shown(name)}; there are {' and '.join(_BUILTINS)}")
        if scope != "text":
            entry.fail("builtin", "a builtin works on the whole text; write scope: text")
        return Rule(entry.name, scope, entry.languages(), _BUILTINS[name], examples)
    pattern = entry.regex("pattern", entry.text("pattern"))
    return Rule(entry.name, scope, entry.languages(), _substitution(entry, pattern, scope), examples)


def _substitution(entry: Entry, pattern: re.Pattern[str], scope: str) -> Callable[[str], str | None]:
    replacement = entry.text("replacement")
    pieces = re.split(r"\{(\w+)\}", replacement)
    used = pieces[1::2]
    if "{" in "".join(pieces[::2]) or "}" in "".join(pieces[::2]):
        entry.fail("replacement", f"{shown(replacement)} has a brace outside of {{group}}")
    for name in used:
        if name not in pattern.groupindex:
            entry.fail("replacement", f"{{{name}}} is no named group of the pattern; it has {list(pattern.groupindex)}")
    for name in pattern.groupindex:
        if used.count(name) != 1:
            entry.fail(
                "replacement",
                f"the group {name} stands {used.count(name)} times in {shown(replacement)}; what a pattern captures "
                "must be kept, once. Use (?:...) for what is to go",
            )

    def render(found: re.Match[str]) -> str:
        result = pieces[0]
        for name, after in zip(used, pieces[2::2], strict=True):
            value = (found[name] or "").strip() if scope == "clause" else found[name] or ""
            start, end = found.span(name)
            source = found.string
            if scope == "clause" and value:
                lead_blank = source[start : start + 1].isspace() or source[start - 1 : start].isspace()
                tail_blank = source[end - 1 : end].isspace() or source[end : end + 1].isspace()
                result += " " * (lead_blank and _scripts_meet(result[-1:], value[0])) + value
                result += " " * (tail_blank and _scripts_meet(value[-1], after[:1]))
            else:
                result += value
            result += after
        return result

    if scope == "text":
        return lambda text: pattern.sub(render, text)

    def whole(clause: str) -> str | None:
        found = pattern.fullmatch(clause)
        return render(found) if found else None

    return whole


def _scripts_meet(left: str, right: str) -> bool:
    """Whether a blank between the two is customary: a Latin letter or digit beside a Chinese character."""
    return bool(left and right) and (left.isascii() != right.isascii()) and not (left.isspace() or right.isspace())


def _examples(entry: Entry) -> tuple[tuple[str, str], ...]:
    given = entry.values.get("examples", [])
    if not isinstance(given, list):
        entry.fail("examples", "examples is no list; write - [before, after]")
    for pair in given:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            entry.fail("examples", f"the example {pair!r} is no pair of texts; write - [before, after]")
    return tuple((before, after) for before, after in given)


def _check_examples(entry: Entry, rule: Rule) -> None:
    for before, after in rule.examples:
        covered, parts = masked(before)
        made = unmasked(rule.apply(covered) or covered, parts)
        if made != after:
            entry.fail("examples", f"its example {shown(before)} becomes {shown(made)}, not {shown(after)}")


_WIDTH = {0xFF10 + i: chr(0x30 + i) for i in range(10)} | {
    first + i: chr(ascii_first + i) for first, ascii_first in ((0xFF21, 0x41), (0xFF41, 0x61)) for i in range(26)
}

_BUILTINS: dict[str, Callable[[str], str | None]] = {
    "half-width": lambda text: text.translate(_WIDTH),
    "simplified": simplified,
}
