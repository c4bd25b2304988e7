"""Variants of an instruction, made from its canonical form by the templates of a YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.edit_data.instructions.protect import MASK, masked, unmasked
from qwen_edit_zero.edit_data.instructions.rule_files import Entry, read_rules
from qwen_edit_zero.edit_data.wording import shown

_KEYS = ("name", "languages", "pattern", "variants", "examples")
_END = re.compile(r"\s*[.!。！]?\s*\Z")


@dataclass(frozen=True)
class _Template:
    name: str
    pattern: re.Pattern[str]
    variants: tuple[str, ...]

    def make(self, text: str) -> tuple[str, ...] | None:
        found = self.pattern.fullmatch(text)
        if found is None:
            return None
        groups = {name: (value or "").strip() for name, value in found.groupdict().items()}
        return tuple(re.sub(r"\{(\w+)\}", lambda place: groups[place[1]], variant) for variant in self.variants)


class Paraphraser:
    """Templates of a file; None: the shipped ones. Raises SettingsError with file, line and rule."""

    def __init__(self, source: Path | None = None) -> None:
        entries = read_rules(source, default="paraphrase.yaml")
        self._templates = [_template(entry) for entry in entries]
        for entry in entries:
            self._check_examples(entry)

    def variants(self, text: str) -> tuple[str, ...]:
        """Other ways to say `text`, a canonical form; none if no template fits. The first that fits makes them all.

        Quotations and other protected parts are in every variant as they are.
        """
        covered, parts = masked(text)
        end = _END.search(covered)
        assert end is not None
        marks = sorted(re.findall(MASK, covered))
        for template in self._templates:
            made = template.make(covered[: end.start()])
            if made is not None:
                kept = [one + end[0].rstrip() for one in made if sorted(re.findall(MASK, one)) == marks]
                return tuple(dict.fromkeys(whole for one in kept if (whole := unmasked(one, parts)) != text))
        return ()

    def _check_examples(self, entry: Entry) -> None:
        for pair in entry.values.get("examples", []):
            if not (
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list)
            ):
                entry.fail("examples", f"the example {pair!r} is no pair; write - [text, [variant, ...]]")
            made = _template(entry).make(pair[0])
            if list(made or ()) != pair[1]:
                entry.fail("examples", f"its example {shown(pair[0])} gives {list(made or ())}, not {pair[1]}")


def _template(entry: Entry) -> _Template:
    entry.check_keys(_KEYS)
    entry.languages()
    pattern = entry.regex("pattern", entry.text("pattern"))
    variants = entry.texts("variants")
    if not variants:
        entry.fail("variants", "it has no variants")
    for variant in variants:
        used = re.findall(r"\{(\w+)\}", variant)
        if sorted(used) != sorted(pattern.groupindex):
            entry.fail(
                "variants",
                f"{shown(variant)} must have each group of the pattern once: {', '.join(pattern.groupindex) or 'none'}",
            )
    return _Template(entry.name, pattern, variants)
