"""The report as one HTML page: no script, nothing to load, readable offline, whatever the size of the set.

What comes from the manifest is escaped, and a content security policy forbids all that the page has no use for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_edit_zero.edit_data.check.charts import bars
from qwen_edit_zero.edit_data.check.findings import Finding, Found
from qwen_edit_zero.edit_data.check.held_out import FOLDER, HeldOutChecked
from qwen_edit_zero.edit_data.check.kinds import LEVELS
from qwen_edit_zero.edit_data.check.terminal import verdict
from qwen_edit_zero.edit_data.check.thumbnails import Thumbnail, Thumbnails
from qwen_edit_zero.edit_data.check.wordings import WITHOUT, labels, place, plain, reasons, seconds, share

if TYPE_CHECKING:
    from qwen_edit_zero.edit_data.check.checking import Checked
    from qwen_edit_zero.edit_data.check.summary import Histogram, Share

NAME = "report.html"
_MOST = 20  # rows of a table or chart
_MOST_HELD_OUT = 3  # examples of a kind in the held-out set
_WORDS = {"refused": "left out", "warning": "look at", "note": "note"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(checked: Checked, settings: Sequence[tuple[str, str]], held_out: HeldOutChecked | None = None) -> Path:
    """Write the page into the folder of the results; it appears whole or not at all. Raises OSError.

    Args:
        settings: names and values that the check depended on.
        held_out: what was found in the held-out set, whose own page is in `held_out.FOLDER`.
    """
    path = checked.out / NAME
    temporary = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for part in _page(checked, settings, held_out):
                file.write(part)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _page(checked: Checked, settings: Sequence[tuple[str, str]], held_out: HeldOutChecked | None) -> Iterator[str]:
    name = _text(checked.table.name, 120)
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Data check of {name}</title><style>{style}</style></head><body><main>"
        f"<h1>Data check of <bdi>{name}</bdi></h1>"
        f"<p>{_text(checked.table.describe(), 600)}</p>{_standing(checked)}"
    )
    thumbnails = Thumbnails(checked.table)
    yield f"<h2>Findings</h2>{_overview(checked)}"
    for level in LEVELS:
        for found in checked.found:
            if found.kind.level == level:
                yield _section(found, checked, thumbnails)
    if held_out is not None:
        yield _held_out(held_out)
    yield "<h2>What is in the set</h2>"
    yield from _charts(checked)
    rate = checked.pictures / checked.seconds if checked.seconds else 0
    told = "".join(f"<tr><th>{escape(key)}</th><td>{_text(value, 400)}</td></tr>" for key, value in settings)
    yield (
        f"<h2>How it was checked</h2><table class='plain'>{told}</table>"
        f"<p>{checked.pictures:,} pictures, {checked.decoded:,} of them decoded now, in {seconds(checked.seconds)} "
        f"({rate:,.0f} a second). All findings are in <code>findings.jsonl</code>; the clean manifest, "
        f"<code>clean.jsonl</code>, has {checked.clean_rows:,} rows.</p></main></body></html>\n"
    )


def _standing(checked: Checked) -> str:
    parts = (("clean", checked.accepted), ("warning", checked.warned), ("refused", checked.refused))
    words = {"clean": "clean", "warning": "to look at", "refused": "left out"}
    strip = "".join(
        f'<span class="{name}" style="flex-grow:{count}" title="{words[name]}: {count:,}"></span>'
        for name, count in parts
        if count
    )
    cards = "".join(
        f'<div class="card {name}"><b>{count:,}</b> {words[name]} <small>{share(count, checked.rows)}</small></div>'
        for name, count in parts
    )
    said = escape(verdict(checked))
    return f'<p class="verdict">{said}</p><div class="strip">{strip}</div><div class="cards">{cards}</div>'


def _held_out(held_out: HeldOutChecked) -> str:
    checked = held_out.checked
    texts = "".join(
        f"<li>{_text(place(finding), 200)}: <bdi>{_text(finding.text, 300)}</bdi></li>"
        for found in checked.found
        if found.kind.level != "note"
        for finding in found.examples[:_MOST_HELD_OUT]
    )
    examples = f"<ul>{texts}</ul>" if texts else ""
    return (
        f"<h2 id='held-out'>Held-out set</h2><p>{_text(checked.table.describe(), 600)}</p>{_standing(checked)}"
        f"<p>{escape(held_out.uses)}.</p>{_overview(checked, links=False)}{examples}"
        f"<p>The whole report on it is <code>{FOLDER}/{NAME}</code>.</p>"
    )


def _overview(checked: Checked, *, links: bool = True) -> str:
    if not checked.found:
        return "<p>Nothing was found.</p>"
    titles = {f.kind.name: escape(f.kind.title) for f in checked.found}
    if links:
        titles = {name: f'<a href="#{name}">{title}</a>' for name, title in titles.items()}
    rows = "".join(
        f'<tr><td><span class="badge {f.kind.level}">{_WORDS[f.kind.level]}</span></td>'
        f"<td>{titles[f.kind.name]}</td>"
        f'<td class="n">{f.count:,}</td><td class="n">{share(f.count, checked.rows)}</td></tr>'
        for f in checked.found
    )
    return f"<table><tr><th></th><th>what</th><th class='n'>rows</th><th class='n'>share</th></tr>{rows}</table>"


def _section(found: Found, checked: Checked, thumbnails: Thumbnails) -> str:
    kind = found.kind
    counted = "".join(
        f"<tr><td class='n'>{count:,}</td><td>{_text(reason, 200)}</td></tr>" for reason, count in reasons(found, 12)
    )
    examples = "".join(_example(finding, checked, thumbnails) for finding in found.examples)
    more = found.count - len(found.examples)
    rest = f"<p class='more'>and {more:,} more</p>" if more > 0 else ""
    return (
        f'<details id="{kind.name}" {"" if kind.level == "note" else "open"}><summary>'
        f'<span class="badge {kind.level}">{_WORDS[kind.level]}</span> {escape(kind.title)} '
        f"<b>{found.count:,}</b></summary><p>{escape(kind.advice)}</p>"
        f"{f'<table>{counted}</table>' if counted else ''}<div class='examples'>{examples}</div>{rest}</details>"
    )


def _example(finding: Finding, checked: Checked, thumbnails: Thumbnails) -> str:
    instruction, pictures = "", ""
    if finding.row >= 0:
        sample = checked.table[finding.row]
        instruction = f"<q><bdi>{_text(sample.instruction, 160)}</bdi></q>"
        pictures = "".join(map(_figure, thumbnails.of_row(finding.row)))
    id_ = f" · <bdi>{_text(finding.id, 80)}</bdi>" if finding.id else ""
    return (
        f"<article><header>{_text(finding.where, 120)}{id_}</header><p><bdi>{_text(finding.text, 400)}</bdi></p>"
        f"{instruction}<div class='pictures'>{pictures}</div></article>"
    )


def _figure(thumbnail: Thumbnail) -> str:
    name = _text(thumbnail.name, 200)
    if thumbnail.uri is None:
        shown = f'<div class="nothing" title="{name}">not shown</div>'
    else:
        width, height = thumbnail.sides
        shown = f'<img src="{thumbnail.uri}" width="{width}" height="{height}" alt="" title="{name}">'
    return f"<figure>{shown}<figcaption>{escape(thumbnail.label)}<br>{thumbnail.size}</figcaption></figure>"


def _charts(checked: Checked) -> Iterator[str]:
    summary = checked.summary
    total = sum(summary.references.values())
    yield '<div class="charts">'
    if list(summary.categories) != [""]:
        yield _share_table("Categories", summary.categories)
    yield _share_table("Languages of instructions", summary.languages)
    yield _chart("References", [(str(n), count) for n, count in sorted(summary.references.items())], total)
    unit = "tokens" if summary.tokens else "characters"
    yield _histogram(f"Length of instructions, {unit}", summary.lengths, total)
    yield _histogram("Targets, megapixels", summary.megapixels, total)
    yield _histogram("Targets, longer side in pixels", summary.longest, total)
    yield _histogram("Targets, width by height", summary.aspects, total)
    sizes = [(f"{w} x {h}", count) for (w, h), count in summary.sizes.most_common(_MOST)]
    yield _chart("Most frequent sizes of targets", sizes, total, of=len(summary.sizes))
    buckets = [
        (" + ".join(f"{w}x{h}" for w, h in bucket), count) for bucket, count in summary.buckets.most_common(_MOST)
    ]
    title = f"Buckets: target + references, as trained ({len(summary.buckets):,})"
    yield _chart(title, buckets, total, of=len(summary.buckets))
    yield "</div>"


def _histogram(title: str, histogram: Histogram, total: int) -> str:
    counts = histogram.counts.tolist()
    there = [i for i, count in enumerate(counts) if count]
    if not there:
        return ""
    rows = list(zip(labels(histogram), counts, strict=True))[there[0] : there[-1] + 1]
    return _chart(title, rows, total)


def _chart(title: str, rows: Sequence[tuple[str, int]], total: int, *, of: int = 0) -> str:
    if not rows:
        return ""
    more = f"<p class='more'>and {of - len(rows):,} more</p>" if of > len(rows) else ""
    return f"<section><h3>{escape(title)}</h3>{bars(rows, total, title=title)}{more}</section>"


def _share_table(title: str, shares: dict[str, Share]) -> str:
    total = sum(found.rows for found in shares.values())
    if not total:
        return ""
    rows = "".join(
        f"<tr><td><bdi>{_text(name or WITHOUT, 60)}</bdi></td><td class='n'>{found.rows:,}</td>"
        f"<td class='n'>{share(found.rows, total)}</td><td class='n'>{found.refused:,}</td>"
        f"<td class='n'>{found.warned:,}</td>"
        f"<td class='meter'><span style='width:{found.rows / total:.1%}'></span></td></tr>"
        for name, found in list(shares.items())[:_MOST]
    )
    more = f"<p class='more'>and {len(shares) - _MOST:,} more</p>" if len(shares) > _MOST else ""
    return (
        f"<section><h3>{escape(title)}</h3><table><tr><th></th><th class='n'>rows</th><th class='n'>share</th>"
        f"<th class='n'>left out</th><th class='n'>look at</th><th></th></tr>{rows}</table>{more}</section>"
    )


def _text(text: str, most: int) -> str:
    """Foreign text: on one line, cut, harmless in HTML."""
    return escape(plain(text, most), quote=True)
