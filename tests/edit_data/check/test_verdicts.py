"""What a check accepts, training takes; what it refuses, training leaves out: for every odd case there is."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.instructions.classifier import Classifier
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES, row, save, save_pictures, write_manifest
from tests.edit_data.cache.filling import AREAS, Encoders, fill
from tests.edit_data.check.checked import Outcome, check, make_rules, too_long

ASKED: list[str] = []


def judge(instruction: str, pictures: list[Any]) -> str | None:
    """A user's classifier."""
    ASKED.append(Path(pictures[-1].name).name)
    return "bad" if "t1" in pictures[-1].name else None


def both(manifest: Path, folder: Path, making: Making | None = None) -> Outcome:
    """Check a manifest, and have a cache filled from it; both must come to the same rows."""
    found = check(manifest, folder / "out", new_rules=partial(make_rules, making or Making(AREAS)), making=making)
    filled = fill(
        manifest, folder / "filled", on_error="skip", making=making, new_encoders=lambda: Encoders(refuse=too_long)
    )
    assert found.accepted == filled.ids
    refused = {f["id"] for f in found.findings if f["level"] == "refused" and f["kind"] != "row"}
    assert {sample.id for sample in filled.table} - set(filled.ids) == refused
    assert found.checked.accepted + found.checked.warned == len(filled.ids)
    return found


def odd_pictures() -> list[str]:
    files = [p for folder in ("images", "names", "pairs") for p in sorted((CASES / folder).rglob("*")) if p.is_file()]
    return [str(path.relative_to(CASES)) for path in files]


def test_every_odd_picture_as_source_target_and_mask(tmp_path: Path) -> None:
    for folder in ("images", "names", "pairs"):
        shutil.copytree(CASES / folder, tmp_path / folder)
    (tmp_path / "pairs/target_is_directory/target.png").mkdir(exist_ok=True)
    save(tmp_path / "fine.png")
    save(tmp_path / "other.png", (64, 64))
    odd = [*odd_pictures(), "pairs/target_is_directory/target.png", "not_there.png", "Images/bad_crc.png"]
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(odd):
        rows.append({"id": f"source-{i}", "source": name, "target": "fine.png", "instruction": f"s{i}"})
        rows.append({"id": f"target-{i}", "source": ["fine.png", "other.png"], "target": name, "instruction": f"t{i}"})
        rows.append(
            {"id": f"mask-{i}", "source": "fine.png", "target": "fine.png", "mask": name, "instruction": f"m{i}"}
        )
    found = both(write_manifest(tmp_path, rows), tmp_path)
    by_case = {name: found.kinds(f"source-{i}") for i, name in enumerate(odd)}
    assert by_case["images/bad_crc.png"] == {"picture"}
    assert by_case["images/size_8x2048.png"] == {"picture"}
    assert by_case["not_there.png"] == by_case["Images/bad_crc.png"] == {"missing"}
    assert "picture" not in by_case["images/canonical_upright.png"]
    reasons = {f["id"]: f["reason"] for f in found.findings if f["kind"] == "missing"}
    assert "letter case counts" in reasons[f"source-{odd.index('Images/bad_crc.png')}"]


def case_files(kind: str) -> list[str]:
    return sorted(path.name for path in (CASES / kind).iterdir())


@pytest.mark.parametrize(
    "name", [*(f"jsonl/{n}" for n in case_files("jsonl")), *(f"csv/{n}" for n in case_files("csv"))]
)
def test_every_odd_manifest(name: str, tmp_path: Path) -> None:
    for picture in ("a1", "a2", "a2b", "a3", "a4"):
        save(tmp_path / "s" / f"{picture}.png")
    for picture in ("a1", "a2", "a3", "a4", "a4b", "a5"):
        save(tmp_path / "t" / f"{picture}.png")
    if name.startswith("csv"):
        for i in range(4):
            save(tmp_path / "images" / f"{i}.png")
    manifest = tmp_path / Path(name).name
    manifest.write_bytes((CASES / name).read_bytes())
    try:
        open_manifest(manifest, on_error="skip")
    except DataError:  # as a whole: for all who open it
        for opener in (lambda: check(manifest, tmp_path / "out"), lambda: fill(manifest, tmp_path, on_error="skip")):
            with pytest.raises(DataError):
                opener()
        return
    found = check(manifest, tmp_path / "out")
    if not found.clean:
        assert found.checked.exit_status(strict=False) == 2
        with pytest.raises(DataError, match="no row can be used"):
            fill(manifest, tmp_path / "filled", on_error="skip")
        return
    both(manifest, tmp_path)


