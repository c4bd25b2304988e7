from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from qwen_edit_zero.assets import cjk_font_path, demo_manifest
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.training.held_out_records import held_out_records
from qwen_edit_zero.training.report import contact_sheet, save_sample, step_folder, write_report
from qwen_edit_zero.training.report.loss_plot import _smoothed, loss_plot, read_metrics
from qwen_edit_zero.training.report.samples import read_samples, step_folders
from qwen_edit_zero.training.report.typesetting import Font, has_glyph

RED, GREEN, BLUE = (200, 30, 30), (30, 160, 30), (30, 30, 200)
ORANGE, VIOLET = (240, 140, 20), (130, 30, 160)


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> Image.Image:
    return Image.new("RGB", size, colour)


def save(folder: Path, index: int, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "id": f"sample-{index}", "category": "recolour", "instruction": "把背景换成雪地 make it snow",
        "references": [picture(RED)], "target": picture(GREEN), "output": picture(BLUE),
    }  # fmt: skip
    return save_sample(folder, index, **{**values, **changes})


def left_edges(sheet: Path, *colours: tuple[int, int, int]) -> list[int]:
    """Column of the leftmost pixel of each colour; fails if a colour is not on the sheet."""
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    found = []
    for colour in colours:
        hits = np.argwhere((pixels == colour).all(-1))
        assert len(hits) > 500, f"{colour} is not on the sheet"
        found.append(int(hits[:, 1].min()))
    return found


def metrics(steps: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": i, "epoch": i // 10, "samples_seen": 8 * i, "loss": 1 / i, "grad_norm": 2.0, "lr": 1e-4,
            "step_seconds": 1.0, "samples_per_second": 8.0, "data_seconds": 0.0, "tflops_per_device": 1.0,
            "memory_peak_bytes": 1, **changes,
        }
        for i in range(1, steps + 1)
    ]  # fmt: skip


