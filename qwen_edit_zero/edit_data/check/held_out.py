"""What a check found in the held-out set, as part of the report on the training set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen_edit_zero.edit_data.check.checking import Checked

FOLDER = "held_out"  # in that of the results: a report of its own


@dataclass(frozen=True)
class HeldOutChecked:
    """The check of the whole held-out set.

    Attributes:
        pictured: rows that are pictured (sampling.count).
        validated: rows whose loss is computed (validation.samples); None: none is (validation.every is not set).
    """

    checked: Checked
    pictured: int
    validated: int | None

    @property
    def uses(self) -> str:
        """What a run does with the set, in words."""
        loss = (
            "the loss of none is computed (validation.every is not set)"
            if self.validated is None
            else f"the loss of {self.validated:,} is computed (validation.samples)"
        )
        return f"of {self.checked.rows:,} held-out rows a run pictures {self.pictured:,} (sampling.count); {loss}"

    def exit_status(self, *, strict: bool) -> int:
        """As of a training set; but without any usable row a run can do, unless it is to compute their loss."""
        status = self.checked.exit_status(strict=strict)
        unusable = self.checked.accepted + self.checked.warned == 0
        return 1 if unusable and self.validated is None and not strict else status


def held_out_lines(held_out: HeldOutChecked) -> Iterator[str]:
    """The held-out set on a terminal, line by line."""
    from qwen_edit_zero.edit_data.check.terminal import finding_lines, verdict

    yield "Held-out set"
    yield held_out.checked.table.describe()
    yield verdict(held_out.checked)
    yield held_out.uses
    yield from finding_lines(held_out.checked)
    yield ""