def test_sizes_texts_and_variants_are_judged_as_training_does(tmp_path: Path) -> None:
    sizes = {"a": (48, 32), "long": (400, 8), "near": (50, 32), "square": (64, 64), "mask": (96, 64), "wide": (8, 800)}
    for name, size in sizes.items():
        save(tmp_path / f"{name}.png", size)
    rows: list[dict[str, Any]] = [
        {"source": s, "target": t}
        for s in (["a"], ["long"], ["wide"], ["near", "a"], ["square", "long"])
        for t in sizes
    ]
    rows += [{"source": ["a"], "target": "a", "mask": m} for m in sizes]
    rows += [{"source": ["a"], "target": "a", "instruction": "too long"}]
    for i, r in enumerate(rows):
        r |= {"id": f"{i}", "instruction": r.get("instruction", f"x{i}")}
        r |= {"source": [f"{s}.png" for s in r["source"]], "target": f"{r['target']}.png"}
        if "mask" in r:
            r["mask"] += ".png"
    manifest = write_manifest(tmp_path, rows)
    found = both(manifest, tmp_path / "none")
    assert {f["kind"] for f in found.findings if f["level"] == "refused"} >= {"sizes", "instruction"}
    for i, making in enumerate((Making(AREAS, align="crop"), Making(Areas(512 * 512, 64 * 64)))):
        both(manifest, tmp_path / str(i), making)


def test_damage_beyond_the_header_is_found_before_training(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (256, 256))
    Image.effect_noise((256, 256), 90).convert("RGB").save(tmp_path / "b.jpg")
    whole = (tmp_path / "b.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    rows = [{"id": n, "source": "a.png", "target": f"{n}.jpg", "instruction": n} for n in ("b", "cut")]
    found = both(write_manifest(tmp_path, rows), tmp_path)
    assert found.kinds("cut") == {"picture"}
    assert found.accepted == ["b"]


def test_rows_of_the_manifest_that_are_wrong_are_findings_too(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    good = {"id": "a", "source": "a.png", "target": "a.png", "instruction": "x"}
    lines = [json.dumps(good), json.dumps(good), "{}", json.dumps({**good, "id": "b", "instruction": " "})]
    (tmp_path / "m.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = both(tmp_path / "m.jsonl", tmp_path)
    assert [(f["line"], f["kind"]) for f in found.findings if f["level"] == "refused"] == [
        (i, "row") for i in (2, 3, 4)
    ]
    assert found.checked.rows == 4
    assert found.checked.refused == 3


def test_what_a_classifier_said_in_a_check_training_does_not_ask_again(tmp_path: Path) -> None:
    rows = [row(i) for i in range(5)]
    save_pictures(tmp_path, rows)
    manifest = write_manifest(tmp_path, rows)
    ASKED.clear()
    making = Making(AREAS, judge=RowJudge(Classifier(f"{__name__}:judge"), blocks=True))
    found = check(manifest, tmp_path / "out", making=making, cache=tmp_path / "cache")
    assert found.kinds("a1") == {"instruction"}
    assert found.accepted == ["a0", "a2", "a3", "a4"]
    assert sorted(ASKED) == [f"t{i}.png" for i in range(5)]
    for ranks in (1, 2):
        filled = fill(manifest, tmp_path / "cache", ranks=ranks, on_error="skip", making=making)
        assert filled.ids == found.accepted
    assert len(ASKED) == 5
    ASKED.clear()
    assert fill(manifest, tmp_path / "new", ranks=2, on_error="skip", making=making).ids == found.accepted
    assert len(ASKED) == 5, "each row by one rank"
