"""YAML files of rules: shipped ones that a user's file extends, and mistakes told with file, line and rule.

extends: default            # or left out: only this file's rules
disable: [simplified]       # rules of the extended file that are left out
define: {fruit: [apple, pear]}      # <<fruit>> in a pattern is (?:apple|pear); adds to an extended <<fruit>>
rules:
  - name: ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.yaml_source import parse_with_places

_MOST_BYTES, _MOST_VALUES = 8 << 20, 500_000
_KEYS = ("extends", "disable", "define", "rules")
_NAME = re.compile(r"[\w.-]+")
_DEFINED = re.compile(r"<<([\w-]+)>>")
_MOST_EXPANSIONS = 100
LANGUAGES = ("zh", "en")


@dataclass(frozen=True)
class Entry:
    """One rule as it stands in its file; knows its line for messages."""

    name: str
    values: Mapping[str, Any]
    place: str
    places: Mapping[str, str]
    defined: Mapping[str, str] = field(default_factory=dict)

    def fail(self, key: str | None, why: str) -> NoReturn:
        """Raise SettingsError: file, line, rule and `why`."""
        raise SettingsError(f"{self.places.get(key or '', self.place)}: rule {shown(self.name)}: {why}")

    def check_keys(self, known: Sequence[str]) -> None:
        """Raise SettingsError if the rule has another key."""
        for key in self.values:
            if key not in known:
                near = nearest(key, known)
                hint = f"did you mean {near}?" if near else f"a rule has: {', '.join(known)}"
                self.fail(key, f"{key} is no key of a rule; {hint}")

    def text(self, key: str, default: str | None = None) -> str:
        """A text that may be left out only if there is a `default`."""
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            self.fail(None, f"it has no {key}")
        if not isinstance(value, str):
            self.fail(key, f"{key} is not a text; put it in quotes")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of `choices`; the first if left out."""
        value = self.text(key, choices[0])
        if value not in choices:
            self.fail(key, f"{key} is {shown(value)}; it must be {' or '.join(choices)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts that are not empty; none if left out."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.fail(key, f"{key} is no list; write [{value}]" if isinstance(value, str) else f"{key} is no list")
        for item in value:
            if not isinstance(item, str) or not item.strip():
                self.fail(key, f"{key} holds {item!r}, which is no text; put it in quotes")
        return tuple(value)

    def languages(self) -> tuple[str, ...]:
        """Languages that the rule is for; all if left out."""
        found = self.texts("languages")
        for language in found:
            if language not in LANGUAGES:
                self.fail("languages", f"languages holds {shown(language)}; there are {' and '.join(LANGUAGES)}")
        return found

    def regex(self, key: str, text: str) -> re.Pattern[str]:
        """Compile a pattern, `<<name>>` standing for what the file defines; letter case does not count."""

        source, depth = text, 0
        while found := _DEFINED.search(source):
            if found[1] not in self.defined:
                near = nearest(found[1], self.defined)
                hint = f"did you mean <<{near}>>?" if near else "add it to the file's define"
                self.fail(key, f"<<{found[1]}>> is not defined; {hint}")
            depth += 1
            if depth > _MOST_EXPANSIONS:
                self.fail(key, f"<<{found[1]}>> is defined by itself, or by too many others")
            source = source[: found.start()] + self.defined[found[1]] + source[found.end() :]
        try:
            return re.compile(source, re.IGNORECASE)
        except re.error as error:
            self.fail(key, f"{shown(text)} is no regular expression: {error}")


def read_rules(source: Path | None, *, default: str) -> list[Entry]:
    """The rules of a file, own ones before those it extends; `source` None: the shipped file `default`.

    A rule with the name of an extended one takes its place. What the file defines under a name of the extended one is
    added to it, for the extended rules too.

    Raises:
        SettingsError: with file, line and rule.
    """
    shipped = _shipped(default)
    if source is None:
        return shipped.entries(shipped.definitions())
    own = _given(source)
    extends = own.values.get("extends")
    if extends is None:
        own.check_disabled([])
        return own.entries(own.definitions())
    if extends != "default":
        raise SettingsError(f"{own.place('extends')}: extends is {extends!r}; only default can be extended")
    texts = shipped.definitions()
    for name, more in own.definitions().items():
        texts[name] = [*more, *texts.get(name, [])]
    entries, base = own.entries(texts), shipped.entries(texts)
    left_out = {entry.name for entry in entries} | own.check_disabled([entry.name for entry in base])
    return [*entries, *(entry for entry in base if entry.name not in left_out)]


@dataclass(frozen=True)
class _File:
    """A file of rules as it was read."""

    label: str
    values: dict[str, Any]
    places: Mapping[tuple[str, ...], str]

    def place(self, *path: str) -> str:
        return self.places[path]

    def listed(self, key: str, kind: str) -> list[Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise SettingsError(f"{self.place(key)}: {key} is no list; {kind}")
        return value or []

    def entries(self, texts: Mapping[str, Sequence[str]]) -> list[Entry]:
        # the longest first, so that none hides one that begins with it
        defined = {
            name: "(?:" + "|".join(sorted(many, key=lambda text: -len(text))) + ")" for name, many in texts.items()
        }
        found: dict[str, Entry] = {}
        for i, rule in enumerate(self.listed("rules", "each rule begins with `- name: ...`")):
            entry = _entry(rule, i, self.places, defined)
            if entry.name in found:
                entry.fail("name", f"the name is that of the rule at {found[entry.name].place} too; keep one")
            found[entry.name] = entry
        return list(found.values())

    def definitions(self) -> dict[str, list[str]]:
        given = self.values.get("define") or {}
        if not isinstance(given, dict):
            raise SettingsError(f"{self.place('define')}: define is no mapping of names to lists of texts")
        found: dict[str, list[str]] = {}
        for name, texts in given.items():
            items = [texts] if isinstance(texts, str) else texts
            place = self.place("define", name)
            if not isinstance(items, list) or not items or not all(isinstance(text, str) and text for text in items):
                raise SettingsError(f"{place}: define.{name} is no list of texts; put each in quotes")
            for text in items:
                try:
                    re.compile(text)
                except re.error as error:
                    raise SettingsError(
                        f"{place}: define.{name}: {shown(text)} is no regular expression: {error}"
                    ) from None
            found[name] = list(items)
        return found

    def check_disabled(self, names: Sequence[str]) -> set[str]:
        disabled = self.listed("disable", "write names as [a, b]")
        for i, name in enumerate(disabled):
            if name not in names:
                near = nearest(str(name), names)
                hint = f"; did you mean {near}?" if near else "" if names else "; it needs extends: default"
                place = self.place("disable", str(i))
                raise SettingsError(f"{place}: disable names {name!r}, which is no extended rule{hint}")
        return set(disabled)


def _shipped(name: str) -> _File:
    text = resources.files(__package__).joinpath("rules", name).read_text(encoding="utf-8")
    return _parsed(text, name)


def _given(source: Path) -> _File:
    path = source.expanduser()
    label = str(source)
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise SettingsError(f"{label} has {size:,} bytes; a file of rules has at most {_MOST_BYTES:,}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{label} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except FileNotFoundError:
        where = f"working directory: {Path.cwd()}"
        raise SettingsError(f"the file of rules {shown(label)} does not exist ({where})") from None
    except OSError as error:
        raise SettingsError(f"the file of rules {shown(label)} cannot be read: {error.strerror or error}") from None
    return _parsed(text, label)


def _parsed(text: str, label: str) -> _File:
    values, places = parse_with_places(text, shown=label, most_values=_MOST_VALUES)
    if not isinstance(values, dict):
        raise SettingsError(f"{label} is no mapping; a file of rules has {', '.join(_KEYS)}")
    for key in values:
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            hint = f"did you mean {near}?" if near else f"a file of rules has: {', '.join(_KEYS)}"
            raise SettingsError(f"{places[key,]}: {key} is no key of a file of rules; {hint}")
    return _File(label, values, places)


def _entry(rule: Any, i: int, places: Mapping[tuple[str, ...], str], defined: Mapping[str, str]) -> Entry:
    place = places["rules", str(i)]
    if not isinstance(rule, dict):
        raise SettingsError(f"{place}: rule {i + 1} is no mapping; it begins with `- name: ...`")
    name = rule.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(f"{place}: rule {i + 1} has no name of letters, digits, '-', '_' and '.'")
    of_keys = {key: places["rules", str(i), key] for key in rule}
    return Entry(name, rule, place, of_keys, defined)
