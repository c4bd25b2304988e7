"""A classifier of the user's own, asked about instructions and their pictures (`data.safety_classifier`).

The function is called with the instruction and the row's pictures (objects with `name` and `read(limit)`): the
references in order, and the target last. It returns None or "" if all is well, a text that says what is wrong, or a
Verdict. Its attribute `version`, if it has one, tells apart what it says now from what it said before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.edit_data.instructions.safety import Finding, Level
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import RunError, SettingsError

CATEGORY = "classifier"


@dataclass(frozen=True)
class Verdict:
    """What is wrong; `level` flag is counted only, block refuses the sample under data.safety=block."""

    reason: str
    level: Level = "block"


class Classifier:
    """The function named by `data.safety_classifier`. Raises SettingsError if there is none of that name.

    Attributes:
        version: what the user declares by the function's attribute `version`, a text or a whole number; "" if nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._call = _function(name)
        version = getattr(self._call, "version", "")
        if not isinstance(version, str | int):
            raise SettingsError(
                f"data.safety_classifier {name}: its version is {version!r:.60}; it must be a text or a whole number"
            )
        self.version = str(version)

    def judge(self, instruction: str, pictures: Sequence[Any]) -> Finding | None:
        """What the function says.

        Raises:
            RunError: it raised, or returned something else than None, a text or a Verdict.
        """
        place = f"data.safety_classifier {self.name}"
        try:
            said = self._call(instruction, pictures)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RunError(f"{place} failed on the instruction {shown(instruction[:60])}: {what}") from error
        if said is None or said == "":
            return None
        if isinstance(said, str):
            said = Verdict(said)
        if not isinstance(said, Verdict) or said.level not in ("block", "flag"):
            raise RunError(
                f"{place} returned {said!r:.60} for the instruction {shown(instruction[:60])}; it must return None, a "
                "text that says what is wrong, or a Verdict"
            )
        return Finding(self.name, CATEGORY, said.level, said.reason, 0)


def _function(name: str) -> Callable[[str, Sequence[Any]], Any]:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does while it is imported
        what = f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"data.safety_classifier {name}: the module {module_name} cannot be imported ({what}). It is looked for as "
            "Python does: install it, or add its folder to PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        names = [other for other in dir(found) if not other.startswith("_")]
        if not hasattr(found, part):
            near = nearest(part, names)
            hint = f"; did you mean {near}?" if near else ""
            raise SettingsError(f"data.safety_classifier {name}: {module_name} has no {part}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise SettingsError(f"data.safety_classifier {name}: it is {type(found).__name__}, which cannot be called")
    function: Callable[[str, Sequence[Any]], Any] = found
    return function
