"""The demo data with some of what goes wrong in the field thrown in; what docs/images/data_check.png shows.

python -m benchmarks.data_check.odd_demo FOLDER     # then: qwen-edit-zero data check FOLDER/train.jsonl ...
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from qwen_edit_zero.assets import demo_manifest

CASES = Path("tests/edit_data/cases/images")


def make(folder: Path) -> Path:
    """Copy the demo's training set into `folder`, which is made, and spoil some rows. Returns the manifest."""
    demo = demo_manifest("train")
    shutil.copytree(demo.parent / "images", folder / "images")
    rows: list[dict[str, Any]] = [json.loads(line) for line in demo.read_text(encoding="utf-8").splitlines()]
    plain = [r for r in rows if isinstance(r["source"], str) and r["category"] in ("recolour", "add_text", "remove")]
    plain.sort(key=lambda r: r["category"] != "recolour")

    def picture(name: str) -> Image.Image:
        return Image.open(folder / name).convert("RGB")

    def save(image: Image.Image, name: str) -> str:
        image.save(folder / "images" / name, quality=92)
        return f"images/{name}"

    for i, row in enumerate(plain[:8]):  # shifted or zoomed by some other tool
        target = picture(row["target"])
        w, h = target.size
        box = (5, 3, w, h) if i % 2 else (3, 3, w - 3, h - 3)
        row["target"] = save(target.resize((w, h), Image.Resampling.BICUBIC, box=box), f"moved-{i}.jpg")
    for i, row in enumerate(plain[8:13]):  # the model did nothing, and its output was compressed
        row["target"] = save(picture(row["source"]), f"nothing-{i}.jpg")
    for i, row in enumerate(plain[13:17]):  # cut to a multiple of something
        target = picture(row["target"])
        row["target"] = save(target.crop((0, 0, target.width - 6, target.height)), f"cut-{i}.jpg")
    for i, name in enumerate(
        (
            "bad_crc.png",
            "truncated_progressive.jpg",
            "zero_byte.jpg",
            "really_svg.png",
            "size_8x2048.png",
            "bit_rot.png",
        )
    ):
        shutil.copy(CASES / name, folder / "images" / name)
        plain[17 + i]["target"] = f"images/{name}"
    plain[23]["source"] = plain[23]["source"].replace("tra-", "Tra-")
    plain[24]["target"] = plain[24]["target"].replace(".jpg", ".jpeg")
    plain[25]["target"] = save(Image.new("RGB", (128, 128), "#7f7f7f"), "grey.jpg")
    plain[26]["source"] = save(picture(plain[26]["source"]).resize((48, 48)), "small.jpg")
    plain[27]["instruction"] = "<script>alert('x')</script> " + plain[27]["instruction"]
    plain[28]["instruction"] = "1234 ..."
    rows += [{**plain[30], "id": "again"}, {**plain[31], "id": "other", "target": plain[32]["target"]}]
    rows += [{**plain[33], "id": "empty", "instruction": " "}, {**plain[34], "id": plain[35]["id"]}]
    manifest = folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return manifest


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
