"""The reports: what they say, and that nothing from a manifest gets out of its place."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qwen_edit_zero.edit_data.check.page import write_page
from qwen_edit_zero.edit_data.check.terminal import report_lines
from tests.edit_data.builders import row, save, save_pictures, write_manifest
from tests.edit_data.check.checked import Outcome, check

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;</style>\u202e\x1b[31m\x07"
VOID = {"meta", "img", "br", "rect"}


class Page(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    rows = [row(i, category=f"c{i % 40}") for i in range(50)]
    save_pictures(tmp_path, rows)
    save(tmp_path / "<b>.png")
    rows.append({"id": HOSTILE, "source": "<b>.png", "target": "t1.png", "instruction": HOSTILE, "category": HOSTILE})
    rows.append(
        {"id": "gone" + HOSTILE, "source": f"{HOSTILE.replace('/', '')}.png", "target": "t1.png", "instruction": "x"}
    )
    rows.append({"id": "same", "source": "t1.png", "target": "t1.png", "instruction": "%s {} $(id) `id`"})
    rows.append({"id": 3, "source": [], "target": "t1.png", "instruction": "x"})
    return check(write_manifest(tmp_path, rows), tmp_path / "out<i>")


def page_of(outcome: Outcome) -> tuple[Page, str]:
    text = write_page(outcome.checked, [("data.vae_area", HOSTILE)]).read_text(encoding="utf-8")
    return Page(text), text


def test_hostile_text_stays_text(outcome: Outcome) -> None:
    page, text = page_of(outcome)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "iframe", "object", "link", "form", "base", "i", 'b"'})
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "img":
            assert re.fullmatch(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", attributes["src"] or "")
        if tag == "a":
            assert (attributes["href"] or "").startswith("#")
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script>alert(1)</script>" in page.text, "it is shown as it was written"


def test_the_page_needs_nothing_else(outcome: Outcome) -> None:
    page, text = page_of(outcome)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    links = [a.get("src") or a.get("href") for _, a in page.tags if "src" in a or "href" in a]
    assert [link for link in links if not (link or "").startswith(("data:", "#"))] == []
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_tells_what_was_found_with_pictures(outcome: Outcome) -> None:
    page, _ = page_of(outcome)
    for found in outcome.checked.found:
        assert found.kind.title in page.text
        assert any(a.get("id") == found.kind.name for _, a in page.tags)
    assert "line 53" in page.text
    assert "and 22 more" in page.text, "of 42 categories the 20 largest are shown"
    assert sum(tag == "img" for tag, _ in page.tags) > 4
    assert sum(tag == "svg" for tag, _ in page.tags) >= 5


def test_the_terminal_is_safe_and_tells_the_worst_first(outcome: Outcome) -> None:
    lines = list(report_lines(outcome.checked))
    text = "\n".join(lines)
    assert text.replace("\n", "").isprintable()
    places = [text.index(title) for title in ("Training leaves out", "Training takes, but look at", "category")]
    assert places == sorted(places)
    assert re.search(r"line 54.*: \"source\" is an empty list", text)
    assert "2 are left out" in lines[1]


def test_a_page_stays_small_whatever_the_number_of_findings(tmp_path: Path) -> None:
    sizes = []
    for count in (100, 400):
        folder = tmp_path / str(count)
        rows = [row(i) for i in range(count)]
        folder.mkdir()
        save(folder / "a.png")
        rows = [{**r, "source": "a.png", "target": "a.png" if i % 2 else "none.png"} for i, r in enumerate(rows)]
        outcome = check(write_manifest(folder, rows), folder / "out")
        sizes.append(len(html.unescape(page_of(outcome)[1])))
    assert abs(sizes[0] - sizes[1]) < 2000
