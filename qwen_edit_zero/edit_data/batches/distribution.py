"""What training really sees: how the categories of a data set share the draws of an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.batches.repeats import Repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule

_MOST_SHOWN = 30
_WITHOUT = "(without category)"


class Distribution:
    """Samples and draws by category.

    Args:
        schedule: made with these `repeats`.
        category_codes: (n,) category of each sample, as index in `categories`; "" names those without one.
    """

    def __init__(
        self,
        schedule: SampleSchedule,
        repeats: Repeats | None,
        category_codes: npt.NDArray[np.integer],
        categories: Sequence[str],
    ) -> None:
        self._schedule, self._repeats, self._categories = schedule, repeats, tuple(categories)
        self._samples = np.bincount(category_codes, minlength=len(categories))
        self._order = [c for c in np.argsort(-self._samples, kind="stable").tolist() if self._samples[c]]
        self._rates: npt.NDArray[np.float64] = self._samples.astype(np.float64)  # draws an epoch, on average
        if repeats is not None:
            members = np.bincount(repeats.groups, minlength=len(repeats.rates))
            self._rates = np.bincount(repeats.categories, members * repeats.rates, len(categories)).astype(float)

    @property
    def repeated(self) -> bool:
        """Whether samples come otherwise than once an epoch each."""
        return self._repeats is not None

    def ends_epoch(self, steps_done: int, epoch: int) -> bool:
        """Whether so many steps end this epoch."""
        return steps_done == self._schedule.steps_before_epoch(epoch + 1)

    def drawn(self, epoch: int) -> dict[str, int]:
        """Draws of each category in an epoch, largest category first."""
        draws = self._samples
        if self._repeats is not None:
            by_group = self._schedule.drawn(epoch, epoch + 1)
            draws = np.bincount(self._repeats.categories, by_group, len(self._categories)).astype(np.int64)
        return {self._categories[c]: int(draws[c]) for c in self._order}

    def line(self, epoch: int) -> str:
        """`epoch 3 drew 8001 samples: add text 25.0 %, remove 25.0 %`."""
        drawn = self.drawn(epoch)
        total = sum(drawn.values())
        shares = [f"{name or _WITHOUT} {count / total:.1%}" for name, count in drawn.items()]
        more = f" and {len(shares) - _MOST_SHOWN} more" if len(shares) > _MOST_SHOWN else ""
        return f"epoch {epoch + 1} drew {total:,} samples: {', '.join(shares[:_MOST_SHOWN])}{more}"

    def table(self) -> list[str]:
        """Lines that show, for each category, its samples, their share, its share of draws, and how often one comes."""
        total, draws = int(self._samples.sum()), float(self._rates.sum())
        rows = [
            (
                self._categories[c] or _WITHOUT,
                f"{self._samples[c]:,}",
                f"{self._samples[c] / total:.1%}",
                f"{self._rates[c] / draws:.1%}",
                f"{self._rates[c] / self._samples[c]:.3g}",
            )
            for c in self._order
        ]
        head = ("category", "samples", "share", "drawn", "times an epoch")
        shown = [head, *rows[:_MOST_SHOWN]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = [
            f"  {row[0]:{widths[0]}}  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
            for row in shown
        ]
        return lines if len(rows) <= _MOST_SHOWN else [*lines, f"  and {len(rows) - _MOST_SHOWN} more, smaller ones"]