def write_metrics(run: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def test_a_saved_sample_comes_back_whole(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 200)
    assert folder == tmp_path / "samples" / "step-00000200"
    save(folder, 7, references=[picture(RED), picture(ORANGE)], category=None)
    [record], unreadable = read_samples(folder)
    assert unreadable == []
    assert (record.id, record.category, record.instruction) == ("sample-7", None, "把背景换成雪地 make it snow")
    assert [p.name for p in record.references] == ["007-reference-1.png", "007-reference-2.png"]
    assert Image.open(record.references[1]).getpixel((0, 0)) == ORANGE
    assert record.target is not None
    assert Image.open(record.target).getpixel((0, 0)) == GREEN
    assert Image.open(record.output).getpixel((0, 0)) == BLUE
    names = json.loads((folder / "007.json").read_text())
    assert names["output"] == "007-output.png", "names are relative, so that the folder may move"


def test_samples_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (1000, 2, 10):
        save(tmp_path, index)
    assert [r.id for r in read_samples(tmp_path)[0]] == ["sample-2", "sample-10", "sample-1000"]


def test_a_row_shows_references_output_and_target_in_their_columns(tmp_path: Path) -> None:
    save(tmp_path, 0, references=[picture(RED), picture(ORANGE), picture(VIOLET)])
    out = contact_sheet(tmp_path, tmp_path / "sheet.png", title="demo, step 200", max_rows=10)
    edges = left_edges(out, RED, ORANGE, VIOLET, BLUE, GREEN)
    assert edges == sorted(edges)
    assert len(set(edges)) == 5


def test_small_pictures_are_enlarged_by_whole_pixels(tmp_path: Path) -> None:
    checker = Image.fromarray(np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    save(tmp_path, 0, output=checker, target=None)
    out = contact_sheet(tmp_path, tmp_path / "sheet.png", title="t", max_rows=1)
    pixels = np.asarray(Image.open(out).convert("RGB"))
    black = np.argwhere((pixels == 0).all(-1))
    top, left = black[:, 0].min(), black[:, 1].min()
    cell = pixels[top : top + 192, left : left + 192]
    assert np.array_equal(cell, np.asarray(checker.resize((192, 192), Image.Resampling.NEAREST)))


def test_every_sample_is_a_row_up_to_the_limit(tmp_path: Path) -> None:
    def height(rows: int) -> int:
        return Image.open(contact_sheet(tmp_path, tmp_path / "sheet.png", title="t", max_rows=rows)).height

    for index in range(5):
        save(tmp_path, index)
    one, two, three = height(1), height(2), height(3)
    assert two - one == three - two > 192
    assert height(5) < height(50) + 40 == height(5) + 40, "a footer says so only where rows are left out"


def test_a_sheet_survives_missing_and_damaged_files(tmp_path: Path) -> None:
    for index in range(4):
        save(tmp_path, index)
    (tmp_path / "000-output.png").unlink()
    (tmp_path / "001-target.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    (tmp_path / "002.json").write_text('{"id": "cut sho')
    (tmp_path / "003.json").write_text("[]")
    save(tmp_path, 4, references=[], category=None, target=None, instruction="")
    records, unreadable = read_samples(tmp_path)
    assert len(records) == 3
    assert [p.name for p in unreadable] == ["002.json", "003.json"]
    out = contact_sheet(tmp_path, tmp_path / "sheet.png", title="t", max_rows=9)
    left_edges(out, RED, BLUE, GREEN)


def test_pictures_of_any_shape_fit_their_cell(tmp_path: Path) -> None:
    save(
        tmp_path,
        0,
        references=[picture(RED, (1500, 40))],
        output=picture(BLUE, (33, 900)),
        target=picture(GREEN, (1, 1)),
    )
    out = contact_sheet(tmp_path, tmp_path / "sheet.png", title="t", max_rows=1)
    edges = left_edges(out, RED, BLUE, GREEN)
    assert edges == sorted(edges)
    assert Image.open(out).height < 500


def test_an_empty_folder_has_no_sheet(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no sample pictures"):
        contact_sheet(tmp_path, tmp_path / "sheet.png", title="t", max_rows=1)


def ink(text: str, size: int = 40) -> np.ndarray:
    image = Image.new("L", (size * (len(text) + 1), 2 * size), 255)
    Font(size).draw(ImageDraw.Draw(image), (size // 2, size * 3 // 2), text, "black")
    return np.asarray(image)


def test_chinese_characters_are_drawn_each_by_its_own_glyph() -> None:
    missing = Image.new("L", (80, 80), 255)
    from PIL import ImageFont

    ImageDraw.Draw(missing).text(
        (20, 60), "\U0010fffd", font=ImageFont.truetype(str(cjk_font_path()), 40), fill=0, anchor="ls"
    )
    box = np.asarray(missing)
    drawn = {c: ink(c) for c in "把背景换成雪地删除文字添加，。"}
    for character, pixels in drawn.items():
        assert (pixels < 128).sum() > 5, character
        assert not np.array_equal(pixels, box), f"{character} is the box of a missing glyph"
    assert len({pixels.tobytes() for pixels in drawn.values()}) == len(drawn)


def test_every_character_of_the_demo_instructions_has_a_glyph() -> None:
    for split in ("train", "validation"):
        for line in demo_manifest(split).read_text(encoding="utf-8").splitlines():  # type: ignore[arg-type]
            for character in json.loads(line)["instruction"]:
                assert character.isspace() or has_glyph(cjk_font_path(), character), character


def test_a_character_that_no_font_has_is_written_as_its_code_point() -> None:
    assert np.array_equal(ink("\U0010fffd" + " " * 9), ink("[U+10FFFD]"))
    assert Font(20).length("a\u200d\ufe0fb") == Font(20).length("ab"), "joiners take no room"
    assert (ink("Пример") < 128).sum() > 100


def test_wrapping_keeps_all_text_within_the_width() -> None:
    font = Font(18)
    texts = [
        "把图中的红色汽车改成蓝色，并且把背景换成雪地，最后在右上角写上“欢迎光临”四个字。",
        "Replace the background with a snowy field and keep the dog exactly where it is",
        "请把 background 换成 a snowy field，谢谢 averyveryverylongwordthatdoesnotfitanywhereatall",
    ]
    for text in texts:
        for width in (60, 120, 264):
            lines = font.wrap(text, width)
            assert "".join(lines).replace(" ", "") == text.replace(" ", "")
            assert max(map(font.length, lines)) <= width


def test_lines_break_between_words_and_not_before_closing_punctuation() -> None:
    font = Font(18)
    assert font.wrap("make it night", font.length("make it ni")) == ["make it", "night"]
    lines = font.wrap("一二三四五，六七八九十。", font.length("一二三四五"))
    assert not any(line[0] in "，。" for line in lines)
    assert font.wrap("a\nb", 100) == ["a", "b"]
    assert font.wrap("one two three four", font.length("one two"), most=2)[-1].endswith("…")


def test_metrics_are_read_past_cut_lines_and_repeated_steps(tmp_path: Path) -> None:
    rows = [*metrics(5), {**metrics(3)[2], "loss": 9.0}]
    write_metrics(tmp_path, rows, end='[1]\n"x"\n{"loss": 1}\n{"step": 6, "lo')
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in read] == [1, 2, 3, 4, 5]
    assert read[2]["loss"] == 9.0


@pytest.mark.parametrize(
    "rows",
    [
        metrics(1),
        metrics(300),
        metrics(5000),
        metrics(30, loss=math.nan, grad_norm=math.inf),
        metrics(30, loss=None, grad_norm=None, lr=None),
        [{"step": 7}],
        [{**row, "loss": None if row["step"] in (3, 4) else 1e9 if row["step"] == 5 else 0.1} for row in metrics(50)],
    ],
)
def test_any_metrics_make_a_plot(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    out = loss_plot(rows, tmp_path / "loss.png", title="demo")
    assert Image.open(out).size > (800, 400)
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_held_out_losses_are_in_the_plot_and_no_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tested = [{"step": step, "held_out_loss": loss} for step, loss in ((0, 9.0), (20, None), (40, 5.0))]
    write_metrics(
        run, [tested[0], *metrics(20), tested[1], *metrics(40)[20:], tested[2]], end='{"step": 44, "held_out_loss"'
    )
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, 41))
    assert held_out_records(run / "metrics.jsonl") == tested
    write_report(run)
    pixels = np.asarray(Image.open(run / "loss.png").convert("RGB")).reshape(-1, 3)
    orange = (np.abs(pixels.astype(int) - (0xE0, 0x8A, 0x1E)).max(1) < 12).sum()
    write_metrics(run, metrics(40))
    write_report(run)
    pixels = np.asarray(Image.open(run / "loss.png").convert("RGB")).reshape(-1, 3)
    assert (np.abs(pixels.astype(int) - (0xE0, 0x8A, 0x1E)).max(1) < 12).sum() < orange


def test_smoothing_leaves_a_constant_alone_and_bridges_gaps() -> None:
    y = np.full(400, 3.0)
    y[100:103] = math.nan
    assert np.allclose(_smoothed(y), 3.0)
    noisy = 1 + np.random.default_rng(0).normal(0, 1, 2000)
    assert abs(_smoothed(noisy)[100:-100] - 1).max() < 0.4
    assert np.isnan(_smoothed(np.full(10, math.nan))).all()


def test_the_report_is_of_the_newest_step_that_has_samples(tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    write_metrics(run, metrics(20))
    save(step_folder(run, 90), 0, output=picture(ORANGE))
    save(step_folder(run, 100), 0, output=picture(VIOLET))
    step_folder(run, 200).mkdir()
    (run / "samples" / "step-not-a-number").mkdir()
    assert [step for step, _ in step_folders(run)] == [90, 100, 200]
    assert write_report(run) == [run / "loss.png", run / "contact_sheet.png"]
    left_edges(run / "contact_sheet.png", VIOLET)


def test_a_run_that_left_nothing_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"st')
    assert write_report(tmp_path) == []
