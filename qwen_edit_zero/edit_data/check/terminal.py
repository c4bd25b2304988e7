"""The report on a terminal: what is wrong first, then what is in the set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qwen_edit_zero.edit_data.check.kinds import LEVELS
from qwen_edit_zero.edit_data.check.wordings import WITHOUT, labels, place, plain, reasons, seconds, share

if TYPE_CHECKING:
    from qwen_edit_zero.edit_data.check.checking import Checked
    from qwen_edit_zero.edit_data.check.summary import Share

_EXAMPLES = 3
_REASONS = 4
_MOST = 12  # lines of a table
_TITLES = {
    "refused": "Training leaves out",
    "warning": "Training takes, but look at",
    "note": "Worth knowing",
}
_LEVEL_WIDTH, _COUNT_WIDTH = 58, 10


def report_lines(checked: Checked) -> Iterator[str]:
    """The report, line by line."""
    yield checked.table.describe()
    yield verdict(checked)
    yield from finding_lines(checked)
    yield ""
    yield from _tables(checked)


def finding_lines(checked: Checked) -> Iterator[str]:
    """What was found, worst first."""
    for level in LEVELS:
        found = [f for f in checked.found if f.kind.level == level]
        if not found:
            continue
        yield ""
        yield _TITLES[level]
        for each in found:
            yield f"  {each.kind.title:<{_LEVEL_WIDTH}}{each.count:>{_COUNT_WIDTH},}  {share(each.count, checked.rows)}"
            for reason, count in reasons(each, _REASONS):
                yield f"      {count:>8,}  {plain(reason, 150)}"
            if level == "note":
                continue
            for example in each.examples[:_EXAMPLES]:
                yield f"      {place(example)}: {plain(example.text)}"


def verdict(checked: Checked) -> str:
    """One sentence."""
    if not checked.accepted + checked.warned:
        return f"none of {checked.rows:,} rows can be used"
    parts = [f"{checked.accepted:,} of {checked.rows:,} rows are clean"]
    if checked.warned:
        parts.append(f"{checked.warned:,} should be looked at")
    if checked.refused:
        parts.append(f"{checked.refused:,} are left out")
    return "; ".join(parts)


def _tables(checked: Checked) -> Iterator[str]:
    summary = checked.summary
    yield from _shares("category", summary.categories)
    yield from _shares("language", summary.languages)
    counted = sum(summary.references.values())
    rows = [(f"{n} reference{'s' if n != 1 else ''}", count) for n, count in sorted(summary.references.items())]
    yield from _counts("references", rows, counted)
    sizes = [(f"{w} x {h}", count) for (w, h), count in summary.sizes.most_common(_MOST)]
    yield from _counts("target size", sizes, counted, more=len(summary.sizes) - len(sizes))
    buckets = [
        (" + ".join(f"{w}x{h}" for w, h in bucket), count) for bucket, count in summary.buckets.most_common(_MOST)
    ]
    yield from _counts("bucket (target + references)", buckets, counted, more=len(summary.buckets) - len(buckets))
    unit = "tokens" if summary.tokens else "characters"
    lengths = zip(labels(summary.lengths), summary.lengths.counts.tolist(), strict=True)
    yield from _counts(f"instruction, {unit}", [(label, count) for label, count in lengths if count], counted)
    rate = checked.pictures / checked.seconds if checked.seconds else 0
    yield (
        f"{checked.pictures:,} pictures, {checked.decoded:,} of them decoded now, in {seconds(checked.seconds)} "
        f"({rate:,.0f} a second)"
    )


def _shares(title: str, shares: dict[str, Share]) -> Iterator[str]:
    total = sum(s.rows for s in shares.values())
    if not total or list(shares) == [""]:
        return
    yield f"  {title:<30}{'rows':>{_COUNT_WIDTH}}{'share':>9}{'left out':>10}{'look at':>10}"
    for name, found in list(shares.items())[:_MOST]:
        yield (
            f"  {plain(name or WITHOUT, 28):<30}{found.rows:>{_COUNT_WIDTH},}{share(found.rows, total):>9}"
            f"{found.refused:>10,}{found.warned:>10,}"
        )
    if len(shares) > _MOST:
        yield f"  and {len(shares) - _MOST:,} more"
    yield ""


def _counts(title: str, rows: Sequence[tuple[str, int]], total: int, *, more: int = 0) -> Iterator[str]:
    if not rows:
        return
    width = max(30, *(len(name) + 2 for name, _ in rows))
    yield f"  {title:<{width}}{'rows':>{_COUNT_WIDTH}}{'share':>9}"
    for name, count in rows:
        yield f"  {name:<{width}}{count:>{_COUNT_WIDTH},}{share(count, total):>9}"
    if more > 0:
        yield f"  and {more:,} more"
    yield ""
